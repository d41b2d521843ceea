"""Every trap of the zoo: what metaviz gives is what an ordinary build gives, bit for bit, in every slot."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import zoo
from torch import nn

import metaviz
from metaviz.core.paths import Model

every_trap = pytest.mark.parametrize("trap", zoo.TRAPS, ids=lambda trap: trap.__name__)


def real(fn: Callable[[], nn.Module]) -> nn.Module:
    _, model = zoo.pair(fn)
    metaviz.materialize(model)
    return model


@every_trap
def test_a_model_equals_its_ordinary_build(trap):
    assert zoo.faults(trap) == []


@every_trap
def test_nothing_is_allocated_before_it_is_asked_for(trap):
    tensors = [place.slot.tensor for place in Model(zoo.pair(trap)[1]).places]
    assert all(tensor.is_meta for tensor in tensors)


@every_trap
def test_its_tensors_one_by_one_in_any_order_equal_the_ordinary_build(trap):
    wanted, model = zoo.pair(trap)
    paths = [place.path for place in Model(model).places]
    random.Random(3).shuffle(paths)
    state = torch.get_rng_state()
    for path in paths:
        metaviz.materialize(model, path)
    assert zoo.differences(wanted, model) == []
    assert torch.equal(torch.get_rng_state(), state)


@every_trap
def test_unloading_and_asking_again_gives_the_same_values(trap):
    wanted, model = zoo.pair(trap)
    metaviz.materialize(model)
    metaviz.unload(model)
    places = Model(model).places
    assert all(place.slot.tensor.is_meta for place in places if not zoo.is_lazy(place.slot.tensor))
    for place in reversed(places):
        metaviz.materialize(model, place.path)
    assert zoo.differences(wanted, model) == []


@every_trap
def test_each_child_alone_has_the_values_of_the_ordinary_build(trap):
    for name, _ in zoo.pair(trap)[1].named_children():
        wanted, model = zoo.pair(trap)
        metaviz.materialize(model, name)
        assert zoo.differences(wanted, model, name) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.head.weight.data.mul_(1 + 1e-6),
        lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
        lambda m: m.half(),
        lambda m: m.requires_grad_(False),
        lambda m: m.to("meta"),
        lambda m: setattr(m.head.weight, "note", 1),
        lambda m: m.add_module("extra", nn.ReLU()),
        lambda m: delattr(m, "head"),
        lambda m: setattr(m.head.weight, "data", m.head.weight.data.T.contiguous().T),
    ],
    ids=["values", "tie", "dtype", "grad", "device", "attribute", "module", "missing", "stride"],
)
def test_the_comparison_sees_a_change_of_the(change):
    wanted, _ = zoo.pair(zoo.TiedHead)
    model, _ = zoo.pair(zoo.TiedHead)
    assert zoo.differences(wanted, model) == []
    change(model)
    assert zoo.differences(wanted, model) != []


@pytest.mark.parametrize("trap", [zoo.TiedHead, zoo.TiedBeforeInit, zoo.TiedAfterInit])
def test_a_tie_is_one_object_before_and_after(trap):
    model = zoo.pair(trap)[1]
    assert model.head.weight is model.embedding.weight
    metaviz.materialize(model, "head")
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1


def test_a_tie_made_before_init_has_the_last_write_and_one_made_after_the_first():
    assert real(zoo.TiedBeforeInit).head.weight.std() < 0.04
    assert real(zoo.TiedAfterInit).head.weight.std() > 0.5


def test_inv_freq_begins_with_one_and_falls():
    inv_freq = real(zoo.NonPersistentBuffer).inv_freq
    assert inv_freq[0] == 1.0
    assert torch.equal(inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_constants_of_the_constructor_are_there():
    model = real(zoo.NoReset)
    assert torch.equal(model.weight, torch.ones(4))
    assert torch.equal(model.gamma, torch.full((3,), 1e-5))
    assert torch.equal(real(zoo.ResetMissesBuffer).running, torch.full((3,), 5.0))


def test_literals_keep_their_digits():
    model = real(zoo.Literals)
    assert model.temperature.item() == pytest.approx(0.07)
    assert model.scale.item() == pytest.approx(math.log(1 / 0.07))
    assert model.steps.item() == 0
    assert model.nothing is None


def test_drop_path_rates_are_numbers():
    assert zoo.pair(zoo.DropPathItem)[1].rates == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])


def test_a_mask_chooses_what_it_would_choose_for_real():
    model = real(zoo.MaskIndex)
    assert len(model.kept) and (model.kept > 0).all()
    assert model.body.in_features == len(model.kept) + 1
    assert model.causal[0, 1] == float("-inf") and model.causal.tril().eq(0).all()


def test_a_branch_on_a_parameter_agrees_with_its_later_value():
    model = zoo.pair(zoo.ItemFromParameter)[1]
    metaviz.materialize(model, "beta")
    assert model.cached == model.beta.item()
    assert model.body.in_features == (3 if model.beta > 0.5 else 2)


def test_orthogonal_weights_are_orthogonal():
    model = real(zoo.Orthogonal)
    for weight in (model.weight, model.square.weight, model.wide.weight):
        assert torch.allclose(weight @ weight.T, torch.eye(len(weight)), atol=1e-5)


def test_a_normed_weight_can_be_used():
    model = real(zoo.Norms)
    assert torch.linalg.matrix_norm(model.spectral_norm.weight, 2).item() == pytest.approx(1, abs=0.2)
    assert model.weight_norm(torch.ones(1, 3, 5)).isfinite().all()


def test_views_reach_each_other_as_in_the_ordinary_build():
    model = zoo.pair(zoo.ViewsShareStorage)[1]
    metaviz.materialize(model, "k")
    with torch.no_grad():
        model.k.fill_(7)
    assert (model.qkv[4:8] == 7).all() and not (model.qkv[:4] == 7).any()


def test_an_expanded_buffer_stays_small():
    ids = real(zoo.ExpandedBuffer).ids
    assert ids.stride() == (0, 1)
    assert ids.untyped_storage().nbytes() == 8 * 8


def test_clones_are_equal_and_apart():
    layers = real(zoo.ClonedLayers).encoder.layers
    assert torch.equal(layers[0].linear1.weight, layers[2].linear1.weight)
    assert layers[0].linear1.weight is not layers[2].linear1.weight


def test_a_teacher_is_its_student_without_gradients():
    model = real(zoo.Averaged)
    assert torch.equal(model.student.weight, model.teacher.weight)
    assert model.student.weight.requires_grad and not model.teacher.weight.requires_grad


def test_seeds_within_a_constructor_hold():
    model = real(zoo.Seeds)
    assert torch.equal(model.a.weight, model.b.weight)
    assert torch.equal(model.c.weight, model.d.weight)
    assert not torch.equal(model.a.weight, model.c.weight)


def test_flat_weights_of_an_lstm_are_its_parameters():
    lstm = real(zoo.LastStepWins).stack[2]
    assert all(flat is weight for flat, weight in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_plain_attributes_become_real():
    model = real(zoo.Hidden)
    assert not model.layers[0].weight.is_meta and not model.table["deep"][0]["x"][0].is_meta
    assert not model.partial.keywords["weight"].is_meta and not model.record.values.is_meta
    assert real(zoo.FreqsCis).freqs_cis.abs().allclose(torch.ones(4, 3))


def test_what_functions_and_hooks_hold_becomes_real():
    ordinary, model = zoo.pair(zoo.HeldByFunctions)
    metaviz.materialize(model)
    for call in (lambda m: m.scaled(torch.ones(3)), lambda m: m.body(torch.ones(3))):
        assert torch.equal(call(ordinary), call(model))


def test_lazy_parts_stay_lazy_and_work_after_their_first_forward():
    model = real(zoo.LazyOut)
    assert zoo.is_lazy(model.stack[0].weight) and not model.stack[0].weight.is_meta
    assert model.stack(torch.randn(3, 5)).shape == (3, 2)
