"""Modules that are alike are tried once; those that are not, each."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import init

import metaviz
from metaviz.core.alike import Kinds
from metaviz.core.reset import Resets


class Layer(nn.Module):
    def __init__(self, size: int = 2, std: object = 0.1, child: nn.Module | None = None):
        super().__init__()
        self.std = std
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(size, 2))
            self.register_buffer("steps", torch.empty(2))
        self.child = child

    def reset_parameters(self):
        init.normal_(self.weight, std=self.std)


def changed(**values: object) -> Layer:
    layer = Layer()
    for name, value in values.items():
        setattr(layer, name, value)
    return layer


def with_views() -> Layer:
    layer = Layer()
    layer.weight.data = layer.steps.expand(2, 2)
    return layer


class Other(Layer):
    pass


DIFFERENT = {
    "shape": lambda: Layer(3),
    "class": lambda: Other(),
    "setting": lambda: Layer(std=0.2),
    "type of a setting": lambda: Layer(std=1),
    "list": lambda: changed(sizes=[1, 2]),
    "child": lambda: Layer(child=nn.Linear(2, 2, device="meta")),
    "mode": lambda: changed(training=False),
    "dtype": lambda: Layer().half(),
    "frozen": lambda: Layer().requires_grad_(False),
    "buffer gone": lambda: changed(steps=None),
    "method of its own": lambda: changed(reset_parameters=lambda: None),
    "values": lambda: changed(steps=torch.ones(2)),
    "shared memory": with_views,
}


def numbers(*modules: nn.Module) -> list[int]:
    inside = [child for module in modules for child in module.children()]
    kinds = Kinds([*inside, *modules])
    return [kinds.of[id(module)] for module in modules]


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_what_can_make_a_difference_does(make):
    first, second, third = numbers(Layer(), make(), Layer())
    assert first == third != second


def test_settings_that_are_equal_are_alike():
    def make() -> Layer:
        return changed(std=float("0.25"), name="".join(["a", "b"]), sizes=[1, (2, None)], part=slice(1, 2))

    assert len(set(numbers(make(), make()))) == 1
    assert (
        len(
            set(
                numbers(
                    Layer(child=nn.Linear(2, 2, device="meta")), Layer(child=nn.Linear(2, 2, device="meta"))
                )
            )
        )
        == 1
    )


def test_a_tensor_that_several_hold_sets_its_modules_apart():
    tied, other, plain = Layer(), Layer(), Layer()
    other.weight = tied.weight
    first, second, third = numbers(tied, other, plain)
    assert first == second != third


def test_a_setting_that_cannot_be_compared_makes_a_kind_of_its_own():
    class Odd(type):
        def __hash__(cls):
            raise TypeError("no hash")

    odd = Odd("odd", (), {})
    assert len(set(numbers(changed(kind=odd), changed(kind=odd), Layer()))) >= 2


def test_each_kind_is_tried_once():
    tried = []

    class Noted(Layer):
        def reset_parameters(self):
            tried.append(self.std)
            super().reset_parameters()

    model = nn.Sequential(*(Noted(std=std) for std in (0.1, 0.2) for _ in range(50)))
    resets = Resets(model)
    assert {resets.own(layer).state for layer in model} == {"ran"}
    assert sorted(tried) == [0.1, 0.2]
    assert (
        metaviz.tree(model)
        .verdict("7.weight", "reset")
        .reason.startswith("Noted.reset_parameters(): normal_(0, 0.1)")
    )


def test_paths_and_order_are_found_in_a_deep_model():
    model = nn.Linear(2, 2, device="meta")
    for _ in range(3000):
        model = nn.Sequential(model)
    resets = Resets(model)
    deepest = model
    while isinstance(deepest, nn.Sequential):
        deepest = deepest[0]
    assert resets.path(deepest) == ".".join(["0"] * 3000)
    assert resets.own(deepest).state == "ran"
    assert [step.way for step in resets.steps(deepest, "weight")] == ["reset"]
