"""From a DeviceMesh of torch to a layout, in whatever state it is, without a call that asks the process group.

`DeviceMesh.mesh` of a sub-mesh asks for the rank that is alive now: it raises once the group is gone, and tells of
another mesh once there is a new one. So ranks are read from the numbers that the mesh keeps.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from metaviz.core.checks import of_order
from metaviz.core.layout import Axis, MeshLayout, told
from metaviz.core.world import backend_of, world

# id(mesh) → the mesh and the default group that it was first seen with, both held weakly.
_jobs: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

# So many axes of size 1 are looked for in the name of a flattened one.
_SINGLE = 4


def is_mesh(thing: Any) -> bool:
    """Whether something is a DeviceMesh; asks no attribute of it, and imports nothing."""
    # isinstance() would probe attributes of torch that warn.
    return any(
        cls.__name__ == "DeviceMesh" and cls.__module__.startswith("torch.distributed")
        for cls in type(thing).__mro__
    )


def read(mesh: Any, ranks_per_host: int | None = None) -> MeshLayout:
    """The layout of a DeviceMesh. Of a sub-mesh it is that of the whole, with its axes in focus."""
    root = root_of(mesh)
    names = _names(root)
    aliases = _aliases(root, root, names)
    focus = () if root is mesh else _focus(mesh, root, names, aliases)
    state, reason, step = state_of(root)
    known = world()
    if root is not mesh and state in ("ready", "simulated"):
        # A part can have groups of its own, which end alone.
        state, reason, step = state_of(mesh)
    alive = state in ("ready", "simulated")
    # Of the whole, which has a place for each rank: a sub-mesh has the coordinate of this one in each of its copies.
    rank = known.rank if alive else _rank_at(_copies(root)[0], root, _coordinate(root))
    shown = root
    if root is not mesh and not focus:
        # A mesh that torch has made of another one without telling it: it stands for itself.
        shown, names = mesh, _names(mesh)
        aliases = _aliases(root, mesh, names)
    backends = _backends(shown, names) if alive else {}
    axes = [
        Axis(name, int(size), *backends.get(name, (None, False)))
        for name, size in zip(names, shown.shape, strict=True)
    ]
    copies = _copies(shown)
    if len(copies) > 1:
        # The other axes are there, and torch does not tell what they are called.
        axes.insert(0, Axis(_free("copy", names), len(copies)))
        focus = names
    layout = MeshLayout(
        tuple(axes),
        tuple(itertools.chain.from_iterable(copies)),
        state,
        rank,
        known.size if alive else None,
        shown.device_type,
        ranks_per_host,
        focus,
        aliases,
        reason=reason,
        step=step,
    )
    return dataclasses.replace(layout, notes=tuple(_notes(layout, shown, names)))


def state_of(mesh: Any) -> tuple[str, str, str | None]:
    """State of a mesh, the reason in a sentence, and the next step as code."""
    names = getattr(mesh, "_dim_group_names", None)
    infos = getattr(mesh, "_dim_group_infos", None)
    if names is None and infos is None:
        return "planned", "It was made without process groups: a plan.", None
    known = world()
    first = ""
    if known.state in ("waiting", "unavailable"):
        reason = "Its process group was destroyed: nothing can be sent over it any more."
        first = "torch.distributed.init_process_group(); "
    elif _is_of_another_job(mesh):
        reason = "It belongs to a process group that was destroyed; the one there is now is another one."
    elif _is_recycled(mesh, names, infos):
        reason = "Groups that it communicates with were destroyed, or belong to a job that is over."
    else:
        return known.state, known.reason, None
    return "stale", reason, f"{first}mesh = {_made_again(mesh)}"


def _made_again(mesh: Any) -> str:
    names = "" if mesh.mesh_dim_names is None else f", mesh_dim_names={tuple(mesh.mesh_dim_names)}"
    shape, ranks = tuple(map(int, mesh.shape)), _copies(mesh)[0]
    if ranks == list(range(len(ranks))):
        return f'init_device_mesh("{mesh.device_type}", {shape}{names})'
    return f'DeviceMesh("{mesh.device_type}", torch.tensor({told(ranks, 400)}).reshape({shape}){names})'


def _is_recycled(mesh: Any, names: Any, infos: Any) -> bool:
    """Whether the groups of a mesh are not those of today. Their names are counters, which a new job counts anew."""
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d

    alive = {id(group) for group in distributed_c10d._world.pg_map}
    known = getattr(root_of(mesh), "_pg_registry", None)
    if known and names:
        return any(id(known[name]) not in alive for name in names if name in known)
    # Older torch: a mesh keeps no group, only names, and the ranks that it had.
    had = [(name, None) for name in names] if names is not None else [(info[2], info[1]) for info in infos]
    try:
        for name, ranks in had:
            group = distributed_c10d._resolve_process_group(name)
            if id(group) not in alive:
                return True
            if ranks is not None and sorted(distributed.get_process_group_ranks(group)) != sorted(ranks):
                return True
    except (RuntimeError, ValueError, KeyError):
        return True
    return False


def _is_of_another_job(mesh: Any) -> bool:
    """Whether a mesh was seen before under another default group than that of today.

    A rank outside of its mesh has no group in it to go by, and nor has any in older torch.
    """
    import torch.distributed as distributed

    now = distributed.group.WORLD
    _, seen = _jobs.get(id(mesh), (None, None))
    if seen is None:
        key = id(mesh)
        # By identity: meshes with the same numbers are equal to torch.
        _jobs[key] = weakref.ref(mesh, lambda _: _jobs.pop(key, None)), weakref.ref(now)
        return False
    return seen() is not now


def root_of(mesh: Any) -> Any:
    """The DeviceMesh that one was cut out of; itself if it was not."""
    for ask in ("_get_root_mesh", "_root_mesh"):
        found = getattr(mesh, ask, None)
        found = found() if callable(found) else found
        if found is not None:
            return found
    from torch.distributed import device_mesh

    resources = getattr(device_mesh, "_mesh_resources", None)
    for ask in ("get_root_mesh", "get_parent_mesh"):
        method = getattr(resources, ask, None)
        if method is not None:
            found = method(mesh) or mesh
            return found if _is_part(mesh, found, resources) else mesh
    return mesh


def _is_part(mesh: Any, whole: Any, resources: Any) -> bool:
    """Whether a mesh of older torch was cut out of another one: it looks them up by their numbers, not as objects."""
    infos, own = getattr(whole, "_dim_group_infos", ()), getattr(mesh, "_dim_group_infos", ())
    if all(any(info is other for other in infos) for info in own):
        return True
    flattened = getattr(resources, "root_to_flatten_mapping", {}).get(whole, {})
    if any(each is mesh for each in flattened.values()):
        return True
    # An equal mesh that was made before can stand for the whole, unless its job is over.
    return all(info in infos for info in own) and state_of(whole)[0] != "stale"


def _names(mesh: Any) -> tuple[str, ...]:
    """A name for each axis. The constructor of torch takes names that are missing, too many, or there twice."""
    given, many = mesh.mesh_dim_names or (), len(mesh.shape)
    if many == 1 and len(given) > 1 and all(len(name) == 1 for name in given):
        # ("dp") is a string, and was taken apart.
        given = ("".join(given),)
    found: list[str] = []
    for index in range(many):
        name = given[index] if index < len(given) else f"axis_{index}"
        found.append(_free(str(name), found, f"_{index}"))
    return tuple(found)


def _free(name: str, taken: Sequence[str], ending: str = "_") -> str:
    """A name that no other axis has."""
    while name in taken:
        name += ending
    return name


def _aliases(root: Any, mesh: Any, names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Flattened axes of a mesh, which its root knows; slicing by their names would warn."""
    from torch.distributed import device_mesh

    # Older torch knows them by their numbers.
    kept = getattr(getattr(device_mesh, "_mesh_resources", None), "flatten_name_to_root_dims", {})
    if isinstance(kept, dict) and root is mesh and root in kept:
        return {alias: tuple(names[axis] for axis in axes) for alias, axes in kept[root].items()}
    found = getattr(root, "_flatten_mapping", None) or {}
    if not found:
        return {}
    axes = tuple(Axis(name, int(size)) for name, size in zip(names, mesh.shape, strict=True))
    layout = MeshLayout(axes, tuple(_copies(mesh)[0]))
    covered = {
        alias: _covered(layout, alias, _copies(flat)[0])
        for alias, flat in found.items()
        if alias not in names
    }
    return {alias: axes for alias, axes in covered.items() if axes}


def _covered(layout: MeshLayout, alias: str, group: Sequence[int]) -> tuple[str, ...]:
    """Which axes of a mesh a flattened one stands for, whose first group is given; `()` if that is no group of it.

    Axes of size 1 leave no trace in a group: those that the name tells, as torch would make it, are taken.
    """
    if not all(rank in layout.place_of for rank in group):
        return ()
    ways = [layout.coordinate_of(rank) for rank in group]
    # The faster an axis, the sooner it has another number.
    turns = [
        next((at for at, way in enumerate(ways) if way[axis] != ways[0][axis]), 0)
        for axis in range(len(layout.axes))
    ]
    order = sorted((axis for axis, turn in enumerate(turns) if turn), key=lambda axis: -turns[axis])
    found = tuple(layout.names[axis] for axis in order)
    if found and layout.group_along(found, group[0]) != tuple(group):
        return ()
    single = [axis.name for axis in layout.axes if axis.size == 1]
    for many in range(min(len(single), _SINGLE) + 1):
        for more in itertools.combinations(single, many):
            named = tuple(name for name in layout.names if name in found or name in more)
            if "_".join(named) == alias:
                return named
    return found or tuple(single[:1])


def _focus(
    mesh: Any, root: Any, names: tuple[str, ...], aliases: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The axes of a mesh that a part of it was cut along; `()` if it is none of its own, whatever it is called."""
    covered: list[str] = []
    for name in mesh.mesh_dim_names or ():
        if name not in names and name not in aliases:
            return ()
        covered += aliases.get(name) or (name,)
    sizes = dict(zip(names, map(int, root.shape), strict=True))
    if len(set(covered)) != len(covered) or not covered:
        return ()
    layout = MeshLayout(tuple(Axis(n, s) for n, s in sizes.items()), tuple(_copies(root)[0]))
    groups = layout.groups(*covered)
    # Older torch knows the copy of this process alone.
    return tuple(covered) if all(tuple(copy) in groups for copy in _copies(mesh)[:1]) else ()


def _copies(mesh: Any) -> list[list[int]]:
    """Each copy of a (sub-)mesh as ranks row by row; of older torch, that of this process alone."""
    layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_flatten_rank_map", None)
    if layout is None or ranks is None:
        # A plain attribute there, and no op is needed to read it.
        with torch._C.DisableTorchFunction():
            return [_flat(mesh.mesh.tolist())]
    offsets = [sum(steps) for steps in itertools.product(*(_offsets(axis) for axis in layout))]
    done, found = set(), []
    for start in range(len(ranks)):
        if start not in done:
            places = [start + offset for offset in offsets]
            done.update(places)
            found.append([int(ranks[place]) for place in places])
    return found


def _offsets(axis: Any) -> list[int]:
    """Steps along one axis of a layout of torch, which may itself have several sizes."""
    sizes = axis.shape if isinstance(axis.shape, tuple) else (axis.shape,)
    strides = axis.stride if isinstance(axis.stride, tuple) else (axis.stride,)
    places = itertools.product(*(range(size) for size in sizes))
    return [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in places] or [0]


def _flat(nested: Any) -> list[int]:
    return [nested] if isinstance(nested, int) else [each for part in nested for each in _flat(part)]


def _coordinate(mesh: Any) -> tuple[int, ...] | None:
    """Where this process stood when the mesh was made."""
    found = getattr(mesh, "_coordinate_on_dim", None)
    return None if found is None else tuple(int(at) for at in found)


def _rank_at(ranks: Sequence[int], mesh: Any, coordinate: tuple[int, ...] | None) -> int | None:
    if coordinate is None or len(coordinate) != len(mesh.shape):
        return None
    place = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        place = place * int(size) + at
    return ranks[place] if place < len(ranks) else None


def _backends(mesh: Any, names: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Backend of each axis, and whether its group is the default one."""
    import torch.distributed as distributed

    found = {}
    for index, name in enumerate(names):
        try:
            group = mesh.get_group(index)
            found[name] = backend_of(group), group is distributed.group.WORLD
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError):
            # This process is not on the mesh, or the axis has a group of its own that is none.
            continue
    return found


def _notes(layout: MeshLayout, mesh: Any, names: tuple[str, ...]) -> Iterator[str]:
    if layout.rank is not None and layout.rank not in layout.place_of:
        yield f"This process (rank {layout.rank}) is not on the mesh."
    given = tuple(mesh.mesh_dim_names or names)
    if given != names:
        yield f"Torch has the names {given!r} for its axes; they are {names!r} here."
    if len(layout.axes) > len(names):
        yield f"{layout.names[0]}: the other axes of these ranks, as torch does not tell their names."
    yield from of_order(layout)
