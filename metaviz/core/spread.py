"""Spread: which parts of a model go to which device when all devices may be used. A plan, not a scheduler."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from metaviz.core.devices import Device
from metaviz.core.paths import children_of, join, modules
from metaviz.core.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Where the parts of a model go.

    Attributes:
        placement: ``{path: device}`` of the tensors that have a place.
        parts: ``(path, device, nbytes)`` of the largest parts that are whole on one device, in the order of the model.
        left: Paths of the parts for which there is no room any more.
        free: ``{device: bytes}`` that were free.
    """

    placement: dict[str, torch.device]
    parts: tuple[tuple[str, torch.device, int], ...]
    left: tuple[str, ...]
    free: dict[torch.device, int]

    def __str__(self) -> str:
        lines, run = [], []
        for part, following in zip(self.parts, [*self.parts[1:], None], strict=True):
            run.append(part)
            if following is None or following[1] != part[1]:
                nbytes = sum(each[2] for each in run)
                names = ", ".join(joined(each[0] for each in run))
                free = format_bytes(self.free[part[1]])
                lines.append(f"{names} → {part[1]}, {format_bytes(nbytes)} of {free} free")
                run = []
        if self.left:
            lines.append(f"no room for {', '.join(joined(self.left))}")
        return "\n".join(lines)


def spread(
    sizes: Mapping[str, int], blocks: Collection[str], devices: Sequence[Device], reserve: float = 0.1
) -> Spread:
    """Fill one device after the other, in the order of the model, so that a forward crosses each border once.

    A module stays whole where it fits into what is left of a device, else it is split into its children. A block, or a
    module with tensors of its own, goes on to the next device instead; only one that is larger than any device is
    split. What comes after the first part for which there is no room has none either.

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
        self._blocks = blocks
        self._devices = devices
        alone = len(devices) == 1
        self._room = [
            (float("inf") if alone else 0)
            if each.free_nbytes is None
            else int(each.free_nbytes * (1 - reserve))
            for each in devices
        ]
        self._largest = max(self._room)
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
        self._placement: dict[str, torch.device] = {}
        self._parts: list[tuple[str, torch.device, int]] = []
        self._left: list[str] = []

    def result(self) -> Spread:
        for path in self._children.get("", ()):
            self._place(path)
        free = {each.device: each.free_nbytes or 0 for each in self._devices}
        return Spread(self._placement, tuple(self._parts), tuple(self._left), free)

    def _place(self, path: str) -> None:
        nbytes, children = self._nbytes[path], self._children.get(path, ())
        if self._left:
            self._left.append(path)
            return
        if nbytes > self._room[self._at]:
            # Tensors of one module are used together.
            whole = path in self._blocks or any(child in self._sizes for child in children)
            if children and (not whole or nbytes > self._largest):
                for child in children:
                    self._place(child)
                return
            later = next((k for k in range(self._at, len(self._room)) if nbytes <= self._room[k]), None)
            if later is None:
                self._left.append(path)
                return
            self._at = later
        device = self._devices[self._at].device
        self._room[self._at] -= nbytes
        self._parts.append((path, device, nbytes))
        todo = [path]
        while todo:
            each = todo.pop()
            todo += self._children.get(each, ())
            if each in self._sizes:
                self._placement[each] = device


def blocks_of(model: nn.Module) -> set[str]:
    """The paths of what containers of torch.nn hold: layers that are repeated, of which each should stay whole."""
    found: set[str] = set()
    for path, module in modules(model):
        parts = path.split(".")
        inside = any(".".join(parts[:k]) in found for k in range(1, len(parts) + 1))
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and not inside:
            found |= {join(path, name) for name, child in children_of(module).items() if child is not None}
    return found


def joined(paths: Iterable[str]) -> list[str]:
    """Paths, consecutive numbers of the same parent as one.

    Example:
        >>> joined(["norm", "layers.0", "layers.1", "layers.2", "head"])
        ['norm', 'layers.0–2', 'head']
    """
    groups: list[tuple[str, int, int]] = []
    for path in paths:
        match = re.fullmatch(r"(.*\.|)(\d+)", path)
        if match and groups and groups[-1][0] == match[1] and groups[-1][2] == int(match[2]) - 1:
            groups[-1] = (match[1], groups[-1][1], int(match[2]))
        else:
            groups.append((match[1], int(match[2]), int(match[2])) if match else (path, -1, -1))
    return [
        start if first < 0 else f"{start}{first}" if first == last else f"{start}{first}–{last}"
        for start, first, last in groups
    ]
