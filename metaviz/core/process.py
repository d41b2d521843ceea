"""What belongs to the whole process and any code may change in passing: looked at before, put back afterwards."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from metaviz.core import silence

# How to ask for a part of the state, and how to set it.
_Part = tuple[Callable[[], Any], Callable[[Any], None]]


class ProcessState:
    """The state of the process now; :meth:`put_back` makes it so again.

    Environment variables are not in it: the audit hook tells which of them are set (`core/audit.py`).
    """

    def __init__(self) -> None:
        self._before = [(get, put, get()) for get, put in _parts()]

    def put_back(self) -> None:
        """Set what has changed, and leave alone what has not: other threads may be using it."""
        for get, put, before in self._before:
            if get() != before:
                put(before)


def _parts() -> list[_Part]:
    filters, path = warnings.filters, sys.path
    parts = [
        (random.getstate, random.setstate),
        (torch.get_default_dtype, torch.set_default_dtype),
        (_deterministic, lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1])),
        (_unless_imported(path.copy), functools.partial(path.__setitem__, slice(None))),
        (_unless_imported(lambda: _filters_of(filters)), functools.partial(_set_filters, filters)),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (gc.isenabled, lambda on: (gc.enable if on else gc.disable)()),
    ]
    if "numpy.random" in sys.modules:
        numpy_random = sys.modules["numpy.random"]
        parts.append(
            (
                lambda: pickle.dumps(numpy_random.get_state(legacy=False)),
                lambda state: numpy_random.set_state(pickle.loads(state)),
            )
        )
    for generator in _generators():
        parts.append((functools.partial(_draws, generator), functools.partial(_set_draws, generator)))
    for backend in (torch.cuda, torch.xpu):
        # Seeds that wait for the device to be initialized.
        tracker = getattr(backend, "_lazy_seed_tracker", None)
        if tracker is not None:
            parts.append((vars(tracker).copy, vars(tracker).update))
    return parts


def _unless_imported(get: Callable[[], list]) -> Callable[[], list]:
    """``get``, but no change where modules were imported: these extend such lists for good."""
    count, before = len(sys.modules), get()
    return lambda: get() if len(sys.modules) == count else before


def _filters_of(filters: list) -> list:
    return [entry for entry in filters if entry is not silence.UNHEARD]


def _set_filters(filters: list, before: list) -> None:
    filters[:] = [entry for entry in filters if entry is silence.UNHEARD] + before


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _generators() -> list[torch.Generator]:
    """The global generators of the CPU and of the devices in use; asking initializes no device."""
    # Torch makes this one when it is drawn from first.
    mps = getattr(torch.mps, "_default_mps_generator", None)
    found = [torch.default_generator, *torch.cuda.default_generators, *torch.xpu.default_generators]
    return found if mps is None else [*found, mps]


def _draws(generator: torch.Generator) -> bytes:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return generator.get_state().numpy().tobytes()


def _set_draws(generator: torch.Generator, state: bytes) -> None:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
