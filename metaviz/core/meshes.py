"""`mesh()`: the mesh of whatever has one or will have one, found without asking what could start something."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from metaviz.core.awaited import awaited
from metaviz.core.devicemesh import is_mesh, read, root_of
from metaviz.core.layout import MeshLayout
from metaviz.core.paths import join, modules
from metaviz.core.simulation import Simulation
from metaviz.core.spec import planned
from metaviz.core.world import world as known_world
from metaviz.errors import BadMesh

_ORDER = ("ready", "simulated", "waiting", "planned", "stale", "unavailable")
_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "accelerate.")
# Where an object of theirs keeps another one that has, or will have, the mesh.
_PARTS = (
    "_strategy",
    "strategy",
    "_accelerator_connector",
    "_connector",
    "_trainer",
    "_fabric",
    "state",
    "parallelism_config",
)


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
        what: A DeviceMesh; Lightning's Fabric, Trainer, strategy or module; torchtitan's ParallelDims; accelerate's
            Accelerator or ParallelismConfig; a sharded module or tensor; a plan such as `"dp=2,tp=4"` or
            `{"pp": 4, "dp": 8, "tp": 8}`, the slowest axis first. None looks among the names of the caller.
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
    several = dict(_meshes_of(what))
    if len(several) > 1:
        return Meshes({path: read(each, ranks_per_host) for path, each in several.items()})
    found = mesh_of(what, ranks_per_host)
    if found is not None and not isinstance(what, MeshLayout):
        return dataclasses.replace(found, origin=_weak(what))
    if found is None:
        raise BadMesh(
            f"An object of type {type(what).__name__} has no mesh. It takes a DeviceMesh, Lightning's Fabric, Trainer "
            "or strategy, torchtitan's ParallelDims, accelerate's Accelerator, a sharded module, or a plan. "
            'Next: metaviz.mesh("dp=2,tp=4")'
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
        return (
            MeshLayout.drawn(self, "text")
            if MeshLayout.drawn
            else f"{len(self)} meshes: {', '.join(self.found)}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        return MeshLayout.drawn(self, "html") if MeshLayout.drawn else None


def among(namespace: Mapping[str, Any], ranks_per_host: int | None) -> MeshLayout | Meshes:
    """What has a mesh among some names; the state of the process where there is nothing."""
    found: dict[str, MeshLayout] = {}
    # Name → the whole of the DeviceMesh behind what is called so.
    wholes: dict[str, Any] = {}
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
        if layout is None:
            continue
        found[name], wholes[name] = layout, _whole(thing)
        for path, other in itertools.islice(_meshes_of(thing), 1, None):
            found[f"{name}.{path}"], wholes[f"{name}.{path}"] = read(other, ranks_per_host), root_of(other)
    for name in _repeated(namespace, wholes):
        del found[name]
    if wrong is not None and not found:
        raise wrong
    if len(found) == 1:
        return next(iter(found.values()))
    # What is there comes before what is awaited.
    found = dict(sorted(found.items(), key=lambda item: _ORDER.index(item[1].state)))
    return Meshes(found) if found else nothing()


def _repeated(namespace: Mapping[str, Any], wholes: Mapping[str, Any]) -> Iterator[str]:
    """Names of modules, tensors and the like whose mesh has been found by another name."""
    named = {id(whole) for name, whole in wholes.items() if is_mesh(namespace.get(name))}
    for name, whole in wholes.items():
        if whole is None or is_mesh(namespace.get(name)):
            continue
        if id(whole) in named:
            yield name
        named.add(id(whole))


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
        return _anew(thing, thing.ranks_per_host if ranks_per_host is None else ranks_per_host)
    if issubclass(type(thing), Simulation):
        return thing.layout if ranks_per_host is None else read(thing.device_mesh, ranks_per_host)
    if is_mesh(thing):
        return read(thing, ranks_per_host)
    space = _space(thing)
    for inner in _inside(thing, space):
        found = mesh_of(inner, ranks_per_host)
        if found is not None:
            return found
    return awaited(thing, space)


def _anew(layout: MeshLayout, ranks_per_host: int | None) -> MeshLayout:
    """A layout as what it was read from is by now."""
    origin = layout.origin() if layout.origin is not None else None
    found = None if origin is None else mesh_of(origin, ranks_per_host)
    if found is not None:
        return dataclasses.replace(found, origin=layout.origin)
    if layout.state in ("ready", "simulated") and known_world().state != layout.state:
        reason = "It was looked at while its process group was there, and that was destroyed since."
        layout = dataclasses.replace(layout, state="stale", reason=reason)
    same = ranks_per_host == layout.ranks_per_host
    return layout if same else dataclasses.replace(layout, ranks_per_host=ranks_per_host)


def _whole(thing: Any) -> Any:
    """The DeviceMesh behind a thing, or the one that it was cut out of; None where there is none."""
    if issubclass(type(thing), MeshLayout):
        origin = thing.origin() if thing.origin is not None else None
        return None if origin is None else _whole(origin)
    if issubclass(type(thing), Simulation):
        return _whole(thing.device_mesh)
    if is_mesh(thing):
        return root_of(thing)
    return next(
        (whole for inner in _inside(thing, _space(thing)) if (whole := _whole(inner)) is not None), None
    )


def _inside(thing: Any, space: Mapping[str, Any]) -> Iterator[Any]:
    """What may hold the mesh of a thing, from the nearest on."""
    for kept in ("_global_meshes", "_meshes", "_fsdp_kwargs", "kwargs"):
        # torchtitan keeps several views of its ranks there, of which "dense" has all axes; Lightning what FSDP takes.
        inner = space.get(kept)
        for name in ("dense", "device_mesh") if type(inner) is dict else ():
            if is_mesh(inner.get(name)):
                yield inner[name]
    for name in ("_device_mesh", "device_mesh", "_world_mesh", "world_mesh"):
        if is_mesh(space.get(name)):
            yield space[name]
    # Of its bases, too: people subclass a Trainer or a module.
    if any(cls.__module__.startswith(_LIBRARIES) for cls in type(thing).__mro__):
        yield from (space[name] for name in _PARTS if space.get(name) is not None)
    if issubclass(type(thing), nn.Module):
        yield from (mesh for _, mesh in itertools.islice(_meshes_of(thing), 1))
    elif _is_sharded(thing):
        yield thing._spec.mesh


def _meshes_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """The meshes that a module is sharded over, by the path of the first tensor on each; parts of one are one."""
    seen: set[int] = set()
    for path, part in modules(thing) if issubclass(type(thing), nn.Module) else ():
        for name, tensor in (_space(part).get("_parameters") or {}).items():
            if _is_sharded(tensor) and id(root_of(tensor._spec.mesh)) not in seen:
                seen.add(id(root_of(tensor._spec.mesh)))
                yield join(path, name), tensor._spec.mesh


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
