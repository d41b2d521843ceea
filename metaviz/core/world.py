"""The job that this process is part of, or not yet: read without side effects, or simulated for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from metaviz.core.units import plural
from metaviz.errors import BadMesh

_LAUNCH = "torchrun --nproc-per-node 4 train.py  # in a terminal"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class World(NamedTuple):
    """What is known of a job.

    Attributes:
        state: `"unavailable"`, `"waiting"`, `"simulated"` or `"ready"`.
        rank: Of this process, None where it has none.
        size: How many ranks there are, None where that is not known.
        backend: Of the default group.
        reason: Why it is in this state, in a sentence.
        step: The next step as code.
    """

    state: str
    rank: int | None
    size: int | None
    backend: str | None
    reason: str
    step: str | None


def world() -> World:
    """What is known of the job of this process. Nothing is started, and no group is made."""
    # Not at the top: a build of torch without it has no such module, and `%load_ext` needs none of it.
    import torch.distributed as distributed

    if not distributed.is_available():
        return World(
            "unavailable",
            None,
            None,
            None,
            "This build of torch has no torch.distributed, so there are no meshes but planned ones.",
            'metaviz.mesh("dp=2,tp=4")',
        )
    if not distributed.is_initialized():
        return _awaited()
    backend = backend_of()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if backend == "fake":
        reason = (
            "Its backend is fake: the layout is real, but nothing is sent, and values are not to be trusted."
        )
        return World("simulated", rank, size, backend, reason, None)
    return World(
        "ready", rank, size, backend, f"The process group is there: {plural(size, 'rank')}, {backend}.", None
    )


def backend_of(group: Any = None) -> str:
    """What a group communicates with, such as `"gloo"`; the default group if None."""
    import torch.distributed as distributed

    name = str(distributed.get_backend(group))
    # The name of a group that was started without one: it has a backend for each kind of device.
    return str(distributed.get_backend_config(group)) if name == "undefined" else name


def _awaited() -> World:
    # Torch takes an empty variable for one that is not set.
    found = {name: os.environ.get(name) or None for name in VARIABLES}
    missing = [name for name, value in found.items() if value is None]
    rank, size = _number(found["RANK"]), _number(found["WORLD_SIZE"])
    if not missing and (rank is None or size is None or not rank < size):
        said = " and ".join(f"{name}={found[name]!r:.40}" for name in ("RANK", "WORLD_SIZE"))
        reason = f"No process group yet, and {said} name no rank of a job: ranks are counted from 0 to WORLD_SIZE - 1."
        step = _LAUNCH
        rank, size = None, None
    elif not missing:
        where = f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}"
        reason = (
            f"The launcher has set everything (rank {found['RANK']} of {found['WORLD_SIZE']}, {where}), and "
            "init_process_group was not called yet. It waits until all ranks have called it."
        )
        step = "torch.distributed.init_process_group()"
    elif len(missing) < len(VARIABLES):
        reason = f"No process group yet, and {', '.join(missing)} is not set, which a launcher such as torchrun does."
        step = _LAUNCH
    else:
        reason = (
            "No process group yet: this process was started alone, not by a launcher such as torchrun. A notebook "
            "kernel is one rank at most."
        )
        step = 'torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
    return World("waiting", rank, size, None, reason, step)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None


@contextlib.contextmanager
def simulated(size: int, rank: int = 0) -> Iterator[None]:
    """A fake job of some ranks for the time of a block, in this process alone.

    Source: torch 2.13, torch/testing/_internal/distributed/fake_pg.py registers the backend `"fake"`.

    Raises:
        BadMesh: There is a process group already, and a process can have one only; or torch has no distributed.
    """
    import torch.distributed as distributed

    if not distributed.is_available():
        raise BadMesh("This build of torch has no torch.distributed. Next: metaviz.mesh('dp=2,tp=4')")
    if distributed.is_initialized():
        raise BadMesh(
            f"There is a process group already ({distributed.get_backend()}, {distributed.get_world_size()} ranks), "
            "and a process has one at most. It is left alone. Next: torch.distributed.destroy_process_group()"
        )
    hook = sys.excepthook
    distributed.init_process_group(store=_store(), backend="fake", rank=rank, world_size=size)
    # Each start wraps the hook once more, and no end unwraps it.
    own, wrapped = distributed.group.WORLD, sys.excepthook
    try:
        yield
    finally:
        if distributed.is_initialized() and distributed.group.WORLD is own:
            distributed.destroy_process_group()
        if sys.excepthook is wrapped:
            # Another one was set by somebody else meanwhile, and is theirs.
            sys.excepthook = hook


def _store() -> Any:
    # Importing it registers the backend; newer versions do so by themselves and take it all the same.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
