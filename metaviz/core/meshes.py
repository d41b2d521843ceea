"""`mesh()`: the mesh of whatever has one or will have one, found without asking what could start something."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from metaviz.core.devicemesh import is_mesh, read
from metaviz.core.layout import Axis, MeshLayout
from metaviz.core.paths import modules
from metaviz.core.simulation import Simulation
from metaviz.core.spec import planned
from metaviz.core.world import world as known_world
from metaviz.errors import BadMesh

_ORDER = ("ready", "simulated", "waiting", "planned", "stale", "unavailable")
_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_TITAN = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def mesh(
    what: Any = None,
    *,
    simulate: bool = False,
    world: int | None = None,
    rank: int | None = None,
    ranks: Sequence[int] | None = None,
    ranks_per_host: int | None = None,
    device_type: str | None = None,
    model: Any = None,
    namespace: Mapping[str, Any] | None = None,
) -> MeshLayout | Meshes | Simulation:
    """The layout of a device mesh: one that is there, one that is awaited, or a plan. Nothing is started to find out.

    Args:
        what: A DeviceMesh; Lightning's Fabric, Trainer, strategy or module; torchtitan's ParallelDims; a sharded
            module or tensor; a plan such as `"dp=2,tp=4"` or `{"pp": 4, "dp": 8, "tp": 8}`, the slowest axis first.
            None looks among the names of the caller.
        simulate: Make the plan a mesh under torch's fake backend, in this process alone: a :class:`Simulation`.
        world: Of a plan: how many ranks the job will have. A size may then be -1.
        rank: Whose eyes to see a plan or a simulated mesh with.
        ranks: Of a plan: the rank at each place, row by row.
        ranks_per_host: How many ranks a host has, where torch cannot know: ranks are counted host by host.
        device_type: Of a plan: `"cuda"` if None, and `"cpu"` for a simulated one.
        model: Of a plan: a model that shall run on it. What cannot be divided among its ranks is told.
        namespace: Where to look for meshes by name; what the caller sees if None.

    Returns:
        The layout; of several that were found, all of them.

    Raises:
        BadMesh: A plan cannot be read, or what is given has no mesh.

    Example:
        >>> metaviz.mesh({"pp": 2, "tp": 4}, rank=5).coordinate
        (1, 1)
    """
    if isinstance(what, str | Mapping):
        options = {"world": world, "rank": rank, "ranks": ranks, "ranks_per_host": ranks_per_host}
        options["model"] = model
        layout = planned(what, device_type=device_type or ("cpu" if simulate else "cuda"), **options)
        return Simulation(layout) if simulate else layout
    if simulate or any(each is not None for each in (world, rank, ranks, device_type, model)):
        raise BadMesh(
            "simulate, world, rank, ranks, device_type and model belong to a plan. "
            'Next: metaviz.mesh("dp=2,tp=4", simulate=True)'
        )
    if what is None:
        caller = sys._getframe(1)
        return among(
            {**caller.f_globals, **caller.f_locals} if namespace is None else namespace, ranks_per_host
        )
    found = mesh_of(what, ranks_per_host)
    if found is not None and not isinstance(what, MeshLayout):
        return dataclasses.replace(found, origin=_weak(what))
    if found is None:
        raise BadMesh(
            f"An object of type {type(what).__name__} has no mesh. It takes a DeviceMesh, Lightning's Fabric, Trainer "
            'or strategy, torchtitan\'s ParallelDims, a sharded module, or a plan. Next: metaviz.mesh("dp=2,tp=4")'
        )
    return found


def _weak(thing: Any) -> Callable[[], Any] | None:
    """A way back to a thing that does not keep it alive; None where there is none."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return None


@dataclasses.dataclass(frozen=True)
class Meshes(Sequence[MeshLayout]):
    """Several meshes that were found, by the names of what has them. Index by number or name."""

    found: Mapping[str, MeshLayout]

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            if which not in self.found:
                raise BadMesh(
                    f"Nothing called {which!r} has a mesh here. There are: {', '.join(self.found)}."
                )
            return self.found[which]
        return list(self.found.values())[which]

    def __str__(self) -> str:
        lines = [f"{len(self)} meshes: choose one by name, metaviz.mesh({next(iter(self.found))})"]
        return "\n".join(
            [
                *lines,
                *(
                    f"  {name}: {each.shape_words or each.state}, {each.state}"
                    for name, each in self.found.items()
                ),
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        return MeshLayout.drawn(self, "html") if MeshLayout.drawn else None


def among(namespace: Mapping[str, Any], ranks_per_host: int | None) -> MeshLayout | Meshes:
    """What has a mesh among some names; the state of the process where there is nothing."""
    found: dict[str, MeshLayout] = {}
    seen: set[int] = set()
    wrong: BadMesh | None = None
    for name, thing in list(namespace.items()):
        # isinstance() would ask a `__class__` property, and a lazy module would be imported for it.
        named = type(name) is str and not name.startswith("_")
        if not named or id(thing) in seen or issubclass(type(thing), type):
            continue
        seen.add(id(thing))
        try:
            layout = mesh_of(thing, ranks_per_host)
        except BadMesh as error:
            # It does not hide the others.
            wrong = wrong or BadMesh(f"{name}: {error}")
            continue
        except Exception:
            # Something that cannot even be looked at is no mesh.
            continue
        if layout is not None:
            found[name] = layout
    if wrong is not None and not found:
        raise wrong
    if len(found) == 1:
        return next(iter(found.values()))
    # What is there comes before what is awaited.
    found = dict(sorted(found.items(), key=lambda item: _ORDER.index(item[1].state)))
    return Meshes(found) if found else nothing()


def nothing() -> MeshLayout:
    """The layout of a process in which nothing has a mesh: what is known, and what to do."""
    known = known_world()
    state, reason, step = known.state, known.reason, known.step
    if state in ("ready", "simulated"):
        state = "waiting"
        reason += " No name holds a mesh yet."
        step = f'mesh = torch.distributed.device_mesh.init_device_mesh("cpu", ({known.size},), mesh_dim_names=("dp",))'
    return MeshLayout((), (), state, known.rank, known.size, "cpu", reason=reason, step=step)


def mesh_of(thing: Any, ranks_per_host: int | None = None) -> MeshLayout | None:
    """The layout of something that has a mesh or will have one; None for all else. No property of it is asked."""
    if issubclass(type(thing), MeshLayout):
        return thing if ranks_per_host is None else dataclasses.replace(thing, ranks_per_host=ranks_per_host)
    if issubclass(type(thing), Simulation):
        return thing.layout
    if is_mesh(thing):
        return read(thing, ranks_per_host)
    space = _space(thing)
    for inner in _inside(thing, space):
        found = mesh_of(inner, ranks_per_host)
        if found is not None:
            return found
    if "_device_mesh" in space and "_tensor_parallel_size" in space:
        return _awaited(thing, space)
    if {"tp", "pp", "cp", "dp_shard", "dp_replicate"} <= space.keys():
        return _titan(space)
    return None


def _inside(thing: Any, space: Mapping[str, Any]) -> Iterator[Any]:
    """What may hold the mesh of a thing, from the nearest on."""
    for name in ("_device_mesh", "device_mesh", "_world_mesh", "world_mesh"):
        if is_mesh(space.get(name)):
            yield space[name]
    # Of its bases, too: people subclass a Trainer or a module.
    if any(cls.__module__.startswith(_LIGHTNING) for cls in type(thing).__mro__):
        for name in ("_strategy", "strategy", "_accelerator_connector", "_connector", "_trainer", "_fabric"):
            if space.get(name) is not None:
                yield space[name]
    if issubclass(type(thing), nn.Module):
        for _, part in modules(thing):
            for tensor in (_space(part).get("_parameters") or {}).values():
                if _is_sharded(tensor):
                    yield tensor._spec.mesh
                    return
    elif _is_sharded(thing):
        yield thing._spec.mesh


def _is_sharded(tensor: Any) -> bool:
    """Whether something is a DTensor; its class is looked up by name, so that nothing is imported for it."""
    return any(
        cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed")
        for cls in type(tensor).__mro__
    )


def _space(thing: Any) -> Mapping[str, Any]:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if type(found) is dict else {}


def _awaited(strategy: Any, space: Mapping[str, Any]) -> MeshLayout:
    """The mesh that a ModelParallelStrategy of Lightning will make when its processes start.

    Source: lightning 2.6, fabric/strategies/model_parallel.py: the axes data_parallel and tensor_parallel; "auto"
    stands for the number of nodes and of devices on each.
    """
    devices = space.get("_parallel_devices")
    per_host = len(devices) if devices else None
    nodes = space.get("_num_nodes", 1)
    sizes = {
        "data_parallel": nodes
        if space.get("_data_parallel_size") == "auto"
        else space.get("_data_parallel_size"),
        "tensor_parallel": per_host
        if space.get("_tensor_parallel_size") == "auto"
        else space.get("_tensor_parallel_size"),
    }
    reason, step = _too_early(type(strategy).__name__)
    known = all(isinstance(size, int) for size in sizes.values())
    axes = tuple(Axis(name, size) for name, size in sizes.items() if isinstance(size, int))
    notes = [
        f"{name} is 'auto': as many as there are devices on a node."
        for name, size in sizes.items()
        if not isinstance(size, int)
    ]
    if (
        known
        and per_host is not None
        and sizes["data_parallel"] * sizes["tensor_parallel"] != nodes * per_host
    ):
        notes.append(
            "It will fail to start. RuntimeError: "
            + lightning_refusal(sizes["data_parallel"], sizes["tensor_parallel"], nodes * per_host)
        )
    whole = MeshLayout(axes, (), "waiting") if known else None
    ranks = tuple(range(whole.size)) if whole is not None else ()
    return MeshLayout(
        axes if known else (),
        ranks,
        "waiting",
        known_world().rank,
        None if per_host is None else nodes * per_host,
        devices[0].type if devices else "cuda",
        per_host,
        notes=tuple(notes),
        reason=reason,
        step=step,
    )


def _too_early(called: str) -> tuple[str, str]:
    """Why Lightning has no mesh yet, and the next step as code."""
    reason = (
        f"Lightning makes the mesh of {called} when its processes start. Until then strategy.device_mesh raises "
        "RuntimeError: Accessing the device mesh before processes have initialized is not allowed."
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
    notes = list(layout.notes)
    if isinstance(world, int) and layout.size != world:
        notes.append(
            f"{layout.shape_words} = {layout.size:,} ranks, and world_size={world:,}: torchtitan refuses this."
        )
    return dataclasses.replace(
        layout, notes=tuple(notes), world=world if isinstance(world, int) else layout.size
    )
