"""Reset: what the init methods give is what calling them by hand gives, bit for bit, and nothing else changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from byhand import SEED, assert_same, by_hand, draws, reset, seed, tensors
from cases import holding
from torch import nn
from torch.nn import init

import metaviz
from metaviz.errors import CannotMaterialize, WouldLoseValues


class Gate(nn.Module):
    """Calls its children's methods, then changes what they did."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self):
        for child in self.children():
            child.reset_parameters()
        init.zeros_(self.outer.weight)
        init.uniform_(self.scale)


class Scales(nn.Module):
    """Works with what its child's own method has written."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.body.weight.mul_(0.5)
            self.body.bias[0] = 1


class Fresh(nn.Module):
    """Puts in new tensors, made on whatever is the default device."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        self.weight = nn.Parameter(torch.rand(3))
        self.register_buffer("turn", torch.arange(4).float().cos(), persistent=False)


class Raw(nn.Module):
    """Needs gradients to be off."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        with torch.no_grad():
            self.reset_parameters()

    def reset_parameters(self):
        self.weight.uniform_(-1, 1)


class Other(nn.Module):
    """Draws from the generators of Python and NumPy, and from one of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.empty(3))
        self.register_buffer("b", torch.empty(3))
        self.register_buffer("c", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        self.a.fill_(random.random())
        self.b.copy_(torch.from_numpy(np.random.randn(3)))
        self.c.normal_(generator=torch.Generator().manual_seed(4))


class Views(nn.Module):
    """Has views of one memory; its method writes some through others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("fused", torch.empty(4, 3))
        self.register_buffer("first", self.fused[:2])
        self.register_buffer("last", self.fused[2:])
        self.reset_parameters()

    def reset_parameters(self):
        init.normal_(self.fused)
        self.last.zero_()


class Hard(nn.Module):
    """Uses init functions that draw in loops or factorize."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.empty(12, 10)) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self):
        init.trunc_normal_(self.a, std=0.02)
        init.orthogonal_(self.b)
        init.sparse_(self.c, 0.3)


def nested():
    return nn.Sequential(nn.Linear(20, 30), nn.Sequential(Gate(), nn.BatchNorm1d(3)), nn.LSTM(3, 4), Gate())


NETS = [Gate, Scales, Fresh, Raw, Other, Views, Hard, nested]


@pytest.mark.parametrize("make", NETS)
def test_models_come_out_as_by_hand_and_leave_the_generators_there(make):
    hand, after = by_hand(make)
    model, reached = reset(make)
    assert_same(model, hand)
    assert reached == after


@pytest.mark.parametrize("make", NETS)
def test_a_build_under_the_meta_device_comes_out_as_by_hand_too(make):
    hand, _ = by_hand(make)
    with torch.device("meta"):
        model = make()
    with torch.device("meta") if make is Other else torch.device("cpu"):
        seed()
        metaviz.materialize(model)
    assert_same(model, hand)


def test_one_part_comes_out_as_if_only_its_methods_were_called():
    hand, after = by_hand(nested, "1.0")
    model, reached = reset(nested, "1.0")
    assert_same(model[1][0], hand[1][0])
    assert reached == after
    assert model[0].weight.is_meta


def test_a_method_that_scales_what_its_children_wrote_is_told_as_one_with_theirs():
    model = metaviz.build(Scales)
    verdict = metaviz.tree(model).verdict("body.weight", "reset")
    assert (verdict.can, verdict.faithful) == (True, True)
    assert verdict.reason.startswith("Scales.reset_parameters(): uniform_(-0.289, 0.289) at ")


def tied():
    model = holding(table=nn.Embedding(10, 4), head=nn.Linear(4, 10, bias=False))
    model.head.weight = model.table.weight
    return model


def test_a_tied_tensor_gets_the_values_of_the_place_where_reset_is_right():
    model, _ = reset(tied)
    seed()
    assert torch.equal(model.table.weight, init.normal_(torch.empty(10, 4)))
    assert model.head.weight is model.table.weight


def test_ties_and_optimizers_stay_where_a_method_replaces_the_parameter():
    def make():
        model = nn.Sequential(Fresh(), nn.Linear(1, 3))
        model[1].bias = model[0].weight
        return model

    model = metaviz.build(make)
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metaviz.materialize(model, source="reset")
    assert model[0].weight is weight is model[1].bias
    assert not weight.is_meta
    assert weight is optimizer.param_groups[0]["params"][0]


def test_the_verdict_tells_of_new_tensors_and_of_the_default_device():
    model = metaviz.build(Fresh)
    reason = metaviz.tree(model).verdict("weight", "reset").reason
    assert "it puts a new tensor into the slot, so ties and optimizers would lose it" in reason
    assert "on the default device: call it under torch.device(...)" in reason
    raw = metaviz.build(Raw)
    assert "it needs torch.no_grad() around it" in metaviz.tree(raw).verdict("weight", "reset").reason


def test_the_default_device_does_not_decide_where_values_go():
    model = metaviz.build(Fresh)
    with torch.device("meta"):
        metaviz.materialize(model, source="reset")
    assert {tensor.device.type for tensor in tensors(model).values()} == {"cpu"}


def mixed():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model[1] = nn.Linear(3, 2, device="meta")
    return model


def test_a_replaced_layer_comes_from_reset_and_the_rest_from_the_tape():
    torch.manual_seed(SEED)
    ordinary = nn.Linear(3, 3)
    torch.manual_seed(SEED)
    model = mixed()
    plan = metaviz.plan(model)
    assert {tensor.path: tensor.source for tensor in plan.tensors} == {
        "0.weight": "replay",
        "0.bias": "replay",
        "1.weight": "reset",
        "1.bias": "reset",
    }
    assert "2 from replay, 2 from reset" in str(plan)
    seed()
    metaviz.materialize(model)
    assert torch.equal(model[0].weight, ordinary.weight)
    torch.manual_seed(SEED)
    hand = nn.Linear(3, 2)
    assert torch.equal(model[1].weight, hand.weight)


def test_a_tie_between_a_known_and_a_replaced_layer_takes_the_tape():
    torch.manual_seed(SEED)
    ordinary = nn.Embedding(5, 3)
    torch.manual_seed(SEED)
    model = metaviz.build(lambda: nn.Sequential(nn.Embedding(5, 3)))
    model.append(nn.Linear(3, 5, bias=False, device="meta"))
    model[1].weight = model[0].weight
    metaviz.materialize(model)
    assert torch.equal(model[1].weight, ordinary.weight)
    assert model[1].weight is model[0].weight


def test_keyed_draws_are_the_same_for_any_selection():
    whole, after = reset(nested, rng="keyed")
    seed()
    assert draws() == after
    part, _ = reset(nested, "2", rng="keyed")
    assert torch.equal(part[2].weight_hh_l0, whole[2].weight_hh_l0)


def test_draws_of_the_device_come_from_its_generator():
    model, _ = reset(lambda: nn.Linear(4, 4), rng="device")
    hand, _ = by_hand(lambda: nn.Linear(4, 4))
    assert_same(model, hand)


def test_values_are_cast_after_they_are_drawn():
    hand, _ = by_hand(nested)
    model, _ = reset(nested, dtype="bfloat16")
    assert model[0].weight.dtype is torch.bfloat16
    assert torch.equal(model[0].weight, hand[0].weight.to(torch.bfloat16))
    assert model[1][1].num_batches_tracked.dtype is torch.int64


def test_views_of_one_memory_stay_views():
    model, _ = reset(Views)
    assert (
        model.first._is_view() or model.first.untyped_storage()._cdata == model.fused.untyped_storage()._cdata
    )
    model.fused.fill_(3)
    assert (model.last == 3).all()


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", [1, 5, 12])
def test_an_error_on_the_way_changes_nothing_and_draws_nothing(error, at):
    model = metaviz.build(nested)
    before = {path: (id(tensor), tensor._version) for path, tensor in tensors(model).items()}
    seed()
    start, calls = draws(), []

    def progress(*_):
        calls.append(1)
        if len(calls) == at:
            raise error

    with pytest.raises(error):
        metaviz.materialize(model, source="reset", progress=progress)
    assert {path: (id(tensor), tensor._version) for path, tensor in tensors(model).items()} == before
    assert all(tensor.is_meta for tensor in tensors(model).values())
    assert draws() == start
    metaviz.materialize(model, source="reset")
    assert_same(model, by_hand(nested)[0])


def test_what_reset_cannot_do_stops_all_of_it():
    model = metaviz.build(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ParameterList([nn.Parameter(torch.ones(2))]))
    )
    with pytest.raises(CannotMaterialize, match=r"1\.0: ParameterList has no reset_parameters\. Next: "):
        metaviz.materialize(model, source="reset")
    assert model[0].weight.is_meta
    metaviz.materialize(model, source="reset", blocked="skip")
    assert not model[0].weight.is_meta
    assert model[1][0].is_meta


def test_values_that_reset_drew_are_not_thrown_away_unasked():
    torch.manual_seed(SEED)
    ordinary = nn.Linear(3, 3)
    torch.manual_seed(SEED)
    model = metaviz.build(nn.Linear, 3, 3)
    metaviz.materialize(model, source="reset")
    drawn = model.weight.clone()
    with pytest.raises(WouldLoseValues, match="reset gave it its values, and may give it others"):
        metaviz.unload(model)
    assert torch.equal(model.weight, drawn)
    metaviz.unload(model, force=True)
    assert model.weight.is_meta
    metaviz.materialize(model)
    assert torch.equal(model.weight, ordinary.weight)


def test_what_is_real_stays_as_it_is():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"), nn.Linear(2, 2))
    kept = {path: tensor.clone() for path, tensor in tensors(model).items() if not tensor.is_meta}
    report = metaviz.materialize(model)
    assert {tensor.path for tensor in report.tensors} == {"1.weight", "1.bias"}
    for path, values in kept.items():
        assert torch.equal(tensors(model)[path], values)


def test_tensors_without_elements_need_no_method():
    model = nn.ParameterList([nn.Parameter(torch.empty(0, 3, device="meta"))])
    assert metaviz.tree(model).row.mark == "ready"
    metaviz.materialize(model)
    assert (model[0].device.type, model[0].shape) == ("cpu", (0, 3))


def test_a_method_that_decides_by_what_it_draws_is_not_said_to_do_always_the_same():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(64))
            self.reset_parameters()

        def reset_parameters(self):
            nn.init.normal_(self.weight)
            if self.weight.sum() > 0:
                nn.init.zeros_(self.weight)

    model = metaviz.build(Picky)
    verdict = metaviz.tree(model).verdict("weight", "reset")
    assert (verdict.can, verdict.faithful) == (True, None)
    assert verdict.reason.endswith("; or something else, as it decides by a value that it draws")
    seen = set()
    for number in range(8):
        torch.manual_seed(number)
        drawn = torch.empty(64).normal_()
        torch.manual_seed(number)
        metaviz.materialize(model, source="reset")
        assert torch.equal(model.weight, torch.zeros(64) if drawn.sum() > 0 else drawn)
        seen.add(bool(drawn.sum() > 0))
        metaviz.unload(model, force=True)
    assert seen == {True, False}


def test_a_lazy_neighbour_is_no_obstacle():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)))
    report = metaviz.materialize(model, source="reset")
    assert [tensor.path for tensor in report.tensors] == ["0.weight", "0.bias"]
    assert report.lazy == ("1.weight", "1.bias")


def test_a_model_that_reset_has_filled_can_be_looked_at():
    model = nn.Linear(4, 4, device="meta")
    metaviz.materialize(model)
    assert metaviz.findings(model) == ()
    assert not metaviz.tree(model).trouble()


@pytest.mark.parametrize(
    "draw", [lambda: random.random(), lambda: float(np.random.rand())], ids=["python", "numpy"]
)
def test_draws_from_other_generators_are_not_taken_for_constants(draw):
    class Chancy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self):
            nn.init.constant_(self.weight, draw())

    model = metaviz.build(lambda: nn.Sequential(Chancy(), Chancy()))
    verdict = metaviz.tree(model).verdict("0.weight", "reset")
    assert (verdict.can, verdict.faithful) == (True, None)
    assert verdict.reason.endswith("; it draws from other generators than torch's, of which no tape knows")
    state = random.getstate(), np.random.get_state()
    for rng in ("eager", "device"):
        metaviz.materialize(model, source="reset", rng=rng)
        first = model[0].weight.tolist(), model[1].weight.tolist()
        metaviz.unload(model, force=True)
        metaviz.materialize(model, source="reset", rng=rng)
        assert len({*first[0], *first[1], *model[0].weight.tolist(), *model[1].weight.tolist()}) == 4
        metaviz.unload(model, force=True)
    random.setstate(state[0])
    np.random.set_state(state[1])


def test_keyed_values_are_the_same_whatever_is_real_already():
    def filled(*order: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("meta")
        for paths in order:
            metaviz.materialize(model, paths, source="reset", rng="keyed")
        return [tensor.detach().clone() for tensor in model.parameters()]

    assert all(map(torch.equal, filled(""), filled("1.bias", "1", "0")))


def test_one_draw_that_several_tensors_have_a_part_of_is_not_drawn_anew_faithfully():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
            with torch.no_grad():
                self.b.weight.copy_(self.a.weight.t())

    model = metaviz.build(Shared)
    verdicts = metaviz.tree(model).verdicts("reset")
    assert [verdict.faithful for verdict in verdicts.values()] == [False, False, True]


def test_an_error_whose_message_raises_is_a_row_all_the_same():
    class Mean(Exception):
        def __str__(self):
            raise RuntimeError("no message")

    class Rude(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

        def reset_parameters(self):
            raise Mean

    tree = metaviz.tree(Rude())
    assert tree.verdict("weight", "reset").kind == "raises"
    assert "Mean" in tree.lightning.fsdp.error
    assert "its message cannot be read (RuntimeError)" in str(tree.trouble())


def test_a_module_that_was_never_begun_blocks_no_other_one():
    class Unborn(nn.Module):
        def __init__(self):
            pass

    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    model._modules["unborn"] = Unborn()
    metaviz.materialize(model, "0")
    assert not model[0].weight.is_meta
    assert metaviz.findings(model) == ()
    assert "never called super().__init__()" in str(metaviz.tree(model).trouble())
