"""How much of a tensor the ops of a tape have written, and from what."""

from __future__ import annotations

from typing import Any

from metaviz.core.kinds import kind_of
from metaviz.core.tape import Tape, Window


def first_unread(tape: Tape, window: Window) -> str | None:
    """The first op of a window's slice that takes values from where nothing has been written, or None."""
    for k in tape.slice([window.storage]):
        op = tape.ops[k]
        kept = {w.storage for w in op.writes} if _overwrites(op.func) else set()
        for storage in op.reads:
            record = tape.storages[storage]
            if storage not in kept and record.nbytes and not (record.writers and record.writers[0] < k):
                return op.name
    return None


def _overwrites(func: Any) -> bool:
    return not hasattr(func, "_schema") or kind_of(func).overwrites


# Rows are asked for one by one.
_SMALL = 2**22


def rows_left_out(tape: Tape, window: Window) -> str:
    """Which rows of a window are never written, where whole rows are."""
    if (
        tape.storages[window.storage].nbytes > _SMALL
        or not window.is_contiguous()
        or len(window.size) < 1
        or window.size[0] < 2
    ):
        return ""
    row = window.stride[0]
    left = [
        at
        for at in range(min(window.size[0], 10_000))
        if tape.unwritten(
            window._replace(size=window.size[1:], stride=window.stride[1:], offset=window.offset + at * row)
        )
    ]
    runs: list[list[int]] = []
    for at in left:
        if runs and runs[-1][1] == at - 1:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    if len(runs) > 3 or not runs:
        return f"{len(left):,} of its {window.size[0]:,} rows"
    words = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
    return f"row{'s' * (len(left) > 1)} {words} of {window.size[0]:,}"
