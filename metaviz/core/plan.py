"""The plan: which tensors would get values, from where, in what memory. Making one touches nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core import devices
from metaviz.core.choice import Choice, Fill
from metaviz.core.paths import Model, Place, some
from metaviz.core.program import Program
from metaviz.core.replay import CPU, draws_for, peak_nbytes, plain_torch
from metaviz.core.sources import Sources
from metaviz.core.units import format_bytes
from metaviz.errors import CannotMaterialize, NotEnoughMemory

_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of a plan.

    Attributes:
        path: Its first path in the model.
        also: Its other paths (ties, references in lists).
        shape: Its shape.
        dtype: The dtype that it will have.
        nbytes: Bytes that it will take; 0 for what shares its memory with an earlier one of the plan.
        source: ``"replay"`` or ``"reset"``.
        reason: Where the values come from.
    """

    path: str
    also: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    source: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What :func:`metaviz.materialize` would do. A description: nothing is allocated, no value is read.

    Attributes:
        tensors: The tensors that would get values.
        blocked: ``{path: reason}`` of chosen tensors that no source can give values.
        lazy: Paths of chosen lazy tensors; they move to the device and get a shape with the first forward.
        kept: Paths of chosen tensors that are real already.
        pulled_in: Paths that were not chosen but share memory with one that was.
        device: Where the values would be.
        rng: ``"eager"``, ``"keyed"`` or ``"device"``.
        nbytes: Bytes that the tensors would take on ``device``.
        peak_nbytes: Most bytes in use at any time while filling, per device.
        free_nbytes: Bytes free now, per device.
    """

    tensors: tuple[PlannedTensor, ...]
    blocked: dict[str, str]
    lazy: tuple[str, ...]
    kept: tuple[str, ...]
    pulled_in: tuple[str, ...]
    device: torch.device
    rng: str
    nbytes: int
    peak_nbytes: dict[torch.device, int]
    free_nbytes: dict[torch.device, int]

    @property
    def fits(self) -> bool:
        """Whether there is enough free memory on every device that the plan uses."""
        return all(need <= self.free_nbytes[device] for device, need in self.peak_nbytes.items())

    def __str__(self) -> str:
        count = len(self.tensors)
        lines = [
            f"{count} tensor{'s' * (count != 1)}, {format_bytes(self.nbytes)} → {self.device}, "
            + ("fits" if self.fits else "does NOT fit")
            + f", {from_sources(self.tensors)} (rng={self.rng!r})"
        ]
        for device, need in self.peak_nbytes.items():
            lines.append(
                f"{device}: {format_bytes(need)} at most, {format_bytes(self.free_nbytes[device])} free"
            )
        lines += [f"blocked  {path}: {reason}" for path, reason in list(self.blocked.items())[:_SHOWN]]
        if len(self.blocked) > _SHOWN:
            lines.append(f"blocked  … and {len(self.blocked) - _SHOWN} more")
        notes = {"lazy": self.lazy, "real already": self.kept, "shares memory, comes along": self.pulled_in}
        lines += [f"{words}: {some(paths)}" for words, paths in notes.items() if paths]
        return "\n".join(lines)

    __repr__ = __str__


@dataclasses.dataclass(slots=True)
class Work:
    """A plan together with the objects that it is about, for :mod:`metaviz.core.apply`."""

    plan: Plan
    fills: list[Fill]
    lazy: list[torch.Tensor]
    places: dict[int, list[Place]]
    dtype: torch.dtype | None
    program: Program | None


def from_sources(tensors: Iterable[PlannedTensor]) -> str:
    """How many tensors come from which source: `"from replay"`, `"12 from replay, 2 from reset"`."""
    counts = Counter(tensor.source for tensor in tensors)
    if len(counts) < 2:
        return f"from {next(iter(counts), 'replay')}"
    return ", ".join(f"{number:,} from {source}" for source, number in counts.items())


def plan(
    model: nn.Module,
    paths: str | Iterable[str] = "",
    *,
    device: Any = None,
    source: str = "auto",
    rng: str = "eager",
    dtype: torch.dtype | str | None = None,
) -> Plan:
    """Say what :func:`metaviz.materialize` with the same arguments would do, and do nothing.

    Args:
        model: The model.
        paths: Module paths (each takes its subtree), tensor paths or globs; ``""`` is the whole model.
        device: Where the values shall be. Default: CPU.
        source: ``"replay"``, ``"reset"``, or ``"auto"``: replay where it can, else reset.
        rng: ``"eager"``, ``"keyed"`` or ``"device"``.
        dtype: Floating-point dtype to cast to. Default: what each tensor has now.

    Returns:
        The plan. Its text says what, where, from which source, and whether it fits.

    Raises:
        UnknownPath: A path means nothing in this model.
        UnknownDevice: This machine does not have the device.

    Example:
        >>> model = metaviz.build(torch.nn.Linear, 1024, 1024)
        >>> metaviz.plan(model, "weight").nbytes
        4194304
    """
    with plain_torch():
        return prepare(model, paths, device=device, source=source, rng=rng, dtype=dtype).plan


def prepare(
    model: nn.Module, paths: str | Iterable[str], *, device: Any, source: str, rng: str, dtype: Any
) -> Work:
    """The plan and what it is about; raises what :func:`plan` raises. Call it under :func:`plain_torch`."""
    target = devices.resolve(device)
    wanted = _floating(dtype)
    draws_for(rng, CPU)
    view = Model(model)
    chosen = view.select(paths)
    by_tensor: dict[int, list[Place]] = {}
    for place in view.places:
        by_tensor.setdefault(id(place.slot.tensor), []).append(place)
    lazy: list[torch.Tensor] = []
    kept: list[str] = []
    asked: list[list[Place]] = []
    for identity in dict.fromkeys(id(place.slot.tensor) for place in chosen):
        places = by_tensor[identity]
        tensor = places[0].slot.tensor
        if is_lazy(tensor):
            if tensor.is_meta:
                lazy.append(tensor)
        elif not tensor.is_meta:
            kept.append(places[0].path)
        else:
            asked.append(places)
    choice = Choice(Sources(model), source, wanted)
    choice.add(asked, by_tensor)
    fills, blocked = choice.fills, choice.blocked
    pulled_in = _pull_in(fills, blocked, by_tensor)
    found = list(fills.values())
    need = _peak(found, target, rng)
    described = Plan(
        tensors=tuple(_describe(found, by_tensor)),
        blocked=blocked,
        lazy=tuple(by_tensor[id(t)][0].path for t in lazy),
        kept=tuple(kept),
        pulled_in=pulled_in,
        device=target,
        rng=rng,
        nbytes=sum(fill.nbytes for fill in found),
        peak_nbytes=need,
        free_nbytes={where: devices.free_nbytes(where) for where in need},
    )
    return Work(described, found, lazy, by_tensor, wanted, choice.program)


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
            raise NotEnoughMemory(
                f"This takes {format_bytes(need)} on {device}, and {format_bytes(free)} are free. Nothing was changed. "
                f"Choose a smaller part, {_smaller(described, free)}"
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


def _floating(dtype: Any) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
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


def _peak(fills: list[Fill], target: torch.device, rng: str) -> dict[torch.device, int]:
    """Most bytes in use on each device while the fills are done one tape after the other."""
    where = draws_for(rng, CPU).device if rng == "eager" else target
    need = {where: 0, target: 0}
    done = 0
    for tape in {id(fill.tape): fill.tape for fill in fills}.values():
        stays: dict[int, int] = {}
        goes: dict[int, int] = {}
        for fill in fills:
            if fill.tape is tape:
                number = fill.source.storage
                stays[number] = stays.get(number, 0) + (fill.nbytes if fill.exact and where == target else 0)
                goes[number] = goes.get(number, 0) + (0 if fill.exact and where == target else fill.nbytes)
        same = where == target
        peak = peak_nbytes(tape, goes, stays, goes if same else {})
        need[where] = max(need[where], peak + (done if same else 0))
        done += sum(fill.nbytes for fill in fills if fill.tape is tape)
    need[target] = max(need[target], done)
    return {device: nbytes for device, nbytes in need.items() if nbytes or device == target}


def _describe(fills: list[Fill], by_tensor: dict[int, list[Place]]) -> Iterable[PlannedTensor]:
    for fill in fills:
        nbytes = fill.nbytes
        for tensor, reason in zip(fill.tensors, fill.reasons, strict=True):
            path, *also = (place.path for place in by_tensor[id(tensor)])
            yield PlannedTensor(
                path, tuple(also), tuple(tensor.shape), fill.dtype, nbytes, fill.origin, reason
            )
            nbytes = 0
