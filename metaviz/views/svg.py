"""Meshes and shardings as SVG without scripts: static in a saved notebook, and what the widget brings to life."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from metaviz.core.layout import MeshLayout
from metaviz.core.sharding import Sharding
from metaviz.core.units import format_exact, plural
from metaviz.views.floorplan import PAGE, Arrow, Cell, Floorplan, Label, floorplan, short
from metaviz.views.lines import clean

SYMBOLS = {"unavailable": "✗", "planned": "✎", "simulated": "≈", "waiting": "…", "ready": "●", "stale": "✗"}
#: One per axis, the fastest first: a hue, and a sign for whoever sees none.
HUES = ("#1f6feb", "#1a7f37", "#bf3989", "#9a6700", "#6639ba", "#cf222e")
SIGNS = ("●", "■", "▲", "◆", "★", "✚")
# Of the groups that colour tells apart; they differ from those of the picked rank.
_GROUPS = ("○", "□", "△", "◇", "☆", "✛")
_CUTS = 16
_WIDTH, _HEIGHT = 46, 26
# What a box can say at most when a pointer rests on it: names can be long, and boxes are many.
_TOLD = 120

_RULES = {
    ".mv-mesh": "font:12px/1.4 var(--jp-ui-font-family,system-ui,sans-serif);max-width:100%;height:auto;color:inherit",
    ".mv-mesh text": "fill:currentColor;font-size:12px",
    ".mv-mesh .mv-strong": "font-weight:600",
    ".mv-mesh .mv-dim": "opacity:.75",
    ".mv-mesh .mv-tick": "opacity:.7;font-size:10px",
    ".mv-mesh .mv-focus": "font-weight:700;text-decoration:underline",
    ".mv-mesh .mv-n": "text-anchor:middle;dominant-baseline:central;font-variant-numeric:tabular-nums",
    ".mv-mesh .mv-sign": "font-size:8px;text-anchor:middle",
    ".mv-mesh.mv-small .mv-n": "font-size:11px",
    ".mv-mesh.mv-small .mv-sign": "font-size:7px",
    ".mv-mesh .mv-b path": "fill:color-mix(in srgb,currentColor 3%,transparent);"
    "stroke:color-mix(in srgb,currentColor 30%,transparent)",
    ".mv-mesh .mv-shade path": "fill:color-mix(in srgb,currentColor 12%,transparent)",
    ".mv-mesh.mv-waiting .mv-b path": "stroke-dasharray:4 3",
    ".mv-mesh .mv-link,.mv-mesh .mv-axis": "fill:none;stroke-width:1.5",
    ".mv-mesh .mv-axis": "stroke-linejoin:round;stroke-linecap:round",
    ".mv-mesh .mv-cross": "stroke-dasharray:5 4",
    ".mv-mesh.mv-stale .mv-cells": "opacity:.45",
}
for _axis, _hue in enumerate(HUES):
    # Dark enough on white, light enough on black.
    _ink = f"color-mix(in srgb,{_hue} 72%,currentColor)"
    _RULES[f".mv-mesh .mv-h{_axis}"] = f"fill:{_ink}"
    _RULES[f".mv-mesh .mv-l{_axis}"] = f"stroke:{_ink}"
    _RULES[f".mv-mesh .mv-c{_axis} path"] = f"fill:color-mix(in srgb,{_hue} 14%,transparent)"
    # It wins over the colour of a group.
    _RULES[f".mv-mesh .mv-b.mv-a{_axis} path"] = (
        f"fill:color-mix(in srgb,{_hue} 30%,transparent);stroke:{_ink}"
    )
_RULES[".mv-mesh .mv-b.mv-me path"] = "stroke:currentColor;stroke-width:2.5;fill:none"
_RULES[".mv-mesh .mv-me .mv-n"] = "font-weight:700"
STYLE = "".join(f"{selector}{{{rules}}}" for selector, rules in _RULES.items())


def title(layout: MeshLayout) -> str:
    """A mesh in a line: `"● ready  dp=2 × tp=4, 8 ranks, cuda"`."""
    parts = [f"{SYMBOLS[layout.state]} {layout.state}"]
    if layout.axes:
        hosts = layout.hosts
        on = f" on {plural(hosts, 'host')} (assumed {layout.ranks_per_host} a host)" if hosts else ""
        parts.append(f"{layout.shape_words}, {plural(layout.size, 'rank')}{on}, {layout.device_type}")
    elif layout.world:
        parts.append(plural(layout.world, "rank"))
    return clean("  ".join(parts), 400)


def svg(
    layout: MeshLayout, *, rank: int | None = None, colour: str | None = None, legend: bool = True
) -> str:
    """A mesh as SVG, at most some 500 kB.

    Args:
        layout: What to draw.
        rank: Whose groups to mark; those of this process, or of nobody, if None.
        colour: The axis whose groups are told apart by colour; none if None.
        legend: Whether to say in it whose mesh it is, and who is in the marked groups. What else has to be known to
            read it is said in any case.

    Raises:
        BadMesh: There is no such rank or axis.
    """
    if not layout.ranks:
        return _waiting(layout, legend)
    whose = rank if rank is not None else layout.rank if layout.coordinate is not None else None
    groups = {} if whose is None else {name: layout.group(name, whose) for name in layout.names}
    heads, top = _heads(layout, 22 if legend else 2)
    plan = floorplan(layout, None if whose is None else layout.coordinate_of(whose), top)
    said = clean(f"Device mesh {layout.shape_words}, {layout.state}: {plural(layout.size, 'rank')}", 400)
    lines = [*(_legend(layout, whose, groups) if legend else ()), *_notes(layout, plan, colour)]
    words = [1.15 * len(title(layout)) if legend else 0, *map(len, lines)]
    width = max(plan.width, 8 + min(6.6 * max(words), PAGE), 360)
    kind = f"mv-{layout.state}{' mv-small' if plan.box.small else ''}"
    place = "" if whose is None else f' data-p="{layout.place_of[whose]}"'
    parts = [
        _opened(kind, said, width, plan.height + 18 * len(lines) + 8, place),
        _label(Label(4, 15, title(layout), kind="strong"), 400) if legend else "",
        *heads,
        *map(_label, plan.labels),
        *(_arrow(layout, arrow) for arrow in plan.arrows),
        '<g class="mv-links">',
        *_links(layout, plan, groups),
        '</g><g class="mv-cells">',
        *_cells(layout, plan, whose, groups, colour),
        "</g>",
        *(_label(Label(4, plan.height + 16 + 18 * at, line), 400) for at, line in enumerate(lines)),
    ]
    return "".join(parts) + "</svg>"


def _opened(kind: str, said: str, width: float, height: float, more: str = "") -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"{more}'
    name = f'role="img" aria-label="{escape(said, quote=True)}"'
    start = f'<svg class="mv-mesh {kind}" xmlns="http://www.w3.org/2000/svg" {name} {size}>'
    return f"{start}<style>{STYLE}</style>"


def hue_of(layout: MeshLayout, name: str) -> int:
    """The number of the hue and sign of an axis: the fastest one has the first."""
    return (len(layout.axes) - 1 - layout.axis(name)) % len(HUES)


def _heads(layout: MeshLayout, top: float) -> tuple[list[str], float]:
    """Each axis with its sign, size, and how it runs; and where the drawing can begin below."""
    ways = ("→", "↓", "floors") if len(layout.axes) > 1 else ("→",)
    parts, x, y = [], 4.0, top + 14
    for number, axis in enumerate(layout.axes):
        after = len(layout.axes) - 1 - number
        way = ways[after] if after < len(ways) else "panels"
        name, hue = short(axis.name, 24), hue_of(layout, axis.name)
        kind = "mv-strong"
        if layout.focus:
            kind = "mv-focus" if axis.name in layout.focus else "mv-dim"
        words = f"{name} ({format_exact(axis.size)})"
        if x > 4 and x + 7.4 * len(words) + 30 > PAGE:
            x, y = 4.0, y + 18
        parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}"><tspan class="mv-h{hue}">{SIGNS[hue]}</tspan>'
            f'<tspan dx="4" class="{kind} mv-h{hue}">{escape(words)}</tspan><tspan dx="4">{way}</tspan></text>'
        )
        x += 7.4 * len(words) + 7 * len(way) + 44
    return parts, y + 14


def _label(label: Label, limit: int = 160) -> str:
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    words = escape(clean(label.text, limit))
    return f'<text x="{label.x:.0f}" y="{label.y:.0f}"{anchor} class="mv-{label.kind}">{words}</text>'


def _arrow(layout: MeshLayout, arrow: Arrow) -> str:
    (_, x1, y1, x2, y2), hue = arrow, hue_of(layout, layout.names[arrow.axis])
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    one, other = (x2 - 5 * dx - 3 * dy, y2 - 5 * dy + 3 * dx), (x2 - 5 * dx + 3 * dy, y2 - 5 * dy - 3 * dx)
    head = f"M{one[0]:.1f} {one[1]:.1f}L{x2:.1f} {y2:.1f}L{other[0]:.1f} {other[1]:.1f}"
    return f'<path class="mv-axis mv-l{hue}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}{head}"/>'


def _cells(
    layout: MeshLayout,
    plan: Floorplan,
    whose: int | None,
    groups: Mapping[str, Sequence[int]],
    colour: str | None,
) -> Iterator[str]:
    marked: dict[int, int] = {}
    for name, group in groups.items():
        hue = hue_of(layout, name)
        marked |= {rank: hue for rank in group if rank != whose}
    tints = {} if colour is None else {r: i for i, g in enumerate(layout.groups(colour)) for r in g}
    for cell in plan.cells:
        kinds, sign = ["mv-b"], ""
        if (layout.host_of(cell.rank) or 0) % 2:
            kinds.append("mv-shade")
        if cell.rank in tints:
            # Shifted by one each time round, so that 36 groups differ.
            group = tints[cell.rank]
            kinds.append(f"mv-c{group % len(HUES)}")
            sign = _GROUPS[(group + group // len(HUES)) % len(HUES)]
        if cell.rank == whose:
            kinds.append("mv-me")
        elif cell.rank in marked:
            kinds.append(f"mv-a{marked[cell.rank]}")
            sign = SIGNS[marked[cell.rank]]
        yield _cell(layout, plan, cell, " ".join(kinds), sign)


def _cell(layout: MeshLayout, plan: Floorplan, cell: Cell, kinds: str, sign: str) -> str:
    (w, h, shear, small), (cx, cy) = plan.box, plan.centre(cell)
    # To the left of the number, however long that is.
    room = (4 + 3.2 * len(str(cell.rank))) if small else (6 + 3.6 * len(str(cell.rank)))
    mark = f'<text class="mv-sign" x="{cx - room:.0f}" y="{cy + 3:.0f}">{sign}</text>' if sign else ""
    return (
        f'<g class="{kinds}" data-p="{cell.place}"><title>{_told(layout, cell.rank)}</title>'
        f'<path d="M{cell.x:.0f} {cell.y:.0f}h{w:.0f}l{-shear} {h}h{-w:.0f}z"/>'
        f'<text class="mv-n" x="{cx:.0f}" y="{cy:.0f}">{cell.rank}</text>{mark}</g>'
    )


def _told(layout: MeshLayout, rank: int) -> str:
    """What a box says when a pointer rests on it: where names are too long for that, numbers alone."""
    said = escape(rank_words(layout, rank))
    return said if len(said) <= _TOLD else escape(f"rank {rank}: {_where(layout, rank)}{_host(layout, rank)}")


def _where(layout: MeshLayout, rank: int) -> str:
    return f"({', '.join(map(str, layout.coordinate_of(rank)))})"


def _host(layout: MeshLayout, rank: int) -> str:
    if layout.ranks_per_host is None:
        return ""
    return f", host {layout.host_of(rank)} (local rank {rank % layout.ranks_per_host})"


def rank_words(layout: MeshLayout, rank: int) -> str:
    """A rank in words: `"rank 5: dp=1, tp=1, host 0 (local rank 5)"`."""
    at = ", ".join(
        f"{name}={place}" for name, place in zip(layout.names, layout.coordinate_of(rank), strict=True)
    )
    return clean(f"rank {rank}: {at}{_host(layout, rank)}", 400)


def _links(layout: MeshLayout, plan: Floorplan, groups: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Lines between neighbours of the marked groups; dashed where they leave a host."""
    cells = {cell.rank: cell for cell in plan.cells}
    ends: dict[tuple[int, int, int], list[float]] = {}
    for cell in plan.cells:
        ends.setdefault(cell.block, [cell.y, 0])[1] = cell.y + plan.box.height
    for name, group in groups.items():
        hue, after = hue_of(layout, name), len(layout.axes) - 1 - layout.axis(name)
        hosts = [layout.host_of(rank) for rank in group]
        drawn = [at for at, rank in enumerate(group) if rank in cells]
        for first, last in itertools.pairwise(drawn):
            # What is folded away between them counts, too.
            crosses = len(set(hosts[first : last + 1])) > 1
            kind = f"mv-link mv-l{hue}{' mv-cross' if crosses else ''}"
            one, other = cells[group[first]], cells[group[last]]
            if after == 2:
                line = _pillar(plan, one, other, ends[one.block][1], ends[other.block][0])
            else:
                line = _line(plan, one, other, after)
            yield f'<path class="{kind}" d="{line}"/>'


def _pillar(plan: Floorplan, one: Cell, other: Cell, bottom: float, top: float) -> str:
    """A line from floor to floor, between them only: over the boxes it would cross numbers."""
    x1, x2 = (plan.centre(cell)[0] + plan.box.width / 2 - 9 for cell in (one, other))
    if one.block[:2] == other.block[:2]:
        return f"M{x1:.0f} {bottom:.0f}V{top:.0f}"
    return f"M{x1:.0f} {bottom:.0f}v14M{x2:.0f} {top - 14:.0f}v14"


def _line(plan: Floorplan, one: Cell, other: Cell, after: int) -> str:
    """A line beside the numbers of a floor; two ends of one where they stand far apart."""
    (w, h, *_), (x1, y1), (x2, y2) = plan.box, plan.centre(one), plan.centre(other)
    if after == 1:
        side = w / 2 - 5
        return f"M{x1 + side:.0f} {y1:.0f}L{x2 + side:.0f} {y2:.0f}"
    low = h / 2 - 4 if after == 0 else 4 - h / 2
    if one.block == other.block:
        return f"M{x1:.0f} {y1 + low:.0f}L{x2:.0f} {y2 + low:.0f}"
    return f"M{x1:.0f} {y1 + low:.0f}h{w / 2 + 8:.0f}M{x2 - w / 2 - 8:.0f} {y2 + low:.0f}h{w / 2 + 8:.0f}"


def _legend(layout: MeshLayout, whose: int | None, groups: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Whose mesh it is and who is in the marked groups."""
    if whose is not None:
        mine = " (this process)" if whose == layout.rank else ""
        yield f"□ {rank_words(layout, whose)}{mine}"
    for name, group in groups.items():
        yield f"{SIGNS[hue_of(layout, name)]} {short(name, 40)}: {group_words(group)}"
    yield from _crossings(layout)
    if layout.idle:
        yield f"not on the mesh: {group_words(layout.idle)}"


def _crossings(layout: MeshLayout) -> Iterator[str]:
    for name in layout.names:
        if crossing := layout.crossing(name):
            of = format_exact(layout.size // layout.shape[layout.axis(name)])
            yield f"- - {format_exact(crossing)} of {of} groups along {short(name, 40)} cross hosts"


def _notes(layout: MeshLayout, plan: Floorplan, colour: str | None) -> Iterator[str]:
    """What has to be known to read a drawing."""
    if (layout.hosts or 0) > 1:
        # Colour is laid over the shades.
        yield (
            "Dashed lines leave a host." if colour else "Hosts are shaded in turn; dashed lines leave a host."
        )
    if colour is not None:
        many = format_exact(layout.size // layout.shape[layout.axis(colour)])
        yield f"{' '.join(_GROUPS)} tell the {many} groups along {short(colour, 40)} apart."
    if plan.folded:
        left_out = f"{format_exact(layout.size - len(plan.cells))} of {format_exact(layout.size)} ranks"
        yield f"… {left_out} are folded away along {', '.join(short(name, 24) for name in plan.folded)}"


def group_words(group: Sequence[int]) -> str:
    """The members of a group: `"0, 4, 8 … 60 (16 ranks)"`."""
    if len(group) <= 12:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:4]))} … {group[-1]} ({format_exact(len(group))} ranks)"


def _waiting(layout: MeshLayout, legend: bool) -> str:
    """A mesh that is not there yet: as many empty places as ranks are known to come."""
    if layout.state == "unavailable":
        said, count = "There will be no mesh here.", 0
    else:
        count = min(layout.world or 4, 16)
        many = (
            f"of {plural(layout.world, 'rank')}"
            if layout.world
            else "; how many ranks there will be is not known"
        )
        said = f"A mesh {many} is awaited." if layout.world else f"A mesh is awaited{many}."
        if layout.rank is not None:
            said += f" This process is rank {layout.rank}."
    top = 28 if legend else 8
    boxes = "".join(
        f'<g class="mv-b{" mv-me" if at == layout.rank else ""}">'
        f'<path d="M{8 + 50 * at} {top}h{_WIDTH}v{_HEIGHT}h{-_WIDTH}z"/>'
        f'<text class="mv-n" x="{8 + 50 * at + _WIDTH / 2:.0f}" y="{top + 13}">'
        f"{at if layout.world else '?'}</text></g>"
        for at in range(count)
    )
    if count and (layout.world or 0) > count:
        boxes += _label(Label(8 + 50 * count, top + 17, f"… {format_exact(layout.world - count)} more"))
    end = top + (46 if count else 12)
    words = _label(Label(8, end, said))
    head = _label(Label(8, 16, title(layout), kind="strong"), 400) if legend else ""
    width = max(460, 50 * count + (120 if (layout.world or 0) > count else 16))
    return f"{_opened(f'mv-{layout.state}', said, width, end + 8)}{head}{boxes}{words}</svg>"


def sharding_svg(sharding: Sharding) -> str:
    """A tensor of one or two dims, cut as its ranks hold it; `""` where that cannot be drawn well."""
    owners = {runs: ranks for runs, ranks in sharding.owners().items() if all(runs)}
    cuts = [
        sorted({edge for runs in owners for run in runs[dim] for edge in run})
        for dim in range(len(sharding.shape))
    ]
    if not 1 <= len(sharding.shape) <= 2 or not owners or any(len(each) > _CUTS + 1 for each in cuts):
        return ""
    rows, columns = cuts[0], cuts[1] if len(cuts) == 2 else [0, 1]
    wide, high = 420, 200 if len(cuts) == 2 else 30 * (len(rows) - 1)
    boxes = []
    for number, (runs, ranks) in enumerate(owners.items()):
        across = runs[1] if len(cuts) == 2 else ((0, 1),)
        for (top, bottom), (left, right) in ((r, c) for r in runs[0] for c in across):
            x, y = 8 + _spread(columns, left, wide), 20 + _spread(rows, top, high)
            w, h = 8 + _spread(columns, right, wide) - x, 20 + _spread(rows, bottom, high) - y
            where = f"{top}:{bottom}, {left}:{right}" if len(cuts) == 2 else f"{top}:{bottom}"
            said = f"[{where}], {'rank' if len(ranks) == 1 else 'ranks'} {group_words(ranks)}"
            boxes.append(
                f'<g class="mv-b mv-c{number % len(HUES)}"><title>{said}</title>'
                f'<path d="M{x:.0f} {y:.0f}h{w:.0f}v{h:.0f}h{-w:.0f}z"/>'
                f'<text class="mv-n" x="{x + w / 2:.0f}" y="{y + h / 2:.0f}">{escape(group_words(ranks))}</text></g>'
            )
    said = escape(f"Which ranks hold which part of a tensor of {len(sharding.shape)} dims", quote=True)
    across = ", dim 1 across" if len(cuts) == 2 else ""
    words = f'<text x="8" y="12" class="mv-dim">dim 0 down{across}; numbers are ranks</text>'
    return f"{_opened('mv-cuts', said, wide + 20, high + 28)}{words}{''.join(boxes)}</svg>"


def _spread(edges: Sequence[int], edge: int, pixels: int) -> float:
    """Where a cut is drawn: all pieces alike, as a piece of one row next to one of thousands could not be read."""
    return pixels * edges.index(edge) / max(len(edges) - 1, 1)
