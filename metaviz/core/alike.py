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
    """

    def __init__(self, children_first: Iterable[nn.Module]) -> None:
        modules = list(children_first)
        self._of: dict[int, int] = {}
        # What is told apart by its id must not make room for another object.
        self._keep: list[Any] = []
        # The memory of each tensor on meta; what is written to one of several that have it is written to all.
        self._memory: dict[int, int] = {}
        self._shared: set[int] = set()
        self._note_memory(modules)
        known: dict[Any, int] = {}
        for module in modules:
            key = self._key(module)
            try:
                self._of[id(module)] = known.setdefault(key, len(known))
            except Exception:  # a setting whose class forbids comparing or hashing
                self._of[id(module)] = known.setdefault(id(module), len(known))

    def __getitem__(self, module: nn.Module) -> int:
        return self._of[id(module)]

    def _note_memory(self, modules: list[nn.Module]) -> None:
        seen: set[int] = set()
        for module in modules:
            space = object.__getattribute__(module, "__dict__")
            for group in _TENSORS:
                for tensor in (space.get(group) or {}).values():
                    if tensor is not None and not is_lazy(tensor) and is_plain(tensor) and tensor.is_meta:
                        memory = self._memory[id(tensor)] = tensor.untyped_storage()._cdata
                        (self._shared if memory in seen else seen).add(memory)

    def _key(self, module: nn.Module) -> tuple:
        space = object.__getattribute__(module, "__dict__")
        # By identity: a metaclass may forbid hashing.
        key: list[Any] = [id(type(module)), space.get("training")]
        for group in _TENSORS:
            held = space.get(group)
            if held:
                key.append(group)
                for name, tensor in held.items():
                    key += name, self._tensor(tensor)
        for name, value in space.items():
            if name not in STANDARD:
                kind = type(value)
                # True == 1 == 1.0
                key += (name, kind, value) if kind in _SIMPLE else (name, self._setting(value))
        for name, child in (space.get("_modules") or {}).items():
            # A module that holds one of those above it is like no other.
            key += name, child if child is None else self._of.get(id(child), id(child))
        return tuple(key)

    def _tensor(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        memory = self._memory.get(id(tensor))
        if memory is None:
            if is_lazy(tensor):
                return id(type(tensor)), tensor.dtype
            self._keep.append(tensor)
            return id(tensor)
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
