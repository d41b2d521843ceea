"""A tree as text: about 100 columns, repeated blocks folded, totals and the next step below."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator

from metaviz.core.fold import Branch, hidden, outline
from metaviz.core.reasons import as_called, quoted
from metaviz.core.tree import ModuleTree
from metaviz.core.units import format_exact, plural
from metaviz.views.lines import (
    DOUBTS,
    SYMBOLS,
    clean,
    describe,
    marks,
    next_step,
    obstacles,
    origins,
    summary,
)

WIDTH = 100
HEADER = ("shape/params", "size", "dtype", "device", "mark")
GAP = "  "
# Rails of more levels than this leave no room for names.
DEEPEST = 12
# A class name cut shorter than this says nothing.
SHORTEST = 6


def text(tree: ModuleTree, *, depth: int | None = None, unfold: bool = False, rows: int = 60) -> str:
    """A tree as lines of text.

    Args:
        tree: What to show.
        depth: How many levels below the root to open; None opens as many as there is room for.
        unfold: Show each of some repeated blocks, not one for all.
        rows: About how many lines there is room for.
    """
    columns = tree.columns
    depth = DEEPEST if depth is None else depth
    top = outline(columns, tree.root, lines=rows, depth=depth, unfold=unfold, brief=True)
    names, cells, closed = [("",)], [HEADER], None
    for indent, branch in _walk(top):
        if branch is None:
            names.append((indent,))
            cells.append(("",) * len(HEADER))
            continue
        line = describe(columns, branch, tree.path if branch is top else None)
        more = ""
        if hidden(columns, branch):
            more, closed = "…", closed or branch
        names.append((indent + line.label, line.cls, line.note, more))
        cells.append((line.amount, line.size, line.dtype, line.device, f"{SYMBOLS[line.mark]} {line.mark}"))
    return "\n".join([*_layout(names, cells), "", *_footer(tree, top, closed)])


def _walk(top: Branch) -> Iterator[tuple[str, Branch | None]]:
    """Each line with the rails before it; None for a line that says how many are missing."""
    todo: list[tuple[str, str, Branch | str]] = [("", "", top)]
    while todo:
        lead, rail, item = todo.pop()
        if isinstance(item, str):
            yield lead + item, None
            continue
        yield lead, item
        below: list[Branch | str] = list(item.branches or [])
        if item.missing:
            below.append(f"… {format_exact(item.missing)} more")
        for index in range(len(below) - 1, -1, -1):
            last = index == len(below) - 1
            todo.append((rail + ("└─ " if last else "├─ "), rail + ("   " if last else "│  "), below[index]))


def _layout(names: list[tuple[str, ...]], cells: list[tuple[str, ...]]) -> list[str]:
    """Names and cells in columns; the names take what the cells leave of the width."""
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    room = WIDTH - sum(widths) - len(GAP) * len(widths)
    firsts = [_fit(parts, room) for parts in names]
    widest = max(map(_width, firsts))
    lines = []
    for first, (amount, size, dtype, device, mark) in zip(firsts, cells, strict=True):
        line = [_pad(first, widest), _pad(amount, -widths[0]), _pad(size, -widths[1])]
        line += [_pad(dtype, widths[2]), _pad(device, widths[3]), mark]
        lines.append(GAP.join(line).rstrip())
    return lines


def _fit(parts: tuple[str, ...], room: int) -> str:
    """A name, its class and notes in the room there is: the class gives way first, then the name."""
    label, *others = parts
    cls, *notes = others or [""]
    whole = GAP.join(filter(None, parts))
    if _width(whole) <= room:
        return whole
    rest = GAP.join(filter(None, notes))
    for_class = room - _width(GAP.join(filter(None, (label, rest)))) - len(GAP)
    if for_class >= SHORTEST:
        return GAP.join(filter(None, (label, _shorten(cls, for_class), rest)))
    if not rest:
        return _shorten(label, room)
    label = _shorten(label, max(room - _width(rest) - len(GAP), room // 2))
    return label + GAP + _shorten(rest, room - _width(label) - len(GAP))


def _footer(tree: ModuleTree, top: Branch, closed: Branch | None) -> list[str]:
    lines = summary(tree)
    if marks(tree):
        told = {"ready": f" ({found})"} if (found := origins(tree)) else {}
        counts = GAP.join(f"{SYMBOLS[mark]} {words}{told.get(mark, '')}" for mark, words in marks(tree))
        lines.append(f"{plural(sum(tree.totals.marks.values()), 'tensor')}: {counts}")
    for mark, names, reason, step in obstacles(tree):
        about = f"{(SYMBOLS | DOUBTS)[mark]} {names}{': ' if names else ''}{reason}"
        lines += textwrap.wrap(about, WIDTH, subsequent_indent=GAP, break_on_hyphens=False)
        lines += [f"{GAP}Next: {as_called(tree.columns, step)}"] if step else []
    if closed is not None:
        lines.append(
            f"… more inside: metaviz.tree({tree.columns.called})[{clean(quoted(tree.columns.path(closed.row)), 1000)}]"
        )
    step = next_step(tree, top)
    if step:
        lines.append(f"Next: {clean(as_called(tree.columns, step), 1000)}")
    return lines


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _pad(text: str, width: int) -> str:
    """The text padded on the right, or on the left if the width is negative."""
    space = " " * (abs(width) - _width(text))
    return text + space if width > 0 else space + text


def _shorten(text: str, width: int) -> str:
    """The text with its middle left out where it is too wide."""
    if _width(text) <= width:
        return text
    head, tail = text[: width - width // 3], text[-(width // 3) :]
    while _width(head) + 1 + _width(tail) > width:
        head, tail = (head[:-1], tail) if len(head) > len(tail) else (head, tail[1:])
    return f"{head}…{tail}"
