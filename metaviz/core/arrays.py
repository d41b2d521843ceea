"""NumPy arrays that in an ordinary build are the very memory of a tensor: what is written through them counts.

While a constructor is recorded a tensor has no memory that an array could have in common with it. The array has memory
of its own then, which is looked at whenever an op is about to use the tensor.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable

import torch

from metaviz.core.replay import plain_torch
from metaviz.core.tape import Window, window_of


@dataclasses.dataclass(slots=True)
class _Watched:
    window: Window
    real: torch.Tensor
    seen: bytes
    array: weakref.ref


class Arrays:
    """The arrays of one recording.

    Args:
        hold: Called as ``hold(window, values)`` when something has been written through an array.
    """

    def __init__(self, hold: Callable[[Window, torch.Tensor], object]) -> None:
        self._hold = hold
        self._watched: dict[int, list[_Watched]] = {}
        self._many = 4

    def watch(self, tensor: torch.Tensor, real: torch.Tensor, array: object) -> None:
        """Watch ``real``, which has the memory of ``array``, for the taped ``tensor`` while ``array`` lives."""
        if len(self._watched) > self._many:
            self.notice(list(self._watched))
            self._many = 4 + 2 * len(self._watched)
        entry = _Watched(window_of(tensor), real, _content(real), weakref.ref(array))
        self._watched.setdefault(entry.window.storage, []).append(entry)

    def notice(self, storages: Iterable[int] | None = None) -> None:
        """Take in what has been written to ``storages`` (all if None) through arrays."""
        for number in list(self._watched) if storages is None else storages:
            entries = self._watched.pop(number, ())
            for entry in entries:
                now = _content(entry.real)
                if now != entry.seen:
                    with plain_torch():
                        self._hold(entry.window, entry.real.clone())
                    entry.seen = now
            if alive := [entry for entry in entries if entry.array() is not None]:
                self._watched[number] = alive

    def forget(self, storages: Iterable[int]) -> None:
        """An op writes ``storages``: the arrays of before do not show what they hold any more."""
        for number in storages:
            self._watched.pop(number, None)

    def __bool__(self) -> bool:
        return bool(self._watched)


def _content(real: torch.Tensor) -> bytes:
    with plain_torch():
        return real.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
