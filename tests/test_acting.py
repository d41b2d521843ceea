"""What a tree widget does to a model: materialize, unload, cancel; what it says of it, and what it leaves alone."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import zoo
from front import Front, built, eventually, quiet, showing
from torch import nn
from trees import META, Block, Holder, linear, quirks, stack

import metaviz
from metaviz.errors import BadCheckpoint, MetavizError
from metaviz.widgets import acting


@pytest.fixture
def front(needs):
    """`front(model)` shows a model, keeps it, and gives the browser's side of the widget."""
    needs("anywidget")
    with showing() as show:
        yield show


class Hold:
    """Stops a materialization after some tensors, until `go` is set.

    Attributes:
        reached: Set when it has stopped.
        go: Set it to go on.
    """

    def __init__(self, monkeypatch, after: int) -> None:
        self.reached, self.go, self.steps = threading.Event(), threading.Event(), 0
        materialize = acting.materialize

        def held(model, paths, *, progress, **options):
            def step(*facts):
                self.steps += 1
                if self.steps == after:
                    self.reached.set()
                    assert self.go.wait(30)
                progress(*facts)

            return materialize(model, paths, progress=step, **options)

        monkeypatch.setattr(acting, "materialize", held)


@pytest.fixture
def hold(monkeypatch):
    """The work of the widget is stopped after its second tensor."""
    made = Hold(monkeypatch, 2)
    yield made
    made.go.set()
    quiet()


def on_meta(model: nn.Module) -> list[str]:
    return [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]


def outcome(browser: Front) -> dict:
    """What the browser says of the last action, when all is done."""
    quiet()
    return browser.state["_outcome"]


def test_materialize_gives_the_values_of_an_ordinary_build(front):
    ordinary, model = zoo.pair(lambda: Holder(layers=nn.Sequential(Block(), Block()), head=nn.Linear(4, 2)))
    browser = front(model)
    number = browser.asks("materialize", shape=1, rows=browser.rows("layers.1", "head.bias"))
    (answer,) = eventually(lambda: browser.answers(number))
    assert answer["ok"] and answer["text"].startswith("materialized 5 tensors, 120 B, on cpu in ")
    assert zoo.differences(ordinary, model, "layers.1") == []
    assert zoo.differences(ordinary, model, "head.bias") == []
    assert on_meta(model) == [
        *("layers.0.norm.weight", "layers.0.norm.bias", "layers.0.mlp.weight", "layers.0.mlp.bias"),
        "head.weight",
    ]
    eventually(lambda: browser.marks("layers.1", "head.bias", "head", "layers.0") != ["ready"] * 4)
    assert browser.marks("layers.1", "head.bias", "head.weight", "layers.0") == [
        *("real", "real", "ready", "ready")
    ]
    quiet()
    assert browser.updates("_shape") == []
    assert len(browser.answers(number)) == 1
    assert browser.widget.report.nbytes == 120
    assert browser.acts("materialize", "")["ok"]
    assert zoo.differences(ordinary, model) == []


def test_what_was_done_is_said_with_its_pace_and_the_call_that_it_equals(front):
    browser = front(built(), called="net")
    browser.acts("materialize", "layers.0", "head")
    said = outcome(browser)
    assert said["kind"] == "done"
    assert re.fullmatch(r"materialized 6 tensors, 152 B, on cpu in .+s, [\d.]+ [KMG]?i?B/s", said["text"])
    assert said["call"] == 'metaviz.materialize(net, ["layers.0", "head"], device="cpu")'
    assert browser.state["_progress"] == {"state": "done"}
    browser.acts("unload", "head")
    said = outcome(browser)
    assert said["call"] == 'metaviz.unload(net, "head")'
    assert said["text"].startswith("unloaded 2 tensors, 40 B")


def test_the_call_that_a_click_equals_does_the_same(front):
    ordinary, model = zoo.pair(lambda: Holder(one=nn.Linear(3, 3), two=nn.Linear(3, 3)))
    _, other = zoo.pair(lambda: Holder(one=nn.Linear(3, 3), two=nn.Linear(3, 3)))
    browser = front(model)
    browser.sets(dtype="bfloat16", rng="keyed")
    browser.acts("materialize", "two")
    call = outcome(browser)["call"]
    assert call == 'metaviz.materialize(model, "two", device="cpu", rng="keyed", dtype="bfloat16")'
    exec(call, {"metaviz": metaviz, "model": other})
    assert model.two.weight.dtype == torch.bfloat16
    assert zoo.differences(model, other) == []
    assert zoo.differences(ordinary, other, "two") != []


def test_the_options_of_the_click_count_and_not_those_that_arrive_later(front):
    model = built()
    browser = front(model)
    assert browser.acts("materialize", "head", dtype="float64")["ok"]
    assert model.head.weight.dtype == torch.float64
    assert browser.widget.dtype == ""


def test_values_come_from_the_checkpoint_that_was_given(front):
    stored = {"head.weight": torch.arange(8.0).reshape(2, 4), "head.bias": torch.ones(2)}
    model = stack(2)
    browser = front(model, checkpoint=stored)
    assert browser.acts("materialize", "head", source="checkpoint")["ok"]
    assert torch.equal(model.head.weight, stored["head.weight"])
    assert outcome(browser)["call"] == (
        'metaviz.materialize(model, "head", device="cpu", source="checkpoint", checkpoint=state)'
    )


def test_unload_takes_values_back_and_materialize_gives_the_same_ones_again(front):
    model = built()
    browser = front(model)
    browser.acts("materialize", "layers.2")
    before = model.layers[2].mlp.weight.detach().clone()
    assert browser.acts("unload", "layers.2")["ok"]
    assert model.layers[2].mlp.weight.is_meta
    eventually(lambda: browser.marks("layers.2") == ["ready"])
    browser.acts("materialize", "layers.2")
    assert torch.equal(model.layers[2].mlp.weight, before)


def test_the_widget_answers_and_python_runs_on_while_it_is_at_work(front, hold):
    model = built()
    browser = front(model)
    number = browser.asks("materialize", shape=1, rows=browser.rows("layers"))
    assert hold.reached.wait(30)
    assert browser.wish("ping")["ok"]
    browser.ticks("head")
    assert browser.widget.selection == ["head"]
    assert browser.wish("details", row=1, shape=1)["ok"]
    assert browser.state["_progress"]["state"] == "running"
    assert browser.answers(number) == []
    assert len(on_meta(model)) == 18
    hold.go.set()
    assert eventually(lambda: browser.answers(number))[0]["ok"]
    assert on_meta(model) == ["head.weight", "head.bias"]


def test_a_second_click_while_it_is_at_work_is_refused_and_changes_nothing(front, hold):
    model = built()
    browser = front(model)
    first = browser.asks("materialize", shape=1, rows=browser.rows("layers.0"))
    assert hold.reached.wait(30)
    for verb in ("materialize", "unload"):
        assert browser.acts(verb, "head") == {
            "id": f"view-{browser._number}",
            "ok": False,
            "kind": "error",
            "text": "This tree is at work already: wait for it, or press Cancel",
            "next": "",
        }
    hold.go.set()
    assert eventually(lambda: browser.answers(first))[0]["ok"]
    quiet()
    assert len(browser.answers(first)) == 1
    assert browser.state["_outcome"]["kind"] == "done"
    assert model.head.weight.is_meta
    assert browser.acts("materialize", "head")["ok"]


def test_cancel_half_way_leaves_each_tensor_as_it_was(front, hold):
    model = built()
    browser = front(model)
    number = browser.asks("materialize", shape=1, rows=browser.rows("layers"))
    assert hold.reached.wait(30)
    assert browser.wish("cancel")["ok"]
    hold.go.set()
    (answer,) = eventually(lambda: browser.answers(number))
    assert hold.steps == 2
    assert answer["ok"] is False and answer["kind"] == "cancelled"
    assert answer["text"] == (
        "Cancelled at 32 B of 448 B, after layers.0.norm.bias: the model is as it was before"
    )
    assert len(on_meta(model)) == 18
    said = outcome(browser)
    assert (said["kind"], said["text"]) == ("cancelled", answer["text"])
    assert browser.state["_progress"] == {"state": "stopped"}
    assert browser.widget.report is None
    assert browser.marks("layers", "layers.0") == ["ready", "ready"]


def test_a_cancel_stops_what_is_at_work_and_not_what_comes_next(front):
    model = built()
    browser = front(model)
    assert browser.wish("cancel")["ok"]
    assert browser.acts("materialize", "head")["ok"]
    assert on_meta(model) == [name for name in model.state_dict() if not name.startswith("head")]


def test_closing_a_widget_cancels_what_it_has_begun(front, hold):
    model = built()
    browser = front(model)
    browser.asks("materialize", shape=1, rows=browser.rows("layers"))
    assert hold.reached.wait(30)
    browser.widget.close()
    hold.go.set()
    quiet()
    assert len(on_meta(model)) == 18


def test_progress_is_told_as_it_goes_and_not_more_often_than_one_can_read(front, monkeypatch):
    monkeypatch.setattr(acting, "_PER_SECOND", 1e9)
    browser = front(built())
    browser.acts("materialize", "layers.0")
    quiet()
    first, *steps, last = browser.updates("_progress")
    assert first == {
        **{"state": "running", "verb": "materialize", "text": "looking at the model …", "part": 0}
    }
    assert [each["part"] for each in steps] == [16 / 112, 32 / 112, 96 / 112, 1]
    assert re.fullmatch(
        r"16 B of 112 B, [\d.]+ [KMG]?i?B/s, .+s left, at layers\.0\.norm\.weight", steps[0]["text"]
    )
    assert steps[-1]["text"].endswith(", at layers.0.mlp.bias")
    assert last == {"state": "done"}
    monkeypatch.setattr(acting, "_PER_SECOND", 1e-9)
    sent = len(browser.updates("_progress"))
    browser.acts("materialize", "layers.1")
    quiet()
    assert [each["state"] for each in browser.updates("_progress")[sent:]] == ["running", "done"]


def test_a_blocked_tensor_is_refused_with_what_helps_and_skipped_if_that_was_chosen(front):
    model = quirks()
    browser = front(model)
    before = on_meta(model)
    answer = browser.acts("materialize", "own", "norm")
    assert answer["ok"] is False
    assert "own.gain" in answer["text"] and "no reset_parameters" in answer["text"]
    assert answer["next"]
    assert on_meta(model) == before
    assert browser.acts("materialize", "own", "norm", blocked="skip")["ok"]
    assert [name for name in before if name not in on_meta(model)] == [
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    ]


def test_too_little_memory_is_said_with_both_numbers_and_changes_nothing(front):
    model = Holder(big=nn.Linear(2**20, 2**20, bias=False, device=META), small=linear())
    browser = front(model)
    answer = browser.acts("materialize", "")
    assert answer["ok"] is False
    assert re.search(r"4\.00 TiB", answer["text"]) and "free" in answer["text"]
    assert on_meta(model) == ["big.weight", "small.weight", "small.bias"]
    assert outcome(browser)["text"] == answer["text"]


def test_memory_that_ends_half_way_is_said_in_words_and_changes_nothing(front, monkeypatch):
    materialize = acting.materialize
    for error, said in (
        (MemoryError(), "no more memory"),
        (MemoryError("[enforce fail] DefaultCPUAllocator: can't allocate\nmore"), "[enforce fail] Default"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "CUDA out of memory."),
    ):

        def fails(model, paths, *, progress, error=error, **options):
            def step(done, total, path):
                if path == "layers.1.norm.weight":
                    raise error

            return materialize(model, paths, progress=step, **options)

        monkeypatch.setattr(acting, "materialize", fails)
        model = built()
        browser = front(model)
        answer = browser.acts("materialize", "layers")
        assert answer["text"].startswith(f"Out of memory, and the model is as it was before: {said}")
        assert answer["text"].isprintable()
        assert len(on_meta(model)) == 18
        monkeypatch.setattr(acting, "materialize", materialize)
        assert browser.acts("materialize", "layers")["ok"]


def test_what_is_not_there_any_more_is_refused_before_the_tree_has_followed(front):
    model = built()
    browser = front(model)
    del model.layers[3]
    answer = browser.acts("materialize", "layers.3", "head")
    assert answer["ok"] is False
    assert answer["text"].startswith("The model was changed since this was drawn, and nothing was done.")
    assert len(on_meta(model)) == 14


def test_rows_of_an_older_tree_are_refused_and_do_nothing(front):
    model = built()
    browser = front(model)
    rows = browser.rows("head")
    del model.layers[0]
    browser.widget.follow()
    eventually(lambda: browser.state["_shape"] == 2)
    for verb in ("materialize", "unload"):
        answer = browser.wish(verb, shape=1, rows=rows)
        said = "The model has changed since this was chosen, and nothing was done: look at the tree, choose again"
        assert (answer["text"], answer["next"]) == (said, "")
    assert len(on_meta(model)) == 14
    assert browser.acts("materialize", "head")["ok"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"rows": []}, "Nothing is chosen: "),
        ({"rows": [999, -1]}, "Nothing is chosen: "),
        ({}, "KeyError: 'rows'"),
        ({"rows": "all"}, "ValueError: invalid literal"),
        ({"rows": [0], "device": "warp:7"}, "warp:7"),
        ({"rows": [0], "source": "magic"}, "magic"),
        ({"rows": [0], "rng": "dice"}, "dice"),
        ({"rows": [0], "dtype": "float17"}, "float17"),
        ({"rows": [0], "blocked": "perhaps"}, "perhaps"),
    ],
)
def test_a_click_that_makes_no_sense_is_answered_in_words_and_does_nothing(front, facts, said):
    model = built()
    browser = front(model)
    answer = browser.wish("materialize", shape=1, **facts)
    assert (answer["ok"], answer["kind"]) == (False, "error")
    assert said in answer["text"]
    assert len(on_meta(model)) == 18
    assert browser.acts("materialize", "head")["ok"]


def test_values_that_would_be_lost_are_not_unloaded(front):
    model = built()
    browser = front(model)
    browser.acts("materialize", "head")
    with torch.no_grad():
        model.head.weight.fill_(3)
    answer = browser.acts("unload", "head")
    assert answer["ok"] is False
    assert "head.weight: it was changed since it was materialized" in answer["text"]
    assert torch.equal(model.head.weight, torch.full((2, 4), 3.0))
    assert outcome(browser)["kind"] == "error"


def test_a_report_is_a_trait_that_python_can_observe(front):
    browser, heard = front(built()), []
    browser.widget.observe(lambda change: heard.append(change["new"].device), "report")
    browser.acts("materialize", "head")
    quiet()
    assert heard == [torch.device("cpu")]


def test_an_error_is_told_in_words_with_the_next_step():
    assert acting.failed(MetavizError("It is so. Next: do(it)")) == {
        **{"kind": "error", "text": "It is so.", "next": "do(it)"}
    }
    assert acting.failed(ValueError("bad\x1b")) == {
        **{"kind": "error", "text": "ValueError: bad\\x1b", "next": ""}
    }
    assert acting.failed(acting.Cancelled("Cancelled at 0 B"))["kind"] == "cancelled"
    assert acting.failed(KeyboardInterrupt())["text"].startswith("KeyboardInterrupt")
    assert acting.failed(BadCheckpoint("No file. Next: look"))["next"] == "look"


@pytest.mark.parametrize("name", ["", "checkpoint", "bfloat16", "float64"])
def test_a_dtype_to_cast_to_is_taken_by_its_name(name):
    assert acting.check_dtype(name) == name
    assert acting.check_dtype(f"torch.{name}" if name in ("bfloat16", "float64") else name) == name


def test_the_devices_to_choose_from_say_what_is_free_on_the_cpu():
    first, *_, last = acting.choices()
    assert first["name"] == "cpu"
    assert re.fullmatch(r"cpu: [\d.]+ [KMGT]iB free of [\d.]+ [KMGT]iB", first["text"])
    assert last == {"name": "auto", "text": "auto: spread over all"}
