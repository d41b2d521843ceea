"""Reset for models of transformers: `_init_weights` restores them, in the distribution of an ordinary build."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.paths import Model

SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **SIZES,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"tie_word_embeddings": True}, "model.layers.1"),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", LLAMA | {"num_local_experts": 4}, "model.layers.0"),
    "Bert": (
        "BertForMaskedLM",
        "BertConfig",
        SIZES
        | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "bert.encoder.layer.1",
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        SIZES | {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4},
        "decoder.block.0",
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4},
        "transformer.h.0",
    ),
}


@pytest.fixture
def make(needs) -> Callable[[str], Callable[[], nn.Module]]:
    """``make(name)`` is a function that makes a small model."""
    transformers = needs("transformers")
    transformers.utils.logging.set_verbosity_error()

    def maker(name: str) -> Callable[[], nn.Module]:
        cls, config, options, _ = MODELS[name]
        return lambda: getattr(transformers, cls)(getattr(transformers, config)(**options))

    return maker


def on_meta(fn: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return fn()


@pytest.fixture
def poisoned():
    """Memory that is allocated and never written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {place.path: place.slot.tensor for place in Model(model).places}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_restored_by_the_models_method(name, make, generators_stay):
    model = metaviz.build(make(name))
    tree = metaviz.tree(model)
    found = {row.path: tree.verdict(row.path, "reset") for row in tree.tensors}
    assert {(v.can, v.faithful, v.kind) for v in found.values()} == {(True, True, "init_weights")}
    assert all("_init_weights(): " in verdict.reason for verdict in found.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_build_under_the_meta_device_is_ready_too(name, make):
    model = on_meta(make(name))
    tree = metaviz.tree(model)
    assert tree.row.mark == "ready"
    found = {tree.verdict(row.path, "reset") for row in tree.tensors}
    assert {(v.can, v.faithful, v.kind) for v in found} == {(True, None, "init_weights")}


@pytest.mark.parametrize("build", [metaviz.build, on_meta])
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_config_and_nothing_is_left_uninitialized(name, build, make, poisoned):
    torch.manual_seed(0)
    ordinary = tensors(make(name)())
    model = build(make(name))
    torch.manual_seed(1)
    metaviz.materialize(model, source="reset")
    for path, tensor in tensors(model).items():
        wanted, got = ordinary[path].detach().double(), tensor.detach().double()
        assert got.shape == wanted.shape
        assert bool(got.isfinite().all()), path
        if wanted.unique().numel() <= 2 or "inv_freq" in path:
            # Constants (with a row for padding), and what is computed.
            assert torch.equal(got.unique(), wanted.unique()), path
        elif wanted.numel() >= 512:
            assert got.std() == pytest.approx(wanted.std(), rel=0.25), path
            assert abs(got.mean() - wanted.mean()) < wanted.std() / 4, path


@pytest.mark.parametrize("name", MODELS)
def test_one_layer_is_restored_alone(name, make, poisoned):
    layer = MODELS[name][3]
    model = metaviz.build(make(name))
    torch.manual_seed(1)
    report = metaviz.materialize(model, layer, source="reset")
    assert {tensor.source for tensor in report.tensors} == {"reset"}
    for path, tensor in tensors(model).items():
        assert tensor.is_meta != path.startswith(f"{layer}."), path
        assert tensor.is_meta or bool(tensor.isfinite().all()), path


def test_ties_stay_ties(make):
    model = metaviz.build(make("Llama"))
    metaviz.materialize(model, source="reset")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.detach().std() == pytest.approx(0.02, rel=0.2)


def test_a_look_leaves_the_config_and_the_flags_of_transformers_alone(make):
    model = metaviz.build(make("Llama"))
    flags = {path: dict(vars(tensor)) for path, tensor in tensors(model).items()}
    config, modules = model.config.to_dict(), {name: set(vars(m)) for name, m in model.named_modules()}
    metaviz.tree(model).verdict("", "reset")
    assert model.config.to_dict() == config
    assert {path: dict(vars(tensor)) for path, tensor in tensors(model).items()} == flags
    assert {name: set(vars(m)) for name, m in model.named_modules()} == modules


def test_a_buffer_that_a_model_of_ones_own_does_not_restore_is_told(needs):
    transformers = needs("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "metaviz_small"

    class Small(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.fc = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)
            self.post_init()

    model = metaviz.build(Small, Config())
    tree = metaviz.tree(model)
    scale = tree.verdict("scale", "reset")
    assert (scale.can, scale.kind) == (False, "not_written")
    assert scale.reason == "Small._init_weights() does not write it"
    assert tree.verdict("scale").source == "replay"
    assert tree.verdict("fc.weight", "reset").kind == "init_weights"
