"""Tensors stay what they were to everyone who holds them, and can go back to meta and come again."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import itertools
import pickle
import random
import weakref

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core import origin
from metaviz.errors import CannotMaterialize, WouldLoseValues

SEED = 3


def both(make, *args, **kwargs) -> tuple[nn.Module, nn.Module]:
    """The model on meta, and the one that an ordinary build gives."""
    torch.manual_seed(SEED)
    ordinary = make(*args, **kwargs)
    torch.manual_seed(SEED)
    return metaviz.build(make, *args, **kwargs), ordinary


def equal(model: nn.Module, ordinary: nn.Module, prefix: str = "") -> bool:
    """Whether all parameters and buffers under a path are the very same bits."""
    mine, theirs = (
        dict([*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)])
        for m in (model, ordinary)
    )
    assert mine.keys() == theirs.keys()
    names = [name for name in mine if name.startswith(prefix)]
    assert names
    return all(
        mine[n].dtype == theirs[n].dtype and not mine[n].is_meta and torch.equal(mine[n], theirs[n])
        for n in names
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x):
        return self.head(self.body(self.embed(x)) * self.scale)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(5)).square().mean().backward()
        optimizer.step()


def test_an_optimizer_made_on_meta_trains_the_materialized_model():
    model, ordinary = both(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    metaviz.materialize(model)
    steps(model, optimizer)
    steps(ordinary, torch.optim.AdamW(ordinary.parameters(), lr=0.1))
    assert equal(model, ordinary)


def test_hooks_fire_once_and_can_be_removed_afterwards():
    model, calls = metaviz.build(Net), []
    weight = model.body[0].weight
    tensor = weight.register_hook(lambda grad: calls.append("tensor"))
    after = weight.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    model.body[0].register_forward_hook(
        lambda m, _, out: calls.append(weight is m.weight and not weight.is_meta)
    )
    metaviz.materialize(model)
    model(torch.arange(5)).sum().backward()
    assert calls == [True, "tensor", "after"]
    tensor.remove()
    after.remove()
    model(torch.arange(5)).sum().backward()
    assert calls == [True, "tensor", "after", True]


def test_captured_references_become_real_and_ties_stay_ties():
    model, ordinary = both(Net)
    captured = dict(model.named_parameters(remove_duplicate=False))
    metaviz.materialize(model, "head")
    assert model.head.weight is model.embed.weight is captured["embed.weight"] is captured["head.weight"]
    assert torch.equal(captured["embed.weight"], ordinary.embed.weight)
    assert captured["body.0.weight"].is_meta


class Marked(nn.Parameter):
    pass


class Slotted(nn.Parameter):
    __slots__ = ("extra",)


@pytest.mark.parametrize("kind", [nn.Parameter, Marked, Slotted])
def test_class_attributes_and_requires_grad_of_a_parameter_stay(kind):
    def make():
        model = nn.Module()
        model.p = kind(torch.ones(2), requires_grad=False)
        model.p.note, model.p.extra = "a", "b"
        return model

    model = metaviz.build(make)
    for act in (metaviz.materialize, metaviz.unload, metaviz.materialize):
        act(model)
        assert (type(model.p), model.p.requires_grad, model.p.note, model.p.extra) == (kind, False, "a", "b")


def test_current_requires_grad_wins_over_that_of_the_build():
    model = metaviz.build(Net)
    model.embed.requires_grad_(False)
    model.late = 1
    metaviz.materialize(model)
    assert not model.embed.weight.requires_grad
    assert model.body[0].weight.requires_grad
    assert model.embed.weight.is_leaf
    model(torch.arange(5)).sum().backward()
    assert model.embed.weight.grad is None


def test_an_lstm_uses_its_new_weights_even_though_it_keeps_weak_references():
    model, ordinary = both(nn.LSTM, 3, 4, num_layers=2)
    report = metaviz.materialize(model)
    assert set(report.repointed) >= {"weight_ih_l0", "_flat_weights[0]"}
    assert all(flat is p for flat, p in zip(model._flat_weights, model.parameters(), strict=True))
    x = torch.randn(5, 1, 3)
    assert torch.equal(model(x)[0], ordinary(x)[0])
    metaviz.unload(model)
    metaviz.materialize(model, "_flat_weights[1]")
    assert torch.equal(model.weight_hh_l0, ordinary.weight_hh_l0)


@dataclasses.dataclass
class Open:
    x: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Refusing(dict):
    def __setitem__(self, key, value):
        raise TypeError("nothing can be set")


class Holders(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.kept = torch.rand(2), [torch.rand(2), {"deep": torch.rand(2)}]
        self.open, self.many = Open(torch.rand(2)), {torch.rand(2)}
        self.frozen, self.refusing, self.pair = (
            Frozen(torch.rand(2)),
            Refusing(x=torch.rand(2)),
            (torch.rand(2),),
        )

    def held(self) -> list[torch.Tensor]:
        return [self.plain, self.kept[0], self.kept[1]["deep"], self.open.x, *self.many, *self.fixed()]

    def fixed(self) -> list[torch.Tensor]:
        return [self.frozen.x, self.refusing["x"], self.pair[0]]


def test_tensors_in_plain_attributes_are_filled_where_they_are():
    model, ordinary = both(Holders)
    before = model.held()
    report = metaviz.materialize(model)
    assert (report.repointed, report.stranded) == ((), ())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.held(), ordinary.held(), strict=True))
    assert all(mine is old for mine, old in zip(model.held(), before, strict=True))


def test_where_weak_references_forbid_a_swap_the_holders_get_new_objects():
    model, ordinary = both(Holders)
    watches = [weakref.ref(tensor) for tensor in model.held()]
    report = metaviz.materialize(model)
    assert report.repointed == ("plain", "kept[0]", "kept[1]['deep']", "open.x", "many{0}")
    assert report.stranded == ("frozen.x", "refusing['x']", "pair[0]")
    assert "still the old tensor (held by a tuple or a frozen object): frozen.x" in str(report)
    assert "new objects (make optimizers that hold the old ones again): plain" in str(report)
    free = len(model.held()) - 3
    assert all(torch.equal(a, b) for a, b in zip(model.held()[:free], ordinary.held()[:free], strict=True))
    assert all(tensor.is_meta for tensor in model.fixed())
    assert len(watches) == 8


def test_a_tensor_that_had_to_be_replaced_can_be_unloaded_and_comes_again():
    model, ordinary = both(Net)
    watch = weakref.ref(model.body[0].weight)
    assert metaviz.materialize(model).repointed == ("body.0.weight",)
    assert watch() is None or watch().is_meta
    metaviz.unload(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    metaviz.materialize(model)
    assert equal(model, ordinary)


def test_real_tensors_are_never_touched():
    model, ordinary = both(Net)
    model.body[0] = nn.Linear(4, 4)
    model.register_buffer("real", torch.rand(3))
    real = [*model.body[0].parameters(), model.real]
    before = [(t.data_ptr(), t._version, t.clone()) for t in real]
    plan = metaviz.plan(model)
    assert plan.kept == ("real", "body.0.weight", "body.0.bias")
    report = metaviz.materialize(model, dtype="float64")
    assert report.kept == plan.kept
    assert [(t.data_ptr(), t._version) for t in real] == [(p, v) for p, v, _ in before]
    assert all(
        torch.equal(t, old) and t.dtype == old.dtype for t, (*_, old) in zip(real, before, strict=True)
    )
    assert torch.equal(model.embed.weight, ordinary.embed.weight.double())


def test_materializing_twice_does_nothing_the_second_time_and_says_so():
    model, ordinary = both(Net)
    metaviz.materialize(model)
    before = [(p.data_ptr(), p._version) for p in model.parameters()]
    report = metaviz.materialize(model)
    assert (report.tensors, report.nbytes) == ((), 0)
    assert len(report.kept) == 6
    assert str(report).startswith("materialized 0 tensors, 0 B, on cpu in ")
    assert "real already: scale, embed.weight" in str(report)
    assert [(p.data_ptr(), p._version) for p in model.parameters()] == before
    assert equal(model, ordinary)


CONFIGS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True, "vocab_size": 40}),
    "mixture": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 40}),
}
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_any_parts_in_any_order_give_what_one_ordinary_build_gives(name, needs, generators_stay):
    transformers = needs("transformers")
    config, extra = CONFIGS[name]
    config = getattr(transformers, config)(**SMALL, **extra)
    state = torch.get_rng_state()
    model, ordinary = both(transformers.AutoModelForCausalLM.from_config, config)
    torch.set_rng_state(state)
    layers = [f"model.layers.{i}" for i in range(3)]
    shuffled = random.Random(0)
    for order in itertools.permutations(layers):
        for path in order:
            metaviz.materialize(model, path)
            assert equal(model, ordinary, path)
            if shuffled.random() < 0.5:
                metaviz.unload(model, path)
        assert model.model.norm.weight.is_meta
        metaviz.unload(model)
    metaviz.materialize(model, "model.layers.2.self_attn")
    metaviz.materialize(model)
    assert equal(model, ordinary)
    x = torch.arange(6)[None]
    assert torch.equal(model(x).logits, ordinary(x).logits)


def test_unload_frees_the_memory_and_the_same_bits_come_again():
    model, ordinary = both(Net)
    metaviz.materialize(model)
    watched = weakref.ref(model.embed.weight.untyped_storage())
    report = metaviz.unload(model, "embed")
    gc.collect()
    assert watched() is None
    assert report.nbytes == 7 * 4 * 4
    assert str(report).startswith("unloaded 1 tensor, 112 B, on meta in ")
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.is_meta
    assert not model.body[0].weight.is_meta
    metaviz.materialize(model)
    assert equal(model, ordinary)


def test_unloading_what_is_on_meta_already_does_nothing():
    report = metaviz.unload(metaviz.build(Net))
    assert (report.tensors, report.nbytes) == ((), 0)


def add_in_place(model):
    with torch.no_grad():
        model.body[0].weight.add_(1)


def train(model):
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_in_place, "was changed since it was materialized"),
        (train, "was changed since it was materialized"),
        (lambda model: model(torch.arange(5)).sum().backward(), "has a gradient"),
        (lambda model: model.body[0].double(), "or they were cast or moved since"),
        (
            lambda model: model.body[0].register_parameter("weight", nn.Parameter(torch.ones(4, 4))),
            "metaviz did not",
        ),
    ],
)
def test_unload_refuses_to_lose_values_and_changes_nothing(change, reason):
    model = metaviz.build(Net)
    metaviz.materialize(model)
    change(model)
    before = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()}
    with pytest.raises(WouldLoseValues, match=reason):
        metaviz.unload(model, ["scale", "body"])
    assert {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()} == before
    assert not model.scale.is_meta


@pytest.mark.parametrize("change", [add_in_place, train])
def test_force_unloads_changed_values_and_the_original_ones_come_again(change):
    model, ordinary = both(Net)
    metaviz.materialize(model)
    change(model)
    metaviz.unload(model, force=True)
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    metaviz.materialize(model)
    assert equal(model, ordinary)


def test_force_does_not_throw_away_what_could_never_come_again():
    model = metaviz.build(Net)
    model.body[0] = nn.Linear(4, 4)
    with pytest.raises(WouldLoseValues, match=r"body\.0\.weight: metaviz did not give it its values"):
        metaviz.unload(model, force=True)


def test_the_tape_dies_with_its_model():
    model, other = metaviz.build(Net), metaviz.build(Net)
    tape = weakref.ref(model.embed.weight.untyped_storage()._metaviz.tape)
    metaviz.materialize(model, "body")
    metaviz.plan(model)
    memory = weakref.ref(model.body[0].weight.untyped_storage())
    del model
    gc.collect()
    assert tape() is None
    assert memory() is None
    assert len(metaviz.materialize(other).tensors) == 6
    assert id(other.embed) in origin._seen
    del other
    gc.collect()
    assert not [seen for seen in origin._seen.values() if isinstance(seen.module(), Net)]


@pytest.mark.parametrize("real", [False, True])
def test_what_is_saved_or_copied_carries_nothing_of_metaviz(real):
    model, ordinary = both(Net)
    if real:
        metaviz.materialize(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"metaviz" not in file.getvalue()
    assert b"metaviz" not in pickle.dumps(model)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assigned = Net()
    assigned.load_state_dict(model.state_dict(), assign=True)
    for copied in (loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model), assigned):
        assert copied.embed.weight.is_meta is not real
        assert not real or equal(copied, ordinary)
    for copied in (loaded, copy.deepcopy(model)):
        assert not [
            name for t in copied.parameters() for name in vars(t.untyped_storage()) if "metaviz" in name
        ]


def test_a_copy_made_after_the_build_is_not_on_the_tape_and_says_so():
    with pytest.raises(CannotMaterialize, match="No tape knows this tensor"):
        metaviz.materialize(copy.deepcopy(metaviz.build(Net)), source="replay")


def test_a_write_after_the_build_is_noticed_and_a_recording_takes_it_in():
    torch.manual_seed(0)
    ordinary = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(0)
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    nn.init.ones_(model[0].weight)
    with pytest.raises(metaviz.errors.CannotMaterialize, match="written to after the build"):
        metaviz.materialize(model)
    assert model[1].weight.is_meta
    with metaviz.recording():
        nn.init.ones_(model[0].weight)
    metaviz.materialize(model)
    assert torch.equal(model[0].weight, torch.ones(3, 3))
    assert torch.equal(model[0].bias, ordinary[0].bias)
    assert torch.equal(model[1].weight, ordinary[1].weight)


def test_what_was_unloaded_counts_as_not_written_to():
    model = metaviz.build(nn.Linear, 3, 3)
    metaviz.materialize(model)
    first = model.weight.detach().clone()
    metaviz.unload(model)
    metaviz.materialize(model)
    assert torch.equal(model.weight, first)
