"""Replay next to an ordinary build of the same modules, and a model's last layer next to its first.

Run by hand: python tests/benchmarks/replay.py [rounds]. Times are medians of interleaved rounds in one process. The
goals: a ratio of at most 1.1, and for the last layer of 70 billion parameters at most a second more than for the first.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from build import Layer, llama, mixture, timed
from torch import nn

import metaviz
from metaviz.core.units import format_seconds

SMALL = {"num_hidden_layers": 2, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 4096}


def linears() -> nn.Module:
    """Plain layers, each drawn once and in place."""
    return nn.Sequential(*(nn.Linear(3000, 3000) for _ in range(8)))


def trunc_normal() -> nn.Module:
    """As a vision transformer is initialized."""
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(8)))
    for layer in model:
        nn.init.trunc_normal_(layer.weight, std=0.02)
    return model


def in_bfloat16(make: Callable[[], nn.Module]) -> nn.Module:
    """Built under another default dtype, as transformers does it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "8 linears": linears,
    "nn.Transformer": lambda: nn.Transformer(512, 8, 6, 6, 2048),
    "trunc_normal": trunc_normal,
    "2 Llama layers": lambda: llama(**SMALL),
    "the same in bfloat16": lambda: in_bfloat16(lambda: llama(**SMALL)),
    "a layer of a mixture": lambda: Layer(32, 1024, 768),
    "20,125 tiny modules": lambda: mixture(width=16, inner=8),
}


def compare(name: str, rounds: int) -> None:
    """Print the medians of an ordinary build and of a replay, and their ratios."""
    make = MODELS[name]
    ordinary, replayed = [], []
    metaviz.materialize(metaviz.build(make))
    for seed in range(rounds):
        torch.manual_seed(seed)
        ordinary.append(timed(make))
        # Built anew: a tape remembers what it has met.
        torch.manual_seed(seed)
        model = metaviz.build(make)
        replayed.append(timed(lambda model=model: metaviz.materialize(model)))
        del model
    show(name, "ordinary", ordinary, "replay", replayed)


def show(name: str, one: str, first: list, other: str, second: list) -> None:
    """Print two series of (wall, CPU) seconds and how they compare."""
    for unit, which in (("wall", 0), ("CPU", 1)):
        a, b = (statistics.median(run[which] for run in runs) for runs in (first, second))
        ratio = statistics.median(y[which] / x[which] for x, y in zip(first, second, strict=True))
        print(
            f"{name:22} {unit:4}  {one} {format_seconds(a):>8}  {other} {format_seconds(b):>8}"
            f"  ratio {ratio:.2f}, {b - a:+.2f} s",
            flush=True,
        )


def first_and_last(rounds: int) -> None:
    """Materialize layer 0 or layer 79 alone, each of a model built anew, in bfloat16."""
    first, last = [], []
    for _ in range(rounds):
        for path, times in (("model.layers.0", first), ("model.layers.79", last)):
            model = in_bfloat16(lambda: metaviz.build(llama))
            times.append(timed(lambda model=model, path=path: metaviz.materialize(model, path)))
            del model
    show("Llama-70B in bfloat16", "first", first, "last", last)


def main() -> None:
    """Compare all models."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name in MODELS:
        compare(name, rounds)
    first_and_last(min(rounds, 2))


if __name__ == "__main__":
    main()
