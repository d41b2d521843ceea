"""Casts are sorted by what they lose."""

from __future__ import annotations

import functools

import pytest
import torch
from surroundings import Constructed, rotary, run

import metaviz
from metaviz.core.around import Finding, findings


def test_casts_are_sorted_by_what_they_lose():
    model = metaviz.build(Constructed, rotary).to(torch.bfloat16)
    lost, rounded, plain = findings(model)
    assert {found.kind for found in (lost, rounded, plain)} == {"cast"}
    assert lost.paths == ("angles",)
    assert "imaginary part" in lost.reason
    assert rounded.paths == ("inv_freq",)
    assert "4 parameters and 2 other tensors that lose nothing" in plain.reason
    assert plain.fix is None


def test_the_fix_of_a_cast_keeps_the_buffers_as_the_constructor_made_them():
    make = functools.partial(Constructed, rotary)
    model = metaviz.build(make).to(torch.bfloat16)
    fix = findings(model)[0].fix.replace("type(model), *args", "make")
    model = run(Finding("cast", (), "", fix), model=model, make=make)["model"]
    assert [found.fix for found in findings(model)] == [None]
    metaviz.materialize(model)
    assert (model.layer.weight.dtype, model.inv_freq.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(model.angles, make().angles)


def test_a_cast_is_still_found_after_the_model_got_its_values():
    model = metaviz.build(Constructed, rotary).half()
    before = findings(model)
    metaviz.materialize(model)
    assert [found.paths for found in findings(model)] == [found.paths for found in before]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_cast_that_rounds_nothing_is_only_a_note(dtype):
    def table(module):
        module.register_buffer("table", torch.arange(4.0).sin())

    found = findings(metaviz.build(Constructed, table).to(dtype))
    assert [each.fix for each in found] == ([None] if dtype is torch.float64 else [])
