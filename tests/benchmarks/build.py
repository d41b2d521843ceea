"""A recorded build next to a plain one under `torch.device("meta")`: time, and how much the process grows.

Run by hand: python tests/benchmarks/build.py [rounds]. Times are medians of interleaved rounds in one process;
growth is measured in a process of its own per model. The goals: a ratio of at most 2 (1.5 later), less than 300 MB.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from torch import nn

import metaviz
from metaviz.core.units import format_seconds


class Expert(nn.Module):
    """Three projections, as in a gated MLP."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self, experts: int, width: int, inner: int):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))
        self.norm = nn.RMSNorm(width)


def mixture(layers: int = 39, experts: int = 128, width: int = 2048, inner: int = 768) -> nn.Module:
    """20,125 modules by default."""
    return nn.ModuleList(Layer(experts, width, inner) for _ in range(layers))


def llama(**changes) -> nn.Module:
    """The Llama-3.1-70B config, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | changes)))


def deepseek(**changes) -> nn.Module:
    """The DeepSeek-V3 config, which is the default of its class, with random weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(**changes))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "deepseek": deepseek, "mixture": mixture}
TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}


def timed(make: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds; what is made is thrown away outside of the measured time."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    made = make()
    spent = time.perf_counter() - wall, time.process_time() - cpu
    del made
    return spent


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A plain meta build."""
    with torch.device("meta"):
        return make()


def compare(name: str, rounds: int) -> None:
    """Print the medians of a plain and a recorded build, and their ratios."""
    make = MODELS[name]
    count = sum(1 for _ in on_meta(make).modules())
    metaviz.build(make)
    plain, recorded = [], []
    for _ in range(rounds):
        plain.append(timed(lambda: on_meta(make)))
        recorded.append(timed(lambda: metaviz.build(make)))
    for unit, which in (("wall", 0), ("CPU", 1)):
        before, after = (statistics.median(run[which] for run in runs) for runs in (plain, recorded))
        ratio = statistics.median(b[which] / a[which] for a, b in zip(plain, recorded, strict=True))
        print(
            f"{name:9} {count:7,} modules  {unit:4}  plain {format_seconds(before):>8}"
            f"  recorded {format_seconds(after):>8}  ratio {ratio:.2f}"
        )


def growth(name: str) -> None:
    """Print how much the resident memory of this process grows at most while it builds one model."""
    if name != "mixture":
        metaviz.build(MODELS[name], **TINY)
    gc.collect()
    process, peak, done = psutil.Process(), 0, threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    model = metaviz.build(MODELS[name])
    after = process.memory_info().rss
    done.set()
    thread.join()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    most = max(peak, after)
    print(
        f"{name:9} {nbytes / 2**30:7,.0f} GiB of parameters  the process grows by {(after - before) / 1e6:.0f} MB, "
        f"at most {(most - before) / 1e6:.0f} MB"
    )


def main() -> None:
    """Compare and measure all models."""
    if sys.argv[1:2] == ["--growth"]:
        growth(sys.argv[2])
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name in MODELS:
        compare(name, rounds)
    for name in MODELS:
        subprocess.run([sys.executable, __file__, "--growth", name], check=True)


if __name__ == "__main__":
    main()
