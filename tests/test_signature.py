"""Signatures: the same distribution is known as the same whatever ops made it, and another one as another."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import init
from torch.nn.utils import parametrizations

import metaviz
from metaviz.core.origin import origin_of
from metaviz.core.paths import Model
from metaviz.core.signature import Signature, root, same, signature

SHAPE = (6, 4)


def signatures(model: nn.Module) -> dict[str, Signature]:
    """What gives each registered tensor of a meta model its values, by path."""
    found = {}
    for place in Model(model).places:
        if place.slot.kind != "attribute" and place.slot.tensor.is_meta:
            origin = origin_of(place.slot.tensor, place.module, place.slot.name)
            found[place.path] = signature(origin.tape, origin.window)
    return found


def of(make: Callable[[], torch.Tensor], **limits: int) -> Signature:
    """The signature of the one tensor that `make` returns."""
    with metaviz.recording() as rec:
        tensor = make()
    return signature(rec.tape, origin_of(tensor).window, **limits)


def filled(fill: Callable[[torch.Tensor], object]) -> Callable[[], torch.Tensor]:
    """What makes an empty tensor and fills it in place."""

    def make() -> torch.Tensor:
        tensor = torch.empty(SHAPE)
        fill(tensor)
        return tensor

    return make


def after_reset(layer: nn.Module, name: str = "weight") -> tuple[Signature, Signature]:
    """The signatures of a tensor as built, and as the layer's own method fills it."""
    built = signatures(layer)[name]
    with metaviz.recording() as rec:
        layer.reset_parameters()
    return built, signature(rec.tape, origin_of(layer.get_parameter(name)).window)


LAYERS = {
    "Linear": lambda: nn.Linear(4, 6),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "Conv2d": lambda: nn.Conv2d(3, 4, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(3, 4, 3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "Embedding": lambda: nn.Embedding(10, 4),
    "Embedding with a padding row": lambda: nn.Embedding(10, 4, padding_idx=2),
    "EmbeddingBag": lambda: nn.EmbeddingBag(10, 4),
    "LSTM": lambda: nn.LSTM(4, 4, 2, bidirectional=True),
    "GRUCell": lambda: nn.GRUCell(4, 4),
    "PReLU": lambda: nn.PReLU(3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
    ),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], 2.0),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_layer_of_torch_is_the_same_as_a_second_build_of_it(make):
    one, other = signatures(metaviz.build(make)), signatures(metaviz.build(make))
    assert {path: same(one[path], other[path]) for path in one} == dict.fromkeys(other, True)


# Each line: ways to make one distribution.
ALIKE = {
    "normal": [
        filled(lambda t: t.normal_(0, 0.02)),
        filled(lambda t: init.normal_(t, std=0.02)),
        filled(lambda t: t.normal_().mul_(0.02)),
        filled(lambda t: init.normal_(t, std=0.02).data.mul_(torch.ones(4))),
        lambda: torch.randn(SHAPE) * 0.02,
        lambda: torch.randn(SHAPE) / 50,
        lambda: -0.02 * torch.randn(SHAPE),
        lambda: torch.randn(SHAPE) * torch.tensor(0.02),
        lambda: (torch.randn(SHAPE) * 0.04 + 2) / 2 - 1,
        lambda: torch.normal(0.0, 0.02, SHAPE),
        lambda: torch.randn(SHAPE[::-1]).T.contiguous() * 0.02,
        lambda: copy.deepcopy(nn.Parameter(torch.randn(SHAPE) * 0.02)),
        lambda: torch.empty(SHAPE).copy_(torch.randn(SHAPE).mul_(0.02)),
        lambda: (torch.randn(SHAPE) * 0.02).detach().clone(),
        lambda: torch.randn(12, 4).mul_(0.02)[6:],
        filled(lambda t: [init.normal_(t[:2], std=0.02), init.normal_(t[2:], std=0.02)]),
        filled(lambda t: [init.ones_(t), init.normal_(t, std=0.02), t.sum().item()]),
        filled(lambda t: init.trunc_normal_(t, std=0.02)),
    ],
    "uniform": [
        filled(lambda t: t.uniform_(-0.5, 0.5)),
        filled(lambda t: init.kaiming_uniform_(t, a=math.sqrt(5))),
        lambda: torch.rand(SHAPE) - 0.5,
        lambda: 0.5 - torch.rand(SHAPE),
        lambda: torch.rand_like(torch.empty(SHAPE)).mul_(2).sub_(1).div_(2),
    ],
    "truncated normal": [
        filled(lambda t: init.trunc_normal_(t, 1, 2, -3, 5)),
        filled(lambda t: init.trunc_normal_(t, 0, 1, -2, 2).mul_(2).add_(1)),
    ],
    "zeros": [
        lambda: torch.zeros(SHAPE),
        filled(init.zeros_),
        filled(lambda t: t.uniform_().zero_()),
        lambda: torch.ones(SHAPE) - 1,
        lambda: torch.tensor([[0.0] * 4] * 6),
        lambda: torch.eye(6, 4).triu(1).tril(-1),
    ],
    "a small number": [
        lambda: 1e-5 * torch.ones(SHAPE),
        lambda: torch.full(SHAPE, 1e-5),
        filled(lambda t: init.constant_(t, 1e-5)),
        lambda: torch.zeros(SHAPE).copy_(torch.tensor(1e-5)),
        lambda: torch.tensor([1e-5]).repeat(*SHAPE),
    ],
    "computed": [
        lambda: 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8),
        lambda: (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)).reciprocal(),
        lambda: torch.tensor([1.0 / 10000 ** (x / 8) for x in (0, 2, 4, 6)]),
    ],
    "a padding row": [
        filled(lambda t: [t.normal_(), t[1].zero_()]),
        filled(lambda t: [init.normal_(t), init.zeros_(t[1])]),
        filled(lambda t: [t.copy_(torch.randn(SHAPE)), t[1].fill_(0)]),
    ],
    "orthogonal": [
        filled(init.orthogonal_),
        lambda: copy.deepcopy(nn.Parameter(filled(init.orthogonal_)())),
    ],
}
WAYS = [(kind, i, make) for kind, makes in ALIKE.items() for i, make in enumerate(makes)]


@pytest.mark.parametrize(("kind", "i", "make"), WAYS, ids=[f"{kind} {i}" for kind, i, _ in WAYS])
def test_other_ops_for_the_same_distribution_are_the_same(kind, i, make):
    first = of(ALIKE[kind][0])
    assert same(first, of(make)) is True
    assert same(of(make), first) is True


DIFFERENT = {
    "nn.Linear's own and 0.02": (lambda: nn.Linear(4, 6).weight, filled(lambda t: init.normal_(t, std=0.02))),
    "another std": (
        filled(lambda t: t.normal_(0, 0.02)),
        filled(lambda t: t.normal_(0, 0.02 / math.sqrt(8))),
    ),
    "another mean": (filled(lambda t: t.normal_(0, 0.02)), filled(lambda t: t.normal_(1e-4, 0.02))),
    "another law": (filled(lambda t: t.normal_()), filled(lambda t: t.exponential_())),
    "bounds that are felt": (filled(lambda t: t.normal_()), filled(lambda t: init.trunc_normal_(t))),
    "zeros and ones": (lambda: torch.zeros(4), lambda: torch.ones(4)),
    "a constant and a draw": (lambda: torch.zeros(4), lambda: torch.randn(4)),
    "another shape": (lambda: torch.ones(4), lambda: torch.ones(5)),
    "with and without a padding row": (ALIKE["a padding row"][0], filled(lambda t: t.normal_())),
    "another std beside a padding row": (
        ALIKE["a padding row"][0],
        filled(lambda t: [t.normal_(0, 0.02), t[1].zero_()]),
    ),
    "another gain": (filled(init.orthogonal_), filled(lambda t: init.orthogonal_(t, 2**0.5))),
    "orthogonal and normal": (filled(init.orthogonal_), filled(lambda t: t.normal_())),
    "orthogonal and sparse": (filled(init.orthogonal_), filled(lambda t: init.sparse_(t, 0.5))),
    "other computed values": (ALIKE["computed"][0], lambda: torch.arange(4.0)),
    "computed values and one number": (ALIKE["computed"][0], lambda: torch.ones(4)),
    "sums of a draw and itself, one twice as wide": (
        lambda: (lambda x: x + x)(torch.randn(3)),
        lambda: (lambda x: x + x)(torch.empty(3).normal_(0, 2)),
    ),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_another_distribution_is_another(one, other):
    assert same(of(one), of(other)) is False
    assert same(of(other), of(one)) is False


UNKNOWN = {
    "a sum of one draw with itself and of two draws": (
        lambda: (lambda x: x + x)(torch.randn(3)),
        lambda: torch.randn(3) + torch.randn(3),
    ),
    "memory that nothing writes": (lambda: torch.empty(3), lambda: torch.empty(3)),
    "one row for all and all of their own": (
        lambda: torch.randn(1, 4).expand(6, 4).contiguous(),
        lambda: torch.randn(6, 4),
    ),
}


@pytest.mark.parametrize(("one", "other"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_the_ops_do_not_tell_is_left_open(one, other):
    assert same(of(one), of(other)) is None


@pytest.mark.parametrize("layer", [nn.Linear, nn.Embedding, nn.Conv1d], ids=lambda layer: layer.__name__)
def test_a_reset_of_a_fresh_layer_is_as_it_was_built(layer):
    kwargs = {"kernel_size": 3} if layer is nn.Conv1d else {}
    assert same(*after_reset(metaviz.build(layer, 6, 4, **kwargs))) is True
    assert same(*after_reset(metaviz.build(nn.Embedding, 6, 4, padding_idx=1))) is True


def test_a_reset_of_a_norm_that_was_zeroed_after_it_was_built_is_another():
    def zeroed() -> nn.LayerNorm:
        norm = nn.LayerNorm(4)
        init.zeros_(norm.weight)
        return norm

    built, reset = after_reset(metaviz.build(zeroed))
    assert same(built, reset) is False
    assert (built.words[:6], reset.words[:5]) == ("zeros_", "ones_")


def test_a_reset_that_changes_what_was_there_counts_what_was_there():
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def reset_parameters(self):
            with torch.no_grad():
                self.weight.mul_(2)

    _, reset = after_reset(metaviz.build(Doubling))
    assert same(reset, of(lambda: torch.randn(3) * 2)) is True


def test_a_cast_changes_no_distribution_but_for_rounding():
    built = signatures(metaviz.build(lambda: nn.LayerNorm(4).half()))["weight"]
    assert same(built, of(lambda: torch.ones(4, dtype=torch.float16))) is True
    assert same(of(lambda: torch.randn(4).bfloat16()), of(lambda: torch.randn(4))) is True
    assert same(of(lambda: torch.full((4,), 0.1).half()), of(lambda: torch.full((4,), 0.1))) is True
    assert same(of(lambda: torch.full((4,), 0.1).half()), of(lambda: torch.full((4,), 0.101))) is False


def test_values_above_the_limit_are_known_by_their_ops():
    halves, thirds = (lambda: torch.arange(100.0) / 2), (lambda: torch.arange(100.0) / 3)
    assert same(of(halves, value_limit=0), of(halves, value_limit=0)) is True
    assert same(of(halves, value_limit=0), of(thirds, value_limit=0)) is None
    assert same(of(halves), of(thirds)) is False


def test_data_from_outside_are_the_same_where_their_bytes_are():
    data = torch.arange(3.0)
    with metaviz.recording() as rec:
        tensors = [torch.zeros(3).copy_(data + shift) for shift in (0, 0, 1)]
    one, alike, other = (signature(rec.tape, origin_of(tensor).window) for tensor in tensors)
    assert (same(one, alike), same(one, other)) == (True, False)
    assert same(of(lambda: data * torch.randn(3)), of(lambda: data * torch.randn(3))) is True
    assert same(of(lambda: data * torch.randn(3)), of(lambda: (data + 1) * torch.randn(3))) is None


WORDS = {
    "normal_(0, 0.02) at test_signature.py:N": lambda: torch.randn(3) * 0.02,
    "uniform_(-0.0156, 0.0156) at test_signature.py:N": lambda: nn.Linear(4096, 2).weight,
    "trunc_normal_(0, 1, -2, 2) at test_signature.py:N": filled(init.trunc_normal_),
    "ones_ at test_signature.py:N": lambda: nn.LayerNorm(3).weight,
    "zeros_ at test_signature.py:N": lambda: torch.zeros(3, dtype=torch.int64),
    "constant_(1e-05) at test_signature.py:N": lambda: 1e-5 * torch.ones(3),
    "constant_(True) at test_signature.py:N": lambda: torch.ones(3, dtype=torch.bool),
    "normal_(0, 1), then zeros_ on a part at test_signature.py:N": lambda: nn.Embedding(3, 3, 0).weight,
    "orthogonal_ at test_signature.py:N": filled(init.orthogonal_),
    "dirac_ at test_signature.py:N": lambda: init.dirac_(torch.empty(2, 2, 3)),
    "values computed by arange, div, pow at test_signature.py:N": lambda: 2 ** (torch.arange(3.0) / 3),
    "values drawn by normal_, cumsum at test_signature.py:N": lambda: torch.randn(3).cumsum(0),
    "values loaded from outside at test_signature.py:N": lambda: torch.tensor([1.0, 2.0]),
    "memory that nothing writes": lambda: torch.empty(3),
    "no elements": lambda: torch.empty(0, 3).normal_(),
}


@pytest.mark.parametrize(("words", "make"), WORDS.items(), ids=WORDS)
def test_words_are_what_people_write(words, make):
    assert re.sub(r":\d+$", ":N", of(make).words) == words


def test_a_signature_can_be_a_key_and_its_place_does_not_count():
    def one() -> torch.Tensor:
        return torch.randn(3)

    def other() -> torch.Tensor:
        return torch.randn(3)

    assert of(one).words != of(other).words
    assert {of(one): 1}[of(other)] == 1


def test_signatures_and_roots_draw_nothing(generators_stay):
    model = metaviz.build(LAYERS["spectral_norm"])
    assert len(signatures(model)) == 4
    origin = origin_of(model.bias)
    assert root(origin.tape, origin.window) is not None


def test_a_seed_does_not_count():
    def seeded() -> torch.Tensor:
        torch.manual_seed(5)
        return torch.randn(3).cumsum(0)

    generator = torch.Generator().manual_seed(7)
    assert same(of(seeded), of(lambda: torch.randn(3).cumsum(0))) is True
    assert same(of(seeded), of(lambda: torch.randn(3, generator=generator).cumsum(0))) is True


def test_long_chains_are_read_no_further_but_draws_in_them_are_found():
    def chain(draw: bool) -> Callable[[], torch.Tensor]:
        def make() -> torch.Tensor:
            tensor = torch.rand(3) if draw else torch.ones(3)
            for _ in range(2500):
                tensor.mul_(1)
            return tensor

        return make

    drawn = of(chain(True))
    assert drawn.draws
    assert same(drawn, of(chain(True))) is None
    assert same(of(chain(False)), of(lambda: torch.ones(3))) is True


def test_a_llama_is_drawn_otherwise_than_its_linear_layers_would_draw(needs):
    needs("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model, again = (metaviz.build(LlamaForCausalLM, config) for _ in range(2))
    built = signatures(model)
    assert {path: same(built[path], other) for path, other in signatures(again).items()} == dict.fromkeys(
        built, True
    )
    with metaviz.recording():
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    reset = signatures(model)
    equal = {path.split(".")[-2] for path in built if same(built[path], reset[path])}
    assert equal == {"input_layernorm", "post_attention_layernorm", "norm", "rotary_emb"}
    assert same(built["lm_head.weight"], reset["lm_head.weight"]) is False
