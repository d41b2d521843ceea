"""Planned meshes: from what a user writes, `"dp=2,tp=4"` or a dict, to a layout, before any process is started."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from metaviz.core.checks import nearest, notes
from metaviz.core.layout import Axis, MeshLayout, told
from metaviz.errors import BadMesh

# More ranks than any machine has, and still quick to lay out.
MOST = 1 << 20
_NUMBER = re.compile(r"[+-]?[0-9]+")
# More digits than any size that is laid out has; Python refuses to read numbers of thousands of them.
_DIGITS = 18
_LONGEST = 1000
_PART = re.compile(r"\s*([^=:,\s]*)\s*(?:([=:])\s*([^,]*?))?\s*")


def planned(
    spec: str | Mapping[str, int],
    *,
    world: int | None = None,
    rank: int | None = None,
    ranks: Sequence[int] | None = None,
    ranks_per_host: int | None = None,
    device_type: str = "cuda",
    model: Any = None,
) -> MeshLayout:
    """A layout from names and sizes of its axes, the slowest first.

    Args:
        spec: `"pp=4,dp=8,tp=8"` or a dict. One size may be -1: what is left of the world.
        world: How many ranks the job will have; as many as the mesh if None.
        rank: Whose eyes to see it with.
        ranks: The rank at each place, row by row; counted from 0 if None.
        ranks_per_host: How many ranks a host has.
        device_type: Such as `"cuda"`.
        model: A model that shall run on it: what cannot be divided is told.

    Raises:
        BadMesh: It cannot be read (the place is pointed at), or the sizes do not go together.
    """
    order = None if ranks is None else _ranks(ranks)
    world, ranks_per_host = _whole(world), _whole(ranks_per_host)
    _check_options(world, rank, order, device_type)
    sizes = _read(spec) if isinstance(spec, str) else _checked(spec)
    sizes = _completed(sizes, world, order)
    size = math.prod(sizes.values())
    if size > MOST:
        raise BadMesh(f"{_words(sizes)} has {size:,} ranks, and more than {MOST:,} are not laid out.")
    if world is not None and size > world:
        raise BadMesh(_too_many(sizes, size, world))
    layout = MeshLayout(
        tuple(Axis(name, each) for name, each in sizes.items()),
        tuple(range(size)) if order is None else order,
        rank=rank,
        world=world if world is not None else size if order is None else None,
        device_type=device_type,
        ranks_per_host=ranks_per_host,
        reason="This is a plan: no process was started, and none is needed to look at it.",
    )
    if rank is not None and (world is None or not 0 <= rank < world):
        # A rank of the job that the mesh leaves out can be looked at, too: it is told that it would idle.
        layout.coordinate_of(rank)
    return dataclasses.replace(layout, notes=tuple(notes(layout, model)))


def _ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks as numbers, each once and none below 0."""
    try:
        order = tuple(operator.index(each) for each in ranks)
    except (TypeError, ValueError, RuntimeError):
        raise BadMesh(
            f"ranks are numbers, row by row, and not {told(ranks)}. Next: ranks=[0, 1, 2, 3]"
        ) from None
    if not order:
        raise BadMesh("ranks is empty, and a mesh has one or more. Next: ranks=[0, 1, 2, 3]")
    if min(order) < 0:
        raise BadMesh(f"There is no rank {told(min(order))}: ranks are counted from 0.")
    if max(order) >= MOST:
        raise BadMesh(
            f"There is a rank {told(max(order))}, and worlds of more than {MOST:,} are not laid out."
        )
    return order


def _whole(number: Any) -> Any:
    """NumPy's and torch's integers as Python's; all else as it is, to be told of."""
    try:
        return number if isinstance(number, bool | int) else operator.index(number)
    except (TypeError, ValueError, RuntimeError):
        return number


def _check_options(
    world: int | None, rank: int | None, ranks: tuple[int, ...] | None, device_type: str
) -> None:
    if world is not None and (isinstance(world, bool) or not isinstance(world, int) or world < 1):
        raise BadMesh(f"world={told(world)}: a job has one rank or more. Next: world=8")
    if world is not None and world > MOST:
        raise BadMesh(f"world={told(world)}: worlds of more than {MOST:,} ranks are not laid out.")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise BadMesh(f"rank={told(rank)}: a rank is a number, counted from 0. Next: rank=0")
    if world is not None and ranks and max(ranks) >= world:
        raise BadMesh(
            f"There is no rank {max(ranks)} in a world of {world:,}, whose last one is {world - 1}."
        )
    if not isinstance(device_type, str) or not device_type.isidentifier():
        raise BadMesh(
            f'device_type={device_type!r}: it is the kind alone, without a number. Next: device_type="cuda"'
        )


def _read(spec: str) -> dict[str, int]:
    if not spec.strip():
        raise BadMesh('An empty mesh. Next: metaviz.mesh("dp=2,tp=4")')
    if len(spec) > _LONGEST:
        raise BadMesh(
            f'{told(spec)}: no mesh has a description of {len(spec):,} characters. Next: "dp=2,tp=4"'
        )
    sizes: dict[str, int] = {}
    start = 0
    for part in spec.split(","):
        at = start + len(part) - len(part.lstrip())
        found = _PART.fullmatch(part)
        if found is None:
            _point(spec, at, "this is no name=size")
        name, _, size = found.groups()
        if not name or _NUMBER.fullmatch(name):
            _point(spec, at, "here the name of an axis is missing")
        if name in sizes:
            _point(spec, at, f"{name!r} is there twice")
        if not size:
            _point(spec, start + len(part.rstrip()), f"the size of {name!r} is missing")
        if not _NUMBER.fullmatch(size):
            _point(spec, start + found.start(3), "a size is a number, or -1 for what is left")
        if len(size) > _DIGITS:
            _point(spec, start + found.start(3), f"more than {MOST:,} ranks are not laid out")
        if int(size) < 1 and int(size) != -1:
            _point(spec, start + found.start(3), "sizes are 1 or more, or -1 for what is left")
        sizes[name] = int(size)
        start += len(part) + 1
    return sizes


def _point(spec: str, at: int, why: str) -> None:
    """Raise with a caret below the place."""
    line = re.sub(r"\s", " ", spec)
    raise BadMesh(
        f'This mesh cannot be read:\n  {line}\n  {" " * at}^ {why}\nNext: metaviz.mesh("dp=2,tp=4")'
    )


def _checked(spec: Mapping[str, int]) -> dict[str, int]:
    sizes = {}
    for name, given in spec.items():
        size = _whole(given)
        if not isinstance(name, str) or not name.strip():
            raise BadMesh(
                f'An axis is called {name!r}, and names are strings. Next: metaviz.mesh({{"dp": 2, "tp": 4}})'
            )
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise BadMesh(
                f"The size of {name!r} is {told(size)}, and sizes are 1 or more, or -1 for what is left."
            )
        if size > MOST:
            raise BadMesh(
                f"The size of {name!r} is {told(size)}, and more than {MOST:,} ranks are not laid out."
            )
        sizes[name] = size
    if not sizes:
        raise BadMesh('A mesh without axes. Next: metaviz.mesh({"dp": 2, "tp": 4})')
    return sizes


def _completed(sizes: dict[str, int], world: int | None, ranks: Sequence[int] | None) -> dict[str, int]:
    """Sizes with -1 replaced by what is left of the world."""
    left = [name for name, size in sizes.items() if size == -1]
    if not left:
        return sizes
    total = world if world is not None else len(ranks) if ranks is not None else None
    if len(left) > 1:
        raise BadMesh(f"One size may be -1, and {', '.join(map(repr, left))} are.")
    if total is None:
        raise BadMesh(
            f"How large {left[0]!r} is depends on how many ranks there are. Next: metaviz.mesh(..., world=64)"
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    if total % known:
        raise BadMesh(_uneven({name: size for name, size in sizes.items() if size != -1}, known, total))
    return {name: total // known if size == -1 else size for name, size in sizes.items()}


def _words(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in sizes.items())


def _uneven(sizes: Mapping[str, int], known: int, world: int) -> str:
    below, above = world // known * known, (world // known + 1) * known
    near = f"{above:,}" if not below else f"{below:,} and {above:,}"
    return f"{world:,} ranks cannot be divided by {_words(sizes)} = {known:,}. The nearest worlds that can: {near}."


def _too_many(sizes: Mapping[str, int], size: int, world: int) -> str:
    return f"{_words(sizes)} = {size:,} ranks, and there are {world:,}.{nearest(sizes, world)}"
