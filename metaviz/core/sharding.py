"""Which rank holds which slice of a sharded tensor, worked out in plain numbers for every rank at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
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
        pieces: Of a strided shard: into how many pieces the dim is cut first, each of which the axis then cuts. 1 for a
            plain shard.
    """

    kind: str
    dim: int = 0
    pieces: int = 1


REPLICATE = Placement("replicate")


class Cut(NamedTuple):
    """One step of cutting a tensor.

    Attributes:
        name: Of the axis that cuts, or of a flattened one.
        axes: Which axes of the mesh that is, the slowest first.
        many: Into how many chunks.
        placement: Which dim, and into how many pieces before.
        turns: Which chunk each rank has, where that is not told by its coordinate: see :meth:`MeshLayout.turns`.
    """

    name: str
    axes: tuple[int, ...]
    many: int
    placement: Placement
    turns: Mapping[int, int] | None


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A tensor over a mesh. It shows itself as text and HTML.

    Attributes:
        path: Path of the tensor in its model, `""` where it has none.
        shape: Of the whole tensor.
        dtype: Of the tensor.
        layout: The mesh.
        placements: What each axis of the mesh does to it, by the names of the axes or flattened axes, in the order in
            which they cut; axes that are left out replicate.
        device_type: Where the part of this process is; None where that is not known.

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
    device_type: str | None = None

    #: Draws a sharding: `drawn(sharding, how)`. Core does not know its views, so `metaviz` sets it.
    drawn: ClassVar[Callable[..., Any] | None] = None

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[Runs, ...]]:
        return {}

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """The steps in which the tensor is cut, in their order."""
        found = []
        for name, each in self.placements.items():
            if each.kind == "shard":
                covered = self.covered(name)
                axes = tuple(map(self.layout.axis, covered))
                found.append(Cut(name, axes, self._size(axes), each, self.layout.turns(covered)))
        return tuple(found)

    def covered(self, name: str) -> tuple[str, ...]:
        """The axes that a name of a placement stands for: several for a flattened one."""
        return tuple(self.layout.aliases.get(name) or (name,))

    def _size(self, axes: Sequence[int]) -> int:
        return math.prod(self.layout.axes[axis].size for axis in axes)

    def key(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Which chunk of each cut is held at a coordinate."""
        found = []
        for cut in self.cuts:
            if cut.turns is not None:
                found.append(cut.turns[self.layout.at(coordinate)])
                continue
            index = 0
            for axis in cut.axes:
                index = index * self.layout.axes[axis].size + coordinate[axis]
            found.append(index)
        return tuple(found)

    def slices(self, rank: int) -> tuple[Runs, ...]:
        """What a rank holds: for each dim the runs of indices, none in a dim where it holds nothing.

        Raises:
            BadMesh: The rank is not on the mesh.
        """
        return self._slices_at(self.key(self.layout.coordinate_of(rank)))

    def _slices_at(self, key: tuple[int, ...]) -> tuple[Runs, ...]:
        if key not in self._known:
            self._known[key] = self._cut(key)
        return self._known[key]

    def _cut(self, key: Sequence[int]) -> tuple[Runs, ...]:
        """As torch cuts: one step after the other, in chunks of the rounded-up size.

        Source: torch 2.13, torch/distributed/tensor/placement_types.py, Shard and _StridedShard.
        """
        dims: list[Runs] = [((0, size),) if size else () for size in self.shape]
        for cut, index in zip(self.cuts, key, strict=True):
            _, dim, many = cut.placement
            pieces = [_chunk(dims[dim], many, piece) for piece in range(many)]
            dims[dim] = _joined(run for piece in pieces for run in _chunk(piece, cut.many, index))
        return tuple(dims)

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        return tuple(sum(end - start for start, end in runs) for runs in self.slices(rank))

    def nbytes_on(self, rank: int) -> int:
        """Bytes that a rank holds."""
        return math.prod(self.shape_on(rank)) * self.dtype.itemsize

    def nbytes_by_key(self) -> dict[tuple[int, ...], int]:
        """Bytes that are held by which chunk of each cut it is: each different slice is worked out once."""
        found = {}
        for key in itertools.product(*(range(cut.many) for cut in self.cuts)):
            held = (sum(end - start for start, end in runs) for runs in self._slices_at(key))
            found[key] = math.prod(held) * self.dtype.itemsize
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def words(self) -> list[str]:
        """What each axis does, in a sentence each; of flattened axes together."""
        called = {part: name for name in self.placements for part in self.covered(name)}
        names = dict.fromkeys(called.get(axis.name, axis.name) for axis in self.layout.axes)
        return [*(_words(self, name) for name in names), *self._warnings()]

    def _warnings(self) -> Iterator[str]:
        """What torch does with ranks in an order of their own.

        Source: torch 2.13 with four processes of gloo: scatters go by the sorted group, sizes by the coordinate.
        """
        if self.device_type not in (None, "meta", self.layout.device_type):
            yield (
                f"its part is on {self.device_type}, and the mesh is one of {self.layout.device_type}: groups of "
                "the mesh may not be able to send it"
            )
        own = [cut.name for cut in self.cuts if cut.turns is not None]
        if own:
            yield (
                f"{' and '.join(own)}: ranks are not in ascending order there, and torch cuts in the order of the "
                "sorted group. Where sizes do not divide, or a dim is cut twice, its own answers differ: take "
                "ascending ranks"
            )

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
    placement, covered = sharding.placements.get(name, REPLICATE), sharding.covered(name)
    size = math.prod(sharding.layout.axes[sharding.layout.axis(part)].size for part in covered)
    head = name if covered == (name,) else f"{name} ({' and '.join(covered)})"
    if placement.kind == "replicate":
        return f"{head}: each of {size} has the same"
    if placement.kind == "partial":
        return f"{head}: each of {size} has a part of the sum, and the values are what all of them add up to"
    pieces = placement.pieces
    for cut in itertools.takewhile(lambda cut: cut.name != name, sharding.cuts):
        if cut.placement.dim == placement.dim:
            pieces *= cut.many
    dim = f"dim {placement.dim} ({sharding.shape[placement.dim]})"
    if pieces > 1:
        return f"{head}: {dim} is cut in {pieces} pieces first, and each of those in {size}"
    return f"{head}: {dim} is cut in {size}"


def sharding_of(tensor: Any, layout: MeshLayout | None, path: str = "") -> Sharding:
    """The sharding of a DTensor; the layout is that of its mesh, or of the one that its mesh was cut out of.

    Raises:
        BadMesh: It is no DTensor, or torch has a placement for it that is not known here.
    """
    spec = getattr(tensor, "_spec", None)
    if spec is None or layout is None or not hasattr(tensor, "placements"):
        raise BadMesh(
            f"{path or 'This'} is of type {type(tensor).__name__}, and is not sharded. Next: metaviz.mesh('dp=2,tp=4')"
        )
    # A flattened axis is one axis to the tensor, and several in focus.
    names = tuple(spec.mesh.mesh_dim_names or ()) if layout.focus else layout.names
    shape = tuple(int(size) for size in spec.shape)
    given = {name: _placement(each, len(shape)) for name, each in zip(names, spec.placements, strict=True)}
    part = getattr(tensor, "_local_tensor", None)
    where = None if part is None else part.device.type
    as_written = Sharding(path, shape, tensor.dtype, layout, given, where)
    found = dataclasses.replace(as_written, placements=_in_order(as_written))
    # What this process holds is the proof: DTensors that torch itself has cut go by their placements as written.
    held = tuple(getattr(part, "shape", ()))
    rank = layout.rank if layout.rank in layout.place_of else None
    if rank is not None and found.shape_on(rank) != held == as_written.shape_on(rank):
        return as_written
    return found


def _in_order(sharding: Sharding) -> dict[str, Placement]:
    """The placements of a tensor in the order in which it was cut.

    Placements are applied from left to right. `fully_shard` cuts what tensor parallelism has left, though its axis
    stands before, and writes that as a strided shard, in as many pieces as the axes behind make. Where rows do not
    divide, the one is not the other: of 11 rows, cut in 3 and each third in 3 again, the last row is the very last
    rank's, and read as a strided shard it would be another one's.
    """
    order: list[str] = []
    placements = dict(sharding.placements)
    size_of = {cut.name: cut.many for cut in sharding.cuts}
    for name, each in reversed(sharding.placements.items()):
        behind = math.prod(size_of.get(other, 1) for other in order if placements[other].dim == each.dim)
        if each.kind == "shard" and each.pieces == behind > 1:
            placements[name] = each._replace(pieces=1)
            order.append(name)
        else:
            order.insert(0, name)
    return {name: placements[name] for name in order}


def _placement(placement: Any, ndim: int) -> Placement:
    kinds = {cls.__name__ for cls in type(placement).__mro__}
    if kinds & {"Shard", "_StridedShard"}:
        return Placement("shard", placement.dim % max(ndim, 1), int(getattr(placement, "split_factor", 1)))
    for name, kind in (("Partial", "partial"), ("Replicate", "replicate")):
        if name in kinds:
            return Placement(kind)
    raise BadMesh(
        f"What {placement} of type {type(placement).__name__} does to a tensor is not known here: it is none of Shard, "
        "Replicate and Partial."
    )


class Load(NamedTuple):
    """What ranks hold of a model.

    Attributes:
        nbytes: Bytes by rank.
        shardings: Each tensor's.
        whole: Bytes of the model, each tensor once.
        notes: What is worth knowing, in sentences.
    """

    nbytes: dict[int, int]
    shardings: tuple[Sharding, ...]
    whole: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        least, most = min(self.nbytes.values()), max(self.nbytes.values())
        each = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
        whole = format_bytes(self.whole)
        head = f"{whole} of parameters and buffers in all, {each} on each of {len(self.nbytes):,} ranks"
        return "\n".join([head, *self.notes])

    __repr__ = __str__


def load(shardings: Sequence[Sharding], notes: Sequence[str] = ()) -> Load:
    """What ranks hold of some tensors together; of a tensor on another mesh, a rank that is not there holds nothing.

    Raises:
        BadMesh: There are no tensors.
    """
    if not shardings:
        raise BadMesh("There are no tensors to spread.")
    # Layers are alike, and the ways to cut are few: each kind of tensor is worked out once, each way laid out once.
    kinds: dict[Any, tuple[Sharding, int]] = {}
    for each in shardings:
        kind = id(each.layout), each.shape, each.dtype, tuple(each.placements.items())
        kinds[kind] = each, kinds.get(kind, (each, 0))[1] + 1
    ways: dict[Any, tuple[Sharding, Counter[tuple[int, ...]]]] = {}
    for each, many in kinds.values():
        way = id(each.layout), tuple(cut.axes for cut in each.cuts)
        _, held = ways.setdefault(way, (each, Counter()))
        held.update({key: nbytes * many for key, nbytes in each.nbytes_by_key().items()})
    totals: dict[int, int] = {}
    for each, held in ways.values():
        for rank, coordinate in zip(each.layout.ranks, each.layout.coordinates(), strict=True):
            totals[rank] = totals.get(rank, 0) + held[each.key(coordinate)]
    return Load(totals, tuple(shardings), sum(each.nbytes for each in shardings), tuple(notes))
