"""Sources: who can give a tensor its values, how true they are, and if nobody, why and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core.loading import Loading
from metaviz.core.loads import loaded
from metaviz.core.measure import measure, unfillable
from metaviz.core.offload import offloaded
from metaviz.core.origin import Origin, origin_of
from metaviz.core.paths import below
from metaviz.core.reasons import quoted
from metaviz.core.replayable import replay_verdict
from metaviz.core.reset import Resets, Step
from metaviz.core.signature import root, same, signature
from metaviz.core.verdict import Verdict

#: The sources that can be asked for; ``"auto"`` takes the first of the others that can.
SOURCES = ("auto", "checkpoint", "replay", "reset")


def check_source(source: str, checkpoint: object = True) -> None:
    """Raise ValueError where there is no such source, or the source is a checkpoint and there is none."""
    if source not in SOURCES:
        raise ValueError(f"source={source!r} is not one of {', '.join(map(repr, SOURCES))}.")
    if source == "checkpoint" and checkpoint is None:
        raise ValueError(
            "source='checkpoint' needs a checkpoint. Next: metaviz.materialize(model, checkpoint='model.safetensors')"
        )
    if source in ("replay", "reset") and checkpoint not in (None, True):
        raise ValueError(
            f"A checkpoint is given, and source={source!r} would not look at it. Leave out one of the two: "
            "metaviz.materialize(model, checkpoint='model.safetensors')"
        )


class Slot(NamedTuple):
    """A place of the model that holds a tensor."""

    module: nn.Module | None
    name: str
    kind: str = "parameter"


class Sources:
    """All sources for the tensors of one model. Asking changes nothing; methods are tried on copies.

    Args:
        model: The model.
        loading: A checkpoint for it, where one is given.
    """

    def __init__(self, model: nn.Module, loading: Loading | None = None) -> None:
        self.model = model
        self.loading = loading
        self._of_kind: dict[tuple, Verdict] = {}

    def __call__(self, tensor: torch.Tensor, module: nn.Module, name: str, kind: str) -> Verdict:
        """The verdict of the best source on a tensor on meta, as :func:`metaviz.tree` asks for it."""
        return self._best(tensor, Slot(module, name, kind))

    def verdict(self, tensor: torch.Tensor, slot: Slot, source: str = "auto") -> Verdict:
        """What a source can do for a tensor.

        Args:
            tensor: The tensor, on any device.
            slot: Where the model holds it; of a tied one, the first place.
            source: ``"auto"``, ``"checkpoint"``, ``"replay"`` or ``"reset"``.

        Raises:
            ValueError: There is no such source.
        """
        check_source(source, True if source != "checkpoint" else self.loading)
        plain = type(tensor) is nn.Parameter or type(tensor) is torch.Tensor
        if not (plain and tensor.is_meta):
            facts, _ = measure(tensor, {})
            if not facts.empty:
                return Verdict(False, None, f"It holds values on {facts.device} already.", kind="real")
            refusal = unfillable(facts)
            if refusal is not None:
                return Verdict(False, None, refusal.reason, refusal.fix, kind=facts.state)
        if source == "auto":
            return self._best(tensor, slot)
        if slot.module is not None and offloaded(slot.module, slot.name):
            return _OFFLOADED
        if source == "checkpoint":
            return self.stored(tensor, slot)
        return self.reset(tensor, slot) if source == "reset" else replay_verdict(tensor, *slot)

    def stored(self, tensor: torch.Tensor, slot: Slot) -> Verdict:
        """What the checkpoint can do for a tensor on meta."""
        return self.loading.verdict(tensor, is_saved(slot))

    def _best(self, tensor: torch.Tensor, slot: Slot) -> Verdict:
        if slot.module is not None and offloaded(slot.module, slot.name):
            return _OFFLOADED
        if self.loading is not None:
            stored = self.stored(tensor, slot)
            # What does not fit is not made up for by values from elsewhere.
            if stored.can or stored.kind != "missing":
                return stored
        replayed = replay_verdict(tensor, *slot)
        if replayed.can or replayed.kind == "edited":
            return replayed
        return _best_of(replayed, self.reset(tensor, slot))

    def reset(self, tensor: torch.Tensor, slot: Slot) -> Verdict:
        """What init methods can do for a tensor on meta: of a tied one, those of the place where they do best."""
        found = [self._reset_at(tensor, each) for each in self.slots(tensor, slot)]
        return max(
            found, key=lambda verdict: (verdict.can, verdict.faithful is True, verdict.faithful is None)
        )

    def slots(self, tensor: torch.Tensor, slot: Slot) -> list[Slot]:
        """All places that hold a tensor, in the order of the model, so that each of them gets the same verdict."""
        places = self._tied.get(id(tensor), [])
        known = any((each.module, each.name) == (slot.module, slot.name) for each in places)
        return places if known else [*places, slot]

    def steps(self, tensor: torch.Tensor, slot: Slot) -> tuple[Slot, list[Step]]:
        """The place where reset does best for a tensor, and the methods that write it there, in their order."""
        best = self.reset(tensor, slot)
        place = next(each for each in self.slots(tensor, slot) if self._reset_at(tensor, each) == best)
        return place, [step for step in self.resets.steps(place.module, place.name) if step.write is not None]

    @cached_property
    def resets(self) -> Resets:
        """The init methods of the model, each kind of module tried at most once."""
        return Resets(self.model)

    @cached_property
    def _tied(self) -> dict[int, list[Slot]]:
        """The places of each tensor that has several."""
        first: dict[int, tuple[nn.Module, str, str]] = {}
        tied: dict[int, list[Slot]] = {}
        for module, name, tensor, kind in _registered(self.model):
            identity, place = id(tensor), (module, name, kind)
            if first.setdefault(identity, place) is not place:
                tied.setdefault(identity, [Slot(*first[identity])]).append(Slot(*place))
        return tied

    @cached_property
    def _shared_draws(self) -> set[tuple]:
        """The random ops of tapes that more than one storage of the model has its values from, whole or in part."""
        first: dict[tuple, int] = {}
        shared = set()
        for module, name, tensor, _ in _registered(self.model):
            empty = not is_lazy(tensor) and tensor.device.type == "meta"
            origin = origin_of(tensor, module, name) if empty else None
            for draw in _draws(origin) if origin else ():
                if first.setdefault(draw, origin.window.storage) != origin.window.storage:
                    shared.add(draw)
        return shared

    def _reset_at(self, tensor: torch.Tensor, slot: Slot) -> Verdict:
        if not tensor.numel():
            return Verdict(True, True, "no elements", None, "reset", "reset")
        if slot.module is None:
            return _refused("no_method", "It is in no module, so no module's method writes it")
        origin = None if slot.kind == "attribute" else origin_of(tensor, slot.module, slot.name)
        origin = origin or origin_of(tensor)
        kind = None if origin else self.resets.alike(slot.module, slot.name)
        if kind not in self._of_kind or kind is None:
            verdict = self._tried_at(tensor, slot, origin)
            if kind is None:
                return verdict
            self._of_kind[kind] = verdict
        return self._of_kind[kind]

    def _tried_at(self, tensor: torch.Tensor, slot: Slot, origin: Origin | None) -> Verdict:
        steps = self.resets.steps(slot.module, slot.name)
        writers = [step for step in steps if step.write is not None]
        whole = [step for step in writers if step.write.whole]
        if not whole:
            return _why_not(slot, self.path(slot), steps, self._instead(tensor, slot))
        # Partial writes after the last whole one change some of its values.
        last = whole[-1]
        by = f"{last.trial.cls}.{last.trial.method}()"
        what = f"{by}: {last.write.signature.words}"
        notes = "".join(f"; {note}" for note in _notes(last))
        if origin is None or writers[-1] is not last:
            return Verdict(True, None, f"{what}{notes}", None, "reset", last.way)
        faithful, difference = self._compared(origin, last)
        if (last.trial.decides and faithful) or last.trial.elsewhere:
            faithful, difference = None, ""
        fix = None if faithful is not False else self._instead(tensor, slot)
        return Verdict(True, faithful, f"{what}{notes}{difference}", fix, "reset", last.way)

    def _compared(self, origin: Origin, step: Step) -> tuple[bool | None, str]:
        """Whether a method gives what the constructor gave, and the difference in words."""
        missing = origin.tape.unwritten(origin.window)
        if missing:
            # There is nothing to be true to where an ordinary build leaves what was in memory before.
            start, stop = origin.window.extent()
            return missing == stop - start or None, ", which an ordinary build leaves uninitialized"
        built = signature(origin.tape, origin.window)
        equal = same(built, step.write.signature)
        if equal and built.draws:
            if not self._shared_draws.isdisjoint(_draws(origin)):
                return (
                    False,
                    ". An ordinary build copies one draw to several tensors, which come out different here",
                )
            return True, ", drawn anew from the distribution of an ordinary build"
        if equal:
            return True, ", as in an ordinary build"
        if loaded(origin.tape, origin.window):
            return False, ". The constructor loaded other values, from a state dict or file"
        if equal is None:
            return None, f". An ordinary build does it in another way: {built.words}"
        return False, f". An ordinary build has something else: {built.words}"

    def _instead(self, tensor: torch.Tensor, slot: Slot) -> str:
        """The code that gives right values where reset does not."""
        path = self.path(slot)
        replayed = replay_verdict(tensor, *slot)
        if replayed.kind == "uninitialized":
            return replayed.fix
        if replayed.can:
            return f'metaviz.materialize(model, {quoted(path)}, source="replay")'
        return "model = metaviz.build(type(model), *args)"

    def path(self, slot: Slot) -> str:
        """The path of a slot."""
        above = self.resets.path(slot.module)
        return f"{above}.{slot.name}" if above else slot.name


_OFFLOADED = Verdict(
    False,
    None,
    "Its values are offloaded: a hook of accelerate keeps them elsewhere, and other ones would take their place",
    "metaviz.findings(model)  # has the call that brings them back",
    kind="offloaded",
)


def is_saved(slot: Slot) -> bool:
    """Whether a state dict has what a slot holds."""
    if slot.kind == "attribute" or slot.module is None:
        return False
    space = object.__getattribute__(slot.module, "__dict__")
    return slot.name not in space.get("_non_persistent_buffers_set", ())


def _draws(origin: Origin) -> set[tuple]:
    """The random ops that a tensor's values come from, also where it only is a copy of what was drawn."""
    tape, window = origin.tape, origin.window
    drawn = {(id(tape), k) for k in tape.slice([window.storage]) if tape.ops[k].draw}
    copied = root(tape, window)
    return drawn | {(id(tape), "copy of", copied[0])} if copied else drawn


def _registered(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor, str]]:
    for _, module in below(model):
        space = object.__getattribute__(module, "__dict__")
        for group, kind in (("_parameters", "parameter"), ("_buffers", "buffer")):
            for name, tensor in (space.get(group) or {}).items():
                if tensor is not None:
                    yield module, name, tensor, kind


def _best_of(replayed: Verdict, reset: Verdict) -> Verdict:
    """The verdict where the tape cannot help."""
    if reset.can or replayed.kind != "unknown":
        return reset if reset.can else replayed
    reason = f"{reset.reason.rstrip('.')}, and no tape knows the tensor."
    return Verdict(False, None, reason, replayed.fix, kind=reset.kind)


def _refused(kind: str, reason: str, fix: str | None = None) -> Verdict:
    return Verdict(False, None, reason, fix, kind=kind)


def _notes(step: Step) -> Iterator[str]:
    """What a method needs, or does besides."""
    if step.trial.decides:
        yield "or something else, as it decides by a value that it draws"
    if step.trial.elsewhere:
        yield "it draws from other generators than torch's, of which no tape knows"
    if step.trial.needs_no_grad:
        yield "it needs torch.no_grad() around it"
    if step.write.fresh:
        yield "it puts a new tensor into the slot, so ties and optimizers would lose it"
        if step.trial.bare:
            yield "on the default device: call it under torch.device(...)"
    yield from step.trial.notes


def _why_not(slot: Slot, path: str, steps: list[Step], fix: str) -> Verdict:
    """Why no method gives a tensor its values."""
    cls = type(slot.module).__name__
    own = [step for step in steps if step.key[0] == ""]
    if not own:
        owner = _computed(path)
        if owner:
            return _refused(
                "computed", f"Init methods fill the computed {owner!r}, not what it is computed from", fix
            )
        return _refused("no_method", f"{cls} has no reset_parameters", fix)
    for step in own:
        by = f"{step.trial.cls}.{step.trial.method}"
        write, trial = step.write, step.trial
        if write is not None and write.unread:
            return _refused(
                "reads", f"{by}() computes it from values that nothing has written ({write.unread})", fix
            )
        if write is not None and write.reshaped:
            return _refused("deleted", f"{by}() puts a tensor of another shape into its place", fix)
        if write is not None:
            rows = f": {write.rows} stay uninitialized" if write.rows else ""
            return _refused("part", f"{by}() writes only a part of it{rows}", fix)
        if step.key in trial.deletes:
            return _refused("deleted", f"{by}() takes it away", fix)
        if trial.state in _STATES:
            kind, words = _STATES[trial.state]
            return _refused(kind, words.format(by=by, detail=trial.detail), fix)
    steps = [step for step in own if step.trial.state == "ran"]
    if not steps:
        return _refused("no_method", f"{cls} has no reset_parameters", fix)
    by = " and ".join(f"{step.trial.cls}.{step.trial.method}()" for step in steps)
    return _refused("not_written", f"{by} {'do' if len(steps) > 1 else 'does'} not write it", fix)


_STATES = {
    "not callable": ("not_callable", "{by} is of type {detail} and cannot be called"),
    "arguments": ("arguments", "{by}() needs arguments: {detail}"),
    "raises": ("raises", "{by}() raises {detail}"),
    "reads": ("reads", "{by}() decides by {detail}"),
    "unfinished": ("unfinished", "{by}() was given up on: {detail}"),
    "refused": ("refused", "{by}() {detail}, which metaviz does not let a look do"),
    "unsupported": ("unsupported", "{by}() cannot be tried: {detail}"),
}


def _computed(path: str) -> str | None:
    """What a parametrization computes from the tensor at a path; None if it has nothing to do with one."""
    above, _, below = path.rpartition("parametrizations.")
    return below.partition(".")[0] if below != path and (not above or above.endswith(".")) else None
