"""A tree as one small piece of binary data for a front end: what `widgets/rows.js` reads.

Deflated (zlib): the length of the head (uint32, little-endian), the head (JSON, UTF-8, filled up with blanks to a
multiple of four bytes), then the columns of the rows in the order of the walk: look (uint32), name (uint32) and
depth (uint16), little-endian. All numbers are text already; names are harmless lines.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import zlib
from array import array
from typing import Any

from metaviz.core.columns import Columns
from metaviz.core.fold import Branch, alike, run_label
from metaviz.core.tree import ModuleTree
from metaviz.views.lines import SYMBOLS, clean, describe, marks, notes, summary

#: Bytes of the columns per row, before they are deflated.
ROW_BYTES = 10
_NAME = 200


@dataclasses.dataclass(slots=True)
class Head:
    """What a front end knows besides the columns. `rows.js` has the same names.

    Attributes:
        title: Class of the root.
        summary: Lines about the whole.
        marks: `[mark, "12 ready"]` of each mark that tensors have.
        symbols: Mark → symbol.
        rows: How many rows there are.
        names: Each name once.
        looks: What rows look like, each once:
            `[kind, cls, amount, size, nbytes, dtype, device, mark, source, notes]`; notes are `[kind, text]`.
        runs: Neighbours that look alike: `[first row, how many, label, cls, amount, size, nbytes]`.
        links: Row → the earlier row that it repeats, for those that do.
    """

    title: str
    summary: list[str]
    marks: list[tuple[str, str]]
    symbols: dict[str, str]
    rows: int
    names: list[str]
    looks: list[list[Any]]
    runs: list[list[Any]]
    links: list[tuple[int, int]]


def payload(tree: ModuleTree) -> bytes:
    """A whole tree as data: some 1 to 5 bytes a row for real models, and never more than 16 with the names left out.

    Args:
        tree: Of a whole model; of a part, the part alone, its root being row 0.
    """
    columns, start, stop = tree.columns, tree.root, tree.columns.ends[tree.root]
    looks = _Looks(columns)
    look = array("I", [looks.code(row) for row in range(start, stop)])
    table: dict[str, int] = {}
    codes = array("I", [table.setdefault(name, len(table)) for name in columns.names[start:stop]])
    depth = array("H", _depths(columns, start, stop))
    head = Head(
        title=clean(f"{tree.path} {columns.forms[start].cls}".strip()),
        summary=summary(tree),
        marks=marks(tree),
        symbols=SYMBOLS,
        rows=stop - start,
        names=[clean(name, _NAME) for name in table],
        looks=looks.found,
        runs=[_run(columns, start, first, last, count) for first, last, count in _runs(columns, start, stop)],
        links=[
            (row - start, first - start)
            for row, (_, first) in columns.links.items()
            if start <= row < stop and start <= first < stop
        ],
    )
    return zlib.compress(_joined(head, [look, codes, depth]), 6)


def _joined(head: Head, found: list[array]) -> bytes:
    said = json.dumps({name: getattr(head, name) for name in head.__slots__}, ensure_ascii=False).encode()
    said += b" " * (-len(said) % 4)
    if sys.byteorder == "big":
        for column in found:
            column.byteswap()
    return b"".join((len(said).to_bytes(4, "little"), said, *(column.tobytes() for column in found)))


def _depths(columns: Columns, start: int, stop: int) -> list[int]:
    parents, depths = columns.parents, [0] * (stop - start)
    for row in range(start + 1, stop):
        # A row deeper than two bytes can tell would be drawn off the screen a hundred times over.
        depths[row - start] = min(depths[parents[row] - start] + 1, 65_535)
    return depths


class _Looks:
    """What rows look like, each look once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._by_form: dict[int, int] = {}
        self._codes: dict[str, int] = {}
        self.found: list[list[Any]] = []
        # The words of all other rows follow from their forms alone.
        self._own = columns.links.keys() | columns.troubles.keys() | columns.fixes.keys()
        self._own |= columns.shared.keys()

    def code(self, row: int) -> int:
        if row in self._own:
            return self._made(row)
        key = id(self._columns.forms[row])
        code = self._by_form.get(key)
        if code is None:
            code = self._by_form[key] = self._made(row)
        return code

    def _made(self, row: int) -> int:
        look = _look(self._columns, row)
        key = json.dumps(look)
        code = self._codes.setdefault(key, len(self.found))
        if code == len(self.found):
            self.found.append(look)
        return code


def _look(columns: Columns, row: int) -> list[Any]:
    form, line = columns.forms[row], describe(columns, Branch(row, row, 1, columns.names[row]))
    source = form.source or (" ".join(sorted(columns.sources[row])) if form.kind == "module" else "")
    nbytes = form.facts.nbytes if form.facts else columns.tally(row).nbytes
    kind = form.kind if form.persistent is not False else "transient"
    said = [_note(columns, row, text) for text in notes(columns, row)]
    return [
        *(kind, line.cls, line.amount, line.size, nbytes),
        *(line.dtype, line.device, line.mark, source, said),
    ]


def _note(columns: Columns, row: int, text: str) -> tuple[str, str]:
    """A note with what kind it is."""
    kind = "plain"
    if row in columns.links and text.startswith(("= ", "views ", "shared with ", "leads back to ")):
        kind = "link"
    elif text.startswith("stale"):
        kind = "stale"
    elif row in columns.troubles:
        kind = "trouble"
    return kind, clean(text)


def _runs(columns: Columns, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(first row, last row, how many) of neighbours that look alike, in the order of the walk."""
    forms, ends, parents = columns.forms, columns.ends, columns.parents
    first_of: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for row in range(start + 1, stop):
        following = ends[row]
        if following >= ends[parents[row]] or forms[row] is not forms[following]:
            continue
        if alike(columns, row, following):
            first = first_of[following] = first_of.get(row, row)
            found[first] = following, found.get(first, (0, 1))[1] + 1
    return [(first, last, count) for first, (last, count) in sorted(found.items())]


def _run(columns: Columns, start: int, first: int, last: int, count: int) -> list[Any]:
    line = describe(columns, Branch(first, last, count, run_label(columns, first, last)))
    nbytes = count * columns.tally(first).nbytes
    return [first - start, count, line.label, line.cls, line.amount, line.size, nbytes]
