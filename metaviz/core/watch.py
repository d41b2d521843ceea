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
    takes a tenth of the time of a tree.
    """
    found: list[int] = []
    seen: set[int] = set()
    stack: list[Any] = [model]
    # A recording would answer for tensors that are on its tape.
    with torch._C.DisableTorchFunction():
        while stack:
            module = stack.pop()
            found.append(_serial(module))
            if id(module) in seen:
                continue
            seen.add(id(module))
            space = _space(module)
            for tensors in (space.get("_parameters"), space.get("_buffers")):
                if tensors:
                    found.append(hash(tuple(tensors)))
                    found += [_mark(tensor) for tensor in tensors.values()]
            children = space.get("_modules")
            if children:
                found.append(hash(tuple(children)))
                stack.extend(children.values())
    return hash(tuple(found))


# A module can lie where one was freed that looked like it: each gets a number of its own when it is first seen.
_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


def _serial(module: Any) -> int:
    try:
        number = _serials.get(module)
        if number is None:
            number = _serials[module] = next(_next_serial)
    except TypeError:
        # What is no module at all, or has a hash of its own.
        number = id(module)
    return hash((number, type(module)))


def _space(module: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def _mark(tensor: Any) -> int:
    if tensor is None:
        return 0
    try:
        storage = tensor.untyped_storage()
        # A new tensor can lie where one has just been freed: its ids alone would not tell.
        memory = storage._cdata, tensor.size(), hasattr(storage, MARK)
    except (AttributeError, RuntimeError, NotImplementedError):
        memory = 0
    return hash((id(tensor), memory, tensor.requires_grad, tensor.dtype, tensor.device))
