"""Which init methods a module has: found in its dictionaries and its class, and nothing of it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metaviz.core.methods import lookup, model_method, needed_arguments, own_method


class Plain(nn.Module):
    pass


class Public(nn.Module):
    def reset_parameters(self): ...


class Private(nn.Module):
    def _reset_parameters(self): ...


class Both(Public, Private):
    pass


class Inherits(Public):
    pass


class Delegates(nn.Module):
    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for")


class Nosy(nn.Module):
    def __getattribute__(self, name):
        raise AssertionError(f"{name} was asked for")


class Strict(type):
    def __getattribute__(cls, name):
        raise AssertionError(f"{name} was asked for")


class Unasked(nn.Module, metaclass=Strict):
    def reset_parameters(self): ...


class Property(nn.Module):
    @property
    def reset_parameters(self):
        raise AssertionError("it ran")


def on_the_instance():
    module = Plain()
    module.reset_parameters = lambda: None
    return module


def as_a_child():
    module = Plain()
    module.reset_parameters = nn.Linear(1, 1)
    return module


def bare(cls) -> nn.Module:
    module = object.__new__(cls)
    object.__getattribute__(module, "__dict__").update(vars(nn.Module()))
    return module


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Plain, None),
        (Public, "reset_parameters"),
        (Private, "_reset_parameters"),
        (Both, "reset_parameters"),
        (Inherits, "reset_parameters"),
        (Property, "reset_parameters"),
        (on_the_instance, "reset_parameters"),
        (as_a_child, "reset_parameters"),
        (lambda: bare(Delegates), "reset_parameters"),
        (lambda: bare(Nosy), "reset_parameters"),
        (lambda: bare(Unasked), "reset_parameters"),
        (lambda: nn.MultiheadAttention(2, 1), "_reset_parameters"),
        (nn.ReLU, None),
    ],
)
def test_the_better_known_name_is_found_without_a_question_to_the_module(make, name):
    assert own_method(make()) == name


class TakesModule(nn.Module):
    def _init_weights(self, module): ...


class TakesNothing(nn.Module):
    def init_weights(self): ...


class Flexible(nn.Module):
    def _init_weights(self, module, std=0.02): ...


class Greedy(nn.Module):
    def _init_weights(self, module, std): ...


class Static(nn.Module):
    @staticmethod
    def _init_weights(module): ...


class Fallback(nn.Module):
    def _init_weights(self, module, std): ...

    def init_weights(self): ...


class Wants(nn.Module):
    def init_weights(self, std): ...


class Number(nn.Module):
    _init_weights = 3


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (Plain, None),
        (TakesModule, ("_init_weights", True)),
        (Flexible, ("_init_weights", True)),
        (Static, ("_init_weights", True)),
        (TakesNothing, ("init_weights", False)),
        (Fallback, ("init_weights", False)),
        (Greedy, None),
        (Wants, None),
        (Number, None),
    ],
)
def test_the_method_of_a_model_is_one_that_can_be_called(cls, found):
    assert model_method(cls()) == found


def test_arguments_that_must_be_given_are_named():
    def method(first, second=1, *rest, third, fourth=2, **more): ...

    assert needed_arguments(method) == ["first", "third"]
    assert needed_arguments(lambda: None) == []
    assert needed_arguments(torch.Tensor.add_) == []


def test_a_slot_and_an_attribute_are_found_before_the_class():
    module = Public()
    assert lookup(module, "reset_parameters") is Public.reset_parameters
    module.register_buffer("reset_parameters_", torch.ones(1))
    assert lookup(module, "reset_parameters_") is module.reset_parameters_
    assert lookup(module, "nothing_of_the_kind") is None
