"""A plan says what would be done, what it takes, and touches nothing."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import metaviz
from metaviz.core import devices
from metaviz.errors import CannotMaterialize, NotEnoughMemory

CPU = torch.device("cpu")
MiB = 2**20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("order", torch.arange(6))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def test_a_plan_lists_each_tensor_once_with_its_shape_dtype_bytes_and_source():
    plan = metaviz.plan(metaviz.build(Net))
    assert [(t.path, t.also, t.shape, t.dtype, t.nbytes, t.source) for t in plan.tensors] == [
        ("order", (), (6,), torch.int64, 48, "replay"),
        ("mask", (), (3,), torch.bool, 3, "replay"),
        ("embed.weight", ("head.weight",), (10, 4), torch.float32, 160, "replay"),
        ("body.weight", (), (4, 4), torch.float32, 64, "replay"),
        ("body.bias", (), (4,), torch.float32, 16, "replay"),
    ]
    assert plan.nbytes == 48 + 3 + 160 + 64 + 16
    assert (plan.device, plan.rng, plan.fits) == (CPU, "eager", True)
    assert (plan.blocked, plan.lazy, plan.kept, plan.pulled_in) == ({}, (), (), ())
    assert set(plan.peak_nbytes) == set(plan.free_nbytes) == {CPU}


def test_the_dtype_argument_shows_in_the_plan_and_leaves_integers_alone():
    plan = metaviz.plan(metaviz.build(Net), dtype="bfloat16")
    assert {t.path: (t.dtype, t.nbytes) for t in plan.tensors} == {
        "order": (torch.int64, 48),
        "mask": (torch.bool, 3),
        "embed.weight": (torch.bfloat16, 80),
        "body.weight": (torch.bfloat16, 32),
        "body.bias": (torch.bfloat16, 8),
    }
    assert plan.nbytes == 48 + 3 + 80 + 32 + 8


def test_planning_touches_nothing(generators_stay):
    model = metaviz.build(Net)
    before = [(id(t), t.untyped_storage()._cdata, t._version, t.is_meta) for t in model.state_dict().values()]
    held = [t.untyped_storage() for t in model.state_dict().values()]
    first, second = metaviz.plan(model), metaviz.plan(model)
    assert (first.tensors, first.nbytes, first.peak_nbytes) == (
        second.tensors,
        second.nbytes,
        second.peak_nbytes,
    )
    after = [(id(t), t.untyped_storage()._cdata, t._version, t.is_meta) for t in model.state_dict().values()]
    assert [entry[1:] for entry in before] == [entry[1:] for entry in after]
    assert len(held) == len(before)


def test_materialize_does_just_what_the_plan_said():
    model = metaviz.build(Net)
    plan = metaviz.plan(model, ["body", "order"], dtype="float64")
    report = metaviz.materialize(model, ["body", "order"], dtype="float64")
    assert (report.tensors, report.nbytes, report.device) == (plan.tensors, plan.nbytes, plan.device)
    assert metaviz.plan(model, ["body", "order"]).kept == ("order", "body.weight", "body.bias")


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = nn.Parameter(self.a.weight.data[:])
        self.a.register_buffer("rows", self.a.weight.data[1:3])
        self.register_buffer("wide", torch.arange(3.0)[:, None].expand(3, 1000))


def test_views_that_share_memory_come_along_and_are_named():
    torch.manual_seed(1)
    ordinary = Views()
    torch.manual_seed(1)
    model = metaviz.build(Views)
    plan = metaviz.plan(model, "b.weight")
    assert plan.pulled_in == ("a.weight", "a.rows")
    assert [(t.path, t.nbytes) for t in plan.tensors] == [("b.weight", 64), ("a.weight", 0), ("a.rows", 0)]
    assert plan.nbytes == 64
    report = metaviz.materialize(model, "b.weight")
    assert report.pulled_in == plan.pulled_in
    assert "shared memory, came along: a.weight, a.rows" in str(report)
    assert model.a.bias.is_meta
    assert torch.equal(model.b.weight, ordinary.b.weight)
    with torch.no_grad():
        model.b.weight[1:3].fill_(7)
    assert torch.equal(model.a.rows, torch.full((2, 4), 7.0))
    assert torch.equal(model.a.weight[1:3], torch.full((2, 4), 7.0))
    assert metaviz.unload(model, "a.rows", force=True).pulled_in == ("a.weight", "b.weight")


def test_an_expanded_buffer_takes_the_memory_of_what_was_expanded():
    model = metaviz.build(Views)
    assert metaviz.plan(model, "wide").nbytes == 12
    metaviz.materialize(model, "wide")
    assert model.wide.stride() == (1, 0)
    assert model.wide.untyped_storage().nbytes() == 12


@pytest.mark.parametrize("make", [nn.Identity, nn.Module, nn.Dropout, lambda: nn.ModuleList([nn.ReLU()])])
def test_a_model_without_tensors_has_an_empty_plan(make):
    model = metaviz.build(make)
    plan = metaviz.plan(model)
    assert (plan.tensors, plan.nbytes, plan.fits) == ((), 0, True)
    assert str(plan).startswith("0 tensors, 0 B → cpu, fits, from replay (rng='eager')")
    assert metaviz.materialize(model).tensors == metaviz.unload(model).tensors == ()


def test_the_text_of_a_plan_says_what_where_and_whether_it_fits(monkeypatch):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.views, self.lazy = Views(), nn.LazyLinear(3)
            self.never = nn.Parameter(torch.empty(4))

    model = metaviz.build(Mixed)
    model.real = nn.Linear(1, 1, bias=False)
    monkeypatch.setattr(devices, "free_nbytes", lambda device: 1024)
    lines = str(metaviz.plan(model, ["views.b.weight", "lazy", "never", "real"])).splitlines()
    assert lines == [
        "3 tensors, 64 B → cpu, fits, from replay (rng='eager')",
        "cpu: 64 B at most, 1.00 KiB free",
        "blocked  never: Uninitialized even in an ordinary build: no op of the constructor ever writes it. "
        "Next: torch.nn.init.zeros_(self.never)  # in the constructor",
        "lazy: lazy.weight, lazy.bias",
        "real already: real.weight",
        "shares memory, comes along: views.a.weight, views.a.rows",
    ]


def test_many_blocked_tensors_are_counted_not_listed():
    plan = metaviz.plan(nn.ParameterList([torch.empty(1, device="meta") for _ in range(100)]))
    assert str(plan).count("\n") == 7
    assert "blocked  … and 95 more" in str(plan)


def test_what_does_not_fit_is_refused_with_both_numbers_before_anything_is_allocated(monkeypatch):
    model = metaviz.build(nn.Linear, 1024, 1024)
    monkeypatch.setattr(devices, "free_nbytes", lambda device: 3 * MiB)
    plan = metaviz.plan(model)
    assert not plan.fits
    assert str(plan).startswith("2 tensors, 4.00 MiB → cpu, does NOT fit, from replay")
    with (
        peak_of_allocations() as peak,
        pytest.raises(NotEnoughMemory, match=r"4\.00 MiB on cpu, and 3\.00 MiB are free"),
    ):
        metaviz.materialize(model)
    assert peak[0] < MiB
    assert model.weight.is_meta
    metaviz.materialize(model, dtype="bfloat16", paths="bias")
    assert not model.bias.is_meta


def test_seventy_billion_parameters_are_refused_at_once(needs):
    transformers = needs("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    model = metaviz.build(transformers.LlamaForCausalLM, config)
    parameters = 4 * 70_553_706_496
    # The frequencies of the rotary embedding are buffers.
    assert metaviz.plan(model).nbytes - parameters in (4 * 64, 2 * 4 * 64)
    with (
        peak_of_allocations() as peak,
        pytest.raises(NotEnoughMemory, match=r"takes 263 GiB on cpu, and .* are free"),
    ):
        metaviz.materialize(model)
    assert peak[0] < MiB
    assert all(parameter.is_meta for parameter in model.parameters())
    assert metaviz.materialize(model, "model.norm").nbytes == 4 * 8192


class peak_of_allocations:
    """The most bytes that torch's CPU allocator had given out at any time inside, in a list."""

    def __enter__(self) -> list[int]:
        gc.collect()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        self._peak = [0]
        return self._peak

    def __exit__(self, *error) -> None:
        self._profile.__exit__(*error)
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            self._peak[0] = max(self._peak[0], now)


class Scratch(nn.Module):
    """Its values come by way of memory that it does not keep."""

    def __init__(self):
        super().__init__()
        big = torch.zeros(4 * MiB // 4)
        self.kept = nn.Parameter((big * 2 + 1).view(1024, 1024))
        self.other = nn.Parameter(torch.ones(1024, 1024))
        self.last = nn.Parameter(torch.cat([big[:1024], self.other.data[0]]))


def orthogonal() -> nn.Module:
    model = nn.Linear(512, 512)
    nn.init.orthogonal_(model.weight)
    return model


def trunc_normal() -> nn.Module:
    model = nn.Linear(1024, 1024)
    nn.init.trunc_normal_(model.weight)
    return model


def halved() -> nn.Module:
    return nn.Linear(1024, 1024).half()


PLANS = {
    "in place": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), {}),
    "one of many": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), {"paths": "3"}),
    "scratch": (Scratch, {}),
    "some of the scratch": (Scratch, {"paths": "kept"}),
    "cast": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), {"dtype": "bfloat16"}),
    "widened": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), {"dtype": "float64"}),
    "cast in the constructor": (halved, {}),
    "orthogonal": (orthogonal, {}),
    "trunc_normal": (trunc_normal, {}),
    "keyed": (lambda: nn.Linear(1024, 1024), {"rng": "keyed"}),
    "transformer": (lambda: nn.Transformer(128, 4, 2, 2, 256, batch_first=True), {}),
}


@pytest.mark.parametrize(("make", "arguments"), PLANS.values(), ids=PLANS)
def test_the_peak_of_a_plan_is_an_upper_bound_and_near_what_is_really_allocated(make, arguments):
    model = metaviz.build(make)
    planned = metaviz.plan(model, **arguments).peak_nbytes[CPU]
    with peak_of_allocations() as peak:
        metaviz.materialize(model, **arguments)
    # Work space of kernels (linear algebra) and states of the generator are not counted.
    assert peak[0] <= planned + MiB // 2
    assert planned <= 2 * peak[0]


def test_the_peak_is_exact_where_tensors_are_filled_in_place():
    model = metaviz.build(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    plan = metaviz.plan(model)
    assert plan.peak_nbytes == {CPU: plan.nbytes} == {CPU: 8 * 4 * (512 * 512 + 512)}


def test_a_cast_at_the_end_of_a_constructor_needs_room_for_one_tensor_in_both_dtypes():
    model = metaviz.build(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).half())
    plan = metaviz.plan(model)
    assert plan.nbytes == 8 * 2 * (512 * 512 + 512)
    assert plan.peak_nbytes[CPU] <= plan.nbytes + 4 * 512 * 512
    with peak_of_allocations() as peak:
        metaviz.materialize(model)
    assert peak[0] <= plan.peak_nbytes[CPU] + MiB // 4


def test_progress_rises_to_the_bytes_of_the_plan_and_names_each_tensor():
    model = metaviz.build(Net)
    calls = []
    plan = metaviz.plan(model)
    metaviz.materialize(model, progress=lambda *call: calls.append(call))
    done, totals, paths = zip(*calls, strict=True)
    assert set(totals) == {plan.nbytes}
    assert list(done) == sorted(done)
    assert done[-1] == plan.nbytes
    assert set(paths) == {t.path for t in plan.tensors}
    assert math.isclose(sum(b - a for a, b in zip((0, *done), done, strict=False)), plan.nbytes)


@pytest.mark.parametrize("rng", ["eager", "keyed", "device"])
def test_each_way_to_draw_is_named_and_does_not_move_the_callers_generator_unless_it_is_that(rng):
    model = metaviz.build(Net)
    before = torch.get_rng_state()
    assert f"rng={rng!r}" in str(metaviz.plan(model, rng=rng))
    metaviz.materialize(model, rng=rng)
    assert torch.equal(torch.get_rng_state(), before) is (rng != "device")


def test_what_comes_from_which_source_is_counted():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1] = nn.Linear(2, 3, device="meta")
    plan = metaviz.plan(model)
    assert "4 tensors, 60 B → cpu, fits, 2 from replay, 2 from reset (rng='eager')" in str(plan)
    assert [t.source for t in plan.tensors] == ["replay", "replay", "reset", "reset"]
    assert "2 tensors, 24 B → cpu, fits, from reset (rng='eager')" in str(
        metaviz.plan(model, "0", source="reset")
    )


def test_blocked_tensors_are_no_reason_not_to_plan():
    model = nn.ParameterList([torch.empty(2, device="meta"), torch.empty(3, device="meta")])
    assert len(metaviz.plan(model).blocked) == 2
    with pytest.raises(CannotMaterialize):
        metaviz.materialize(model)


def test_a_report_says_what_did_not_come_from_the_tape():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1] = nn.Linear(2, 3, device="meta")
    assert "materialized 4 tensors, 60 B, 2 from replay, 2 from reset, on cpu in " in str(
        metaviz.materialize(model)
    )
    assert "materialized 2 tensors, 24 B, on cpu in " in str(
        metaviz.materialize(metaviz.build(nn.Linear, 2, 2))
    )
