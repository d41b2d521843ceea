"""`sharding()`: how the tensors of a model lie over a mesh, those that are sharded and those that shall be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from metaviz.core.devicemesh import read
from metaviz.core.layout import Axis, MeshLayout
from metaviz.core.meshes import mesh as layout_of
from metaviz.core.paths import Model, Place, glob, is_glob, some
from metaviz.core.sharding import Load, Placement, Sharding, load, sharding_of
from metaviz.errors import BadMesh, UnknownPath

_DATA = ("dp", "dp_shard", "fsdp", "data_parallel")
_TENSOR = ("tp", "tensor_parallel")


def sharding(
    model: nn.Module | torch.Tensor,
    path: str = "",
    *,
    mesh: MeshLayout | str | Any | None = None,
    fsdp: str | None = None,
    tp: Mapping[str, int] | None = None,
) -> Sharding | Load:
    """Which rank holds which part of a tensor, or how many bytes of a model each rank holds.

    Without `mesh`, tensors that are sharded (DTensor) are looked at as they are, and others count as replicated. With a
    planned mesh it is what FSDP and tensor parallelism would do with a model that is not sharded yet.

    Args:
        model: A model, or a DTensor.
        path: A tensor of the model, or a module for all that is below it.
        mesh: A plan, from :func:`metaviz.mesh`, or what it takes.
        fsdp: With a plan: the axis along which each parameter is cut in its dim 0, as `fully_shard` does; it may be a
            flattened one. The axis named `dp`, `dp_shard`, `fsdp` or `data_parallel` if None; `""` cuts nothing.
        tp: With a plan: paths or globs of modules or parameters and the dim that the axis `tp` or `tensor_parallel`
            cuts: 0 for column-wise, 1 for row-wise, of Linear layers; of an Embedding the other way round. A bias of a
            row-wise layer stays whole.

    Returns:
        The :class:`Sharding` of one tensor; for a module the :class:`Load` of the ranks.

    Raises:
        UnknownPath: There is nothing at the path.
        BadMesh: Nothing is sharded, and there is no plan; or the plan has no such axis.

    Example:
        >>> plan = metaviz.mesh("dp=2,tp=4")
        >>> metaviz.sharding(torch.nn.Linear(64, 64), "weight", mesh=plan, tp={"weight": 0}).shape_on(0)
        (8, 64)
    """
    if mesh is None and (fsdp is not None or tp):
        raise BadMesh(
            'fsdp and tp belong to a plan. Next: metaviz.sharding(model, mesh=metaviz.mesh("dp=2,tp=4"), fsdp="dp")'
        )
    if isinstance(model, torch.Tensor):
        if mesh is not None:
            raise BadMesh(
                "A plan is for a model, and this is a tensor. Next: metaviz.sharding(model, path, mesh=plan)"
            )
        return sharding_of(model, read(model.device_mesh) if hasattr(model, "device_mesh") else None)
    whole = Model(model)
    chosen = whole.select(path)
    if mesh is None:
        found, notes = _as_they_are(whole, chosen)
    else:
        found, notes = _as_planned(whole, chosen, _plan(mesh), fsdp, tp or {})
    is_tensor = path not in whole.modules and (not is_glob(path) or chosen[0].path == path)
    return found[0] if is_tensor else load(found, notes)


def _once(places: Sequence[Place]) -> Iterator[Place]:
    """The places of each tensor, the first of them only."""
    seen: set[int] = set()
    for place in places:
        if id(place.slot.tensor) not in seen:
            seen.add(id(place.slot.tensor))
            yield place


def _as_they_are(whole: Model, chosen: Sequence[Place]) -> tuple[list[Sharding], list[str]]:
    """The shardings of what is chosen; meshes are looked for in the whole model, for what is not sharded itself."""
    meshes = {
        id(place.slot.tensor.device_mesh): place.slot.tensor.device_mesh
        for place in whole.places
        if hasattr(place.slot.tensor, "placements")
    }
    if not meshes:
        raise BadMesh(
            'Nothing here is sharded. Next: metaviz.sharding(model, mesh=metaviz.mesh("dp=2,tp=4"), fsdp="dp")'
        )
    layouts = {key: read(each) for key, each in meshes.items()}
    ranks = sorted({rank for layout in layouts.values() for rank in layout.ranks})
    everywhere = max(layouts.values(), key=lambda layout: (len(layout.ranks), len(layout.axes)))
    if len(everywhere.ranks) < len(ranks):
        everywhere = dataclasses.replace(
            everywhere, axes=(Axis("ranks", len(ranks)),), ranks=tuple(ranks), focus=(), aliases={}
        )
    found, partly = [], []
    for place in _once(chosen):
        tensor = place.slot.tensor
        if hasattr(tensor, "placements"):
            layout = layouts[id(tensor.device_mesh)]
            found.append(sharding_of(tensor, layout, place.path))
            if len(layout.ranks) < len(ranks):
                partly.append(place.path)
        else:
            found.append(Sharding(place.path, tuple(tensor.shape), tensor.dtype, everywhere, {}))
    notes = [f"Not on all of these ranks: {some(partly)}. The others hold nothing of it."] if partly else []
    return found, notes


def _plan(mesh: Any) -> MeshLayout:
    layout = layout_of(mesh)
    if not isinstance(layout, MeshLayout) or not layout.ranks:
        raise BadMesh('This mesh has no ranks yet. Next: plan = metaviz.mesh("dp=2,tp=4")')
    return layout


class _Rule(NamedTuple):
    """What tensor parallelism shall cut: a path or glob of modules or parameters, and the dim."""

    pattern: str
    matches: Callable[[str], bool] | None
    dim: int

    def means(self, path: str) -> bool:
        """Whether it means the parameter at a path, or a module above it."""
        if self.matches is None:
            return self.pattern in ("", path) or path.startswith(f"{self.pattern}.")
        parts = path.split(".")
        return any(self.matches(".".join(parts[:many])) for many in range(1, len(parts) + 1))


def _rules(tp: Mapping[str, int]) -> list[_Rule]:
    for pattern, dim in tp.items():
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise BadMesh(
                f"tp says {dim!r} of {pattern!r}, and it takes the dim to cut: 0 for column-wise, 1 for row-wise, of "
                f"Linear layers. Next: tp={{{pattern!r}: 0}}"
            )
    return [_Rule(each, glob(each) if is_glob(each) else None, dim) for each, dim in tp.items()]


def _axes(mesh: MeshLayout, fsdp: str | None, tp: Mapping[str, int]) -> tuple[str | None, str | None]:
    """The names of the axes of FSDP and of tensor parallelism, None where one is not used."""
    data = next((name for name in mesh.names if name in _DATA), None) if fsdp is None else fsdp or None
    tensor = next((name for name in _TENSOR if name in mesh.names), "tp") if tp else None
    covered = [part for name in (data, tensor) if name for part in mesh.aliases.get(name) or (name,)]
    for name in covered:
        mesh.axis(name)
    if tensor in covered[:-1]:
        raise BadMesh(
            f"The axis {tensor!r} is that of tensor parallelism, and fsdp={data!r} would cut along it, too. "
            "Next: metaviz.sharding(model, mesh=plan, fsdp='')"
        )
    return data, tensor


def _as_planned(
    whole: Model, chosen: Sequence[Place], mesh: MeshLayout, fsdp: str | None, tp: Mapping[str, int]
) -> tuple[list[Sharding], list[str]]:
    data, tensor_axis = _axes(mesh, fsdp, tp)
    cut = _cut_by_rules(whole, _rules(tp))
    wanted, seen, found = {id(place.slot) for place in chosen}, {}, []
    for place in whole.places:
        tensor, dim = place.slot.tensor, cut.get(id(place.slot))
        # Tensor parallelism makes a parameter of its own in each module whose weight it cuts: ties end there.
        key = id(tensor), id(place.module) if dim is not None else None
        if id(place.slot) not in wanted or key in seen:
            continue
        seen[key] = place
        placements: dict[str, Placement] = {}
        if dim is not None:
            placements[tensor_axis] = Placement("shard", dim)
        if data is not None and place.slot.kind == "parameter" and tensor.ndim:
            # Behind, for it cuts what tensor parallelism has left.
            placements[data] = Placement("shard", 0)
        found.append(Sharding(place.path, tuple(tensor.shape), tensor.dtype, mesh, placements))
    return found, _notes(list(seen.values()), data)


def _cut_by_rules(whole: Model, rules: Sequence[_Rule]) -> dict[int, int]:
    """Slot → the dim that is cut. A slot that has several paths is meant by each of them.

    Raises:
        UnknownPath: A rule means no parameter that has such a dim.
    """
    used: set[str] = set()
    cut: dict[int, int] = {}
    for place in whole.places:
        if place.slot.kind != "parameter":
            continue
        rule = next((each for each in rules if each.means(place.path)), None)
        # The bias of a row-wise layer is added to the sum, once; that of a column-wise one is cut with its rows.
        if rule is not None and rule.dim < place.slot.tensor.ndim:
            used.add(rule.pattern)
            cut.setdefault(id(place.slot), rule.dim)
    lost = [f"{each.pattern!r} (dim {each.dim})" for each in rules if each.pattern not in used]
    if lost:
        raise UnknownPath(f"No parameter is meant by {some(lost)}. Next: metaviz.tree(model)")
    return cut


def _notes(places: Sequence[Place], data: str | None) -> list[str]:
    """What will not go as the one who plans may think."""
    notes = []
    scalars = [
        place.path for place in places if place.slot.kind == "parameter" and not place.slot.tensor.ndim
    ]
    if data is not None and scalars:
        notes.append(
            f"fully_shard refuses parameters without dims: {some(scalars)}. Next: torch.nn.Parameter(value.reshape(1))"
        )
    paths: dict[int, list[str]] = {}
    for place in places:
        paths.setdefault(id(place.slot.tensor), []).append(place.path)
    untied = [path for tied in paths.values() if len(tied) > 1 for path in tied]
    if untied:
        notes.append(
            f"No longer tied once tensor parallelism has cut them: {some(untied)}. Counted as a parameter each."
        )
    return notes
