"""The description of a plan: what would be done, as facts and as text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from metaviz.core import devices
from metaviz.core.footprint import CPU, Footprint, Item, footprint
from metaviz.core.match import Match
from metaviz.core.paths import some
from metaviz.core.spread import Spread
from metaviz.core.units import format_bytes

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
        source: ``"checkpoint"``, ``"replay"`` or ``"reset"``.
        reason: Where the values come from.
        device: Where they will be.
        requires_grad: Whether it is trained.
    """

    path: str
    also: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    source: str
    reason: str
    device: torch.device
    requires_grad: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What :func:`metaviz.materialize` would do. A description: nothing is allocated, no value is read.

    Attributes:
        tensors: The tensors that would get values.
        blocked: ``{path: reason}`` of chosen tensors that no source can give values.
        lazy: Paths of chosen lazy tensors; they move to the device and get a shape with the first forward.
        kept: Paths of chosen tensors that are real already.
        pulled_in: Paths that were not chosen but share memory with one that was.
        device: Where the values would be; of several, the first.
        rng: ``"eager"``, ``"keyed"`` or ``"device"``.
        nbytes: Bytes that the tensors would take.
        peak_nbytes: Most bytes in use at any time while filling, per device.
        free_nbytes: Bytes free now, per device.
        match: How the checkpoint fits the model, None where none is given.
        spread: How the parts are spread over devices, where that was asked for.
        would_fit: The parts that there is room for, the first of them in the order of the model, where not all fits.
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
    match: Match | None = None
    spread: Spread | None = None
    would_fit: tuple[str, ...] = ()

    @property
    def devices(self) -> dict[torch.device, int]:
        """The devices where values would be, and how many bytes on each."""
        return on_devices(self.tensors, self.device)

    @property
    def fits(self) -> bool:
        """Whether there is enough free memory on every device that the plan uses."""
        return all(need <= self.free_nbytes[device] for device, need in self.peak_nbytes.items())

    def __str__(self) -> str:
        count = len(self.tensors)
        lines = [
            f"{count} tensor{'s' * (count != 1)}, {format_bytes(self.nbytes)} → {self._where()}, "
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
        if self.spread is not None:
            lines += str(self.spread).splitlines()
        if self.match is not None:
            lines += from_elsewhere(self.tensors, self.match)
        return "\n".join(lines)

    def memory(self, *, gradients: bool = False, optimizer: Any = None) -> Footprint:
        """The memory that the values take by device and dtype, and whether it is there; of training, if asked for.

        Activations, and what is needed while filling (:attr:`peak_nbytes`), are not in it.

        Args:
            gradients: Whether to count gradients.
            optimizer: A class of torch.optim, its name, or a function from parameters to an optimizer: it does one
                step on the meta device, and what it keeps then is counted.

        Raises:
            ValueError: There is no such optimizer.
            MetavizError: The optimizer cannot do a step on meta.

        Example:
            >>> model = metaviz.build(torch.nn.Linear, 1024, 1024, bias=False)
            >>> plan = metaviz.plan(model)
            >>> plan.memory(gradients=True, optimizer="AdamW").nbytes
            {device(type='cpu'): 16777220}
        """
        items = [
            Item(each.path, each.shape, each.dtype, each.requires_grad, each.device, each.nbytes)
            for each in self.tensors
        ]
        free = {device: devices.free_nbytes(device) for device in {CPU, *self.devices}}
        return footprint(items, free, gradients=gradients, optimizer=optimizer)

    def _where(self) -> str:
        found = self.devices
        if len(found) == 1:
            return str(self.device)
        return ", ".join(f"{device} {format_bytes(nbytes)}" for device, nbytes in found.items())

    __repr__ = __str__


def from_sources(tensors: Iterable[PlannedTensor]) -> str:
    """How many tensors come from which source: `"from replay"`, `"12 from replay, 2 from reset"`."""
    counts = Counter(tensor.source for tensor in tensors)
    if len(counts) < 2:
        return f"from {next(iter(counts), 'replay')}"
    return ", ".join(f"{number:,} from {source}" for source, number in counts.items())


def from_elsewhere(tensors: Iterable[PlannedTensor], match: Match) -> list[str]:
    """What the checkpoint lacks, and where that comes from; what else is in it; what was done to names and dtypes."""
    lines = list(match.notes)
    unsaved = set(match.not_saved)
    for source in ("replay", "reset"):
        paths = [tensor.path for tensor in tensors if tensor.source == source]
        named = {
            f"not in {match.checkpoint.called}": [path for path in paths if path not in unsaved],
            "never saved": [path for path in paths if path in unsaved],
        }
        lines += [f"{words}, from {source}: {some(found)}" for words, found in named.items() if found]
    dtypes = Counter(
        (match.dtypes[tensor.path], str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors
        if tensor.source == "checkpoint" and tensor.path in match.dtypes
    )
    lines += [
        f"{number:,} stored as {there}, {here} here"
        for (there, here), number in dtypes.items()
        if there != here
    ]
    if match.unexpected:
        lines.append(f"in {match.checkpoint.called}, but not in the model: {some(match.unexpected)}")
    return lines


def on_devices(tensors: Iterable[PlannedTensor], device: torch.device) -> dict[torch.device, int]:
    """Bytes on each device, ``device`` first where there are none at all."""
    found: Counter[torch.device] = Counter()
    for tensor in tensors:
        found[tensor.device] += tensor.nbytes
    return dict(found) or {device: 0}
