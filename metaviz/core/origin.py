"""Where a tensor of a model comes from: which window of which tape has its values.

A tensor on meta is known by the tag of its storage. A cast after the build (``model.half()``) replaces that storage;
the tensor is then known by its slot in a module that was seen when the build ended.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from metaviz.core.tape import Tag, Tape, Window, tag_of, version_of, window_of

_WAS = "_metaviz_was"


class Origin(NamedTuple):
    """``window`` of ``tape`` has the values; ``exact`` if the tensor's storage is that very storage of the tape."""

    tape: Tape
    window: Window
    exact: bool


class _Slot(NamedTuple):
    """What a parameter or buffer was when it was last known: its origin, and the object's id and version."""

    tape: Tape
    window: Window
    identity: int
    version: int


class _Seen(NamedTuple):
    module: weakref.ref
    slots: dict[str, _Slot]


class Was(NamedTuple):
    """What a materialized storage carries.

    Attributes:
        tag: Its tag on meta, None if it had none.
        versions: By id, each tensor's version when it was filled.
        source: Where its values came from: only those of a reset cannot be had again.
    """

    tag: Tag | None
    versions: dict[int, int]
    source: str = "replay"


# Modules by id: their classes may forbid hashing. An entry goes when its module does.
_seen: dict[int, _Seen] = {}


def remember(module: nn.Module, wanted: Callable[[torch.Tensor, Tag], bool]) -> None:
    """Note what parameters and buffers of ``module`` are, to know them again after a cast, and to notice edits.

    Args:
        module: The module.
        wanted: Tells of a tensor with a tag whether it is to be noted.
    """
    found = {}
    space = object.__getattribute__(module, "__dict__")
    for group in ("_parameters", "_buffers"):
        for name, tensor in space.get(group, {}).items():
            tag = None if tensor is None else tag_of(tensor)
            if tag is not None and wanted(tensor, tag):
                window = window_of(tensor) if tag.source is None else tag.source
                found[name] = _Slot(tag.tape, window, id(tensor), version_of(tensor))
    if found:
        key = id(module)
        known = _seen.get(key)
        if known is not None and known.module() is module:
            known.slots.update(found)
        else:
            # No function of Python's is called when a module dies: Ctrl-C would be lost in it.
            _seen[key] = _Seen(weakref.ref(module, functools.partial(_seen.pop, key)), found)


def origin_of(
    tensor: torch.Tensor, module: nn.Module | None = None, name: str | None = None
) -> Origin | None:
    """Where the meta ``tensor`` comes from; None if no tape knows it.

    Args:
        tensor: A tensor on meta.
        module: The module that holds it.
        name: The name of its parameter or buffer slot there.
    """
    tag = tag_of(tensor)
    if tag is not None:
        if tag.source is not None:
            return Origin(tag.tape, tag.source, False)
        return Origin(tag.tape, window_of(tensor), True)
    slot = _slot(module, name)
    if slot is None or tuple(tensor.shape) != slot.window.size:
        return None
    # Other memory of the same dtype is no cast, or one there and back, which rounds: it has values of its own.
    if tensor.dtype == slot.window.dtype:
        return None
    if id(tensor) == slot.identity or name in module._buffers:
        return Origin(slot.tape, slot.window, False)
    return None


def edited(tensor: torch.Tensor, module: nn.Module | None, name: str | None) -> bool:
    """Whether the meta ``tensor`` was written to after the build: with what, no tape knows."""
    slot = _slot(module, name)
    return slot is not None and slot.identity == id(tensor) and slot.version != version_of(tensor)


def _slot(module: nn.Module | None, name: str | None) -> _Slot | None:
    seen = _seen.get(id(module)) if module is not None else None
    return seen.slots.get(name) if seen is not None and seen.module() is module else None


def mark_real(storage: torch.UntypedStorage, then: Was) -> None:
    """Let a materialized ``storage`` know what it was, so that it can go back to meta."""
    setattr(storage, _WAS, then)


def was(tensor: torch.Tensor) -> Was | None:
    """What the real ``tensor`` was on meta, or None if metaviz did not materialize it."""
    try:
        found: Any = getattr(tensor.untyped_storage(), _WAS, None)
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    return found
