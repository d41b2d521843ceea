from __future__ import annotations

import gc
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from groups import fake, gloo, no_group_stays, nothing_starts  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import metaviz
from metaviz.core.awaited import lightning_refusal
from metaviz.core.layout import MeshLayout
from metaviz.core.meshes import Meshes, among
from metaviz.errors import BadMesh

REFUSED = "Accessing the device mesh before processes have initialized is not allowed."


@pytest.fixture(autouse=True)
def started_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    # What a shell has left behind would make this process interactive.
    monkeypatch.delattr(sys, "ps1", raising=False)


def look(**names) -> MeshLayout | Meshes:
    return metaviz.mesh(namespace=names)


def sharded(mesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8, device="meta"))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    return model


# Plans


@pytest.mark.usefixtures("nothing_starts")
def test_a_plan_needs_no_group():
    layout = metaviz.mesh({"pp": 2, "dp": 2, "tp": 2}, rank=5, ranks_per_host=4)
    assert (layout.state, layout.coordinate, layout.hosts) == ("planned", (1, 0, 1), 2)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert not dist.is_initialized()


def test_a_plan_that_was_made_is_looked_at_anew_with_other_hosts():
    plan = metaviz.mesh("dp=2,tp=4", ranks_per_host=8)
    assert metaviz.mesh(plan) is plan
    assert metaviz.mesh(plan, ranks_per_host=2).crossing("tp") == 2


@pytest.mark.parametrize("option", ["simulate", "world", "rank", "ranks", "device_type", "model"])
def test_what_belongs_to_a_plan_is_refused_without_one(option):
    with pytest.raises(
        BadMesh, match=r"simulate, world, rank, ranks, device_type and model belong to a plan\."
    ):
        metaviz.mesh(nn.Linear(2, 2, device="meta"), **{option: True})


@pytest.mark.parametrize(
    ("thing", "called"),
    [((2, 4), "tuple"), (8, "int"), (nn.Linear(2, 2, device="meta"), "Linear"), (torch.ones(2), "Tensor")],
)
def test_what_has_no_mesh_is_refused_with_what_is_taken(thing, called):
    with pytest.raises(BadMesh) as refused:
        metaviz.mesh(thing)
    assert str(refused.value) == (
        f"An object of type {called} has no mesh. It takes a DeviceMesh, Lightning's Fabric, Trainer or strategy, "
        "torchtitan's ParallelDims, accelerate's Accelerator, a sharded module, or a plan. "
        'Next: metaviz.mesh("dp=2,tp=4")'
    )


# Where there is no mesh


@pytest.mark.usefixtures("nothing_starts")
def test_a_process_without_a_group_is_waiting():
    layout = look(a=1)
    assert (layout.state, layout.axes, layout.ranks, layout.rank) == ("waiting", (), (), None)
    assert "No process group yet" in layout.reason


def test_a_launched_process_waits_with_the_rank_and_world_that_it_knows(monkeypatch, request):
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    request.getfixturevalue("nothing_starts")
    layout = look()
    assert (layout.state, layout.rank, layout.world) == ("waiting", 1, 2)
    assert "init_process_group was not called yet" in layout.reason


def test_a_group_without_a_mesh_is_waiting_for_one_and_the_step_makes_it():
    with gloo():
        layout = look()
        assert (layout.state, layout.rank, layout.world) == ("waiting", 0, 1)
        assert layout.reason == "The process group is there: 1 rank, gloo. No name holds a mesh yet."
        names = {"torch": torch}
        exec(layout.step, names)
        assert metaviz.mesh(namespace=names).state == "ready"


# Names of the caller


def test_the_names_of_the_caller_are_looked_through():
    with fake(8, 5):
        grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        layout = metaviz.mesh()
        assert (layout.names, layout.coordinate) == (("dp", "tp"), (1, 1))
        assert metaviz.mesh(grid).origin() is grid


def test_several_meshes_are_a_choice_by_name_or_number():
    with fake(8, 5):
        dense = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        sparse = init_device_mesh("cpu", (8,), mesh_dim_names=("ep",))
        found = look(plan=metaviz.mesh("dp=4"), dense=dense, sparse=sparse, other=3)
        assert isinstance(found, Meshes)
        # What is there comes first.
        assert list(found.found) == ["dense", "sparse", "plan"]
        assert (found["sparse"].names, found[0].names, len(found)) == (("ep",), ("dp", "tp"), 3)
        assert [each.state for each in found] == ["simulated", "simulated", "planned"]
        assert str(found).splitlines() == [
            "3 meshes: choose one by name, metaviz.mesh(dense)",
            "  dense: dp=2 × tp=4, simulated",
            "  sparse: ep=8, simulated",
            "  plan: dp=4, planned",
        ]
        with pytest.raises(
            BadMesh, match=r"Nothing called 'x' has a mesh here\. There are: dense, sparse, plan\."
        ):
            found["x"]


def test_a_mesh_with_two_names_is_one_mesh():
    with fake(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        assert isinstance(look(mesh=mesh, again=mesh), MeshLayout)


def test_names_that_notebooks_keep_for_themselves_are_left_out():
    with fake(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        assert look(_=mesh, _3=mesh, __mesh=mesh).state == "waiting"


def test_a_thing_that_means_nothing_hides_no_others():
    wrong = types.SimpleNamespace(pp=1, dp_replicate=1, dp_shard=-1, cp=1, tp=3, world_size=8)
    assert look(wrong=wrong, plan=metaviz.mesh("dp=4")).names == ("dp",)
    with pytest.raises(BadMesh, match=r"^wrong: 8 ranks cannot be divided by"):
        look(wrong=wrong)


def test_looking_through_names_asks_them_nothing_and_warns_of_nothing():
    class Touchy:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

        @property
        def device_mesh(self):
            raise AssertionError("a property was asked for")

    class Sharded(nn.Module):
        @property
        def mesh(self):
            raise AssertionError("a property was asked for")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            look(touchy=Touchy(), module=Sharded(), dist=dist, torch=torch, t=torch.ones(1)).state
            == "waiting"
        )


def test_a_class_that_is_called_dtensor_and_is_none_is_nothing():
    assert among({"thing": type("DTensor", (), {})()}, None).state == "waiting"


# What has a mesh


def test_a_sharded_tensor_and_a_module_of_them_have_the_mesh_of_their_shards():
    with fake(4, 2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = sharded(mesh["tp"])
        for thing in (model, model[0].weight):
            layout = metaviz.mesh(thing)
            assert (layout.names, layout.focus, layout.coordinate) == (("dp", "tp"), ("tp",), (1, 0))
    for thing in (model, model[0].weight):
        assert metaviz.mesh(thing).state == "stale"


def test_a_simulation_is_its_mesh():
    with metaviz.mesh("dp=2,tp=4", simulate=True) as world:
        assert metaviz.mesh(world).state == "simulated"
        assert look(world=world).shape == (2, 4)


def test_what_is_looked_at_is_not_kept_alive():
    with fake(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        layout = metaviz.mesh(mesh)
        assert layout.origin() is mesh
        del mesh
        gc.collect()
        assert layout.origin() is None
        assert layout.group("tp") == (0, 1, 2, 3)


# torchtitan: what its ParallelDims looks like, of version 0.3


class ParallelDims:
    def __init__(self, world_size, **sizes):
        self.__dict__.update({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1} | sizes)
        self.world_size = world_size

    @property
    def dp_enabled(self):
        raise AssertionError("a property was asked for")


@pytest.mark.usefixtures("nothing_starts")
def test_the_parallel_dims_of_torchtitan_are_a_plan():
    layout = metaviz.mesh(ParallelDims(64, pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=8))
    assert layout.names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert (layout.shape, layout.state, layout.world) == ((2, 2, 4, 2, 2), "planned", 64)
    assert layout.notes == (
        "Parameters are sharded along dp_shard and cp together: 8 ways.",
        "ep=8 is cut out of dp_shard × cp × tp = 16: the rest is efsdp.",
    )


def test_context_parallelism_multiplies_with_sharded_data_and_the_product_is_told():
    layout = metaviz.mesh(ParallelDims(8, dp_shard=8, cp=8))
    assert layout.size == 64
    assert layout.notes == (
        "Parameters are sharded along dp_shard and cp together: 64 ways.",
        "pp=1 × dp_replicate=1 × dp_shard=8 × cp=8 × tp=1 = 64 ranks, and world_size=8: torchtitan refuses this.",
    )


def test_a_size_that_torchtitan_works_out_is_worked_out():
    assert metaviz.mesh(ParallelDims(64, dp_shard=-1, tp=8)).shape == (1, 1, 8, 1, 8)


def test_parallel_dims_that_were_built_have_the_mesh_that_was_built():
    dims = ParallelDims(8, dp_shard=4, tp=2)
    with fake(8, 5):
        dims._world_mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
        layout = metaviz.mesh(dims)
        assert (layout.state, layout.names, layout.coordinate) == ("simulated", ("dp_shard", "tp"), (2, 1))


@pytest.mark.skipif(not hasattr(DeviceMesh, "_unflatten"), reason="torch takes no mesh apart before 2.10")
def test_parallel_dims_of_today_show_the_view_of_their_ranks_that_has_all_axes():
    dims = ParallelDims(8, dp_shard=4, tp=2)
    with fake(8, 5):
        dims._world_mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        dense = dims._world_mesh._unflatten(0, (4, 2), ("dp_shard", "tp"))
        dims._global_meshes = {"dataloading": dense["dp_shard"], "dense": dense}
        layout = metaviz.mesh(dims)
        assert (layout.names, layout.shape, layout.coordinate) == (("dp_shard", "tp"), (4, 2), (2, 1))


# accelerate


def test_the_sizes_of_accelerate_are_a_plan_with_the_axes_that_it_joins(needs):
    config = needs("accelerate").parallelism_config.ParallelismConfig(
        dp_replicate_size=2, dp_shard_size=4, tp_size=2
    )
    layout = metaviz.mesh(config)
    assert (layout.state, layout.shape_words) == ("planned", "dp_replicate=2 × dp_shard=4 × tp=2")
    assert layout.aliases == {
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard",),
        "dp_cp": ("dp_replicate", "dp_shard"),
    }


# Lightning


def strategy(needs, kind="fabric", **sizes):
    if kind == "fabric":
        model_parallel = needs("lightning.fabric.strategies").ModelParallelStrategy
        return model_parallel(parallelize_fn=lambda module, mesh: module, **sizes)
    return needs("lightning.pytorch.strategies").ModelParallelStrategy(**sizes)


@pytest.mark.parametrize("kind", ["fabric", "trainer"])
def test_a_strategy_before_launch_waits_with_the_sizes_that_were_planned(needs, request, kind):
    thing = strategy(needs, kind, data_parallel_size=2, tensor_parallel_size=4)
    with pytest.raises(RuntimeError) as raised:
        _ = thing.device_mesh
    assert str(raised.value) == REFUSED
    request.getfixturevalue("nothing_starts")
    layout = metaviz.mesh(thing)
    assert layout.state == "waiting"
    assert layout.shape_words == "data_parallel=2 × tensor_parallel=4"
    assert layout.group("tensor_parallel", 5) == (4, 5, 6, 7)
    assert layout.reason == (
        "Lightning makes the mesh of ModelParallelStrategy when its processes start. Until then strategy.device_mesh "
        f"raises RuntimeError: {REFUSED}"
    )
    assert "fabric.launch()" in layout.step


@pytest.mark.parametrize("kind", ["fabric", "trainer"])
def test_a_strategy_of_its_own_accord_says_that_its_sizes_are_not_known_yet(needs, kind):
    layout = metaviz.mesh(strategy(needs, kind))
    assert (layout.state, layout.axes, layout.ranks) == ("waiting", (), ())
    assert layout.notes == (
        "data_parallel is 'auto': as many as there are nodes.",
        "tensor_parallel is 'auto': as many as there are devices on a node.",
    )


def fabric(needs, nodes=1, **sizes):
    return needs("lightning").Fabric(
        accelerator="cpu", devices=4, num_nodes=nodes, strategy=strategy(needs, **sizes)
    )


def test_sizes_that_are_left_to_lightning_are_the_nodes_and_the_devices_of_each(needs):
    layout = metaviz.mesh(fabric(needs, nodes=2))
    assert layout.shape_words == "data_parallel=2 × tensor_parallel=4"
    assert (layout.world, layout.hosts, layout.device_type) == (8, 2, "cpu")
    assert layout.crossing("tensor_parallel") == 0


def test_what_lightning_will_say_of_sizes_that_do_not_multiply_is_said_before(needs):
    setup = needs("lightning.fabric.strategies.model_parallel")._setup_device_mesh
    with pytest.raises(RuntimeError) as raised:
        setup(2, 3, 4, torch.device("cpu"))
    assert not dist.is_initialized()
    layout = metaviz.mesh(fabric(needs, data_parallel_size=2, tensor_parallel_size=3))
    assert layout.notes == (f"It will fail to start. RuntimeError: {raised.value}",)
    assert lightning_refusal(2, 3, 4) == str(raised.value)


def test_a_trainer_its_module_and_classes_of_ones_own_wait_as_the_strategy_does(needs):
    lightning = needs("lightning")

    class Own(lightning.Trainer):
        pass

    class Module(lightning.LightningModule):
        pass

    module = Module()
    with pytest.raises(BadMesh, match="An object of type Module has no mesh"):
        metaviz.mesh(module)
    planned = strategy(needs, "trainer", data_parallel_size=2, tensor_parallel_size=2)
    module.trainer = trainer = Own(
        accelerator="cpu", devices=4, strategy=planned, logger=False, enable_checkpointing=False
    )
    assert module.device_mesh is None
    for thing in (trainer, module, planned):
        layout = metaviz.mesh(thing)
        assert (layout.state, layout.shape, layout.world) == ("waiting", (2, 2), 4)
        assert REFUSED in layout.reason
    # The strategy, its trainer and its module are shown as a choice.
    assert len(look(trainer=trainer, module=module)) == 2


def test_a_strategy_that_was_launched_has_its_mesh(needs):
    thing = strategy(needs, data_parallel_size=1, tensor_parallel_size=1)
    setup = needs("lightning.fabric.strategies.model_parallel")._setup_device_mesh
    with gloo():
        thing._device_mesh = setup(1, 1, 1, torch.device("cpu"))
        layout = metaviz.mesh(thing)
        assert (layout.state, layout.names) == ("ready", ("data_parallel", "tensor_parallel"))
        assert thing.device_mesh is thing._device_mesh
    assert metaviz.mesh(thing).state == "stale"


def test_a_notebook_is_told_that_lightning_starts_no_such_strategy_in_it(needs, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert metaviz.mesh(strategy(needs)).reason.endswith(
        "It does not start this strategy in a notebook at all."
    )


def test_objects_that_cannot_be_looked_at_hide_no_mesh_and_run_no_code():
    class Raises:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    class Homeless:
        pass

    Homeless.__module__ = None
    asked = []

    class Proxy:
        @property
        def __class__(self):
            asked.append("class")
            return dict

    held = {"a": Raises(), "b": Homeless(), "c": Proxy(), 1: "no name", "plan": metaviz.mesh("dp=2,tp=2")}
    assert metaviz.mesh(namespace=held).names == ("dp", "tp")
    assert asked == []


def test_the_nodes_of_a_trainer_are_counted(needs):
    trainer = needs("lightning.pytorch").Trainer(
        accelerator="cpu",
        devices=4,
        num_nodes=2,
        logger=False,
        enable_checkpointing=False,
        strategy=strategy(needs, "trainer", data_parallel_size=2, tensor_parallel_size=4),
    )
    layout = metaviz.mesh(trainer)
    assert (layout.world, layout.shape, layout.notes) == (trainer.world_size, (2, 4), ())


@pytest.mark.parametrize("kind", ["lightning.fabric.strategies", "lightning.pytorch.strategies"])
def test_the_sizes_that_fsdp_of_lightning_will_make_a_mesh_of_are_awaited(needs, kind):
    layout = metaviz.mesh(needs(kind).FSDPStrategy(device_mesh=(2, 4)))
    assert (layout.state, layout.shape_words) == ("waiting", "replicate=2 × shard=4")
    assert layout.reason == "Lightning makes the mesh of FSDPStrategy when its processes start."


@pytest.mark.parametrize("size", [2.0, True, 0, 10**9])
def test_sizes_of_lightning_that_are_none_are_told(needs, size):
    layout = metaviz.mesh(strategy(needs, data_parallel_size=size, tensor_parallel_size=4))
    assert (layout.axes, layout.ranks, len(layout.notes)) == ((), (), 1)


def test_a_mesh_that_has_a_name_is_found_once_with_what_is_made_of_it():
    with metaviz.mesh("dp=2,tp=4", simulate=True) as world:
        weight = distribute_tensor(torch.zeros(8, 4), world.device_mesh, [Replicate(), Shard(0)])
        layout = metaviz.mesh(world.device_mesh)
        found = look(world=world, weight=weight, layout=layout)
        assert (found.state, found.shape) == ("simulated", (2, 4))
        assert look(weight=weight, bias=weight.clone()).shape == (2, 4)


def test_a_layout_that_was_kept_is_as_its_mesh_is_by_now():
    with fake(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        layout = metaviz.mesh(mesh)
        assert metaviz.mesh(layout).state == "simulated"
    assert metaviz.mesh(layout).state == "stale"
    del mesh
    gc.collect()
    assert metaviz.mesh(layout).state == "stale"


def test_a_model_on_two_meshes_has_both():
    with fake(8):
        dense = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        sparse = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep", "efsdp"))
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for at, each in enumerate((dense, sparse)):
            model[at].weight = nn.Parameter(
                distribute_tensor(torch.zeros(8, 8), each, [Replicate(), Shard(0)])
            )
        found = metaviz.mesh(model)
        assert [(path, each.names) for path, each in found.found.items()] == [
            ("0.weight", ("dp", "tp")),
            ("1.weight", ("ep", "efsdp")),
        ]
        assert list(look(model=model).found) == ["model", "model.1.weight"]
        assert list(look(model=model, dense=dense).found) == ["model.1.weight", "dense"]
