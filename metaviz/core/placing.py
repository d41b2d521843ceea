"""Placing: which of the values go to which device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from metaviz.core import devices
from metaviz.core.choice import Fill
from metaviz.core.devices import Device
from metaviz.core.paths import Model, Place
from metaviz.core.spread import Spread, blocks_of, joined, spread


class Targets:
    """Where values shall be, as the user says it.

    Args:
        device: A device, ``"auto"``, a dict of module paths and devices, or None for the CPU.
        view: The model.

    Attributes:
        first: Where things go that have no place of their own.

    Raises:
        UnknownDevice: This machine does not have one of them.
        UnknownPath: A path of the dict means nothing in the model.
    """

    def __init__(self, device: Any, view: Model) -> None:
        self._model = view.modules[""]
        self._by_path: dict[str, torch.device] | None = None
        self._auto = isinstance(device, str) and device == "auto"
        if self._auto:
            self._devices = devices.listed()
            self.first = self._devices[0].device
        elif isinstance(device, Mapping):
            self._by_path = {}
            # What is named in more detail counts.
            for path, each in sorted(device.items(), key=lambda pair: str(pair[0]).count(".")):
                known = devices.resolve(each)
                self._by_path |= {place.path: known for place in view.select(path)} if path else {}
            self.first = devices.resolve(device.get("", "cpu"))
        else:
            self.first = devices.resolve(device)

    def place(self, fills: list[Fill], by_tensor: dict[int, list[Place]]) -> Spread | None:
        """Give each fill its device; says how, where that was to be found out."""
        paths = [by_tensor[id(fill.tensors[0])][0].path for fill in fills]
        if not self._auto:
            for path, fill in zip(paths, fills, strict=True):
                fill.device = self.first if self._by_path is None else self._by_path.get(path, self.first)
            return None
        found = spread(_sizes(fills, by_tensor), blocks_of(self._model), self._devices)
        for path, fill in zip(paths, fills, strict=True):
            # What fits nowhere is counted where it would have to be, so that the refusal has the numbers.
            fill.device = found.placement.get(path, self._devices[-1].device)
        return found

    def would_fit(
        self, fills: list[Fill], by_tensor: dict[int, list[Place]], need: dict[torch.device, int]
    ) -> tuple[str, ...]:
        """The first parts that there is room for, where there is not enough for all.

        Args:
            fills: What is to be filled.
            by_tensor: The places of each tensor.
            need: Bytes that are needed at most, by device.
        """
        free = {device: devices.free_nbytes(device) for device in need}
        if all(nbytes <= free[device] for device, nbytes in need.items()):
            return ()
        sizes = _sizes(fills, by_tensor)
        # What is worked with besides the values themselves takes its share.
        total = sum(sizes.values())
        share = {device: total / nbytes for device, nbytes in need.items() if nbytes > free[device]}
        room = min(int(free[device] * min(1, part)) for device, part in share.items())
        device = next(iter(need))
        found = spread(sizes, blocks_of(self._model), [Device(device, "", room, room)], reserve=0)
        return tuple(joined(path for path, _, _ in found.parts))


def _sizes(fills: list[Fill], by_tensor: dict[int, list[Place]]) -> dict[str, int]:
    """Bytes of the fills by the first path of each."""
    return {by_tensor[id(fill.tensors[0])][0].path: fill.nbytes for fill in fills}
