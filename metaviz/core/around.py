"""Around the model: what will hurt although no single tensor's source is to blame.

A pure look: no value is read, nothing is moved, no reference is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from metaviz.core.casts import Cast, about_casts, casts_since
from metaviz.core.finding import Finding, Look, fill, paths_of, where_from
from metaviz.core.loads import loaded
from metaviz.core.offload import about_offloaded, offloaded
from metaviz.core.optimizers import about_optimizers
from metaviz.core.origin import Origin, was
from metaviz.core.paths import Place, some
from metaviz.core.provenance import said
from metaviz.core.reasons import quoted
from metaviz.core.replay import plain_torch
from metaviz.core.units import plural

__all__ = ["Finding", "findings", "loaded", "offloaded"]


def findings(model: nn.Module, *, optimizers: Any = (), search: bool = False) -> tuple[Finding, ...]:
    """What will hurt around a model, the worst first; empty where all is well.

    Optimizers that would train nothing, values in places that torch never looks at, tensors that escaped the meta
    device, casts that lost something, values that an offloading hook keeps, and more: see :class:`Finding`.

    Args:
        model: The model. It is only looked at: no value is read, nothing is moved, no reference is kept.
        optimizers: An optimizer or several that shall train it; wrappers of Lightning and accelerate are opened.
        search: Whether to look for further optimizers among all objects of the process.

    Returns:
        One finding for all tensors with the same trouble.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> model = metaviz.build(torch.nn.Linear, 2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> [(finding.kind, finding.paths) for finding in metaviz.findings(model, optimizers=optimizer)]
        [('optimizer', ('weight', 'bias'))]
    """
    # Else a property of a tensor subclass runs its code, and a recording answers "cpu".
    with plain_torch():
        look = Look(model)
        told = _taped(look)
        lost, rounded, plain = about_casts([*told.cast, *casts_since(look)])
        recoverable, ids = about_offloaded(look)
        return (
            *lost,
            *about_optimizers(look, optimizers, search),
            *recoverable,
            *_escaped(look, ids),
            *_stale(look),
            *_captured(look),
            *_loaded(told.loaded),
            *_uninitialized(told.wholly, told.partly),
            *rounded,
            *_lazy(look),
            *_tied(look, ids),
            *plain,
        )


def _escaped(look: Look, recoverable: set[int]) -> Iterator[Finding]:
    blank = [
        place
        for key, place in look.empty.items()
        if place.slot.kind != "attribute" and key not in recoverable
    ]
    if not blank:
        return
    escaped = [
        place
        for place in look.real.values()
        if place.slot.kind != "attribute" and was(place.slot.tensor) is None
    ]
    if escaped:
        paths = paths_of(escaped)
        # The shorter list says more: one forgotten tensor on meta, or one table that stayed on the CPU.
        some_paths = (
            f"on meta: {some(paths_of(blank))}"
            if len(blank) < len(escaped)
            else f"not on meta: {some(paths)}"
        )
        yield Finding(
            "escaped",
            paths,
            f"{plural(len(escaped), 'tensor')} with values that metaviz did not give, beside {len(blank):,} on meta "
            f"({some_paths}): to_empty would overwrite those values, and Module.to stops half-way. "
            "torch.from_numpy, torch.Tensor(2, 3) and a partial load leave a model in this way.",
            'metaviz.materialize(model, device="cpu")  # never touches what holds values',
        )


def _stale(look: Look) -> Iterator[Finding]:
    stale = [
        place for place in look.empty.values() if place.slot.kind == "attribute" and not _made_anew(place)
    ]
    ready = [place for place in stale if _replayable(place)]
    blocked = [place for place in stale if not _replayable(place)]
    if ready:
        yield _unseen(ready, fill(paths_of(ready)))
    if blocked:
        name = quoted(blocked[0].slot.name)
        fix = f"self.register_buffer({name}, ..., persistent=False)  # in the constructor, then build again"
        yield _unseen(blocked, fix)


def _unseen(places: list[Place], fix: str) -> Finding:
    paths = paths_of(places)
    return Finding(
        "stale",
        paths,
        f"{plural(len(paths), 'tensor')} on meta in plain attributes, containers or closures: {some(paths)}. "
        "Module.to, to_empty and load_state_dict never see them, and leave them on meta.",
        fix,
    )


def _captured(look: Look) -> Iterator[Finding]:
    """Registered tensors that something else in the model holds, too, such as a closure of a hook."""
    held = [
        place
        for place in look.references
        # What a class re-points itself after a move, such as an LSTM the list of its weights, goes along.
        if id(place.slot.tensor) in look.empty and type(place.module)._apply is nn.Module._apply
    ]
    if held:
        place = held[0]
        registered = look.empty[id(place.slot.tensor)].path
        yield Finding(
            "stale",
            paths_of(held),
            f"{plural(len(held), 'place')} beside the registered ones with a tensor of the model, such as {place.path} "
            f"with {registered}: to_empty and load_state_dict(assign=True) make new tensors for the model, and the "
            "old ones stay there on meta. metaviz.materialize keeps the objects.",
            fill(paths_of(held)),
        )


def _replayable(place: Place) -> bool:
    origin = where_from(place)
    return origin is not None and not _missing(origin)


def _made_anew(place: Place) -> bool:
    """Whether torch itself computes the attribute before each forward: torch.nn.utils.weight_norm, prune and so on."""
    hooks = vars(place.module).get("_forward_pre_hooks") or {}
    return any(
        str(type(hook).__module__).startswith("torch.nn.utils.")
        and place.slot.name in (vars(hook).get("name"), vars(hook).get("_tensor_name"))
        for hook in dict.values(hooks)
        if hasattr(hook, "__dict__")
    )


class _Taped(NamedTuple):
    """What the tapes tell of the tensors on meta: those that there is something to say of."""

    cast: list[Cast]
    loaded: list[tuple[Place, Origin]]
    wholly: list[Place]
    partly: list[Place]


def _taped(look: Look) -> _Taped:
    told = _Taped([], [], [], [])
    for place, origin in look.known():
        tape, window, exact = origin
        if not exact and window.dtype != place.slot.tensor.dtype:
            told.cast.append(Cast(place, tape, window))
        missing = _missing(origin)
        if missing:
            start, stop = window.extent()
            (told.wholly if missing == stop - start else told.partly).append(place)
        elif loaded(tape, window):
            told.loaded.append((place, origin))
    return told


def _missing(origin: Origin) -> int:
    """How many bytes no op of an ordinary build writes."""
    writers = origin.tape.storages[origin.window.storage].writers
    # Nearly always the last op wrote this very window: no need to add up all of them.
    if writers and origin.window in origin.tape.ops[writers[-1]].writes:
        return 0
    return origin.tape.unwritten(origin.window)


def _loaded(found: list[tuple[Place, Origin]]) -> Iterator[Finding]:
    by_line: dict[str, list[Place]] = {}
    for place, origin in found:
        op = origin.tape.last_write(origin.window.storage)
        by_line.setdefault(f" at {said(op.where)}" if op.where else "", []).append(place)
    for line, places in by_line.items():
        paths = paths_of(places)
        yield Finding(
            "loaded",
            paths,
            f"The constructor itself loads the values of {plural(len(paths), 'tensor')}{line}: {some(paths)}. They are "
            "on the tape, so replay has them; a reset gives other values, and a build under torch.device('meta') "
            "loses them.",
            fill(paths, source="replay"),
        )


def _uninitialized(wholly: list[Place], partly: list[Place]) -> Iterator[Finding]:
    for places, what in ((wholly, "anything to"), (partly, "all of")):
        if places:
            paths = paths_of(places)
            yield Finding(
                "uninitialized",
                paths,
                f"The constructor never writes {what} {plural(len(paths), 'tensor')}: {some(paths)}. Even an ordinary "
                "build leaves there what the memory happened to hold, so they wait for a checkpoint or are a mistake.",
                f"torch.nn.init.zeros_(self.{places[0].slot.name})  # in the constructor",
            )


def _lazy(look: Look) -> Iterator[Finding]:
    if look.lazy:
        paths = paths_of(look.lazy.values())
        on_meta = any(place.slot.tensor.device.type == "meta" for place in look.lazy.values())
        yield Finding(
            "lazy",
            paths,
            f"No shape yet: {some(paths)}. The first forward gives a shape and values to {plural(len(paths), 'tensor')}"
            f"{', on meta a shape only' if on_meta else ''}.",
            ("metaviz.materialize(model); " if on_meta else "") + "model(example_input)",
        )


def _tied(look: Look, recoverable: set[int]) -> Iterator[Finding]:
    groups = [places for key, places in look.ties.items() if key in look.empty and key not in recoverable]
    if groups:
        named = some(" = ".join(paths_of(places)) for places in groups)
        together = ", ".join(dict.fromkeys(map(_submodule, groups[0])))
        yield Finding(
            "tied",
            paths_of(places[0] for places in groups),
            f"Tied: {named}. to_empty makes a tensor of its own for every slot, and fully_shard of the modules one by "
            "one unties them, too, both without an error.",
            f'metaviz.materialize(model, device="cpu")  # keeps ties; to shard: fully_shard([{together}])',
        )


def _submodule(place: Place) -> str:
    return f"model.get_submodule({quoted(place.module_path)})" if place.module_path else "model"
