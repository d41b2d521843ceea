"""Nothing in the tree's page is in the way of people: axe, in both themes and several widths, whatever is shown."""

from __future__ import annotations

import pytest
from browser.axe import serious
from browser.faketree import FakeTree, shown
from trees import quirks

PLAN = {
    **{"state": "ready", "line": "1 subtree, 112 B → cpu", "can": True, "fits": False, "loads": True},
    **{"call": "metaviz.materialize(model)", "unload": "metaviz.unload(model)"},
    "blocked": [["a.b", "it has no source", "fix(it)"]],
}
ERROR = {"kind": "error", "text": "Out of memory", "more": ["a line"], "next": "fix(it)", "call": "call(it)"}
DETAILS = {
    **{"path": "embed", "copy": "embed", "title": "Embedding", "mark": "blocked", "about": "A table."},
    **{"answers": [["reset", "can"], ["replay", "cannot"]], "links": [[4, "x.y", "the same tensor"]]},
    "tensors": [
        {
            "row": k,
            "name": f"t{k}",
            "cells": ["(2,)", "float32", "meta", "8 B"],
            "note": "",
            "mark": mark,
            "reason": "why",
        }
        for k, mark in enumerate(["real", "ready", "partial", "blocked", "empty"], 4)
    ],
    "code": [["Next", "fix(it)\n" * 20]],
}


def plain(page: FakeTree) -> None:
    page.tick("embed")


def open_details(page: FakeTree) -> None:
    page.press("Home", "ArrowDown", "Enter")
    page.widget.answer({"id": page.wait_for_wish("details")["id"], "ok": True, "details": DETAILS})
    page.root.get_by_role("button", name="t5").wait_for()


def filtered(page: FakeTree) -> None:
    page.type("weight -is:real")
    page.root.locator("summary").click()


def mistaken(page: FakeTree) -> None:
    page.type("is:purple")


def planned(page: FakeTree) -> None:
    page.widget.update(_plan=PLAN, _outcome=ERROR)


def at_work(page: FakeTree) -> None:
    page.widget.update(_plan=PLAN, _progress={"state": "running", "text": "1 B of 2 B, at x", "part": 0.5})
    page.widget.update(_outcome={"kind": "done", "text": "done", "more": []}, _gone="The model is gone")


def cancelled(page: FakeTree) -> None:
    page.widget.update(_plan={"state": "failed", "text": "No device", "next": "try"})
    page.widget.update(_outcome={"kind": "cancelled", "text": "Cancelled", "more": []})


@pytest.mark.parametrize("theme", ["light", "dark", None])
@pytest.mark.parametrize("width", [480, 1600])
def test_nothing_is_in_the_way_of_people(fake, needs, shots, theme, width):
    needs("anywidget")
    found = {}
    for state in (plain, open_details, filtered, mistaken, planned, at_work, cancelled):
        page = shown(fake, quirks(), depth=1, theme=theme)
        page.page.set_viewport_size({"width": width, "height": 1000})
        page.settle()
        state(page)
        page.settle()
        found[state.__name__] = serious(page.page, ".mv-widget")
        # Nothing sticks out to the side either.
        if page.page.evaluate("() => document.documentElement.scrollWidth > innerWidth"):
            found[state.__name__].append("wider than the page")
        page.root.screenshot(path=shots / f"tree-{theme}-{width}-{state.__name__}.png")
    assert found == {state: [] for state in found}
