"""`MeshLayout`: which rank stands where on a device mesh, in plain numbers.

Nothing here asks torch: a layout is the same for a plan, a simulated world and a running job, it stays readable after
the process group is gone, and it works inside `torch.device("meta")` and fake-tensor modes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from metaviz.core.hosts import count_crossing
from metaviz.core.units import plural
from metaviz.errors import BadMesh

STATES = ("unavailable", "planned", "simulated", "waiting", "ready", "stale")


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh.

    Attributes:
        name: Such as `"tp"`.
        size: How many ranks there are along it.
        backend: What its groups communicate with, such as `"gloo"`; None where that is not known.
        is_world: Whether its group is the default group of the whole job, which must not be destroyed alone.
    """

    name: str
    size: int
    backend: str | None = None
    is_world: bool = False


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """Ranks on axes, the last axis fastest. It shows itself as text, SVG and HTML.

    Attributes:
        axes: From the slowest to the fastest.
        ranks: The rank at each coordinate, row by row; `()` while nothing is known.
        state: `"unavailable"` (torch has no distributed), `"planned"`, `"simulated"` (fake backend), `"waiting"` (not
            made yet), `"ready"`, or `"stale"` (its process group is gone, or another one).
        rank: The rank of this process, None where it has none.
        world: How many ranks the job has, None where that is not known.
        device_type: Such as `"cuda"`.
        ranks_per_host: How many ranks a host has; ranks are then counted host by host. None: not known.
        focus: Names of the axes of the sub-mesh that was asked for; `()` for all.
        aliases: Flattened axes: name → the axes that it covers.
        notes: What is worth knowing, in sentences.
        reason: Why it is in this state, in a sentence.
        step: The next step as code, None where there is nothing to do.
        origin: Gives back what it was read from, or None once that is gone.

    Example:
        >>> layout = metaviz.mesh("dp=2,tp=4")
        >>> layout.group("tp", rank=5)
        (4, 5, 6, 7)
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]
    state: str = "planned"
    rank: int | None = None
    world: int | None = None
    device_type: str = "cuda"
    ranks_per_host: int | None = None
    focus: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()
    reason: str = ""
    step: str | None = None
    origin: Callable[[], Any] | None = dataclasses.field(default=None, compare=False)

    #: Draws a layout: `drawn(layout, how, **options)`. Core does not know its views, so `metaviz` sets it.
    drawn: ClassVar[Callable[..., Any] | None] = None

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadMesh(f"Two axes are called {twice[0]!r}. Next: give each a name of its own")
        for axis in self.axes:
            if axis.size < 1:
                raise BadMesh(f"The axis {axis.name!r} has the size {axis.size}, and sizes are 1 or more.")
        places = math.prod(self.shape)
        if self.ranks and len(self.ranks) != places:
            what = self.shape_words or "A mesh without axes"
            raise BadMesh(f"{what} needs {plural(places, 'rank')}, and there are {len(self.ranks):,}.")
        if len(set(self.ranks)) != len(self.ranks):
            twice = next(rank for rank, many in Counter(self.ranks).items() if many > 1)
            raise BadMesh(f"A rank stands in one place only, and {twice} is there twice.")
        hosts = self.ranks_per_host
        if hosts is not None and (isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1):
            raise BadMesh(f"ranks_per_host={hosts!r}: a host has one rank or more. Next: ranks_per_host=8")

    def __getstate__(self) -> dict[str, Any]:
        # A rank sends its layout to who draws it: the way back to a thing of this process stays here.
        return {**self.__dict__, "origin": None}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        """How many places there are; 0 while nothing is known."""
        return math.prod(self.shape) if self.axes else len(self.ranks)

    @property
    def shape_words(self) -> str:
        """`"dp=2 × tp=4"`."""
        return " × ".join(f"{axis.name}={axis.size}" for axis in self.axes)

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Rank → the number of its place, counted along the axes."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How many places apart neighbours along each axis are."""
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.axes)))

    @property
    def coordinate(self) -> tuple[int, ...] | None:
        """Where this process stands; None where it is not on the mesh."""
        return None if self.rank is None or self.rank not in self.place_of else self.coordinate_of(self.rank)

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands, a number for each axis.

        Raises:
            BadMesh: The rank is not on the mesh.
        """
        place = self.place_of.get(rank if type(rank) is int else _rank(rank))
        if place is None and not self.ranks:
            raise BadMesh(f"Nothing stands on this mesh yet: it is {self.state}. Next: layout.reason")
        if place is None:
            raise BadMesh(
                f"Rank {told(rank)} is not on this mesh, which has {self.size:,} ranks from {min(self.ranks)} to "
                f"{max(self.ranks)}. Next: layout.ranks"
            )
        return tuple(place // stride % size for stride, size in zip(self.strides, self.shape, strict=True))

    def at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate.

        Raises:
            BadMesh: There is no such place.
        """
        try:
            numbers = tuple(map(operator.index, coordinate))
        except TypeError:
            numbers = None
        fits = numbers is not None and len(numbers) == len(self.axes)
        if not fits or not all(0 <= at < size for at, size in zip(numbers, self.shape, strict=True)):
            raise BadMesh(f"There is no place {told(coordinate)} on {self.shape_words or 'this mesh'}.")
        if not self.ranks:
            raise BadMesh(f"Nothing stands on this mesh yet: it is {self.state}. Next: layout.reason")
        return self.ranks[sum(at * stride for at, stride in zip(numbers, self.strides, strict=True))]

    def axis(self, name: str) -> int:
        """Which axis has a name.

        Raises:
            BadMesh: None has; the names there are are told.
        """
        if name not in self.names:
            there = (
                f"There are: {', '.join([*self.names, *self.aliases])}" if self.axes else "There is none yet"
            )
            raise BadMesh(f"There is no axis {name!r}. {there}.")
        return self.names.index(name)

    def covered(self, names: str | Sequence[str]) -> tuple[str, ...]:
        """The axes that some names stand for; the name of a flattened axis stands for those that it covers.

        Raises:
            BadMesh: There is no such axis, or one is meant twice.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, Sequence) or not all(isinstance(name, str) for name in wanted):
            raise BadMesh(
                f"An axis is named by a string, not by {names!r}. There are: {', '.join(self.names)}."
            )
        found = tuple(itertools.chain.from_iterable(self.aliases.get(name) or (name,) for name in wanted))
        for name in found:
            self.axis(name)
        if len(set(found)) != len(found):
            raise BadMesh(f"{', '.join(map(repr, wanted))}: an axis is meant twice. Name each once.")
        return found

    def group(self, name: str, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that a rank communicates with along an axis, itself included, in the order of the mesh.

        Args:
            name: Of an axis, or of a flattened one.
            rank: Whose group; that of this process, or of the first one, if None.

        Raises:
            BadMesh: There is no such axis, or the rank is not on the mesh.
        """
        first = self.ranks[0] if self.ranks else 0
        whose = rank if rank is not None else self.rank if self.rank in self.place_of else first
        return self.group_along(name, whose)

    def group_along(self, names: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The group of a rank along several axes as if they were one; the first name is the slowest.

        Raises:
            BadMesh: There is no such axis, one is meant twice, or the rank is not on the mesh.
        """
        axes = [self.axis(each) for each in self.covered(names)]
        coordinate = self.coordinate_of(rank)
        start = self.place_of[rank] - sum(coordinate[axis] * self.strides[axis] for axis in axes)
        return tuple(self.ranks[start + step] for step in self._steps(axes))

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """All groups along one axis, or along several as if they were one; the first name is the slowest.

        Raises:
            BadMesh: There is no such axis, or one is meant twice.
        """
        axes = [self.axis(name) for name in self.covered(names)]
        if not self.ranks:
            return []
        others = [axis for axis in range(len(self.axes)) if axis not in axes]
        inner = self._steps(axes)
        return [tuple(self.ranks[start + step] for step in inner) for start in self._steps(others)]

    def _steps(self, axes: Sequence[int]) -> list[int]:
        """Places from the first one of a group along some axes."""
        steps = [0]
        for axis in axes:
            stride = self.strides[axis]
            steps = [start + at * stride for start in steps for at in range(self.shape[axis])]
        return steps

    def host_of(self, rank: int) -> int | None:
        """The number of the host of a rank; None where that is not known."""
        return None if self.ranks_per_host is None else rank // self.ranks_per_host

    @property
    def hosts(self) -> int | None:
        """How many hosts the ranks are on; None where that is not known."""
        if self.ranks_per_host is None:
            return None
        return len({rank // self.ranks_per_host for rank in self.ranks})

    def crossing(self, name: str) -> int:
        """How many groups along an axis have ranks on several hosts; 0 where hosts are not known.

        Raises:
            BadMesh: There is no such axis.
        """
        self.covered(name)
        if name not in self._crossings:
            self._crossings[name] = count_crossing(self, name)
        return self._crossings[name]

    @cached_property
    def is_disordered(self) -> bool:
        """Whether ranks do not ascend from place to place."""
        return not all(map(operator.lt, self.ranks, self.ranks[1:]))

    @cached_property
    def _crossings(self) -> dict[str, int]:
        """What was counted so far: a drawing and its words ask for the same, and there can be many groups."""
        return {}

    @cached_property
    def disordered(self) -> tuple[str, ...]:
        """Axes along which ranks do not ascend. A group of torch has its ranks sorted, whatever the mesh says."""
        if not self.is_disordered:
            return ()
        return tuple(
            name for name in self.names if any(list(group) != sorted(group) for group in self.groups(name))
        )

    def turns(self, names: tuple[str, ...]) -> Mapping[int, int] | None:
        """Rank → its number in its group along some axes as torch has it, sorted; None where that is the mesh's order.

        Source: torch 2.13, torch/distributed/distributed_c10d.py, `new_group` sorts ranks, and scatters go by that.
        """
        axes = [self.axis(name) for name in names]
        if not self.is_disordered and axes == sorted(axes):
            return None
        if names not in self._turns:
            groups = self.groups(*names)
            ordered = all(list(group) == sorted(group) for group in groups)
            numbers = {rank: at for group in groups for at, rank in enumerate(sorted(group))}
            self._turns[names] = None if ordered else numbers
        return self._turns[names]

    @cached_property
    def _turns(self) -> dict[tuple[str, ...], Mapping[int, int] | None]:
        """What was worked out so far: tensors are many, and cut along the same axes."""
        return {}

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks of the job that are not on the mesh."""
        return () if self.world is None else tuple(r for r in range(self.world) if r not in self.place_of)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """All coordinates in the order of `ranks`."""
        return itertools.product(*(range(size) for size in self.shape))

    def flattened(self, names: str | Sequence[str], alias: str) -> MeshLayout:
        """The same layout with some axes also known under one name.

        Raises:
            BadMesh: There is no such axis, one is meant twice, or the name is taken.
        """
        covered = self.covered(names)
        if not isinstance(alias, str) or not alias or not covered:
            raise BadMesh(
                "A flattened axis has a name, and covers axes. Next: layout.flattened(('dp', 'cp'), 'fsdp')"
            )
        if alias in self.names or alias in self.aliases:
            raise BadMesh(
                f"{alias!r} is the name of another axis. Next: layout.flattened({list(covered)!r}, 'other')"
            )
        return dataclasses.replace(self, aliases={**self.aliases, alias: covered})

    def __getitem__(self, names: str | tuple[str, ...]) -> MeshLayout:
        """The same layout with some of its axes in focus, as slicing a DeviceMesh does.

        Raises:
            BadMesh: There is no such axis, or one is meant twice.
        """
        return dataclasses.replace(self, focus=self.covered(names))

    def __str__(self) -> str:
        return self._draw("text")

    __repr__ = __str__

    def _repr_svg_(self) -> str | None:
        return self._draw("svg")

    def _repr_html_(self) -> str | None:
        return self._draw("html")

    def svg(self, *, rank: int | None = None, colour: str | None = None) -> str:
        """The drawing as SVG, at most 500 kB.

        Args:
            rank: Whose groups to mark; those of this process if None.
            colour: The axis to colour by; the fastest one if None.

        Raises:
            BadMesh: There is no such axis or rank.
        """
        return self._draw("svg", rank=rank, colour=colour)

    def _draw(self, how: str, **options: Any) -> Any:
        if self.drawn is None:
            raise RuntimeError(
                "Nothing draws meshes yet: the views are set by the package. Next: import metaviz"
            )
        return type(self).drawn(self, how, **options)


def told(thing: Any, limit: int = 60) -> str:
    """Anything, as short as a message can bear; Python refuses to print numbers of thousands of digits."""
    try:
        text = repr(thing)
    except ValueError:
        return "of thousands of digits"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _rank(rank: Any) -> int:
    try:
        if not isinstance(rank, bool):
            return operator.index(rank)
    except TypeError:
        pass
    raise BadMesh(f"A rank is a number, and not {told(rank)}. Next: layout.ranks")
