"""Where the values of a tensor come from, in which dtype, and why there may be none."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.replayable import replay_verdict
from metaviz.core.sources import Slot, Sources
from metaviz.errors import CannotMaterialize

SEED = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(40, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("angle", torch.polar(torch.ones(3), torch.rand(3)))
        self.register_buffer("order", torch.randperm(10))
        self.register_buffer("noise", torch.rand(20), persistent=False)
        self.plain = torch.rand(3)


def both(make=Net) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(SEED)
    ordinary = make()
    torch.manual_seed(SEED)
    return metaviz.build(make), ordinary


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    attributes = {name: value for name, value in vars(model).items() if isinstance(value, torch.Tensor)}
    return dict([*model.named_parameters(), *model.named_buffers(), *attributes.items()])


def assert_equal(model: nn.Module, ordinary: nn.Module) -> None:
    mine, theirs = values(model), values(ordinary)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (name, tensor.dtype) == (name, theirs[name].dtype)
        assert not tensor.is_meta, name
        assert torch.equal(tensor, theirs[name]), name


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to a dtype": lambda m: m.to(torch.float16),
    "a submodule": lambda m: m.body.to(torch.bfloat16),
    "one parameter": lambda m: setattr(m.body.weight, "data", m.body.weight.data.half()),
    "one buffer": lambda m: setattr(m, "noise", m.noise.half()),
}


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_after_the_build_gives_what_an_ordinary_build_and_the_cast_give(cast):
    model, ordinary = both()
    cast(model)
    cast(ordinary)
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    metaviz.materialize(model)
    assert_equal(model, ordinary)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    metaviz.unload(model)
    assert all(tensor.is_meta for tensor in values(model).values())
    metaviz.materialize(model)
    assert_equal(model, ordinary)


def test_a_cast_is_told_in_the_reason():
    model, _ = both()
    model.body.half()
    tensor = metaviz.plan(model, "body.bias").tensors[0]
    assert tensor.dtype is torch.float16
    assert tensor.nbytes == 8
    assert tensor.reason.startswith("uniform_ at ")
    assert tensor.reason.endswith("then cast from float32 to float16 as the model was after the build")


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", torch.float64, torch.float8_e4m3fn])
def test_the_dtype_argument_casts_floating_point_tensors_and_no_others(dtype):
    model, ordinary = both()
    metaviz.materialize(model, dtype=dtype)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    for name, tensor in values(model).items():
        theirs = values(ordinary)[name]
        assert tensor.dtype is (wanted if theirs.is_floating_point() else theirs.dtype)
        same = theirs.to(tensor.dtype)
        # There is no comparison of 8-bit floats.
        assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8)), name
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())


def test_a_tensor_cast_by_the_argument_keeps_its_dtype_when_it_is_unloaded_and_comes_again():
    model, ordinary = both()
    metaviz.materialize(model, "body", dtype="bfloat16")
    first = model.body.weight.clone()
    metaviz.unload(model)
    assert model.body.weight.dtype is torch.bfloat16
    metaviz.materialize(model)
    assert torch.equal(model.body.weight, first)
    assert torch.equal(model.norm.weight, ordinary.norm.weight)


def test_keyed_draws_are_the_same_for_any_selection_and_depend_on_the_seed():
    whole, ordinary = both()
    part, _ = both()
    metaviz.materialize(whole, rng="keyed")
    metaviz.materialize(part, "noise", rng="keyed")
    assert torch.equal(whole.noise, part.noise)
    assert not torch.equal(whole.noise, ordinary.noise)
    metaviz.unload(part)
    metaviz.materialize(part, "noise")
    assert torch.equal(part.noise, ordinary.noise)
    torch.manual_seed(SEED + 1)
    other = metaviz.build(Net)
    metaviz.materialize(other, rng="keyed")
    assert not torch.equal(whole.noise, other.noise)


def test_draws_of_the_device_come_from_its_global_generator():
    model, _ = both()
    torch.manual_seed(1)
    metaviz.materialize(model, "noise", rng="device")
    torch.manual_seed(1)
    assert torch.equal(model.noise, torch.rand(20))


class Layouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("wide", torch.rand(3)[:, None].expand(3, 50))
        self.register_buffer("turned", torch.rand(4, 5).t())
        self.register_buffer("every_other", torch.rand(4, 6)[1:, ::2])
        self.register_buffer("windows", torch.rand(9).unfold(0, 4, 1))
        self.register_buffer("image", torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("scalar", torch.rand(()))
        self.register_buffer("none", torch.rand(0, 3))
        self.register_buffer("negated", torch.polar(torch.rand(3), torch.rand(3)).conj().imag)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_every_memory_layout_survives_with_or_without_a_cast(dtype):
    model, ordinary = both(Layouts)
    strides = {name: buffer.stride() for name, buffer in model.named_buffers()}
    plan = metaviz.plan(model, dtype=dtype)
    metaviz.materialize(model, dtype=dtype)
    for name, buffer in model.named_buffers():
        assert buffer.stride() == strides[name]
        assert torch.equal(buffer, ordinary.get_buffer(name).to(buffer.dtype)), name
    memory = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    assert plan.nbytes == sum(memory.values())


class Unwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.never = nn.Parameter(torch.empty(4))
        part = torch.empty(8)
        part[:6] = 1
        self.register_buffer("part", part)
        self.fine = nn.Parameter(torch.ones(2))


def test_what_no_op_ever_writes_is_blocked_with_the_reason_and_the_next_step():
    plan = metaviz.plan(metaviz.build(Unwritten))
    assert [t.path for t in plan.tensors] == ["fine"]
    assert plan.blocked == {
        "never": "Uninitialized even in an ordinary build: no op of the constructor ever writes it. "
        "Next: torch.nn.init.zeros_(self.never)  # in the constructor",
        "part": "Partly uninitialized even in an ordinary build: there are 8 B of it that no op of the "
        "constructor ever writes. Next: torch.nn.init.zeros_(self.part)  # in the constructor",
    }


def test_blocked_tensors_stop_all_or_are_skipped_as_asked():
    model = metaviz.build(Unwritten)
    with pytest.raises(CannotMaterialize):
        metaviz.materialize(model)
    assert model.fine.is_meta
    report = metaviz.materialize(model, blocked="skip")
    assert set(report.skipped) == {"never", "part"}
    assert "left on meta, blocked: never, part" in str(report)
    assert torch.equal(model.fine, torch.ones(2))
    assert model.never.is_meta
    assert model.part.is_meta


def test_a_reason_names_the_init_function_and_the_line_that_called_it():
    plan = metaviz.plan(metaviz.build(Net), "plain")
    place = plan.tensors[0].reason.removeprefix("uniform_ at ")
    filename, _, line = place.rpartition(":")
    assert filename == Path(__file__).name
    assert linecache.getline(__file__, int(line)).strip() == "self.plain = torch.rand(3)"


def test_a_tensor_without_elements_needs_no_op():
    answer = replay_verdict(metaviz.build(Layouts).none, None, "none")
    assert (answer.can, answer.source, answer.fix) == (True, "replay", None)


class Plain(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, **options))
        self.bias = nn.Parameter(torch.ones(2, **options))


def outside():
    return Plain(device="meta")


def replaced():
    model = metaviz.build(Plain)
    model.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    model.bias = nn.Parameter(torch.empty(2, device="meta"))
    return model


def on_meta_by_hand():
    return metaviz.build(Plain, device="meta")


@pytest.mark.parametrize("make", [outside, replaced, on_meta_by_hand])
def test_a_tensor_that_no_tape_knows_is_blocked_and_told_how_to_be_built(make):
    plan = metaviz.plan(make())
    assert plan.tensors == ()
    assert plan.blocked == dict.fromkeys(
        ["weight", "bias"],
        "Plain has no reset_parameters, and no tape knows the tensor. "
        "Next: model = metaviz.build(type(model), *args)",
    )
    replayed = metaviz.plan(make(), source="replay").blocked
    assert list(replayed) == ["weight", "bias"]
    for reason in replayed.values():
        assert reason.startswith("No tape knows this tensor: it was put on meta outside of metaviz.build, ")
        assert reason.endswith(" Next: model = metaviz.build(type(model), *args)")


def test_a_parameter_given_another_shape_after_the_build_is_not_taken_for_the_old_one():
    model = metaviz.build(nn.Linear, 4, 4)
    model.weight.data = torch.empty(2, 4, device="meta")
    assert list(metaviz.plan(model, source="replay").blocked) == ["weight"]
    sources = {tensor.path: tensor.source for tensor in metaviz.plan(model).tensors}
    assert sources == {"weight": "reset", "bias": "replay"}


def slot_of(model: nn.Module, name: str, kind: str = "parameter") -> Slot:
    return Slot(model, name, kind)


def test_a_source_that_does_not_exist_is_refused():
    model = metaviz.build(nn.Linear, 2, 2)
    with pytest.raises(
        ValueError, match="source='eager' is not one of 'auto', 'checkpoint', 'replay', 'reset'"
    ):
        Sources(model).verdict(model.weight, slot_of(model, "weight"), "eager")
    with pytest.raises(ValueError, match="source='eager'"):
        metaviz.plan(model, source="eager")


@pytest.mark.parametrize("source", ["auto", "replay", "reset"])
def test_what_holds_values_needs_no_source(source):
    model = nn.Linear(2, 2)
    verdict = Sources(model).verdict(model.weight, slot_of(model, "weight"), source)
    assert (verdict.can, verdict.kind, verdict.reason) == (False, "real", "It holds values on cpu already.")


@pytest.mark.parametrize("source", ["auto", "replay", "reset"])
def test_what_has_no_shape_yet_has_no_source(source):
    model = metaviz.build(nn.LazyLinear, 2)
    verdict = Sources(model).verdict(model.weight, slot_of(model, "weight"), source)
    assert (verdict.can, verdict.kind) == (False, "lazy")


def test_every_place_of_a_tied_tensor_gets_the_same_verdict():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Embedding(3, 3))
    model[1].weight = model[0].weight
    sources = Sources(model)
    found = [sources.verdict(model[0].weight, slot_of(module, "weight"), "reset") for module in model]
    assert found[0] == found[1]
    assert found[0].reason.startswith("Linear.reset_parameters()")


def test_of_a_tied_tensor_the_place_where_reset_is_right_decides():
    def make():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Embedding(3, 3))
        model[0].weight = model[1].weight
        return model

    model = metaviz.build(make)
    verdict = metaviz.tree(model).verdict("0.weight", "reset")
    assert verdict.faithful is True
    assert verdict.reason.startswith("Embedding.reset_parameters(): normal_(0, 1)")


def test_no_method_is_tried_where_the_tape_has_the_answer():
    tried = []

    class Noisy(nn.Linear):
        def reset_parameters(self):
            tried.append(1)
            super().reset_parameters()

    model = metaviz.build(Noisy, 2, 2)
    tried.clear()
    assert metaviz.tree(model).row.mark == "ready"
    assert tried == []


def test_lazy_tensors_move_with_all_that_is_theirs_and_get_their_values_at_the_first_forward():
    model = metaviz.build(lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2)))
    weight = model[0].weight
    weight.note = "kept"
    plan = metaviz.plan(model)
    assert plan.lazy == ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
    report = metaviz.materialize(model, dtype="float64")
    assert report.lazy == plan.lazy
    assert "lazy, moved: 0.weight, 0.bias" in str(report)
    assert model[0].weight is weight
    assert (weight.note, weight.device.type) == ("kept", "cpu")
    assert isinstance(weight, nn.UninitializedParameter)
    out = model(torch.randn(5, 7, dtype=torch.float64))
    assert (out.shape, out.dtype) == ((5, 2), torch.float64)
    assert (type(weight), weight.shape) == (nn.Parameter, (3, 7))
    assert metaviz.materialize(model).lazy == ()
