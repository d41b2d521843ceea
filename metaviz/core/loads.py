"""Values that a constructor loads: which tensors of a tape hold data from outside of it."""

from __future__ import annotations

import bisect

import torch

from metaviz.core.tape import Tape, Window, constant

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten._to_copy.default)
_MOVES = (aten.copy_.default, constant, *_COPIES)


def loaded(tape: Tape, window: Window) -> bool:
    """Whether the constructor itself loaded the values of ``window``: a nested load_state_dict, from_pretrained.

    Two things tell a load from a literal or a table, which are data on the tape, too. Files are read as bytes, which
    are floats only by the view that is taken of them. And a state dict from elsewhere is copied as it is over a
    tensor that was made and initialized before.

    A table that is copied over an initialized parameter in the line that makes it looks the same, and is as lost in
    a build under ``torch.device("meta")``.

    Args:
        tape: The tape of the build.
        window: The tensor on it, as of the end of the build.
    """
    writers = tape.storages[window.storage].writers
    if not writers or tape.ops[writers[-1]].func not in _MOVES:
        return False
    start, stop = window.extent()
    op, at, copied = tape.ops[writers[-1]], writers[-1], False
    if op.func is aten.copy_.default:
        target = op.args[0]
        begins, ends = target.extent()
        copied = target.is_dense() and begins <= start and stop <= ends and len(writers) > 1
    by_torch = op.where is not None and op.where.init == "load_state_dict"
    return _comes_from_data(tape, window, at + 1, copied, by_torch)


def _comes_from_data(tape: Tape, window: Window, end: int, copied: bool, by_torch: bool) -> bool:
    """Follow copies back to the data.

    ``copied`` tells whether data of the very dtype count, too, or only bytes; ``by_torch`` whether ``load_state_dict``
    has copied them, wherever they come from.
    """
    as_bytes = False
    while True:
        writers = tape.storages[window.storage].writers
        at = bisect.bisect_left(writers, end) - 1
        if at < 0:
            return False
        op = tape.ops[writers[at]]
        as_bytes = as_bytes or (op.writes[0].dtype is torch.uint8 and window.dtype is not torch.uint8)
        if op.func is constant:
            return as_bytes or (copied and (by_torch or _from_elsewhere(tape, writers[at])))
        source = op.args[1] if op.func is aten.copy_.default else op.args[0] if op.func in _COPIES else None
        if type(source) is not Window:
            return False
        # A cast on the way is part of a computation.
        copied = copied and (op.func is not aten._to_copy.default or source.dtype == op.writes[0].dtype)
        window, end = source, writers[at]


def _from_elsewhere(tape: Tape, number: int) -> bool:
    """Whether a constant was there before the constructor: it is met where it is used, not where it is made."""
    made = tape.ops[number]
    if number + 1 == len(tape.ops):
        return False
    user = tape.ops[number + 1]
    return made.writes[0].storage in user.reads and made.where == user.where
