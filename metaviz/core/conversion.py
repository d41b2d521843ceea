"""Conversion: checkpoints that are stored in another layout than the modules that transformers makes for them.

The library has a mapping of its own: names that have changed, experts that are merged into one tensor, projections that
are fused. It is used here as its loader does, on tensors that are on meta.
Source: `convert_and_load_state_dict_in_model` of transformers 5, in core_model_loading.py.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from metaviz.core.naming import Places
from metaviz.core.paths import some
from metaviz.core.units import plural

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Made(NamedTuple):
    """Tensors of a model that are made of stored ones.

    Attributes:
        target: The name in the model, the first of them.
        sources: Names of the stored ones.
        make: From tensors by those names to tensors by the names of the model.
        words: How, in a few words.
    """

    target: str
    sources: tuple[str, ...]
    make: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
    words: str


class Conversions(NamedTuple):
    """What a library does with the tensors of a checkpoint before a model gets them.

    Attributes:
        renamed: Names in the checkpoint → names in the model, where they differ.
        made: What is made of stored tensors.
        note: What was done, in a sentence; ``""`` if nothing.
    """

    renamed: dict[str, str]
    made: tuple[Made, ...]
    note: str = ""


def conversions(model: nn.Module, stored: Iterable[str]) -> Conversions:
    """What transformers would do to the tensors of a checkpoint for a model of its own.

    Nothing is imported for it: a model of transformers has brought the library along.

    Args:
        model: The model, which stays as it is.
        stored: The names in the checkpoint.
    """
    library = _library(model)
    if library is None:
        return Conversions({}, ())
    loader, mapping_of = library
    if loader is None:
        return Conversions({}, (), _OLD)
    try:
        return _converted(model, stored, loader, mapping_of(model))
    except Exception as error:
        reason = f"it raises {type(error).__name__} for this checkpoint"
        return Conversions({}, (), f"transformers' own mapping of stored names was left out: {reason}.")


def _converted(model: nn.Module, stored: Iterable[str], loader: Any, transforms: list[Any]) -> Conversions:
    renamings = [each for each in transforms if isinstance(each, loader.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loader.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    expected, prefix = _Expected(model), model.base_model_prefix
    # Names of the model → the stored name that is there as it is, or under another name.
    taken: dict[str, str] = {}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    beaten: dict[str, str] = {}
    for name in sorted(stored, key=loader.dot_natural_key):
        new, pattern = loader.rename_source_key(name, renamings, converters, prefix, expected)
        if new not in expected and name in expected:
            new, pattern = loader.rename_source_key(name, [], [], prefix, expected)
        # The first one has the place, as in the library; one that has the name as it is has to be told.
        if new not in expected or (pattern is None and new in groups):
            continue
        if pattern is not None and new not in taken:
            groups.setdefault(new, (by_pattern[pattern], []))[1].append((name, pattern))
        elif taken.setdefault(new, name) != name and name == new:
            beaten[taken[new]] = new
    renamed = {name: new for new, name in taken.items() if name != new and name not in beaten}
    made = [_made(model, target, converter, found) for target, (converter, found) in groups.items()]
    made += [_renamed(name, target) for name, target in beaten.items()]
    return Conversions(renamed, tuple(made), _note(len(renamed) + len(beaten), groups))


_OLD = (
    "This version of transformers has no mapping of stored names that could be used here: where its modules are laid "
    "out otherwise than the checkpoint, a key_map is needed."
)


def _library(model: nn.Module) -> tuple[Any, Any] | None:
    """The loader of transformers and its mapping, None for another model; empty ones where it has none."""
    utils = sys.modules.get("transformers.modeling_utils")
    if utils is None or not isinstance(model, utils.PreTrainedModel):
        return None
    loader = sys.modules.get("transformers.core_model_loading")
    mapping = getattr(
        sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None
    )
    needed = ("WeightRenaming", "WeightConverter", "rename_source_key", "dot_natural_key")
    if mapping is None or not all(hasattr(loader, name) for name in needed):
        return None, None
    return loader, mapping


class _Expected:
    """The names of a model's state dict, as far as the library asks for them."""

    def __init__(self, model: nn.Module) -> None:
        self._places = Places(model)

    def get(self, name: str) -> torch.Tensor | None:
        found = self._places.find(name)
        return None if found is None else found[2]

    def __contains__(self, name: str) -> bool:
        return self._places.find(name) is not None


def _made(model: nn.Module, target: str, converter: Any, found: list[tuple[str, str]]) -> Made:
    operations = " and ".join(dict.fromkeys(type(each).__name__ for each in converter.operations))

    def make(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(converter)
        for name, pattern in found:
            own.add_tensor(target, name, pattern, tensors[name])
        result = own.convert(target, model=model, config=model.config)
        # The first versions of transformers 5 give a list of errors with it.
        result = result[0] if isinstance(result, tuple) else result
        return {name: each[0] if isinstance(each, list) else each for name, each in result.items()}

    words = f"{plural(len(found), 'tensor')} by transformers' {operations}"
    return Made(target, tuple(name for name, _ in found), make, words)


def _renamed(name: str, target: str) -> Made:
    """A tensor that takes the place of another one, which has the name already."""
    return Made(
        target,
        (name,),
        lambda tensors: {target: tensors[name]},
        f"{name}, renamed by transformers' own mapping",
    )


def _note(renamed: int, groups: Mapping[str, tuple[Any, list]]) -> str:
    said = []
    if renamed:
        said.append(f"{plural(renamed, 'name')} changed")
    if groups:
        said.append(f"{plural(sum(len(found) for _, found in groups.values()), 'tensor')} put together")
    return f"By transformers' own mapping: {' and '.join(said)}." if said else ""


def needs_map(missing: Iterable[str], unexpected: Iterable[str]) -> list[str]:
    """Sentences on names that seem to belong together, though in another layout.

    Args:
        missing: Names of the model that a checkpoint lacks.
        unexpected: Names in it that the model lacks.
    """
    kinds = Counter(map(_starred, unexpected))
    sentences = []
    for mine in dict.fromkeys(map(_starred, missing)):
        parts = mine.split(".")
        for end in range(len(parts) - 1, 1, -1):
            start = ".".join(parts[:end]) + "."
            close = {kind: number for kind, number in kinds.items() if kind.startswith(start)}
            if close:
                stored = f"{some(close)} ({plural(sum(close.values()), 'tensor')})"
                need = "that needs a key_map, or a state dict made by hand"
                sentences.append(f"{mine} may be another layout of {stored}: {need}")
                break
    return sentences[:3]


def _starred(name: str) -> str:
    return _NUMBER.sub("*", name)
