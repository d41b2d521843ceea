"""The match: which tensors of a model a checkpoint has, which it lacks, and what else is in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core.checkpoint import Checkpoint
from metaviz.core.checkpoint import checkpoint as opened
from metaviz.core.loading import Loading
from metaviz.core.naming import nearest, suggestion
from metaviz.core.paths import Model, Place
from metaviz.core.sources import Slot, Sources
from metaviz.core.units import plural
from metaviz.errors import CheckpointMismatch


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """How a checkpoint fits a model.

    Attributes:
        checkpoint: The checkpoint.
        found: ``{path: names}`` of the model's tensors that it has, and what they are stored under.
        missing: Paths of tensors that a state dict of the model has, and the checkpoint has not.
        not_saved: Paths of buffers that are in no state dict: they are not persistent.
        tied: Paths that it lacks, but of which it has the tensor under another name.
        refused: ``{path: reason}`` of tensors that it has, but in another shape or kind of dtype, or without values.
        shapes: The paths among those that it has in another shape.
        dtypes: ``{path: dtype}`` of what is stored, such as ``"float16"``.
        casts: ``{path: (dtype there, dtype here)}`` where they differ.
        unexpected: Names that the model has no place for.
        ignored: Names of buffers that are not persistent in the model: it makes them itself.
        notes: What was done to its names, in sentences.
        elsewhere: ``{path: source}`` of what is missing or never saved: ``"replay"``, ``"reset"``, ``"real"`` where it
            holds values, or ``""`` where nobody has any.
        called: What the user calls the model, for code to paste.
    """

    #: Draws a match: `drawn(match, how)`. Core does not know its views, so `metaviz` sets it.
    drawn: ClassVar[Callable[..., Any] | None] = None

    checkpoint: Checkpoint
    found: dict[str, tuple[str, ...]]
    missing: tuple[str, ...]
    not_saved: tuple[str, ...]
    tied: tuple[str, ...]
    refused: dict[str, str]
    shapes: tuple[str, ...]
    dtypes: dict[str, str]
    casts: dict[str, tuple[str, str]]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    elsewhere: dict[str, str] = dataclasses.field(default_factory=dict)
    called: str = "model"

    @property
    def summary(self) -> str:
        """The match in one line."""
        total = len(self.found) + len(self.missing) + len(self.refused)
        return f"{self.checkpoint.called} has {len(self.found):,} of {plural(total, 'tensor')} that the model saves"

    def __str__(self) -> str:
        return type(self).drawn(self, "text") if self.drawn else self.summary

    def _repr_html_(self) -> str | None:
        return type(self).drawn(self, "html") if self.drawn else None

    __repr__ = __str__


def match(model: nn.Module, checkpoint: Any) -> Match:
    """Hold a checkpoint against a model: what it has, what it lacks, what does not fit. Only headers are read.

    Args:
        model: The model.
        checkpoint: A path, a state dict or what :func:`metaviz.checkpoint` gives.

    Raises:
        BadCheckpoint: The checkpoint cannot be read.
        CheckpointMismatch: Nothing in it fits.

    Example:
        >>> metaviz.match(torch.nn.Linear(2, 3), {"weight": torch.ones(3, 2)}).missing
        ('bias',)
    """
    view, loading = Model(model), Loading(model, opened(checkpoint))
    found = matching(view, loading)
    return dataclasses.replace(found, elsewhere=_elsewhere(view, Sources(model, loading), found))


def matching(view: Model, loading: Loading) -> Match:
    """The match of a checkpoint that is named as the model is.

    Raises:
        CheckpointMismatch: Nothing in it fits.
    """
    found, missing, not_saved, tied, refused, shapes = {}, [], [], [], {}, []
    dtypes, casts = {}, {}
    seen: set[int] = set()
    for place in view.places:
        tensor = place.slot.tensor
        if place.slot.kind == "attribute" or is_lazy(tensor):
            continue
        entries = loading.entries(tensor)
        if not _is_saved(place):
            not_saved.append(place.path)
        elif id(tensor) in seen:
            if entries and all(entry.name != place.path for entry in entries):
                tied.append(place.path)
        elif not entries:
            missing.append(place.path)
        else:
            refusal = loading.refusal(tensor)
            if refusal is not None:
                refused[place.path] = refusal.reason
                shapes += [place.path] * (refusal.kind == "shape")
            else:
                found[place.path] = entries[0].sources
                there, here = (str(d).removeprefix("torch.") for d in (entries[0].dtype, tensor.dtype))
                dtypes[place.path] = there
                if there != here:
                    casts[place.path] = there, here
        seen.add(id(tensor))
    if not found and not refused:
        raise _nothing(loading, missing)
    return Match(
        loading.checkpoint,
        found,
        tuple(missing),
        tuple(not_saved),
        tuple(tied),
        refused,
        tuple(shapes),
        dtypes,
        casts,
        loading.unexpected,
        loading.ignored,
        tuple(loading.notes),
    )


def _elsewhere(view: Model, sources: Sources, match: Match) -> dict[str, str]:
    """Who has values for what the checkpoint lacks."""
    lacking, found = {*match.missing, *match.not_saved}, {}
    for place in view.places:
        if place.path in lacking:
            slot = place.slot
            verdict = sources.verdict(slot.tensor, Slot(place.module, slot.name, slot.kind))
            found[place.path] = "real" if verdict.kind == "real" else verdict.source or ""
    return found


def _is_saved(place: Place) -> bool:
    space = object.__getattribute__(place.module, "__dict__")
    return place.slot.name not in space.get("_non_persistent_buffers_set", ())


def _nothing(loading: Loading, missing: list[str]) -> CheckpointMismatch:
    """The error for a checkpoint of another model, with the nearest names."""
    checkpoint, names = loading.checkpoint, list(loading.checkpoint)
    where = "state" if checkpoint.path is None else repr(checkpoint.path)
    if not names or not missing:
        what = "is empty" if not names else "has nothing for a model that saves no tensors"
        return CheckpointMismatch(f"{checkpoint.called} {what}. Next: print(metaviz.checkpoint({where}))")
    pairs = [f"{path!r} here, {near!r} there" for path in missing[:3] if (near := nearest(path, names))]
    beginning = suggestion(names, missing)
    step = f"metaviz.checkpoint({where}, key_map=[({beginning[0]!r}, {beginning[1]!r})])" if beginning else ""
    return CheckpointMismatch(
        f"Nothing of {checkpoint.called} fits the model: none of its {len(names):,} names is one of the model's "
        f"{len(missing):,}. The nearest are {'; '.join(pairs)}. Nothing was changed. "
        f"Next: {step or f'print(metaviz.checkpoint({where}))'}"
    )
