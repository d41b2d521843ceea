"""The comparison with the file: it sees what differs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import metaviz
from metaviz.core.filling import Verifier
from metaviz.core.headers import safetensors
from metaviz.core.stored import File
from metaviz.errors import StalePlan


@pytest.fixture
def stored(tmp_path):
    values = {"a": torch.tensor([True, False, True]), "t": torch.randn(4, 3), "big": torch.randn(300, 500)}
    save_file(values, tmp_path / "a.safetensors")
    return values, safetensors(File.at(tmp_path / "a.safetensors"))


def test_equal_tensors_are_equal_whatever_their_layout_and_dtype(stored):
    values, there = stored
    verifier = Verifier()
    for name, value in values.items():
        assert verifier.same(there[name], value)
    turned = torch.empty_strided((4, 3), (1, 4)).copy_(values["t"])
    assert verifier.same(there["t"], turned)
    assert verifier.same(there["t"], values["t"].half())
    assert not verifier.same(there["t"], values["t"].half() + 1)


@pytest.mark.parametrize("place", [0, 75_000, 149_999])
def test_a_place_that_is_off_is_seen_at_the_beginning_the_middle_and_the_end(stored, place):
    values, there = stored
    wrong = values["big"].clone()
    wrong.view(-1)[place] += 1
    assert not Verifier().same(there["big"], wrong)
    assert not Verifier().same(there["big"], values["big"].roll(1))


def test_what_was_cast_is_compared_as_a_whole(stored):
    values, there = stored
    wrong = values["big"].double()
    wrong.view(-1)[1234] += 1
    assert not Verifier().same(there["big"], wrong)
    assert Verifier().same(there["big"], values["big"].double())


def test_nan_is_compared_by_its_bits():
    value = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    there = metaviz.checkpoint({"x": value})["x"]
    assert Verifier().same(there, value.clone())
    assert not Verifier().same(there, value.flip(0))


def test_a_difference_stops_the_load_and_changes_nothing(stored, tmp_path, monkeypatch):
    model = metaviz.build(torch.nn.Linear, 3, 4, bias=False)
    checkpoint = metaviz.checkpoint(tmp_path, key_map={"t": "weight"})
    broken = type(checkpoint["t"]).load
    monkeypatch.setattr(type(checkpoint["t"]), "load", lambda self, stop=None: broken(self, stop) + 1)
    with pytest.raises(
        StalePlan, match=r"weight is not what is stored as 't'.*Nothing of the model was changed"
    ):
        metaviz.materialize(model, checkpoint=checkpoint)
    assert model.weight.is_meta


def test_views_that_are_conjugated_or_negated_are_compared_by_their_values():
    value = torch.randn(3, dtype=torch.complex64)
    for lazy in (value.conj(), torch._neg_view(value), value.conj().imag):
        there = metaviz.checkpoint({"x": lazy})["x"]
        assert Verifier().same(there, lazy.resolve_conj().resolve_neg())
        assert Verifier().same(there, lazy)
    assert not Verifier().same(metaviz.checkpoint({"x": value})["x"], value.conj())
