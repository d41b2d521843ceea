"""Meshes and shardings as SVG without scripts: static in a saved notebook, and what the widget brings to life."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape

from metaviz.core.layout import MeshLayout
from metaviz.core.sharding import Sharding
from metaviz.core.units import format_exact, plural
from metaviz.views.floorplan import HEIGHT, WIDTH, Cell, Floorplan, Label, floorplan
from metaviz.views.lines import clean

#: One per axis, the fastest first: a hue, and a sign for whoever sees none.
HUES = ("#1f6feb", "#1a7f37", "#bf3989", "#9a6700", "#6639ba", "#cf222e")
SIGNS = ("●", "■", "▲", "◆", "★", "✚")
_CUTS = 16

_RULES = {
    ".mv-mesh": "font:12px/1.4 var(--jp-ui-font-family,system-ui,sans-serif);max-width:100%;height:auto;color:inherit",
    ".mv-mesh text": "fill:currentColor;font-size:12px",
    ".mv-mesh .mv-strong": "font-weight:600",
    ".mv-mesh .mv-dimmed": "opacity:.72",
    ".mv-mesh .mv-n": "text-anchor:middle;dominant-baseline:central;font-variant-numeric:tabular-nums",
    ".mv-mesh .mv-sign": "font-size:8px;text-anchor:middle",
    ".mv-mesh path": "fill:color-mix(in srgb,currentColor 4%,transparent);"
    "stroke:color-mix(in srgb,currentColor 30%,transparent)",
    ".mv-mesh .mv-me path": "stroke:currentColor;stroke-width:2.5",
    ".mv-mesh .mv-me .mv-n": "font-weight:700",
    ".mv-mesh .mv-link": "fill:none;stroke-width:1.5;opacity:.6",
    ".mv-mesh .mv-cross": "stroke-dasharray:5 4",
    ".mv-mesh.mv-stale .mv-cells": "opacity:.45",
}
for _axis, _hue in enumerate(HUES):
    _RULES[f".mv-mesh .mv-a{_axis} path"] = f"fill:color-mix(in srgb,{_hue} 26%,transparent);stroke:{_hue}"
    _RULES[f".mv-mesh .mv-c{_axis} path"] = f"fill:color-mix(in srgb,{_hue} 16%,transparent)"
STYLE = "".join(f"{selector}{{{rules}}}" for selector, rules in _RULES.items())


def svg(layout: MeshLayout, *, rank: int | None = None, colour: str | None = None) -> str:
    """A mesh as SVG, at most some 300 kB.

    Args:
        layout: What to draw.
        rank: Whose groups to mark; those of this process, or of nobody, if None.
        colour: The axis whose groups are told apart by colour; none if None.

    Raises:
        BadMesh: There is no such rank or axis.
    """
    if not layout.ranks:
        return _waiting(layout)
    whose = rank if rank is not None else layout.rank if layout.coordinate is not None else None
    around = None if whose is None else layout.coordinate_of(whose)
    plan = floorplan(layout, around)
    groups = {} if whose is None else {name: layout.group(name, whose) for name in layout.names}
    legend = list(_legend(layout, whose, groups, plan))
    height = plan.height + 18 * len(legend) + 8
    said = escape(
        f"Device mesh {layout.shape_words}, {layout.state}: {plural(layout.size, 'rank')}", quote=True
    )
    parts = [
        _opened(f"mv-{layout.state}", said, max(plan.width, 520), height),
        '<g class="mv-words">',
        *map(_label, plan.labels),
        '</g><g class="mv-links">',
        *_links(layout, plan, groups),
        '</g><g class="mv-cells">',
        *_cells(layout, plan, whose, groups, colour),
        "</g>",
    ]
    parts += [_label(Label(4, plan.height + 14 + 18 * line, text)) for line, text in enumerate(legend)]
    return "".join(parts) + "</svg>"


def _opened(kind: str, said: str, width: float, height: float) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    start = f'<svg class="mv-mesh {kind}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{said}" {size}>'
    return f"{start}<style>{STYLE}</style>"


def hue_of(layout: MeshLayout, name: str) -> int:
    """The number of the hue and sign of an axis: the fastest one has the first."""
    return (len(layout.axes) - 1 - layout.axis(name)) % len(HUES)


def _label(label: Label) -> str:
    strong = ' class="mv-strong"' if label.strong else ' class="mv-dimmed"'
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    return (
        f'<text x="{label.x:.0f}" y="{label.y:.0f}"{anchor}{strong}>{escape(clean(label.text, 160))}</text>'
    )


def _cells(
    layout: MeshLayout,
    plan: Floorplan,
    whose: int | None,
    groups: dict[str, tuple[int, ...]],
    colour: str | None,
) -> Iterator[str]:
    marked: dict[int, int] = {}
    for name, group in groups.items():
        for rank in group:
            if rank != whose:
                marked.setdefault(rank, hue_of(layout, name))
    tints = (
        {} if colour is None else {r: i % len(HUES) for i, g in enumerate(layout.groups(colour)) for r in g}
    )
    for cell in plan.cells:
        kinds = ["mv-b"]
        if cell.rank == whose:
            kinds.append("mv-me")
        if cell.rank in marked:
            kinds.append(f"mv-a{marked[cell.rank]}")
        elif cell.rank in tints:
            kinds.append(f"mv-c{tints[cell.rank]}")
        yield _cell(layout, cell, " ".join(kinds), SIGNS[marked[cell.rank]] if cell.rank in marked else "")


def _cell(layout: MeshLayout, cell: Cell, kinds: str, sign: str) -> str:
    x, y, shear = cell.x, cell.y, cell.shear
    (cx, cy), w, h = cell.centre, WIDTH, HEIGHT
    # To the left of the number, however long that is.
    mark = (
        f'<text class="mv-sign" x="{cx - 6 - 3.6 * len(str(cell.rank)):.0f}" y="{cy + 3:.0f}">{sign}</text>'
        if sign
        else ""
    )
    return (
        f'<g class="{kinds}" data-p="{cell.place}"><title>{escape(rank_words(layout, cell.rank))}</title>'
        f'<path d="M{x:.0f} {y:.0f}h{w}l{-shear:.0f} {h}h{-w}z"/>'
        f'<text class="mv-n" x="{cx:.0f}" y="{cy:.0f}">{cell.rank}</text>{mark}</g>'
    )


def rank_words(layout: MeshLayout, rank: int) -> str:
    """A rank in words: `"rank 5: dp=1, tp=1, host 0"`."""
    at = ", ".join(
        f"{name}={place}" for name, place in zip(layout.names, layout.coordinate_of(rank), strict=True)
    )
    host = layout.host_of(rank)
    return clean(f"rank {rank}: {at}" + ("" if host is None else f", host {host}"), 400)


def _links(layout: MeshLayout, plan: Floorplan, groups: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Lines between neighbours of the marked groups; dashed where they leave a host."""
    centres = {cell.rank: cell.centre for cell in plan.cells}
    for name, group in groups.items():
        hue = HUES[hue_of(layout, name)]
        drawn = [rank for rank in group if rank in centres]
        for one, other in itertools.pairwise(drawn):
            cross = layout.host_of(one) != layout.host_of(other)
            (x1, y1), (x2, y2) = centres[one], centres[other]
            kind = "mv-link mv-cross" if cross else "mv-link"
            yield f'<path class="{kind}" style="stroke:{hue}" d="M{x1:.0f} {y1 + 9:.0f}L{x2:.0f} {y2 + 9:.0f}"/>'


def _legend(
    layout: MeshLayout, whose: int | None, groups: dict[str, tuple[int, ...]], plan: Floorplan
) -> Iterator[str]:
    if whose is not None:
        mine = " (this process)" if whose == layout.rank else ""
        yield f"□ {rank_words(layout, whose)}{mine}"
    for name, group in groups.items():
        yield f"{SIGNS[hue_of(layout, name)]} {name}: {group_words(group)}"
    for name in layout.names:
        if crossing := layout.crossing(name):
            groups_along = format_exact(layout.size // layout.shape[layout.axis(name)])
            yield f"- - {format_exact(crossing)} of {groups_along} groups along {name} cross hosts"
    if plan.folded:
        left_out = f"{format_exact(layout.size - len(plan.cells))} of {format_exact(layout.size)} ranks"
        yield f"… {left_out} are folded away along {', '.join(plan.folded)}"


def group_words(group: Sequence[int]) -> str:
    """The members of a group: `"0, 4, 8 … 60 (16 ranks)"`."""
    if len(group) <= 12:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:4]))} … {group[-1]} ({format_exact(len(group))} ranks)"


def _waiting(layout: MeshLayout) -> str:
    """A mesh that is not there yet: as many empty places as ranks are known to come."""
    count = min(layout.world or 4, 16)
    boxes = "".join(
        f'<g class="mv-b"><path style="stroke-dasharray:4 3" d="M{8 + 50 * at} 8h{WIDTH}v{HEIGHT}h{-WIDTH}z"/>'
        f'<text class="mv-n" x="{8 + 50 * at + WIDTH / 2:.0f}" y="21">{"•" if at == layout.rank else "?"}</text></g>'
        for at in range(count)
    )
    more = f"of {layout.world:,} ranks" if layout.world else "how many ranks there will be is not known"
    said = f"{'no mesh' if layout.state == 'unavailable' else 'a mesh that is awaited'}, {more}"
    return (
        _opened("mv-waiting", escape(said, quote=True), max(420, 50 * count + 16), 64)
        + f'{boxes}<text x="8" y="54" class="mv-dimmed">{escape(said)}</text></svg>'
    )


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
    for runs, ranks in owners.items():
        across = runs[1] if len(cuts) == 2 else ((0, 1),)
        for (top, bottom), (left, right) in ((r, c) for r in runs[0] for c in across):
            x, y = 8 + _spread(columns, left, wide), 20 + _spread(rows, top, high)
            w, h = 8 + _spread(columns, right, wide) - x, 20 + _spread(rows, bottom, high) - y
            said = f"rows {top}:{bottom}, ranks {group_words(ranks)}"
            boxes.append(
                f'<g class="mv-b mv-c{ranks[0] % len(HUES)}"><title>{said}</title>'
                f'<path d="M{x:.0f} {y:.0f}h{w:.0f}v{h:.0f}h{-w:.0f}z"/>'
                f'<text class="mv-n" x="{x + w / 2:.0f}" y="{y + h / 2:.0f}">{escape(group_words(ranks))}</text></g>'
            )
    said = escape(f"Which ranks hold which part of a tensor of {len(sharding.shape)} dims", quote=True)
    across = ", dim 1 across" if len(cuts) == 2 else ""
    words = f'<text x="8" y="12" class="mv-dimmed">dim 0 down{across}; numbers are ranks</text>'
    return f"{_opened('mv-cuts', said, wide + 20, high + 28)}{words}{''.join(boxes)}</svg>"


def _spread(edges: Sequence[int], edge: int, pixels: int) -> float:
    """Where a cut is drawn: all pieces alike, as a piece of one row next to one of thousands could not be read."""
    return pixels * edges.index(edge) / max(len(edges) - 1, 1)
