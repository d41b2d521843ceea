"""Verdicts: whether a source can give a tensor its values, how true they are, and if not, why and what to do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What one source can do for one tensor, or for all tensors of a module.

    Attributes:
        can: Whether the source can give the values.
        faithful: Against an ordinary build with the same seed: of replay, and of what draws nothing, True says the
            same values; of a reset that draws, True says other numbers of the same distribution. False says other
            values, or another distribution. None: not known.
        reason: One sentence: where the values come from, or why there are none.
        fix: The next step as code, where there is something to do.
        source: Name of the source; None where the values are there already or cannot be had.
        kind: The reason in a word: `"replay"`, `"reset"` (`reset_parameters`), `"private"` (`_reset_parameters`),
            `"init_weights"`; `"real"`, `"lazy"`, `"fake"`, `"offloaded"`; `"unknown"` (no tape), `"edited"`,
            `"uninitialized"`; and of what reset cannot do: `"no_method"`, `"not_written"`, `"part"`, `"computed"`,
            `"reads"`, `"raises"`, `"arguments"`, `"not_callable"`, `"unfinished"`, `"refused"`, `"deleted"`,
            `"unsupported"`.
    """

    can: bool
    faithful: bool | None
    reason: str
    fix: str | None = None
    source: str | None = None
    kind: str = ""


def together(verdicts: Sequence[Verdict], source: str) -> Verdict:
    """The verdict on a module, from those on the tensors below it that have no values yet."""
    if not verdicts:
        return Verdict(False, None, "All of its tensors hold values, or there are none.", kind="real")
    if len(verdicts) == 1:
        return verdicts[0]
    blocked = [verdict for verdict in verdicts if not verdict.can]
    wrong = [verdict for verdict in verdicts if verdict.can and verdict.faithful is False]
    worst = (blocked or wrong or list(verdicts))[0]
    number = len(verdicts)
    if blocked:
        most, times = Counter(verdict.reason for verdict in blocked).most_common(1)[0]
        some = f"{len(blocked):,} of {number:,} tensors cannot"
        start = some if len(blocked) < number else f"None of {number:,} tensors can"
        reason = f"{start} be given values by {source}: {most}"
        if times < len(blocked):
            reason = f"{reason.rstrip('.')} ({times:,} of them)"
        return Verdict(False, None, reason, worst.fix, None, worst.kind)
    sources = ", ".join(dict.fromkeys(verdict.source or "" for verdict in verdicts))
    faithful = False if wrong else None if any(v.faithful is None for v in verdicts) else True
    reason = f"All {number:,} tensors can be given values by {sources}."
    if wrong:
        reason += f" {len(wrong):,} of them come out otherwise than in an ordinary build: {worst.reason}"
    return Verdict(True, faithful, reason, worst.fix if wrong else None, sources, worst.kind)
