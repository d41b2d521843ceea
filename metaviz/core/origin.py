"""Where a tensor of a model comes from: which window of which tape has its values.

A tensor on meta is known by the tag of its storage. A cast after the build (``model.half()``) replaces that storage;
the tensor is then known by its slot in a module that was seen when the build ended.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from metaviz.core.tape import Tag, Tape, Window, tag_of, window_of

_WAS = "_metaviz_was"


class Origin(NamedTuple):
    """``window`` of ``tape`` has the values; ``exact`` if the tensor's storage is that very storage of the tape."""

    tape: Tape
    window: Window
    exact: bool


class _Seen(NamedTuple):
    module: weakref.ref
    tape: Tape
    slots: dict[str, tuple[Window, int]]


class Was(NamedTuple):
    """What a materialized storage carries: its tag on meta, and by id each tensor's version when it was filled."""

    tag: Tag
    versions: dict[int, int]


# Modules by id: their classes may forbid hashing. An entry goes when its module does.
_seen: dict[int, _Seen] = {}


def remember(module: nn.Module, tape: Tape) -> None:
    """Note what each parameter and buffer of ``module`` is on ``tape``, to know it again after a cast."""
    found = {}
    space = object.__getattribute__(module, "__dict__")
    for group in ("_parameters", "_buffers"):
        for name, tensor in space.get(group, {}).items():
            if tensor is not None:
                tag = tag_of(tensor)
                if tag is not None and tag.tape is tape:
                    found[name] = (window_of(tensor), id(tensor))
    if found:
        key = id(module)
        # No function of Python's is called when a module dies: Ctrl-C would be lost in it.
        _seen[key] = _Seen(weakref.ref(module, functools.partial(_seen.pop, key)), tape, found)


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
    seen = _seen.get(id(module)) if module is not None else None
    if seen is None or seen.module() is not module or name not in seen.slots:
        return None
    window, identity = seen.slots[name]
    same_parameter = id(tensor) == identity
    cast_buffer = name in module._buffers and tensor.dtype != window.dtype
    if tuple(tensor.shape) == window.size and (same_parameter or cast_buffer):
        return Origin(seen.tape, window, False)
    return None


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
