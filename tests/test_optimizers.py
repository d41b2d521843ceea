"""Optimizers that would train nothing are found, and the others are left in peace."""

from __future__ import annotations

import types

import pytest
import torch
from surroundings import kinds, on_meta, only, run
from torch import nn

import metaviz
from metaviz.core.around import findings


def test_an_optimizer_of_a_model_on_meta_is_found_and_materialize_makes_it_train():
    model = metaviz.build(nn.Linear, 2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = only(model, optimizers=optimizer)
    assert (found.kind, found.paths) == ("optimizer", ("weight", "bias"))
    assert "step() runs without an error" in found.reason
    run(found, model=model)
    assert findings(model, optimizers=optimizer) == ()
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_an_optimizer_whose_parameters_to_empty_replaced_is_found():
    model = on_meta(lambda: nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    found = only(model, optimizers=[optimizer])
    assert (found.kind, found.paths) == ("optimizer", ("weight", "bias"))
    assert "replace Parameters" in found.reason
    assert findings(model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)) == ()


def test_one_replaced_layer_is_told_apart_from_the_others():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(2, 2)
    assert kinds(model, optimizers=[optimizer]) == [("optimizer", ("1.weight", "1.bias"))]


def test_optimizers_that_train_a_part_each_are_no_finding():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    first = torch.optim.SGD([*model[0].parameters(), *other.parameters()], lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    assert findings(model, optimizers=[first, second]) == ()


def test_an_optimizer_of_another_model_is_found_if_it_was_passed_in_only():
    model, other = nn.Linear(23, 5), nn.Linear(9, 9)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert "none of the model's tensors" in only(model, optimizers=optimizer).reason
    assert findings(model, search=True) == ()


def test_a_search_finds_what_was_not_passed_in():
    model = metaviz.build(nn.Linear, 3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert findings(model) == ()
    assert kinds(model, search=True) == [("optimizer", ("weight", "bias"))]
    assert kinds(model, search=True, optimizers=optimizer) == [("optimizer", ("weight", "bias"))]


def test_a_search_finds_an_optimizer_left_on_meta_by_to_empty():
    model = on_meta(lambda: nn.Linear(31, 17))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    assert kinds(model, search=True) == [("optimizer", ("weight", "bias"))]
    assert optimizer.param_groups[0]["params"][0].is_meta


def test_state_that_was_left_on_meta_is_found_and_cleared():
    model = on_meta(lambda: nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device="meta")).sum().backward()
    optimizer.step()
    for name, parameter in list(model.named_parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(parameter.shape)))
        assert not model.get_parameter(name).is_meta
    found = only(model, optimizers=optimizer)
    assert found.paths == ("weight", "bias")
    assert "made a step" in found.reason
    run(found, optimizer=optimizer)
    assert findings(model, optimizers=optimizer) == ()


class Broken(torch.optim.SGD):
    """Its groups cannot be read."""

    param_groups = property(lambda self: 1 / 0, lambda self, value: None)


class HoldsNames(torch.optim.SGD):
    """Its groups hold names instead of tensors."""

    param_groups = property(lambda self: [{"params": ["weight"]}], lambda self, value: None)


@pytest.mark.parametrize("optimizer", [object(), None, 3, "adam"[:1]], ids=repr)
def test_what_is_no_optimizer_is_a_finding_and_no_traceback(optimizer):
    found = only(nn.Linear(2, 1), optimizers=[optimizer])
    assert (found.kind, found.paths) == ("optimizer", ())
    assert "cannot be read (AttributeError)" in found.reason


def test_a_broken_optimizer_is_a_finding_and_no_traceback():
    model = nn.Linear(29, 5)
    broken = object.__new__(Broken)
    assert "cannot be read (ZeroDivisionError)" in only(model, optimizers=broken).reason
    assert "holds a str" in only(model, optimizers=object.__new__(HoldsNames)).reason
    assert findings(model, search=True) == ()


def test_wrappers_and_schedulers_stand_for_their_optimizer(needs):
    accelerate, lightning = needs("accelerate"), needs("lightning")
    accelerate.Accelerator(cpu=True)
    model = metaviz.build(nn.Linear, 2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrappers = [
        torch.optim.lr_scheduler.StepLR(plain, 1),
        accelerate.optimizer.AcceleratedOptimizer(plain),
        lightning.pytorch.core.optimizer.LightningOptimizer(plain),
        types.SimpleNamespace(optimizer=plain),
    ]
    for wrapper in wrappers:
        assert kinds(model, optimizers=wrapper) == [("optimizer", ("weight", "bias"))]
    assert kinds(model, optimizers=[plain, *wrappers]) == [("optimizer", ("weight", "bias"))]


def test_a_search_does_not_blame_an_optimizer_of_another_model_of_the_same_shapes():
    model, other = (metaviz.build(nn.Linear, 37, 13) for _ in range(2))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert findings(model, search=True) == ()
    assert kinds(other, search=True) == [("optimizer", ("weight", "bias"))]
    del optimizer
