"""Devices that can hold values, and how much of their memory is free."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from metaviz.core.units import format_bytes
from metaviz.errors import UnknownDevice


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A device that can hold values.

    Attributes:
        device: As torch names it.
        name: What people call it.
        total_nbytes: Bytes of its memory, None where it does not say.
        free_nbytes: Bytes that can still be allocated, None where it does not say.
    """

    device: torch.device
    name: str
    total_nbytes: int | None
    free_nbytes: int | None

    def __str__(self) -> str:
        known = [
            f"{format_bytes(nbytes)} {word}"
            for nbytes, word in ((self.free_nbytes, "free"), (self.total_nbytes, "in all"))
            if nbytes is not None
        ]
        return f"{self.device}: {self.name}, {' of '.join(known) or 'memory not known'}"


def listed() -> tuple[Device, ...]:
    """Every device that tensors can be materialized on, accelerators first and the CPU last.

    To say how much of its memory is free, an accelerator of most kinds needs a context in this process, which takes
    memory of it: torch has no other way to ask.
    """
    return tuple(described(torch.device(name)) for name in [*names()[1:], "cpu"])


def described(device: torch.device) -> Device:
    """What is known about one of them."""
    if device.type == "cpu":
        limit = _cgroup_limit()
        total = psutil.virtual_memory().total
        return Device(device, _processor(), min(total, limit), free_nbytes(device))
    module = torch.get_device_module(device)
    ask = getattr(module, "get_device_name", lambda _: device.type.upper())
    memory = getattr(module, "mem_get_info", lambda _: (None, None))
    try:
        free, total = memory(device)
        return Device(device, ask(device), total, free)
    except RuntimeError:
        # It is there and does not answer: taken by another process, out of order, or this process was forked.
        return Device(device, device.type.upper(), None, None)


def _processor() -> str:
    """The processor as Linux names it; elsewhere what Python knows."""
    try:
        with open("/proc/cpuinfo") as file:
            found = next((line.partition(":")[2] for line in file if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found.strip() or platform.processor() or "CPU"


def names() -> list[str]:
    """Every device that tensors can be materialized on: ``["cpu", "cuda:0", ...]``."""
    found = ["cpu"]
    # device_count comes first: torch 2.6 raises if it is asked for the accelerator of a machine that has none.
    count = torch.accelerator.device_count()
    if count:
        found += [f"{torch.accelerator.current_accelerator().type}:{i}" for i in range(count)]
    return found


def resolve(device: Any) -> torch.device:
    """The device that a user means by ``device`` (a string, an index or a ``torch.device``; None is the CPU).

    Raises:
        UnknownDevice: It is not a device, holds no values (meta), or this machine does not have it.
    """
    known = names()
    advice = (
        f"This machine has: {', '.join(known)}. Next: metaviz.materialize(model, paths, device={known[-1]!r})"
    )
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError):
        raise UnknownDevice(f"{device!r} is not a device. {advice}") from None
    if found.type == "meta":
        raise UnknownDevice(
            f"The meta device holds no values, so nothing can be materialized there. {advice}"
        )
    wanted = str(found) if found.type == "cpu" or found.index is not None else f"{found.type}:0"
    if wanted not in known and found != torch.device("cpu", 0):
        raise UnknownDevice(f"There is no device {device!r} here. {advice}")
    return torch.device("cpu") if found.type == "cpu" else torch.device(wanted)


def free_nbytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cpu":
        return min(psutil.virtual_memory().available, _cgroup_free())
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    # Where there is nothing to ask, as on Apple's chips, the device shares the memory of the CPU.
    return ask(device)[0] if ask else free_nbytes(torch.device("cpu"))


def resident_nbytes() -> int:
    """Bytes of memory that this process takes now."""
    return psutil.Process().memory_info().rss


_UNLIMITED = 1 << 62


def _cgroup_free() -> int:
    """Bytes that the container may still take; more than any machine has where there is no limit.

    Each control group above this process may have a limit, and what is in use counts in all of them. Source: the
    kernel's documentation of control groups, v2 (memory.max, memory.current, memory.stat) and v1
    (memory.limit_in_bytes, memory.usage_in_bytes).
    """
    return min((max(0, limit - used) for limit, used in _cgroups()), default=_UNLIMITED)


def _cgroup_limit() -> int:
    return min((limit for limit, _ in _cgroups()), default=_UNLIMITED)


def _cgroups(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> Iterator[tuple[int, int]]:
    """``(limit, bytes in use that are not given back under pressure)`` of each control group with a limit."""
    try:
        with open(own) as file:
            lines = [line.strip().split(":", 2) for line in file]
    except OSError:
        lines = []
    groups = [("", "/")]
    for _, kinds, path in (line for line in lines if len(line) == 3):
        if kinds in ("", "memory"):
            groups.append(("memory" if kinds else "", path))
    seen = set()
    for kind, path in groups:
        parts = [part for part in path.split("/") if part and part != ".."]
        for k in range(len(parts) + 1):
            folder = os.path.join(root, kind, *parts[:k])
            if folder not in seen:
                seen.add(folder)
                yield from _limits(folder)


def _limits(folder: str) -> Iterator[tuple[int, int]]:
    for most, current in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            with open(os.path.join(folder, most)) as limit, open(os.path.join(folder, current)) as used:
                text, now = limit.read().strip(), int(used.read())
            with open(os.path.join(folder, "memory.stat")) as stat:
                counts = dict(line.split() for line in stat)
        except (OSError, ValueError):
            continue
        # v1 says "none" with the largest number that fits.
        if text != "max" and int(text) < 1 << 60:
            # The page cache is given back under pressure. v1 counts that of the groups below apart, unlike their use.
            cache = counts.get("total_inactive_file") or counts.get("inactive_file", 0)
            yield int(text), max(0, now - int(cache))
