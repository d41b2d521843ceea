"""Paths: every tensor slot of a model, and the ones that a user's paths and globs mean."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from metaviz.core.attributes import Slot, registered_ids, slots
from metaviz.errors import UnknownPath


class Place(NamedTuple):
    """A slot of a model: the dotted ``path`` of its tensor, the module that holds it, and the slot."""

    path: str
    module_path: str
    module: nn.Module
    slot: Slot


def join(parent: str, name: str) -> str:
    """``"layers.0" + "weight"`` is ``"layers.0.weight"``; the root is ``""``."""
    return f"{parent}.{name}" if parent else name


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(path, module)`` of every registered module, each at every path that leads to it, the root first.

    Walks ``_modules``: attribute access would miss a child named ``half``. A module within itself is not entered again.
    """
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    while stack:
        path, module, above = stack.pop()
        yield path, module
        children = module.__dict__["_modules"]
        if children:
            here = above | {id(module)}
            stack.extend(
                (join(path, name), child, here)
                for name, child in reversed(children.items())
                if child is not None and id(child) not in here
            )


class Model:
    """One walk over a model: its modules by path, and its slots.

    Args:
        model: The module to look at.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"metaviz looks at torch.nn.Module objects, and this is a {type(model).__name__}. "
                "Next: model = metaviz.build(YourModule, ...)"
            )
        self.modules = dict(modules(model))
        registered = registered_ids(model)
        known: dict[int, list[Slot]] = {}
        self.places: list[Place] = []
        for path, module in self.modules.items():
            if id(module) not in known:
                known[id(module)] = list(slots(module, registered))
            self.places.extend(Place(join(path, slot.name), path, module, slot) for slot in known[id(module)])

    def select(self, paths: str | Iterable[str]) -> list[Place]:
        """The slots that ``paths`` mean.

        Args:
            paths: A path, a glob, or several. A module path takes its subtree, a tensor path that tensor. In a glob,
                ``*`` stands for one part or a piece of one, ``**`` for any number of parts.

        Raises:
            UnknownPath: A path or glob means nothing in this model.
        """
        chosen: set[str] = set()
        tensors = {place.path for place in self.places}
        for pattern in [paths] if isinstance(paths, str) else list(paths):
            found = {p for p in (*self.modules, *tensors) if _matches(p, pattern)} if _is_glob(pattern) else {pattern}
            found &= self.modules.keys() | tensors
            if not found:
                raise UnknownPath(self._no_such(pattern, tensors))
            chosen |= found
        return [place for place in self.places if self._is_below(place, chosen)]

    @staticmethod
    def _is_below(place: Place, chosen: set[str]) -> bool:
        if place.path in chosen or "" in chosen:
            return True
        path = place.module_path
        while path:
            if path in chosen:
                return True
            path = path.rpartition(".")[0]
        return False

    def _no_such(self, pattern: str, tensors: set[str]) -> str:
        known = [*self.modules, *tensors]
        near = difflib.get_close_matches(pattern, known[:20_000], n=1, cutoff=0.0 if len(known) < 1000 else 0.5)
        hint = f" The nearest is {near[0]!r}." if near and near[0] else ""
        return f"The model has no module or tensor {pattern!r}.{hint} See what there is: print(metaviz.tree(model))"


def _is_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def _matches(path: str, pattern: str) -> bool:
    return _match_parts(path.split("."), pattern.split("."))


def _match_parts(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match_parts(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _match_parts(parts[1:], patterns[1:])
