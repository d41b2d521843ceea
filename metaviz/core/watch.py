"""Noticing changes: who shows a model hears of what metaviz does to one, and can tell whether it was changed."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from metaviz.core.tape import MARK

# Held weakly: who listens and is dropped by everybody else hears no more.
_listeners: list[weakref.WeakMethod[Callable[[], Any]]] = []


def listen(method: Callable[[], Any]) -> None:
    """Have a bound method called after each change that metaviz has made to any model, in the thread that made it."""
    _listeners[:] = [each for each in _listeners if each() is not None]
    _listeners.append(weakref.WeakMethod(method))


def leave(method: Callable[[], Any]) -> None:
    """Have a method of :func:`listen` called no more."""
    _listeners[:] = [each for each in _listeners if each() not in (None, method)]


def tell() -> None:
    """Say that a model was changed."""
    for each in list(_listeners):
        method = each()
        if method is not None:
            # The change is made: who looks on and fails must not make it look like a failure.
            with contextlib.suppress(Exception):
                method()


def fingerprint(model: nn.Module) -> int:
    """A number that is another one after modules or tensors were replaced, moved, cast, or given values.

    Values that are written in place leave it as it is, and so do tensors in plain attributes. Nothing is computed; it
    takes a tenth of the time of a tree, which has the number as `tree(model).columns.fingerprint`.
    """
    found: list[int] = []
    seen: set[int] = set()
    stack: list[Any] = [model]
    # A recording would answer for tensors that are on its tape.
    with torch._C.DisableTorchFunction():
        while stack:
            module = stack.pop()
            note_place(module, found)
            if id(module) not in seen:
                seen.add(id(module))
                stack.extend(reversed(note_parts(module, found)))
    return hash(tuple(found))


def note_place(module: Any, found: list[int]) -> None:
    """Add to a fingerprint that a module, or None, is here: what :func:`fingerprint` does at each place, in order."""
    known = _seen.get(id(module))
    found.append(_number(module) if known is None else known.number)
    # A class can be given to a module that is there.
    found.append(id(type(module)))


def note_parts(module: Any, found: list[int]) -> list[Any]:
    """Add to a fingerprint what tensors a module has itself and how its children are called; the children.

    :func:`fingerprint` does that where it meets a module first, right after :func:`note_place`. It never raises: what
    cannot be looked at must not keep the rest from being seen.
    """
    try:
        space = object.__getattribute__(module, "__dict__")
        for tensors in (space.get("_parameters"), space.get("_buffers")):
            if tensors:
                found.append(hash(tuple(tensors)))
                found += map(_mark, tensors.values())
        children = space.get("_modules")
        if not children:
            return []
        found.append(hash(tuple(children)))
        return list(children.values())
    except Exception:
        # No module, or one whose constructor was stopped half-way.
        return []


class _Seen(weakref.ref):
    """A module that was met, while it lives."""

    __slots__ = ("key", "number")


# By the id of a module. One can lie where another was freed that looked like it, so each gets a number of its own; a
# WeakKeyDictionary would do the same at ten times the cost of a dict.
_seen: dict[int, _Seen] = {}
_next_number = itertools.count()


def _forget(seen: _Seen) -> None:
    _seen.pop(seen.key, None)


def _number(module: Any) -> int:
    """The number of a module that has none yet."""
    try:
        seen = _Seen(module, _forget)
    except TypeError:
        # Nothing that can be registered as a module, None among others.
        return id(module)
    seen.key, seen.number = id(module), next(_next_number)
    # Another thread may have met it just now.
    return _seen.setdefault(seen.key, seen).number


def _mark(tensor: Any) -> int:
    if tensor is None:
        return 0
    try:
        storage = tensor.untyped_storage()
        # A new tensor can lie where one has just been freed: its ids alone would not tell.
        memory = hash((storage._cdata, tensor.size(), hasattr(storage, MARK)))
    except Exception:
        memory = 0
    try:
        return hash((id(tensor), memory, tensor.requires_grad, tensor.dtype, tensor.device))
    except Exception:
        # Of a subclass, any of these can raise.
        return hash((id(tensor), memory))
