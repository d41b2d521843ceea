"""The tree widget from Python and from a browser that is played: what is chosen and open, options, the plan."""

from __future__ import annotations

import threading

import pytest
import traitlets
from front import built, eventually, quiet, showing
from trees import quirks

import metaviz
from metaviz.errors import MetavizError, UnknownPath
from metaviz.views.payload import payload
from metaviz.widgets import acting
from metaviz.widgets.places import ranges


@pytest.fixture
def front(needs):
    """`front(model)` shows a model, keeps it, and gives the browser's side of the widget."""
    needs("anywidget")
    with showing() as show:
        yield show


def test_the_browser_is_sent_the_tree_what_is_open_and_nothing_chosen(front):
    browser = front(built(), called="net")
    state = browser.state
    assert state["_payload"] == payload(metaviz.tree(browser.widget.model))
    assert state["_shape"] == 1
    assert state["_ticked"] == {"shape": 1, "rows": []}
    assert state["_opened"] == {"shape": 1, "rows": [[0, 2]], "unfolded": []}
    assert state["_sources"] == ["auto", "replay", "reset"]
    names = [each["name"] for each in state["_devices"]]
    assert (names[0], names[-1]) == ("cpu", "auto")
    assert (state["device"], state["source"], state["rng"], state["dtype"], state["blocked"]) == (
        *("cpu", "auto", "eager", "", "error"),
    )
    assert repr(browser.widget) == "<TreeWidget of net: 33 rows>"


def test_a_selection_from_code_is_ticked_in_the_browser(front):
    browser = front(built())
    widget = browser.widget
    widget.selection = ["layers.1.mlp"]
    assert browser.state["_ticked"] == {"shape": 1, "rows": browser.rows("layers.1.mlp")}
    widget.selection = ["head.bias", "layers.*.norm"]
    assert widget.selection == [*(f"layers.{k}.norm" for k in range(4)), "head.bias"]
    assert browser.state["_ticked"]["rows"] == browser.rows(*widget.selection)
    assert repr(widget) == "<TreeWidget of model: 33 rows, 5 chosen>"
    widget.selection = ["layers.2.mlp", "layers", "layers.0"]
    assert widget.selection == ["layers"]
    widget.selection = "layers.*.mlp"
    assert widget.selection == [f"layers.{k}.mlp" for k in range(4)]
    widget.selection = []
    assert browser.state["_ticked"]["rows"] == []


@pytest.mark.parametrize("paths", [["lairs"], ["head", "layers.9"], ["layers.*.lairs"]])
def test_a_selection_that_means_nothing_is_refused_and_changes_nothing(front, paths):
    browser = front(built())
    browser.widget.selection = ["head"]
    with pytest.raises(UnknownPath, match="Right below 'the root' there are: layers, head"):
        browser.widget.selection = paths
    assert browser.widget.selection == ["head"]
    assert browser.state["_ticked"]["rows"] == browser.rows("head")


@pytest.mark.parametrize("paths", [[3], None, 3, {"head": 1}])
def test_a_selection_of_another_type_is_a_trait_error(front, paths):
    browser = front(built())
    with pytest.raises(traitlets.TraitError):
        browser.widget.selection = paths
    assert browser.widget.selection == []


def test_ticks_of_the_browser_are_the_selection(front):
    browser = front(built())
    browser.ticks("layers.0", "head.bias")
    assert browser.widget.selection == ["layers.0", "head.bias"]
    # What the browser said itself is not told it again as news.
    assert browser.updates("_ticked") == []
    browser.ticks("layers.0.mlp", "layers.0", "layers.0.mlp.weight")
    assert browser.widget.selection == ["layers.0"]
    browser.sets(_ticked={"shape": 1, "rows": [10**6, -3, browser.rows("head")[0]]})
    assert browser.widget.selection == ["head"]
    browser.ticks()
    assert browser.widget.selection == []
    # What it said too much of is put right.
    put_right = [each["rows"] for each in browser.updates("_ticked")]
    assert put_right == [browser.rows("layers.0"), browser.rows("head")]


def test_observers_in_python_hear_of_ticks(front):
    browser, heard = front(built()), []
    browser.widget.observe(lambda change: heard.append(change["new"]), "selection")
    browser.ticks("head")
    browser.ticks("head")
    browser.ticks()
    assert heard == [["head"], []]


def test_ticks_that_belong_to_an_older_tree_are_not_taken(front):
    browser = front(built())
    browser.ticks("head")
    browser.sets(_ticked={"shape": 0, "rows": [0]})
    assert browser.widget.selection == ["head"]


def test_what_is_open_goes_both_ways(front):
    browser = front(built())
    widget = browser.widget
    widget.expanded = ["layers.1"]
    assert widget.expanded == ["", "layers", "layers.1", "layers.*"]
    rows = browser.rows("layers.0", "layers.1", "layers.2", "layers.3")
    assert browser.state["_opened"] == {
        **{"shape": 1, "rows": ranges([0, 1, rows[1]]), "unfolded": ranges(rows)}
    }
    browser.sets(_opened={"shape": 1, "rows": [[0, 2], [rows[2], rows[2] + 1]], "unfolded": ranges(rows)})
    assert widget.expanded == ["", "layers", "layers.2", "layers.*"]
    browser.sets(_opened={"shape": 1, "rows": [], "unfolded": []})
    assert widget.expanded == []
    widget.expanded = ["layers.*"]
    assert browser.state["_opened"]["unfolded"] == ranges(rows)
    browser.sets(_opened={"shape": 0, "rows": [[0, 99]], "unfolded": []})
    assert widget.expanded == ["", "layers", "layers.*"]
    with pytest.raises(UnknownPath):
        widget.expanded = ["lairs"]
    assert widget.expanded == ["", "layers", "layers.*"]


def test_a_depth_says_what_is_open_at_first(front):
    assert front(built(), depth=0).state["_opened"]["rows"] == []
    assert front(built(), depth=1).state["_opened"]["rows"] == [[0, 1]]


@pytest.mark.parametrize(
    ("trait", "value", "error"),
    [
        ("device", "warp:7", MetavizError),
        ("device", "cuda:4096", MetavizError),
        ("dtype", "int8", (ValueError, TypeError)),
        ("dtype", "float17", (ValueError, TypeError)),
        ("source", "magic", traitlets.TraitError),
        ("rng", "dice", traitlets.TraitError),
        ("blocked", "perhaps", traitlets.TraitError),
        ("sort", "colour", traitlets.TraitError),
        ("columns", ["class", "smell"], traitlets.TraitError),
    ],
)
def test_an_option_that_there_is_not_is_refused_and_changes_nothing(front, trait, value, error):
    browser = front(built())
    before = getattr(browser.widget, trait)
    with pytest.raises(error):
        setattr(browser.widget, trait, value)
    assert getattr(browser.widget, trait) == before
    assert browser.updates(trait) == []


def test_options_are_taken_as_materialize_takes_them(front):
    widget = front(built()).widget
    for trait, value, kept in (
        ("device", "cpu", "cpu"),
        ("device", "auto", "auto"),
        ("dtype", "torch.bfloat16", "bfloat16"),
        ("dtype", "checkpoint", "checkpoint"),
        ("dtype", "", ""),
        ("columns", ["size"], ["size"]),
    ):
        setattr(widget, trait, value)
        assert getattr(widget, trait) == kept


def test_a_plan_comes_with_a_tick_and_goes_with_it(front):
    browser = front(built())
    widget = browser.widget
    assert widget.plan is None
    browser.ticks("layers.0", "head.bias")
    plan = eventually(lambda: widget.plan)
    quiet()
    assert [each.path for each in plan.tensors] == [
        *("layers.0.norm.weight", "layers.0.norm.bias", "layers.0.mlp.weight", "layers.0.mlp.bias"),
        "head.bias",
    ]
    assert browser.state["_plan"] == {
        "state": "ready",
        "line": "1 subtree and 1 tensor, 120 B → cpu, fits, 5 tensors from replay",
        "blocked": [],
        "can": True,
        "fits": True,
        "loads": False,
        "call": 'metaviz.materialize(model, ["layers.0", "head.bias"], device="cpu")',
        "unload": 'metaviz.unload(model, ["layers.0", "head.bias"])',
    }
    browser.ticks()
    eventually(lambda: browser.state["_plan"] == {"state": "none"})
    assert widget.plan is None


def test_a_plan_follows_the_options(front):
    browser = front(built(), called="net")
    browser.widget.selection = ["head"]
    browser.sets(dtype="bfloat16", rng="keyed", blocked="skip")
    eventually(lambda: "dtype" in browser.state["_plan"].get("call", ""))
    assert browser.state["_plan"]["line"] == "1 subtree, 20 B → cpu, fits, 2 tensors from replay"
    assert browser.state["_plan"]["call"] == (
        'metaviz.materialize(net, "head", device="cpu", rng="keyed", dtype="bfloat16", blocked="skip")'
    )


def test_of_a_blocked_choice_the_tensors_and_what_helps_are_named(front):
    browser = front(quirks())
    browser.widget.selection = ["own", "norm"]
    plan = eventually(lambda: browser.widget.plan)
    assert list(plan.blocked) == ["own.gain"]
    quiet()
    found = browser.state["_plan"]
    assert found["blocked"] == [
        (
            "own.gain",
            "Holder has no reset_parameters, and no tape knows the tensor.",
            "model = metaviz.build(type(model), *args)",
        )
    ]
    assert found["can"] is False
    browser.sets(blocked="skip")
    eventually(lambda: browser.state["_plan"].get("can") is True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_plan_that_nobody_waits_for_any_more_is_not_shown(front, monkeypatch, fails):
    browser = front(built())
    began, go = threading.Event(), threading.Event()

    def slowly(*given, **options):
        began.set()
        assert go.wait(30)
        return plan("no model" if fails else given[0], *given[1:], **options)

    plan = acting.plan
    monkeypatch.setattr(acting, "plan", slowly)
    browser.ticks("head")
    assert began.wait(30)
    browser.ticks()
    go.set()
    quiet()
    assert browser.state["_plan"] == {"state": "none"}
    assert browser.widget.plan is None


def test_a_plan_for_a_tree_that_changed_in_the_meantime_gives_way_to_a_new_one(front, monkeypatch):
    model = built()
    browser = front(model)
    began, go, plan = threading.Event(), threading.Event(), acting.plan

    def slowly(*given, **options):
        found = plan(*given, **options)
        began.set()
        assert go.wait(30)
        return found

    monkeypatch.setattr(acting, "plan", slowly)
    browser.ticks("head")
    assert began.wait(30)
    # Of the smaller tree, the row of the head is beyond its end.
    del model.layers[1:]
    browser.widget.follow()
    eventually(lambda: browser.state["_shape"] == 2)
    go.set()
    eventually(lambda: browser.state["_plan"].get("state") == "ready")
    quiet()
    assert [each.path for each in browser.widget.plan.tensors] == ["head.weight", "head.bias"]
    assert browser.state["_plan"]["line"] == "1 subtree, 40 B → cpu, fits, 2 tensors from replay"


def test_a_plan_that_cannot_be_made_says_why(front):
    model = built()
    browser = front(model)
    del model.layers[3]
    browser.ticks("layers.3")
    eventually(lambda: browser.state["_plan"].get("state") == "failed")
    assert browser.widget.plan is None
    assert "layers.3" in browser.state["_plan"]["text"]
