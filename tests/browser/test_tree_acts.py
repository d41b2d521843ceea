"""Acting in the tree's page: plans, buttons, wishes, their answers, details."""

from __future__ import annotations

import pytest
from browser.faketree import FakeTree, Wire, shown
from front import built
from trees import stack

READY = {
    **{"state": "ready", "line": "1 subtree, 112 B → cpu, fits, 4 tensors from replay", "blocked": []},
    **{"can": True, "fits": True, "loads": False, "unload": "metaviz.unload(model)"},
    "call": 'metaviz.materialize(model, "layers.0", device="cpu")',
}
NEXT = "model = metaviz.build(Net)"


@pytest.fixture
def show(fake, needs):
    """``show(model, ...)`` gives the page of a tree."""
    needs("anywidget")
    return lambda model, **options: shown(fake, model, **options)


@pytest.fixture
def wired(fake, needs):
    """``wired(model)`` gives a real widget behind a page."""
    needs("anywidget")
    made: list[Wire] = []

    def wire(model, **options):
        made.append(Wire(fake, model, **options))
        return made[-1]

    yield wire
    for each in made:
        each.tree.close()


def buttons(page: FakeTree) -> tuple[bool, bool]:
    """Whether Materialize and Unload can be pressed."""
    return page.button("Materialize").is_enabled(), page.button("Unload").is_enabled()


def line(page: FakeTree) -> str:
    return page.root.locator(".mv-plan-line").inner_text()


def test_the_line_of_the_plan_and_the_buttons_say_what_can_be_done(show):
    page = show(stack(2))
    assert line(page) == "Tick modules or tensors to see what giving them values would take."
    assert buttons(page) == (False, False)
    page.widget.update(_plan={"state": "thinking"})
    assert (line(page), buttons(page)) == ("planning …", (False, False))
    page.widget.update(_plan=READY)
    assert (line(page), buttons(page)) == (READY["line"], (True, False))
    call = page.root.get_by_role("group", name="the call that this equals")
    assert call.inner_text() == READY["call"]
    page.widget.update(_plan={**READY, "state": "thinking"})
    assert (line(page), buttons(page)) == (f"{READY['line']} …", (False, False))
    page.widget.update(_plan={**READY, "can": False, "fits": False, "loads": True})
    assert buttons(page) == (False, True)
    assert call.inner_text() == READY["unload"]
    page.widget.update(
        _plan={
            **READY,
            "can": False,
            "blocked": [["a.<b>", "it has no source", NEXT], ["and 2 more", "", ""]],
        }
    )
    blocked = page.root.get_by_role("list", name="Blocked").get_by_role("listitem")
    assert blocked.all_inner_texts() == [f"a.<b> it has no source\n{NEXT}", "and 2 more"]
    assert page.root.get_by_label("leave out what is blocked").is_visible()
    page.widget.update(_plan={"state": "failed", "text": "No such device.", "next": 'widget.device = "cpu"'})
    assert (line(page), buttons(page)) == ("No such device.", (False, False))
    assert blocked.all_inner_texts() == ['Next\nwidget.device = "cpu"']
    page.widget.update(_plan={"state": "none"})
    assert blocked.count() == 0


def test_what_is_chosen_in_the_pickers_is_saved_and_comes_along_with_a_click(show):
    page = show(stack(2), _sources=["auto", "checkpoint", "replay", "reset"], _plan=READY)
    page.tick("head")
    for label, value in [
        ("Source", "reset"),
        ("Random", "keyed"),
        ("dtype", "checkpoint"),
        ("Device", "auto"),
    ]:
        page.root.get_by_label(label, exact=True).locator("visible=true").first.select_option(value)
    chosen = {"source": "reset", "rng": "keyed", "dtype": "checkpoint", "device": "auto", "blocked": "error"}
    assert {name: page.widget.get(name) for name in chosen} == chosen
    assert page.widget.saved[1:] == [{name: chosen[name]} for name in ("source", "rng", "dtype", "device")]
    page.button("Materialize").click()
    [wish] = page.wishes("materialize")
    del wish["id"]
    rows = page.widget.get("_ticked")["rows"]
    assert wish == {"do": "materialize", "rows": rows, "shape": 1, **chosen}
    # What Python has set is what is shown.
    page.widget.update(source="replay", dtype="float16", device="cpu")
    shown = {
        n: page.root.get_by_label(n, exact=True).locator("visible=true").first.input_value()
        for n in ("Source", "Device")
    }
    assert shown == {"Source": "replay", "Device": "cpu"}


def test_a_double_click_is_one_wish_and_its_failure_is_told_once_until_something_is_done(show):
    page = show(stack(2), _plan=READY)
    page.tick("head")
    page.button("Materialize").dblclick(force=True)
    page.settle()
    [wish] = page.wishes("materialize")
    assert buttons(page) == (False, False)
    page.widget.answer(
        {"id": wish["id"], "ok": False, "kind": "error", "text": "It is busy", "next": "wait()"}
    )
    page.settle()
    alert = page.root.locator(".mv-outcome").get_by_role("alert")
    assert alert.all_inner_texts() == ["✗ It is busy"]
    assert buttons(page) == (True, False)
    # The plan is made anew because the model has changed; why nothing was done can still be read.
    page.widget.update(_plan={"state": "thinking"})
    page.widget.update(_plan={**READY, "line": "another"})
    assert alert.all_inner_texts() == ["✗ It is busy"]
    page.button("Materialize").click()
    assert alert.count() == 0
    page.widget.update(_progress={"state": "running", "text": "", "part": 0}, _outcome={})
    page.widget.update(
        _progress={"state": "stopped"}, _outcome={"kind": "error", "text": "Out of memory", "next": ""}
    )
    page.widget.answer(
        {
            "id": page.wishes("materialize")[1]["id"],
            "ok": False,
            "kind": "error",
            "text": "Out of memory",
            "next": "",
        }
    )
    page.settle()
    assert alert.all_inner_texts() == ["✗ Out of memory"]


def test_progress_is_shown_and_cancel_asks_for_the_end_once(show):
    page = show(stack(2), _plan=READY)
    bar = page.root.get_by_role("progressbar")
    assert not bar.is_visible()
    page.widget.update(
        _progress={"state": "running", "verb": "materialize", "text": "looking at the model …", "part": 0}
    )
    assert bar.get_attribute("value") is None  # not known yet how far
    page.widget.update(_progress={"state": "running", "text": "56 B of 112 B, 3 KiB/s, at head", "part": 0.5})
    assert bar.evaluate("e => e.value") == 0.5
    assert page.root.locator(".mv-pace").inner_text() == "56 B of 112 B, 3 KiB/s, at head"
    assert buttons(page) == (False, False)
    page.button("Cancel").click()
    assert page.button("Cancel").is_disabled()
    assert len(page.wishes("cancel")) == 1
    page.widget.update(
        _progress={"state": "stopped"},
        _outcome={"kind": "cancelled", "text": "Cancelled at 56 B", "next": ""},
    )
    assert page.outcome("cancelled") == "■ Cancelled at 56 B"
    assert not bar.is_visible()
    page.widget.update(_progress={"state": "running", "text": "", "part": 0})
    assert page.button("Cancel").is_enabled()


def test_what_was_done_or_went_wrong_is_told_with_code_that_can_be_copied(show):
    page = show(stack(2), _plan=READY)
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    call = 'metaviz.materialize(model, "<b>")'
    page.widget.update(
        _outcome={"kind": "error", "text": "No <b>memory</b>", "more": ["a line"], "next": NEXT, "call": call}
    )
    outcome = page.root.locator(".mv-outcome")
    assert outcome.get_by_role("alert").inner_text() == "✗ No <b>memory</b>"
    assert outcome.get_by_role("group", name="the next step").inner_text() == NEXT
    assert outcome.locator("b").count() == 0
    for name, text in [
        ("Copy the next step", NEXT),
        ("Copy the call that this was", call),
        ("Copy the call that this equals", READY["call"]),
    ]:
        button = page.button(name)
        button.click()
        button.get_by_text("Copied").wait_for()
        assert page.page.evaluate("() => navigator.clipboard.readText()") == text
    page.widget.update(_outcome={"kind": "done", "text": "materialized 4 tensors", "more": []})
    assert outcome.get_by_role("status").all_inner_texts() == ["✓ materialized 4 tensors"]
    page.widget.update(_outcome={})
    assert outcome.inner_text() == ""


def test_a_real_widget_plans_acts_and_tells_details_through_the_page(wired):
    net = built()
    wire = wired(net, called="net")
    page = wire.page
    page.open("Expand all")
    page.tick("0 … 3")
    wire.pass_on()
    assert wire.tree.selection == ["layers"]
    assert line(page) == "1 subtree, 448 B → cpu, fits, 16 tensors from replay"
    call = 'metaviz.materialize(net, "layers", device="cpu")'
    assert page.root.get_by_role("group", name="the call that this equals").inner_text() == call
    page.button("Materialize").click()
    wire.pass_on()
    assert page.outcome().startswith("✓ materialized 16 tensors, 448 B")
    assert page.root.get_by_role("group", name="the call that this was").inner_text() == call
    page.page.wait_for_function("() => document.querySelector('.mv-marks').textContent.includes('16 real')")
    assert not any(tensor.is_meta for tensor in net.layers.parameters())
    assert buttons(page) == (False, True)
    page.row("mlp").locator(".mv-label").click()
    page.wait_for_wish("details")
    wire.pass_on()
    details = page.root.get_by_role("region", name="Details")
    details.get_by_role("button", name="weight").wait_for()
    assert details.locator("h3").inner_text().startswith("layers.0.mlp")
    assert details.locator("tr").first.inner_text().split("\t")[1:5] == ["(4, 4)", "float32", "cpu", "64 B"]
    details.get_by_role("button", name="bias").click()
    assert page.active_row()["label"] == "bias"
    page.widget.set("filter", "")
    wire.tree.selection = ["head.bias"]
    wire.tree.filter = "head"
    wire.pass_on()
    page.row("head").wait_for()
    assert {row["label"]: row["tick"] for row in page.rows()} == {
        **{"Holder": "mixed", "head": "mixed"},
    }
    assert page.box.input_value() == "head"
    assert page.widget.errors == []


def test_details_that_cannot_be_told_say_why_and_an_answer_that_comes_late_is_let_go(show):
    page = show(stack(2), depth=1)
    page.press("Home", "ArrowDown", "Enter")
    wish = page.wait_for_wish("details")
    details = page.root.get_by_role("region", name="Details")
    page.widget.answer(
        {"id": wish["id"], "ok": False, "kind": "error", "text": "The tree has changed", "next": ""}
    )
    details.get_by_role("alert").get_by_text("The tree has changed").wait_for()
    assert "asking the model" not in details.inner_text()
    page.press("ArrowDown")
    late = page.wait_for_wish("details", 2)
    page.press("ArrowUp")
    page.widget.answer({"id": late["id"], "ok": False, "kind": "error", "text": "too late", "next": ""})
    page.settle()
    assert "too late" not in details.inner_text()
    assert page.wait_for_wish("details", 3)["row"] == 1


def test_a_card_by_the_mouse_says_in_short_what_a_row_is_and_not_over_boxes(show):
    page = show(stack(2), depth=1)
    page.row("head").locator(".mv-label").hover()
    wish = page.wait_for_wish("details")
    about = {
        "path": "head",
        "copy": "head",
        "title": "Linear",
        "mark": "ready",
        "about": "A layer.",
        "answers": [["reset", "can"]],
    }
    page.widget.answer(
        {"id": wish["id"], "ok": True, "details": {**about, "tensors": [], "links": [], "code": []}}
    )
    card = page.root.get_by_role("tooltip")
    card.wait_for()
    assert card.inner_text().split("\n")[-1] == "Enter or a click shows all of it."
    assert "A layer." in card.inner_text()
    page.row("head").locator(".mv-box").hover()
    assert not card.is_visible()
