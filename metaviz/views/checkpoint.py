"""What is in a checkpoint, as text and HTML: names that differ in numbers only share a line."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from itertools import chain, zip_longest
from typing import NamedTuple

from metaviz.core.checkpoint import Checkpoint
from metaviz.core.paths import some
from metaviz.core.stored import Stored
from metaviz.core.units import format_bytes, format_exact, format_shape, plural
from metaviz.views.lines import clean
from metaviz.views.pieces import code_block, page

MOST = 60
HEADER = ("name", "tensors", "shape", "dtype", "size")
WIDTH = 60
# What Python itself writes as an int: "007" is a name, and so are a thousand digits.
_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")
_LONGEST = 12


class Kind(NamedTuple):
    """Tensors whose names differ in numbers only.

    Attributes:
        name: Their name, with the numbers as ranges.
        count: How many.
        shape: Their shapes.
        dtype: Their dtypes.
        size: Bytes of all of them that no earlier name has had; or that there are no values.
        trouble: Why they have no values that can be read, ``""`` if they have.
    """

    name: str
    count: int
    shape: str
    dtype: str
    size: str
    trouble: str

    @property
    def cells(self) -> tuple[str, ...]:
        """What a line says, in the order of the header."""
        return self.name, format_exact(self.count), self.shape, self.dtype, self.size


class Content(NamedTuple):
    """What a view of a checkpoint says besides its summary.

    Attributes:
        kinds: The first kinds of its tensors, in the order of their names.
        more: What is left out, ``""`` if nothing.
        notes: Bytes by dtype and by file, what is to know, and what has no values.
        step: The next step, as code.
    """

    kinds: list[Kind]
    more: str
    notes: list[str]
    step: str


def spelled(checkpoint: Checkpoint) -> str:
    """What stands for a checkpoint in code to paste."""
    if checkpoint.key_map is not None:
        return "checkpoint"
    return "state" if checkpoint.path is None else clean(repr(checkpoint.path), 1000)


def text(checkpoint: Checkpoint) -> str:
    """A checkpoint as lines of text."""
    content = _content(checkpoint)
    rows = [HEADER, *((_shortened(kind.name), *kind.cells[1:]) for kind in content.kinds)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [clean(checkpoint.summary, 400), ""]
    for row in rows:
        cells = [
            cell.rjust(width) if cell_of in ("tensors", "size") else cell.ljust(width)
            for cell, width, cell_of in zip(row, widths, HEADER, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines += filter(None, [content.more])
    return "\n".join([*lines, "", *content.notes, f"Next: {content.step}"])


def html(checkpoint: Checkpoint) -> str:
    """A checkpoint as static HTML."""
    content = _content(checkpoint)
    head = "".join(f"<th>{cell}</th>" for cell in HEADER)
    before, body = "", []
    for kind in content.kinds:
        name, *cells = kind.cells
        start = _common(before, name)
        dim = f'<span class="mv-where">{_breakable(name[:start])}</span>' if start else ""
        body.append(f"<tr><td>{dim}{_breakable(name[start:])}</td>")
        body += [f"<td>{escape(cell)}</td>" for cell in cells]
        body.append("</tr>")
        before = name
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    notes = "".join(
        f'<p class="mv-where">{escape(line)}</p>' for line in filter(None, [content.more, *content.notes])
    )
    return page(
        f"<p><b>{escape(clean(checkpoint.summary, 400))}</b></p>{table}{notes}{code_block(content.step)}"
    )


def _content(checkpoint: Checkpoint) -> Content:
    groups: dict[tuple, list[tuple[list[str], Stored]]] = {}
    held: dict[object, Stored] = {}
    for name, stored in checkpoint.items():
        parts = _NUMBER.split(name)
        groups.setdefault((stored.trouble, *parts[::2]), []).append((parts[1::2], stored))
        if not stored.trouble:
            held.setdefault(stored.place, stored)
    # What is stored once under several names counts where it is met first.
    first = set(map(id, held.values()))
    kinds = [_kind(texts, found, first) for (_, *texts), found in list(groups.items())[:MOST]]
    rest = len(checkpoint) - sum(kind.count for kind in kinds)
    more = f"… and {plural(rest, 'tensor')} of {plural(len(groups) - MOST, 'kind')}" if rest else ""
    notes = [*_sizes(held.values()), *_files(checkpoint), *(clean(note, 400) for note in checkpoint.notes)]
    troubles = Counter(stored.trouble for stored in checkpoint.values() if stored.trouble)
    notes += [
        f"✗ {plural(count, 'tensor')} without values: {clean(why, 400)}" for why, count in troubles.items()
    ]
    return Content(kinds, more, notes, f"metaviz.match(model, {spelled(checkpoint)})")


def _kind(texts: list[str], found: list[tuple[list[str], Stored]], first: set[int]) -> Kind:
    """A kind; ``first`` are the ids of those whose bytes no other name has had before."""
    ranges = [_ranges(map(int, column)) for column in zip(*(numbers for numbers, _ in found), strict=True)]
    name = "".join(chain.from_iterable(zip_longest(texts, ranges, fillvalue="")))
    stored = [each for _, each in found]
    shapes = list(dict.fromkeys(each.shape for each in stored))
    shape = clean(format_shape(shapes[0]), 40)
    if len(shapes) > 1:
        shape += f" and {plural(len(shapes) - 1, 'other')}"
    dtypes = ", ".join(map(_word, dict.fromkeys(each.dtype for each in stored)))
    trouble = stored[0].trouble
    own = [each.nbytes for each in stored if id(each) in first]
    size = "no values" if trouble else format_bytes(sum(own)) if own else "shared"
    return Kind(clean(name), len(stored), shape, dtypes, size, trouble)


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


def _sizes(held: Iterable[Stored]) -> Iterator[str]:
    """Bytes by dtype."""
    sizes: Counter[str] = Counter()
    for stored in held:
        sizes[_word(stored.dtype)] += stored.nbytes
    if sizes:
        yield ", ".join(f"{dtype} {format_bytes(nbytes)}" for dtype, nbytes in sizes.most_common())


def _files(checkpoint: Checkpoint) -> Iterator[str]:
    """The files, where there are several."""
    files = checkpoint.files
    if len(files) > 1:
        yield f"{plural(len(files), 'file')}: {some(clean(os.path.basename(path)) for path in files)}"


def _word(dtype: object) -> str:
    return "?" if dtype is None else str(dtype).removeprefix("torch.")


def _shortened(name: str) -> str:
    return name if len(name) <= WIDTH else f"{name[: WIDTH - 21]}…{name[-20:]}"


def _breakable(name: str) -> str:
    """A name as markup that can go on in the next line after a dot."""
    return escape(name).replace(".", ".<wbr>")


def _common(before: str, name: str) -> int:
    """How much of a name is that of the line before, up to a dot."""
    length = 0
    for mine, theirs in zip(name, before, strict=False):
        if mine != theirs:
            break
        length += 1
    return name.rfind(".", 0, length) + 1
