"""Where each rank of a mesh is drawn: rows and columns, floors of a third axis, panels of all others.

The fastest axis runs along the columns, the next one along the rows. What is too much for a screen is folded: of a
long axis the first and last places are drawn, with a gap between whose count is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from metaviz.core.layout import MeshLayout
from metaviz.core.units import format_exact
from metaviz.views.lines import clean

# How many places of each axis are drawn, for meshes of one, two, three axes, and more; never more boxes than MOST in
# all. More of them cannot be read.
_ROOM = {1: (512,), 2: (32, 32), 3: (8, 8, 16), 4: (3, 4, 8, 16)}
MOST = 1536
# From so many boxes on they are drawn smaller.
_MANY = 256
_GAP, _TITLE, _TICK = 22, 20, 12
_WRAP = 16
# Where panels and floors go on below: what fits into a notebook without scrolling.
PAGE = 1100
# A stack of floors that is higher goes on in a column beside it, if there is room.
_STACK = 440
# Of text in 12 and in 10 pixels: wide enough for the usual fonts.
_LETTER, _SMALL = 7.2, 6


class Box(NamedTuple):
    """The look of all boxes of a drawing.

    Attributes:
        width: Of the upper edge.
        height: In pixels.
        shear: How much further left the lower edge is; floors look like floors by that.
        small: Whether letters are small.
    """

    width: float
    height: float
    shear: float
    small: bool


class Cell(NamedTuple):
    """One box.

    Attributes:
        rank: Who stands there.
        place: The number of the place, counted along the axes.
        x: Left end of its upper edge.
        y: Its upper edge.
        block: Panel, column of floors, and floor in it; who shares all three stands on one floor.
    """

    rank: int
    place: int
    x: float
    y: float
    block: tuple[int, int, int]


class Label(NamedTuple):
    """A word of a drawing; `kind` is `"dim"`, `"strong"` or `"tick"`."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    kind: str = "dim"


class Arrow(NamedTuple):
    """The direction of an axis beside the boxes."""

    axis: int
    x1: float
    y1: float
    x2: float
    y2: float


class Floorplan(NamedTuple):
    """A drawing.

    Attributes:
        box: The look of its boxes.
        cells: The boxes.
        labels: The words around them.
        arrows: The axes beside them.
        width: In pixels.
        height: In pixels.
        folded: Names of the axes of which places are left out.
    """

    box: Box
    cells: list[Cell]
    labels: list[Label]
    arrows: list[Arrow]
    width: float
    height: float
    folded: tuple[str, ...]

    def centre(self, cell: Cell) -> tuple[float, float]:
        """Where the number of a box stands."""
        return cell.x + (self.box.width - self.box.shear) / 2, cell.y + self.box.height / 2


def floorplan(layout: MeshLayout, around: Sequence[int] | None = None, top: float = 0) -> Floorplan:
    """Where the ranks of a layout are drawn.

    Args:
        layout: With ranks.
        around: A coordinate that must not be folded away.
        top: Where to begin.
    """
    shown = folded(layout.shape, around)
    drawn = [[place for place in places if place is not None] for places in shown]
    names = tuple(
        axis.name for axis, places in zip(layout.axes, drawn, strict=True) if len(places) < axis.size
    )
    box = _box(len(shown), math.prod(map(len, drawn)), len(str(max(layout.ranks))))
    draft = _Line(layout, shown, box) if len(shown) == 1 else _Floors(layout, shown, box)
    width, height = draft.draw(top)
    return Floorplan(box, draft.cells, draft.labels, draft.arrows, width, height, names)


def _box(axes: int, boxes: int, digits: int) -> Box:
    # Beside the number there is room for a sign.
    if boxes > _MANY:
        return Box(max(40, 6.4 * digits + 20), 20, 8 if axes > 2 else 0, True)
    return Box(max(46, 7 * digits + 24), 26, 12 if axes > 2 else 0, False)


class _Draft:
    def __init__(self, layout: MeshLayout, shown: list[list[int | None]], box: Box) -> None:
        self.layout, self.shown, self.box = layout, shown, box
        self.cells: list[Cell] = []
        self.labels: list[Label] = []
        self.arrows: list[Arrow] = []

    def cell(self, coordinate: tuple[int, ...], x: float, y: float, block: tuple[int, int, int]) -> None:
        rank = self.layout.at(coordinate)
        self.cells.append(Cell(rank, self.layout.place_of[rank], x, y, block))

    def gap(self, x: float, y: float) -> None:
        middle = x + (self.box.width - self.box.shear) / 2
        self.labels.append(Label(middle, y + self.box.height / 2 + 4, "…", "middle"))


class _Line(_Draft):
    """A mesh of one axis, in lines like a text."""

    def draw(self, top: float) -> tuple[float, float]:
        places, (width, height) = self.shown[0], self.box[:2]
        left, y = 8 + _TICK, top + 8
        for index, place in enumerate(places):
            row, column = divmod(index, _WRAP)
            at = left + column * width, y + row * (height + 6)
            if place is None:
                self.gap(*at)
            else:
                self.cell((place,), *at, (0, row, 0))
        self.arrows.append(Arrow(0, left, y - 5, left + min(len(places), _WRAP) * width, y - 5))
        return left + min(len(places), _WRAP) * width + 16, y + -(-len(places) // _WRAP) * (height + 6) + 4


class _Floors(_Draft):
    """A mesh of two axes or more: floors of rows and columns, in panels."""

    def __init__(self, layout: MeshLayout, shown: list[list[int | None]], box: Box) -> None:
        super().__init__(layout, shown, box)
        self.floors, self.rows, self.columns = ([0], *shown)[-3:]
        ticks = 11 + 6.5 * len(str(layout.shape[-2]))
        words = max((_SMALL + 1) * len(self.floor_name(place)) for place in self.floors)
        # A floor's name stands beside its first row, which is further to the right than the last one.
        lean = len(self.rows) * box.shear
        self.left = max(18 + lean + ticks, 16 + words + ticks + box.shear)
        self.wide = self.left + len(self.columns) * box.width + 14
        self.high = len(self.rows) * box.height
        self.stacks = self._stacked()

    def floor_name(self, place: int | None) -> str:
        return f"{short(self.layout.names[-3], 12)} {place}" if len(self.layout.axes) > 2 else ""

    def _stacked(self) -> list[list[int]]:
        """Numbers of the floors, in columns beside each other where one would be too high."""
        real = [number for number, floor in enumerate(self.floors) if floor is not None]
        high = len(real) * (self.high + _GAP)
        columns = max(1, min(int(PAGE // self.wide), round(high / _STACK + 0.3), len(real)))
        each = -(-len(real) // columns)
        # What is left out ends a column: at the head of one it would part the floor from its ticks.
        starts = [0, *real[each::each], len(self.floors)]
        return [list(range(start, end)) for start, end in itertools.pairwise(starts)]

    def draw(self, top: float) -> tuple[float, float]:
        x, y, deepest, width, panel = 0.0, top, 0.0, 0.0, 0
        whole = self.wide * len(self.stacks)
        before: tuple[int | None, ...] = ()
        for place, said in self._panels():
            narrow = said and None in place
            # A row of panels for each place on the axes beyond the fourth.
            if x and (narrow or x + whole > PAGE or place[:-1] != before[:-1]):
                x, y, deepest = 0.0, y + deepest + 12, 0.0
            before = place
            if said:
                self.labels.append(Label(x + 4, y + 12, said, "start", "dim" if narrow else "strong"))
            if narrow:
                width, y = max(width, _LETTER * len(said) + 16), y + _TITLE + 4
                continue
            start = y + (_TITLE if said else 0)
            ends = [
                self._stack(place, (panel, at), x + at * self.wide, start) for at in range(len(self.stacks))
            ]
            deepest, x, panel = max(deepest, max(ends) - y), x + whole + 10, panel + 1
            width = max(width, x)
        return width, y + deepest + 4

    def _panels(self) -> Iterator[tuple[tuple[int | None, ...], str]]:
        """Each place on the slow axes with its title; those left out in a row are one, with their number."""
        names, done = self.layout.names, set()
        outer = self.shown[:-3]
        if not outer:
            yield (), ""
            return
        for place in itertools.product(*(range(len(places)) for places in outer)):
            values = tuple(places[at] for places, at in zip(outer, place, strict=True))
            if None not in values:
                yield values, ", ".join(f"{short(n, 20)}={at}" for n, at in zip(names, values, strict=False))
                continue
            axis = values.index(None)
            if place[: axis + 1] in done:
                continue
            done.add(place[: axis + 1])
            before = ", ".join(f"{short(n, 20)}={at}" for n, at in zip(names, values[:axis], strict=False))
            many = gap(outer[axis], place[axis], self.layout.shape[axis])
            yield (
                values,
                f"{before}{', ' if before else ''}… {format_exact(many)} more along {short(names[axis], 20)}",
            )

    def _stack(self, place: tuple[int, ...], at: tuple[int, int], left: float, top: float) -> float:
        """One column of floors; where it ends."""
        box, floors = self.box, self.stacks[at[1]]
        x, y = left + self.left, top + _TICK + 6
        for index, column in enumerate(self.columns):
            if column is not None:
                middle = x + index * box.width + box.width / 2
                self.labels.append(Label(middle, y - 9, str(column), "middle", "tick"))
        axes = len(self.layout.axes)
        self.arrows.append(Arrow(axes - 1, x, y - 5, x + len(self.columns) * box.width, y - 5))
        first, lean = y, len(self.rows) * box.shear
        self.arrows.append(Arrow(axes - 2, x - 5, y, x - 5 - lean, y + self.high))
        for number in floors:
            floor = self.floors[number]
            if floor is None:
                many = gap(self.floors, number, self.layout.shape[-3])
                self.labels.append(Label(left + 14, y + 10, f"… {format_exact(many)} more"))
                y += _GAP
                continue
            if axes > 2:
                self.labels.append(Label(left + 14, y + box.height / 2 + 4, self.floor_name(floor)))
            self._floor((*place, floor) if axes > 2 else (), x, y, (*at, number))
            y += self.high + (_GAP if axes > 2 else 8)
        if axes > 2:
            self.arrows.append(Arrow(axes - 3, left + 7, first, left + 7, y - _GAP))
        return y

    def _floor(self, place: tuple[int, ...], left: float, top: float, block: tuple[int, int, int]) -> None:
        box = self.box
        for at, row in enumerate(self.rows):
            start, y = left - at * box.shear, top + at * box.height
            if row is not None:
                self.labels.append(
                    Label(start - box.shear / 2 - 12, y + box.height / 2 + 4, str(row), "end", "tick")
                )
            for index, column in enumerate(self.columns):
                if row is None or column is None:
                    self.gap(start + index * box.width, y)
                else:
                    self.cell((*place, row, column), start + index * box.width, y, block)


def short(name: str, limit: int) -> str:
    """The name of an axis where there is little room."""
    name = clean(name, 4 * limit)
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def gap(places: Sequence[int | None], at: int, size: int) -> int:
    """How many places of an axis a gap stands for."""
    before = places[at - 1] if at else -1
    after = places[at + 1] if at + 1 < len(places) else size
    return after - before - 1


def folded(sizes: Sequence[int], around: Sequence[int] | None = None) -> list[list[int | None]]:
    """The places of each axis that are drawn; None stands for those that are left out.

    Args:
        sizes: Of the axes, the slowest first.
        around: A coordinate that is drawn in any case.
    """
    room = _ROOM[min(len(sizes), 4)]
    room = [room[0]] * (len(sizes) - len(room)) + list(room)
    counts = [min(size, limit) for size, limit in zip(sizes, room, strict=True)]
    # Slow axes give way first; fast ones are where ranks talk most.
    while math.prod(counts) > MOST:
        axis = next((at for at, count in enumerate(counts) if count > 2), None)
        axis = next(at for at, count in enumerate(counts) if count > 1) if axis is None else axis
        counts[axis] -= 1
    return [
        list(_places(size, count, None if around is None else around[axis]))
        for axis, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]


def _places(size: int, count: int, around: int | None) -> Iterator[int | None]:
    # The last one is always there, so that the end of an axis can be read; the wanted one is in any case.
    kept = {*range(min(count, size) - 1), size - 1} if count > 1 or size == 1 else {around or 0}
    if around is not None and around not in kept:
        kept = {*range(count - 2), around, size - 1} if count > 2 else {0, around}
    before = -1
    for place in [*sorted(kept), size]:
        if place != before + 1:
            yield None
        if place < size:
            yield place
        before = place
