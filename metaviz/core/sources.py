"""Sources: who can give a tensor its values, and if nobody, why and what to do."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from metaviz.core.origin import Origin, edited, origin_of
from metaviz.core.provenance import said
from metaviz.core.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A source's answer for one tensor.

    Attributes:
        can: Whether the source can give the tensor its values.
        source: Name of the source, None if it cannot.
        reason: One sentence: where the values come from, or why there are none.
        fix: The next step as code where it cannot.
    """

    can: bool
    source: str | None
    reason: str
    fix: str | None = None


_UNKNOWN = Answer(
    False,
    None,
    "No tape knows this tensor: it was put on meta outside of metaviz.build, or replaced after the build.",
    "model = metaviz.build(type(model), ...)",
)


_EDITED = Answer(
    False,
    None,
    "It was written to after the build, when nothing was recorded: an ordinary build would have other values here.",
    "with metaviz.recording(): ...  # write to it in here",
)


def replay_answer(
    tensor: torch.Tensor, module: nn.Module | None, name: str | None, kind: str = "parameter"
) -> Answer:
    """What the tape can do for a tensor on meta.

    Args:
        tensor: The tensor.
        module: The module that holds it.
        name: Name of its slot in ``module``.
        kind: ``"parameter"``, ``"buffer"`` or ``"attribute"``.
    """
    name = name if kind != "attribute" else None
    origin = origin_of(tensor, module, name)
    if origin is None:
        return _UNKNOWN
    if edited(tensor, module, name):
        return _EDITED
    missing = origin.tape.unwritten(origin.window)
    if missing:
        return _uninitialized(origin, missing, name)
    op = origin.tape.last_write(origin.window.storage)
    if op is None:
        return Answer(True, "replay", "no elements")
    place = f"{op.name} at {said(op.where)}" if op.where else op.name
    if origin.window.dtype != tensor.dtype:
        was, now = (str(d).removeprefix("torch.") for d in (origin.window.dtype, tensor.dtype))
        return Answer(
            True, "replay", f"{place}, then cast from {was} to {now} as the model was after the build"
        )
    return Answer(True, "replay", place)


def _uninitialized(origin: Origin, missing: int, name: str | None) -> Answer:
    start, stop = origin.window.extent()
    reason = "Uninitialized even in an ordinary build: no op of the constructor ever writes it."
    if missing < stop - start:
        reason = (
            f"Partly uninitialized even in an ordinary build: there are {format_bytes(missing)} of it that "
            "no op of the constructor ever writes."
        )
    return Answer(False, None, reason, f"torch.nn.init.zeros_(self.{name})  # in the constructor")
