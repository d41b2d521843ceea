"""Meshes that a library has been told of and will make itself: Lightning, torchtitan, accelerate.

Only what their objects keep is read. To ask them for the mesh is what fails too early, or makes it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

from metaviz.core.layout import Axis, MeshLayout, told
from metaviz.core.spec import MOST, planned
from metaviz.core.world import world as known_world

_TITAN = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Source: accelerate 1.15, parallelism_config.py, `_get_mesh` and `build_device_mesh`.
_ACCELERATE = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_AUTO = {"data_parallel": "nodes", "tensor_parallel": "devices on a node"}
_JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


def awaited(thing: Any, space: Mapping[str, Any]) -> MeshLayout | None:
    """The mesh that a library will make of what one of its objects says; None if it says nothing of one.

    Args:
        thing: The object.
        space: What it keeps.

    Raises:
        BadMesh: Its sizes do not go together.
    """
    if "_device_mesh" in space and "_tensor_parallel_size" in space:
        return _model_parallel(thing, space)
    if {"tp", "pp", "cp", "dp_shard", "dp_replicate"} <= space.keys():
        return _titan(space)
    if {"tp_size", "cp_size", "dp_shard_size", "dp_replicate_size"} <= space.keys():
        return _accelerate(space)
    for name in ("_fsdp_kwargs", "kwargs"):
        # Lightning's FSDPStrategy, in Fabric and with a Trainer.
        options = space.get(name)
        sizes = options.get("device_mesh") if type(options) is dict else None
        if type(sizes) is tuple and sizes and all(type(size) is int and 0 < size <= MOST for size in sizes):
            return _fsdp(thing, space, sizes)
    return None


def _model_parallel(strategy: Any, space: Mapping[str, Any]) -> MeshLayout:
    """The mesh that a ModelParallelStrategy of Lightning will make when its processes start.

    Source: lightning 2.6, fabric/strategies/model_parallel.py: the axes data_parallel and tensor_parallel; "auto"
    stands for the number of nodes and of devices on each.
    """
    devices = space.get("_parallel_devices")
    per_host, nodes = len(devices) if devices else None, _nodes(space)
    asked = {name: space.get(f"_{name}_size") for name in ("data_parallel", "tensor_parallel")}
    # A strategy is told of nodes and devices together, by the Fabric or Trainer that it is given to.
    auto = {"data_parallel": nodes if devices else None, "tensor_parallel": per_host}
    sizes = {name: auto[name] if size == "auto" else size for name, size in asked.items()}
    notes = [
        f"{name} is 'auto': as many as there are {_AUTO[name]}."
        if asked[name] == "auto"
        else f"{name}_size={told(size)} is no size. Next: {name}_size=2"
        for name, size in sizes.items()
        if type(size) is not int or size < 1
    ]
    if not notes and math.prod(sizes.values()) > MOST:
        notes = [f"{told(tuple(sizes.values()))}: more than {MOST:,} ranks are not laid out."]
    if notes:
        return _waiting(strategy, {}, devices, nodes, notes)
    if per_host is not None and math.prod(sizes.values()) != nodes * per_host:
        refusal = lightning_refusal(*sizes.values(), nodes * per_host)
        notes = [f"It will fail to start. RuntimeError: {refusal}"]
    return _waiting(strategy, sizes, devices, nodes, notes)


def _fsdp(strategy: Any, space: Mapping[str, Any], sizes: tuple[int, ...]) -> MeshLayout:
    """The mesh that an FSDPStrategy of Lightning will make of the sizes that it was given.

    Source: lightning 2.6, fabric/strategies/fsdp.py, `setup_environment`: on cuda, and without names. The first of two
    axes replicates, the last one shards.
    """
    names = ("replicate", "shard") if len(sizes) == 2 else tuple(f"axis_{at}" for at in range(len(sizes)))
    devices = space.get("parallel_devices") or space.get("_parallel_devices")
    nodes, whole, notes = _nodes(space), math.prod(sizes), []
    if whole > MOST:
        return _waiting(strategy, {}, devices, nodes, [f"More than {MOST:,} ranks are not laid out."])
    if devices and whole != nodes * len(devices):
        notes.append(f"It takes {whole:,} ranks, and the job has {nodes * len(devices):,}.")
    if len(sizes) == 2:
        notes.append("Lightning gives the axes no names; they are what they do here.")
    return _waiting(strategy, dict(zip(names, sizes, strict=True)), devices, nodes, notes)


def _nodes(space: Mapping[str, Any]) -> int:
    """How many nodes a strategy of Lightning runs on: Fabric's and the Trainer's keep it by two names."""
    found = space.get("_num_nodes", space.get("num_nodes", 1))
    return found if type(found) is int and found > 0 else 1


def _waiting(
    strategy: Any, sizes: Mapping[str, int], devices: Any, nodes: int, notes: list[str]
) -> MeshLayout:
    """The mesh of a strategy of Lightning whose processes have not started."""
    reason, step = _too_early(type(strategy))
    per_host = len(devices) if devices else None
    return MeshLayout(
        tuple(Axis(name, size) for name, size in sizes.items()),
        tuple(range(math.prod(sizes.values()))) if sizes else (),
        "waiting",
        known_world().rank,
        None if per_host is None else nodes * per_host,
        devices[0].type if devices else "cuda",
        per_host,
        notes=tuple(notes),
        reason=reason,
        step=step,
    )


def _too_early(strategy: type) -> tuple[str, str]:
    """Why Lightning has no mesh yet for a class of strategies, and the next step as code."""
    reason = f"Lightning makes the mesh of {strategy.__name__} when its processes start."
    if hasattr(strategy, "device_mesh"):
        reason += (
            " Until then strategy.device_mesh raises RuntimeError: Accessing the device mesh before processes have "
            "initialized is not allowed."
        )
    if hasattr(sys, "ps1"):
        plan = 'metaviz.mesh("data_parallel=2,tensor_parallel=4")'
        return (
            f"{reason} It does not start this strategy in a notebook at all.",
            f"{plan}  # a plan; or run a script that calls fabric.launch()",
        )
    return reason, "fabric.launch()  # with a Trainer: use self.device_mesh in configure_model"


def lightning_refusal(data_parallel: int, tensor_parallel: int, world: int) -> str:
    """What Lightning says of sizes that do not make the world.

    Source: lightning 2.6, fabric/strategies/model_parallel.py, `_setup_device_mesh`.
    """
    return (
        f"The sizes `data_parallel_size={data_parallel}` and `tensor_parallel_size={tensor_parallel}` multiplied "
        f"should equal the world size ({world})."
    )


def _titan(space: Mapping[str, Any]) -> MeshLayout:
    """The plan of torchtitan's ParallelDims. cp shards data as dp_shard does, and multiplies with it."""
    world = space.get("world_size")
    sizes = {name: space[name] for name in _TITAN if isinstance(space.get(name), int)}
    layout = planned(sizes, world=world if isinstance(world, int) and -1 in sizes.values() else None)
    notes, parts = list(layout.notes), dict(zip(layout.names, layout.shape, strict=True))
    within = parts.get("dp_shard", 1) * parts.get("cp", 1)
    if parts.get("cp", 1) > 1:
        notes.append(f"Parameters are sharded along dp_shard and cp together: {within} ways.")
    experts = space.get("ep")
    if type(experts) is int and experts > 1:
        ranks = within * parts.get("tp", 1)
        fits = f"ep={experts} is cut out of dp_shard × cp × tp = {ranks}"
        notes.append(f"{fits}, and does not divide it." if ranks % experts else f"{fits}: the rest is efsdp.")
    if isinstance(world, int) and layout.size != world:
        notes.append(
            f"{layout.shape_words} = {layout.size:,} ranks, and world_size={world:,}: torchtitan refuses this."
        )
    return dataclasses.replace(
        layout, notes=tuple(notes), world=world if isinstance(world, int) else layout.size
    )


def _accelerate(space: Mapping[str, Any]) -> MeshLayout:
    """The plan of accelerate's ParallelismConfig, which makes axes of those sizes alone that are more than 1."""
    sizes = {name: space.get(f"{name}_size") for name in _ACCELERATE}
    used = {name: size for name, size in sizes.items() if isinstance(size, int) and size != 1}
    layout = planned(used or {"dp_shard": 1})
    for alias, parts in _JOINED.items():
        covered = tuple(name for name in parts if name in used)
        if covered:
            layout = layout.flattened(covered, alias)
    return layout
