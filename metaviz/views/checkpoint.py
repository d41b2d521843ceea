"""What is in a checkpoint, as text and HTML: names that differ in numbers only on one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from metaviz.core.checkpoint import Checkpoint
from metaviz.core.stored import Stored
from metaviz.core.units import format_bytes, format_exact, format_shape, plural
from metaviz.views.lines import clean
from metaviz.views.pieces import code_block, page

MOST = 60
HEADER = ("name", "tensors", "shape", "dtype", "size")
WIDTH = 60
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_LONGEST = 12


class Kind(NamedTuple):
    """Tensors whose names differ in numbers only.

    Attributes:
        name: Their name, with the numbers as ranges.
        count: How many.
        shape: Their shapes.
        dtype: Their dtypes.
        nbytes: Bytes of all of them.
        trouble: Why they have no values that can be read, ``""`` if they have.
    """

    name: str
    count: int
    shape: str
    dtype: str
    nbytes: int
    trouble: str


def kinds(checkpoint: Checkpoint) -> list[Kind]:
    """The tensors of a checkpoint by kind, in the order of its names."""
    groups: dict[tuple[str, str], list[Stored]] = {}
    for name, stored in checkpoint.items():
        groups.setdefault((_NUMBER.sub("*", name), stored.trouble), []).append(stored)
    return [_kind(pattern, trouble, found) for (pattern, trouble), found in groups.items()]


def _kind(pattern: str, trouble: str, found: list[Stored]) -> Kind:
    numbers = zip(*(map(int, _NUMBER.findall(each.name)) for each in found), strict=True)
    ranges = [_ranges(column) for column in numbers]
    name = _NUMBER.sub("*", found[0].name)
    for text in ranges:
        name = name.replace("*", text, 1)
    shapes = list(dict.fromkeys(format_shape(each.shape) for each in found))
    dtypes = dict.fromkeys(
        "?" if each.dtype is None else str(each.dtype).removeprefix("torch.") for each in found
    )
    shape = shapes[0] if len(shapes) == 1 else f"{shapes[0]} and {len(shapes) - 1} more"
    return Kind(
        clean(name), len(found), shape, ", ".join(dtypes), sum(each.nbytes for each in found), clean(trouble)
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``0–5``, ``0–2,7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    text = ",".join(parts)
    return text if len(text) <= _LONGEST else f"{parts[0]},…,{parts[-1]}"


def text(checkpoint: Checkpoint) -> str:
    """A checkpoint as lines of text."""
    found = kinds(checkpoint)
    rows = [HEADER, *(_cells(kind) for kind in found[:MOST])]
    rows = [(_shortened(row[0]), *row[1:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [checkpoint.summary, ""]
    lines += [
        "  ".join(
            _aligned(cell, width, k) for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += [_more(found)] if len(found) > MOST else []
    return "\n".join([*lines, "", *_footer(checkpoint, found), f"Next: {_step(checkpoint)}"])


def html(checkpoint: Checkpoint) -> str:
    """A checkpoint as static HTML."""
    found = kinds(checkpoint)
    head = "".join(f"<th>{cell}</th>" for cell in HEADER)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(kind)) + "</tr>"
        for kind in found[:MOST]
    )
    more = f"<p>{_more(found)}</p>" if len(found) > MOST else ""
    footer = "".join(f"<p>{escape(line)}</p>" for line in _footer(checkpoint, found))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return page(
        f"<p><b>{escape(clean(checkpoint.summary))}</b></p>{table}{more}{footer}{code_block(_step(checkpoint))}"
    )


def _cells(kind: Kind) -> tuple[str, ...]:
    size = format_bytes(kind.nbytes) if not kind.trouble else "no values"
    return kind.name, format_exact(kind.count), kind.shape, kind.dtype, size


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column in (1, 4) else cell.ljust(width)


def _shortened(name: str) -> str:
    return name if len(name) <= WIDTH else f"{name[: WIDTH - 21]}…{name[-20:]}"


def _more(found: list[Kind]) -> str:
    rest = found[MOST:]
    return (
        f"… and {plural(sum(kind.count for kind in rest), 'tensor')} of {format_exact(len(rest))} more kinds"
    )


def _footer(checkpoint: Checkpoint, found: list[Kind]) -> list[str]:
    sizes: dict[str, int] = {}
    for stored in checkpoint.values():
        dtype = str(stored.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + stored.nbytes
    lines = [
        ", ".join(f"{dtype} {format_bytes(nbytes)}" for dtype, nbytes in sizes.items() if dtype != "None")
    ]
    lines += [clean(note, 400) for note in checkpoint.notes]
    troubles: dict[str, int] = {}
    for kind in found:
        if kind.trouble:
            troubles[kind.trouble] = troubles.get(kind.trouble, 0) + kind.count
    lines += [f"no values in {plural(count, 'tensor')}: {trouble}" for trouble, count in troubles.items()]
    return [line for line in lines if line]


def _step(checkpoint: Checkpoint) -> str:
    where = "state" if checkpoint.path is None else repr(checkpoint.path)
    return f"metaviz.match(model, {clean(where, 1000)})"
