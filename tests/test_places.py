"""From rows to paths and back: selections, what is open, and what is open at first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trees import Holder, build, linear, mixture, plans, quirks, seen, stack

from metaviz.errors import UnknownPath
from metaviz.widgets.places import Places, ranges, unranged


def places(model: nn.Module, part: str = "") -> Places:
    tree = seen(model)
    tree = tree[part] if part else tree
    return Places(tree.columns, tree.root)


def chosen(found: Places, paths) -> list[str]:
    return [found.path(row) for row in found.rows(paths)]


def test_a_row_has_a_path_and_a_path_a_row():
    found = places(stack(2))
    assert len(found) == 19
    assert [found.path(row) for row in (0, 1, 9, 18)] == ["", "layers", "layers.1", "head.bias"]
    assert [found.row(path) for path in ("", "layers.1", "head.bias", "lairs")] == [0, 9, 18, None]


def test_a_part_numbers_its_own_rows_and_keeps_the_paths_of_the_model():
    found = places(stack(3), "layers.1")
    assert len(found) == 7
    assert [found.path(row) for row in (0, 1)] == ["layers.1", "layers.1.norm"]
    assert found.row("layers.1") == 0
    assert [found.row(path) for path in ("", "layers", "layers.0", "layers.2", "head")] == [None] * 5
    assert [found.path(row) for row in found.above(2)] == ["layers.1.norm", "layers.1"]


def test_globs_are_the_rows_that_match_and_no_row_below_another():
    found = places(stack(3))
    assert chosen(found, "layers.*.mlp") == [f"layers.{k}.mlp" for k in range(3)]
    assert chosen(found, ["layers.*", "layers.*.mlp.weight"]) == ["layers.0", "layers.1", "layers.2"]
    assert chosen(found, ["head.bias", "layers.2", "head.bias"]) == ["layers.2", "head.bias"]
    assert chosen(found, ["head", ""]) == [""]
    assert chosen(found, []) == []
    assert chosen(places(stack(3), "layers.1"), "layers.*.mlp") == ["layers.1.mlp"]


def test_a_path_through_a_shared_module_is_the_row_of_the_first():
    block = linear()
    found = places(Holder(one=block, other=block))
    assert chosen(found, "other") == ["other"]
    assert chosen(found, "other.weight") == ["one.weight"]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("lairs", "layers"),
        ("layers.9", "layers"),
        ("layers.*.lairs", "layers"),
        ("head.weight.more", "head.weight"),
        ("Head", "head"),
        ("1.mlp", "layers.1.mlp"),
    ],
)
def test_a_path_that_means_nothing_is_refused_with_what_there_is(path, near):
    with pytest.raises(UnknownPath) as caught:
        places(stack(2)).rows(["head", path])
    assert str(caught.value) == (
        f"The tree has no module or tensor {path!r}. Right below 'the root' there are: layers, head. "
        f"The nearest is {near!r}. Next: metaviz.tree(model)[{near!r}]"
    )


def test_a_path_outside_of_a_part_is_refused_with_what_the_part_has():
    with pytest.raises(UnknownPath, match=r"Right below 'layers\.1' there are: norm, mlp"):
        places(stack(2), "layers.1").rows("head")


@pytest.mark.parametrize("path", [3, None, ("a",), b"head"])
def test_a_path_that_is_no_string_is_a_type_error(path):
    with pytest.raises(TypeError, match="A path is a string"):
        places(stack(2)).rows([path])


@given(plans(), st.sets(st.integers(0, 60)))
def test_the_outermost_rows_cover_each_chosen_one_once(plan, rows):
    found = places(build(plan))
    rows = {row for row in rows if row < len(found)}
    kept = found.outermost(rows)
    assert kept == sorted(set(kept)) and set(kept) <= rows
    for row in rows:
        assert len({row, *found.above(row)} & set(kept)) == 1


def test_what_is_open_has_all_above_it_open():
    found = places(stack(3))
    is_open, unfolded = found.opened(["layers.1.mlp"])
    assert [found.path(row) for row in is_open] == ["", "layers", "layers.1", "layers.1.mlp"]
    assert [found.path(row) for row in unfolded] == ["layers.0", "layers.1", "layers.2"]


def test_a_star_takes_the_blocks_out_of_their_run():
    found = places(stack(3))
    is_open, unfolded = found.opened(["layers.*"])
    assert [found.path(row) for row in is_open] == ["", "layers"]
    assert [found.path(row) for row in unfolded] == ["layers.0", "layers.1", "layers.2"]
    alone = places(nn.Sequential(linear(), linear()))
    assert alone.opened(["*"]) == ([0], [1, 4])


@pytest.mark.parametrize("paths", [["lairs"], ["lairs.*"]])
def test_what_is_not_there_cannot_be_open(paths):
    with pytest.raises(UnknownPath, match="lairs"):
        places(stack(2)).opened(paths)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ([], []),
        (["", "layers"], ["", "layers"]),
        (["layers.*"], ["", "layers", "layers.*"]),
        (["layers.1"], ["", "layers", "layers.1", "layers.*"]),
        (["head"], ["", "head"]),
        (["head.weight"], ["", "head"]),
    ],
)
def test_what_is_open_is_said_in_paths_and_means_the_same_again(said, meant):
    found = places(stack(3))
    assert found.expanded(*found.opened(said)) == meant
    assert found.expanded(*found.opened(meant)) == meant


@given(plans(), st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_what_is_open_comes_back_from_its_paths(plan, is_open, unfolded):
    found = places(build(plan))
    is_open, unfolded = (sorted(row for row in rows if row < len(found)) for rows in (is_open, unfolded))
    once = found.expanded(*found.opened(found.expanded(is_open, unfolded)))
    assert found.expanded(*found.opened(once)) == once


def test_the_first_look_opens_what_there_is_room_for():
    found = places(stack(80))
    assert [found.path(row) for row in found.first_look()] == ["", "layers"]
    found = places(mixture(3, 4))
    assert [found.path(row) for row in found.first_look()] == ["", "layers"]
    wide = places(Holder(**{f"layer{k}": linear(k + 1) for k in range(100)}))
    assert wide.first_look() == [0]


@pytest.mark.parametrize(
    ("depth", "paths"),
    [
        (0, []),
        (1, [""]),
        (2, ["", "normed"]),
        (3, ["", "normed", "normed.parametrizations"]),
        (99, ["", "normed", "normed.parametrizations", "normed.parametrizations.weight"]),
    ],
)
def test_a_depth_says_how_many_levels_are_open(depth, paths):
    found = places(quirks())
    assert [found.path(row) for row in found.first_look(depth)] == paths


def test_ranges_are_read_back_as_the_rows_that_they_were():
    assert ranges([0, 1, 2, 5, 7, 8]) == [[0, 3], [5, 6], [7, 9]]
    assert ranges([]) == []
    assert unranged([[0, 3], [5, 6], [7, 9]], 9) == [0, 1, 2, 5, 7, 8]


@given(st.sets(st.integers(0, 50)))
def test_any_rows_are_read_back_from_their_ranges(rows):
    pairs = ranges(sorted(rows))
    assert unranged(pairs, 51) == sorted(rows)
    assert all(this[1] < following[0] for this, following in itertools.pairwise(pairs))


@pytest.mark.parametrize("pairs", [[[-9, 4]], [[0, 2**60]], [[0, 4], [99, 120]]])
def test_ranges_beyond_the_tree_are_cut_off(pairs):
    assert unranged(pairs, 4) == [0, 1, 2, 3]


def test_a_module_holds_what_is_below_it():
    found = places(quirks())
    assert [found.is_module(found.row(path)) for path in ("embed", "embed.weight", "inv_freq")] == [
        *(True, False, False)
    ]
    assert [found.holds(found.row(path)) for path in ("", "embed", "embed.weight", "again")] == [
        *(True, True, False, False)
    ]
    assert [found.path(row) for row in found.above(found.row("embed.weight"))] == ["embed", ""]
