"""Reset on the layers of torch.nn: all of them, without a false alarm, as calling their methods by hand gives."""

from __future__ import annotations

import pytest
import torch
from byhand import assert_same, by_hand, reset, tensors
from torch import nn

import metaviz

LAYERS = {
    "AdaptiveLogSoftmaxWithLoss": (16, 20, [5, 10], 2.0),
    "BatchNorm1d": (3,),
    "BatchNorm2d": (3,),
    "BatchNorm3d": (3,),
    "Bilinear": (2, 3, 4),
    "Conv1d": (4, 6, 3),
    "Conv2d": (4, 6, 3),
    "Conv3d": (4, 6, 3),
    "ConvTranspose1d": (4, 6, 3),
    "ConvTranspose2d": (4, 6, 3),
    "ConvTranspose3d": (4, 6, 3),
    "Embedding": (9, 4, 1),
    "EmbeddingBag": (9, 4),
    "GRU": (3, 4, 2),
    "GRUCell": (3, 4),
    "GroupNorm": (2, 4),
    "InstanceNorm1d": (4, 1e-5, 0.1, True, True),
    "InstanceNorm2d": (4, 1e-5, 0.1, True, True),
    "InstanceNorm3d": (4, 1e-5, 0.1, True, True),
    "LSTM": (3, 4, 2, True, False, 0.0, True, 2),
    "LSTMCell": (3, 4),
    "LayerNorm": (4,),
    "Linear": (5, 7),
    "LinearCrossEntropyLoss": (5, 7),
    "MultiheadAttention": (8, 2, 0.0, True, True),
    "PReLU": (3,),
    "RMSNorm": (4,),
    "RNN": (3, 4),
    "RNNCell": (3, 4),
    "SyncBatchNorm": (3,),
    "TransformerDecoderLayer": (8, 2, 16),
    "TransformerEncoderLayer": (8, 2, 16),
}
LAYERS = {name: args for name, args in LAYERS.items() if hasattr(nn, name)}  # some are newer than torch 2.6
# Bases that make nothing themselves, what only holds other modules, and weights that the caller passes in.
OTHERS = {"RNNBase", "RNNCellBase", "TransformerEncoder", "TransformerDecoder", "Transformer"}
PRIVATE = {"MultiheadAttention", "TransformerDecoderLayer", "TransformerEncoderLayer"}


def layer(name: str) -> nn.Module:
    return getattr(nn, name)(*LAYERS[name])


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch_are_ready_by_their_own_method_and_without_a_warning(name):
    model = metaviz.build(lambda: layer(name))
    tree = metaviz.tree(model)
    assert tree.tensors
    for row in tree.tensors:
        verdict = tree.verdict(row.path, "reset")
        assert (verdict.can, verdict.faithful, verdict.fix) == (True, True, None), row.path
        assert verdict.kind in ("reset", "private") if name in PRIVATE else verdict.kind == "reset"
        assert ";" not in verdict.reason
    with torch.device("meta"):
        unrecorded = layer(name)
    assert metaviz.tree(unrecorded).row.mark == "ready"


@pytest.mark.filterwarnings("ignore")
def test_no_layer_of_torch_is_left_out():
    for name in nn.modules.__all__:
        cls = getattr(nn, name)
        if name in LAYERS or name in OTHERS or name.startswith("Lazy") or not issubclass(cls, nn.Module):
            continue
        for args in ((), (2,), (2, 2), (2, 2, 2)):
            try:
                module = cls(*args)
            except (TypeError, ValueError, RuntimeError, AssertionError):
                continue
            assert tensors(module) == {}, name


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch_come_out_as_by_hand(name):
    hand, after = by_hand(lambda: layer(name))
    model, reached = reset(lambda: layer(name))
    assert_same(model, hand)
    assert reached == after


def test_copied_layers_of_an_encoder_are_told_from_an_ordinary_builds():
    model = metaviz.build(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    )
    tree = metaviz.tree(model)
    found = {row.path: tree.verdict(row.path, "reset") for row in tree.tensors}
    assert all(verdict.can for verdict in found.values())
    drawn = found["layers.0.linear1.weight"]
    assert drawn.faithful is False
    assert "An ordinary build copies one draw to several tensors" in drawn.reason
    assert found["layers.0.norm1.weight"].faithful is True
