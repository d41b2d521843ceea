"""Spread: which parts of a model go to which device when all devices may be used. A plan, not a scheduler."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from metaviz.core.devices import Device
from metaviz.core.paths import below, children_of, join, modules
from metaviz.core.units import format_bytes

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Where the parts of a model go.

    Attributes:
        placement: ``{path: device}`` of the tensors that have a place.
        parts: ``(path, device, nbytes)`` of the largest parts that are whole on one device, in the order of the model.
        left: Paths of the parts for which there is no room any more.
        free: ``{device: bytes}`` that were free, None where the device does not say.
    """

    placement: dict[str, torch.device]
    parts: tuple[tuple[str, torch.device, int], ...]
    left: tuple[str, ...]
    free: dict[torch.device, int | None]

    def __str__(self) -> str:
        lines = []
        for device, parts in itertools.groupby(self.parts, lambda part: part[1]):
            paths, _, sizes = zip(*parts, strict=True)
            free = self.free[device]
            of = "" if free is None else f" of {format_bytes(free)} free"
            lines.append(f"{', '.join(joined(paths))} → {device}, {format_bytes(sum(sizes))}{of}")
        if self.left:
            lines.append(f"no room for {', '.join(joined(self.left))}")
        return "\n".join(lines)


def spread(
    sizes: Mapping[str, int], blocks: Collection[str], devices: Sequence[Device], reserve: float = 0.1
) -> Spread:
    """Fill one device after the other, in the order of the model, so that a forward crosses each border once.

    A module stays whole where it fits into what is left of a device, else it is split into its children. A block, or a
    module with tensors of its own and no block below, goes on to the first device that has room for the whole of it
    instead, and is split only where no single one has, but all together may. What comes after the first part without
    room has none either.

    Args:
        sizes: Bytes by path of tensor, in the order of the model.
        blocks: Paths of modules that should stay whole, such as those that :func:`blocks_of` finds.
        devices: Where to, in this order. One whose free bytes are not known takes nothing, unless it is the only one.
        reserve: The part of the free bytes of each device that is left for activations.

    Example:
        >>> gpu = Device(torch.device("cuda:0"), "GPU", 100, 100)
        >>> print(spread({"a.weight": 60, "b.weight": 20}, (), [gpu], reserve=0))
        a, b → cuda:0, 80 B of 100 B free
    """
    return _Spreading(sizes, blocks, devices, reserve).result()


class _Spreading:
    def __init__(
        self, sizes: Mapping[str, int], blocks: Collection[str], devices: Sequence[Device], reserve: float
    ) -> None:
        self._sizes = sizes
        self._devices = devices
        alone = len(devices) == 1
        self._room = [
            (float("inf") if alone else 0)
            if each.free_nbytes is None
            else int(each.free_nbytes * (1 - reserve))
            for each in devices
        ]
        self._at = 0
        self._children: dict[str, list[str]] = {}
        self._nbytes: dict[str, int] = dict(sizes)
        for path, nbytes in sizes.items():
            while path:
                above = path.rpartition(".")[0]
                siblings = self._children.setdefault(above, [])
                if not siblings or siblings[-1] != path:
                    siblings.append(path)
                path = above
                self._nbytes[path] = self._nbytes.get(path, 0) + nbytes
        self._children = {path: list(dict.fromkeys(found)) for path, found in self._children.items()}
        above_blocks: set[str] = set()
        for path in blocks:
            while path and (path := path.rpartition(".")[0]) not in above_blocks:
                above_blocks.add(path)
        # Tensors of one module are used together, but what holds the blocks may have a tensor besides them.
        with_tensors = {path.rpartition(".")[0] for path in sizes} - above_blocks
        self._whole = {*blocks, *with_tensors, *sizes}
        self._placement: dict[str, torch.device] = {}
        self._parts: list[tuple[str, torch.device, int]] = []
        self._left: list[str] = []

    def result(self) -> Spread:
        todo = self._children.get("", [])[::-1]
        while todo:
            path = todo.pop()
            at = None if self._left else self._device_for(path)
            if at is not None:
                self._place(path, at)
            elif not self._left and self._may_split(path):
                todo += self._children[path][::-1]
            else:
                self._left.append(path)
        free = {each.device: each.free_nbytes for each in self._devices}
        return Spread(self._placement, tuple(self._parts), tuple(self._left), free)

    def _device_for(self, path: str) -> int | None:
        """The device that takes the whole of a part; none where it is to be split, or there is no room."""
        able = range(self._at, len(self._room) if path in self._whole else self._at + 1)
        return next((k for k in able if self._nbytes[path] <= self._room[k]), None)

    def _may_split(self, path: str) -> bool:
        # A layer of which a piece would be left out is of no use.
        whole = path in self._whole and self._nbytes[path] > sum(self._room[self._at :])
        return path in self._children and not whole

    def _place(self, path: str, at: int) -> None:
        self._at = at
        device = self._devices[at].device
        self._room[at] -= self._nbytes[path]
        self._parts.append((path, device, self._nbytes[path]))
        todo = [path]
        while todo:
            each = todo.pop()
            todo += self._children.get(each, ())
            if each in self._sizes:
                self._placement[each] = device


def blocks_of(model: nn.Module) -> set[str]:
    """The paths of what containers of torch.nn hold: layers that are repeated, of which each should stay whole.

    What is the only one of its class in a container, and has containers itself, is no block, but may hold some: so is
    the model in ``nn.Sequential(model, head)``.
    """
    found: set[str] = set()
    inside: set[str] = set()
    for path, module in modules(model):
        if path in found or path.rpartition(".")[0] in inside:
            inside.add(path)
        elif isinstance(module, _CONTAINERS):
            children = {name: child for name, child in children_of(module).items() if child is not None}
            number = Counter(type(child) for child in children.values())
            found |= {
                join(path, name)
                for name, child in children.items()
                if number[type(child)] > 1
                or not any(isinstance(each, _CONTAINERS) for _, each in below(child))
            }
    return found


def joined(paths: Iterable[str]) -> list[str]:
    """Paths, consecutive numbers of the same parent as one.

    Example:
        >>> joined(["norm", "layers.0", "layers.1", "layers.2", "head"])
        ['norm', 'layers.0–2', 'head']
    """
    groups: list[tuple[str, int, int]] = []
    for path in paths:
        # Other digits would not be the name again, and Python reads no number of thousands of them.
        match = re.fullmatch(r"(.*\.|)(0|[1-9][0-9]{0,8})", path)
        if match and groups and groups[-1][0] == match[1] and groups[-1][2] == int(match[2]) - 1:
            groups[-1] = (match[1], groups[-1][1], int(match[2]))
        else:
            groups.append((match[1], int(match[2]), int(match[2])) if match else (path, -1, -1))
    return [
        start if first < 0 else f"{start}{first}" if first == last else f"{start}{first}–{last}"
        for start, first, last in groups
    ]
