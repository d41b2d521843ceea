"""From a DeviceMesh of torch to a layout, in whatever state it is, without a call that asks the process group.

`DeviceMesh.mesh` of a sub-mesh asks for the rank that is alive now: it raises once the group is gone, and tells of
another mesh once there is a new one. So ranks are read from the numbers that the mesh keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from metaviz.core.layout import Axis, MeshLayout
from metaviz.core.world import world


def is_mesh(thing: Any) -> bool:
    """Whether something is a DeviceMesh; asks no attribute of it, and imports nothing."""
    # isinstance() would probe attributes of torch that warn.
    return any(
        cls.__name__ == "DeviceMesh" and cls.__module__.startswith("torch.distributed")
        for cls in type(thing).__mro__
    )


def read(mesh: Any, ranks_per_host: int | None = None) -> MeshLayout:
    """The layout of a DeviceMesh. Of a sub-mesh it is that of the whole, with its axes in focus."""
    root = _root(mesh)
    names, aliases = _names(root), _aliases(root)
    focus = () if root is mesh else _focus(mesh, names, aliases)
    if root is not mesh and not focus:
        # A mesh that torch has made of another one without telling it: it stands for itself.
        root, names, aliases = mesh, _names(mesh), {}
    state, reason, step = state_of(root)
    known = world()
    alive = state in ("ready", "simulated")
    copies = _copies(root)
    coordinate = _coordinate(root)
    rank = known.rank if alive else _rank_at(copies[0], root, coordinate)
    ranks = next((copy for copy in copies if rank in copy), copies[0])
    backends = _backends(root, names) if alive else {}
    axes = [
        Axis(name, int(size), *backends.get(name, (None, False)))
        for name, size in zip(names, root.shape, strict=True)
    ]
    return MeshLayout(
        tuple(axes),
        tuple(ranks),
        state,
        rank,
        known.size if alive else None,
        root.device_type,
        ranks_per_host,
        focus,
        aliases,
        tuple(_notes(ranks, rank, coordinate, alive)),
        reason,
        step,
    )


def state_of(mesh: Any) -> tuple[str, str, str | None]:
    """State of a mesh, the reason in a sentence, and the next step as code."""
    names = getattr(mesh, "_dim_group_names", None)
    infos = getattr(mesh, "_dim_group_infos", None)
    if names is None and infos is None:
        return "planned", "It was made without process groups: a plan.", None
    known = world()
    if known.state in ("waiting", "unavailable"):
        again = f"torch.distributed.init_process_group(); mesh = {_made_again(mesh)}"
        return "stale", "Its process group was destroyed: nothing can be sent over it any more.", again
    if _is_recycled(mesh, names, infos):
        again = f"mesh = {_made_again(mesh)}"
        return (
            "stale",
            "It belongs to a process group that was destroyed; the one there is now is another one.",
            again,
        )
    return known.state, known.reason, None


def _made_again(mesh: Any) -> str:
    names = "" if mesh.mesh_dim_names is None else f", mesh_dim_names={tuple(mesh.mesh_dim_names)}"
    return f'init_device_mesh("{mesh.device_type}", {tuple(map(int, mesh.shape))}{names})'


def _is_recycled(mesh: Any, names: Any, infos: Any) -> bool:
    """Whether the groups of a mesh are not those of today. Their names are counters, which a new job counts anew."""
    from torch.distributed import distributed_c10d

    alive = {id(group) for group in distributed_c10d._world.pg_map}
    known = getattr(_root(mesh), "_pg_registry", None)
    if known and names:
        return any(id(known[name]) not in alive for name in names if name in known)
    if names is None:
        names = [info[2] for info in infos]
    try:
        return any(id(distributed_c10d._resolve_process_group(name)) not in alive for name in names)
    except (RuntimeError, ValueError, KeyError):
        return True


def _root(mesh: Any) -> Any:
    """The mesh that a mesh was cut out of; itself if it was not."""
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
            return method(mesh) or mesh
    return mesh


def _names(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"axis_{i}" for i in range(len(mesh.shape))))


def _aliases(root: Any) -> dict[str, tuple[str, ...]]:
    """Flattened axes of a mesh; slicing by their names would warn."""
    found = dict(getattr(root, "_flatten_mapping", None) or {})
    if not found:
        from torch.distributed import device_mesh

        kept = getattr(getattr(device_mesh, "_mesh_resources", None), "root_to_flatten_mapping", {})
        found = dict(kept.get(root, {})) if isinstance(kept, dict) else {}
    names = _names(root)
    whole = _copies(root)[0]
    return {
        alias: covered
        for alias, mesh in found.items()
        if (covered := _covered(whole, root.shape, names, _copies(mesh)))
    }


def _covered(
    whole: Sequence[int], shape: Sequence[int], names: Sequence[str], copies: list[list[int]]
) -> tuple[str, ...]:
    """Which axes of a mesh the groups of a flattened one run along."""
    layout = MeshLayout(tuple(Axis(n, int(s)) for n, s in zip(names, shape, strict=True)), tuple(whole))
    wanted = sorted(map(tuple, copies))
    for many in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, many):
            groups = layout.groups(*chosen)
            if sorted(groups) == wanted or any(list(group) in copies for group in groups):
                return chosen
    return ()


def _focus(mesh: Any, names: tuple[str, ...], aliases: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    covered: list[str] = []
    for name in mesh.mesh_dim_names or ():
        if name not in names and name not in aliases:
            return ()
        covered += aliases.get(name) or (name,)
    return tuple(covered)


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
            found[name] = str(distributed.get_backend(group)), group is distributed.group.WORLD
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError):
            # This process is not on the mesh, or the axis has a group of its own that is none.
            continue
    return found


def _notes(
    ranks: Sequence[int], rank: int | None, coordinate: tuple[int, ...] | None, alive: bool
) -> list[str]:
    notes = []
    if alive and rank is not None and rank not in ranks:
        notes.append(f"This process (rank {rank}) is not on the mesh.")
    if list(ranks) != sorted(ranks):
        notes.append(
            "Ranks are not in ascending order here, while torch sorts the ranks of a group: get_local_rank() and the "
            "coordinate can differ."
        )
    return notes
