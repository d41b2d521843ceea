"""What calling the init methods by hand gives: the reference for a reset."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

import metaviz
from metaviz.core.paths import Model

SEED = 6


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {place.path: place.slot.tensor for place in Model(model).places}


def seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def draws() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def children_first(module: nn.Module, seen: set[int]) -> list[nn.Module]:
    if id(module) in seen:
        return []
    seen.add(id(module))
    below = [each for child in module.children() for each in children_first(child, seen)]
    return [*below, module]


def by_hand(make, *which: str) -> tuple[nn.Module, tuple]:
    """The model after its methods were called, on memory full of NaN, and where the generators are then."""
    model = make()
    for tensor in tensors(model).values():
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
    seed()
    chosen = model if not which else model.get_submodule(which[0])
    with torch.no_grad():
        for module in children_first(chosen, set()):
            method = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if method is not None:
                method()
    return model, draws()


def reset(make, paths="", **options) -> tuple[nn.Module, tuple]:
    model = metaviz.build(make)
    seed()
    metaviz.materialize(model, paths, source="reset", **options)
    return model, draws()


def assert_same(model: nn.Module, hand: nn.Module) -> None:
    mine, theirs = tensors(model), tensors(hand)
    assert mine.keys() == theirs.keys()
    for path, tensor in mine.items():
        assert torch.equal(tensor, theirs[path]), path
