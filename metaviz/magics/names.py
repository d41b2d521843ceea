"""Models in the user's namespace, by name. Finding one runs no code: no property, no expression."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError
from torch import nn

import metaviz

_MISSING = object()
_SHOWN = 5


def is_model(thing: Any) -> bool:
    """Whether ``thing`` is a module; ``isinstance`` would ask a ``__class__`` property too."""
    return issubclass(type(thing), nn.Module)


def below(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and every module registered below it, each once."""
    seen: set[int] = set()
    stack: list[Any] = [module]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack.extend(child for child in children(module).values() if child is not None)


def children(module: nn.Module) -> dict[str, Any]:
    """The registered children; none where ``super().__init__()`` was never called."""
    return _space(module).get("_modules", {})


def models(namespace: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The models that a user has bound to names, parts of other bound models and second names left out."""
    bound: dict[int, tuple[str, nn.Module]] = {}
    for name, thing in list(namespace.items()):
        if not name.startswith("_") and is_model(thing):
            bound.setdefault(id(thing), (name, thing))
    parts = {id(part) for _, model in bound.values() for part in below(model) if part is not model}
    return {name: model for key, (name, model) in bound.items() if key not in parts}


def resolve(namespace: Mapping[str, Any], dotted: str) -> nn.Module:
    """The model that ``dotted`` names: ``model``, ``self.model``, ``model.layers.0``.

    Raises:
        UsageError: It names no model, or is an expression, which would run code.
    """
    first, *rest = dotted.split(".")
    if not first.isidentifier() or not all(re.fullmatch(r"[\w-]+", part) for part in rest):
        raise UsageError(
            f"{dotted!r} is an expression, and a magic takes a name. Bind it first: part = {dotted}"
        )
    thing = namespace.get(first, _MISSING)
    if thing is _MISSING:
        raise UsageError(f"There is no {first!r} here. {_advice(namespace, first)}")
    so_far = first
    for part in rest:
        holder, thing = thing, look(thing, part)
        if thing is _MISSING:
            raise UsageError(_not_found(holder, so_far, part))
        so_far += f".{part}"
    if not is_model(thing):
        kind = f"{dotted!r} is of type {type(thing).__name__}, not a torch.nn.Module."
        raise UsageError(f"{kind} {_advice(namespace, first)}")
    return thing


def thing(namespace: Mapping[str, Any], said: str | None) -> Any:
    """What a name is bound to, ``trainer.strategy`` too, by lookup alone; a plan such as ``dp=2,tp=4`` as it is.

    Raises:
        UsageError: Nothing is called so.
    """
    if said is None or "=" in said:
        return said
    found = namespace.get(said.partition(".")[0], _MISSING)
    for part in said.split(".")[1:]:
        found = look(found, part)
    if found is _MISSING:
        raise UsageError(f"There is no {said!r} here. Bind it first, or give a plan: %meta_mesh dp=2,tp=4")
    return found


def checkpoint(namespace: Mapping[str, Any], options: argparse.Namespace) -> metaviz.Checkpoint | None:
    """The checkpoint that the options of a magic mean; None if they mean none.

    A name that is bound to a path, a state dict or a checkpoint goes before a file that is called so.

    Raises:
        UsageError: An entry of ``--key-map`` is no pair.
    """
    if options.checkpoint is None:
        return None
    bound = namespace.get(options.checkpoint)
    given = bound if issubclass(type(bound), str | os.PathLike | Mapping) else options.checkpoint
    pairs = [tuple(entry.split("=", 1)) for entry in options.key_map]
    if any(len(pair) != 2 for pair in pairs):
        raise UsageError(
            f"--key-map takes OLD=NEW, such as net.=model. or net.=, not {options.key_map[-1]!r}"
        )
    return metaviz.checkpoint(given, key_map=pairs or None, inside=options.inside)


def look(thing: Any, name: str) -> Any:
    """The submodule or plain attribute ``name`` of ``thing``, by lookup alone; else ``_MISSING``."""
    if is_model(thing):
        found = children(thing).get(name)
        if found is not None:
            return found
    found = _space(thing).get(name, _MISSING)
    if found is _MISSING:
        slot = inspect.getattr_static(type(thing), name, None)
        if isinstance(slot, types.MemberDescriptorType):
            try:
                return slot.__get__(thing)
            except AttributeError:
                return _MISSING
    return found


def parts(namespace: Mapping[str, Any], dotted: str) -> dict[str, nn.Module]:
    """Name → module for what can follow ``dotted.``; with ``""`` for what can come first."""
    if not dotted:
        held = {name: thing for name, thing in list(namespace.items()) if not name.startswith("_")}
    else:
        thing = _follow(namespace, dotted)
        held = {**_space(thing), **(children(thing) if is_model(thing) else {})}
    return {name: value for name, value in held.items() if is_model(value)}


def slots(namespace: Mapping[str, Any], dotted: str, path: str) -> list[str]:
    """Names of the modules, parameters and buffers directly below ``path`` of the model ``dotted``."""
    thing = _follow(namespace, dotted)
    for part in path.split(".") if path else ():
        thing = children(thing).get(part) if is_model(thing) else None
    if not is_model(thing):
        return []
    space = _space(thing)
    return [*children(thing), *space.get("_parameters", ()), *space.get("_buffers", ())]


def _follow(namespace: Mapping[str, Any], dotted: str) -> Any:
    first, *rest = dotted.split(".")
    thing = namespace.get(first, _MISSING)
    for part in rest:
        thing = look(thing, part)
    return thing


def _space(thing: Any) -> dict[str, Any]:
    """The instance dictionary of ``thing``, empty if it has none."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if type(found) is dict else {}


def _not_found(holder: Any, so_far: str, part: str) -> str:
    whole = f"{so_far}.{part}"
    if inspect.getattr_static(holder, part, _MISSING) is not _MISSING:
        return f"{whole!r} is a property or a method, and a magic runs no code. Bind it first: part = {whole}"
    known = [*children(holder)] if is_model(holder) else [*_space(holder)]
    near = difflib.get_close_matches(part, known[:10_000], n=1)
    hint = f"The nearest is '{so_far}.{near[0]}'." if near else f"See what there is: vars({so_far})"
    return f"{so_far!r} has no {part!r}. {hint}"


def _advice(namespace: Mapping[str, Any], name: str) -> str:
    known = list(models(namespace))
    if not known:
        return "No name holds a model yet. Build one: %%meta_build, and below it: model = Net()"
    known = difflib.get_close_matches(name, known, n=_SHOWN, cutoff=0.0)
    return f"Names that hold models: {', '.join(known)}. See them: %metaviz"
