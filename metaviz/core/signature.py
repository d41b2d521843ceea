"""Signatures: whether two tapes fill a tensor with the same distribution.

A signature is the canonical form of the ops that give a window its values. Values that no random op takes part in are
compared as values; fills by their names and numbers; what is left by its ops, in which generators and seeds do not
count. It holds no tensor and no tape.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from metaviz.core.fills import COPIES, Fill, agree, base_name, fill_of, is_close
from metaviz.core.provenance import said
from metaviz.core.reading import (
    Reading,
    Seen,
    brings,
    contains,
    content,
    covers,
    digest,
    is_drawn,
    is_injective,
    ops_of,
    settled,
)
from metaviz.core.replay import EagerDraws, plain_torch, replay, values_of_another
from metaviz.core.tape import Op, Tape, Where, Window
from metaviz.errors import StalePlan

VALUE_LIMIT = 2**20
# A slice longer than this is not read: telling two of them apart would cost more than it is worth.
_MAX_OPS = 2000
_MAX_KNOWN = 1024
_FILLED = ("fills", "")


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """What gives a tensor its values, without where and with which seed.

    Attributes:
        shape: The tensor's shape.
        dtype: Its dtype when its values were made.
        draws: Whether a random op takes part.
        words: In short, as people write it: ``"normal_(0, 0.02) at modeling_llama.py:57"``.
        fills: What fills the tensor, in the order of writing, if it is all fills: one for nearly every parameter.
        form: The kind and the digest of all that is not a number; None for what cannot be compared.
        numbers: The numbers in the arguments of its ops, unless ``fills`` has them.
        init: The torch.nn.init function that did it, where it is no simple fill.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    draws: bool
    words: str = dataclasses.field(compare=False)
    fills: tuple[Fill, ...] = ()
    form: tuple[str, str] | None = None
    numbers: tuple = ()
    init: str | None = None


def signature(tape: Tape, window: Window, *, value_limit: int = VALUE_LIMIT) -> Signature:
    """What gives ``window`` of ``tape`` its values.

    Args:
        tape: The tape of a build or of another recording.
        window: A window on one of its storages.
        value_limit: Bytes that may be computed to know values that no random op takes part in.

    Example:
        >>> origin = origin_of(metaviz.build(torch.nn.Linear, 4, 4).weight)
        >>> signature(origin.tape, origin.window).draws
        True
    """
    if window.numel() == 0:
        return Signature(window.size, window.dtype, False, "no elements", form=("nothing", ""))
    number, storage = settled(tape, window.storage)
    op = None if number is None else tape.ops[number]
    if op is not None and not op.reads and len(op.writes) == 1 and not window.lazy:
        fill = fill_of(op)
        if fill is not None and _is_all_of(fill, op.writes[0], window._replace(storage=storage)):
            return _simple(fill, window.size, window.dtype, op.where)
    return _read(tape, window, value_limit)


def same(build: Signature, reset: Signature) -> bool | None:
    """Whether two signatures stand for the same distribution, or where nothing is drawn for the same values.

    Returns:
        True or False, or None where the ops do not tell.
    """
    if build.shape != reset.shape or build.draws != reset.draws:
        return False
    if build.form is None or reset.form is None:
        return None
    if build.fills and reset.fills:
        return _same_fills(build, reset)
    if build.form == reset.form:
        if len(build.numbers) == len(reset.numbers) and all(map(is_close, build.numbers, reset.numbers)):
            return True
        return False if build.draws else None
    if build.draws:
        return None if _name(build) is None or _name(build) == _name(reset) or _name(reset) is None else False
    known = all(each.fills or each.form[0] == "values" for each in (build, reset))
    return False if known and build.dtype == reset.dtype else None


def root(tape: Tape, window: Window) -> tuple[int, int] | None:
    """What a window whose values are drawn is a plain copy of, through clones, copies and casts.

    Returns:
        ``(op, storage)``: the storage that was drawn, and the number of the op that made it what was copied. Windows
        with the same root have the same values in every build. None where nothing is drawn, and for a window on a part
        of its storage.
    """
    if not covers(tape, window):
        return None
    number, storage = settled(tape, window.storage, casts=True)
    drawn = number is not None and (tape.ops[number].draw or is_drawn(tape, storage, number + 1))
    return (number, storage) if drawn else None


def _is_all_of(fill: Fill, written: Window, window: Window) -> bool:
    """Whether ``window`` has its values from ``written``, each element its own."""
    if window == written:
        return True
    if written.lazy or window.dtype != written.dtype or not contains(written, window):
        return False
    return is_injective(window) or not fill.draws


def _same_fills(build: Signature, reset: Signature) -> bool | None:
    tolerance = 1e-6
    if not build.draws:
        # A number that was computed is rounded, one that was written is not.
        eps = [torch.finfo(each.dtype).eps for each in (build, reset) if each.dtype.is_floating_point]
        tolerance = max(eps, default=0)
    if build.form == reset.form and len(build.fills) == len(reset.fills):
        return all(agree(a, b, tolerance) for a, b in zip(build.fills, reset.fills, strict=True))
    whole, parts = sorted((build, reset), key=lambda each: len(each.fills))
    # What was written last into a part is there to be seen.
    if len(whole.fills) == 1 and not agree(whole.fills[0], parts.fills[-1], tolerance):
        return False
    return None


def _name(each: Signature) -> str | None:
    return "a fill" if len(each.fills) == 1 else each.init


@functools.lru_cache(maxsize=4096, typed=True)
def _simple(fill: Fill, size: tuple[int, ...], dtype: torch.dtype, where: Where | None) -> Signature:
    return _filled(functools.partial(Signature, tuple(size), dtype), fill, where)


def _at(where: Where | None) -> str:
    return f" at {said(where)}" if where else ""


def _read(tape: Tape, window: Window, value_limit: int) -> Signature:
    """The signature of what is not the fill of one op."""
    make = functools.partial(Signature, tuple(window.size), window.dtype)
    ops = ops_of(tape, window.storage)
    if len(ops) > _MAX_OPS:
        if is_drawn(tape, window.storage):
            return make(True, f"values drawn in more than {_MAX_OPS} ops{_at(ops[-1].where)}")
        return _fixed(make, tape, window, value_limit, ops, None)
    reading = Reading()
    reading.run(tape, ops)
    found = reading.look(tape, window)
    if reading.blank or not found.hits:
        return make(reading.draws, "memory that nothing writes")
    if found.fill is not None:
        return _filled(make, found.fill, found.hits[-1].op.where)
    if reading.draws:
        return _drawn(make, reading, found)
    known = None if reading.unknown else (reading.form(found), tuple(reading.numbers))
    return _fixed(make, tape, window, value_limit, ops, known)


def _filled(make: Callable[..., Signature], fill: Fill, where: Where | None) -> Signature:
    return make(fill.draws, f"{fill}{_at(where)}", (fill.canonical(),), _FILLED)


def _drawn(make: Callable[..., Signature], reading: Reading, found: Seen) -> Signature:
    last = found.hits[-1].op
    fills = [hit.fill for hit in found.hits]
    if None not in fills and found.independent:
        others = list(dict.fromkeys(map(str, fills[1:])))
        words = f"{fills[0]}, then {', '.join(others[:3])} on a part{_at(last.where)}"
        layouts = digest(repr([layout for _, layout in found.parts]).encode())
        return make(True, words, tuple(fill.canonical() for fill in fills), ("fills", layouts))
    init = last.where and last.where.init
    words = (
        init
        or f"values drawn by {_listed(fill.name if (fill := fill_of(op)) else base_name(op) for op in reading.ops)}"
    )
    form = None if reading.unknown else ("chain", reading.form(found))
    return make(True, f"{words}{_at(last.where)}", (), form, tuple(reading.numbers), init)


def _fixed(
    make: Callable[..., Signature],
    tape: Tape,
    window: Window,
    limit: int,
    ops: list[Op],
    known: tuple[str, tuple] | None,
) -> Signature:
    """The signature of values that no random op takes part in."""
    words = _computed(ops)
    try:
        found = _values(tape, window, limit, known)
    except StalePlan:
        return make(False, words)
    if isinstance(found, Fill):
        return _filled(make, found, ops[-1].where)
    if found is not None:
        return make(False, words, form=("values", found))
    if known is None:
        return make(False, words)
    return make(False, words, form=("chain", known[0]), numbers=known[1])


def _computed(ops: list[Op]) -> str:
    worked = [op for op in ops if not brings(op) and fill_of(op) is None and base_name(op) not in COPIES]
    init = ops[-1].where and ops[-1].where.init
    if worked and init:
        return f"{init}{_at(ops[-1].where)}"
    if not worked:
        return f"values loaded from outside{_at(ops[-1].where)}"
    return f"values computed by {_listed(map(base_name, worked))}{_at(worked[-1].where)}"


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


_known: dict[Any, Fill | str] = {}


def _values(tape: Tape, window: Window, limit: int, ops: tuple | None) -> Fill | str | None:
    """The values that ``window`` has whatever the seed: one number or a digest; None if above ``limit``."""
    key = (ops, window[1:])
    if ops is not None and key in _known:
        return _known[key]
    if _cost(tape, window.storage, limit) > limit:
        return None
    with plain_torch():
        ((_, memory),) = replay(tape, [window.storage], EagerDraws())
        values = window.on(memory)
        raw = content(values)
        one = raw[: window.dtype.itemsize]
        uniform = raw == one * (len(raw) // len(one))
        found = Fill("constant_", (values.flatten()[0].item(),)) if uniform else digest(raw)
    if ops is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = found
    return found


def _cost(tape: Tape, storage: int, limit: int) -> int:
    ops = tape.slice([storage])
    cost = tape.nbytes_of(ops)
    for op in (tape.ops[k] for k in ops):
        if cost <= limit and op.func is values_of_another:
            cost += _cost(*op.args, limit)
    return cost
