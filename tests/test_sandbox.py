"""What may happen to a function that is run aside, with the real thing: endless loops, files, forks, Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import metaviz
from metaviz.core.sandbox import MOST_STUCK, Outcome, run_aside

ROOT = Path(__file__).parents[1]


def ends(done: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether ``done()`` comes true before long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if done():
            return True
        time.sleep(0.005)
    return False


def nobody_aside() -> bool:
    return not any(thread.name == "metaviz aside" for thread in threading.enumerate())


def stand_ins() -> tuple:
    return (
        sys.stdout,
        sys.stderr,
        logging.Logger.callHandlers,
        threading.Thread.start,
        list(warnings.filters),
        threading.excepthook,
    )


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    before = stand_ins()
    yield
    assert ends(nobody_aside)
    assert all(now is then or now == then for now, then in zip(stand_ins(), before, strict=True))


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


def meanwhile(act: Callable[[], Any], aside: Callable[[], None] = lambda: None) -> tuple[Outcome, Any]:
    """The outcome of ``aside``, and what ``act()`` in another thread returns while that runs."""
    entered, acted, answers = threading.Event(), threading.Event(), []

    def other() -> None:
        entered.wait(10)
        try:
            answers.append(act())
        finally:
            acted.set()

    def fn() -> None:
        aside()
        entered.set()
        acted.wait(10)
        aside()

    thread = threading.Thread(target=other)
    thread.start()
    outcome = run_aside(fn, seconds=10)
    thread.join()
    assert outcome.error is None
    return outcome, answers[0]


def fresh(code: str, *flags: str, folder: Path | None = None) -> str:
    """What a new interpreter prints that runs ``code``."""
    command = [sys.executable, *flags, "-c", textwrap.dedent(code)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), folder and str(folder))))}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


# What it returns and raises


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


# The time limit


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


# Who else is there


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


# Silence


def test_what_it_prints_goes_nowhere(capfd):
    def fn():
        print("printed")
        print("error", file=sys.stderr)
        sys.stdout.buffer.write(b"bytes")
        sys.stdout.writelines(["lines"])
        print("\udc80 no UTF-8", flush=True)

    assert run_aside(fn).error is None
    assert capfd.readouterr() == ("", "")


def test_it_may_close_what_it_prints_to():
    def fn():
        sys.stdout.close()

    assert run_aside(fn).error is None
    assert not sys.stdout.closed


def test_other_threads_print_where_they_printed(capsys):
    meanwhile(lambda: print("heard"), aside=lambda: print("unheard"))
    assert capsys.readouterr().out == "heard\n"


def test_a_thread_that_was_left_behind_prints_nowhere(capsys):
    gate = threading.Lock()
    gate.acquire()
    printed = []

    def fn():
        for _ in range(20):
            # The exception that ends the wait must not end the function.
            with contextlib.suppress(BaseException):
                gate.acquire()
                break
        print("late")
        printed.append(1)

    run_aside(fn, seconds=0.01)
    print("heard")
    gate.release()
    assert ends(nobody_aside)
    assert capsys.readouterr().out == "heard\n"


def test_a_stream_that_someone_kept_still_works(capsys):
    _, kept = meanwhile(lambda: sys.stdout)
    print("kept", file=kept)
    assert run_aside(lambda: print("unheard", file=kept)).error is None
    assert capsys.readouterr().out == "kept\n"


def test_redirected_output_of_another_thread_stays_redirected(capsys):
    kept = io.StringIO()
    before = sys.stdout

    def redirect():
        redirected = contextlib.redirect_stdout(kept)
        redirected.__enter__()
        return redirected

    _, redirected = meanwhile(redirect)
    print("redirected")
    run_aside(lambda: print("unheard"))
    redirected.__exit__(None, None, None)
    print("printed")
    run_aside(lambda: print("unheard"))
    assert kept.getvalue() == "redirected\n"
    assert sys.stdout is before
    assert capsys.readouterr().out == "printed\n"


def test_the_stream_of_a_kernel_is_itself_for_other_threads(needs, monkeypatch):
    iostream, zmq, session = needs("ipykernel.iostream"), needs("zmq"), needs("jupyter_client.session")
    context = zmq.Context()
    thread = iostream.IOPubThread(context.socket(zmq.PUB))
    thread.start()
    try:
        stream = iostream.OutStream(session.Session(), thread, "stdout", watchfd=False)
        monkeypatch.setattr(sys, "stdout", stream)

        def look():
            sys.stdout.set_parent({"header": {"msg_id": "1"}})
            sys.stdout.mark = "set by another thread"
            with pytest.raises(io.UnsupportedOperation):
                sys.stdout.fileno()
            return sys.stdout.encoding, sys.stdout.parent_header, isinstance(sys.stdout, iostream.OutStream)

        _, seen = meanwhile(look)
        assert seen == ("UTF-8", {"msg_id": "1"}, True)
        assert stream.mark == "set by another thread"
        assert sys.stdout is stream
    finally:
        thread.stop()
        thread.close()
        context.term()


def test_its_warnings_are_dropped_and_still_shown_to_who_warns_next():
    def warn():
        warnings.warn("careful", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_aside(warn).error is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run_aside(warn)
        assert not caught
        warn()
        warn()
    assert [str(warning.message) for warning in caught] == ["careful"]


def test_warnings_that_torch_raises_in_cpp_are_dropped(recwarn):
    run_aside(lambda: torch.empty(2, 3).T.new_empty(4).resize_(2, 2).grad)
    run_aside(lambda: torch.ones(2, requires_grad=True).mul(1).grad)
    assert not recwarn.list


def test_warnings_of_other_threads_are_heard():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        meanwhile(
            lambda: warnings.warn("heard", UserWarning, stacklevel=1),
            aside=lambda: warnings.warn("unheard", UserWarning, stacklevel=1),
        )
    assert [str(warning.message) for warning in caught] == ["heard"]


def test_a_thread_within_catch_warnings_meanwhile_keeps_its_filters():
    def enter():
        context = warnings.catch_warnings()
        context.__enter__()
        warnings.simplefilter("error", FutureWarning)
        return context

    before = list(warnings.filters)
    _, context = meanwhile(enter)
    with pytest.raises(FutureWarning):
        warnings.warn("soon", FutureWarning, stacklevel=1)
    context.__exit__(None, None, None)
    assert list(warnings.filters) == before


def test_its_log_is_silent_and_that_of_other_threads_is_not():
    kept = io.StringIO()
    logger, handler = logging.getLogger("metaviz.tests.sandbox"), logging.StreamHandler(kept)
    logger.addHandler(handler)
    try:
        meanwhile(lambda: logger.error("heard"), aside=lambda: logger.error("unheard"))
    finally:
        logger.removeHandler(handler)
    assert kept.getvalue() == "heard\n"


# No trace outside


def use(method: Callable[..., Any], address: tuple[str, int]) -> None:
    with socket.socket() as unused:
        method(unused, address)


def exclusive(path: str) -> None:
    with open(path, "x"):
        pass


REFUSED = {
    "opens 'new.txt' for writing": lambda: Path("new.txt").write_text("new"),
    "opens 'exclusive.txt' for writing": lambda: exclusive("exclusive.txt"),
    "opens 'there.txt' for writing": lambda: os.open("there.txt", os.O_RDWR),
    "opens 'low.txt' for writing": lambda: os.open("low.txt", os.O_CREAT),
    "opens 'file descriptor 1' for writing": lambda: os.fdopen(1, "w", closefd=False),
    "calls os.remove on 'there.txt'": lambda: os.remove("there.txt"),
    "calls os.rename on 'there.txt'": lambda: os.replace("there.txt", "b"),
    "calls os.mkdir on 'd'": lambda: Path("d").mkdir(),
    "calls os.rmdir on 'empty'": lambda: os.rmdir(b"empty/"),
    "calls os.truncate on 'there.txt'": lambda: os.truncate("there.txt", 0),
    "calls os.chmod on 'there.txt'": lambda: Path("there.txt").chmod(0),
    "calls os.utime on 'there.txt'": lambda: os.utime("there.txt", (1, 1)),
    "calls os.symlink on 'there.txt'": lambda: os.symlink("there.txt", "s"),
    "calls os.link on 'there.txt'": lambda: os.link("there.txt", "l"),
    "calls os.chdir on 'empty'": lambda: os.chdir("empty"),
    "calls shutil.rmtree on 'empty'": lambda: shutil.rmtree("empty"),
    "calls shutil.copyfile on 'there.txt'": lambda: shutil.copy("there.txt", "copy.txt"),
    "calls tempfile.mkdtemp": lambda: tempfile.mkdtemp(dir="."),
    "calls sqlite3.connect on 'db'": lambda: sqlite3.connect("db"),
    "calls os.system": lambda: os.system("echo > ran.txt"),
    "calls subprocess.Popen": lambda: subprocess.run(["touch", "ran.txt"]),
    "calls os.posix_spawn on 'touch'": lambda: os.posix_spawn("/bin/touch", ["touch", "ran.txt"], {}),
    "calls os.fork": lambda: os.fork() or os._exit(0),
    "calls os.kill": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "calls socket.connect": lambda: use(socket.socket.connect, ("127.0.0.1", 9)),
    "calls socket.bind": lambda: use(socket.socket.bind, ("127.0.0.1", 0)),
    "calls socket.getaddrinfo": lambda: socket.create_connection(("localhost", 9)),
    "calls input": lambda: input(),
    "calls breakpoint": lambda: breakpoint(),
    "calls sys.addaudithook": lambda: sys.addaudithook(print),
    "starts a thread": lambda: threading.Thread(target=print).start(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_the_world_is_refused_and_named(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.txt").write_text("as it was")
    (tmp_path / "empty").mkdir()
    before = (tmp_path / "there.txt").stat()
    outcome = run_aside(REFUSED[what], seconds=10)
    assert outcome.refused == what
    assert isinstance(outcome.error, PermissionError) and what in str(outcome.error)
    assert sorted(os.listdir(tmp_path)) == ["empty", "there.txt"]
    assert (tmp_path / "there.txt").stat() == before and Path.cwd() == tmp_path


def test_swallowing_the_refusal_does_not_hide_it(tmp_path):
    def fn():
        for name in ("first.txt", "second.txt"):
            with contextlib.suppress(OSError):
                (tmp_path / name).write_text("new")
        return "went on"

    assert run_aside(fn) == Outcome("went on", None, True, "opens 'first.txt' for writing")
    assert not list(tmp_path.iterdir())


def test_other_threads_may_write_meanwhile(tmp_path):
    meanwhile(lambda: (tmp_path / "x.txt").write_text("written"))
    assert (tmp_path / "x.txt").read_text() == "written"


def test_writing_to_the_null_device_is_no_trace():
    def fn():
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            print("gone")

    assert run_aside(fn) == Outcome(finished=True)


def test_files_that_it_reads_are_read_and_named(tmp_path):
    (tmp_path / "values.txt").write_text("1")
    outcome = run_aside(lambda: [(tmp_path / "values.txt").read_text() for _ in range(2)])
    assert outcome == Outcome(["1", "1"], None, True, None, ("values.txt",))


@pytest.mark.parametrize("flags", [(), ("-B",)])
def test_a_fresh_module_can_be_imported_and_leaves_no_bytecode(flags, tmp_path):
    (tmp_path / "table.txt").write_text("7")
    (tmp_path / "fresh.py").write_text("VALUE = int(open('table.txt').read())")
    code = """
        from metaviz.core.sandbox import run_aside
        outcome = run_aside(lambda: __import__("fresh").VALUE)
        print(outcome.value, outcome.refused, outcome.read)
    """
    assert fresh(code, *flags, folder=tmp_path).split() == ["7", "None", "()"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh.py", "table.txt"]


def test_a_module_that_writes_while_it_is_imported_is_refused_that(tmp_path):
    (tmp_path / "writes.py").write_text("open('x.txt', 'w')")
    code = """
        from metaviz.core.sandbox import run_aside
        outcome = run_aside(lambda: __import__("writes"))
        print(outcome.refused, type(outcome.error).__name__)
    """
    assert fresh(code, folder=tmp_path) == "opens 'x.txt' for writing Refused\n"
    assert not (tmp_path / "x.txt").exists()


@pytest.mark.parametrize("flags", [(), ("-B",)])
def test_the_first_ops_of_a_process_on_meta_are_refused_nothing(flags):
    code = """
        import torch
        from metaviz.core.sandbox import run_aside
        def fn():
            for init in ("kaiming_uniform_", "xavier_normal_", "dirac_", "uniform_"):
                getattr(torch.nn.init, init)(torch.empty(8, 8, 8, device="meta"))
            torch.nn.MultiheadAttention(8, 2, device="meta")._reset_parameters()
            torch.nn.LSTM(4, 4, device="meta").reset_parameters()
            torch.manual_seed(1)
        print(run_aside(fn, seconds=60))
    """
    assert fresh(code, *flags) == f"{Outcome(finished=True)}\n"


# No trace inside


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
