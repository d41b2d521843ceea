"""For tests of shardings: meshes under the fake backend, and parts of tensors cut out by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import metaviz


@pytest.fixture(name="simulated")
def worlds() -> Iterator[Callable[..., Any]]:
    """``simulated("dp=2,tp=2", rank=1)`` is a mesh under the fake backend; the one before it is closed."""
    hook, worlds = sys.excepthook, []

    def start(plan: str, rank: int = 0) -> Any:
        while worlds:
            worlds.pop().close()
        worlds.append(metaviz.mesh(plan, simulate=True, rank=rank))
        return worlds[-1].device_mesh

    yield start
    while worlds:
        worlds.pop().close()
    assert not torch.distributed.is_initialized() and sys.excepthook is hook


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in which each value is there once."""
    return torch.arange(math.prod(shape)).reshape(shape)


def cut(whole: torch.Tensor, runs: Any) -> torch.Tensor:
    """The part of a tensor that is in some runs of each dim."""
    for dim, held in enumerate(runs):
        indices = [index for start, end in held for index in range(start, end)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
