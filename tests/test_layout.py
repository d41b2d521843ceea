from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import time
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import metaviz
from metaviz.core.layout import Axis, MeshLayout
from metaviz.errors import BadMesh


def laid(ranks=None, **sizes) -> MeshLayout:
    axes = tuple(Axis(name, size) for name, size in sizes.items())
    plain = MeshLayout(axes, ())
    return dataclasses.replace(plain, ranks=tuple(range(plain.size) if ranks is None else ranks))


CUBE = laid(pp=2, dp=2, tp=2)
TURNED = laid(ranks=(7, 4, 1, 5), a=2, b=2)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("tp",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (("dp",), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (("pp",), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (("pp", "dp"), [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (("dp", "pp"), [(0, 4, 2, 6), (1, 5, 3, 7)]),
        (("pp", "dp", "tp"), [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ],
)
def test_the_groups_along_axes_hold_the_ranks_that_differ_in_those_axes_alone(names, groups):
    assert CUBE.groups(*names) == groups


def test_the_last_axis_is_the_fastest():
    assert CUBE.strides == (4, 2, 1)
    assert CUBE.coordinate_of(5) == (1, 0, 1)
    assert CUBE.at((1, 0, 1)) == 5
    assert list(CUBE.coordinates())[5] == (1, 0, 1)


def test_a_group_is_that_of_a_rank_and_of_this_process_if_none_is_named():
    assert CUBE.group("dp", 5) == (5, 7)
    assert dataclasses.replace(CUBE, rank=6).group("dp") == (4, 6)
    assert CUBE.group("dp") == (0, 2)


def test_a_process_that_is_not_on_the_mesh_sees_the_groups_of_the_first_rank():
    outside = dataclasses.replace(CUBE, rank=9, world=12)
    assert outside.coordinate is None
    assert outside.group("dp") == (0, 2)
    assert outside.idle == (8, 9, 10, 11)


def test_ranks_in_an_order_of_their_own_have_the_coordinates_that_the_mesh_gives_them():
    assert TURNED.coordinate_of(7) == (0, 0)
    assert TURNED.groups("b") == [(7, 4), (1, 5)]
    assert TURNED.groups("a") == [(7, 1), (4, 5)]
    assert TURNED.group("a", 5) == (4, 5)


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        ((0, 1, 2, 3), ()),
        ((7, 4, 1, 5), ("a", "b")),
        ((0, 3, 1, 2), ("a",)),
        ((4, 1, 6, 3), ("b",)),
        # Columns before rows: each group is in the order that torch gives it all the same.
        ((0, 2, 1, 3), ()),
    ],
)
def test_axes_along_which_ranks_do_not_ascend_are_those_that_torch_sorts_anew(ranks, axes):
    assert laid(ranks=ranks, a=2, b=2).disordered == axes


def test_a_mesh_that_leaves_ranks_out_knows_which_idle():
    layout = dataclasses.replace(laid(ranks=(1, 3, 5, 7), dp=2, tp=2), world=9)
    assert layout.idle == (0, 2, 4, 6, 8)
    assert layout.coordinate_of(5) == (1, 0)
    with pytest.raises(BadMesh, match=r"Rank 4 is not on this mesh, which has 4 ranks from 1 to 7\."):
        layout.coordinate_of(4)


def test_axes_of_size_one_have_groups_of_a_rank_with_itself():
    layout = laid(pp=1, dp=2, cp=1, tp=2)
    assert layout.groups("cp") == [(0,), (1,), (2,), (3,)]
    assert layout.coordinate_of(3) == (0, 1, 0, 1)
    assert layout.groups("pp", "dp") == [(0, 2), (1, 3)]


def test_five_axes_are_as_good_as_two():
    layout = laid(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2)
    assert layout.size == 64
    assert layout.coordinate_of(45) == (1, 0, 3, 0, 1)
    assert layout.group("dp_shard", 45) == (33, 37, 41, 45)
    # Along both at once: what FSDP shards over with context parallelism.
    assert layout.groups("dp_shard", "cp")[0] == (0, 2, 4, 6, 8, 10, 12, 14)
    assert layout.shape_words == "pp=2 × dp_replicate=2 × dp_shard=4 × cp=2 × tp=2"


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(SIZES, st.randoms(use_true_random=False))
def test_groups_are_what_counting_coordinates_one_by_one_gives(sizes, random):
    names = "abcde"[: len(sizes)]
    total = torch.tensor(sizes).prod().item()
    ranks = random.sample(range(total + 3), total)
    layout = laid(ranks=ranks, **dict(zip(names, sizes, strict=True)))
    table = dict(zip(itertools.product(*map(range, sizes)), ranks, strict=True))
    assert {rank: layout.coordinate_of(rank) for rank in ranks} == {rank: at for at, rank in table.items()}
    for axis, name in enumerate(names):
        for at, rank in table.items():
            mates = tuple(table[(*at[:axis], i, *at[axis + 1 :])] for i in range(sizes[axis]))
            assert layout.group(name, rank) == mates
        assert sorted(itertools.chain.from_iterable(layout.groups(name))) == sorted(ranks)


def test_131072_ranks_are_laid_out_in_three_tenths_of_a_second_of_one_core():
    times = []
    for _ in range(3):
        start = time.process_time()
        layout = metaviz.mesh("pp=16,dp=8,cp=128,tp=8", ranks_per_host=8, rank=77777)
        found = layout.coordinate, layout.group("dp"), layout.group("tp")
        times.append(time.process_time() - start)
    assert found == (
        (9, 3, 122, 1),
        (74705, 75729, 76753, 77777, 78801, 79825, 80849, 81873),
        tuple(range(77776, 77784)),
    )
    assert min(times) < 0.3


def test_hosts_are_counted_in_the_order_of_ranks():
    layout = dataclasses.replace(laid(dp=4, tp=4), ranks_per_host=8)
    assert layout.hosts == 2
    assert (layout.host_of(7), layout.host_of(8)) == (0, 1)
    assert (layout.crossing("tp"), layout.crossing("dp")) == (0, 4)
    assert dataclasses.replace(layout, ranks_per_host=2).crossing("tp") == 4


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("hosts", [1, 3, 4, 8, 100])
def test_groups_that_cross_hosts_are_those_that_looking_at_each_finds(first, hosts):
    for shape in [(24,), (2, 12), (3, 2, 4), (2, 1, 3, 4), (5, 7)]:
        spec = {f"a{at}": size for at, size in enumerate(shape)}
        ranks = range(first, first + math.prod(shape))
        layout = metaviz.mesh(spec, ranks=ranks, ranks_per_host=hosts)
        for name in layout.names:
            groups = layout.groups(name)
            assert layout.crossing(name) == sum(
                len({rank // hosts for rank in group}) > 1 for group in groups
            )


def test_hosts_that_are_not_known_are_not_guessed():
    assert (CUBE.hosts, CUBE.host_of(3), CUBE.crossing("tp")) == (None, None, 0)


def test_a_flattened_axis_is_an_alias_and_no_axis_more():
    layout = CUBE.flattened(["pp", "dp"], "world_dp")
    assert layout.names == ("pp", "dp", "tp")
    assert layout.aliases == {"world_dp": ("pp", "dp")}
    assert layout.group("world_dp", 3) == (1, 3, 5, 7)
    assert layout.groups("world_dp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert layout["world_dp"].focus == ("pp", "dp")
    assert layout["world_dp", "tp"].focus == ("pp", "dp", "tp")
    assert CUBE.aliases == {}


def test_an_alias_of_an_alias_covers_the_axes_behind_it():
    layout = CUBE.flattened(["pp", "dp"], "outer").flattened(["outer", "tp"], "all")
    assert layout.aliases["all"] == ("pp", "dp", "tp")


def test_one_axis_can_have_an_alias_that_is_given_as_a_string():
    assert CUBE.flattened("tp", "tensor").aliases == {"tensor": ("tp",)}


def test_slicing_keeps_the_whole_and_says_what_it_is_about():
    assert CUBE["tp"].focus == ("tp",)
    assert CUBE["dp", "tp"].focus == ("dp", "tp")
    assert CUBE["tp"].ranks == CUBE.ranks


def test_nothing_is_known_of_a_mesh_that_does_not_exist_yet():
    empty = MeshLayout((), (), "waiting")
    assert (empty.size, empty.shape, empty.coordinate, empty.idle) == (0, (), None, ())
    with pytest.raises(BadMesh, match=r"There is no axis 'tp'\. There is none yet\."):
        empty.group("tp")
    with pytest.raises(BadMesh, match="Nothing stands on this mesh yet: it is waiting"):
        empty.coordinate_of(0)


def test_a_mesh_whose_sizes_alone_are_known_has_no_groups_yet():
    awaited = MeshLayout((Axis("tp", 4),), (), "waiting")
    assert (awaited.size, awaited.groups("tp")) == (4, [])
    for ask in (lambda: awaited.group("tp"), lambda: awaited.at((0,)), lambda: awaited.coordinate_of(0)):
        with pytest.raises(BadMesh, match="Nothing stands on this mesh yet"):
            ask()


def test_a_mesh_without_axes_has_one_rank():
    assert MeshLayout((), (5,)).coordinate_of(5) == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: laid(ranks=(0, 1, 1, 3), a=2, b=2),
            "A rank stands in one place only, and 1 is there twice.",
        ),
        (lambda: laid(ranks=(0, 1, 2), a=2, b=2), "a=2 × b=2 needs 4 ranks, and there are 3."),
        (lambda: MeshLayout((), (0, 1)), "A mesh without axes needs 1 rank, and there are 2."),
        (lambda: laid(ranks=(), a=0), "The axis 'a' has the size 0, and sizes are 1 or more."),
        (lambda: laid(ranks=(), a=-4), "The axis 'a' has the size -4, and sizes are 1 or more."),
        (
            lambda: MeshLayout((Axis("tp", 2), Axis("dp", 1), Axis("tp", 2)), ()),
            "Two axes are called 'tp'. Next: give each a name of its own",
        ),
        (
            lambda: dataclasses.replace(CUBE, ranks_per_host=0),
            "ranks_per_host=0: a host has one rank or more. Next: ranks_per_host=8",
        ),
        (
            lambda: dataclasses.replace(CUBE, ranks_per_host=2.5),
            "ranks_per_host=2.5: a host has one rank or more. Next: ranks_per_host=8",
        ),
        (lambda: CUBE.group("ep"), "There is no axis 'ep'. There are: pp, dp, tp."),
        (lambda: CUBE.flattened("tp", "t")["ep"], "There is no axis 'ep'. There are: pp, dp, tp, t."),
        (lambda: CUBE.crossing("ep"), "There is no axis 'ep'. There are: pp, dp, tp."),
        (
            lambda: CUBE.group("tp", 8),
            "Rank 8 is not on this mesh, which has 8 ranks from 0 to 7. Next: layout.ranks",
        ),
        (
            lambda: CUBE.group("tp", -1),
            "Rank -1 is not on this mesh, which has 8 ranks from 0 to 7. Next: layout.ranks",
        ),
        (lambda: CUBE.at((0, 0, 2)), "There is no place (0, 0, 2) on pp=2 × dp=2 × tp=2."),
        (lambda: CUBE.at((0, 0, -1)), "There is no place (0, 0, -1) on pp=2 × dp=2 × tp=2."),
        (lambda: CUBE.at((0, 0)), "There is no place (0, 0) on pp=2 × dp=2 × tp=2."),
        (lambda: CUBE.groups("tp", "tp"), "'tp', 'tp': an axis is meant twice. Name each once."),
        (lambda: CUBE["dp", "dp"], "'dp', 'dp': an axis is meant twice. Name each once."),
        (
            lambda: CUBE.flattened(("pp", "dp"), "w").groups("w", "dp"),
            "'w', 'dp': an axis is meant twice. Name each once.",
        ),
        (lambda: CUBE[0], "An axis is named by a string, not by 0. There are: pp, dp, tp."),
        (
            lambda: CUBE.flattened(["pp", "dp"], "tp"),
            "'tp' is the name of another axis. Next: layout.flattened(['pp', 'dp'], 'other')",
        ),
        (
            lambda: CUBE.flattened(["pp", "dp"], "w").flattened(["dp", "tp"], "w"),
            "'w' is the name of another axis. Next: layout.flattened(['dp', 'tp'], 'other')",
        ),
    ],
)
def test_what_means_nothing_is_refused_in_words(make, message):
    with pytest.raises(BadMesh) as refused:
        make()
    assert str(refused.value) == message


def test_layouts_with_the_same_numbers_are_equal_wherever_they_come_from():
    there = dataclasses.replace(CUBE, origin=lambda: None)
    assert there == CUBE
    assert len({there, CUBE, CUBE.flattened("tp", "t")}) == 2


@pytest.mark.parametrize("copied", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy])
def test_a_layout_is_sent_to_another_process_without_the_way_back_to_what_it_was_read_from(copied):
    class Thing:
        pass

    thing = Thing()
    layout = dataclasses.replace(CUBE.flattened(["pp", "dp"], "w"), origin=weakref.ref(thing), rank=3)
    there = copied(layout)
    assert there == layout
    assert (there.origin, layout.origin()) == (None, thing)
    assert there.group("w") == (1, 3, 5, 7)


def test_a_layout_is_the_same_under_meta_devices_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    # In this order: torch 2.6 imports more of itself for the first fake mode, and cannot do so on meta.
    with FakeTensorMode(), torch.device("meta"):
        layout = metaviz.mesh({"pp": 2, "dp": 2, "tp": 2}, rank=5)
        assert (layout.coordinate, layout.groups("dp")[3]) == ((1, 0, 1), (5, 7))


@pytest.mark.parametrize("rank", [[1], 1.0, True, "1", None, pytest.param(10**5000, id="huge")])
def test_what_is_no_rank_is_refused(rank):
    with pytest.raises(BadMesh):
        metaviz.mesh("tp=4").coordinate_of(rank)
    with pytest.raises(BadMesh):
        metaviz.mesh("tp=4").at((rank, 0))


def test_a_flattened_axis_needs_a_name_and_axes():
    for names, alias in [(("dp", "tp"), 5), ([], "x"), ("dp", "")]:
        with pytest.raises(BadMesh, match="A flattened axis has a name, and covers axes"):
            metaviz.mesh("dp=2,tp=2").flattened(names, alias)
