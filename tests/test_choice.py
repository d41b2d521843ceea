"""The choice of sources in a plan: the best one for each tensor, and never memory that is filled in part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import init

import metaviz
from metaviz.errors import CannotMaterialize


class Own(nn.Module):
    """Initializes one of two views of a memory."""

    def __init__(self, whole: bool):
        super().__init__()
        self.whole = whole
        self.register_buffer("fused", torch.zeros(4, 2))
        self.register_buffer("part", self.fused[2:])

    def reset_parameters(self):
        init.ones_(self.fused if self.whole else self.part)


def sources(plan) -> dict[str, str]:
    return {tensor.path: tensor.source for tensor in plan.tensors}


def test_auto_takes_the_tape_first_and_reset_where_there_is_none():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    assert set(sources(metaviz.plan(model)).values()) == {"replay"}
    assert set(sources(metaviz.plan(model, source="reset")).values()) == {"reset"}
    with torch.device("meta"):
        model[1] = nn.LayerNorm(2)
    assert sources(metaviz.plan(model))["1.weight"] == "reset"
    assert list(metaviz.plan(model, source="replay").blocked) == ["1.weight", "1.bias"]


def test_what_a_plan_says_is_what_is_done():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    plan = metaviz.plan(model, source="reset")
    assert ", from reset (rng='eager')" in str(plan)
    assert plan.nbytes == sum(tensor.nbytes for tensor in plan.tensors) == 40
    assert plan.tensors[0].reason.startswith("Linear.reset_parameters(): uniform_(-0.707, 0.707) at ")
    report = metaviz.materialize(model, source="reset")
    assert report.tensors == plan.tensors


def test_planning_a_reset_touches_nothing(generators_stay):
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    before = {
        name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    metaviz.plan(model, source="reset")
    after = {name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert after == before
    assert all(tensor.is_meta for tensor in model.parameters())


def test_views_of_a_memory_that_is_written_as_a_whole_come_along():
    model = metaviz.build(Own, True)
    metaviz.materialize(model, "part", source="reset")
    assert model.part.tolist() == [[1, 1], [1, 1]]
    assert not model.fused.is_meta
    assert model.fused.untyped_storage()._cdata == model.part.untyped_storage()._cdata
    assert model.fused.tolist() == [[1, 1]] * 4


def test_a_memory_of_which_reset_would_write_a_part_is_blocked():
    model = metaviz.build(Own, False)
    plan = metaviz.plan(model, "part", source="reset")
    assert plan.tensors == ()
    assert plan.blocked["part"].startswith(
        "It shares its memory with fused. Own.reset_parameters() writes only a part"
    )
    with pytest.raises(CannotMaterialize):
        metaviz.materialize(model, source="reset")
    assert model.part.is_meta
    assert sources(metaviz.plan(model)) == {"fused": "replay", "part": "replay"}


def test_a_cast_model_is_reset_in_its_dtype():
    model = metaviz.build(nn.Linear, 20, 20).to(torch.bfloat16)
    torch.manual_seed(3)
    metaviz.materialize(model, source="reset")
    torch.manual_seed(3)
    hand = nn.Linear(20, 20, dtype=torch.bfloat16)
    assert model.weight.dtype is torch.bfloat16
    assert torch.equal(model.weight, hand.weight)


def test_a_wide_tensor_does_not_fit_by_reset_either():
    model = metaviz.build(nn.Linear, 10**6, 10**6)
    plan = metaviz.plan(model, source="reset")
    assert not plan.fits
    assert plan.nbytes == (10**12 + 10**6) * 4


LAYOUTS = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "a part": lambda: torch.arange(15.0).reshape(5, 3)[1:],
    "expanded": lambda: torch.ones(1).expand(4, 3),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_memory_that_a_method_lays_out_in_another_way_is_read_in_that_way(make):
    class Swaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3))

        def reset_parameters(self):
            self.weight.data = make()

    model = metaviz.build(Swaps)
    metaviz.materialize(model, source="reset")
    assert torch.equal(model.weight, make())
    assert model.weight.is_contiguous()
    assert model.weight.untyped_storage().nbytes() == 48


def test_two_parts_of_one_new_memory_stay_two():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def reset_parameters(self):
            both = torch.arange(8.0)
            self.a.data, self.b.data = both[:4], both[4:]

    model = metaviz.build(Halves)
    metaviz.materialize(model, source="reset")
    assert torch.equal(torch.cat([model.a, model.b]), torch.arange(8.0))
