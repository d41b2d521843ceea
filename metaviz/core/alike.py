"""Modules that are alike: to all of them the same init method does the same, so one of them is tried for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core.attributes import ATOMS, STANDARD
from metaviz.core.shadow import is_plain

_TENSORS = ("_parameters", "_buffers")
_SIMPLE = frozenset((int, float, bool, str, type(None)))
# Longer ones are told apart by what they are, not by what is in them.
_MOST_ITEMS = 16


class Kinds:
    """A number for each module, equal for modules of the same class with the same tensors, settings and children.

    Args:
        children_first: The modules, none before those below it.

    Attributes:
        of: The number of each, by the id of the module.
    """

    def __init__(self, children_first: Iterable[nn.Module]) -> None:
        modules = list(children_first)
        # What is told apart by its id must not make room for another object.
        self._keep: list[Any] = []
        # What is written to one of several tensors that have the same memory on meta is written to all of them.
        self._seen: set[int] = set()
        self._shared: set[int] = set()
        self.of = self._numbered(modules)
        if self._shared:
            # Only now is it known of the first of them that there are others.
            self.of = self._numbered(modules)

    def _numbered(self, modules: list[nn.Module]) -> dict[int, int]:
        of: dict[int, int] = {}
        known: dict[Any, int] = {}
        self._seen.clear()
        for module in modules:
            key = self._key(module, of)
            try:
                of[id(module)] = known.setdefault(key, len(known))
            except Exception:  # a setting whose class forbids comparing or hashing
                of[id(module)] = known.setdefault(id(module), len(known))
        return of

    def _key(self, module: nn.Module, of: dict[int, int]) -> tuple:
        space = object.__getattribute__(module, "__dict__")
        # By identity: a metaclass may forbid hashing.
        key: list[Any] = [id(type(module)), space.get("training")]
        for group in _TENSORS:
            held = space.get(group)
            if held:
                key.append(group)
                for name, tensor in held.items():
                    key += name, self._tensor(tensor)
        for name in space.keys() - STANDARD:
            value = space[name]
            kind = type(value)
            # True == 1 == 1.0
            key += (name, kind, value) if kind in _SIMPLE else (name, self._setting(value))
        for name, child in (space.get("_modules") or {}).items():
            # A module that holds one of those above it is like no other.
            key += name, child if child is None else of.get(id(child), id(child))
        return tuple(key)

    def _tensor(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        if is_lazy(tensor):
            return id(type(tensor)), tensor.dtype
        if not tensor.is_meta or not is_plain(tensor):
            self._keep.append(tensor)
            return id(tensor)
        memory = tensor.untyped_storage()._cdata
        if memory in self._seen:
            self._shared.add(memory)
        self._seen.add(memory)
        shape = tensor.shape, tensor.stride(), tensor.storage_offset()
        shared = memory if memory in self._shared else 0
        return id(type(tensor)), tensor.dtype, shape, tensor.requires_grad, shared

    def _setting(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            # A slice cannot be hashed.
            return kind, value if kind is not slice else repr(value)
        if issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if kind in (tuple, list) and len(value) <= _MOST_ITEMS:
            return kind, tuple(map(self._setting, value))
        self._keep.append(value)
        return id(value)
