"""Tab in the lines of the magics, asked the way a kernel asks it."""

from __future__ import annotations

import pytest
from IPython.core.completer import provisionalcompleter
from shell import new_shell

from metaviz.core import devices
from metaviz.magics.completion import LIMIT

SETUP = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.mlp = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(1))
        self.odd = nn.ModuleDict({"two words": nn.Linear(1, 1), "fine-1": nn.Linear(1, 1)})

    @property
    def melody(self):
        raise SystemExit("a property ran")

class Trainer:
    def __init__(self, model):
        self.model, self.steps = model, 3

    @property
    def mean(self):
        raise SystemExit("a property ran")

    def __getattr__(self, name):
        raise SystemExit("an attribute was looked up")

model = nn.Sequential(*[Block() for _ in range(12)])
model_b = Block()
trainer = Trainer(model)
modest = 1
_mine = model
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    with new_shell(tmp_path_factory.mktemp("ipython")) as shell:
        shell("%load_ext metaviz")
        assert shell(SETUP).error is None
        yield shell


@pytest.fixture
def completed(shell):
    """`completed(line)`: the lines that Tab at its end offers."""

    def complete(line: str) -> list[str]:
        with provisionalcompleter():
            return [line[: c.start] + c.text for c in shell.ip.Completer.completions(line, len(line))]

    return complete


def test_models_are_offered_and_nothing_else(completed):
    assert completed("%meta_tree m") == ["%meta_tree model", "%meta_tree model_b"]
    assert completed("%meta_tree ") == ["%meta_tree model", "%meta_tree model_b"]


@pytest.mark.parametrize("start", ["t = %meta_tree ", "meta_tree ", "  %meta_tree "])
def test_it_works_wherever_the_magic_may_stand(completed, start):
    assert completed(f"{start}model_") == [f"{start}model_b"]


def test_what_a_thing_holds_is_offered_after_its_dot(completed):
    assert completed("%meta_tree trainer.") == ["%meta_tree trainer.model"]
    assert completed("%meta_tree trainer.model.1") == [f"%meta_tree trainer.model.{i}" for i in (1, 10, 11)]


def test_paths_are_offered_one_level_at_a_time_in_the_order_of_the_model(completed):
    line = "%meta_materialize model "
    assert completed(line) == [f"{line}{i}" for i in range(12)]
    assert completed(f"{line}0 1") == [f"{line}0 {i}" for i in (1, 10, 11)]
    assert completed(f"{line}3.") == [
        f"{line}3.{name}" for name in ("attention", "mlp", "odd", "scale", "steps")
    ]
    assert completed(f"{line}3.m") == [f"{line}3.mlp"]
    assert completed(f"{line}3.mlp.w") == [f"{line}3.mlp.weight"]


def test_a_path_is_offered_in_a_part_of_a_model_too(completed):
    assert completed("%meta_unload trainer.model.1 ml") == ["%meta_unload trainer.model.1 mlp"]


def test_a_name_that_a_line_could_not_hold_is_left_out(completed):
    line = "%meta_tree model_b odd."
    assert completed(line) == [f"{line}fine-1"]


def test_options_and_their_values_are_offered(completed):
    line = "%meta_materialize model 0 --"
    options = ["--device", "--source", "--checkpoint", "--key-map", "--inside", "--rng", "--dtype"]
    options += ["--skip-blocked", "--dry-run", "--gradients", "--optimizer"]
    assert completed(line) == [line[:-2] + option for option in options]
    assert completed("%meta_materialize model --d") == [
        f"%meta_materialize model {option}" for option in ("--device", "--dtype", "--dry-run")
    ]
    assert completed("%meta_materialize --rng k") == ["%meta_materialize --rng keyed"]
    assert completed("%meta_tree model --source re") == [
        f"%meta_tree model --source {source}" for source in ("replay", "reset")
    ]
    assert completed("%meta_tree model --b") == ["%meta_tree model --blocked"]
    assert completed("%meta_materialize model --dtype=b") == ["%meta_materialize model --dtype=bfloat16"]
    assert completed("%%meta_build --q") == ["%%meta_build --quiet"]
    assert completed("%metaviz h") == ["%metaviz help"]


def test_checkpoints_are_offered_by_name_of_variable_and_of_file(completed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "old.pt", "notes.txt", ".hidden.pt", "two words.pt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.bin").touch()
    files = ["folder/", "model.safetensors", "old.pt"]
    for line in (
        "%meta_checkpoint ",
        "%meta_tree model --checkpoint ",
        "%meta_materialize model 0 --checkpoint ",
        "%meta_materialize model 0 --checkpoint=",
    ):
        offered = completed(line)
        assert [text.removeprefix(line) for text in offered if text.removeprefix(line) in files] == files
        assert not any("notes" in text or "hidden" in text or "words" in text for text in offered)
    assert completed("%meta_checkpoint folder/") == ["%meta_checkpoint folder/inner.bin"]
    assert completed("%meta_checkpoint nowhere/") == ["%meta_checkpoint nowhere/"]
    assert completed("%meta_checkpoint old.pt model_") == ["%meta_checkpoint old.pt model_b"]


def test_the_devices_of_this_machine_are_offered(completed):
    line = "%meta_materialize model 0 --device "
    assert completed(line) == [line + name for name in (*devices.names(), "auto")]
    assert completed(f"{line}c")[0] == f"{line}cpu"


def test_an_option_and_its_value_are_no_path(completed):
    line = "%meta_materialize --device cpu model --skip-blocked 3.m"
    assert completed(line) == ["%meta_materialize --device cpu model --skip-blocked 3.mlp"]


@pytest.mark.parametrize("name", ["trainer.mean.", "model_b.mel", "trainer.missing.x", "nobody."])
def test_no_property_runs_and_nothing_is_looked_up(completed, capsys, name):
    assert completed(f"%meta_tree {name}") == [f"%meta_tree {name}"]
    assert completed(f"%meta_tree {name} x") == [f"%meta_tree {name} x"]
    # IPython writes there what a completer raises, its own included.
    assert capsys.readouterr().err == ""


def test_a_path_that_is_not_there_stays_as_it_is(completed):
    line = "%meta_materialize model 3.missing."
    assert completed(line) == [line]


def test_a_wide_module_gives_a_bounded_number(shell, completed):
    shell("wide = nn.ModuleList(nn.Identity() for _ in range(1000))")
    try:
        assert len(completed("%meta_tree wide ")) == LIMIT
        assert completed("%meta_tree wide 99")[0] == "%meta_tree wide 99"
        assert len(completed("%meta_tree wide 99")) == 11
    finally:
        shell("del wide")


def test_other_lines_are_completed_as_ever(completed):
    assert "x = modest" in completed("x = modes")
    assert "%meta_tree" in completed("%meta_t")


def test_nothing_is_completed_once_the_extension_is_unloaded(tmp_path):
    with new_shell(tmp_path) as shell:
        shell("%load_ext metaviz")
        shell(SETUP)
        shell("%unload_ext metaviz")
        with provisionalcompleter():
            texts = [c.text for c in shell.ip.Completer.completions("%meta_tree model_b at", 21)]
        assert "attention" not in texts
