"""A plan, a call and progress in a line each, for a widget to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metaviz.core.description import Plan, from_sources
from metaviz.core.reasons import quoted
from metaviz.core.units import format_bytes, format_seconds, plural
from metaviz.views.lines import clean

_BLOCKED = 3
_REASON = 400
_MANY = 30
# Nobody reads or pastes a longer list.
_MOST = 1000


def plan_line(plan: Plan, modules: int, tensors: int) -> str:
    """A plan in a line: `"3 subtrees, 1.20 GiB → cuda:0, fits, 14 from replay, 2 from checkpoint"`.

    Args:
        plan: The plan.
        modules: How many of the chosen paths are modules.
        tensors: How many are tensors.
    """
    chosen = " and ".join(
        plural(number, noun) for number, noun in ((modules, "subtree"), (tensors, "tensor")) if number
    )
    if not plan.tensors:
        return f"{chosen}: {_nothing(plan)}"
    where = ", ".join(str(device) for device in plan.devices)
    parts = [chosen, f"{format_bytes(plan.nbytes)} → {where}", _room(plan), _sources(plan)]
    if plan.blocked:
        parts.append(f"{len(plan.blocked):,} blocked")
    if plan.kept:
        parts.append(f"{len(plan.kept):,} real already")
    if plan.lazy:
        parts.append(f"{len(plan.lazy):,} lazy")
    if plan.pulled_in:
        parts.append(f"{len(plan.pulled_in):,} more that share their memory")
    return ", ".join(parts)


def _nothing(plan: Plan) -> str:
    if plan.blocked:
        return f"nothing that a source can give values ({plural(len(plan.blocked), 'tensor')} blocked)"
    if plan.kept:
        return f"nothing to materialize, all of {plural(len(plan.kept), 'tensor')} hold values"
    if plan.lazy:
        return f"{plural(len(plan.lazy), 'lazy tensor')}, which the first forward gives a shape and values"
    return "no tensors in it"


def _room(plan: Plan) -> str:
    if plan.fits:
        return "fits"
    short = [
        f"{format_bytes(need)} needed on {device}, {format_bytes(plan.free_nbytes[device])} free"
        for device, need in plan.peak_nbytes.items()
        if need > plan.free_nbytes[device]
    ]
    return f"does NOT fit ({'; '.join(short)})"


def _sources(plan: Plan) -> str:
    counts = from_sources(plan.tensors)
    if not counts.startswith("from "):
        return counts
    return f"{plural(len(plan.tensors), 'tensor')} {counts}"


def blocked_lines(plan: Plan) -> list[tuple[str, str, str]]:
    """(path, reason, next step as code) of the first blocked tensors of a plan; the last line counts the others."""
    lines = []
    for path, reason in list(plan.blocked.items())[:_BLOCKED]:
        why, step = told(reason)
        lines.append((clean(path), why, step))
    if len(plan.blocked) > _BLOCKED:
        lines.append((f"and {len(plan.blocked) - _BLOCKED:,} more", "", ""))
    return lines


def told(message: str) -> tuple[str, str]:
    """What an error says, and the next step as code (`""` if there is none)."""
    said, _, step = message.rpartition("Next: ")
    if not said:
        said, step = step, ""
    lines = [clean(line, _REASON) for line in said.strip().splitlines()]
    return "\n".join(lines), step.strip()


def call(
    verb: str, model: str, paths: Sequence[str], options: Mapping[str, Any], widget: str | None = None
) -> str:
    """The call that a click equals: `metaviz.materialize(model, "layers.0", device="cuda:0")`.

    Args:
        verb: `"materialize"`, `"plan"` or `"unload"`.
        model: The model as the user calls it.
        paths: The chosen paths; the root alone is left out.
        options: Keyword arguments as code.
        widget: What the user calls the widget, None if it has no name: a long list is then its selection.
    """
    given = [model]
    if len(paths) > (_MANY if widget else _MOST):
        given.append(f"{widget or 'widget'}.selection")
    elif len(paths) == 1 and paths[0]:
        given.append(quoted(paths[0]))
    elif len(paths) > 1:
        given.append(f"[{', '.join(map(quoted, paths))}]")
    given += [f"{name}={code}" for name, code in options.items()]
    return f"metaviz.{verb}({', '.join(given)})"


def progress_line(done: int, total: int, spent: float, path: str, verb: str = "") -> str:
    """How far long work is: `"1.20 GiB of 6.37 GiB, 800 MiB/s, 6.5 s left, at layers.0.mlp"`.

    Args:
        done: Bytes that are done.
        total: Bytes in all.
        spent: Seconds since it began.
        path: What was done last.
        verb: What is done to the bytes, with a blank behind it: `"read "`.
    """
    text = f"{verb}{format_bytes(done)} of {format_bytes(total)}, {rate(done, spent)}"
    if 0 < done < total:
        text += f", {format_seconds(spent * (total - done) / done)} left"
    return f"{text}, at {path}"


def rate(nbytes: int, seconds: float) -> str:
    """Bytes per second as text."""
    return f"{format_bytes(round(nbytes / max(seconds, 1e-9)))}/s"
