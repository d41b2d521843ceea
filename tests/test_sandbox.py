"""What may happen to a function that is run aside, with the real thing: endless loops, forks, Ctrl-C."""

from __future__ import annotations

import cProfile
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from aside import ends, fresh, meanwhile, no_trace, nobody_aside  # noqa: F401

from metaviz.core.sandbox import MOST_STUCK, Outcome, run_aside


@pytest.fixture
def stuck() -> Iterator[Callable[[], None]]:
    """A function that waits in C until the test is over: no exception gets in there."""
    gate = threading.Lock()
    gate.acquire()

    def wait() -> None:
        with gate:
            pass

    yield wait
    gate.release()
    assert ends(nobody_aside)


def test_the_value_of_a_function_is_handed_over():
    assert run_aside(lambda: 3) == Outcome(value=3, finished=True)


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException("base")]
)
def test_whatever_it_raises_is_reported_and_not_raised(error):
    def fn():
        raise error

    outcome = run_aside(fn)
    assert outcome.error is error
    assert outcome.finished and outcome.value is None


def test_endless_recursion_through_a_module_is_an_error():
    class Deep(torch.nn.Module):
        def forward(self, x):
            return self(x)

    assert isinstance(run_aside(lambda: Deep()(1), seconds=30).error, RecursionError)


def test_sys_exit_ends_neither_the_process_nor_the_caller():
    assert run_aside(sys.exit).error.code is None


def test_an_error_keeps_its_lines_but_nothing_in_its_frames_alive():
    class Big:
        pass

    seen = []

    def inner():
        big = Big()
        seen.append(weakref.ref(big))
        raise ValueError("inner")

    def fn():
        other = Big()
        seen.append(weakref.ref(other))
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    outcome = run_aside(fn)
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert str(outcome.error) == "outer" and str(outcome.error.__cause__) == "inner"
    assert outcome.error.__traceback__.tb_frame.f_code is fn.__code__


def test_a_missing_attribute_does_not_keep_its_object_alive():
    seen = []

    def fn():
        tensor = torch.empty(3)
        seen.append(weakref.ref(tensor))
        tensor.nothing_like_it  # noqa: B018

    outcome = run_aside(fn)
    gc.collect()
    assert isinstance(outcome.error, AttributeError)
    assert seen[0]() is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_members_of_an_exception_group_keep_nothing_alive():
    seen = []

    def member():
        tensor = torch.empty(3)
        seen.append(weakref.ref(tensor))
        raise ValueError("member")

    def fn():
        try:
            member()
        except ValueError as error:
            raise ExceptionGroup("several", [error]) from None  # noqa: F821

    outcome = run_aside(fn)
    gc.collect()
    assert str(outcome.error.exceptions[0]) == "member" and seen[0]() is None


def test_it_runs_with_none_of_the_modes_of_the_caller():
    def fn():
        return torch.empty(2).device.type, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with torch.device("meta"), torch.inference_mode():
        assert run_aside(fn).value == ("cpu", True, False)


def test_modes_that_it_leaves_behind_end_with_it():
    def fn():
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)

    run_aside(fn)
    assert torch.empty(2).device.type == "cpu" and torch.is_grad_enabled()


def test_a_long_sleep_is_given_up_on():
    told = """
        import threading, time
        from metaviz.core.sandbox import run_aside
        start, calls = time.monotonic(), []
        outcome = run_aside(lambda: time.sleep(60), seconds=0.2, on_abandon=lambda: calls.append(1))
        print(outcome.finished, calls, time.monotonic() - start < 30)
    """
    assert fresh(told).split() == ["False", "[1]", "True"]


def test_an_endless_loop_is_ended():
    def fn():
        while True:
            pass

    assert run_aside(fn, seconds=0.2) == Outcome()
    assert ends(nobody_aside)


def test_an_endless_loop_that_once_swallows_everything_is_ended():
    swallowed = []

    def fn():
        while True:
            try:
                while True:
                    pass
            except BaseException as error:
                if swallowed:
                    raise
                swallowed.append(type(error))

    assert not run_aside(fn, seconds=0.2).finished
    assert ends(nobody_aside)
    assert len(swallowed) == 1 and not issubclass(swallowed[0], Exception)


def test_a_function_that_ends_in_time_is_not_waited_for_longer():
    calls = []
    assert run_aside(lambda: 1, seconds=1e9, on_abandon=lambda: calls.append(1)).finished
    assert run_aside(lambda: 1, seconds=float("inf")).finished
    assert not calls


def test_with_too_many_stuck_no_other_is_started(stuck):
    called = []
    for _ in range(MOST_STUCK):
        assert not run_aside(stuck, seconds=0.01).finished
    assert run_aside(lambda: called.append(1)) == Outcome()
    assert not called


def test_once_the_stuck_ones_are_free_functions_are_started_again():
    gate = threading.Lock()

    def wait():
        with gate:
            pass

    with gate:
        for _ in range(MOST_STUCK):
            run_aside(wait, seconds=0.01)
    assert ends(nobody_aside)
    assert run_aside(lambda: 3).value == 3


def test_ctrl_c_while_waiting_gives_up_and_gets_through():
    calls, reached = [], threading.Event()
    main = threading.main_thread().ident

    def interrupt():
        reached.wait(10)
        signal.pthread_kill(main, signal.SIGINT)

    def fn():
        torch.manual_seed(1)
        reached.set()
        while True:
            pass

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        run_aside(fn, seconds=20, on_abandon=lambda: calls.append(1))
    thread.join()
    assert calls == [1] and ends(nobody_aside)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_run_aside_may_run_another_aside():
    def inner():
        print("inner")
        Path("x.txt").write_text("new")

    def fn():
        outcome = run_aside(inner)
        return outcome.refused, open(os.devnull).read(), threading.current_thread().name

    outcome = run_aside(fn)
    assert outcome.value == ("opens 'x.txt' for writing", "", "metaviz aside")
    assert outcome.refused is None


def test_one_that_runs_another_is_still_watched_afterwards():
    def fn():
        run_aside(lambda: None)
        threading.Thread(target=print).start()

    assert run_aside(fn).refused == "starts a thread"


def test_an_inner_one_gets_no_more_time_than_the_outer():
    def loop():
        while True:
            pass

    start = time.monotonic()
    assert not run_aside(lambda: run_aside(loop, seconds=1000), seconds=0.2).finished
    assert time.monotonic() - start < 100
    assert ends(nobody_aside)


def test_two_threads_may_run_functions_at_once_and_both_are_put_back(generators_stay):
    outcomes = {}

    def fn(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        time.sleep(0.05)
        return torch.initial_seed()

    def other(seed):
        outcomes[seed] = run_aside(lambda: fn(seed), seconds=20)

    threads = [threading.Thread(target=other, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: outcome.value for seed, outcome in outcomes.items()} == {1: 1, 2: 2, 3: 3}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_forked_meanwhile_can_run_functions_and_print():
    def fork():
        child = os.fork()
        if child:
            return child
        try:
            fine = run_aside(lambda: 3).value == 3 and type(sys.stdout).__name__ != "_Stream"
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)

    _, child = meanwhile(fork)
    status = []

    def over():
        status[:] = os.waitpid(child, os.WNOHANG)
        return status[0] == child

    if not ends(over):
        os.kill(child, signal.SIGKILL)
    assert status[1] == 0


def test_running_one_leaves_no_second_thread_behind():
    before = threading.active_count()
    for _ in range(50):
        run_aside(lambda: None)
        assert threading.active_count() == before


def test_a_profiler_in_the_calling_thread_does_not_hang_it():
    assert run_aside(lambda: 1).value == 1
    assert not run_aside(lambda: time.sleep(0.3), 0.05).finished
    profile = cProfile.Profile()
    profile.enable()
    try:
        assert run_aside(lambda: 2, 5).value == 2
    finally:
        profile.disable()
