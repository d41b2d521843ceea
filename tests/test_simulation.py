from __future__ import annotations

import gc
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from groups import default_device, gloo, no_group_stays  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import metaviz
from metaviz.core.layout import Axis, MeshLayout
from metaviz.core.simulation import Simulation
from metaviz.errors import BadMesh


def test_a_simulated_mesh_is_one_of_torchs_own_and_shards_real_modules():
    with metaviz.mesh("dp=2,tp=4", simulate=True, rank=5) as world:
        mesh = world.device_mesh
        assert (mesh.mesh_dim_names, mesh.shape, mesh.device_type) == (("dp", "tp"), (2, 4), "cpu")
        assert dist.get_process_group_ranks(mesh.get_group("tp")) == [4, 5, 6, 7]
        whole = torch.empty(6, 8, device="meta")
        assert distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).to_local().shape == (3, 2)


def test_a_simulated_mesh_is_marked_as_one_and_says_why():
    with metaviz.mesh("dp=2,tp=4", simulate=True, rank=5, ranks_per_host=4) as world:
        layout = world.layout
        assert (layout.state, layout.rank, layout.coordinate, layout.world) == ("simulated", 5, (1, 1), 8)
        assert (layout.hosts, [axis.backend for axis in layout.axes]) == (2, ["fake", "fake"])
        assert layout.reason == (
            "Its backend is fake: the layout is real, but nothing is sent, and values are not to be trusted."
        )
        for view in (str(world), world._repr_html_(), world._repr_svg_()):
            assert "simulated" in view


def test_a_simulated_mesh_is_stale_once_it_is_closed_and_still_readable():
    world = metaviz.mesh("dp=2,tp=4", simulate=True, rank=5)
    world.close()
    assert not dist.is_initialized()
    assert (world.layout.state, world.layout.rank, world.layout.group("tp")) == ("stale", 5, (4, 5, 6, 7))
    world.close()


@pytest.mark.parametrize("rank", [0, 4097, 8191])
def test_8192_ranks_are_simulated_in_one_process_from_the_place_of_any_of_them(rank):
    start = time.process_time()
    with metaviz.mesh("pp=16,dp=64,tp=8", simulate=True, rank=rank, device_type="cuda") as world:
        assert world.layout.coordinate == (rank // 512, rank // 8 % 64, rank % 8)
        assert world.device_mesh.get_coordinate() is not None
        assert tuple(world.device_mesh.get_coordinate()) == world.layout.coordinate
    assert time.process_time() - start < 2


def test_a_lesson_looks_at_a_world_rank_by_rank():
    held = []
    for rank in range(4):
        with metaviz.mesh("tp=4", simulate=True, rank=rank) as world:
            whole = torch.empty(6, 2, device="meta")
            held.append(distribute_tensor(whole, world.device_mesh, [Shard(0)]).to_local().shape[0])
    assert held == [2, 2, 2, 0]


def test_a_plan_that_leaves_ranks_out_is_simulated_with_them():
    with metaviz.mesh("dp=2,tp=2", simulate=True, world=8, rank=5) as world:
        assert dist.get_world_size() == 8
        assert world.device_mesh.get_coordinate() is None
        assert (world.layout.coordinate, world.layout.idle) == (None, (4, 5, 6, 7))
        assert "This process (rank 5) is not on the mesh." in world.layout.notes


def test_a_plan_with_an_order_of_its_own_is_simulated_in_that_order():
    with metaviz.mesh("a=2,b=2", simulate=True, ranks=[7, 4, 1, 5], rank=7) as world:
        assert dist.get_world_size() == 8
        assert world.layout.ranks == (7, 4, 1, 5)
        assert (world.layout.coordinate, world.device_mesh.get_local_rank("b")) == ((0, 0), 1)


def test_the_rank_that_is_played_is_the_first_of_the_plan_if_none_is_named():
    with metaviz.mesh("a=2,b=2", simulate=True, ranks=[7, 4, 1, 5]) as world:
        assert (dist.get_rank(), world.layout.coordinate) == (7, (0, 0))


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake tensors"])
def test_a_mesh_is_simulated_under_any_mode_of_the_caller(mode):
    with mode(), metaviz.mesh("dp=2,tp=4", simulate=True, rank=5) as world:
        assert world.layout.ranks == tuple(range(8))
        assert world.layout["tp"].coordinate == (1, 1)


def test_a_mesh_is_simulated_where_the_default_device_is_meta():
    with default_device("meta"), metaviz.mesh("dp=2,tp=4", simulate=True) as world:
        assert world.device_mesh.mesh.device.type == "cpu"


def test_a_simulation_refuses_to_start_beside_a_group_and_leaves_it_alone():
    with gloo():
        own = dist.group.WORLD
        with pytest.raises(BadMesh, match=r"There is a process group already \(gloo, 1 ranks\).*left alone"):
            metaviz.mesh("dp=8", simulate=True)
        gc.collect()
        assert dist.group.WORLD is own


def test_a_second_simulation_is_refused_and_the_first_goes_on():
    with metaviz.mesh("dp=8", simulate=True) as world:
        with pytest.raises(BadMesh, match=r"There is a process group already \(fake, 8 ranks\)"):
            metaviz.mesh("dp=4", simulate=True)
        gc.collect()
        assert world.layout.state == "simulated"


def test_a_simulation_that_nobody_holds_any_more_is_over():
    world = metaviz.mesh("dp=8", simulate=True)
    # A part of its mesh is enough to hold it.
    part = world.device_mesh["dp"]
    del world
    gc.collect()
    assert metaviz.mesh(part).state == "simulated"
    del part
    gc.collect()
    assert not dist.is_initialized()


def test_a_cell_that_simulates_can_be_run_again():
    world = metaviz.mesh("dp=8", simulate=True)
    earlier = world.device_mesh
    world = metaviz.mesh("dp=2,tp=2", simulate=True)
    assert (world.layout.state, world.layout.world) == ("simulated", 4)
    assert metaviz.mesh(earlier).state == "stale"
    world.close()


def test_a_simulation_that_fails_to_start_leaves_nothing_behind():
    hook = sys.excepthook
    # A layout that was put together by hand: torch starts its world, and refuses its mesh.
    with pytest.raises(RuntimeError, match="Mesh should not be bigger than default world size"):
        Simulation(MeshLayout((Axis("dp", 2),), (0, 1), world=1, device_type="cpu"))
    assert not dist.is_initialized()
    assert sys.excepthook is hook


@pytest.mark.parametrize("device", ["meta", "mps", "xla"])
def test_a_device_that_no_group_is_faked_for_is_refused(device):
    with pytest.raises(BadMesh) as refused:
        metaviz.mesh("dp=2", simulate=True, device_type=device)
    assert str(refused.value) == f"A mesh is simulated on 'cpu' or 'cuda', not on {device!r}."


def test_simulating_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with metaviz.mesh("dp=2,tp=4", simulate=True) as world:
            str(world)


def test_tensors_of_a_simulation_can_be_looked_at_after_it():
    with metaviz.mesh("dp=2,tp=4", simulate=True, rank=5) as world:
        whole = torch.empty(6, 8, device="meta")
        tensor = distribute_tensor(whole, world.device_mesh, [Replicate(), Shard(1)])
    layout = metaviz.mesh(tensor)
    assert (layout.state, layout.shape, layout.rank) == ("stale", (2, 4), 5)
