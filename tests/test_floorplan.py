"""Where ranks are drawn, and which of them are folded away."""

from __future__ import annotations

import math

import pytest

import metaviz
from metaviz.views.floorplan import MOST, floorplan, folded, gap, short


def drawn(places: list[list[int | None]]) -> int:
    return math.prod(len([place for place in each if place is not None]) for each in places)


def test_small_axes_are_drawn_whole():
    assert folded((2, 3, 4)) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert folded((1, 1)) == [[0], [0]]
    assert folded((512,)) == [list(range(512))]


def test_of_a_long_axis_the_first_places_and_the_last_are_drawn():
    assert folded((600,))[0] == [*range(511), None, 599]
    assert folded((40, 3)) == [[*range(31), None, 39], [0, 1, 2]]
    assert folded((8, 32, 8, 8)) == [[0, 1, None, 7], [0, 1, 2, None, 31], [*range(8)], [*range(8)]]


def test_the_place_that_is_picked_is_drawn_in_any_case():
    assert folded((8, 32, 8, 8), (5, 17, 0, 0))[:2] == [[0, None, 5, None, 7], [0, 1, None, 17, None, 31]]
    assert folded((600,), (555,))[0] == [*range(510), None, 555, None, 599]
    assert folded((600,), (510,))[0] == [*range(511), None, 599]


@pytest.mark.parametrize(
    "sizes",
    [
        (131_072,),
        (1024, 128),
        (16, 128, 64),
        (8, 32, 8, 8),
        (16, 128, 8, 8),
        (4, 4, 4, 16, 16),
        (3,) * 10,
        (2,) * 17,
    ],
)
def test_there_are_never_more_boxes_than_can_be_read_and_all_places_are_drawn_or_counted(sizes):
    for around in (None, tuple(size // 2 for size in sizes), tuple(size - 1 for size in sizes)):
        places = folded(sizes, around)
        assert 1 <= drawn(places) <= MOST <= 4000
        for axis, (each, size) in enumerate(zip(places, sizes, strict=True)):
            real = [place for place in each if place is not None]
            gaps = [gap(each, at, size) for at, place in enumerate(each) if place is None]
            assert real == sorted(set(real)) and all(0 <= place < size for place in real)
            assert all(many > 0 for many in gaps) and len(real) + sum(gaps) == size
            assert around is None or around[axis] in real


def test_the_fastest_axis_runs_along_columns_and_the_next_along_rows():
    plan = floorplan(metaviz.mesh("dp=2,tp=3"))
    ranks = {cell.rank: cell for cell in plan.cells}
    assert sorted(ranks) == [0, 1, 2, 3, 4, 5]
    assert ranks[0].y == ranks[1].y == ranks[2].y < ranks[3].y
    assert ranks[0].x < ranks[1].x < ranks[2].x and ranks[0].x == ranks[3].x
    assert plan.folded == () and plan.box.shear == 0
    assert {cell.block for cell in plan.cells} == {(0, 0, 0)}


def test_a_custom_order_of_ranks_is_drawn_as_it_is():
    plan = floorplan(metaviz.mesh("dp=2,tp=2", ranks=[3, 1, 0, 2]))
    assert [(cell.rank, cell.place) for cell in plan.cells] == [(3, 0), (1, 1), (0, 2), (2, 3)]


def test_a_third_axis_is_floors_of_which_each_row_leans_to_the_left():
    plan = floorplan(metaviz.mesh("pp=2,dp=2,tp=2"))
    ranks = {cell.rank: cell for cell in plan.cells}
    assert ranks[0].x - ranks[2].x == plan.box.shear > 0
    assert ranks[4].x == ranks[0].x and ranks[4].y > ranks[2].y + plan.box.height
    assert [label.text for label in plan.labels if label.kind == "dim"] == ["pp 0", "pp 1"]


def test_high_stacks_of_floors_go_on_beside_each_other_and_fit_a_page():
    plan = floorplan(metaviz.mesh("pp=8,dp=4,tp=2"))
    assert {cell.block[1] for cell in plan.cells} == {0, 1, 2}
    assert plan.height < 450 and plan.width < 700


@pytest.mark.parametrize(
    "spec", ["dp=1,tp=1", "pp=1,dp=1,tp=1", "dp=8,tp=1", "dp=1,tp=8", "a=1,b=1,c=1,d=1,e=1"]
)
def test_around_axes_of_size_1_nothing_overlaps(spec):
    for label, other in overlaps(floorplan(metaviz.mesh(spec))):
        pytest.fail(f"{label.text!r} lies over {other.text!r}")


@pytest.mark.parametrize(
    "spec",
    [
        "dp=20",
        "pp=4,dp=8,tp=4",
        "pp=8,dp=32,cp=8,tp=8",
        "pp=2,dp_replicate=2,dp_shard=4,cp=2,tp=8",
        "pp=16,dp=128,cp=8,tp=8",
    ],
)
def test_words_and_boxes_of_a_drawing_do_not_overlap(spec):
    plan = floorplan(metaviz.mesh(spec))
    for label, other in overlaps(plan):
        pytest.fail(f"{label.text!r} lies over {other.text!r}")
    for label in plan.labels:
        left, top, right, bottom = extent(label)
        assert left >= 0 and top >= 0 and right <= plan.width and bottom <= plan.height, label
        for cell in plan.cells:
            x, y = plan.centre(cell)
            inside = abs((top + bottom) / 2 - y) < 8 and left < x + 12 and right > x - 12
            assert not inside, (label, cell)


def extent(label):
    """Left, top, right and bottom of a word, with some 6.5 pixels for a letter."""
    width = (5.6 if label.kind == "tick" else 6.5) * len(label.text)
    left = label.x - {"start": 0, "middle": width / 2, "end": width}[label.anchor]
    return left, label.y - 9, left + width, label.y + 2


def overlaps(plan):
    for at, label in enumerate(plan.labels):
        left, top, right, bottom = extent(label)
        for other in plan.labels[at + 1 :]:
            a, b, c, d = extent(other)
            if left < c and a < right and top < d and b < bottom:
                yield label, other


def test_panels_that_are_left_out_are_one_line_with_their_number():
    texts = [label.text for label in floorplan(metaviz.mesh("pp=8,dp=32,cp=8,tp=8")).labels]
    assert [text for text in texts if text.startswith(("pp", "…"))] == [
        *("pp=0", "… 28 more", "pp=1", "… 28 more", "… 5 more along pp", "pp=7", "… 28 more"),
    ]
    texts = [label.text for label in floorplan(metaviz.mesh("a=5,b=5,c=2,d=2,e=2")).labels]
    assert [text for text in texts if "more" in text] == [
        *("a=0, … 2 more along b", "a=1, … 2 more along b", "… 2 more along a", "a=4, … 2 more along b"),
    ]


def test_long_and_odd_names_are_short_on_a_drawing():
    assert short("dp", 12) == "dp"
    assert short("x" * 10_000, 12) == "x" * 11 + "…"
    assert short("a\nb", 12) == r"a\nb"
    plan = floorplan(metaviz.mesh({"x" * 10_000: 2, "a\nb": 2, "\u202e": 2, "tp": 2}))
    assert max(len(label.text) for label in plan.labels) < 60
    assert plan.width < 1100
