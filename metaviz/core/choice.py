"""The choice: for each tensor of a plan the source that gives it its values, and where on a tape they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from metaviz.core.loading import Loading
from metaviz.core.origin import origin_of
from metaviz.core.paths import Place
from metaviz.core.program import Program
from metaviz.core.replay import CPU
from metaviz.core.shadow import is_plain
from metaviz.core.sources import Slot, Sources, check_source
from metaviz.core.tape import Tape, Window, window
from metaviz.core.verdict import Verdict


@dataclasses.dataclass(slots=True)
class Fill:
    """Tensors that get their values from one place, and share memory if ``exact``; ``origin`` is the source's name.

    ``source`` is the window of the tape that has the values; the tensors keep their own sizes and strides.
    """

    tape: Tape
    source: Window
    exact: bool
    dtype: torch.dtype
    tensors: list[torch.Tensor]
    reasons: list[str]
    origin: str
    device: torch.device = CPU

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take together."""
        if self.exact:
            return self.tape.storages[self.source.storage].nbytes
        first = self.tensors[0]
        start, stop = Window(0, self.dtype, first.size(), first.stride(), 0).extent()
        return stop - start


class Choice:
    """Chooses the sources of tensors on meta, and works out where the values are.

    Args:
        sources: Of the model.
        source: ``"auto"``, ``"checkpoint"``, ``"replay"`` or ``"reset"``.
        dtype: Floating-point dtype to cast to, ``"checkpoint"`` for the one that is stored, None for what each tensor
            has now.

    Attributes:
        fills: What is to be filled, by the memory that it fills.
        blocked: ``{path: reason}`` of tensors without a source.
        program: The init methods that are needed, None where all values come from replay.

    Raises:
        ValueError: There is no such source.
    """

    def __init__(self, sources: Sources, source: str, dtype: torch.dtype | str | None) -> None:
        check_source(source, sources.loading)
        self.fills: dict[Any, Fill] = {}
        self.blocked: dict[str, str] = {}
        self.program: Program | None = None
        self._sources = sources
        self._source = source
        self._dtype = dtype

    def add(self, tensors: list[list[Place]], by_tensor: dict[int, list[Place]]) -> None:
        """Choose for some tensors.

        Args:
            tensors: The places of each tensor.
            by_tensor: The places of every tensor of the model, by its id.
        """
        by_source: dict[str, list[tuple[Place, Verdict]]] = {"checkpoint": [], "replay": [], "reset": []}
        loading = self._sources.loading
        together = {} if loading is None else _sharing(by_tensor)
        # What shares its memory with something that is stored stays in one memory with it.
        partly = {memory for memory, others in together.items() if _any_stored(loading, others)}
        for places in tensors:
            place, verdict = self._best(places)
            if self._shares_with(place.slot.tensor, partly):
                by_source["checkpoint"].append((place, verdict))
            elif verdict.can:
                by_source[verdict.source].append((place, verdict))
            else:
                self._block(place, verdict.reason, verdict.fix)
        for place, verdict in by_source["replay"]:
            self._replay(place, verdict)
        self._load(by_source["checkpoint"], together)
        if by_source["reset"]:
            self._reset(self._with_shared_memory(by_source["reset"], by_tensor))

    def _best(self, places: list[Place]) -> tuple[Place, Verdict]:
        """The place that helps most, and the verdict there: of a tensor in several slots, not all may be known."""
        found = [
            (place, self._sources.verdict(place.slot.tensor, slot_of(place), self._source))
            for place in places
        ]
        return next((pair for pair in found if pair[1].can), found[0])

    def _block(self, place: Place, reason: str, fix: str | None) -> None:
        reason = reason if reason.endswith(".") else f"{reason}."
        self.blocked[place.path] = f"{reason} Next: {fix}" if fix else reason

    def _replay(self, place: Place, verdict: Verdict) -> None:
        name = place.slot.name if place.slot.kind != "attribute" else None
        origin = origin_of(place.slot.tensor, place.module, name)
        self._fill(place.slot.tensor, origin.tape, origin.window, origin.exact, "replay", verdict.reason)

    def _shares_with(self, tensor: torch.Tensor, memories: set[int]) -> bool:
        """Whether a tensor is in some memories, and can be loaded with what else is there."""
        if not memories or not is_plain(tensor) or tensor.untyped_storage()._cdata not in memories:
            return False
        return self._sources.loading.refusal(tensor) is None

    def _load(self, chosen: list[tuple[Place, Verdict]], together: dict[int, list[Place]]) -> None:
        loading = self._sources.loading
        known: dict[int, tuple[int, str]] = {}
        for place, verdict in chosen:
            tensor = place.slot.tensor
            memory = tensor.untyped_storage()._cdata
            if len(together[memory]) == 1:
                source = loading.window(tensor)
            else:
                if memory not in known:
                    known[memory] = self._put_together(together[memory])
                number, reason = known[memory]
                if reason:
                    self._block(place, reason, None)
                    continue
                source = window(number, tensor)
            self._fill(tensor, loading.tape, source, True, "checkpoint", verdict.reason)

    def _put_together(self, places: list[Place]) -> tuple[int, str]:
        """The memory of tensors that share it, on the tape, and why it cannot be loaded (``""`` if it can)."""
        loading = self._sources.loading
        number = loading.shared([place.slot.tensor for place in places])
        for place in places:
            # All that shares the memory comes along, so it has to have values, too, and the right ones.
            refusal = loading.refusal(place.slot.tensor)
            if refusal is not None:
                return number, f"It shares its memory with {place.path}. {refusal.reason}"
            if loading.tape.unwritten(window(number, place.slot.tensor)):
                lacking = f"of which {loading.checkpoint.called} has not all"
                return number, f"It shares its memory with {place.path}, {lacking}"
        return number, ""

    def _reset(self, chosen: list[tuple[Place, Verdict]]) -> None:
        program = Program(self._sources, [(place.slot.tensor, slot_of(place)) for place, _ in chosen])
        self.program = program
        for place, verdict in chosen:
            tensor = place.slot.tensor
            reason = program.failed.get(id(tensor))
            if reason is not None:
                self._block(place, reason, None)
            else:
                window, same = program.window(tensor), program.is_in_place(tensor)
                self._fill(tensor, program.tape, window, same, "reset", verdict.reason)

    def _fill(
        self, tensor: torch.Tensor, tape: Tape, window: Window, same: bool, origin: str, reason: str
    ) -> None:
        dtype = tensor.dtype
        if self._dtype == "checkpoint":
            dtype = self._sources.loading.dtype(tensor) if origin == "checkpoint" else dtype
        elif self._dtype is not None and tensor.is_floating_point():
            dtype = self._dtype
        # A method may have put the tensor on other memory, or on its own in another order.
        exact = same and dtype == window.dtype and _is_laid_out_as(tensor, tape, window)
        key = (id(tape), window.storage)
        if not exact or (key in self.fills and not _share(tensor, self.fills[key].tensors[0])):
            exact, key = False, id(tensor)
        fill = self.fills.setdefault(key, Fill(tape, window, exact, dtype, [], [], origin))
        fill.tensors.append(tensor)
        fill.reasons.append(reason)

    def _with_shared_memory(
        self, chosen: list[tuple[Place, Verdict]], by_tensor: dict[int, list[Place]]
    ) -> list[tuple[Place, Verdict]]:
        """Those whose memory no other tensor has that reset cannot give values: it would hold garbage after."""
        mine = {place.slot.tensor.untyped_storage()._cdata: [] for place, _ in chosen}
        asked = {id(place.slot.tensor) for place, _ in chosen}
        for identity, (place, *_) in by_tensor.items():
            tensor = place.slot.tensor
            if identity not in asked and not is_lazy(tensor) and is_plain(tensor) and tensor.is_meta:
                mine.get(tensor.untyped_storage()._cdata, []).append(place)
        kept = []
        for place, verdict in chosen:
            others = mine[place.slot.tensor.untyped_storage()._cdata]
            verdicts = [
                (other, self._sources.verdict(other.slot.tensor, slot_of(other), "reset")) for other in others
            ]
            wrong = next(((other, found) for other, found in verdicts if not found.can), None)
            if wrong is None:
                kept.append((place, verdict))
            else:
                self._block(
                    place, f"It shares its memory with {wrong[0].path}. {wrong[1].reason}", wrong[1].fix
                )
        return kept


def _sharing(by_tensor: dict[int, list[Place]]) -> dict[int, list[Place]]:
    """The first places of the tensors on meta, by the memory that they will have."""
    found: dict[int, list[Place]] = {}
    for place, *_ in by_tensor.values():
        tensor = place.slot.tensor
        if not is_lazy(tensor) and is_plain(tensor) and tensor.is_meta:
            found.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    return found


def _any_stored(loading: Loading, places: list[Place]) -> bool:
    tensors = [place.slot.tensor for place in places] if len(places) > 1 else []
    return any(loading.entries(each) and loading.refusal(each) is None for each in tensors)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _is_laid_out_as(tensor: torch.Tensor, tape: Tape, source: Window) -> bool:
    same_size = tape.storages[source.storage].nbytes == tensor.untyped_storage().nbytes()
    return same_size and window(source.storage, tensor)._replace(dtype=source.dtype) == source


def slot_of(place: Place) -> Slot:
    """The place as sources know it."""
    return Slot(place.module, place.slot.name, place.slot.kind)
