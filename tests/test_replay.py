"""Replay: any part, in any order, with any source of draws, in no more memory than planned."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zoo import holding

import metaviz
from metaviz.core.paths import Model
from metaviz.core.replay import EagerDraws, peak_nbytes, plain_torch, replay
from metaviz.core.tape import tag_of

MIB = 2**20


def redraw(a: torch.Tensor, b: torch.Tensor) -> None:
    state = torch.get_rng_state()
    a.normal_()
    torch.set_rng_state(state)
    b.normal_()


def forked(a: torch.Tensor, b: torch.Tensor) -> None:
    with torch.random.fork_rng(devices=[]):
        a.uniform_()
        torch.manual_seed(7)
        b.uniform_()


# What one step of a random program does: it gets the tensors so far, and two of them.
STEPS: list[Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], object]] = [
    lambda made, a, b: made.append(torch.zeros(3, 4)),
    lambda made, a, b: made.append(torch.empty(3, 4).normal_()),
    lambda made, a, b: made.append(torch.rand(a.shape)),
    lambda made, a, b: made.append(torch.randn_like(b)),
    lambda made, a, b: made.append(a.T),
    lambda made, a, b: made.append(a[1:]),
    lambda made, a, b: made.append(b[:, ::2]),
    lambda made, a, b: made.append(a.clone()),
    lambda made, a, b: made.append(a + 1),
    lambda made, a, b: made.append(a @ a.T),
    lambda made, a, b: made.append(torch.cat([a, a])[: len(a)]),
    lambda made, a, b: made.append(a.expand(2, *a.shape)[0]),
    lambda made, a, b: a.add_(1),
    lambda made, a, b: a.mul_(b.sum() / 8),
    lambda made, a, b: a.uniform_(-1, 1),
    lambda made, a, b: a[:1].normal_(),
    lambda made, a, b: a.copy_(b.flatten()[:1].clone()),
    lambda made, a, b: a.zero_(),
    lambda made, a, b: a.masked_fill_(a > 0.5, 0.25),
    lambda made, a, b: a.add_(1) if b.sum() > 0 else a.sub_(2),
    lambda made, a, b: a.fill_(round(b.mean().item(), 2)),
    lambda made, a, b: made.append(torch.full((3, 3), b.max().item())),
    lambda made, a, b: a.__setitem__(a < 0, 0.5),
    lambda made, a, b: setattr(a, "data", b.data),
    lambda made, a, b: torch.manual_seed(3),
    lambda made, a, b: nn.init.trunc_normal_(a.resolve_neg(), std=0.5),
    lambda made, a, b: torch.rand(2, 2),
    lambda made, a, b: made.append((a + 1j * a).conj().imag),
    lambda made, a, b: made.append(copy.deepcopy(a)),
    lambda made, a, b: made.append(torch.from_numpy(a.resolve_neg().numpy().copy())),
    lambda made, a, b: made.append(torch.tensor(a[0].tolist()).repeat(2, 1)),
    lambda made, a, b: redraw(a, b),
    lambda made, a, b: forked(a, b),
]
programs = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99), st.integers(0, 99)), max_size=25)


@settings(max_examples=150)
@given(programs, st.randoms(use_true_random=False))
def test_a_random_program_gives_what_it_gives_in_an_ordinary_build(program, shuffle):
    def build():
        made = [torch.ones(3, 4), torch.rand(4, 3)]
        for step, a, b in program:
            step(made, made[a % len(made)], made[b % len(made)])
        module = nn.Module()
        module.made = made
        return module

    try:
        ordinary, model = zoo.pair(build)
    except RuntimeError as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            metaviz.build(build)
        return
    paths = [place.path for place in Model(model).places]
    shuffle.shuffle(paths)
    for path in paths[: len(paths) // 2]:
        metaviz.materialize(model, path)
    if shuffle.random() < 0.5:
        metaviz.unload(model)
    for path in paths:
        metaviz.materialize(model, path)
    assert zoo.differences(ordinary, model) == []


def test_an_op_runs_after_all_that_its_inputs_come_from():
    def build():
        first, second, zeros = torch.ones(3), torch.rand(4), torch.zeros(2)
        second.mul_(zeros.sum() / 8)
        first.mul_(second.sum() / 8)
        return holding(first=first, second=second, zeros=zeros)

    assert zoo.faults(build) == []
    _, model = zoo.pair(build)
    metaviz.materialize(model, "first")
    assert torch.equal(model.first, torch.zeros(3))


@pytest.mark.parametrize("trap", [zoo.Seeds, zoo.Inits, zoo.SmallNormals, zoo.ClonedLayers, zoo.Trained])
@pytest.mark.parametrize("attempt", range(3))
def test_eager_draws_are_those_of_the_ordinary_build_whatever_is_asked_for_and_how_often(trap, attempt):
    ordinary, model = zoo.pair(trap)
    paths = [place.path for place in Model(model).places]
    chance = random.Random(attempt)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for _ in range(4):
        chosen = chance.sample(paths, chance.randint(1, len(paths)))
        metaviz.materialize(model, chosen)
        assert all(zoo.differences(ordinary, model, path) == [] for path in chosen)
        metaviz.unload(model, chance.sample(chosen, len(chosen) // 2 + 1))
    metaviz.materialize(model)
    assert zoo.differences(ordinary, model) == []
    assert torch.equal(torch.get_rng_state(), state)


def layers(n: int = 200) -> nn.Module:
    return nn.Sequential(nn.Linear(n, n), nn.Linear(n, n), nn.Embedding(n, n))


def keyed(seed: int, *selections: str) -> nn.Module:
    torch.manual_seed(seed)
    model = metaviz.build(layers)
    for paths in selections:
        metaviz.materialize(model, paths, rng="keyed")
    return model


def test_keyed_draws_are_the_same_for_any_selection():
    whole, parts = keyed(5, ""), keyed(5, "2", "1.bias", "0", "1")
    assert zoo.differences(whole, parts) == []
    metaviz.unload(parts, "1")
    metaviz.materialize(parts, "1", rng="keyed")
    assert zoo.differences(whole, parts) == []


def test_keyed_draws_differ_with_the_seed_and_from_op_to_op():
    first, second = keyed(5, ""), keyed(6, "")
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, first[1].weight)


def test_keyed_draws_have_the_distribution_of_the_op():
    model, bound = keyed(5, ""), 200**-0.5
    for layer in model.requires_grad_(False)[:2]:
        assert layer.weight.abs().max() <= bound
        assert layer.weight.mean().abs() < bound / 50
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert model[2].weight.mean().abs() < 0.02 and model[2].weight.std().item() == pytest.approx(1, rel=0.02)


def test_keyed_draws_leave_the_generator_alone(generators_stay):
    state = torch.get_rng_state()
    keyed(torch.initial_seed(), "")
    torch.set_rng_state(state)


def test_device_draws_come_from_the_global_generator_and_move_it():
    torch.manual_seed(5)
    ordinary = layers()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    model = metaviz.build(layers)
    torch.manual_seed(5)
    metaviz.materialize(model, rng="device")
    assert torch.equal(torch.get_rng_state(), after)
    assert zoo.differences(ordinary, model) == []


def test_constants_are_the_same_whatever_the_draws():
    for rng in ("eager", "keyed", "device"):
        model = metaviz.build(zoo.NonPersistentBuffer)
        metaviz.materialize(model, rng=rng)
        assert model.inv_freq[0] == 1.0


def test_an_unknown_way_to_draw_is_refused():
    with pytest.raises(ValueError, match="rng='magic' is not one of 'eager', 'keyed', 'device'"):
        metaviz.materialize(metaviz.build(nn.Linear, 2, 2), rng="magic")


def replayed(model: nn.Module, tensor: torch.Tensor) -> dict[int, torch.UntypedStorage]:
    tag = tag_of(tensor)
    with plain_torch():
        return dict(replay(tag.tape, [tag.storage], EagerDraws()))


def test_only_what_a_tensor_needs_is_run():
    def build():
        unneeded = torch.rand(5).reciprocal()
        start = torch.ones(3)
        return holding(unneeded=unneeded, end=start + 1)

    model = metaviz.build(build)
    tape = tag_of(model.end).tape
    names = [tape.ops[k].name for k in tape.slice([tag_of(model.end).storage])]
    assert names == ["fill_", "add"]


@pytest.mark.parametrize(
    "build", [lambda: torch.linalg.eig(torch.rand(3, 3))[1], lambda: torch.svd(torch.rand(4, 3))[2]]
)
def test_a_result_is_laid_out_as_on_the_tape_where_a_kernel_chooses_other_strides(build):
    with metaviz.recording(value_limit=0):
        torch.manual_seed(5)
        model = holding(values=build())
    strides = model.values.stride()
    metaviz.materialize(model)
    torch.manual_seed(5)
    assert model.values.stride() == strides
    assert torch.allclose(model.values, build())


def chain(steps: int = 6) -> nn.Module:
    values = torch.rand(MIB)
    for _ in range(steps):
        values = values * 2 + 1
    return holding(values=values)


def wide(count: int = 6) -> nn.Module:
    return holding(sum=sum(torch.rand(MIB) for _ in range(count)))


def allocated(run: Callable[[], object], path) -> int:
    """Most bytes that torch's CPU allocator has given out at any time while `run` runs."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    events = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    most = now = 0
    for event in events:
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


BIG = {
    "chain": (chain, 3),
    "sum": (wide, 3),
    "linear": (lambda: nn.Linear(1024, 1024), 2),
    "embedding": (lambda: nn.Embedding(1024, 1024, padding_idx=0), 2),
    "cast": (lambda: nn.Linear(1024, 1024).half(), 2),
    "copied": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 2, 1024, batch_first=True), 2),
        None,
    ),
    "views": (lambda: holding(view=torch.rand(MIB)[::2], other=torch.rand(4)), 2),
    "truncated": (lambda: holding(weight=nn.init.trunc_normal_(torch.empty(MIB))), 5),
    "orthogonal": (lambda: holding(weight=nn.init.orthogonal_(torch.empty(512, 512))), None),
    "norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(1024, 1024)), 4),
    "lstm": (lambda: nn.LSTM(256, 256), None),
}


@pytest.mark.parametrize("name", BIG)
def test_memory_is_freed_as_soon_as_no_later_op_needs_it(name, tmp_path):
    build, most = BIG[name]
    model = metaviz.build(build)
    metaviz.materialize(model)
    metaviz.unload(model)
    peak = allocated(lambda: metaviz.materialize(model), tmp_path / "trace.json")
    planned = metaviz.build(build)
    (need,) = metaviz.plan(planned).peak_nbytes.values()
    assert peak <= need + MIB // 2
    if most is not None:
        assert peak <= most * 4 * MIB + MIB // 2


def test_the_planned_peak_counts_what_lives_at_the_same_time():
    chained, summed = metaviz.build(chain, 20), metaviz.build(wide, 20)
    for model, tensor in ((chained, chained.values), (summed, summed.sum)):
        tag = tag_of(tensor)
        nbytes = 4 * MIB
        assert 2 * nbytes <= peak_nbytes(tag.tape, [tag.storage], {tag.storage: nbytes}, {}) <= 3 * nbytes
        assert len(replayed(model, tensor)) == 1


def test_a_part_takes_memory_for_that_part_only(tmp_path):
    model = metaviz.build(lambda: nn.ModuleList([nn.Linear(1024, 1024) for _ in range(5)]))
    metaviz.materialize(model, "0")
    peak = allocated(lambda: metaviz.materialize(model, "4"), tmp_path / "trace.json")
    assert 4 * MIB <= peak <= 5 * MIB


def test_ops_run_under_the_default_dtype_of_the_build():
    def build():
        holder = nn.Module()
        holder.register_buffer("w", torch.linspace(1e-3, 10, 256))
        return holder

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        ordinary, model = build(), metaviz.build(build)
    finally:
        torch.set_default_dtype(before)
    metaviz.materialize(model)
    assert model.w.dtype == ordinary.w.dtype == torch.bfloat16
    assert torch.equal(model.w, ordinary.w)
