"""Wishes of a tree widget's front end are each answered once, and a widget that was closed leaves nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import comm
import ipywidgets
import pytest
from front import Front, built, eventually, quiet, showing
from torch import nn
from trees import META, Holder, linear, meta, quirks, weight

import metaviz
from metaviz.core import watch
from metaviz.widgets import notebook, wishes


@pytest.fixture
def front(needs):
    """`front(model)` shows a model, keeps it, and gives the browser's side of the widget."""
    needs("anywidget")
    with showing() as show:
        yield show


def test_each_wish_is_answered_once_with_its_number(front):
    browser = front(quirks())
    numbers = [
        browser.asks(wish, **facts)
        for wish, facts in (
            ("ping", {}),
            ("look", {}),
            ("cancel", {}),
            ("dance", {}),
            ("materialize", {}),
            ("materialize", {"shape": 1, "rows": "none"}),
            ("unload", {"shape": 7, "rows": [0]}),
            ("details", {}),
        )
    ]
    browser.says("custom", content={})
    eventually(lambda: all(map(browser.answers, numbers)))
    quiet()
    assert [len(browser.answers(number)) for number in numbers] == [1] * 8
    assert [browser.answers(number)[0]["ok"] for number in numbers] == [True] * 3 + [False] * 5
    assert browser.answers(numbers[3])[0]["text"] == (
        "The front end asks for 'dance', which this version of metaviz does not know."
    )
    assert len(browser.answers(None)) == 1
    failures = [browser.answers(number)[0] for number in numbers[3:]]
    assert all(each["kind"] == "error" and each["text"] for each in failures)


@pytest.mark.parametrize(
    ("path", "about"),
    [
        ("", "Holder is a module of 2,752 parameters in 18 tensors"),
        ("embed", "embed (Embedding) is a module of 1,600 parameters in 1 tensor"),
        ("embed.weight", "embed.weight (Parameter) is a parameter (100, 16)"),
        ("again", "again (Linear) is a module of 272 parameters in 2 tensors"),
        ("frozen.bias", "frozen.bias (Parameter) is a frozen parameter (16,)"),
        ("norm.running_var", "norm.running_var (Tensor) is a saved buffer (16,)"),
        ("inv_freq", "inv_freq (Tensor) is an unsaved buffer (8,)"),
        ("cache", "cache (Tensor) is a plain attribute (3,)"),
        ("real", "real (Linear) is a module of 272 parameters in 2 tensors"),
        ("normed.parametrizations.weight.0", "normed.parametrizations.weight.0 (_WeightNorm) is a module"),
    ],
)
def test_details_of_each_kind_of_row_are_answered(front, path, about):
    model = quirks()
    model.cache = meta(3)
    browser = front(model)
    (row,) = browser.rows(path)
    answer = browser.wish("details", row=row, shape=1)
    assert (answer["ok"], answer["row"], answer["shape"]) == (True, row, 1)
    assert answer["details"]["about"].startswith(about)
    assert answer["details"]["mark"] == browser.marks(path)[0]


@pytest.mark.parametrize("facts", [{"row": 0, "shape": 2}, {"row": 999, "shape": 1}, {"row": -1, "shape": 1}])
def test_details_of_a_row_that_is_not_there_are_refused_in_words(front, facts):
    answer = front(built()).wish("details", **facts)
    assert answer == {
        **{"id": "view-1", "ok": False, "kind": "error", "next": ""},
        "text": "The tree has changed in the meantime: choose the row again",
    }


def test_a_newer_question_takes_the_place_of_those_that_wait(front, monkeypatch):
    browser = front(built())
    began, go, details = threading.Event(), threading.Event(), wishes.details

    def slowly(*given):
        began.set()
        assert go.wait(60)
        return details(*given)

    monkeypatch.setattr(wishes, "details", slowly)
    numbers = [browser.asks("details", row=0, shape=1)]
    assert began.wait(60)
    numbers += [browser.asks("details", row=row, shape=1) for row in (1, 2, 3)]
    go.set()
    quiet()
    answers = [browser.answers(number) for number in numbers]
    assert [[each["ok"] for each in found] for found in answers] == [[True], [False], [False], [True]]
    assert answers[1][0]["text"] == "A newer question took its place"
    assert answers[3][0]["row"] == 3


def surroundings() -> dict[str, object]:
    """All that a widget could leave behind."""
    return {
        "widgets": len(ipywidgets.widgets.widget._instances),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "listeners": len(watch._listeners),
        "live": len(notebook.live),
        "cells": len(notebook._cells),
        "comms": len(comm.get_comm_manager().comms),
    }


def come_and_go(times: int, use: Callable[[Front], object]) -> None:
    """Show a model and close it, again and again; nothing may be left of it."""
    quiet()
    gc.collect()
    before, models = surroundings(), []
    for _ in range(times):
        model = built(1)
        browser = Front(metaviz.TreeWidget(model))
        use(browser)
        models.append(weakref.ref(model))
        browser.widget.close()
        assert browser.sent[-1][0] == "comm_close"
        del model, browser
    quiet()
    gc.collect()
    assert surroundings() == before
    assert [model() for model in models] == [None] * times


def work_with(browser: Front) -> None:
    browser.ticks("head")
    assert browser.acts("materialize", "head.bias")["ok"]
    browser.widget.follow()


def work_and_ask(browser: Front) -> None:
    browser.asks("details", row=0, shape=1)
    work_with(browser)


def test_two_hundred_widgets_that_were_closed_leave_nothing(needs):
    needs("anywidget")
    come_and_go(200, lambda browser: browser.ticks("head"))


def test_widgets_that_were_worked_with_leave_nothing(needs):
    needs("anywidget")
    come_and_go(10, work_and_ask)


@pytest.mark.slow
def test_a_thousand_widgets_that_were_worked_with_leave_nothing(needs):
    needs("anywidget")
    # No details: they try methods out for a second at most, and on a busy machine one of a thousand may be given up on.
    come_and_go(1000, work_with)


def test_a_widget_that_was_not_closed_would_be_found(needs):
    needs("anywidget")
    before = surroundings()
    widget = metaviz.TreeWidget(linear())
    there = surroundings()
    widget.close()
    assert {name for name in before if there[name] != before[name]} == {"widgets", "listeners", "live"} | (
        {"comms"} if there["comms"] != before["comms"] else set()
    )


def test_closing_twice_and_following_after_it_do_nothing(front):
    model = built()
    browser = front(model)
    browser.widget.close()
    browser.widget.close()
    sent = len(browser.sent)
    browser.widget.follow()
    metaviz.materialize(model, "head")
    quiet()
    assert len(browser.sent) == sent


def test_a_widget_takes_models_and_trees_only(needs):
    needs("anywidget")
    for thing in (3, "model", None, nn.Linear, {"weight": weight(2)}):
        with pytest.raises(TypeError):
            metaviz.TreeWidget(thing)
    assert not notebook.live


def test_any_model_can_be_shown(front):
    cycle = Holder(inner=Holder())
    cycle.inner._modules["back"] = cycle
    deep: nn.Module = linear()
    for _ in range(2000):
        deep = Holder(inner=deep)
    hostile = Holder()
    hostile._modules["line\nbreak\u202e🔥<b>" + "n" * 10_000] = linear()
    for model in (cycle, deep, hostile, nn.ReLU(), nn.LazyLinear(3, device=META), quirks()):
        browser = front(model)
        paths = browser.payload.paths
        browser.sets(_ticked={"shape": 1, "rows": [len(paths) - 1]})
        browser.sets(_opened={"shape": 1, "rows": [[0, len(paths)]], "unfolded": []})
        eventually(lambda browser=browser: browser.state["_plan"].get("state") in ("ready", "failed"))
        assert browser.state["_plan"]["state"] == "ready", browser.state["_plan"]
        assert browser.wish("details", row=len(paths) - 1, shape=1)["ok"]
