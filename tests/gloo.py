"""Several processes that talk to each other over gloo, on this machine, and what each of them gives back."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

_TESTS = Path(__file__).parent


def together(
    work: Callable[..., Any], folder: Path, *args: Any, many: int = 4, timeout: int = 280
) -> list[Any]:
    """What `work(rank, *args)` returns in each of many processes of one group; it is a function of a test module.

    Args:
        work: What each process does; what it returns is saved with torch.save.
        folder: An empty folder, in which they meet and leave what they return.
        args: For `work`; they travel as JSON.
        many: How many processes.
        timeout: Seconds after which all of them are killed.
    """
    module = sys.modules[work.__module__].__spec__.name.rpartition(".")[2]
    command = [sys.executable, "-W", "ignore", str(_TESTS / "gloo.py"), str(many), str(folder), module]
    command += [work.__name__, json.dumps(args)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(_TESTS.parent), str(_TESTS)])
    # In a session of their own, so that whoever kills the first kills those that it has started.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    first = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        said, _ = first.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert first.returncode == 0, said[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(many)]


def _start(rank: int, many: int, folder: str, module: str, name: str, args: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", meet, timedelta(seconds=150), world_size=many, rank=rank)
    try:
        given = getattr(importlib.import_module(module), name)(rank, *json.loads(args))
        torch.save(given, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(_start, (int(sys.argv[1]), *sys.argv[2:]), nprocs=int(sys.argv[1]))
