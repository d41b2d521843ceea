"""Which rank holds which slice of a sharded tensor, worked out in plain numbers for every rank at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from metaviz.core.layout import MeshLayout
from metaviz.core.units import format_bytes
from metaviz.errors import BadMesh

#: Where a dim is cut: `[first, last + 1)` of each run of rows that are held.
Runs = tuple[tuple[int, int], ...]


class Placement(NamedTuple):
    """What one axis of a mesh does to a tensor.

    Attributes:
        kind: `"shard"`, `"replicate"` or `"partial"`.
        dim: Of the tensor, for a shard.
        pieces: Of a strided shard: into how many pieces the dim is cut first, for an axis that is applied before though
            it stands behind. 1 for a plain shard.
    """

    kind: str
    dim: int = 0
    pieces: int = 1


REPLICATE = Placement("replicate")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A tensor over a mesh. It shows itself as text and HTML.

    Attributes:
        path: Path of the tensor in its model, `""` where it has none.
        shape: Of the whole tensor.
        dtype: Of the tensor.
        layout: The mesh.
        placements: What each axis of the mesh does to it, by the names of the axes; axes that are left out replicate.

    Example:
        >>> layout = metaviz.mesh("tp=4")
        >>> Sharding("", (6, 2), torch.float32, layout, {"tp": Placement("shard", 0)}).shape_on(3)
        (0, 2)
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: MeshLayout
    placements: Mapping[str, Placement]

    #: Draws a sharding: `drawn(sharding, how)`. Core does not know its views, so `metaviz` sets it.
    drawn: ClassVar[Callable[..., Any] | None] = None

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[Runs, ...]]:
        return {}

    @cached_property
    def _axes(self) -> list[int]:
        """The axes that cut the tensor, in the order in which they do."""
        return [self.layout.axis(name) for name, each in self.placements.items() if each.kind == "shard"]

    def slices(self, rank: int) -> tuple[Runs, ...]:
        """What a rank holds: for each dim the runs of indices, none in a dim where it holds nothing.

        Raises:
            BadMesh: The rank is not on the mesh.
        """
        coordinate = self.layout.coordinate_of(rank)
        key = tuple(coordinate[axis] for axis in self._axes)
        if key not in self._known:
            self._known[key] = self._cut(key)
        return self._known[key]

    def _cut(self, at: Sequence[int]) -> tuple[Runs, ...]:
        """As torch cuts: along each axis of the mesh in turn, in chunks of the rounded-up size.

        Source: torch 2.13, torch/distributed/tensor/placement_types.py, Shard and _StridedShard.
        """
        dims: list[Runs] = [((0, size),) if size else () for size in self.shape]
        shards = [each for each in self.placements.values() if each.kind == "shard"]
        for axis, index, shard in zip(self._axes, at, shards, strict=True):
            many = self.layout.axes[axis].size
            pieces = [_chunk(dims[shard.dim], shard.pieces, piece) for piece in range(shard.pieces)]
            dims[shard.dim] = _joined(run for piece in pieces for run in _chunk(piece, many, index))
        return tuple(dims)

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        return tuple(sum(end - start for start, end in runs) for runs in self.slices(rank))

    def nbytes_on(self, rank: int) -> int:
        """Bytes that a rank holds."""
        return math.prod(self.shape_on(rank)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def words(self) -> list[str]:
        """What each axis does, in a sentence each."""
        return [_words(self, axis.name) for axis in self.layout.axes]

    def owners(self) -> dict[tuple[Runs, ...], list[int]]:
        """Slice → the ranks that hold it: several where the tensor is replicated."""
        found: dict[tuple[Runs, ...], list[int]] = {}
        for rank in self.layout.ranks:
            found.setdefault(self.slices(rank), []).append(rank)
        return found

    def __str__(self) -> str:
        return self._draw("text")

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        return self._draw("html")

    def _draw(self, how: str) -> Any:
        if self.drawn is None:
            raise RuntimeError(
                "Nothing draws shardings yet: the views are set by the package. Next: import metaviz"
            )
        return type(self).drawn(self, how)


def _chunk(runs: Sequence[tuple[int, int]], many: int, index: int) -> Runs:
    """The index-th of `many` chunks of some runs, as torch.chunk makes them: the last ones may be smaller, or empty."""
    total = sum(end - start for start, end in runs)
    size = -(-total // many)
    first, last = min(total, index * size), min(total, (index + 1) * size)
    found, at = [], 0
    for start, end in runs:
        low, high = max(first, at), min(last, at + end - start)
        if low < high:
            found.append((start + low - at, start + high - at))
        at += end - start
    return tuple(found)


def _joined(runs: Iterator[tuple[int, int]]) -> Runs:
    """Runs with those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, end in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return tuple(found)


def _words(sharding: Sharding, name: str) -> str:
    placement, size = (
        sharding.placements.get(name, REPLICATE),
        sharding.layout.axes[sharding.layout.axis(name)].size,
    )
    if placement.kind == "replicate":
        return f"{name}: each of {size} has the same"
    if placement.kind == "partial":
        return f"{name}: each of {size} has a part of the sum, and the values are what all of them add up to"
    dim = f"dim {placement.dim} ({sharding.shape[placement.dim]})"
    if placement.pieces > 1:
        return f"{name}: {dim} is cut in {placement.pieces} pieces first, and each of those in {size}"
    return f"{name}: {dim} is cut in {size}"


def sharding_of(tensor: Any, layout: MeshLayout, path: str = "") -> Sharding:
    """The sharding of a DTensor; the layout is that of its mesh, or of the one that its mesh was cut out of.

    Raises:
        BadMesh: It is no DTensor.
    """
    spec = getattr(tensor, "_spec", None)
    if spec is None or not hasattr(tensor, "placements"):
        raise BadMesh(
            f"{path or 'This'} is of type {type(tensor).__name__}, and is not sharded. Next: metaviz.mesh('dp=2,tp=4')"
        )
    names = layout.focus or layout.names
    shape = tuple(int(size) for size in spec.shape)
    placements = {
        name: _placement(each, len(shape)) for name, each in zip(names, spec.placements, strict=True)
    }
    return Sharding(path, shape, tensor.dtype, layout, placements)


def _placement(placement: Any, ndim: int) -> Placement:
    kind = type(placement).__name__
    if kind in ("Shard", "_StridedShard"):
        return Placement("shard", placement.dim % max(ndim, 1), int(getattr(placement, "split_factor", 1)))
    return Placement("partial" if "Partial" in kind else "replicate")


class Load(NamedTuple):
    """What ranks hold of a model.

    Attributes:
        nbytes: Bytes by rank.
        shardings: Each tensor's.
        whole: Bytes of the model, each tensor once.
    """

    nbytes: dict[int, int]
    shardings: tuple[Sharding, ...]
    whole: int

    def __str__(self) -> str:
        least, most = min(self.nbytes.values()), max(self.nbytes.values())
        each = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
        whole = format_bytes(self.whole)
        return f"{whole} of parameters and buffers in all, {each} on each of {len(self.nbytes):,} ranks"


def load(shardings: Sequence[Sharding]) -> Load:
    """What the ranks of a mesh hold of some tensors together.

    Raises:
        BadMesh: There are no tensors.
    """
    if not shardings:
        raise BadMesh("There are no tensors to spread.")
    layout, totals = shardings[0].layout, dict.fromkeys(shardings[0].layout.ranks, 0)
    for each in shardings:
        sizes: dict[tuple[int, ...], int] = {}
        for rank, coordinate in zip(layout.ranks, layout.coordinates(), strict=True):
            key = tuple(coordinate[axis] for axis in each._axes)
            if key not in sizes:
                sizes[key] = each.nbytes_on(rank)
            totals[rank] += sizes[key]
    return Load(totals, tuple(shardings), sum(each.nbytes for each in shardings))
