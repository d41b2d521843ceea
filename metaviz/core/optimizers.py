"""Optimizers and a model: those that would train nothing, because they hold tensors on meta or none of the model's.

Of an optimizer only ``param_groups``, ``state`` and ``optimizer`` (where a wrapper keeps the real one) are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from metaviz.core.finding import Finding, Look, is_empty, paths_of
from metaviz.core.living import living
from metaviz.core.paths import some
from metaviz.core.units import plural

_AGAIN = "optimizer = type(optimizer)(model.parameters(), ...)"


class _Held(NamedTuple):
    """What one optimizer holds: the name of its class, its tensors, its state by the ids of those."""

    name: str
    tensors: list[torch.Tensor]
    state: dict[int, Any]


def about_optimizers(look: Look, optimizers: Any, search: bool) -> Iterator[Finding]:
    """The optimizers that would not train the model.

    Args:
        look: The model.
        optimizers: An optimizer, or several; wrappers of Lightning and accelerate, and schedulers, stand for theirs.
        search: Whether to look for more among all objects of the process. Of those, only the ones that hold tensors
            of this model, or on meta ones that look like them, are told of.
    """
    seen: set[int] = set()
    given = []
    for optimizer in _listed(optimizers):
        held = _held(optimizer, seen)
        if isinstance(held, str):
            yield Finding("optimizer", (), held, _AGAIN)
        elif held is not None:
            given.append(held)
    found = []
    if search:
        found = [
            held for each in living(torch.optim.Optimizer) if isinstance(held := _held(each, seen), _Held)
        ]
    trained = {id(tensor) for held in (*given, *found) for tensor in held.tensors}
    for held in given:
        yield from _judge(look, held, trained, given=True)
    for held in found:
        yield from _judge(look, held, trained, given=False)


def _judge(look: Look, held: _Held, trained: set[int], given: bool) -> Iterator[Finding]:
    mine = (look.empty, look.real, look.lazy)
    strangers = [tensor for tensor in held.tensors if not any(id(tensor) in places for places in mine)]
    replaced = _alike(strangers, _untrained(look, trained)) if strangers else []
    if len(strangers) < len(held.tensors):
        yield from _on_meta(look, held)
        yield from _state_on_meta(look, held)
    elif not given and (
        len(replaced) < len(strangers) or not all(map(is_empty, strangers)) or _of_others(strangers)
    ):
        return
    if replaced:
        yield Finding(
            "optimizer",
            tuple(replaced),
            f"{held.name} holds {plural(len(replaced), 'tensor')} that the model does not have (any more), and does "
            f"not hold {some(replaced)} of the same shape: step() would change what the model does not use. to_empty "
            "and load_state_dict(assign=True) replace Parameters in this way.",
            f"{_AGAIN}  # with the Parameters that the model has now",
        )
    elif given and held.tensors and len(strangers) == len(held.tensors):
        yield Finding(
            "optimizer",
            (),
            f"{held.name} holds none of the model's tensors: step() would not train the model.",
            _AGAIN,
        )


def _of_others(tensors: list[torch.Tensor]) -> bool:
    """Whether some of the tensors belong to another model that lives."""
    ids = set(map(id, tensors))
    spaces = (object.__getattribute__(module, "__dict__") for module in living(torch.nn.Module))
    return any(not ids.isdisjoint(map(id, (space.get("_parameters") or {}).values())) for space in spaces)


def _on_meta(look: Look, held: _Held) -> Iterator[Finding]:
    paths = paths_of(look.empty[id(tensor)] for tensor in held.tensors if id(tensor) in look.empty)
    if paths:
        yield Finding(
            "optimizer",
            paths,
            f"{held.name} holds {plural(len(held.tensors), 'tensor')}, of which {len(paths):,} "
            f"{'is' if len(paths) == 1 else 'are'} on meta: step() runs without an error and trains nothing there. "
            "metaviz.materialize keeps the Parameter objects, save those that its report lists as new, and the "
            "optimizer is good then; to_empty makes new ones, and the optimizer has to be made again.",
            f'metaviz.materialize(model, device="cpu")  # or: model.to_empty(device="cpu"); {_AGAIN}',
        )


def _state_on_meta(look: Look, held: _Held) -> Iterator[Finding]:
    paths = paths_of(
        look.real[key]
        for key, state in held.state.items()
        if key in look.real and isinstance(state, dict) and any(map(_is_empty_tensor, state.values()))
    )
    if paths:
        yield Finding(
            "optimizer",
            paths,
            f"{held.name} made a step while {some(paths)} had no values, and what it remembers of that is on meta: "
            "the next step() fails or trains nothing.",
            "optimizer.state.clear()  # start afresh, with the same settings",
        )


def _is_empty_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and is_empty(value)


def _untrained(look: Look, trained: set[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Path and shape of the trainable Parameters that no optimizer at hand holds."""
    return [
        (place.path, tuple(place.slot.tensor.shape))
        for places in (look.empty, look.real)
        for key, place in places.items()
        if place.slot.kind == "parameter" and key not in trained and place.slot.tensor.requires_grad
    ]


def _alike(strangers: list[torch.Tensor], missing: list[tuple[str, tuple[int, ...]]]) -> list[str]:
    """The paths of ``missing`` for which there is a stranger of the same shape, each stranger once."""
    shapes = Counter(tuple(tensor.shape) for tensor in strangers if not is_lazy(tensor))
    paths = []
    for path, shape in missing:
        if shapes[shape]:
            shapes[shape] -= 1
            paths.append(path)
    return paths


def _listed(optimizers: Any) -> list[Any]:
    """What was passed in as a list: one optimizer is allowed, too."""
    return list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]


def _held(optimizer: Any, seen: set[int]) -> _Held | str | None:
    """What ``optimizer`` holds, or why that cannot be told; None if it was seen in another wrapper."""
    name = type(optimizer).__name__
    try:
        # A wrapper need not have groups of its own.
        holder = optimizer if hasattr(optimizer, "param_groups") else optimizer.optimizer
        groups = holder.param_groups
        if id(groups) in seen:
            return None
        seen.add(id(groups))
        tensors = [tensor for group in groups for tensor in group["params"]]
        odd = next((each for each in tensors if not issubclass(type(each), torch.Tensor)), None)
        if odd is not None:
            return f"{name} holds a {type(odd).__name__} among its parameters: step() would fail."
        state = getattr(holder, "state", None)
        kept = {id(key): value for key, value in (dict.items(state) if isinstance(state, dict) else ())}
    except Exception as error:
        return f"What {name} trains cannot be read ({type(error).__name__}): it is no optimizer, or a broken one."
    return _Held(name, tensors, kept)
