"""`metaviz.sharding`: models that are sharded, and plans against what FSDP and tensor parallelism really make."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shards import local, worlds  # noqa: F401
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import metaviz
from metaviz.errors import BadMesh, UnknownPath

# Older versions of torch say so of each mesh of CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")

PLAN = "dp=2,tp=4"


class Block(nn.Module):
    """All that differs: an embedding, both kinds of Linear, norms, a buffer, rows that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 6)
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 7)
        self.norm = nn.LayerNorm(7)
        self.plain = nn.Linear(7, 3, bias=False)
        self.register_buffer("scale", torch.ones(5))


STYLES: dict[str, Any] = {
    "tokens": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "norm": SequenceParallel(),
}
CUTS = {"tokens": 0, "up": 0, "down": 1}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def real(mesh: Any, model: nn.Module, styles: dict[str, Any], data: tuple[str, ...] = ("dp",)) -> nn.Module:
    """The model as torch shards it."""
    if styles:
        parallelize_module(model, mesh["tp"], styles)
    fully_shard(model, mesh=mesh[data] if len(data) > 1 else mesh[data[0]])
    return model


def test_a_plan_has_the_shapes_and_bytes_that_fsdp_and_tensor_parallelism_make(simulated):
    plan = metaviz.mesh(PLAN)
    planned = metaviz.sharding(Block(), mesh=plan, fsdp="dp", tp=CUTS)
    assert sorted(each.path for each in planned.shardings) == sorted(tensors(Block())) and planned.notes == ()
    for rank in plan.ranks:
        made = tensors(real(simulated(PLAN, rank), Block(), STYLES))
        for sharding in planned.shardings:
            assert sharding.shape_on(rank) == tuple(local(made[sharding.path]).shape), (sharding.path, rank)
        assert planned.nbytes[rank] == sum(local(each).nbytes for each in made.values())


def test_what_was_made_lies_where_the_plan_has_said(simulated):
    plan = metaviz.mesh(PLAN)
    made = real(simulated(PLAN, 5), Block(), STYLES)
    for path in tensors(made):
        planned, found = metaviz.sharding(Block(), path, mesh=plan, tp=CUTS), metaviz.sharding(made, path)
        assert [planned.slices(rank) for rank in range(8)] == [found.slices(rank) for rank in range(8)], path
    assert metaviz.sharding(made).nbytes == metaviz.sharding(Block(), mesh=plan, tp=CUTS).nbytes


def test_rows_that_do_not_divide_are_cut_by_tensor_parallelism_first(simulated):
    plan = metaviz.mesh("dp=3,tp=3")
    planned = metaviz.sharding(nn.Linear(2, 11), "weight", mesh=plan, tp={"": 0})
    # Thirds of 4, 4 and 3 rows, each cut in three: 2, 2 and 0 of four rows, 1, 1 and 1 of three.
    assert [planned.shape_on(rank)[0] for rank in range(9)] == [2, 2, 1, 2, 2, 1, 0, 0, 1]
    assert planned.slices(8) == (((10, 11),), ((0, 2),))
    for rank in range(9):
        mesh, model = simulated("dp=3,tp=3", rank), nn.Linear(2, 11)
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        try:
            fully_shard(model, mesh=mesh["dp"])
        except NotImplementedError as error:
            assert "FSDP+TP sharding does not support uneven sharding for now" in str(error)
            # Newer versions of torch do it.
            assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
            return
        assert tuple(model.weight.to_local().shape) == planned.shape_on(rank)
        found = metaviz.sharding(model.weight)
        assert [found.slices(each) for each in range(9)] == [planned.slices(each) for each in range(9)]


def test_hybrid_sharding_copies_along_one_axis_and_cuts_along_the_other(simulated):
    text = "dp_replicate=2,dp_shard=3,tp=2"
    planned = metaviz.sharding(Block(), mesh=metaviz.mesh(text), tp=CUTS)
    made = real(simulated(text, 7), Block(), STYLES, ("dp_replicate", "dp_shard"))
    for sharding in planned.shardings:
        found = metaviz.sharding(made, sharding.path)
        assert found.layout.names == ("dp_replicate", "dp_shard", "tp")
        assert [found.slices(rank) for rank in range(12)] == [sharding.slices(rank) for rank in range(12)]
    assert metaviz.sharding(Block(), "up.bias", mesh=metaviz.mesh(text), tp=CUTS).words == [
        "dp_replicate: each of 2 has the same",
        "dp_shard: dim 0 (24) is cut in 2 pieces first, and each of those in 3",
        "tp: dim 0 (24) is cut in 2",
    ]


def test_fsdp_can_cut_along_a_flattened_axis(simulated):
    mesh = simulated("dp_shard=2,cp=2,tp=2", 6)
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    made = nn.Linear(3, 7)
    fully_shard(made, mesh=flat)
    plan = metaviz.mesh("dp_shard=2,cp=2,tp=2").flattened(("dp_shard", "cp"), "dp_shard_cp")
    planned = metaviz.sharding(nn.Linear(3, 7), "weight", mesh=plan, fsdp="dp_shard_cp")
    found = metaviz.sharding(made, "weight")
    assert [found.shape_on(rank)[0] for rank in range(8)] == [2, 2, 2, 2, 2, 2, 1, 1]
    assert [found.slices(rank) for rank in range(8)] == [planned.slices(rank) for rank in range(8)]
    assert tuple(made.weight.to_local().shape) == (1, 3)


def tied() -> nn.Module:
    model = nn.Module()
    model.tokens, model.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    model.head.weight = model.tokens.weight
    return model


def test_tied_weights_are_counted_once_by_fsdp_and_apart_where_tensor_parallelism_has_cut_them(simulated):
    plan = metaviz.mesh("dp=2,tp=2")
    cases = [({}, {}), ({"head": ColwiseParallel()}, {"head": 0})]
    cases.append(({"head": ColwiseParallel(), "tokens": RowwiseParallel()}, {"head": 0, "tokens": 0}))
    for (styles, cuts), whole in zip(cases, (128, 256, 256), strict=True):
        made = real(simulated("dp=2,tp=2", 3), tied(), styles)
        planned = metaviz.sharding(tied(), mesh=plan, tp=cuts)
        assert (made.head.weight is made.tokens.weight) == (not cuts)
        held = sum(local(each).nbytes for each in made.parameters())
        assert planned.nbytes[3] == held == metaviz.sharding(made).nbytes[3]
        assert planned.whole == whole
        assert planned.notes == (
            (
                "No longer tied once tensor parallelism has cut them: tokens.weight, head.weight. Counted as a "
                "parameter each.",
            )
            if cuts
            else ()
        )


def test_a_module_with_two_paths_is_meant_by_each_of_them_and_counted_once():
    model = nn.Module()
    model.one = model.two = nn.Linear(4, 8, bias=False)
    plan = metaviz.mesh("dp=2,tp=2")
    for pattern in ("one", "two", "t*", "two.weight"):
        load = metaviz.sharding(model, mesh=plan, tp={pattern: 0})
        assert (load.whole, load.notes) == (128, ())
        assert load.shardings[0].shape_on(0) == (2, 4)
    assert metaviz.sharding(model, "two.weight", mesh=plan, tp={"one": 0}).shape_on(0) == (2, 4)


def test_parameters_without_dims_stay_whole_and_are_told_as_fully_shard_refuses_them(simulated):
    model = nn.Linear(2, 2, bias=False)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"doesn't support sc?alar parameters"):
        fully_shard(model, mesh=simulated("dp=2")["dp"])
    load = metaviz.sharding(model, mesh=metaviz.mesh("dp=2"))
    assert load.nbytes == {0: 12, 1: 12}
    assert str(load).splitlines() == [
        "20 B of parameters and buffers in all, 12 B on each of 2 ranks",
        "fully_shard refuses parameters without dims: temperature. Next: torch.nn.Parameter(value.reshape(1))",
    ]
    assert metaviz.sharding(model, mesh=metaviz.mesh("dp=2"), fsdp="").notes == ()


def test_an_empty_parameter_is_empty_on_each_rank(simulated):
    model = nn.Module()
    model.none = nn.Parameter(torch.zeros(0, 3))
    planned = metaviz.sharding(model, "none", mesh=metaviz.mesh("dp=2"))
    fully_shard(model, mesh=simulated("dp=2", 1)["dp"])
    assert [planned.shape_on(rank) for rank in (0, 1)] == [(0, 3), (0, 3)]
    assert metaviz.sharding(model, "none").shape_on(1) == tuple(model.none.to_local().shape) == (0, 3)


def test_tensors_that_torch_does_not_register_are_not_cut():
    model = nn.Linear(2, 4, bias=False)
    model.hidden = [nn.Parameter(torch.zeros(4))]
    load = metaviz.sharding(model, mesh=metaviz.mesh("dp=2,tp=2"), tp={"": 0})
    assert {each.path: each.shape_on(0) for each in load.shardings} == {"weight": (1, 2), "hidden[0]": (4,)}
    # It looks like a glob, and is the path of one tensor.
    assert metaviz.sharding(model, "hidden[0]", mesh=metaviz.mesh("dp=2")).shape_on(1) == (4,)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 4),
        ({"fsdp": "dp"}, 4),
        ({"fsdp": "tp"}, 2),
        ({"fsdp": ""}, 8),
        ({"fsdp": "", "tp": {"weight": 0}}, 2),
        ({"tp": {"*": 0}}, 1),
        ({"tp": {"**": 0}}, 1),
        ({"tp": {"": 1}}, 4),
    ],
)
def test_what_is_chosen_of_a_plan_is_cut(options, rows):
    sharding = metaviz.sharding(nn.Linear(8, 8), "weight", mesh=metaviz.mesh(PLAN), **options)
    assert sharding.shape_on(0)[0] == rows
    assert math.prod(sharding.shape_on(0)) * 4 == sharding.nbytes_on(0)


def test_a_plan_may_be_given_as_it_is_written_and_as_a_mesh_of_torch(simulated):
    model = nn.Linear(8, 8)
    for mesh in (PLAN, {"dp": 2, "tp": 4}, simulated(PLAN), metaviz.mesh(simulated(PLAN))):
        assert metaviz.sharding(model, "bias", mesh=mesh, tp={"": 0}).shape_on(7) == (1,)
    named = metaviz.mesh("data_parallel=2,tensor_parallel=4")
    assert metaviz.sharding(model, "bias", mesh=named, tp={"": 0}).shape_on(7) == (1,)


def test_rules_hold_for_what_is_outside_of_the_part_that_is_asked_about():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    load = metaviz.sharding(model, "1", mesh=metaviz.mesh(PLAN), tp={"0": 0, "1": 1})
    assert [(each.path, each.shape_on(0)) for each in load.shardings] == [
        ("1.weight", (2, 2)),
        ("1.bias", (2,)),
    ]


def test_the_first_rule_that_means_a_parameter_counts():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    plan = metaviz.mesh("tp=4")
    load = metaviz.sharding(model, mesh=plan, tp={"0.bias": 0, "*.weight": 1})
    assert [each.shape_on(0) for each in load.shardings] == [(8, 1), (2,), (4, 2), (4,)]


def test_layers_are_meant_by_their_names_and_not_by_what_begins_like_them():
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "upper": nn.Linear(4, 4)})
    load = metaviz.sharding(model, mesh=metaviz.mesh("tp=4"), tp={"up": 0})
    assert {each.path: each.shape_on(0)[0] for each in load.shardings} == {
        "up.weight": 1,
        "up.bias": 1,
        "upper.weight": 4,
        "upper.bias": 4,
    }


def test_a_module_has_a_load_and_a_tensor_has_a_sharding():
    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    plan = metaviz.mesh("dp=2")
    assert str(metaviz.sharding(model, "0.weight", mesh=plan)).startswith(
        "0.weight  (8, 4) float32, 128 B, on dp=2"
    )
    for path in ("", "0", "*", "0.w*"):
        assert str(metaviz.sharding(model, path, mesh=plan)) == (
            "128 B of parameters and buffers in all, 64 B on each of 2 ranks"
        )


def test_what_is_not_sharded_itself_counts_whole_on_each_rank_of_a_sharded_model(simulated):
    model = Block()
    fully_shard(model.up, mesh=simulated("dp=2", 1)["dp"])
    assert metaviz.sharding(model, "scale").words == ["dp: each of 2 has the same"]
    assert metaviz.sharding(model, "norm").nbytes == {0: 56, 1: 56}
    assert metaviz.sharding(model, "up").nbytes == {0: 336, 1: 336}


def two_meshes(one: Any, two: Any) -> nn.Module:
    model = nn.Module()
    model.one = nn.Parameter(distribute_tensor(torch.zeros(7), one, [Shard(0)]))
    model.two = nn.Parameter(
        distribute_tensor(torch.zeros(3), two, [Shard(0)] + [Replicate()] * (two.ndim - 1))
    )
    model.register_buffer("plain", torch.zeros(1))
    return model


def test_parameters_on_several_meshes_over_the_same_ranks_each_go_by_their_own(simulated):
    from torch.distributed.device_mesh import init_device_mesh

    grid = simulated("dp=2,tp=2", 3)
    load = metaviz.sharding(two_meshes(init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), grid))
    # Of seven rows 2, 2, 2 and 1; of three rows 2 on the first two and 1 on the others; one everywhere.
    assert load.nbytes == {0: 20, 1: 20, 2: 16, 3: 12} and load.notes == ()


def test_ranks_that_are_not_on_the_mesh_of_a_parameter_hold_nothing_of_it_and_that_is_told(simulated):
    from torch.distributed.device_mesh import DeviceMesh

    whole = simulated("dp=4", 0)
    pair = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("pair",))
    model = two_meshes(whole, pair)
    load = metaviz.sharding(model)
    assert load.nbytes == {0: 20, 1: 16, 2: 12, 3: 8}
    assert load.notes == ("Not on all of these ranks: two. The others hold nothing of it.",)
    assert list(metaviz.sharding(model, "two").layout.ranks) == [0, 1]
    # Where no mesh has all of them, what is not sharded counts on each.
    other = two_meshes(DeviceMesh("cpu", torch.tensor([0, 2, 3]), mesh_dim_names=("three",)), pair)
    assert metaviz.sharding(other).nbytes == {0: 24, 1: 8, 2: 16, 3: 8}


def test_what_is_not_sharded_says_how_to_plan():
    with pytest.raises(
        BadMesh, match=r'^Nothing here is sharded\. Next: .*mesh=metaviz\.mesh\("dp=2,tp=4"\)'
    ):
        metaviz.sharding(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"path": "wieght"}, UnknownPath, "has no module or tensor 'wieght'. The nearest is 'weight'."),
        ({"path": "x*"}, UnknownPath, "has no module or tensor 'x*'"),
        ({"fsdp": "ddp"}, BadMesh, "There is no axis 'ddp'. There are: dp, tp."),
        ({"mesh": metaviz.mesh("dp=2"), "tp": {"": 0}}, BadMesh, "There is no axis 'tp'. There are: dp."),
        ({"tp": {"": 0, "haed": 0}}, UnknownPath, "No parameter is meant by 'haed' (dim 0)."),
        ({"tp": {"weight": 2}}, UnknownPath, "No parameter is meant by 'weight' (dim 2)."),
        ({"tp": {"bias": 1}}, UnknownPath, "No parameter is meant by 'bias' (dim 1)."),
        (
            {"tp": {"weight": -1}},
            BadMesh,
            "tp says -1 of 'weight', and it takes the dim to cut: 0 for column-wise",
        ),
        ({"tp": {"weight": "colwise"}}, BadMesh, "Next: tp={'weight': 0}"),
        ({"tp": {"weight": True}}, BadMesh, "tp says True of 'weight'"),
        ({"fsdp": "tp", "tp": {"": 0}}, BadMesh, "fsdp='tp' would cut along it, too"),
        ({"mesh": "dp=2,tp"}, BadMesh, "the size of 'tp' is missing"),
        ({"mesh": 4}, BadMesh, "An object of type int has no mesh."),
        ({"mesh": None, "fsdp": "dp"}, BadMesh, "fsdp and tp belong to a plan."),
        ({"mesh": None, "tp": {"": 0}}, BadMesh, "fsdp and tp belong to a plan."),
    ],
)
def test_what_cannot_be_meant_is_said(options, error, words):
    with pytest.raises(error) as caught:
        metaviz.sharding(nn.Linear(4, 4), **{"mesh": metaviz.mesh(PLAN), **options})
    assert words in str(caught.value)


def test_a_mesh_that_has_no_ranks_yet_is_no_plan():
    waiting = metaviz.mesh(namespace={})
    assert waiting.state == "waiting"
    with pytest.raises(
        BadMesh, match=r'^This mesh has no ranks yet\. Next: plan = metaviz\.mesh\("dp=2,tp=4"\)'
    ):
        metaviz.sharding(nn.Linear(2, 2), mesh=waiting)


def test_a_plan_is_for_a_model_and_a_module_without_tensors_has_none():
    with pytest.raises(BadMesh, match="A plan is for a model, and this is a tensor"):
        metaviz.sharding(torch.ones(2), mesh=metaviz.mesh("dp=2"))
    with pytest.raises(BadMesh, match="no tensors to spread"):
        metaviz.sharding(nn.Sequential(nn.ReLU()), "0", mesh=metaviz.mesh("dp=2"))
    with pytest.raises(TypeError, match=r"this is a list"):
        metaviz.sharding([1], mesh=metaviz.mesh("dp=2"))


def test_a_large_model_on_meta_is_planned_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(80)))
    load = metaviz.sharding(model, mesh=metaviz.mesh("pp=4,dp=64,tp=8"), tp={"*": 0})
    assert len(load.nbytes) == 2048
    assert set(load.nbytes.values()) == {80 * (8192 * 16 + 16) * 4}
