"""Roots: what is a copy of one draw, which a method that draws each tensor anew would make different."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import init

import metaviz
from metaviz.core.origin import origin_of
from metaviz.core.signature import root


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def roots(model: nn.Module) -> dict[str, tuple[int, int] | None]:
    origins = {name: origin_of(tensor) for name, tensor in model.named_parameters()}
    return {name: root(origin.tape, origin.window) for name, origin in origins.items()}


def test_copies_of_one_drawn_layer_have_one_root():
    found = roots(metaviz.build(encoder))
    assert found["layers.0.linear1.weight"] == found["layers.1.linear1.weight"] is not None
    assert found["layers.0.linear1.weight"] != found["layers.0.linear2.weight"]
    assert found["layers.0.norm1.weight"] is None


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Embedding(5, 4, padding_idx=0),
        lambda: nn.Linear(4, 4).to(memory_format=torch.contiguous_format),
        lambda: init.orthogonal_(nn.Linear(4, 4).weight) is None or nn.Linear(4, 4),
    ],
)
def test_what_has_one_root_is_equal_in_the_build_and_what_is_drawn_apart_has_two(layer):
    def copies() -> nn.ModuleList:
        one = layer()
        return nn.ModuleList([one, copy.deepcopy(one), copy.deepcopy(one).half(), layer()])

    found = roots(metaviz.build(copies))
    eager = copies()
    assert found["0.weight"] == found["1.weight"] == found["2.weight"] != found["3.weight"]
    assert torch.equal(eager[0].weight, eager[1].weight)
    assert not torch.equal(eager[0].weight, eager[3].weight)


def test_what_was_changed_after_copying_has_a_root_of_its_own():
    def model() -> nn.ModuleList:
        one = nn.Linear(4, 4)
        other = copy.deepcopy(one)
        init.zeros_(other.weight[0])
        return nn.ModuleList([one, other])

    found = roots(metaviz.build(model))
    assert found["0.weight"] != found["1.weight"]
    assert found["0.bias"] == found["1.bias"]


def test_parts_of_one_drawn_storage_have_no_root():
    def model() -> nn.ParameterList:
        both = torch.randn(2, 3)
        return nn.ParameterList([nn.Parameter(both[0]), nn.Parameter(both[1])])

    assert roots(metaviz.build(model)) == {"0": None, "1": None}
