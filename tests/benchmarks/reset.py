"""What the verdicts of a whole model cost. Run by hand, from the checkout:

PYTHONPATH=.:tests python tests/benchmarks/reset.py

The yardstick of the same run: one walk over `named_modules()` and `named_parameters()`, and each kind of module tried
once. Verdicts of all tensors of a mixture of experts shall cost no more than twice that.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch import nn
from trees import mixture

import metaviz
from metaviz.core.methods import Call, own_method
from metaviz.core.paths import Model
from metaviz.core.reset import Resets
from metaviz.core.sources import Slot, Sources
from metaviz.core.tryout import attempt

LAYERS, EXPERTS = 40, 125  # 20,164 modules
RUNS = 5


def seconds(fn: Callable[[], object]) -> float:
    """CPU seconds of the fastest of some runs."""
    times = []
    for _ in range(RUNS):
        gc.collect()
        began = time.process_time()
        fn()
        times.append(time.process_time() - began)
    return min(times)


def walk(model: nn.Module) -> int:
    """The plain walk."""
    return sum(1 for _ in model.named_modules()) + sum(1 for _ in model.named_parameters())


def kinds(model: nn.Module) -> list[nn.Module]:
    """One module of each class and shapes that has an init method."""
    found: dict[tuple, nn.Module] = {}
    for module in model.modules():
        if own_method(module) is not None:
            shapes = tuple(parameter.shape for parameter in module.parameters(recurse=False))
            found.setdefault((type(module), shapes), module)
    return list(found.values())


def tried(model: nn.Module) -> int:
    """How many modules have a method that runs: each kind is tried once."""
    resets = Resets(model)
    trials = (resets.own(module) for module in model.modules())
    return sum(trial is not None and trial.state == "ran" for trial in trials)


def verdicts(model: nn.Module, source: str) -> int:
    """How many tensors the source can give values."""
    sources = Sources(model)
    return sum(
        sources.verdict(p.slot.tensor, Slot(p.module, p.slot.name, p.slot.kind), source).can
        for p in Model(model).places
    )


def measure(name: str, make: Callable[[], nn.Module]) -> None:
    model = make()
    chosen = kinds(model)
    plain = seconds(lambda: walk(model))
    places = seconds(lambda: Model(model).places)
    trials = seconds(lambda: [attempt(Call(module, own_method(module))) for module in chosen])
    yardstick = plain + trials
    print(f"{name}: {sum(1 for _ in model.modules()):,} modules, {len(chosen)} kinds")
    print(
        f"  walk {plain * 1e3:7.1f} ms, one trial per kind {trials * 1e3:.1f} ms, slots {places * 1e3:.1f} ms"
    )
    dry = seconds(lambda: tried(model))
    print(f"  dry runs of all       {dry * 1e3:7.1f} ms = {dry / yardstick:.2f} of walk and trials (goal: 2)")
    for source in ("reset", "auto"):
        cost = seconds(lambda source=source: verdicts(model, source)) - places
        print(f"  verdicts of {source:5} {cost * 1e3:7.1f} ms = {cost / yardstick:.2f} of walk and trials")
    tree = seconds(lambda: metaviz.tree(model, source="reset"))
    print(f"  tree with reset's marks {tree * 1e3:7.1f} ms = {tree / yardstick:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    measure("on meta", lambda: mixture(LAYERS, EXPERTS))
    measure("recorded", lambda: metaviz.build(lambda: mixture(LAYERS, EXPERTS, torch.device("cpu"))))
    print(f"(CPU time, fastest of {RUNS} runs)")


if __name__ == "__main__":
    main()
