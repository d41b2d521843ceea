"""Process groups for tests: each is made by torch itself, and taken down again with what it has left behind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def _group(**options) -> Iterator[None]:
    assert not dist.is_initialized(), "a process has one default group"
    hook = sys.excepthook
    dist.init_process_group(**options)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook


def fake(size: int, rank: int = 0) -> contextlib.AbstractContextManager[None]:
    """A world in which nothing is sent, by torch's own means."""
    return _group(backend="fake", store=FakeStore(), rank=rank, world_size=size)


def gloo(**options) -> contextlib.AbstractContextManager[None]:
    """A real group of this process alone."""
    return _group(**({"backend": "gloo"} | options), store=dist.HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    """Tensors that are made without a device are on this one."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        # torch 2.6 cannot tell its default device after that: it takes the empty context for one.
        torch._GLOBAL_DEVICE_CONTEXT.__dict__.pop("device_context", None)


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    """Fail a test that leaves a process group or another excepthook behind."""
    hook = sys.excepthook
    assert not dist.is_initialized()
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left
    assert sys.excepthook is hook


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that makes or asks for a process group or a mesh while it looks at one."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("looking has started something")

    for module in (dist, dist.distributed_c10d):
        for name in ("init_process_group", "new_group", "split_group", "destroy_process_group", "all_reduce"):
            monkeypatch.setattr(module, name, started)
    for module in (dist, torch.distributed.device_mesh):
        monkeypatch.setattr(module, "init_device_mesh", started)
