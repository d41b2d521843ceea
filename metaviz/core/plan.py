"""The plan: which tensors would get values, from where, in what memory. Making one touches nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core import devices
from metaviz.core.checkpoint import checkpoint as opened
from metaviz.core.choice import Choice, Fill
from metaviz.core.description import Plan, PlannedTensor
from metaviz.core.loading import Loading
from metaviz.core.match import Match, matching
from metaviz.core.paths import Model, Place, some
from metaviz.core.placing import Targets
from metaviz.core.program import Program
from metaviz.core.replay import CPU, draws_for, plain_torch
from metaviz.core.runs import peak
from metaviz.core.sources import Sources, check_source
from metaviz.core.units import format_bytes
from metaviz.errors import CannotMaterialize, CheckpointMismatch, NotEnoughMemory


@dataclasses.dataclass(slots=True)
class Work:
    """A plan together with the objects that it is about, for :mod:`metaviz.core.apply`."""

    plan: Plan
    fills: list[Fill]
    lazy: list[torch.Tensor]
    places: dict[int, list[Place]]
    dtype: torch.dtype | None
    program: Program | None
    loading: Loading | None


def plan(
    model: nn.Module,
    paths: str | Iterable[str] = "",
    *,
    device: Any = None,
    source: str = "auto",
    rng: str = "eager",
    dtype: torch.dtype | str | None = None,
    checkpoint: Any = None,
) -> Plan:
    """Say what :func:`metaviz.materialize` with the same arguments would do, and do nothing.

    Args:
        model: The model.
        paths: Module paths (each takes its subtree), tensor paths or globs; ``""`` is the whole model.
        device: Where the values shall be: a device, ``"auto"`` to spread the parts over all there are, or a dict of
            module paths and devices (the rest goes to the CPU). Default: CPU.
        source: ``"checkpoint"``, ``"replay"``, ``"reset"``, or ``"auto"`` for the first of them that can.
        rng: ``"eager"``, ``"keyed"`` or ``"device"``.
        dtype: Floating-point dtype to cast to, or ``"checkpoint"`` for what is stored. Default: what each tensor has
            now.
        checkpoint: A path, a state dict or :func:`metaviz.checkpoint`; only its headers are read.

    Returns:
        The plan. Its text says what, where, from which source, and whether it fits.

    Raises:
        UnknownPath: A path means nothing in this model.
        UnknownDevice: This machine does not have the device.
        BadCheckpoint: The checkpoint cannot be read.
        CheckpointMismatch: Nothing in the checkpoint fits the model.

    Example:
        >>> model = metaviz.build(torch.nn.Linear, 1024, 1024)
        >>> metaviz.plan(model, "weight").nbytes
        4194304
    """
    with plain_torch():
        options = {"device": device, "source": source, "rng": rng, "dtype": dtype, "checkpoint": checkpoint}
        return prepare(model, paths, **options).plan


def prepare(
    model: nn.Module,
    paths: str | Iterable[str],
    *,
    device: Any,
    source: str,
    rng: str,
    dtype: Any,
    checkpoint: Any,
) -> Work:
    """The plan and what it is about; raises what :func:`plan` raises. Call it under :func:`plain_torch`."""
    wanted = dtype if isinstance(dtype, str) and dtype == "checkpoint" else floating(dtype)
    check_source(source if wanted != "checkpoint" or checkpoint is not None else "checkpoint", checkpoint)
    draws_for(rng, CPU)
    view = Model(model)
    targets = Targets(device, view)
    chosen = view.select(paths)
    by_tensor: dict[int, list[Place]] = {}
    for place in view.places:
        by_tensor.setdefault(id(place.slot.tensor), []).append(place)
    asked, kept, lazy = _sorted(chosen, by_tensor)
    loading = None if checkpoint is None else Loading(model, opened(checkpoint))
    match = None if loading is None else matching(view, loading)
    choice = Choice(Sources(model, loading), source, wanted)
    choice.add(asked, by_tensor)
    fills, blocked = choice.fills, choice.blocked
    pulled_in = _pull_in(fills, blocked, by_tensor)
    found = list(fills.values())
    spread = targets.place(found, by_tensor)
    need = peak(found, rng) or {targets.first: 0}
    described = Plan(
        tensors=tuple(_describe(found, by_tensor)),
        blocked=blocked,
        lazy=tuple(by_tensor[id(t)][0].path for t in lazy),
        kept=tuple(places[0].path for places in kept),
        pulled_in=pulled_in,
        device=found[0].device if found else targets.first,
        rng=rng,
        nbytes=sum(fill.nbytes for fill in found),
        peak_nbytes=need,
        free_nbytes={where: devices.free_nbytes(where) for where in need},
        match=match,
        spread=spread,
        would_fit=targets.would_fit(found, by_tensor, need),
    )
    dtype = None if wanted == "checkpoint" else wanted
    return Work(described, found, lazy, by_tensor, dtype, choice.program, loading)


def _sorted(
    chosen: list[Place], by_tensor: dict[int, list[Place]]
) -> tuple[list[list[Place]], list[list[Place]], list[torch.Tensor]]:
    """The places of the tensors that are on meta, of those that are real, and the lazy tensors."""
    asked, kept, lazy = [], [], []
    for identity in dict.fromkeys(id(place.slot.tensor) for place in chosen):
        places = by_tensor[identity]
        tensor = places[0].slot.tensor
        if not is_lazy(tensor):
            (asked if tensor.is_meta else kept).append(places)
        elif tensor.is_meta:
            lazy.append(tensor)
    return asked, kept, lazy


def check(described: Plan, blocked: str = "error", source: str = "auto") -> None:
    """Refuse a plan that cannot be carried out.

    Args:
        described: The plan.
        blocked: ``"error"`` refuses a plan with blocked tensors, ``"skip"`` leaves them on meta.
        source: What was asked for, so that the advice asks for it, too.

    Raises:
        CannotMaterialize: Some chosen tensors are blocked.
        NotEnoughMemory: The plan does not fit.
    """
    if blocked not in ("error", "skip"):
        raise ValueError(f"blocked={blocked!r} is not one of 'error', 'skip'.")
    if described.blocked and blocked == "error":
        if described.match is not None:
            _refuse_shapes(described, described.match)
        count = len(described.blocked)
        total = count + len(described.tensors)
        path, reason = next(iter(described.blocked.items()))
        asked = "" if source == "auto" else f"source={source!r}, "
        rest = (
            f"To fill only the rest: metaviz.materialize(model, paths, {asked}blocked='skip'). "
            if described.tensors
            else ""
        )
        raise CannotMaterialize(
            f"Cannot materialize {count} of {total} chosen tensors: {some(described.blocked)}. {rest}{path}: {reason}"
        )
    for device, need in described.peak_nbytes.items():
        free = described.free_nbytes[device]
        if need > free:
            fits = f"There is room for {some(described.would_fit)}. " if described.would_fit else ""
            raise NotEnoughMemory(
                f"This takes {format_bytes(need)} on {device}, and {format_bytes(free)} are free. Nothing was changed. "
                f"{fits}Choose a smaller part, {_smaller(described, free)}"
            )


def _refuse_shapes(described: Plan, match: Match) -> None:
    """Refuse a checkpoint with tensors of other shapes: it is of another model, or of one that is set up otherwise."""
    differ = {path: reason for path, reason in described.blocked.items() if path in match.shapes}
    if differ:
        listed = "".join(f"\n  {path}: {reason}" for path, reason in differ.items())
        raise CheckpointMismatch(
            f"{len(differ)} of {len(described.blocked) + len(described.tensors)} chosen tensors have another shape in "
            f"{match.checkpoint.called}. Nothing was changed.{listed}\n"
            "Next: build the model with the configuration of the checkpoint, or leave them out: "
            "metaviz.checkpoint(path, key_map=lambda name: None if name in names else name)"
        )


def _smaller(described: Plan, free: int) -> str:
    """What else helps against too little memory, as code."""
    cast = sum(
        t.nbytes * 2 // t.dtype.itemsize if t.dtype.is_floating_point and t.dtype.itemsize > 2 else t.nbytes
        for t in described.tensors
    )
    # Casting needs room for one tensor in both dtypes.
    if cast + max(t.nbytes for t in described.tensors) <= free:
        return "or take it in fewer bits: metaviz.materialize(model, paths, dtype='bfloat16')"
    return "for which see: print(metaviz.tree(model))"


#: What people call dtypes for short, besides torch's own names.
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def floating(dtype: Any) -> torch.dtype | None:
    """The dtype that a user means to cast to; None stands for no cast.

    Raises:
        ValueError: It is no floating-point dtype.
    """
    found = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, SHORT.get(name, name), None)
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        found = None
    if dtype is not None and found is None:
        raise ValueError(
            f"dtype={dtype!r} is not a floating-point dtype such as 'bfloat16' or torch.float16."
        )
    return found


def _pull_in(
    fills: dict[Any, Fill], blocked: dict[str, str], by_tensor: dict[int, list[Place]]
) -> tuple[str, ...]:
    """Add the tensors that share memory with a chosen one: given values apart, they would come apart."""
    owners = {fill.tensors[0].untyped_storage()._cdata: fill for fill in fills.values() if fill.exact}
    chosen = {id(tensor) for fill in fills.values() for tensor in fill.tensors}
    found = []
    for identity, places in by_tensor.items():
        tensor = places[0].slot.tensor
        if identity in chosen or is_lazy(tensor) or not tensor.is_meta or places[0].path in blocked:
            continue
        try:
            owner = owners.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            continue
        if owner is not None:
            owner.tensors.append(tensor)
            owner.reasons.append(f"shares its memory with {by_tensor[id(owner.tensors[0])][0].path}")
            found.append(places[0].path)
    return tuple(found)


def _describe(fills: list[Fill], by_tensor: dict[int, list[Place]]) -> Iterable[PlannedTensor]:
    for fill in fills:
        nbytes = fill.nbytes
        for tensor, reason in zip(fill.tensors, fill.reasons, strict=True):
            path, *also = (place.path for place in by_tensor[id(tensor)])
            yield PlannedTensor(
                path,
                tuple(also),
                tuple(tensor.shape),
                fill.dtype,
                nbytes,
                fill.origin,
                reason,
                fill.device,
                tensor.requires_grad,
            )
            nbytes = 0
