"""Runs: which replays give some fills their values, and how much memory they take at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from metaviz.core.choice import Fill
from metaviz.core.replay import CPU, peak_nbytes


def runs(fills: Iterable[Fill], rng: str) -> dict[torch.device, dict[int, list[Fill]]]:
    """The fills by the device that they are computed on, and by the id of their tape: one replay serves each group.

    Args:
        fills: What is to be filled.
        rng: ``"eager"`` draws on the CPU, whatever the device; ``"keyed"`` and ``"device"`` on the device itself.
    """
    found: dict[torch.device, dict[int, list[Fill]]] = {}
    for fill in fills:
        # What is read draws nothing, and comes to the CPU first.
        where = CPU if rng == "eager" or fill.origin == "checkpoint" else fill.device
        found.setdefault(where, {}).setdefault(id(fill.tape), []).append(fill)
    return found


def peak(fills: list[Fill], rng: str) -> dict[torch.device, int]:
    """Most bytes in use on each device while the runs are done one after the other."""
    need: Counter[torch.device] = Counter()
    done: Counter[torch.device] = Counter()
    for where, by_tape in runs(fills, rng).items():
        for group in by_tape.values():
            stays: Counter[int] = Counter()
            copied: Counter[int] = Counter()
            for fill in group:
                number, kept = fill.source.storage, fill.exact and fill.device == where
                stays[number] += fill.nbytes if kept else 0
                copied[number] += fill.nbytes if fill.device == where and not kept else 0
            most = peak_nbytes(group[0].tape, list(stays), stays, copied)
            need[where] = max(need[where], done[where] + most)
            for fill in group:
                done[fill.device] += fill.nbytes
    for device, nbytes in done.items():
        need[device] = max(need[device], nbytes)
    return {device: nbytes for device, nbytes in need.items() if nbytes}
