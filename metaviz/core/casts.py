"""Casts after the build: what they threw away, what they rounded, and what they only changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from metaviz.core.finding import Finding, Look, paths_of
from metaviz.core.origin import was
from metaviz.core.paths import Place, some
from metaviz.core.tape import Tape, Window
from metaviz.core.units import plural

aten = torch.ops.aten


class Cast(NamedTuple):
    """A tensor that has another dtype than ``window`` of ``tape``, which has its values."""

    place: Place
    tape: Tape
    window: Window

    @property
    def parameter(self) -> bool:
        """Whether it is trained, or may be."""
        return self.place.slot.kind == "parameter"


def about_casts(found: list[Cast]) -> tuple[list[Finding], list[Finding], list[Finding]]:
    """What casts threw away, what they rounded for good, and what is only worth knowing: one each per two dtypes."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[Cast]] = {}
    for cast in found:
        groups.setdefault((cast.window.dtype, cast.place.slot.tensor.dtype), []).append(cast)
    lost, rounded, plain = [], [], []
    for (before, after), casts in groups.items():
        if before.is_complex and not after.is_complex:
            lost.append(_finding(_lost, before, after, casts))
            continue
        hurt = [cast for cast in casts if not cast.parameter and _loses(cast)]
        rest = [cast for cast in casts if cast.parameter or not _loses(cast)]
        rounded += [_finding(_rounded, before, after, hurt)] if hurt else []
        plain += [_finding(_plain, before, after, rest)] if rest else []
    return lost, rounded, plain


def casts_since(look: Look) -> list[Cast]:
    """The tensors that have their values, and another dtype than the constructor gave them."""
    found = []
    for place in look.real.values():
        then = was(place.slot.tensor)
        source = then.tag.source if then is not None and then.tag is not None else None
        if source and source.dtype != place.slot.tensor.dtype:
            found.append(Cast(place, then.tag.tape, source))
    return found


def _finding(words: Callable, before: torch.dtype, after: torch.dtype, casts: list[Cast]) -> Finding:
    was_, now = (str(dtype).removeprefix("torch.") for dtype in (before, after))
    paths = paths_of(cast.place for cast in casts)
    fix = (
        "model = metaviz.build(type(model), *args)\n"
        f"for p in model.parameters(): p.data = p.data.to({after})  # the parameters, and no buffer"
    )
    return Finding("cast", paths, words(f"from {was_} to {now}", casts), None if words is _plain else fix)


def _lost(change: str, casts: list[Cast]) -> str:
    return (
        f"A cast {change} after the build threw away the imaginary part of "
        f"{some(paths_of(cast.place for cast in casts))}. On meta torch does not even warn, and the model gets "
        "other numbers than it was written for."
    )


def _rounded(change: str, casts: list[Cast]) -> str:
    return (
        f"A cast {change} after the build rounds what the constructor has computed for "
        f"{some(paths_of(cast.place for cast in casts))}. Nothing trains such values back: tables and frequencies "
        "are mostly meant to keep their dtype."
    )


def _plain(change: str, casts: list[Cast]) -> str:
    parameters = sum(cast.parameter for cast in casts)
    others = len(casts) - parameters
    what = [plural(parameters, "parameter")] if parameters else []
    what += (
        [f"{plural(others, 'other tensor')} that {'lose' if others > 1 else 'loses'} nothing"]
        if others
        else []
    )
    return (
        f"A cast {change} after the build changed {' and '.join(what)}. Replay makes the values as the constructor "
        "does and casts them then, as an ordinary build would."
    )


def _loses(cast: Cast) -> bool:
    """Whether values can change by the cast: to a coarser dtype, and they are not all one number that it has."""
    before, after = cast.window.dtype, cast.place.slot.tensor.dtype
    if not (before.is_floating_point or before.is_complex):
        return False
    if after.is_floating_point or after.is_complex:
        fine, coarse = torch.finfo(before), torch.finfo(after)
        if coarse.eps <= fine.eps and coarse.max >= fine.max:
            return False
    op = cast.tape.last_write(cast.window.storage)
    if op is None:
        return False
    # The running statistics of a BatchNorm: the op reads nothing, so it fills all of the storage.
    if op.func is aten.zero_.default or op.func is aten.fill_.Scalar:
        number = op.args[1] if len(op.args) > 1 else 0
        return bool(op.reads) or number not in (0, 1, math.inf, -math.inf)
    return True
