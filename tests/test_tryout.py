"""Trying a method: what it writes and what it needs, within bounds, whatever it does."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import init

import metaviz
from metaviz.core.methods import Call
from metaviz.core.tryout import attempt

GO_ON = threading.Event()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(4, 3))
            self.register_buffer("steps", torch.zeros(2))
            self.child = nn.Linear(2, 2)


def tried(method, before=(), cls=Base):
    """The trial of a function as the method of a module."""
    module = type(cls.__name__, (cls,), {"reset_parameters": method})()
    return attempt(Call(module, "reset_parameters"), [Call(module.child, name) for name in before])


def test_what_is_written_is_told_by_path_and_slot():
    def method(self):
        init.normal_(self.weight, std=0.1)
        self.child.bias.data.fill_(2)

    trial = tried(method)
    assert (trial.cls, trial.method, trial.state) == ("Base", "reset_parameters", "ran")
    assert set(trial.writes) == {("", "weight"), ("child", "bias")}
    weight = trial.writes["", "weight"]
    assert (weight.whole, weight.missing, weight.fresh, weight.nbytes) == (True, 0, False, 48)
    assert weight.signature.words.startswith("normal_(0, 0.1) at test_tryout.py:")
    assert trial.writes["child", "bias"].signature.words.startswith("constant_(2)")


@pytest.mark.parametrize(
    ("write", "missing", "rows"),
    [
        (lambda w: w[:2].normal_(), 24, "rows 2 to 3 of 4"),
        (lambda w: w[3].zero_(), 36, "rows 0 to 2 of 4"),
        (lambda w: w[1:].zero_(), 12, "row 0 of 4"),
        (lambda w: (w[0].zero_(), w[2].zero_()), 24, "rows 1, 3 of 4"),
        (lambda w: w[:, 0].zero_(), 32, "rows 0 to 3 of 4"),
        (lambda w: w[:, ::2].zero_(), 16, "rows 0 to 3 of 4"),
        (lambda w: w.view(-1)[::2].zero_(), 24, "rows 0 to 3 of 4"),
        (lambda w: (w[:, ::2].zero_(), w[2:, 1].zero_()), 8, "rows 0 to 1 of 4"),
    ],
)
def test_a_part_that_is_left_out_is_named(write, missing, rows):
    trial = tried(lambda self: write(self.weight.data))
    found = trial.writes["", "weight"]
    assert (found.whole, found.missing, found.rows) == (False, missing, rows)


@pytest.mark.parametrize(
    "parts",
    [
        lambda w: (w[:2].normal_(), w[2:].zero_()),
        lambda w: (w[:, ::2].normal_(), w[:, 1].zero_()),
        lambda w: (w.t()[1:].normal_(), w.view(-1)[::3].zero_()),
        lambda w: w.t().normal_(),
    ],
)
def test_parts_that_make_a_whole_are_one(parts):
    assert tried(lambda self: parts(self.weight.data)).writes["", "weight"].whole


def test_a_value_from_nowhere_is_told():
    trial = tried(lambda self: self.weight.data.mul_(2))
    assert (trial.state, trial.writes["", "weight"].whole) == ("ran", False)
    assert trial.writes["", "weight"].unread == "mul_"
    assert tried(lambda self: init.zeros_(self.weight) if self.weight.sum() > 0 else None).state == "reads"


def test_what_children_have_written_before_can_be_worked_with():
    trial = tried(lambda self: self.child.weight.data.mul_(2), before=["reset_parameters"])
    assert set(trial.writes) == {("child", "weight")}
    assert trial.writes["child", "weight"].whole


def test_a_new_tensor_in_the_slot_is_told():
    def method(self):
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.register_buffer("steps", torch.ones(2, device="cpu"))

    trial = tried(method)
    assert {key: write.fresh for key, write in trial.writes.items()} == {
        ("", "weight"): True,
        ("", "steps"): True,
    }
    assert trial.bare
    assert not tried(lambda self: setattr(self, "steps", torch.ones(2, device="cpu"))).bare


def test_another_shape_is_told():
    trial = tried(lambda self: setattr(self, "weight", nn.Parameter(torch.ones(7))))
    assert (trial.writes["", "weight"].whole, trial.writes["", "weight"].reshaped) == (False, True)


def test_what_is_gone_is_told():
    def method(self):
        del self.weight
        self.child.bias = None

    assert set(tried(method).deletes) == {("", "weight"), ("child", "bias")}


def test_a_method_that_needs_gradients_off_is_known_with_its_error():
    trial = tried(lambda self: self.weight.uniform_(-1, 1))
    assert trial.needs_no_grad
    assert trial.writes["", "weight"].whole
    assert trial.error[0] == "RuntimeError"
    assert "a leaf Variable that requires grad" in trial.error[1]


def fails(error):
    def method(self):
        init.zeros_(self.weight)
        raise error

    return method


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ValueError("not today\nnor tomorrow"), "ValueError: not today"),
        (KeyError(), "KeyError"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RecursionError("deep"), "RecursionError: deep"),
    ],
)
def test_an_error_is_told_and_goes_no_further(error, detail):
    trial = tried(fails(error))
    assert (trial.state, trial.detail, trial.writes) == ("raises", detail, {})
    assert trial.error == (type(error).__name__, str(error))


@pytest.mark.parametrize(
    ("method", "state", "detail"),
    [
        (lambda self, std: None, "arguments", "std"),
        (lambda self, *, std, mean: None, "arguments", "std, mean"),
        (3, "not callable", "int"),
        (property(lambda self: 4), "not callable", "int"),
        (property(fails(ValueError("x"))), "raises", "ValueError: x"),
        (property(lambda self: self.nothing_there), "missing", ""),
        (lambda self: Path("x.txt").write_text("3"), "refused", "opens 'x.txt' for writing"),
        (lambda self: threading.Thread(target=print).start(), "refused", "starts a thread"),
        (lambda self: SHARED.fill_(1), "unsupported", "it writes to a tensor outside of its module"),
    ],
)
def test_what_cannot_be_tried_says_why(method, state, detail):
    trial = tried(method)
    assert (trial.state, trial.detail, trial.error if state != "raises" else None) == (state, detail, None)


SHARED = torch.zeros(3)


def test_a_class_that_makes_no_instances_is_unsupported():
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert attempt(Call(scripted, "reset_parameters")).state in ("unsupported", "missing", "raises")


def sleeps(self):
    GO_ON.wait(20)


def test_a_method_that_does_not_end_is_given_up_on_and_not_begun_again_while_it_runs():
    GO_ON.clear()
    try:
        began = time.monotonic()
        first = tried(sleeps)
        again = [tried(sleeps) for _ in range(8)]
        assert time.monotonic() - began < 10
        assert (first.state, first.detail) == ("unfinished", "it did not finish within 1 s")
        assert {(trial.state, trial.detail) for trial in again} == {
            ("unfinished", "it did not finish before, and still runs")
        }
        # Others are still tried.
        assert tried(lambda self: init.zeros_(self.weight)).state == "ran"
    finally:
        GO_ON.set()


def test_a_method_that_ends_late_is_tried_again():
    def spins(self):
        while True:
            pass

    assert [tried(spins).detail for _ in range(2)] == ["it did not finish within 1 s"] * 2


def test_an_import_that_takes_long_is_waited_for_and_not_broken_off(tmp_path, monkeypatch):
    """Torch imports its compiler with the first use of some ops; half of it would be left behind."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.5)\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)

    def method(self):
        import slow_to_import

        self.weight.data.fill_(slow_to_import.value)

    trial = tried(method)
    assert trial.state == "ran"
    assert trial.writes["", "weight"].signature.words.startswith("constant_(3)")


def test_the_argument_of_a_models_method_is_what_it_writes_to():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 2, device="meta")

        def _init_weights(self, module):
            init.ones_(module.weight)

    model = Model()
    trial = attempt(Call(model, "_init_weights", model.body))
    assert set(trial.writes) == {("", "weight")}


def test_a_method_that_swaps_the_data_writes_the_tensor_that_is_there():
    trial = tried(lambda self: setattr(self.weight, "data", torch.ones(4, 3)))
    assert (trial.writes["", "weight"].whole, trial.writes["", "weight"].fresh) == (True, False)


def test_files_that_are_read_are_named(tmp_path):
    path = tmp_path / "scales.txt"
    path.write_text("3")

    def method(self):
        self.weight.data.fill_(float(path.read_text()))

    trial = tried(method)
    assert trial.notes == ("it reads the file scales.txt",)
    assert trial.writes["", "weight"].signature.words.startswith("constant_(3)")


def test_a_method_on_the_instance_is_tried_on_the_shadow():
    module = Base()
    module.reset_parameters = types.MethodType(lambda self: init.zeros_(self.weight), module)
    trial = attempt(Call(module, "reset_parameters"))
    assert set(trial.writes) == {("", "weight")}


ROWS = {
    "number": 3,
    "arguments": lambda self, std: None,
    "cuda": lambda self: self.cuda(),
    "deletes": lambda self: delattr(self, "weight"),
    "recurses": lambda self: [module.reset_parameters() for module in self.children()],
    "itself": lambda self: self.reset_parameters(),
    "property": property(fails(ValueError("x"))),
}


@pytest.mark.parametrize("method", ROWS.values(), ids=ROWS)
def test_a_bad_method_is_a_row_with_a_reason(method):
    model = type("Bad", (Base,), {"reset_parameters": method})()
    tree = metaviz.tree(nn.Sequential(model, nn.Linear(2, 2, device="meta")))
    rows = {row.path: row for row in tree.tensors}
    assert set(rows) == {
        *("0.weight", "0.steps", "0.child.weight", "0.child.bias", "1.weight", "1.bias"),
    }
    assert all(row.reason for row in rows.values())
    assert rows["0.weight"].mark == "blocked"
    assert rows["1.weight"].mark == "ready"
    assert str(tree)


class Raising(type):
    def __getattribute__(cls, name):
        if name in ("reset_parameters", "_reset_parameters", "__mro__", "__module__"):
            raise ValueError(name)
        return super().__getattribute__(name)


class Awkward(Base):
    def __getattr__(self, name):
        if name in ("weight", "steps", "child"):
            return super().__getattr__(name)
        raise ValueError(name)


@pytest.mark.parametrize("cls", [Raising("Odd", (Base,), {}), Awkward], ids=["metaclass", "__getattr__"])
def test_a_class_that_raises_when_asked_is_a_row_with_a_reason(cls):
    holder = nn.Sequential(cls())
    tree = metaviz.tree(holder)
    row = tree["0.weight"].row
    assert (row.mark, bool(row.reason)) == ("blocked", True)
    assert tree.verdict("0.weight", "reset").reason
