"""The program of a reset: which methods run, once and in which order, and what comes of it."""

from __future__ import annotations

import pytest
import torch
from cases import holding
from torch import nn
from torch.nn import init

import metaviz
from metaviz.core.paths import Model
from metaviz.core.program import Program
from metaviz.core.sources import Slot, Sources


def program(model: nn.Module, *paths: str) -> Program:
    """The program for some tensors of a model, or for all."""
    places = {place.path: place for place in Model(model).places}
    wanted = [places[path] for path in paths or places]
    slots = [(p.slot.tensor, Slot(p.module, p.slot.name, p.slot.kind)) for p in wanted]
    return Program(Sources(model), slots)


def called(model: nn.Module, *paths: str) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [
        f"{names[id(call.argument or call.module)]}.{call.method}" for call in program(model, *paths).calls
    ]


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self):
        init.zeros_(self.b.weight)
        init.ones_(self.scale)


def test_children_come_before_the_parent_that_changes_them():
    model = metaviz.build(lambda: nn.Sequential(Parent(), nn.LayerNorm(2)))
    assert called(model) == [
        "0.a.reset_parameters",
        "0.b.reset_parameters",
        "0.reset_parameters",
        "1.reset_parameters",
    ]


def test_only_what_is_needed_is_called():
    model = metaviz.build(lambda: nn.Sequential(Parent(), nn.LayerNorm(2)))
    assert called(model, "1.bias") == ["1.reset_parameters"]
    assert called(model, "0.a.weight") == ["0.a.reset_parameters"]
    assert called(model, "0.scale") == ["0.reset_parameters"]
    assert called(model, "0.b.weight", "0.b.bias") == ["0.b.reset_parameters", "0.reset_parameters"]


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        with torch.no_grad():
            self.reset_parameters()

    def reset_parameters(self):
        self.body.weight.data.mul_(0.5)


def test_a_method_that_works_with_what_children_wrote_is_called_after_them():
    model = metaviz.build(Halves)
    assert called(model, "body.weight") == [
        "body.reset_parameters",
        "other.reset_parameters",
        ".reset_parameters",
    ]
    torch.manual_seed(2)
    metaviz.materialize(model, source="reset")
    torch.manual_seed(2)
    hand = Halves().body.weight
    assert torch.equal(model.body.weight, hand)


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.LayerNorm(3)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.02)


def test_the_models_method_comes_last_and_once_for_each_module():
    model = metaviz.build(Speller)
    assert called(model) == ["a.reset_parameters", "b.reset_parameters", "a._init_weights"]
    metaviz.materialize(model, source="reset")
    assert model.a.weight.abs().max() < 0.2
    assert (model.b.weight == 1).all()


def tied(first, second):
    def make():
        model = holding(first=first(), second=second())
        model.second.weight = model.first.weight
        return model

    return make


def embedding():
    return nn.Embedding(4, 4)


def head():
    return nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize("make", [tied(embedding, head), tied(head, embedding)])
def test_the_place_where_reset_is_right_has_the_last_word(make):
    model = metaviz.build(make)
    verdict = metaviz.tree(model).verdict("first.weight", "reset")
    assert verdict.faithful is True
    torch.manual_seed(1)
    metaviz.materialize(model, source="reset")
    torch.manual_seed(1)
    right = type(model.first)(4, 4, **({"bias": False} if isinstance(model.first, nn.Linear) else {}))
    assert torch.equal(model.first.weight, right.weight)


def test_a_method_that_another_one_breaks_is_left_out_with_what_wants_it():
    class Once(nn.Module):
        """Works when it is tried alone, not after its neighbour."""

        def __init__(self, box):
            super().__init__()
            self.box = box
            self.weight = nn.Parameter(torch.ones(2))

        def reset_parameters(self):
            if self.box:
                raise ValueError("the box is full")
            self.box.append(1)
            init.zeros_(self.weight)

    box: list[int] = []
    model = metaviz.build(lambda: nn.Sequential(Once(box), Once(box)))
    found = program(model)
    reason = "Once.reset_parameters() of 1, called after others: ValueError: the box is full"
    assert found.failed == {id(model[1].weight): reason}
    plan = metaviz.plan(model, source="reset")
    assert set(plan.blocked) == {"1.weight"}
    metaviz.materialize(model, source="reset", blocked="skip")
    assert (model[0].weight.is_meta, model[1].weight.is_meta) == (False, True)
    assert box == []


def test_generators_of_all_sorts_move_on_only_when_it_is_done(generators_stay):
    model = metaviz.build(nn.Linear, 3, 3)
    found = program(model)
    assert found.failed == {}
    assert found.window(model.weight).size == (3, 3)
    assert found.is_in_place(model.weight)


def test_a_tensor_that_a_method_replaces_is_known_to_be_another_one():
    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def reset_parameters(self):
            self.weight = nn.Parameter(torch.ones(3))

    model = metaviz.build(Fresh)
    assert not program(model).is_in_place(model.weight)
