"""Meshes and shardings as text and HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from metaviz.core.layout import MeshLayout
from metaviz.core.meshes import Meshes
from metaviz.core.sharding import Runs, Sharding
from metaviz.core.units import format_bytes, format_exact, format_shape, plural
from metaviz.views import svg
from metaviz.views.lines import clean
from metaviz.views.pieces import code_block, page
from metaviz.views.svg import title

# So many numbers fit on a line of a terminal, and so many lines are read.
_WIDE, _HIGH = 16, 16
_GROUP = 16
_OWNERS = 24
# Of the name of an axis, where others stand below it.
_HEAD = 40


def draw(thing: Any, how: str, **options: Any) -> Any:
    """A layout, several, or a sharding as ``"text"``, ``"html"`` or ``"svg"``."""
    if isinstance(thing, Sharding):
        return {"text": sharding_text, "html": sharding_html}[how](thing)
    if isinstance(thing, Meshes):
        if how == "text":
            return _choice(thing)
        return page(
            "".join(f"<h4>{escape(clean(name))}</h4>{html(each)}" for name, each in thing.found.items())
        )
    return {"text": text, "html": html, "svg": svg.svg}[how](thing, **options)


def _choice(meshes: Meshes) -> str:
    names = [clean(name, _HEAD) for name in meshes.found]
    lines = [f"{len(names)} meshes: choose one by name, metaviz.mesh({names[0]})"]
    for name, each in zip(names, meshes.found.values(), strict=True):
        lines.append(f"  {name}: {clean(each.shape_words or each.state, 400)}, {each.state}")
    return "\n".join(lines)


def facts(layout: MeshLayout, rank: int | None = None) -> list[tuple[str, str]]:
    """What is known besides, as (head, text).

    Args:
        layout: The mesh.
        rank: Whose groups to tell; those of this process, or the first ones, if None.
    """
    found = [("why", layout.reason)] if layout.reason else []
    if layout.rank is not None:
        coordinate = layout.coordinate
        at = "not on the mesh" if coordinate is None else _coordinate(layout, coordinate)
        head = "seen by" if layout.state == "planned" else "this process"
        found.append((head, f"rank {layout.rank}, {at}" if layout.axes else f"rank {layout.rank}"))
    for axis in layout.axes:
        found.append((axis.name, clean(axis_words(layout, axis.name, rank), 400)))
    found += [(alias, f"{' and '.join(covered)}, flattened") for alias, covered in layout.aliases.items()]
    if layout.focus:
        found.append(("in focus", ", ".join(layout.focus)))
    # Of a mesh that is not there yet nobody is left out.
    if layout.ranks and layout.idle:
        found.append(("idle", f"{_ranks(layout.idle)}: not on the mesh"))
    found += [("note", note) for note in layout.notes]
    return found


def _coordinate(layout: MeshLayout, coordinate: tuple[int, ...]) -> str:
    return ", ".join(f"{name}={at}" for name, at in zip(layout.names, coordinate, strict=True))


def axis_words(layout: MeshLayout, name: str, rank: int | None = None) -> str:
    """An axis in words: how many groups, the own one, what it talks with, whether it leaves hosts."""
    axis = layout.axes[layout.axis(name)]
    if not layout.ranks:
        return f"{axis.size} ranks"
    group = layout.group(name, rank)
    seen = (
        layout.rank if rank is None and layout.coordinate is not None and layout.state == "planned" else rank
    )
    whose = "that of this process" if layout.coordinate is not None else "the first"
    whose = whose if seen is None else f"that of rank {seen}"
    many = layout.size // axis.size
    words = f"{plural(many, 'group')} of {axis.size}; {whose}: {_ranks(group)}"
    if axis.is_world:
        words += "; it is the group of the whole job (WORLD), so never destroy it alone"
    if axis.backend:
        words += f"; {axis.backend}"
    crossing = layout.crossing(name)
    if layout.ranks_per_host and axis.size > 1:
        words += f"; {_crossing(crossing, many)}"
    return words


def _crossing(crossing: int, many: int) -> str:
    """How many of the groups of an axis leave their host."""
    if not crossing:
        return "within hosts"
    if crossing == many:
        return "it crosses hosts" if many == 1 else "all of them cross hosts"
    return f"{format_exact(crossing)} of them {'crosses' if crossing == 1 else 'cross'} hosts"


def _ranks(ranks: tuple[int, ...]) -> str:
    """Some ranks: `"0, 4, 8 … 60 (16)"`."""
    if len(ranks) <= _GROUP:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))} … {ranks[-1]} ({format_exact(len(ranks))})"


def text(layout: MeshLayout, **options: Any) -> str:
    """A mesh as text: a grid of ranks for the two fastest axes, a block for each place on the others."""
    lines = [title(layout), *_grids(layout)]
    known = [(clean(head, _HEAD), said) for head, said in facts(layout)]
    width = max((len(head) for head, _ in known), default=0)
    lines += [f"{head:<{width}}  {clean(said, 1000)}" for head, said in known]
    if layout.step:
        lines.append(f"Next: {layout.step}")
    return "\n".join(lines)


def _grids(layout: MeshLayout) -> list[str]:
    if not layout.ranks:
        return []
    shape = (1, 1, *layout.shape)
    rows, columns = shape[-2:]
    many = layout.size // (rows * columns)
    width = max(len(str(rank)) for rank in (layout.ranks[0], layout.ranks[-1], max(layout.ranks))) + 1
    lines = []
    blocks = max(1, _HIGH // max(1, min(rows, _HIGH)))
    for block in range(min(many, blocks)):
        start = block * rows * columns
        if len(layout.axes) > 2:
            coordinate = layout.coordinate_of(layout.ranks[start])[:-2]
            where = zip(layout.names, coordinate, strict=False)
            lines.append("  " + ", ".join(f"{clean(name, _HEAD)}={at}" for name, at in where))
        for row in range(min(rows, _HIGH)):
            ranks = layout.ranks[start + row * columns : start + row * columns + columns]
            cells = "".join(f"{_marked(layout, rank):>{width}}" for rank in ranks[:_WIDE])
            lines.append("  " + cells + (f" … {ranks[-1]}" if columns > _WIDE else ""))
        if rows > _HIGH:
            lines.append(f"  … {format_exact(rows - _HIGH)} more rows")
    if many > blocks:
        lines.append(f"  … {format_exact(many - blocks)} more blocks like that")
    return lines


def _marked(layout: MeshLayout, rank: int) -> str:
    return f"*{rank}" if rank == layout.rank else str(rank)


def html(layout: MeshLayout, **options: Any) -> str:
    """A mesh as HTML: the drawing, and what is known in words."""
    rows = "".join(
        f"<dt>{escape(clean(head))}</dt> <dd>{escape(clean(said, 1000))}</dd>" for head, said in facts(layout)
    )
    step = f"<p>Next:</p>{code_block(layout.step)}" if layout.step else ""
    return page(f"<p><b>{escape(title(layout))}</b></p>{svg.svg(layout, legend=False)}<dl>{rows}</dl>{step}")


def sharding_text(sharding: Sharding) -> str:
    """A sharding as text: what each axis does, then which ranks hold which slice."""
    said = [f"  {clean(words, 400)}" for words in sharding.words]
    return "\n".join([_head(sharding), *said, *_table_lines(sharding)])


def _head(sharding: Sharding) -> str:
    name = f"{clean(sharding.path)}  " if sharding.path else ""
    dtype = str(sharding.dtype).removeprefix("torch.")
    size, mesh = format_bytes(sharding.nbytes), clean(sharding.layout.shape_words, 400)
    return f"{name}{format_shape(sharding.shape)} {dtype}, {size}, on {mesh}"


def slice_words(runs: tuple[Runs, ...]) -> str:
    """What is held, as indices: `"[0:64, :]"` with several runs as `0:2+4:6`."""
    if any(not each for each in runs):
        return "nothing"
    return "[" + ", ".join("+".join(f"{start}:{end}" for start, end in each) for each in runs) + "]"


def _rows(sharding: Sharding) -> list[tuple[str, str, str, str]]:
    """(ranks, slice, shape, bytes) for each different slice."""
    rows = []
    for runs, ranks in list(sharding.owners().items())[:_OWNERS]:
        shape = sharding.shape_on(ranks[0])
        rows.append(
            (
                _ranks(tuple(ranks)),
                slice_words(runs),
                format_shape(shape),
                format_bytes(sharding.nbytes_on(ranks[0])),
            )
        )
    return rows


def _table_lines(sharding: Sharding) -> list[str]:
    table = [("ranks", "slice", "shape", "bytes"), *_rows(sharding)]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    more = len(sharding.owners()) - _OWNERS
    return lines + ([f"  … {format_exact(more)} more slices"] if more > 0 else [])


def sharding_html(sharding: Sharding) -> str:
    """A sharding as HTML: the same words, and a picture of the cuts."""
    words = "".join(f"<li>{escape(clean(each, 400))}</li>" for each in sharding.words)
    head = "".join(f"<th>{name}</th>" for name in ("ranks", "slice", "shape", "bytes"))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in _rows(sharding)
    )
    more = len(sharding.owners()) - _OWNERS
    rest = f"<p>… {format_exact(more)} more slices</p>" if more > 0 else ""
    picture = svg.sharding_svg(sharding)
    return page(
        f"<p><b>{escape(_head(sharding))}</b></p><ul>{words}</ul>{picture}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"
    )
