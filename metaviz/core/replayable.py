"""What the tape can do for a tensor: where its values come from, or why it has none."""

from __future__ import annotations

import torch
from torch import nn

from metaviz.core.origin import Origin, edited, origin_of
from metaviz.core.provenance import said
from metaviz.core.units import format_bytes
from metaviz.core.verdict import Verdict


def replay_verdict(
    tensor: torch.Tensor, module: nn.Module | None, name: str | None, kind: str = "parameter"
) -> Verdict:
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
        return Verdict(True, True, "no elements", None, "replay", "replay")
    place = f"{op.name} at {said(op.where)}" if op.where else op.name
    if origin.window.dtype != tensor.dtype:
        was, now = (str(d).removeprefix("torch.") for d in (origin.window.dtype, tensor.dtype))
        place = f"{place}, then cast from {was} to {now} as the model was after the build"
    return Verdict(True, True, place, None, "replay", "replay")


_UNKNOWN = Verdict(
    False,
    None,
    "No tape knows this tensor: it was put on meta outside of metaviz.build, or replaced after the build.",
    "model = metaviz.build(type(model), *args)",
    kind="unknown",
)


_EDITED = Verdict(
    False,
    None,
    "It was written to after the build, when nothing was recorded: an ordinary build would have other values here.",
    "with metaviz.recording(): ...  # write to it in here",
    kind="edited",
)


def _uninitialized(origin: Origin, missing: int, name: str | None) -> Verdict:
    start, stop = origin.window.extent()
    reason = "Uninitialized even in an ordinary build: no op of the constructor ever writes it."
    if missing < stop - start:
        reason = (
            f"Partly uninitialized even in an ordinary build: there are {format_bytes(missing)} of it that "
            "no op of the constructor ever writes."
        )
    return Verdict(
        False, None, reason, f"torch.nn.init.zeros_(self.{name})  # in the constructor", kind="uninitialized"
    )
