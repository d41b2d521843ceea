"""Cells and what works beside them: threads of widgets, and cells that run, take turns with settings of the process.

Trying an init method draws from the random generators and puts them back: a cell that draws meanwhile would get other
numbers. So such a moment is between cells, and a cell begins after it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from metaviz.core import turns

# A moment is a second or so. A cell never waits for longer, whatever goes wrong.
_PATIENCE = 30.0


class CellRuns(BaseException):
    """It is not the turn of who asks: a cell runs. No Exception: nobody shall take it for an answer."""

    def __str__(self) -> str:
        return "A cell is running, and init methods are tried between cells only. Nothing was changed"


class _Beside(threading.local):
    turn: Callable[[], None] | None = None


_beside = _Beside()
_changed = threading.Condition()
_running = False
_moments = 0


def leave() -> None:
    """What to do when a cell runs: give up."""
    raise CellRuns


@contextlib.contextmanager
def beside(turn: Callable[[], None] = leave) -> Iterator[None]:
    """This thread works beside cells.

    Args:
        turn: Called again and again while a cell runs and a turn is needed; what it raises is raised there.
    """
    before, _beside.turn = _beside.turn, turn
    try:
        yield
    finally:
        _beside.turn = before


@contextlib.contextmanager
def _moment() -> Iterator[None]:
    global _moments
    turn = _beside.turn
    if turn is None:
        # The user's own thread: cells do not overlap with themselves.
        yield
        return
    with _changed:
        while _running:
            turn()
            _changed.wait(0.1)
        _moments += 1
    try:
        yield
    finally:
        with _changed:
            _moments -= 1
            _changed.notify_all()


def begins(info: object = None) -> None:
    """A cell begins, once nobody is in the middle of a moment."""
    global _running
    with _changed:
        _changed.wait_for(lambda: not _moments, _PATIENCE)
        _running = True


def ends() -> None:
    """A cell has ended."""
    global _running
    with _changed:
        _running = False
        _changed.notify_all()


turns.around = _moment
