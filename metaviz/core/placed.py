"""`sharding()`: how the tensors of a model lie over a mesh, those that are sharded and those that shall be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from metaviz.core.devicemesh import read
from metaviz.core.layout import MeshLayout
from metaviz.core.paths import Model, glob, is_glob, some
from metaviz.core.sharding import Load, Placement, Sharding, load, sharding_of
from metaviz.errors import BadMesh, UnknownPath


def sharding(
    model: nn.Module | torch.Tensor,
    path: str = "",
    *,
    mesh: MeshLayout | None = None,
    fsdp: str | None = None,
    tp: Mapping[str, int] | None = None,
) -> Sharding | Load:
    """Which rank holds which part of a tensor, or how many bytes of a model each rank holds.

    Without `mesh`, tensors that are sharded (DTensor) are looked at as they are, and others count as replicated. With a
    planned mesh it is what FSDP and tensor parallelism would do with a model that is not sharded yet.

    Args:
        model: A model, or a DTensor.
        path: A tensor of the model, or a module for all that is below it.
        mesh: A plan, from :func:`metaviz.mesh`.
        fsdp: With a plan: the axis along which each parameter is cut in its dim 0, as `fully_shard` does. The axis
            named `dp`, `dp_shard`, `fsdp` or `data_parallel` if None.
        tp: With a plan: paths or globs of modules or parameters and the dim that the axis `tp` cuts: 0 for
            column-wise, 1 for row-wise, of Linear layers. A bias of a row-wise layer stays whole.

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
    if isinstance(model, torch.Tensor):
        return (
            sharding_of(model, read(model.device_mesh))
            if hasattr(model, "device_mesh")
            else sharding_of(model, None)
        )
    found = list(_below(model, path))
    each = _as_they_are(found) if mesh is None else _as_planned(found, mesh, fsdp, tp or {})
    if len(each) == 1 and each[0].path == path:
        return each[0]
    return load(each)


def _below(model: nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    """Each tensor at and below a path once."""
    seen: set[int] = set()
    for place in Model(model).select(path):
        tensor = place.slot.tensor
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield place.path, tensor, place.module


def _as_they_are(found: list[tuple[str, torch.Tensor, nn.Module]]) -> list[Sharding]:
    layouts = {
        id(tensor.device_mesh): read(tensor.device_mesh)
        for _, tensor, _ in found
        if hasattr(tensor, "placements")
    }
    if not layouts:
        raise BadMesh(
            'Nothing here is sharded. Next: metaviz.sharding(model, mesh=metaviz.mesh("dp=2,tp=4"), fsdp="dp")'
        )
    wholes = {layout.ranks for layout in layouts.values()}
    if len(wholes) > 1:
        raise BadMesh(
            f"{len(wholes)} meshes with other ranks are used here. Next: choose a tensor, metaviz.sharding(model, path)"
        )
    widest = max(layouts.values(), key=lambda layout: len(layout.axes))
    each = []
    for path, tensor, _ in found:
        if hasattr(tensor, "placements"):
            each.append(sharding_of(tensor, layouts[id(tensor.device_mesh)], path))
        else:
            each.append(Sharding(path, tuple(tensor.shape), tensor.dtype, widest, {}))
    return each


def _as_planned(
    found: list[tuple[str, torch.Tensor, nn.Module]],
    mesh: MeshLayout,
    fsdp: str | None,
    tp: Mapping[str, int],
) -> list[Sharding]:
    data = (
        fsdp
        if fsdp is not None
        else next((n for n in mesh.names if n in ("dp", "dp_shard", "fsdp", "data_parallel")), None)
    )
    for name in (data, "tp" if tp else None):
        if name is not None:
            mesh.axis(name)
    rules = [(pattern, glob(pattern) if is_glob(pattern) else None, dim) for pattern, dim in tp.items()]
    used: set[str] = set()
    each = []
    for path, tensor, _ in found:
        placements: dict[str, Placement] = {}
        shape = tuple(tensor.shape)
        is_parameter = isinstance(tensor, nn.Parameter) and bool(shape)
        rule = next(
            ((pattern, dim) for pattern, matches, dim in rules if _meets(path, pattern, matches)), None
        )
        if rule is not None and is_parameter:
            used.add(rule[0])
        dim = None if rule is None else rule[1]
        # The bias of a row-wise layer is added to the sum, once; that of a column-wise one is cut with its rows.
        cut = dim if dim is not None and is_parameter and dim < len(shape) else None
        if data is not None and is_parameter:
            # FSDP cuts what tensor parallelism has left, and yet stands before it: a strided shard.
            pieces = mesh.axes[mesh.axis("tp")].size if cut == 0 else 1
            placements[data] = Placement("shard", 0, pieces)
        if cut is not None:
            placements["tp"] = Placement("shard", cut)
        each.append(Sharding(path, shape, tensor.dtype, mesh, placements))
    lost = [pattern for pattern in tp if pattern not in used]
    if lost:
        raise UnknownPath(f"No parameter is meant by {some(map(repr, lost))}. Next: metaviz.tree(model)")
    return each


def _meets(path: str, pattern: str, matches: Any) -> bool:
    """Whether a rule for a module or parameter means the parameter at a path."""
    parts = path.split(".")
    heads = (".".join(parts[:many]) for many in range(1, len(parts) + 1))
    return any(head == pattern if matches is None else matches(head) for head in heads)
