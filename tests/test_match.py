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
    assert match.elsewhere == {"steps": "replay", "new.weight": "replay", "new.bias": "replay"}
    assert str(match) == (
        "the state dict has 1 of 4 tensors that the model saves\n"
        "\n"
        "  found         1\n"
        "✗ does not fit  1  fc.bias: It has the shape (3,) in the state dict, and (2,) is wanted\n"
        "  missing       2  new.weight, new.bias: from replay\n"
        "  never saved   1  steps: from replay\n"
        "  cast          1  fc.weight: float16 there, float32 here\n"
        "  tied          1  tied.weight: stored under another of its names\n"
        "  not needed    1  steps: not persistent in the model\n"
        "  unexpected    1  old.weight: the model has no place for it\n"
        "\n"
        "Next: print(metaviz.checkpoint(state))  # build the model with the configuration of this one"
    )


class Free(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


def test_what_is_missing_says_who_else_has_values():
    model = nn.ModuleDict(
        {
            "free": Free().to("meta"),
            "reset": nn.Linear(2, 2, device="meta"),
            "real": nn.Linear(2, 2),
            "fc": nn.Linear(2, 2, bias=False, device="meta"),
        }
    )
    match = metaviz.match(model, {"fc.weight": torch.ones(2, 2)})
    assert match.elsewhere == {
        "free.scale": "",
        "reset.weight": "reset",
        "reset.bias": "reset",
        "real.weight": "real",
        "real.bias": "real",
    }
    assert "\n✗ missing  1  free.scale: nobody has values for it\n" in str(match)
    assert "\n  missing  2  reset.weight, reset.bias: from reset\n" in str(match)
    assert "\n  missing  2  real.weight, real.bias: holds values already\n" in str(match)


def test_blocks_that_differ_in_a_number_share_a_line_and_each_reason_has_one():
    model = metaviz.build(nn.Sequential, *(nn.Linear(4, 4) for _ in range(30)))
    state = nn.Sequential(*(nn.Linear(4, 4 if k else 5) for k in range(30))).state_dict()
    state |= {f"{k}.bias": torch.ones(3) for k in range(10, 20)}
    state |= {f"{k}.extra": torch.ones(3) for k in range(10)}
    shown = str(metaviz.match(model, state))
    assert "\n✗ does not fit  10  *.bias: It has the shape (3,) in the state dict" in shown
    assert "\n✗ does not fit   1  0.weight: It has the shape (5, 4) in the state dict" in shown
    assert "\n  unexpected    10  *.extra: the model has no place for it\n" in shown


def test_a_beginning_that_would_find_most_is_the_next_step():
    model = metaviz.build(lambda: nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 1)}))
    state = nn.ModuleDict({"student": nn.Linear(2, 2), "head": nn.Linear(2, 1)}).state_dict()
    code = str(metaviz.match(model, state)).rpartition("Next: ")[2]
    assert code == "metaviz.match(model, metaviz.checkpoint(state, key_map=[('student', 'encoder')]))"
    better = eval(code, {"metaviz": metaviz, "model": model, "state": state})
    assert better.missing == better.unexpected == ()
    assert str(better).endswith("Next: metaviz.materialize(model, checkpoint=checkpoint)")


def test_the_page_says_the_same_and_names_are_text():
    hostile = "<img src=x onerror=alert(1)>"
    match = metaviz.match(metaviz.build(Net), {"fc.weight": torch.ones(2, 2), hostile: torch.ones(1)})
    page = match._repr_html_()
    assert "<img" not in page and "&lt;img src=x" in page
    assert "<dt>missing</dt><dd>3 <code>fc.bias, new.weight, new.bias</code>" in page
    assert '<span class="mv-where">from replay</span>' in page
    assert "metaviz.materialize(model, checkpoint=state)" in page


def test_a_hundred_thousand_unexpected_names_take_a_line():
    state = {f"layers.{k}.experts.{j}.w": torch.ones(1) for k in range(100) for j in range(1000)}
    match = metaviz.match(metaviz.build(Net), state | {"fc.weight": torch.ones(2, 2)})
    assert "\n  unexpected   100,000  layers.*.experts.*.w: the model has no place for it\n" in str(match)
    assert len(match._repr_html_()) < 8_000


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
