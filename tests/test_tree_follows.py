"""The tree widget follows its model: what metaviz, other cells and other widgets do to it, until it is gone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from front import built, eventually, quiet, showing
from torch import nn
from trees import Block, stack

import metaviz
from metaviz.errors import UnknownPath
from metaviz.widgets import tree


@pytest.fixture
def front(needs):
    """`front(model)` shows a model, keeps it, and gives the browser's side of the widget."""
    needs("anywidget")
    with showing() as show:
        yield show


def test_what_is_materialized_by_hand_is_shown_without_being_asked(front):
    model = built()
    browser = front(model)
    assert browser.marks("head", "layers.0") == ["ready", "ready"]
    metaviz.materialize(model, "head")
    eventually(lambda: browser.marks("head", "layers.0") == ["real", "ready"])
    metaviz.unload(model, "head")
    eventually(lambda: browser.marks("head", "layers.0") == ["ready", "ready"])
    assert browser.updates("_shape") == []


def test_a_layer_that_was_replaced_is_shown_after_the_cell(front):
    model = built()
    browser = front(model)
    browser.widget.selection = ["layers.0", "head"]
    browser.widget.expanded = ["layers.0", "layers.3"]
    model.layers[1] = nn.Linear(4, 4)
    browser.widget.follow()
    eventually(lambda: browser.state["_shape"] == 2)
    quiet()
    assert browser.payload.look("layers.1")[1] == "Linear"
    assert browser.widget.selection == ["layers.0", "head"]
    assert browser.state["_ticked"] == {"shape": 2, "rows": browser.rows("layers.0", "head")}
    assert {"", "layers", "layers.0", "layers.3"} <= set(browser.widget.expanded)
    assert browser.state["_opened"]["shape"] == 2


def test_what_is_gone_is_chosen_and_open_no_more(front):
    model = built()
    browser = front(model)
    browser.widget.selection = ["layers.3", "head"]
    browser.widget.expanded = ["layers.3.mlp"]
    del model.layers[3]
    browser.widget.follow()
    eventually(lambda: browser.state["_shape"] == 2)
    quiet()
    assert browser.widget.selection == ["head"]
    assert browser.state["_ticked"]["rows"] == browser.rows("head")
    assert "layers.3" not in " ".join(browser.widget.expanded)
    assert browser.widget.plan is not None
    assert [each.path for each in browser.widget.plan.tensors] == ["head.weight", "head.bias"]
    with pytest.raises(UnknownPath):
        browser.widget.selection = ["layers.3"]


def test_a_model_that_nobody_changed_is_not_sent_again(front):
    browser = front(built())
    browser.widget.follow()
    quiet()
    assert browser.updates("_payload") == []
    assert browser.wish("look")["ok"]
    quiet()
    assert browser.updates("_payload") == browser.updates("_shape") == []


def test_another_source_shows_its_own_marks(front):
    browser = front(stack(2))
    assert browser.marks("head", "layers.0.mlp.weight") == ["ready", "ready"]
    browser.sets(source="replay")
    eventually(lambda: browser.marks("head", "layers.0.mlp.weight") == ["blocked", "blocked"])
    browser.widget.source = "reset"
    eventually(lambda: browser.marks("head", "layers.0.mlp.weight") == ["ready", "ready"])


def test_a_checkpoint_is_a_source(front):
    stored = {"head.weight": torch.ones(2, 4)}
    browser = front(stack(2), checkpoint=stored)
    assert browser.state["_sources"] == ["auto", "checkpoint", "replay", "reset"]
    assert browser.payload.look("head.weight")[8] == "checkpoint"
    browser.widget.selection = ["head.weight"]
    eventually(lambda: browser.state["_plan"].get("state") == "ready")
    assert browser.state["_plan"]["line"] == "1 tensor, 32 B → cpu, fits, 1 tensor from checkpoint"
    browser.widget.source = "checkpoint"
    eventually(lambda: browser.marks("head.bias", "head.weight") == ["blocked", "ready"])


def test_two_widgets_of_one_model_agree(front):
    model = built()
    one, other = front(model), front(metaviz.tree(model)["layers"])
    assert one.acts("materialize", "layers.1")["ok"]
    for browser, path in ((one, "layers.1"), (other, "1")):
        eventually(lambda browser=browser, path=path: browser.marks(path) == ["real"])
    assert other.acts("unload", "1")["ok"]
    for browser, path in ((one, "layers.1"), (other, "1")):
        eventually(lambda browser=browser, path=path: browser.marks(path) == ["ready"])


def test_a_part_has_the_paths_of_the_model(front):
    model = built()
    browser = front(metaviz.tree(model)["layers.1"])
    assert browser.payload.paths[:3] == ["", "norm", "norm.weight"]
    browser.ticks("mlp")
    assert browser.widget.selection == ["layers.1.mlp"]
    browser.widget.selection = ["layers.*.norm"]
    assert browser.widget.selection == ["layers.1.norm"]
    with pytest.raises(UnknownPath, match=r"Right below 'layers\.1' there are: norm, mlp"):
        browser.widget.selection = ["head"]
    browser.ticks("")
    assert browser.widget.selection == ["layers.1"]
    eventually(lambda: browser.state["_plan"].get("line", "").startswith("1 subtree, 112 B"))
    answer = browser.wish("details", row=browser.rows("mlp.bias")[0], shape=1)
    assert answer["details"]["path"] == "layers.1.mlp.bias"
    assert answer["details"]["tensors"][0]["row"] == browser.rows("mlp.bias")[0]


def test_a_part_follows_the_model_until_it_is_gone(front):
    model = built()
    browser = front(metaviz.tree(model)["layers.1"], called="net")
    model.layers[0] = nn.Linear(2, 2)
    browser.widget.follow()
    quiet()
    assert browser.payload.paths[1] == "norm"
    assert browser.wish("details", row=0, shape=browser.state["_shape"])["details"]["path"] == "layers.1"
    del model.layers[1:]
    browser.widget.follow()
    eventually(lambda: browser.state["_gone"])
    assert browser.state["_gone"] == "The model has no 'layers.1' any more. Next: metaviz.show(net)"
    model.layers.append(Block())
    browser.widget.follow()
    eventually(lambda: not browser.state["_gone"])
    assert browser.marks("mlp") == ["real"]


def test_a_model_that_is_gone_is_told_and_asking_for_it_is_answered(front):
    model = built()
    browser = front(model, keep=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    browser.widget.follow()
    eventually(lambda: browser.state["_gone"])
    assert browser.state["_gone"] == (
        "The model is gone: nothing else holds it. Run the cell that makes it again."
    )
    browser.widget.selection = ["head"]
    eventually(lambda: browser.state["_plan"].get("state") == "failed")
    for answer in (
        browser.acts("materialize", "head"),
        browser.acts("unload", "head"),
        browser.wish("details", row=0, shape=1),
    ):
        assert answer["ok"] is False
        assert answer["text"] == "The model of this tree is gone: a tree does not keep it."
    with pytest.raises(UnknownPath):
        _ = browser.widget.model


def test_a_model_that_cannot_be_looked_at_any_more_is_told_in_words(front, monkeypatch):
    model = built()
    browser = front(model)

    def broken(*_, **__):
        raise RuntimeError("the tree fell over")

    monkeypatch.setattr(tree, "tree", broken)
    model.layers[0] = nn.Linear(2, 2)
    browser.widget.follow()
    eventually(lambda: browser.state["_outcome"])
    assert browser.state["_outcome"] == {
        **{"kind": "error", "text": "RuntimeError: the tree fell over", "next": ""}
    }
