"""Which threads are heard: those that print, warn and log, and those that run aside."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings

import pytest
import torch
from aside import ends, fresh, meanwhile, no_trace, nobody_aside  # noqa: F401

from metaviz.core import silence
from metaviz.core.sandbox import run_aside


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
        # What gives up on it arrives when the wait is over, and goes no further.
        with contextlib.suppress(BaseException):
            gate.acquire()
        print("late")
        printed.append(1)

    run_aside(fn, seconds=0.01)
    print("heard")
    gate.release()
    assert ends(nobody_aside) and printed
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


def test_warnings_that_come_from_cpp_are_dropped(recwarn):
    def warn():
        return torch.ones(2, requires_grad=True).mul(1).grad

    run_aside(warn)
    assert not recwarn.list
    warn()
    assert "not a leaf" in str(recwarn.pop(UserWarning).message)


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


def test_streams_may_be_exchanged_while_other_threads_print():
    code = """
        import sys, threading
        from metaviz.core.sandbox import run_aside
        over = threading.Event()
        def press():
            while not over.is_set():
                print("heard")
        threads = [threading.Thread(target=press) for _ in range(2)]
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for _ in range(100):
            run_aside(lambda: print("unheard"))
        over.set()
    """
    assert set(fresh(code).replace("heard", "heard ").split()) == {"heard"}


class Patchable(io.StringIO):
    """A stream whose attributes can be set, as that of a kernel."""


def test_a_write_that_is_replaced_and_put_back_meanwhile_never_calls_itself(monkeypatch):
    """IPython does this to the stream around each cell, while a widget's thread may be silenced."""
    real = Patchable()
    monkeypatch.setattr(sys, "stdout", real)
    silence.begin()
    before = sys.stdout.write
    heard = []
    sys.stdout.write = lambda text: (heard.append(text), before(text))[1]
    sys.stdout.write("during")
    silence.end()
    sys.stdout.write("between")
    sys.stdout.write = before
    sys.stdout.write("after")
    assert heard == ["during", "between"]
    assert real.getvalue() == "duringbetweenafter"
