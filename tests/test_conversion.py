"""Checkpoints in another layout than the modules: real architectures, as transformers itself writes and reads them."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import metaviz
from metaviz.core.conversion import conversions, needs_map

# With merged experts, with names that have changed, and with neither.
TYPES = [
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "llava",
    "gemma3",
    "detr",
    "bert",
    "llama",
    "t5",
    "gpt2",
]
MORE = [
    "phimoe",
    "jamba",
    "qwen2_moe",
    "deepseek_v3",
    "dbrx",
    "whisper",
    "qwen2_vl",
    "clip",
    "sam3",
    "ernie4_5_moe",
]


@pytest.fixture
def library(needs, unavailable):
    """transformers 5: older versions store models as they are."""
    found = needs("transformers")
    if found.__version__ < "5":
        unavailable(f"transformers {found.__version__} has no mapping of stored names")
    return found


def made(model_type: str):
    import huggingface

    case = huggingface.Case(model_type, limit_nbytes=24 * 2**20)
    cls = huggingface.model_class(case)
    config, _ = huggingface.small_config(case, cls)
    return lambda: cls(copy.deepcopy(config))


def check_all_equal(model: nn.Module, ordinary: nn.Module) -> None:
    state = ordinary.state_dict()
    for name, value in model.state_dict().items():
        assert not value.is_meta, name
        pair = (each.contiguous().view(-1).view(torch.uint8) for each in (value, state[name]))
        assert torch.equal(*pair), name


@pytest.mark.parametrize(
    "model_type", [*TYPES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_what_transformers_saves_comes_back_bit_for_bit(model_type, tmp_path, library):
    make = made(model_type)
    ordinary = make()
    ordinary.save_pretrained(tmp_path)
    model = metaviz.build(make)
    report = metaviz.materialize(model, checkpoint=tmp_path)
    check_all_equal(model, ordinary)
    assert report.match.missing == () and report.match.unexpected == ()


def test_one_layer_of_merged_experts_reads_only_its_own_tensors(tmp_path, library):
    make = made("mixtral")
    ordinary = make()
    ordinary.save_pretrained(tmp_path)
    model = metaviz.build(make)
    report = metaviz.materialize(model, "layers.1.mlp", checkpoint=tmp_path)
    check_all_equal(model.layers[1].mlp, ordinary.layers[1].mlp)
    assert {each.source for each in report.tensors} == {"checkpoint"}
    assert all(each.is_meta for each in model.layers[0].parameters())
    reasons = " ".join(each.reason for each in report.tensors)
    assert "tensors by transformers' MergeModulelist" in reasons
    assert "put together" in str(report)


def test_a_base_model_goes_into_a_model_with_a_head_and_the_other_way_round(tmp_path, library):
    transformers = library
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    base, headed = transformers.BertModel(config), transformers.BertForMaskedLM(config)
    base.save_pretrained(tmp_path / "base")
    headed.save_pretrained(tmp_path / "headed")
    model = metaviz.build(transformers.BertForMaskedLM, config)
    report = metaviz.materialize(model, checkpoint=tmp_path / "base")
    check_all_equal(model.bert.encoder, base.encoder)
    assert all(name.startswith("cls.") for name in report.match.missing)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    model = metaviz.build(transformers.BertModel, config, add_pooling_layer=False)
    report = metaviz.materialize(model, checkpoint=tmp_path / "headed")
    check_all_equal(model.encoder, headed.bert.encoder)
    assert report.match.missing == () and all(name.startswith("cls.") for name in report.match.unexpected)


def test_nothing_of_the_model_or_its_configuration_changes(library):
    model = metaviz.build(made("mixtral"))
    before, config = dict(vars(model)), model.config.to_dict()
    names = [f"layers.0.block_sparse_moe.experts.{k}.w{j}.weight" for k in range(4) for j in (1, 2, 3)]
    assert conversions(model, names).made
    assert vars(model) == before and model.config.to_dict() == config


def test_a_version_without_a_mapping_is_said_and_other_models_are_left_alone(monkeypatch, library):
    model = metaviz.build(made("llama"))
    monkeypatch.delattr(sys.modules["transformers.conversion_mapping"], "get_model_conversion_mapping")
    assert "This version of transformers has no mapping" in conversions(model, ["a"]).note
    assert conversions(nn.Linear(1, 1), ["a"]) == ({}, (), "")


def test_names_that_need_a_map_are_told():
    missing = ["layers.0.experts.up", "layers.1.experts.up", "norm.weight"]
    unexpected = [f"layers.{k}.experts.{j}.w1.weight" for k in range(2) for j in range(4)]
    assert needs_map(missing, unexpected) == [
        "layers.*.experts.up may be another layout of layers.*.experts.*.w1.weight (8 tensors): that needs a key_map, "
        "or a state dict made by hand"
    ]


def test_an_expert_that_is_missing_or_odd_takes_its_merged_tensor_away_with_the_reason(tmp_path, library):
    make = made("mixtral")
    make().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = next(name for name in state if "layers.1" in name and "experts.2" in name)
    missing = state | {name: torch.empty(3, device="meta")}
    model = metaviz.build(make)
    refused = metaviz.match(model, missing).refused
    assert len(refused) == 1 and "layers.1.mlp.experts" in next(iter(refused))
    assert "it is on meta, so there are no values in it" in next(iter(refused.values()))
    odd = metaviz.match(model, state | {name: torch.ones(3)}).refused
    assert list(odd) == list(refused)
    assert "by transformers' MergeModulelist" in next(iter(odd.values()))
    report = metaviz.materialize(model, "layers.0", checkpoint=missing)
    assert {each.source for each in report.tensors} == {"checkpoint"}


def bert_in_old_names(library, monkeypatch, *transforms):
    """A model of transformers, with another mapping of stored names."""
    mapping = sys.modules["transformers.conversion_mapping"]
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda model: list(transforms))
    config = library.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    return metaviz.build(library.BertModel, config)


def loader_of(library):
    return sys.modules["transformers.core_model_loading"]


@pytest.mark.parametrize("old", ["aaa.bias", "zzz.bias"])
def test_of_a_stored_name_and_a_renamed_one_the_first_has_the_place(old, library, monkeypatch):
    renaming = loader_of(library).WeightRenaming(old, "pooler.dense.bias")
    model = bert_in_old_names(library, monkeypatch, renaming)
    state = {"pooler.dense.bias": torch.zeros(8), old: torch.ones(8)}
    report = metaviz.materialize(model, "pooler.dense.bias", checkpoint=state)
    first = min(state)
    assert torch.equal(model.pooler.dense.bias, state[first])
    assert report.match.unexpected == (max(state),)
    assert ("renamed by transformers' own mapping" in report.tensors[0].reason) == (first == old)


def test_a_mapping_that_fails_is_left_out_and_said(library, monkeypatch):
    model = bert_in_old_names(library, monkeypatch)

    def broken(*_):
        raise LookupError

    monkeypatch.setattr(loader_of(library), "rename_source_key", broken)
    match = metaviz.match(model, {"pooler.dense.bias": torch.zeros(8)})
    assert list(match.found) == ["pooler.dense.bias"]
    assert match.notes[0] == (
        "transformers' own mapping of stored names was left out: it raises LookupError for this checkpoint."
    )


def test_the_list_of_errors_that_early_versions_give_is_no_trouble(tmp_path, library, monkeypatch):
    make = made("mixtral")
    ordinary = make()
    ordinary.save_pretrained(tmp_path)
    converter = loader_of(library).WeightConverter
    convert = converter.convert

    def early(self, *args, **kwargs):
        result = convert(self, *args, **kwargs)
        return result if isinstance(result, tuple) else (result, [])

    monkeypatch.setattr(converter, "convert", early)
    model = metaviz.build(make)
    metaviz.materialize(model, "layers.1.mlp", checkpoint=tmp_path)
    check_all_equal(model.layers[1].mlp, ordinary.layers[1].mlp)
