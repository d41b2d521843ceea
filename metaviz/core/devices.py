"""Devices that can hold values, and how much of their memory is free. Asking never creates a device context."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from metaviz.errors import UnknownDevice


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


def _cgroup_free() -> int:
    """Bytes that the container may still take; more than any machine has where there is no limit.

    Source: the kernel's documentation of control group v2, files memory.max, memory.current and memory.stat.
    """
    unlimited = 1 << 62
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            most = limit.read().strip()
            if most == "max":
                return unlimited
            used = int(current.read())
        with open("/sys/fs/cgroup/memory.stat") as stat:
            counts = dict(line.split() for line in stat)
    except (OSError, ValueError):
        return unlimited
    # The page cache is given back under pressure.
    return max(0, int(most) - used + int(counts.get("inactive_file", 0)))
