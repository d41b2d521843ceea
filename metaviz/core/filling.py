"""Filling: new tensors with values, beside the model."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from metaviz.core.choice import Fill
from metaviz.core.plan import Work
from metaviz.core.replay import draws_for, replay
from metaviz.core.runs import runs
from metaviz.core.stored import contiguous
from metaviz.core.tape import Window, window
from metaviz.core.verify import Verifier, differs

Progress = Callable[[int, int, str], object]


class Filled(NamedTuple):
    """A tensor of the model, a new one with its values, and where they came from."""

    old: torch.Tensor
    new: torch.Tensor
    fill: Fill


def fill_aside(work: Work, rng: str, progress: Progress) -> list[Filled]:
    """Give values to new tensors, the model untouched.

    Args:
        work: What is to be done.
        rng: How random numbers are drawn.
        progress: Called after each fill.

    Raises:
        StalePlan: Values that were read are not those in the file.
    """
    filled: list[Filled] = []
    verifier = Verifier()
    total, done = work.plan.nbytes, 0
    for where, by_tape in runs(work.fills, rng).items():
        draws = draws_for(rng, where)
        for fills in by_tape.values():
            waiting: dict[int, list[Fill]] = {}
            for fill in fills:
                waiting.setdefault(fill.source.storage, []).append(fill)
            stored = work.loading is not None and fills[0].tape is work.loading.tape
            with work.loading.reading(waiting) if stored else contextlib.nullcontext():
                for number, memory in replay(fills[0].tape, waiting, draws):
                    for fill in waiting[number]:
                        filled += _given(work, fill, memory, verifier)
                        done += fill.nbytes
                        progress(done, total, work.places[id(fill.tensors[0])][0].path)
                    del memory
    return filled


def _given(work: Work, fill: Fill, memory: torch.UntypedStorage, verifier: Verifier) -> Iterator[Filled]:
    for old, new in zip(fill.tensors, _filled(fill, memory), strict=True):
        _check(work, fill, old, new, verifier)
        yield Filled(old, dressed_as(old, new), fill)


def _check(work: Work, fill: Fill, old: torch.Tensor, new: torch.Tensor, verifier: Verifier) -> None:
    """Compare with the file. What a library makes of stored tensors is not made a second time for that."""
    if fill.origin != "checkpoint" or fill.source.storage in work.loading.put_together:
        return
    stored = work.loading.entries(old)[0].stored if work.loading.entries(old) else None
    if stored is not None and not verifier.same(stored, new):
        raise differs(stored, work.places[id(old)][0].path)


def _filled(fill: Fill, memory: torch.UntypedStorage) -> list[torch.Tensor]:
    """New tensors for ``fill``, laid out as the model's."""
    device = fill.device
    if fill.exact:
        if memory.device != device:
            memory = torch.UntypedStorage(memory.nbytes(), device=device).copy_(memory)
        return [window(fill.source.storage, t).on(memory) for t in fill.tensors]
    return [_cast(fill, memory, t, device) for t in fill.tensors]


def _cast(fill: Fill, memory: torch.UntypedStorage, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    source = fill.source
    if (like.size(), like.stride()) != (source.size, source.stride):
        # Of a tensor that was expanded, each element gets a value of its own.
        stride = contiguous(like.size()) if 0 in like.stride() else like.stride()
        new = torch.empty_strided(like.size(), stride, dtype=fill.dtype, device=device)
        return new.copy_(source.on(memory))
    # Elements may share memory (expand), and then they do so still: cast the memory, not the elements.
    start, stop = source.extent()
    whole = Window(
        source.storage, source.dtype, ((stop - start) // source.dtype.itemsize,), (1,), source.offset
    )
    cast = whole.on(memory).to(device=device, dtype=fill.dtype, copy=True)
    return source._replace(dtype=fill.dtype, offset=0).on(cast.untyped_storage())


def dressed_as(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` with the class, attributes, ``requires_grad`` and hooks of ``old``."""
    if type(old) is not torch.Tensor:
        new = torch.Tensor._make_subclass(type(old), new, False)
    new.requires_grad_(old.requires_grad and old.is_leaf)
    new.__dict__.update(old.__dict__)
    for name in copyreg._slotnames(type(old)):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    # Hooks live in the part that is swapped: without this they would stay behind with the old content.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None) is not None and new.requires_grad:
            setattr(new, hooks, getattr(old, hooks))
    return new
