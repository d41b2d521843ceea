from __future__ import annotations

import pytest
import torch

import metaviz
from metaviz.core.spec import MOST, planned
from metaviz.errors import BadMesh


def refused(*args, **options) -> str:
    with pytest.raises(BadMesh) as error:
        planned(*args, **options)
    return str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        "pp=2,dp=2,tp=4",
        " pp = 2 , dp=2,tp  =4 ",
        "pp:2, dp:2, tp:4",
        "pp=2,\n  dp=2,\n  tp=4",
        "pp=+2,dp=02,tp=4",
        {"pp": 2, "dp": 2, "tp": 4},
    ],
)
def test_a_plan_is_read_with_the_slowest_axis_first(spec):
    layout = planned(spec)
    assert layout.names == ("pp", "dp", "tp")
    assert layout.shape == (2, 2, 4)
    assert layout.ranks == tuple(range(16))
    assert (layout.state, layout.world, layout.device_type) == ("planned", 16, "cuda")


def test_a_plan_says_that_it_is_one():
    assert planned("dp=2").reason == (
        "This is a plan: no process was started, and none is needed to look at it."
    )


def test_names_are_what_people_call_their_axes():
    assert planned("data-parallel=2,π=2,2d=2").names == ("data-parallel", "π", "2d")


@pytest.mark.parametrize(
    ("spec", "options", "shape"),
    [
        ("pp=2,dp=-1,tp=8", {"world": 64}, (2, 4, 8)),
        ({"dp": -1}, {"world": 6}, (6,)),
        ("dp=-1,tp=2", {"ranks": [7, 4, 1, 5]}, (2, 2)),
        ("dp=-1,tp=8", {"world": 8}, (1, 8)),
    ],
)
def test_one_size_can_be_what_is_left_of_the_world(spec, options, shape):
    assert planned(spec, **options).shape == shape


CARETS = [
    ("dp=2,tp=x", "dp=2,tp=", "a size is a number, or -1 for what is left"),
    ("dp=2, tp = 2.5", "dp=2, tp = ", "a size is a number, or -1 for what is left"),
    ("dp==2", "dp=", "a size is a number, or -1 for what is left"),
    ("dp=2=3", "dp=", "a size is a number, or -1 for what is left"),
    ("tp=t", "tp=", "a size is a number, or -1 for what is left"),
    ("dp=2;tp=4", "dp=", "a size is a number, or -1 for what is left"),
    ("dp=٣", "dp=", "a size is a number, or -1 for what is left"),
    ("dp=" + 500 * "9", "dp=", "more than 1,048,576 ranks are not laid out"),
    ("-1=4", "", "here the name of an axis is missing"),
    ("dp=2,tp=0", "dp=2,tp=", "sizes are 1 or more, or -1 for what is left"),
    ("dp=-2,tp=4", "dp=", "sizes are 1 or more, or -1 for what is left"),
    ("dp=2,tp", "dp=2,tp", "the size of 'tp' is missing"),
    ("dp=2,tp=", "dp=2,tp=", "the size of 'tp' is missing"),
    ("dp=, tp=4", "dp=", "the size of 'dp' is missing"),
    ("dp=2,,tp=4", "dp=2,", "here the name of an axis is missing"),
    ("dp=2,", "dp=2,", "here the name of an axis is missing"),
    ("dp=2, =4", "dp=2, ", "here the name of an axis is missing"),
    ("2,4", "", "here the name of an axis is missing"),
    ("dp=2, 4", "dp=2, ", "here the name of an axis is missing"),
    (",", "", "here the name of an axis is missing"),
    ("dp=2,  dp=4", "dp=2,  ", "'dp' is there twice"),
    ("dp=2,dp", "dp=2,", "'dp' is there twice"),
    ("dp 2", "", "this is no name=size"),
    ("dp=2 ,tp 4", "dp=2 ,", "this is no name=size"),
]


@pytest.mark.parametrize(("spec", "before", "why"), CARETS, ids=[spec[:12] for spec, _, _ in CARETS])
def test_a_plan_that_cannot_be_read_is_pointed_at(spec, before, why):
    first, shown, caret, step = refused(spec).split("\n")
    assert first == "This mesh cannot be read:"
    assert shown == f"  {spec}"
    assert caret == f"  {' ' * len(before)}^ {why}"
    assert step == 'Next: metaviz.mesh("dp=2,tp=4")'


@pytest.mark.parametrize("space", ["\n", "\t", "\r", "\u2028"])
def test_the_caret_stands_below_the_place_where_a_plan_has_several_lines(space):
    _, shown, caret, _ = refused(f"dp=2,{space}tp=x").split("\n")
    assert shown == "  dp=2, tp=x"
    assert caret.index("^") == shown.index("x")


@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_an_empty_plan_is_refused(empty):
    assert refused(empty) == 'An empty mesh. Next: metaviz.mesh("dp=2,tp=4")'


WORLD_OF_8 = {"world": 8}


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ({}, {}, 'A mesh without axes. Next: metaviz.mesh({"dp": 2, "tp": 4})'),
        ({1: 2}, {}, 'An axis is called 1, and names are strings. Next: metaviz.mesh({"dp": 2, "tp": 4})'),
        (
            {" ": 2},
            {},
            'An axis is called \' \', and names are strings. Next: metaviz.mesh({"dp": 2, "tp": 4})',
        ),
        ({"dp": 0}, {}, "The size of 'dp' is 0, and sizes are 1 or more, or -1 for what is left."),
        ({"dp": -2}, {}, "The size of 'dp' is -2, and sizes are 1 or more, or -1 for what is left."),
        ({"dp": 2.0}, {}, "The size of 'dp' is 2.0, and sizes are 1 or more, or -1 for what is left."),
        ({"dp": True}, {}, "The size of 'dp' is True, and sizes are 1 or more, or -1 for what is left."),
        ({"dp": "2"}, {}, "The size of 'dp' is '2', and sizes are 1 or more, or -1 for what is left."),
        ("dp=-1,tp=-1", WORLD_OF_8, "One size may be -1, and 'dp', 'tp' are."),
        (
            "dp=-1,tp=2",
            {},
            "How large 'dp' is depends on how many ranks there are. Next: metaviz.mesh(..., world=64)",
        ),
        (
            "pp=3,dp=-1",
            {"world": 64},
            "64 ranks cannot be divided by pp=3 = 3. The nearest worlds that can: 63 and 66.",
        ),
        (
            "dp=-1,tp=16",
            WORLD_OF_8,
            "8 ranks cannot be divided by tp=16 = 16. The nearest worlds that can: 16.",
        ),
        (
            "dp=4,tp=4",
            WORLD_OF_8,
            "dp=4 × tp=4 = 16 ranks, and there are 8. dp=2 or tp=2 would use all of 8.",
        ),
        (
            "dp=3,tp=5",
            WORLD_OF_8,
            "dp=3 × tp=5 = 15 ranks, and there are 8. dp=2 × tp=4 would use all of 8.",
        ),
        (
            "dp=1024,tp=2048",
            {},
            "dp=1024 × tp=2048 has 2,097,152 ranks, and more than 1,048,576 are not laid out.",
        ),
        (
            "dp=2",
            {"world": 10**30},
            f"world={10**30}: worlds of more than 1,048,576 ranks are not laid out.",
        ),
        ("dp=2", {"world": 0}, "world=0: a job has one rank or more. Next: world=8"),
        ("dp=2", {"world": -8}, "world=-8: a job has one rank or more. Next: world=8"),
        ("dp=2", {"world": "8"}, "world='8': a job has one rank or more. Next: world=8"),
        (
            "dp=2",
            {"rank": 2},
            "Rank 2 is not on this mesh, which has 2 ranks from 0 to 1. Next: layout.ranks",
        ),
        (
            "dp=2",
            {"rank": 8, "world": 8},
            "Rank 8 is not on this mesh, which has 2 ranks from 0 to 1. Next: layout.ranks",
        ),
        (
            "dp=2",
            {"rank": -1, "world": 8},
            "Rank -1 is not on this mesh, which has 2 ranks from 0 to 1. Next: layout.ranks",
        ),
        ("dp=2", {"ranks": [0, 1, 2]}, "dp=2 needs 2 ranks, and there are 3."),
        ("dp=2", {"ranks": [3, 3]}, "A rank stands in one place only, and 3 is there twice."),
        ("dp=2", {"ranks": [-1, 0]}, "There is no rank -1: ranks are counted from 0."),
        (
            "dp=2",
            {"ranks": [0, 8], "world": 8},
            "There is no rank 8 in a world of 8, whose last one is 7.",
        ),
        (
            "a=2,b=2",
            {"ranks": [[0, 1], [2, 3]]},
            "ranks are numbers, row by row, and not [[0, 1], [2, 3]]. Next: ranks=[0, 1, 2, 3]",
        ),
        (
            "a=2",
            {"ranks": [0.5, 1]},
            "ranks are numbers, row by row, and not [0.5, 1]. Next: ranks=[0, 1, 2, 3]",
        ),
        (
            "a=2",
            {"ranks_per_host": -8},
            "ranks_per_host=-8: a host has one rank or more. Next: ranks_per_host=8",
        ),
        (
            "a=2",
            {"device_type": "cuda:0"},
            "device_type='cuda:0': it is the kind alone, without a number. Next: device_type=\"cuda\"",
        ),
        (
            "a=2",
            {"device_type": ""},
            "device_type='': it is the kind alone, without a number. Next: device_type=\"cuda\"",
        ),
    ],
)
def test_a_plan_that_does_not_go_together_is_refused_with_what_would(spec, options, message):
    assert refused(spec, **options) == message


def test_the_largest_plan_is_laid_out():
    assert planned(f"dp={MOST}").at((MOST - 1,)) == MOST - 1


def test_a_plan_can_be_seen_with_the_eyes_of_any_rank():
    assert [metaviz.mesh("pp=16,dp=64,tp=8", rank=rank).coordinate for rank in (0, 4097, 8191)] == [
        (0, 0, 0),
        (8, 0, 1),
        (15, 63, 7),
    ]


def test_a_rank_that_the_plan_leaves_out_is_told_that_it_would_idle():
    layout = planned("dp=2,tp=2", world=8, rank=5)
    assert layout.coordinate is None
    assert layout.idle == (4, 5, 6, 7)
    assert layout.notes == (
        "4 of 8 ranks are not on the mesh, and would idle. dp=4 or tp=4 would use all of 8.",
        "Rank 5 is not on the mesh.",
    )


def test_a_plan_with_an_order_of_its_own_is_told_where_torch_would_sort_it():
    layout = planned("a=2,b=2", ranks=[7, 4, 1, 5], rank=7)
    assert layout.coordinate == (0, 0)
    assert layout.world is None
    assert layout.notes == (
        "Along a and b, ranks are not in ascending order here, while torch sorts the ranks of a group: "
        "get_local_rank() and the coordinate can differ.",
    )


def test_nothing_is_done_to_a_dict_that_is_given():
    sizes = {"dp": -1, "tp": 2}
    planned(sizes, world=8)
    assert sizes == {"dp": -1, "tp": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": []},
        {"ranks": torch.empty(2, device="meta")},
        {"ranks": [0, 10**5000]},
        {"rank": [1]},
        {"rank": True},
        {"world": 10**5000},
    ],
)
def test_numbers_that_are_none_or_far_too_large_are_refused(options):
    with pytest.raises(BadMesh):
        planned("dp=2", **options)


def test_sizes_that_are_no_numbers_are_refused_in_short():
    with pytest.raises(BadMesh) as raised:
        planned({"weight": torch.zeros(1000)})
    assert len(str(raised.value)) < 300
    with pytest.raises(BadMesh, match="more than 1,048,576 ranks are not laid out"):
        planned({"dp": 10**5000})
    with pytest.raises(BadMesh, match="no mesh has a description of 30,002 characters"):
        planned("a" + 30_000 * " " + "b")


def test_integers_of_other_libraries_are_numbers():
    layout = planned({"dp": torch.tensor(2)}, world=torch.tensor(2))
    assert (layout.shape, layout.world) == ((2,), 2)
