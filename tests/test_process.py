"""What a function that is run aside may change in the process, and how it is afterwards."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings

import pytest
import torch
from aside import no_trace  # noqa: F401
from torch._subclasses import FakeTensorMode

import metaviz
from metaviz.core.sandbox import Outcome, run_aside


def test_generators_are_put_back(needs, generators_stay):
    numpy_random = needs("numpy.random")
    state = numpy_random.get_state()

    def fn():
        torch.manual_seed(1)
        random.seed(1)
        numpy_random.seed(1)
        return torch.rand(3), random.random(), numpy_random.rand()

    assert run_aside(fn).finished
    assert (numpy_random.get_state()[1] == state[1]).all() and numpy_random.get_state()[2:] == state[2:]


def test_generators_are_put_back_after_one_that_was_given_up_on(generators_stay):
    def fn():
        torch.manual_seed(1)
        random.seed(1)
        while True:
            pass

    assert not run_aside(fn, seconds=0.2).finished


def test_on_abandon_comes_last():
    seen = []

    def fn():
        torch.manual_seed(1)
        while True:
            pass

    before = torch.get_rng_state()
    run_aside(fn, seconds=0.1, on_abandon=lambda: seen.append(torch.equal(torch.get_rng_state(), before)))
    assert seen == [True]


@pytest.mark.parametrize(
    "mode", [lambda: torch.device("meta"), torch.inference_mode, FakeTensorMode, metaviz.recording]
)
def test_generators_are_put_back_under_the_modes_of_the_caller(mode, generators_stay):
    def fn():
        torch.manual_seed(3)
        return torch.rand(2).tolist()

    expected = torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    with mode():
        assert run_aside(fn) == Outcome(expected, finished=True)


def test_seeds_that_wait_for_a_gpu_are_put_back():
    tracker = torch.cuda._lazy_seed_tracker
    before = dict(vars(tracker))
    assert run_aside(lambda: torch.cuda.manual_seed_all(5)).error is None
    assert vars(tracker) == before


@pytest.mark.gpu
def test_the_generators_of_a_gpu_are_put_back():
    before = torch.cuda.get_rng_state()

    def fn():
        torch.manual_seed(1)
        return torch.rand(3, device="cuda").device.type

    assert run_aside(fn, seconds=20).value == "cuda"
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_what_else_it_changes_in_passing_is_put_back(monkeypatch):
    monkeypatch.setenv("METAVIZ_THERE", "before")
    monkeypatch.setenv("METAVIZ_GONE", "before")
    path, limit, filters = list(sys.path), sys.getrecursionlimit(), list(warnings.filters)

    def fn():
        os.environ["METAVIZ_THERE"] = "after"
        os.environ["METAVIZ_NEW"] = "after"
        del os.environ["METAVIZ_GONE"]
        sys.path.insert(0, "elsewhere")
        sys.setrecursionlimit(limit + 1)
        warnings.simplefilter("error")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        gc.disable()

    environ = dict(os.environ)
    assert run_aside(fn) == Outcome(finished=True)
    assert dict(os.environ) == environ
    assert (sys.path, sys.getrecursionlimit(), warnings.filters) == (path, limit, filters)
    assert torch.get_default_dtype() == torch.float32 and gc.isenabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_inner_one_does_not_hide_what_the_outer_one_changed(monkeypatch):
    monkeypatch.setenv("METAVIZ_THERE", "before")

    def change(value):
        os.environ["METAVIZ_THERE"] = value

    def fn():
        run_aside(lambda: change("inner"))
        first = os.environ["METAVIZ_THERE"]
        change("outer")
        run_aside(lambda: change("inner"))
        return first, os.environ["METAVIZ_THERE"]

    assert run_aside(fn).value == ("before", "outer")
    assert os.environ["METAVIZ_THERE"] == "before"
