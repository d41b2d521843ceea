"""How much memory materializing a subtree takes at most, next to the bytes that it keeps.

Run by hand: python tests/benchmarks/memory.py. Each case runs in a process of its own, whose resident memory is
sampled while it works. The goal: no more than the subtree, its largest temporary and 64 MB. Ends with status 1 where
it is missed.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from build import deepseek, llama, mixture
from torch import nn

import metaviz

SLACK = 64_000_000
SMALL = {"num_hidden_layers": 2, "vocab_size": 512}


def transformer() -> nn.Module:
    """An encoder and a decoder: copies of layers, drawn anew."""
    return nn.Transformer(1024, 16, 4, 4, 4096, batch_first=True)


def orthogonal() -> nn.Module:
    """A QR decomposition for each weight."""
    model = nn.Sequential(*(nn.Linear(3000, 3000) for _ in range(4)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    return model


def trunc_normal() -> nn.Module:
    """Draws in a loop until all values lie within the bounds."""
    model = nn.Sequential(*(nn.Linear(4000, 4000) for _ in range(4)))
    for layer in model:
        nn.init.trunc_normal_(layer.weight, std=0.02)
    return model


def scratch() -> nn.Module:
    """Values by way of a chain of temporaries."""
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(16_000_000.0).mul(0.5).sin().add(1).view(4000, 4000))
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], dict]] = {
    "Llama-70B, a layer": (llama, {"paths": "model.layers.40"}),
    "the same in bfloat16": (llama, {"paths": "model.layers.40", "dtype": "bfloat16"}),
    "cast in the constructor": (lambda: llama(**SMALL).half(), {"paths": "model.layers"}),
    "DeepSeek-V3, attention": (deepseek, {"paths": "model.layers.30.self_attn"}),
    "20,000-module mixture": (mixture, {"paths": "7"}),
    "nn.Transformer": (transformer, {}),
    "orthogonal": (orthogonal, {}),
    "trunc_normal": (trunc_normal, {}),
    "chain of temporaries": (scratch, {}),
    "keyed": (mixture, {"paths": "7", "rng": "keyed"}),
}


def measure(name: str) -> None:
    """Materialize one case; print the numbers, and end with status 1 if it took too much."""
    make, arguments = CASES[name]
    model = metaviz.build(make)
    plan = metaviz.plan(model, **arguments)
    # What is worked out once per process (how much each op draws) is no part of the subtree.
    metaviz.materialize(metaviz.build(nn.Linear, 300, 300))
    gc.collect()
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    metaviz.materialize(model, **arguments)
    done.set()
    thread.join()
    kept = process.memory_info().rss - before
    took = max(peak - before, kept)
    planned = plan.peak_nbytes[plan.device]
    over = took - planned
    print(
        f"{name:24} keeps {plan.nbytes / 1e6:6,.0f} MB, temporary {(planned - plan.nbytes) / 1e6:5,.0f} MB, "
        f"took {took / 1e6:6,.0f} MB at most: {over / 1e6:+5.0f} MB{'' if over <= SLACK else '  TOO MUCH'}",
        flush=True,
    )
    sys.exit(over > SLACK)


def main() -> None:
    """Measure one case, or all."""
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    failed = [name for name in CASES if subprocess.run([sys.executable, __file__, name]).returncode]
    sys.exit(f"too much memory: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
