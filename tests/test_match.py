"""How a checkpoint fits a model, in words."""

from __future__ import annotations

import torch
from torch import nn

import metaviz


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.new = nn.Linear(2, 2), nn.Linear(2, 3)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.fc.weight
        self.register_buffer("steps", torch.zeros(1), persistent=False)


def test_what_fits_what_is_missing_and_what_else_there_is():
    state = {
        "fc.weight": torch.ones(2, 2, dtype=torch.float16),
        "fc.bias": torch.ones(3),
        "steps": torch.ones(1),
        "old.weight": torch.ones(4),
    }
    match = metaviz.match(metaviz.build(Net), state)
    assert match.found == {"fc.weight": ("fc.weight",)}
    assert match.missing == ("new.weight", "new.bias")
    assert match.not_saved == ("steps",) and match.ignored == ("steps",)
    assert match.tied == ("tied.weight",)
    assert match.shapes == ("fc.bias",) and list(match.refused) == ["fc.bias"]
    assert match.casts == {"fc.weight": ("float16", "float32")}
    assert match.unexpected == ("old.weight",)
    assert str(match) == (
        "the state dict has 1 of 4 tensors that the model saves\n"
        "not in it: new.weight, new.bias\n"
        "of no use: fc.bias\n"
        "not persistent, so never saved: steps\n"
        "in it, but not persistent in the model: steps\n"
        "in it, but not in the model: old.weight\n"
        "in another dtype: 1 tensor, float16 there and float32 here\n"
        "fc.bias: It has the shape (3,) in the state dict, and (2,) is wanted"
    )


def test_looking_reads_no_value_and_changes_nothing(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "a.pt")
    model = metaviz.build(Net)
    match = metaviz.match(model, tmp_path / "a.pt")
    assert len(match.found) == 4 and match.missing == () and match.tied == ()
    assert all(each.is_meta for each in model.parameters())
    real = Net()
    before = {name: value.clone() for name, value in real.state_dict().items()}
    assert metaviz.match(real, tmp_path / "a.pt").found == match.found
    assert all(torch.equal(value, before[name]) for name, value in real.state_dict().items())
