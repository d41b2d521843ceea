"""Swaps: tensor objects take over the content of others, all of them or none."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from metaviz.core.paths import Place


class Change:
    """One tensor object that takes over the content of another; can be undone."""

    def __init__(self, old: torch.Tensor, new: torch.Tensor, places: list[Place]) -> None:
        self.old = old
        self.new = new
        self.places = places
        self.repointed: list[str] = []
        self.stranded: list[str] = []
        self._swapped = False

    def do(self) -> None:
        """Make every place that holds ``old`` hold the content of ``new``."""
        try:
            torch.utils.swap_tensors(self.old, self.new)
            self._swapped = True
        except RuntimeError:
            # Weak references, autograd graphs and views hold on to the tensor: then its places get a new object.
            for place in self.places:
                # Noted first, so that nothing can be changed that undo does not know of.
                self.repointed.append(place.path)
                try:
                    place.slot.set(self.new)
                except MemoryError:
                    raise
                except Exception:  # a tuple, or a dict whose class lets nothing be set
                    self.stranded.append(self.repointed.pop())

    def undo(self) -> None:
        """Put everything back."""
        if self._swapped:
            torch.utils.swap_tensors(self.old, self.new)
            self._swapped = False
        for place in self.places:
            if place.path in self.repointed:
                place.slot.set(self.old)


def commit(changes: list[Change], then: Callable[[], None] = lambda: None) -> None:
    """Do all changes and ``then``, or none of it, whatever is raised and whenever Ctrl-C is pressed."""
    with _interrupts_wait() as let_through:
        done = []
        try:
            for change in changes:
                done.append(change)
                change.do()
            then()
            let_through()
        except BaseException:
            for change in reversed(done):
                change.undo()
            raise


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back while a step must not be cut in two; yields what then does what Ctrl-C does here."""
    # None is a handler that is not Python's: it could not be put back.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield lambda: None
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))

    def let_through() -> None:
        if came and callable(before):
            before(*came.pop())

    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)
    let_through()
