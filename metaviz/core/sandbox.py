"""Runs foreign code for a look: for a bounded time, in silence, and so that it leaves no trace.

The code gets a thread of its own. Torch's modes, its grad mode and its default device belong to a thread, so none of
the caller's reach it, and a thread that is stuck can be left behind. What it prints goes nowhere (`core/silence.py`),
what it would change outside of the process is refused (`core/audit.py`), and what any code may change in passing, such
as the random generators, is put back (`core/process.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from metaviz.core import audit, silence, turns
from metaviz.core.process import ProcessState

# Threads that were given up on and still run. No more are started: code that got stuck will get stuck again.
MOST_STUCK = 4
# How long a thread that is given up on may take to notice, in steps: at each it is told again.
_STEPS, _STEP_SECONDS = 10, 0.01
# How long an import may take: torch imports its compiler with the first use of some ops.
_IMPORT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a function that was run aside.

    Attributes:
        value: What it returned, None if it did not.
        error: What it raised, also SystemExit and KeyboardInterrupt. The frames of its traceback keep nothing alive.
        finished: False if it was given up on, or not started because too many others are stuck.
        refused: The first thing that it was refused, as a verb phrase: ``"opens 'x.txt' for writing"``.
        read: Base names of the files that it opened for reading, without those that imports opened.
    """

    value: Any = None
    error: BaseException | None = None
    finished: bool = False
    refused: str | None = None
    read: tuple[str, ...] = ()


def run_aside(
    fn: Callable[[], Any], seconds: float = 1.0, on_abandon: Callable[[], None] | None = None
) -> Outcome:
    """Call ``fn()`` in a thread of its own, and give up on it after ``seconds``.

    One function at a time: a second thread that comes here waits for its turn, which does not count as its time. ``fn``
    may call this, too, within its own time. Afterwards the global generators of torch, ``random`` and NumPy, torch's
    default dtype and deterministic mode, environment variables, ``sys.path``, the recursion limit, garbage collection
    and the filters of ``warnings`` are as before; what other threads did to these meanwhile is lost.

    Args:
        fn: The function. To it the file system is read-only, there is no network, and it can start no thread and no
            process: what it tries raises PermissionError in it and is noted as ``refused``. The imports that it
            causes are not held back, nor undone.
        seconds: Time limit. An exception then ends ``fn`` as soon as it runs Python code; if that takes more than a
            tenth of a second, its thread is left behind. It stays silent, but what it changes later is not undone.
        on_abandon: Called in this thread if ``fn`` was given up on, last of all.

    Returns:
        The outcome. No exception of ``fn`` is raised here.

    Raises:
        KeyboardInterrupt: Ctrl-C while waiting; ``fn`` was given up on.

    Example:
        >>> run_aside(lambda: open("x.txt", "w")).refused
        "opens 'x.txt' for writing"
    """
    outer = _here.aside
    if outer is not None:
        return _run_aside(fn, seconds, on_abandon)
    with turns.around():
        return _run_aside(fn, seconds, on_abandon)


def _run_aside(fn: Callable[[], Any], seconds: float, on_abandon: Callable[[], None] | None) -> Outcome:
    outer = _here.aside
    with _turn if outer is None else _unwatched():
        run = _Aside(fn, time.monotonic() + min(seconds, threading.TIMEOUT_MAX))
        if outer is not None:
            run.until = min(run.until, outer.until)
        if _too_many_stuck():
            return Outcome()
        audit.install()
        before = ProcessState()
        try:
            _enter(run)
            run.start()
            run.given_up = not run.wait(seconds)
        finally:
            # Whatever comes, Ctrl-C included.
            try:
                if run.given_up:
                    run.give_up()
            finally:
                before.put_back()
                run.watch.put_back_environ()
                if run.given_up and on_abandon is not None:
                    on_abandon()
        seen = run.watch.refused, tuple(run.watch.read)
        if run.given_up:
            return Outcome(None, None, False, *seen)
        # It is at its last line. Without this, a fork right after could find a second thread.
        run.join()
        return Outcome(run.value, run.error, True, *seen)


class _GivenUp(BaseException):
    """Raised in the middle of a function whose time is up."""


class _Aside(threading.Thread):
    """The thread of one function."""

    def __init__(self, fn: Callable[[], Any], until: float) -> None:
        super().__init__(name="metaviz aside", daemon=True)
        self.fn: Callable[[], Any] | None = fn
        self.until = until
        self.watch = audit.Watch()
        self.value: Any = None
        self.error: BaseException | None = None
        # Until it has ended: Ctrl-C may come at any line.
        self.given_up = True
        self.over = False
        self.interrupted = False
        self.ended = threading.Lock()
        self.ended.acquire()

    def run(self) -> None:
        _here.aside, silence.here.sink = self, silence.nowhere()
        while True:
            # The exception that gives up on it comes at any line, also after the function has ended.
            try:
                self._call()
                return self._end()
            except BaseException:
                continue

    def _call(self) -> None:
        fn, self.fn = self.fn, None
        if fn is None:
            return
        try:
            audit.here.watch = self.watch
            self.value = fn()
        except BaseException as error:
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            _forget_frames(error)

    def _end(self) -> None:
        with _lock:
            self.over = True
        # Nobody interrupts it from here on. An exception that is still on its way has to come, not to be called
        # back: Python 3.11 would go on looking for it for ever, and hang where a profiler is on.
        if self.interrupted:
            with contextlib.suppress(_GivenUp):
                _raise_in(self, _GivenUp)
                while True:
                    time.sleep(0)
        audit.here.watch = None
        _leave(self)
        self.ended.release()

    def wait(self, seconds: float) -> bool:
        """Whether it ends in time; an import that it begins is waited for, and then it has all its time again."""
        longest = time.monotonic() + _IMPORT_SECONDS
        while not self.ended.acquire(timeout=max(self.until - time.monotonic(), 0)):
            now = time.monotonic()
            if now > longest or not self.is_importing():
                return False
            self.until = now + min(seconds, _IMPORT_SECONDS)
        return True

    def is_importing(self) -> bool:
        """Whether it is in the middle of an import, which would leave half a module behind if it ended here."""
        frame = sys._current_frames().get(self.ident)
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                return True
            frame = frame.f_back
        return False

    def interrupt(self) -> None:
        with _lock:
            if self.ident is not None and not self.over and not self.is_importing():
                self.interrupted = True
                _raise_in(self, _GivenUp)

    def give_up(self) -> None:
        """Tell it to end, more than once: code that catches everything catches this, too."""
        if self.ident is None:
            self.fn = None
            _leave(self)
            return
        for _ in range(_STEPS):
            self.interrupt()
            if self.ended.acquire(timeout=_STEP_SECONDS):
                return


class _Here(threading.local):
    aside: _Aside | None = None


_here = _Here()
_turn = threading.RLock()
_lock = threading.RLock()
_inside: set[_Aside] = set()


def _enter(run: _Aside) -> None:
    with _lock:
        if not _inside:
            silence.begin()
            start = threading.Thread.start
            # Python raises an audit event for this since 3.12 only.
            silence.stand_in(threading.Thread, "start", audit.refusing(start), start)
        _inside.add(run)


def _leave(run: _Aside) -> None:
    with _lock:
        _inside.discard(run)
        if not _inside:
            silence.end()


def _too_many_stuck() -> bool:
    with _lock:
        stuck = [run for run in _inside if run.given_up and run.until < time.monotonic()]
    for run in stuck:
        run.interrupt()
    return len(stuck) >= MOST_STUCK


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Let this thread, itself run aside, start another thread."""
    watch, audit.here.watch = audit.here.watch, None
    try:
        yield
    finally:
        audit.here.watch = watch


def _after_fork() -> None:
    """In a child process only the thread that forked goes on, and a lock may be held by one that does not."""
    global _turn, _lock
    _turn, _lock = threading.RLock(), threading.RLock()
    _inside.clear()
    silence.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Have ``error`` raised where the thread runs Python next."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def _forget_frames(error: BaseException) -> None:
    """Let go of the local variables of all frames that led to ``error``; they may be large tensors."""
    todo, seen = [error], set()
    while todo:
        error = todo.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, AttributeError):
            AttributeError.obj.__set__(error, None)
        todo += [error.__cause__, error.__context__]
        if isinstance(error, getattr(builtins, "BaseExceptionGroup", ())):
            todo += error.exceptions
