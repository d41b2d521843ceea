"""What a look costs, next to what torch itself needs to print and walk a model. Run by hand, from the checkout:

PYTHONPATH=.:tests python tests/benchmarks/tree_views.py [layers experts]
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import torch
from trees import mixture, yes

import metaviz
from metaviz.core.replayable import replay_verdict
from metaviz.core.tree import tree
from metaviz.core.units import format_bytes, format_seconds
from metaviz.views.html import html
from metaviz.views.text import text

ROUNDS = 7


def cost(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of some rounds, garbage collection included."""
    best = float("inf")
    for _ in range(ROUNDS):
        gc.collect()
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def report(name: str, seconds: float, base: float) -> None:
    """One line: a cost, and how it compares."""
    print(f"{name:44}{format_seconds(seconds):>10}{seconds / base:>8.2f}")


def main() -> None:
    """Print the ratios for a mixture of experts, unrecorded and recorded."""
    layers, experts = map(int, sys.argv[1:3] or (80, 128))
    for name, model, answer in (
        ("not recorded", mixture(layers, experts), replay_verdict),
        ("any answer", mixture(layers, experts), yes),
        ("recorded", metaviz.build(mixture, layers, experts, torch.device("cpu")), replay_verdict),
    ):
        modules = sum(1 for _ in model.modules())
        printed = cost(lambda model=model: repr(model))
        walked = cost(lambda model=model: (list(model.named_modules()), list(model.named_parameters())))
        base = printed + walked
        shown = tree(model, answer=answer)
        print(f"\n{modules:,} modules, {name}: text {format_bytes(len(text(shown).encode()))}, ", end="")
        print(f"HTML {format_bytes(len(html(shown).encode()))}")
        report("print(model)", printed, base)
        report("named_modules() and named_parameters()", walked, base)
        looked = cost(lambda model=model, answer=answer: tree(model, answer=answer))
        report("tree(model)", looked, base)
        report("text and HTML", cost(lambda shown=shown: (text(shown), html(shown))), base)
        whole = cost(lambda m=model, a=answer: (lambda t: (text(t), html(t)))(tree(m, answer=a)))
        report("tree, text and HTML (goal: under 2)", whole, base)
        report("rows", cost(lambda model=model, answer=answer: tree(model, answer=answer).rows), base)


if __name__ == "__main__":
    main()
