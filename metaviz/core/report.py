"""The report: what was done to a model."""

from __future__ import annotations

import dataclasses

import torch

from metaviz.core.description import PlannedTensor, from_elsewhere, from_sources, on_devices
from metaviz.core.match import Match
from metaviz.core.paths import some
from metaviz.core.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What was done to a model.

    Attributes:
        action: ``"materialized"`` or ``"unloaded"``.
        tensors: The tensors that changed.
        skipped: ``{path: reason}`` of blocked tensors that were left on meta.
        kept: Paths of chosen tensors that were real already.
        lazy: Paths of lazy tensors that moved to the device.
        repointed: Paths whose tensor object had to be replaced by a new one, because something holds on to the old
            one: an optimizer or a hook made before may still have that.
        stranded: Paths that still hold the old tensor, because a tuple or a frozen object holds it.
        device: Where the tensors are now; of several, the first.
        nbytes: Bytes that they take there.
        seconds: Time that it took.
        pulled_in: Paths that were not chosen but share memory with one that was.
        match: How the checkpoint fits the model, None where none was given.
        conflicts: ``{path: sentence}`` of tensors that are stored under several names, with other values.
    """

    action: str
    tensors: tuple[PlannedTensor, ...]
    skipped: dict[str, str]
    kept: tuple[str, ...]
    lazy: tuple[str, ...]
    repointed: tuple[str, ...]
    stranded: tuple[str, ...]
    device: torch.device
    nbytes: int
    seconds: float
    pulled_in: tuple[str, ...] = ()
    match: Match | None = None
    conflicts: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def devices(self) -> dict[torch.device, int]:
        """The devices where the tensors are now, and how many bytes on each."""
        return on_devices(self.tensors, self.device)

    def _where(self) -> str:
        found = self.devices
        if len(found) == 1:
            return str(self.device)
        return ", ".join(f"{device} ({format_bytes(nbytes)})" for device, nbytes in found.items())

    def __str__(self) -> str:
        count = len(self.tensors)
        # That values come from the tape goes without saying; that others do has to be said.
        named = {tensor.source for tensor in self.tensors} - {"replay"}
        source = f" {from_sources(self.tensors)}," if named else ""
        what = f"{self.action} {count} tensor{'s' * (count != 1)}, {format_bytes(self.nbytes)}"
        lines = [f"{what},{source} on {self._where()} in {format_seconds(self.seconds)}"]
        notes = {
            "left on meta, blocked": self.skipped,
            "real already": self.kept,
            "lazy, moved": self.lazy,
            "shared memory, came along": self.pulled_in,
            "new objects (make optimizers that hold the old ones again)": self.repointed,
            "still the old tensor (held by a tuple or a frozen object)": self.stranded,
        }
        lines += [f"{words}: {some(paths)}" for words, paths in notes.items() if paths]
        if self.match is not None:
            lines += from_elsewhere(self.tensors, self.match)
        lines += [f"conflict at {path}: {sentence}" for path, sentence in self.conflicts.items()]
        return "\n".join(lines)

    __repr__ = __str__
