"""Load hooks of modules: what they do to a state dict is done, and nothing else of the model changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm

import metaviz


class Split(nn.Module):
    """Loads checkpoints in which two projections are one."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self._register_load_state_dict_pre_hook(self._split)

    def _split(self, state, prefix, *others):
        fused = state.pop(f"{prefix}qk.weight", None)
        if fused is not None:
            state[f"{prefix}q.weight"], state[f"{prefix}k.weight"] = fused.chunk(2)
        self.loaded = True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Split(), nn.Linear(4, 2)


def check_as_ordinary(make, state) -> tuple[nn.Module, metaviz.Report]:
    ordinary = make()
    ordinary.load_state_dict(state)
    model = metaviz.build(make)
    report = metaviz.materialize(model, checkpoint=state)
    for name, tensor in ordinary.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    return model, report


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_of_the_old_weight_norm_goes_into_the_new_one():
    state = nn.Sequential(old_weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)).state_dict()
    assert "0.weight_g" in state
    _, report = check_as_ordinary(lambda: nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)), state)
    assert "Load hooks of the model gave 2 tensors another name." in str(report)
    assert report.match.unexpected == ()


def test_what_a_hook_splits_is_split_and_only_what_is_chosen_is_kept():
    state = {
        "block.qk.weight": torch.randn(8, 4),
        "head.weight": torch.randn(2, 4),
        "head.bias": torch.randn(2),
    }
    kept = {name: tensor.clone() for name, tensor in state.items()}
    model, report = check_as_ordinary(Net, state)
    assert model.block.q.weight.untyped_storage().nbytes() == 64
    assert report.tensors[0].reason.startswith("block.qk.weight by a load hook of the model")
    assert list(state) == list(kept) and all(torch.equal(state[name], kept[name]) for name in kept)


def test_a_hook_leaves_nothing_on_the_module():
    model = metaviz.build(Net)
    before = dict(vars(model.block))
    metaviz.match(model, {"block.qk.weight": torch.randn(8, 4)})
    assert vars(model.block) == before
    assert model.block.q.weight.is_meta


def test_a_hook_that_fails_is_left_out_and_named():
    def broken(*_):
        raise LookupError

    def make():
        model = nn.Linear(2, 2)
        model._register_load_state_dict_pre_hook(broken)
        return model

    state = nn.Linear(2, 2).state_dict()
    model = metaviz.build(make)
    report = metaviz.materialize(model, checkpoint=state)
    assert torch.equal(model.weight, state["weight"])
    assert "broken of the root was left out: it raises LookupError." in str(report)


def test_a_hook_that_writes_to_the_model_or_to_a_file_cannot(tmp_path):
    def make():
        model = Net()
        model._register_load_state_dict_pre_hook(lambda *_: model.head.weight.fill_(7))
        model.head._register_load_state_dict_pre_hook(lambda *_: (tmp_path / "x").write_text("x"))
        return model

    model = metaviz.build(make)
    match = metaviz.match(model, {"head.bias": torch.ones(2)})
    assert len([note for note in match.notes if "left out" in note]) == 2
    assert not (tmp_path / "x").exists()
    metaviz.materialize(model)
    assert not (model.head.weight == 7).any()


def test_a_hook_that_never_ends_is_given_up_on(monkeypatch):
    from metaviz.core import loadhooks

    def forever(*_):
        while True:
            pass

    monkeypatch.setattr(loadhooks, "SECONDS", 0.2)
    model = metaviz.build(nn.Linear, 2, 2)
    model._register_load_state_dict_pre_hook(forever)
    match = metaviz.match(model, {"weight": torch.ones(2, 2)})
    assert match.notes == ("The load hooks of the model take too long, and were left out.",)


def test_a_lazy_module_stays_lazy():
    model = metaviz.build(lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))
    state = {
        "0.weight": torch.ones(3, 2),
        "0.bias": torch.ones(3),
        "1.weight": torch.eye(3),
        "1.bias": torch.ones(3),
    }
    report = metaviz.materialize(model, checkpoint=state)
    assert report.lazy == ("0.weight", "0.bias")
    assert type(model[0]) is nn.LazyLinear
    assert torch.equal(model[1].weight, torch.eye(3))


def with_hook(hook, make=lambda: nn.Linear(2, 2), **options):
    """Models that let a hook change what is loaded."""

    def made():
        model = make()
        model._register_load_state_dict_pre_hook(hook, **options)
        return model

    return made


def doubled(state, prefix, *_):
    state[f"{prefix}weight"].mul_(2)


def turned(state, prefix, *_):
    state[f"{prefix}weight"].t_()


def test_a_hook_that_writes_to_stored_tensors_writes_to_copies():
    state = nn.Linear(2, 2).state_dict()
    weight = state["weight"].clone()
    model = metaviz.build(with_hook(doubled))
    metaviz.materialize(model, checkpoint=state)
    assert torch.equal(model.weight, weight * 2) and torch.equal(model.bias, state["bias"])
    assert torch.equal(state["weight"], weight)


def test_a_hook_that_lays_stored_tensors_out_anew_leaves_the_callers_alone():
    state = nn.Linear(2, 2).state_dict()
    model = metaviz.build(with_hook(turned))
    metaviz.materialize(model, checkpoint=state)
    assert torch.equal(model.weight, state["weight"].t())
    assert state["weight"].stride() == (2, 1)


def test_a_hook_gets_its_module_and_reads_values_that_are_there():
    def scaled(module, state, prefix, *_):
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * module.scale

    state = nn.Linear(2, 2).state_dict()
    model = metaviz.build(nn.Linear, 2, 2)
    model.scale = torch.tensor(3.0)
    model._register_load_state_dict_pre_hook(scaled, with_module=True)
    metaviz.materialize(model, checkpoint=state)
    assert torch.equal(model.weight, state["weight"] * 3)


def failing_half_way(state, prefix, *_):
    state.pop(f"{prefix}weight").zero_()
    raise LookupError


def not_a_tensor(state, prefix, *_):
    state[f"{prefix}weight"] = "words"


def of_nothing(module, state, prefix, *_):
    state[f"{prefix}weight"] = module.weight + 1


@pytest.mark.parametrize(
    ("hook", "options", "reason"),
    [
        (failing_half_way, {}, "it raises LookupError"),
        (not_a_tensor, {}, "it makes an object of type str of weight"),
        (of_nothing, {"with_module": True}, "it makes weight of values that the model does not have yet"),
    ],
)
def test_a_hook_is_left_out_as_a_whole(hook, options, reason):
    state = nn.Linear(2, 2).state_dict()
    model = nn.Linear(2, 2, device="meta")
    model._register_load_state_dict_pre_hook(hook, **options)
    report = metaviz.materialize(model, checkpoint=state)
    assert torch.equal(model.weight, state["weight"])
    assert report.match.notes == (f"The load hook {hook.__qualname__} of the root was left out: {reason}.",)


def test_a_hook_that_means_the_model_by_its_closure_does_not_change_it():
    model = metaviz.build(nn.Linear, 2, 2)

    def marks(state, prefix, *_):
        model.seen = True
        state[f"{prefix}weight"] = state.pop(f"{prefix}w")

    model._register_load_state_dict_pre_hook(marks)
    metaviz.materialize(model, checkpoint={"w": torch.ones(2, 2), "bias": torch.ones(2)})
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert not hasattr(model, "seen")


def test_what_a_hook_complains_about_is_said():
    def complains(state, prefix, metadata, strict, missing, unexpected, errors):
        errors.append("The checkpoint is too old.\nMore.")

    match = metaviz.match(metaviz.build(with_hook(complains)), nn.Linear(2, 2).state_dict())
    assert len(match.notes) == 1 and match.notes[0].endswith("of the root says: The checkpoint is too old.")


def test_values_of_a_real_model_that_a_hook_has_only_looked_at_are_let_go_of():
    from metaviz.core.loading import Loading

    model = nn.Linear(2, 2)
    model._register_load_state_dict_pre_hook(lambda module, *_: module.weight.sum(), with_module=True)
    tape = Loading(model, metaviz.checkpoint(nn.Linear(2, 2).state_dict())).tape
    held = [arg for op in tape.ops for arg in op.args if isinstance(arg, torch.Tensor)]
    assert not any(each.data_ptr() == model.weight.data_ptr() for each in held)
