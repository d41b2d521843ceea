"""Loading a sharded safetensors checkpoint of 4 GB: time and memory, next to safetensors itself.

Run by hand: python tests/benchmarks/checkpoint.py [folder]. The folder needs 4.1 GB of room, and is left as it was.
Each measurement runs in a process of its own, the kinds one after the other in several rounds, and the smallest
time counts: how fast fresh memory is to get differs from one run to the next. On the CPU `load_file` only maps the
file: nothing is read before a value is used, and whoever writes to the file changes the tensors. So its tensors are
copied here, to have what metaviz gives: values in memory of one's own.

The goals: all of it in 1.1 times the time of the copy, in 1.05 times the bytes; one of 48 layers in 1/40 of the time
of all. Ends with status 1 where one is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import metaviz

WIDTH, LAYERS, SHARD, ROUNDS = 1024, 48, 500_000_000, 5


class Block(nn.Module):
    """The shapes of a layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Net(nn.Module):
    """48 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16_000, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def write(folder: Path) -> None:
    """The checkpoint, its shards written one after the other."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(places.values())):05d}.safetensors"
        save_file(shard, folder / file)
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in on_meta().state_dict().items():
        shard[name] = torch.randn(tensor.shape)
        if sum(each.nbytes for each in shard.values()) > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def mapped(folder: Path) -> Callable[[], object]:
    return lambda: [load_file(file) for file in sorted(folder.glob("*.safetensors"))]


def copied(folder: Path) -> Callable[[], object]:
    return lambda: [
        {name: tensor.clone() for name, tensor in load_file(file).items()}
        for file in sorted(folder.glob("*.safetensors"))
    ]


def loaded(folder: Path, paths: str = "") -> Callable[[], object]:
    model = on_meta()
    return lambda: metaviz.materialize(model, paths, checkpoint=folder)


KINDS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "load_file, mapped only": mapped,
    "load_file, copied": copied,
    "metaviz, all": loaded,
    "metaviz, one layer": lambda folder: loaded(folder, f"layers.{LAYERS // 2}"),
}


def measure(kind: str, folder: Path) -> None:
    """Print seconds, and bytes of memory at most, of one run."""
    torch.ones(2).clone()
    run = KINDS[kind](folder)
    process, done = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - began
    done.set()
    thread.join()
    most = max(most, process.memory_info().rss) - before
    del kept
    print(json.dumps([seconds, most]))


def main() -> None:
    """Write the checkpoint, measure all kinds, and compare."""
    if len(sys.argv) == 3:
        measure(sys.argv[1], Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        folder = Path(name)
        write(folder)
        nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        results: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}
        for _ in range(ROUNDS):
            for kind, found in results.items():
                command = [sys.executable, __file__, kind, name]
                found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    seconds = {kind: min(each[0] for each in found) for kind, found in results.items()}
    print(f"{nbytes / 1e9:.2f} GB in {LAYERS} layers, the best of {ROUNDS} runs each")
    for kind, found in results.items():
        print(f"{kind:24} {seconds[kind]:7.3f} s, {max(each[1] for each in found) / 1e6:8,.0f} MB at most")
    ratio = seconds["metaviz, all"] / seconds["load_file, copied"]
    part = seconds["metaviz, all"] / seconds["metaviz, one layer"]
    memory = max(each[1] for each in results["metaviz, all"]) / nbytes
    print(f"all: {ratio:.2f} of the copy (goal 1.1), memory {memory:.3f} of the bytes (goal 1.05)")
    print(f"one layer: 1/{part:.0f} of all (goal 1/40)")
    sys.exit(ratio > 1.1 or memory > 1.05 or part < 40)


if __name__ == "__main__":
    main()
