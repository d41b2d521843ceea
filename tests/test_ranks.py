"""Shardings and meshes in real processes: what each rank is said to hold is what it holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gloo import together
from shards import counted, cut, local
from torch import nn

import metaviz

pytestmark = pytest.mark.dist

SHAPES = ((2, 2), (4, 1), (1, 4))
#: What the axis tp cuts, as a plan says it.
CUTS = {"tokens": 0, "up": 0, "down": 1}


class Net(nn.Module):
    """A bit of all: an embedding, column- and row-wise layers, a norm, rows that do not divide, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 6)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 1)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def on_rank(rank: int) -> dict[str, Any]:
    """What a rank holds of a model on each mesh, and what metaviz says on it of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    seen = {}
    for shape in SHAPES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = sharded(mesh)
        held = {name: local(value).detach().clone() for name, value in model.state_dict().items()}
        said = {
            name: [metaviz.sharding(value).slices(each) for each in range(4)]
            for name, value in model.named_parameters()
        }
        layout = metaviz.mesh(model)
        seen[shape] = {
            "held": held,
            "said": said,
            "load": metaviz.sharding(model).nbytes,
            "layout": (layout.state, layout.rank, layout.names, layout.shape, layout.coordinate),
            "real": ("ready", rank, ("dp", "tp"), shape, tuple(mesh.get_coordinate())),
            "groups": {name: layout.group(name) for name in layout.names},
            "real groups": groups(mesh),
            "others": others(mesh),
        }
    return {**seen, "own order": own_order()}


def own_order() -> list[tuple[list[Any], torch.Tensor]]:
    """(the slices that each rank is said to hold, what this one holds) on a mesh whose ranks do not ascend."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = DeviceMesh("cpu", torch.tensor([3, 1, 0, 2]), mesh_dim_names=("tp",))
    grid = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(3, 8, bias=False)
    layer.weight.data.copy_(counted((8, 3)))
    fully_shard(layer, mesh=line)
    made = [
        distribute_tensor(counted((8, 3)), line, [Shard(0)]),
        distribute_tensor(counted((8, 3)), grid, [Replicate(), Shard(0)]),
        layer.weight,
    ]
    return [
        ([metaviz.sharding(each).slices(rank) for rank in range(4)], local(each).detach()) for each in made
    ]


def sharded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net()
    styles = {"tokens": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    fully_shard(model, mesh=mesh["dp"])
    return model


def groups(mesh: Any) -> dict[str, tuple[int, ...]]:
    from torch.distributed import get_process_group_ranks

    return {name: tuple(get_process_group_ranks(mesh.get_group(name))) for name in mesh.mesh_dim_names}


def others(mesh: Any) -> list[tuple[str, Any, torch.Tensor]]:
    """(what it is, the slices that each rank is said to hold, what this one holds) of tensors by themselves."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    whole, found = counted((5, 8, 3)), []
    for placements in (
        [Shard(0), Shard(0)],
        [Shard(1), Shard(-1)],
        [Replicate(), Shard(1)],
        [Shard(-2), Replicate()],
    ):
        found.append((str(placements), distribute_tensor(whole, mesh, placements)))
    found.append(("row of a sub-mesh", distribute_tensor(whole, mesh["tp"], [Shard(0)])))
    found.append(("0-d", distribute_tensor(torch.tensor(3.0), mesh, [Replicate(), Replicate()])))
    found.append(("partial", DTensor.from_local(whole, mesh["dp"], [Partial()], run_check=False)))
    return [
        (name, [metaviz.sharding(each).slices(rank) for rank in range(4)], local(each))
        for name, each in found
    ]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[tuple[int, int], Any]]:
    """What four processes have seen on each mesh."""
    return together(on_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_rank_says_of_every_rank_which_slices_it_really_holds(seen, shape):
    whole = net().state_dict()
    assert seen[0][shape]["said"].keys() == dict(net().named_parameters()).keys()
    for teller, holder in itertools.product(range(4), repeat=2):
        for name, slices in seen[teller][shape]["said"].items():
            assert torch.equal(cut(whole[name], slices[holder]), seen[holder][shape]["held"][name]), (
                name,
                holder,
            )


def test_ranks_in_an_order_of_their_own_hold_what_is_said(seen):
    for holder in range(4):
        for each in range(3):
            said, held = seen[holder]["own order"][each]
            assert torch.equal(cut(counted((8, 3)), said[holder]), held), (holder, each)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_plan_says_beforehand_what_each_rank_will_hold(seen, shape):
    plan = metaviz.mesh({"dp": shape[0], "tp": shape[1]})
    whole = net()
    for name, value in whole.state_dict().items():
        planned = metaviz.sharding(whole, name, mesh=plan, fsdp="dp", tp=CUTS)
        for rank in range(4):
            assert torch.equal(cut(value, planned.slices(rank)), seen[rank][shape]["held"][name]), (
                name,
                rank,
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_of_each_rank_are_those_of_what_it_really_holds(seen, shape):
    real = {rank: sum(held.nbytes for held in each[shape]["held"].values()) for rank, each in enumerate(seen)}
    plan = metaviz.mesh({"dp": shape[0], "tp": shape[1]})
    assert metaviz.sharding(net(), mesh=plan, tp=CUTS).nbytes == real
    assert [each[shape]["load"] for each in seen] == [real] * 4


def test_a_layer_with_one_row_is_on_one_rank_of_four_and_others_hold_nothing(seen):
    held = [tuple(each[4, 1]["held"]["head.weight"].shape) for each in seen]
    assert held == [(1, 7), (0, 7), (0, 7), (0, 7)]
    assert [runs[0] for runs in seen[3][4, 1]["said"]["head.weight"]] == [((0, 1),), (), (), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mesh_of_a_model_has_the_coordinate_and_the_groups_of_its_process(seen, shape):
    for each in seen:
        assert each[shape]["layout"] == each[shape]["real"]
        assert each[shape]["groups"] == each[shape]["real groups"]
    assert seen[3][2, 2]["groups"] == {"dp": (1, 3), "tp": (2, 3)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_by_themselves_lie_as_they_are_said_to(seen, shape):
    for index, (name, slices, _) in enumerate(seen[0][shape]["others"]):
        whole = torch.tensor(3.0) if name == "0-d" else counted((5, 8, 3))
        for rank, each in enumerate(seen):
            assert torch.equal(cut(whole, slices[rank]), each[shape]["others"][index][2]), (name, rank)
            assert each[shape]["others"][index][1] == slices, name
