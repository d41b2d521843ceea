"""Paths: every tensor slot of a model, and the ones that a user's paths and globs mean."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from metaviz.core.attributes import Slot, registered_ids, slots
from metaviz.errors import UnknownPath

_SHOWN = 5


class Place(NamedTuple):
    """A slot of a model: the dotted ``path`` of its tensor, the module that holds it, and the slot."""

    path: str
    module_path: str
    module: nn.Module
    slot: Slot


def join(parent: str, name: str) -> str:
    """``"layers.0" + "weight"`` is ``"layers.0.weight"``; the root is ``""``."""
    return f"{parent}.{name}" if parent else name


def some(paths: Iterable[str]) -> str:
    """The first few paths, and how many more there are."""
    paths = list(paths)
    more = f" and {len(paths) - _SHOWN:,} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(path, module)`` of every registered module at every slot that holds it, the root first.

    What is below a module is given below its first path only: shared modules within shared ones would else make
    exponentially many. Walks ``_modules``: attribute access would miss a child named ``half``.
    """
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    entered: set[int] = set()
    while stack:
        path, module, above = stack.pop()
        yield path, module
        if id(module) not in entered:
            entered.add(id(module))
            here = above | {id(module)}
            stack.extend(
                (join(path, name), child, here)
                for name, child in reversed(children_of(module).items())
                if child is not None and id(child) not in here
            )


def below(
    module: nn.Module, wanted: Callable[[nn.Module], bool] = lambda _: True
) -> Iterator[tuple[str, nn.Module]]:
    """`(path, module)` of a module and those below it, each once, as `Module.named_modules` gives them.

    Args:
        module: The first.
        wanted: Tells of a module whether it is to be entered.
    """
    stack = [("", module)]
    seen = set()
    while stack:
        path, module = stack.pop()
        if id(module) not in seen and wanted(module):
            seen.add(id(module))
            yield path, module
            children = children_of(module)
            stack.extend(
                (join(path, name), child) for name, child in reversed(children.items()) if child is not None
            )


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The registered children of ``module`` by name; none where its constructor has not come that far."""
    return object.__getattribute__(module, "__dict__").get("_modules") or {}


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
        self._first: dict[int, str] = {}
        for path, module in self.modules.items():
            self._first.setdefault(id(module), path)
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
                ``*`` stands for one part or a piece of one, ``**`` for any number of parts. No path is no tensor.

        Raises:
            UnknownPath: A path or glob means nothing in this model.
            TypeError: A path is not a string.
        """
        chosen: set[str] = set()
        known = dict.fromkeys((*self.modules, *(place.path for place in self.places)))
        for pattern in self._listed(paths):
            first = self._by_first_path(pattern)
            # A path may look like a glob: `layers[0].weight` is a tensor in a list.
            if first in known:
                chosen.add(first)
                continue
            found = set(filter(glob(pattern), known)) if is_glob(pattern) else ()
            if not found:
                raise UnknownPath(_no_such(pattern, known))
            chosen |= {self._by_first_path(path) for path in found}
        return [place for place in self.places if self._is_below(place, chosen)]

    def _by_first_path(self, path: str) -> str:
        """``path`` with the way to a module that has several replaced by the first of them."""
        parts = path.split(".") if path else []
        module = self.modules[""]
        for i, name in enumerate(parts):
            child = children_of(module).get(name)
            if child is None:
                return join(self._first[id(module)], ".".join(parts[i:]))
            module = child
        return self._first[id(module)]

    def _listed(self, paths: Any) -> list[str]:
        # Both of these are iterable at times, and are none the more a list of paths.
        single = isinstance(paths, str | nn.Module | torch.Tensor) or not isinstance(paths, Iterable)
        listed = [paths] if single else list(paths)
        for item in listed:
            if not isinstance(item, str):
                has = [*self.modules.items(), *((place.path, place.slot.tensor) for place in self.places)]
                path = next(
                    (path for path, thing in has if thing is item), next((p for p, _ in has if p), "")
                )
                raise TypeError(
                    f"A path is a string such as {path!r}, and this is of type {type(item).__name__}. "
                    f"Next: metaviz.plan(model, {path!r})"
                )
        return listed

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


def is_glob(pattern: str) -> bool:
    """Whether a path stands for all that match it."""
    return any(c in pattern for c in "*?[")


def glob(pattern: str) -> Callable[[str], bool]:
    """Whether a path matches: ``*`` is one part of it, ``**`` any number of them."""
    parts = [
        None if part == "**" else re.compile(fnmatch.translate(part)).match for part in pattern.split(".")
    ]
    return lambda path: _match_parts(path.split("."), parts)


def _match_parts(parts: list[str], patterns: list[Callable[[str], object] | None]) -> bool:
    """Whether ``parts`` match one by one; None stands for any number of parts."""
    for i, matches in enumerate(patterns):
        if matches is None:
            return any(_match_parts(parts[k:], patterns[i + 1 :]) for k in range(i, len(parts) + 1))
        if i == len(parts) or not matches(parts[i]):
            return False
    return len(parts) == len(patterns)


def _no_such(pattern: str, known: Iterable[str]) -> str:
    near = nearest(pattern, known)
    if near:
        return (
            f"The model has no module or tensor {pattern!r}. The nearest is {near!r}. "
            f"Next: metaviz.plan(model, {near!r})"
        )
    top = [path for path in known if path and "." not in path]
    has = f"It has {some(top)}." if top else "It has none at all."
    return f"The model has no module or tensor {pattern!r}. {has} Next: print(metaviz.tree(model))"


def nearest(wanted: str, known: Iterable[str]) -> str:
    """The path that follows ``wanted`` part by part, by the most similar name where a part is wrong."""
    below: dict[str, list[str]] = {}
    for path in known:
        above, _, name = path.rpartition(".")
        below.setdefault(above, []).append(name)
    near = ""
    parts = wanted.split(".")
    for part in parts:
        names = below.get(near, [])
        close = [part] if part in names else difflib.get_close_matches(part, names, n=1)
        if not close:
            break
        near = join(near, close[0])
    else:
        return near
    # Whoever leaves out the front of a path means one that ends like it.
    return next((path for path in known if path.endswith(f".{wanted}")), near)
