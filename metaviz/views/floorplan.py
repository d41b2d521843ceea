"""Where each rank of a mesh is drawn: rows and columns, floors of a third axis, panels of all others.

The fastest axis runs along the columns, the next one along the rows. What is too much for a screen is folded: of a
long axis the first and last places are drawn, with a gap between that keeps the count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from metaviz.core.layout import MeshLayout

# How many places of each axis are drawn, for meshes of one, two, three axes, and more: some 1,500 boxes at most for up
# to five axes. More of them cannot be read.
_ROOM = {1: (512,), 2: (32, 32), 3: (8, 8, 16), 4: (3, 4, 8, 16)}
WIDTH, HEIGHT = 46, 26
# How far each row of a floor is moved to the left of the one above, so that floors look like floors.
_SHEAR = 12
_FLOOR_GAP, _PANEL_GAP, _TITLE = 22, 40, 22
_WRAP = 16
_PAGE = 1100
MARGIN = 60


class Cell(NamedTuple):
    """One box.

    Attributes:
        rank: Who stands there.
        place: The number of the place, counted along the axes.
        x: Left end of its upper edge.
        y: Its upper edge.
        shear: How much further left its lower edge is.
    """

    rank: int
    place: int
    x: float
    y: float
    shear: float

    @property
    def centre(self) -> tuple[float, float]:
        """Where its number stands."""
        return self.x + WIDTH / 2 - self.shear / 2, self.y + HEIGHT / 2


class Label(NamedTuple):
    """A word of a drawing."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    strong: bool = False


class Floorplan(NamedTuple):
    """A drawing.

    Attributes:
        cells: The boxes.
        labels: The words around them.
        width: In pixels.
        height: In pixels.
        folded: Names of the axes of which places are left out.
    """

    cells: list[Cell]
    labels: list[Label]
    width: float
    height: float
    folded: tuple[str, ...]


def floorplan(layout: MeshLayout, around: Sequence[int] | None = None) -> Floorplan:
    """Where the ranks of a layout are drawn.

    Args:
        layout: With ranks.
        around: A coordinate that must not be folded away.
    """
    shown = folded(layout.shape, around)
    names = tuple(
        name
        for name, places, size in zip(layout.names, shown, layout.shape, strict=True)
        if len([place for place in places if place is not None]) < size
    )
    if len(shown) == 1:
        return _line(layout, shown[0], names)
    draft = _Draft(layout, shown)
    x = y = deepest = width = 0.0
    for place in itertools.product(*shown[:-3]):
        # A panel that is folded away needs a line only.
        if None in place:
            if x:
                x, y = 0.0, y + deepest + _PANEL_GAP
            draft.labels.append(Label(x + MARGIN, y + 12, _where(layout.names, place), strong=True))
            y, deepest = y + 20, 0.0
            continue
        if x and x + draft.wide > _PAGE:
            x, y, deepest = 0.0, y + deepest + _PANEL_GAP, 0.0
        deepest = max(deepest, draft.panel(place, x, y))
        x += draft.wide + 12
        width = max(width, x)
    return Floorplan(draft.cells, draft.labels, width, y + deepest + 4, names)


class _Draft:
    """Boxes and words of a mesh of two axes or more, panel after panel."""

    def __init__(self, layout: MeshLayout, shown: list[list[int | None]]) -> None:
        self._layout = layout
        self._floors, self._rows, self._columns = ([0], *shown)[-3:]
        self._shear = _SHEAR if len(shown) > 2 else 0
        self._left = MARGIN + len(self._rows) * self._shear
        self.wide = self._left + len(self._columns) * WIDTH + 12
        self.cells: list[Cell] = []
        self.labels: list[Label] = []

    def panel(self, place: tuple[int | None, ...], left: float, top: float) -> float:
        """Draw what is at a place of all axes but the fastest three; how high it is."""
        layout, y = self._layout, top
        if place:
            self.labels.append(Label(left + 4, y + 12, _where(layout.names, place), strong=True))
            y += _TITLE
        self.labels.append(Label(left + 4, y + 12, f"{_axis(layout, -2)} ↓", strong=True))
        across = left + self._left + len(self._columns) * WIDTH / 2
        self.labels.append(Label(across, y + 12, f"{_axis(layout, -1)} →", "middle", True))
        y += _TITLE
        for floor in self._floors:
            if floor is None:
                self.labels.append(Label(left + 4, y + 8, "…"))
                y += _FLOOR_GAP
                continue
            if self._shear:
                self.labels.append(Label(left + 4, y + HEIGHT, f"{layout.names[-3]} {floor}"))
            self._floor((*place, floor), left + self._left, y)
            y += len(self._rows) * HEIGHT + (_FLOOR_GAP if self._shear else 0)
        return y - top

    def _floor(self, place: tuple[int | None, ...], left: float, top: float) -> None:
        axes = len(self._layout.axes)
        for at, row in enumerate(self._rows):
            for index, column in enumerate(self._columns):
                x, y = left + index * WIDTH - at * self._shear, top + at * HEIGHT
                if row is None or column is None:
                    self.labels.append(Label(x + WIDTH / 2 - self._shear / 2, y + 17, "…", "middle"))
                else:
                    rank = self._layout.at((*place, row, column)[-axes:])
                    self.cells.append(Cell(rank, self._layout.place_of[rank], x, y, self._shear))


def _line(layout: MeshLayout, places: Sequence[int | None], names: tuple[str, ...]) -> Floorplan:
    """A single axis, in lines like a text."""
    cells, labels = [], []
    for index, place in enumerate(places):
        row, column = divmod(index, _WRAP)
        x, y = MARGIN + column * WIDTH, _TITLE + row * HEIGHT
        if place is None:
            labels.append(Label(x + WIDTH / 2, y + 17, "…", "middle"))
        else:
            cells.append(Cell(layout.ranks[place], place, x, y, 0))
    labels.append(Label(MARGIN, 14, _axis(layout, 0), strong=True))
    rows = -(-len(places) // _WRAP)
    return Floorplan(
        cells, labels, MARGIN + min(len(places), _WRAP) * WIDTH + 12, _TITLE + rows * HEIGHT + 8, names
    )


def _axis(layout: MeshLayout, axis: int) -> str:
    """An axis with its size."""
    return f"{layout.names[axis]} ({layout.shape[axis]})"


def _where(names: Sequence[str], place: Sequence[int | None]) -> str:
    return ", ".join(f"{name}={'…' if at is None else at}" for name, at in zip(names, place, strict=False))


def folded(sizes: Sequence[int], around: Sequence[int] | None = None) -> list[list[int | None]]:
    """The places of each axis that are drawn; None stands for those that are left out.

    Args:
        sizes: Of the axes, the slowest first.
        around: A coordinate that is drawn in any case.
    """
    room = _ROOM[min(len(sizes), 4)]
    most = [room[0]] * (len(sizes) - len(room)) + list(room)
    return [
        list(_places(size, min(size, limit), None if around is None else around[axis]))
        for axis, (size, limit) in enumerate(zip(sizes, most, strict=True))
    ]


def _places(size: int, count: int, around: int | None) -> Iterator[int | None]:
    if count >= size:
        yield from range(size)
        return
    # The last one is always there, so that the end of an axis can be read.
    kept = {*range(max(1, count - 1)), size - 1}
    if around is not None and around not in kept:
        kept = {*range(max(1, count - 2)), around, size - 1}
    before = -1
    for place in sorted(kept):
        if place != before + 1:
            yield None
        yield place
        before = place
