"""Slices of sharded tensors, compared with those that torch cuts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import counted, cut, worlds  # noqa: F401
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _utils as torch_utils
from torch.distributed.tensor.placement_types import _StridedShard

import metaviz
from metaviz.core.layout import Axis, MeshLayout
from metaviz.core.sharding import Placement, Sharding, load, sharding_of
from metaviz.errors import BadMesh

# Older versions of torch say so of each mesh of CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")

FLOAT = torch.float32


def over(plan: str, shape: tuple[int, ...], **placements: Placement) -> Sharding:
    return Sharding("", shape, FLOAT, metaviz.mesh(plan), placements)


def shard(dim: int, pieces: int = 1) -> Placement:
    return Placement("shard", dim, pieces)


# Sizes that divide and such that do not, more ranks than rows, size-1 axes, no dims at all.
TABLE = [
    ("tp=4", (8,), {"tp": shard(0)}, [(2,), (2,), (2,), (2,)]),
    ("tp=4", (6, 2), {"tp": shard(0)}, [(2, 2), (2, 2), (2, 2), (0, 2)]),
    ("tp=4", (5,), {"tp": shard(0)}, [(2,), (2,), (1,), (0,)]),
    ("tp=4", (1, 3), {"tp": shard(0)}, [(1, 3), (0, 3), (0, 3), (0, 3)]),
    ("tp=2", (0, 3), {"tp": shard(0)}, [(0, 3), (0, 3)]),
    ("tp=2", (3, 5, 2), {"tp": shard(1)}, [(3, 3, 2), (3, 2, 2)]),
    ("tp=1", (3, 5), {"tp": shard(1)}, [(3, 5)]),
    ("tp=3", (), {}, [(), (), ()]),
    ("tp=2", (4,), {"tp": Placement("replicate")}, [(4,), (4,)]),
    ("tp=2", (4,), {"tp": Placement("partial")}, [(4,), (4,)]),
    ("dp=2,tp=2", (5, 3), {"dp": shard(0), "tp": shard(1)}, [(3, 2), (3, 1), (2, 2), (2, 1)]),
    ("dp=2,tp=2", (5,), {"dp": shard(0), "tp": shard(0)}, [(2,), (1,), (1,), (1,)]),
    ("dp=2,tp=2", (5, 3), {"tp": shard(0)}, [(3, 3), (2, 3), (3, 3), (2, 3)]),
]


@pytest.mark.parametrize(("plan", "shape", "placements", "shapes"), TABLE)
def test_what_each_rank_holds_has_its_right_shape(plan, shape, placements, shapes):
    sharding = over(plan, shape, **placements)
    assert [sharding.shape_on(rank) for rank in sharding.layout.ranks] == shapes
    assert [sharding.nbytes_on(rank) for rank in sharding.layout.ranks] == [4 * math.prod(s) for s in shapes]
    assert sharding.nbytes == 4 * math.prod(shape)


def test_slices_are_runs_of_indices_and_none_where_nothing_is_held():
    sharding = over("dp=2,tp=2", (7, 4), dp=shard(0), tp=shard(1))
    assert [sharding.slices(rank) for rank in range(4)] == [
        (((0, 4),), ((0, 2),)),
        (((0, 4),), ((2, 4),)),
        (((4, 7),), ((0, 2),)),
        (((4, 7),), ((2, 4),)),
    ]
    assert over("tp=3", (2, 4), tp=shard(0)).slices(2) == ((), ((0, 4),))


def test_a_strided_shard_can_hold_rows_that_do_not_lie_together():
    sharding = over("dp=2,tp=1", (8,), dp=shard(0, pieces=4))
    assert sharding.slices(0) == (((0, 1), (2, 3), (4, 5), (6, 7)),)
    assert sharding.slices(1) == (((1, 2), (3, 4), (5, 6), (7, 8)),)
    # Of runs that touch one is made.
    assert over("dp=1", (8,), dp=shard(0, pieces=4)).slices(0) == (((0, 8),),)


def test_the_owners_of_a_slice_are_all_ranks_that_hold_it():
    sharding = over("dp=2,tp=2", (4,), tp=shard(0))
    assert sharding.owners() == {(((0, 2),),): [0, 2], (((2, 4),),): [1, 3]}
    assert over("dp=3", ()).owners() == {(): [0, 1, 2]}


def test_ranks_in_an_order_of_their_own_hold_chunks_in_the_order_of_their_sorted_group():
    # As torch scatters: what four processes of gloo hold is in test_ranks.
    layout = metaviz.mesh("tp=4", ranks=(3, 1, 0, 2))
    sharding = Sharding("", (4,), FLOAT, layout, {"tp": shard(0)})
    assert [sharding.slices(rank) for rank in range(4)] == [(((i, i + 1),),) for i in range(4)]
    assert sharding.words[-1].startswith(
        "tp: ranks are not in ascending order there, and torch cuts in the order of"
    )
    layout = metaviz.mesh("dp=2,tp=2", ranks=(3, 1, 0, 2))
    sharding = Sharding("", (4,), FLOAT, layout, {"tp": shard(0)})
    assert [sharding.slices(rank)[0] for rank in range(4)] == [((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)]


def test_a_rank_that_is_not_on_the_mesh_is_refused():
    with pytest.raises(BadMesh, match=r"Rank 4 is not on this mesh, which has 4 ranks from 0 to 3"):
        over("tp=4", (8,), tp=shard(0)).slices(4)


def test_a_flattened_axis_cuts_in_one_step():
    layout = metaviz.mesh("dp=2,cp=3,tp=2").flattened(("dp", "cp"), "dp_cp")
    sharding = Sharding("", (7,), FLOAT, layout, {"dp_cp": shard(0)})
    # In six chunks of two: two steps would make 2, 1, 1, 1, 1, 1 of it.
    assert [sharding.shape_on(rank)[0] for rank in layout.ranks] == [2, 2, 2, 2, 2, 2, 1, 1, 0, 0, 0, 0]
    assert sharding.words == ["dp_cp (dp and cp): dim 0 (7) is cut in 6", "tp: each of 2 has the same"]


def test_each_axis_is_told_in_words():
    placements = {"pp": Placement("partial"), "tp": shard(1), "dp": shard(1)}
    assert over("pp=2,dp=2,cp=3,tp=4", (5, 16), **placements).words == [
        "pp: each of 2 has a part of the sum, and the values are what all of them add up to",
        "dp: dim 1 (16) is cut in 4 pieces first, and each of those in 2",
        "cp: each of 3 has the same",
        "tp: dim 1 (16) is cut in 4",
    ]
    assert over("dp=2", (8,), dp=shard(0, pieces=4)).words == [
        "dp: dim 0 (8) is cut in 4 pieces first, and each of those in 2"
    ]


def test_a_sharding_shows_itself_with_its_slices():
    shown = str(over("dp=2,tp=2", (3, 2), dp=shard(0)))
    assert shown.splitlines() == [
        "(3, 2) float32, 24 B, on dp=2 × tp=2",
        "  dp: dim 0 (3) is cut in 2",
        "  tp: each of 2 has the same",
        "  ranks  slice       shape   bytes",
        "  0, 1   [0:2, 0:2]  (2, 2)  16 B",
        "  2, 3   [2:3, 0:2]  (1, 2)  8 B",
    ]


@st.composite
def cases(draw) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """A shape, a mesh, and a placement for each of its axes; some are strided."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=4)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = [Replicate(), Partial()] + [Shard(dim) for dim in range(len(shape))]
    kinds += [_StridedShard(dim, split_factor=many) for dim in range(len(shape)) for many in (2, 3)]
    return shape, mesh, [draw(st.sampled_from(kinds)) for _ in mesh]


def read(placement: Any) -> Placement:
    """A placement of torch as one of ours."""
    if isinstance(placement, Replicate | Partial):
        return Placement("replicate" if isinstance(placement, Replicate) else "partial")
    return shard(placement.dim, getattr(placement, "split_factor", 1))


def sharded_like(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Any]) -> Sharding:
    axes = tuple(Axis(f"axis_{i}", size) for i, size in enumerate(mesh))
    layout = MeshLayout(axes, tuple(range(math.prod(mesh))))
    named = {axis.name: read(each) for axis, each in zip(axes, placements, strict=True)}
    return Sharding("", shape, FLOAT, layout, named)


def cut_by_torch(
    whole: torch.Tensor, mesh: tuple[int, ...], placements: list[Any], at: tuple[int, ...]
) -> torch.Tensor:
    """What distribute_tensor leaves at a coordinate: each placement splits what those before it have left."""
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if not isinstance(placement, Replicate | Partial):
            whole = placement._split_tensor(whole, size, with_padding=False)[0][index]
    return whole


def splits(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Any]) -> bool:
    """Whether this version of torch splits so: older ones refuse strided shards that do not divide."""
    try:
        for at in itertools.product(*map(range, mesh)):
            cut_by_torch(counted(shape), mesh, placements, at)
    except AssertionError as error:
        assert "_StridedShard currently only allows even sharding" in str(error)
        return False
    return True


@settings(max_examples=300)
@given(cases())
def test_each_rank_holds_the_values_that_the_placements_of_torch_split_off(case):
    shape, mesh, placements = case
    if not splits(*case):
        return
    sharding, whole = sharded_like(*case), counted(shape)
    for rank, at in enumerate(itertools.product(*map(range, mesh))):
        real = cut_by_torch(whole, mesh, placements, at)
        assert torch.equal(cut(whole, sharding.slices(rank)), real)
        assert sharding.shape_on(rank) == tuple(real.shape)


@settings(max_examples=300)
@given(cases())
def test_shapes_and_first_indices_are_those_that_torch_computes(case):
    shape, mesh, placements = case
    computed = getattr(torch_utils, "_compute_local_shape_and_global_offset", None)
    if computed is None:
        # Before 2.7 torch answered for the own rank of a live mesh alone.
        assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
        return
    sharding = sharded_like(*case)
    for rank, at in enumerate(itertools.product(*map(range, mesh))):
        size, offset = computed(shape, mesh, list(at), placements)
        assert sharding.shape_on(rank) == tuple(size)
        for dim, runs in enumerate(sharding.slices(rank)):
            # Where nothing is held, torch says the end of the dim.
            assert (runs[0][0] if runs else shape[dim]) == offset[dim]


@settings(max_examples=100)
@given(cases())
def test_without_strides_and_copies_the_ranks_hold_each_value_once(case):
    shape, mesh, placements = case
    placements = [each for each in placements if isinstance(each, Shard) and type(each) is Shard]
    sharding = sharded_like(shape, mesh[: len(placements)], placements)
    held = torch.zeros(shape, dtype=torch.int64)
    for rank in sharding.layout.ranks:
        held += torch.isin(counted(shape), cut(counted(shape), sharding.slices(rank)))
    assert bool((held == 1).all())


@settings(max_examples=50)
@given(st.lists(cases(), min_size=1, max_size=4))
def test_the_load_of_a_rank_is_the_sum_of_what_it_holds(several):
    mesh = several[0][1]
    shardings = [
        sharded_like(shape, mesh, (placements * 3)[: len(mesh)] if shape else [Replicate()] * len(mesh))
        for shape, _, placements in several
    ]
    # Each in the same layout, as those of a model are, and some tensors alike.
    shardings = [Sharding("", s.shape, FLOAT, shardings[0].layout, s.placements) for s in shardings * 2]
    total = load(shardings)
    for rank in shardings[0].layout.ranks:
        assert total.nbytes[rank] == sum(each.nbytes_on(rank) for each in shardings)
    assert total.whole == sum(each.nbytes for each in shardings)


def test_the_load_of_tensors_on_several_meshes_goes_by_the_mesh_of_each():
    flat, grid = metaviz.mesh("all=4"), metaviz.mesh("dp=2,tp=2", ranks=(0, 2, 1, 3))
    half = metaviz.mesh("dp=2")
    shardings = [
        Sharding("a", (7,), FLOAT, flat, {"all": shard(0)}),
        Sharding("b", (3,), FLOAT, grid, {"dp": shard(0)}),
        Sharding("c", (5,), FLOAT, half, {"dp": shard(0)}),
    ]
    # Rows of a: 2, 2, 2, 1; b: 2 on 0 and 2, 1 on 1 and 3; c: 3 and 2, nothing beyond.
    assert load(shardings).nbytes == {0: 28, 1: 20, 2: 16, 3: 8}
    assert load(shardings[::-1]).nbytes == {0: 28, 1: 20, 2: 16, 3: 8}


def test_tensors_of_one_shape_count_by_their_dtypes():
    layout, placements = metaviz.mesh("tp=2"), {"tp": shard(0)}
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.bfloat16)
    total = load([Sharding("", (3,), dtype, layout, placements) for dtype in dtypes])
    assert (total.nbytes, total.whole) == ({0: 18, 1: 9}, 27)


def test_a_load_is_a_line_and_no_load_is_refused():
    even, uneven = over("tp=2", (8,), tp=shard(0)), over("tp=2", (7,), tp=shard(0))
    assert str(load([even])) == "32 B of parameters and buffers in all, 16 B on each of 2 ranks"
    assert repr(load([uneven])) == "28 B of parameters and buffers in all, 12 B to 16 B on each of 2 ranks"
    with pytest.raises(BadMesh, match="no tensors"):
        load([])


def test_many_layers_on_many_ranks_are_worked_out_in_a_moment():
    layout = metaviz.mesh("pp=4,dp=64,cp=8,tp=8")
    placements = {"tp": shard(0), "dp": shard(0)}
    total = load([Sharding(f"{i}", (8192, 4096), FLOAT, layout, placements) for i in range(1000)])
    assert len(total.nbytes) == 16_384
    assert set(total.nbytes.values()) == {1000 * 16 * 4096 * 4}


# Whether distribute_tensor can go without sending, so that values are right under the fake backend, too.
SENDS_NOTHING = {"src_data_rank": None} if "src_data_rank" in distribute_tensor.__code__.co_varnames else {}

REAL = [
    ("dp=2,tp=2", (5, 8, 3), [Shard(0), Shard(0)]),
    ("dp=2,tp=3", (5, 8, 3), [Shard(1), Shard(-1)]),
    ("dp=3,tp=2", (7,), [Replicate(), Shard(-1)]),
    ("dp=3,tp=1", (2, 2, 2, 3), [Shard(3), Shard(0)]),
    ("a=2,b=2,c=2", (9, 5), [Shard(0), Replicate(), Shard(0)]),
    ("dp=2,tp=2", (), [Replicate(), Replicate()]),
    ("dp=2,tp=2", (8, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
]


@pytest.mark.parametrize(("plan", "shape", "placements"), REAL)
def test_dtensors_lie_as_torch_has_distributed_them(simulated, plan, shape, placements):
    for rank in metaviz.mesh(plan).ranks:
        tensor = distribute_tensor(counted(shape), simulated(plan, rank), placements, **SENDS_NOTHING)
        sharding = metaviz.sharding(tensor)
        assert sharding.shape_on(rank) == tuple(tensor.to_local().shape)
        if SENDS_NOTHING:
            assert torch.equal(cut(counted(shape), sharding.slices(rank)), tensor.to_local())


def test_a_partial_tensor_is_whole_on_each_rank_and_said_to_be_a_part_of_the_sum(simulated):
    mesh = simulated("dp=2,tp=2", 3)
    sharding = metaviz.sharding(
        DTensor.from_local(torch.ones(3), mesh, [Partial(), Shard(0)], run_check=False)
    )
    assert sharding.words == [
        "dp: each of 2 has a part of the sum, and the values are what all of them add up to",
        "tp: dim 0 (6) is cut in 2",
    ]
    assert [sharding.shape_on(rank) for rank in range(4)] == [(3,)] * 4


def test_a_tensor_on_a_part_of_the_mesh_is_the_same_along_the_other_axes(simulated):
    mesh = simulated("pp=2,dp=2,tp=2", 5)
    sharding = metaviz.sharding(distribute_tensor(torch.ones(6), mesh["dp"], [Shard(0)]))
    assert sharding.layout.names == ("pp", "dp", "tp")
    assert sharding.owners() == {(((0, 3),),): [0, 1, 4, 5], (((3, 6),),): [2, 3, 6, 7]}
    pair = metaviz.sharding(distribute_tensor(torch.ones(6, 4), mesh["pp", "tp"], [Shard(0), Shard(1)]))
    assert pair.slices(7) == (((3, 6),), ((2, 4),)) and pair.slices(2) == (((0, 3),), ((0, 2),))


def test_a_tensor_on_a_flattened_axis_is_cut_along_all_that_it_covers(simulated):
    # One rank only: torch 2.6 keeps flattened meshes, and gives the next job those of the one before.
    mesh = simulated("dp=2,cp=3", 3)
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    tensor = distribute_tensor(torch.arange(7), flat, [Shard(0)], **SENDS_NOTHING)
    sharding = metaviz.sharding(tensor)
    assert tuple(tensor.to_local().shape) == (1,)
    assert [sharding.shape_on(each)[0] for each in range(6)] == [2, 2, 2, 1, 0, 0]
    assert sharding.words == ["dp_cp (dp and cp): dim 0 (7) is cut in 6"]


def test_axes_without_names_are_counted(simulated):
    from torch.distributed.device_mesh import init_device_mesh

    simulated("dp=2,tp=2", 1)
    tensor = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
    assert metaviz.sharding(tensor).words == [
        "axis_0: each of 2 has the same",
        "axis_1: dim 0 (4) is cut in 2",
    ]


def test_a_sharding_outlives_the_group_of_its_mesh(simulated):
    tensor = distribute_tensor(torch.ones(6), simulated("dp=2,tp=2", 2)["dp"], [Shard(0)])
    simulated("dp=4")
    sharding = metaviz.sharding(tensor)
    assert sharding.layout.state == "stale"
    assert [sharding.slices(rank) for rank in range(4)] == [(((0, 3),),)] * 2 + [(((3, 6),),)] * 2


def test_dims_that_are_counted_from_the_end_are_told_from_the_start(simulated):
    tensor = distribute_tensor(torch.ones(3, 6), simulated("dp=2"), [Shard(1)])
    # Torch counts them anew in most of its functions; what is made by hand may still have them.
    tensor._spec.placements = (Shard(-1),)
    sharding = metaviz.sharding(tensor)
    assert sharding.words == ["dp: dim 1 (6) is cut in 2"] and sharding.shape_on(1) == (3, 3)


def test_a_placement_that_is_none_of_torch_is_refused_and_not_taken_for_a_copy(simulated):
    class Ragged(torch.distributed.tensor.placement_types.Placement):
        pass

    tensor = distribute_tensor(torch.ones(6), simulated("dp=2"), [Replicate()])
    tensor._spec.placements = (Ragged(),)
    with pytest.raises(BadMesh, match=r"of type Ragged does to a tensor is not known here"):
        metaviz.sharding(tensor)


def test_what_is_no_dtensor_is_refused_with_its_type():
    with pytest.raises(BadMesh, match=r"^This is of type Tensor, and is not sharded\. Next: "):
        metaviz.sharding(torch.ones(2))
    with pytest.raises(BadMesh, match=r"^head is of type Parameter, and is not sharded\."):
        sharding_of(nn.Parameter(torch.ones(2)), metaviz.mesh("dp=2"), "head")


def test_a_part_on_another_kind_of_device_than_its_mesh_is_told():
    from torch.distributed.tensor import DTensor, Shard

    with metaviz.mesh("tp=2", simulate=True, device_type="cuda") as world:
        for device, told in (("cpu", True), ("meta", False)):
            local = torch.zeros(2, 2, device=device)
            spec = DTensor.from_local(
                torch.zeros(2, 2, device="meta"), world.device_mesh, [Shard(0)], run_check=False
            )._spec
            tensor = DTensor(local, spec, requires_grad=False)
            words = metaviz.sharding(tensor).words
            assert any("its part is on cpu, and the mesh is one of cuda" in each for each in words) is told
