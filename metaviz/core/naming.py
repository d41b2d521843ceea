"""Naming: which names of a checkpoint mean which tensors of a model."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from metaviz.core.checkpoint import KeyMap
from metaviz.core.paths import children_of

# What wrappers call the module in them: torch.compile, FSDP, activation checkpointing, Lightning's Fabric.
_WITHIN = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
# What is in front of all names when the model was saved within something else, or is so here.
_USUAL = ("model.", "module.", *(f"{word}." for word in _WITHIN))


class Places:
    """The places of a model by name, as a state dict names them.

    Names are followed from module to module, so each way to a shared module leads there. Wrappers on the way do not
    matter, whether the model has them or the checkpoint.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[str, nn.Module | None] = {"": model}

    def find(self, name: str, saved: bool = True) -> tuple[nn.Module, str, torch.Tensor] | None:
        """The module, slot name and tensor that a name means; None if there is nothing.

        Args:
            name: A dotted name.
            saved: Leave out what is in no state dict: buffers that are not persistent.
        """
        above, _, last = name.rpartition(".")
        module = self._module(above)
        while module is not None:
            space = object.__getattribute__(module, "__dict__")
            for group in ("_parameters", "_buffers"):
                tensor = (space.get(group) or {}).get(last)
                if tensor is not None:
                    unsaved = group == "_buffers" and last in space.get("_non_persistent_buffers_set", ())
                    return None if saved and unsaved else (module, last, tensor)
            module = _unwrapped(module)
        return None

    def _module(self, path: str) -> nn.Module | None:
        if path not in self._modules:
            module: nn.Module | None = self._modules[""]
            # Wrappers are looked through, so their names say nothing; no recursion, as a file may hold any name.
            for name in path.split("."):
                module = module if name in _WITHIN else _child(module, name)
                if module is None:
                    break
            self._modules[path] = module
        return self._modules[path]


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    """The child of a module, or of what it is a wrapper around."""
    found = None
    while module is not None and found is None:
        found, module = children_of(module).get(name), _unwrapped(module)
    return found


def _unwrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper is around."""
    children = {name: child for name, child in children_of(module).items() if child is not None}
    found = next((children[name] for name in _WITHIN if name in children), None)
    # Others call a part of theirs "module", too; what wraps has no other part.
    return children.get("module") if found is None and len(children) == 1 else found


def mapped(names: Iterable[str], key_map: KeyMap | None) -> dict[str, str]:
    """Names of a checkpoint → names of a model, as the user says; without those that are left out."""
    rename = _renaming(key_map)
    return {name: new for name in names if (new := rename(name)) is not None}


def _renaming(key_map: KeyMap | None) -> Callable[[str], str | None]:
    if key_map is None:
        return lambda name: name
    if callable(key_map):
        return lambda name: _checked(key_map(name), f"key_map({name!r}) gives")
    pairs = _pairs(key_map)

    def rename(name: str) -> str | None:
        for old, new in pairs:
            below = not old or name.startswith(old if old.endswith(".") else f"{old}.")
            if name == old or (below and new is None):
                return new
            if below:
                rest = name.removeprefix(old).removeprefix(".")
                return f"{new}.{rest}" if new and not new.endswith(".") else f"{new}{rest}"
        return name

    return rename


def _pairs(key_map: Any) -> list[tuple[str, str | None]]:
    """The pairs of a ``key_map`` that is a dict or a list: the most special one first, or the first."""
    try:
        pairs = list(key_map.items() if isinstance(key_map, Mapping) else key_map)
        if isinstance(key_map, str) or not all(isinstance(each, tuple | list) for each in pairs):
            raise TypeError
        pairs = [(old or "", new) for old, new in pairs]
    except (TypeError, ValueError):
        raise TypeError(
            f"key_map is of type {type(key_map).__name__}, and has to be pairs of beginnings, a dict, or a function. "
            f"{_EXAMPLE}"
        ) from None
    for old, new in pairs:
        _checked(old, "key_map has")
        _checked(new, "key_map has")
    return sorted(pairs, key=lambda pair: -len(pair[0])) if isinstance(key_map, Mapping) else pairs


def _checked(name: Any, what: str) -> Any:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{what} an object of type {type(name).__name__}, and names are strings. {_EXAMPLE}")
    return name


_EXAMPLE = "Next: metaviz.checkpoint(path, key_map=[('net.', '')])"


def without_prefix(
    names: Mapping[str, tuple[int, ...] | None], model: nn.Module
) -> tuple[dict[str, str], str]:
    """Take off, or put on, what is usual in front of all names, where more of them fit the model then.

    Args:
        names: Shapes by name.
        model: The model.

    Returns:
        Names as they are given → names of the model, and a sentence on what was done (``""`` if nothing).
    """
    places = Places(model)
    best = {name: name for name in names}
    wrappers = [word for word in _WITHIN if any(word in name.split(".") for name in names if word in name)]
    said = [f"{', '.join(wrappers)} in its names was passed over"] if wrappers else []
    most, change = _fitting(best, names, places), ("", "")
    if most < len(names):
        for off, on in itertools.product(_off(names), _on(model)):
            tried = {name: on + name.removeprefix(off) for name in names}
            count = _fitting(tried, names, places)
            if count > most:
                best, most, change = tried, count, (off, on)
    words = ("was taken off its names", "was put before its names")
    said += [f"{prefix!r} {what}" for prefix, what in zip(change, words, strict=True) if prefix]
    return best, " and ".join(said)


def _off(names: Collection[str]) -> Iterator[str]:
    """What could be taken off: nothing, and what usual beginnings the most of the names have, one after the other."""
    prefix = ""
    # Nobody wraps deeper, and a file may hold any name.
    for _ in range(8):
        yield prefix
        counts = {more: sum(name.startswith(prefix + more) for name in names) for more in _USUAL}
        more = max(counts, key=counts.__getitem__)
        if not counts[more]:
            return
        prefix += more


def _on(model: nn.Module) -> Iterator[str]:
    """What could be put before names: nothing, and the usual names that lead further down in the model."""
    prefix, module = "", model
    base = getattr(type(model), "base_model_prefix", "")
    usual = (*_USUAL, f"{base}.") if isinstance(base, str) and base else _USUAL
    while module is not None:
        yield prefix
        more = next((word for word in usual if children_of(module).get(word[:-1]) is not None), None)
        module = None if more is None else children_of(module)[more[:-1]]
        prefix += more or ""


def _fitting(renamed: Mapping[str, str], shapes: Mapping[str, tuple[int, ...] | None], places: Places) -> int:
    """How many tensors of the model there are names with the right shape for."""
    fitting = set()
    for name, new in renamed.items():
        found = places.find(new)
        if found is not None and shapes[name] in (None, _shape(found[2])):
            fitting.add(id(found[2]))
    return len(fitting)


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a lazy one
        return None


def suggestion(stored: Iterable[str], expected: Iterable[str]) -> tuple[str, str] | None:
    """A beginning of the names in a checkpoint that should become another one, told by how names end."""
    ends: dict[str, list[str]] = {}
    for name in expected:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in stored:
        for other in ends.get(name.rpartition(".")[2], ())[:50]:
            votes[_beginnings(name, other)] += 1
    found = votes.most_common(1)
    return found[0][0] if found else None


def _beginnings(one: str, other: str) -> tuple[str, str]:
    """What two names differ in before what they have in common at their ends."""
    mine, theirs = one.split("."), other.split(".")
    while mine and theirs and mine[-1] == theirs[-1]:
        mine.pop()
        theirs.pop()
    return ".".join(mine), ".".join(theirs)


def nearest(name: str, names: list[str]) -> str:
    """The name most like another one."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.0)), "")
