"""The life of a tree's page: a kernel that says nothing, views that come and go, data that cannot be read."""

from __future__ import annotations

import pytest
from browser.faketree import FakeTree, shown, state_of
from trees import stack

import metaviz

READY = {
    **{"state": "ready", "line": "1 subtree, 112 B → cpu, fits, 4 tensors from replay", "blocked": []},
    **{"can": True, "fits": True, "loads": False, "unload": "metaviz.unload(model)"},
    "call": 'metaviz.materialize(model, "layers.0", device="cpu")',
}


def later(page: FakeTree, seconds: int) -> None:
    page.page.clock.run_for(seconds * 1000)


def with_clock(fake) -> FakeTree:
    """A view of a tree in a page whose time the test makes."""
    page = shown(fake, stack(2), depth=1)
    page.page.clock.install()
    page.page.evaluate(
        """() => { window.running = new Set(); const { setInterval: begin, clearInterval: end } = window;
            window.setInterval = (...facts) => { const id = begin(...facts); running.add(id); return id; };
            window.clearInterval = (id) => { running.delete(id); end(id); }; }"""
    )
    # Its timers are to be those of the test.
    page.widget.remove(0)
    page.widget.view()
    found = FakeTree(page.widget, 0)
    page.page.evaluate("() => { fakeWidget.model.sent.length = 0; }")
    return found


def test_a_kernel_that_says_nothing_is_told_of_and_forgotten_once_it_answers(fake, needs):
    needs("anywidget")
    page = with_clock(fake)
    note = page.root.locator(".mv-note")
    for _ in range(5):
        later(page, 3)
        page.widget.answer({"id": page.wishes("ping")[-1]["id"], "ok": True})
    assert len(page.wishes("ping")) == 5
    assert not note.is_visible()
    page.widget.update(_plan=READY)
    page.button("Materialize").click()
    later(page, 13)
    assert note.inner_text().startswith("No kernel answers: it was restarted, has ended, or is busy.")
    assert "run the cell again" in note.inner_text()
    assert page.outcome("error").startswith(
        "✗ No kernel answers. If it is only busy, it does this as soon as it is free."
    )
    # The tree can still be read.
    page.row("layers").locator(".mv-twist").click()
    assert "0 … 1" in page.labels()
    page.widget.answer({"id": page.wishes("ping")[-1]["id"], "ok": True})
    assert not note.is_visible()
    page.widget.update(_gone="The model is gone: run the cell")
    assert note.inner_text() == "The model is gone: run the cell"


def test_nobody_is_asked_while_the_cell_is_out_of_sight_and_the_silence_is_not_held_against_the_kernel(
    fake, needs
):
    needs("anywidget")
    page = with_clock(fake)
    page.page.evaluate("() => { document.querySelector('main').style.display = 'none'; }")
    later(page, 60)
    assert page.wishes("ping") == []
    page.page.evaluate("() => { document.querySelector('main').style.display = ''; }")
    later(page, 4)
    assert len(page.wishes("ping")) == 1
    assert not page.root.locator(".mv-note").is_visible()


def test_nothing_is_left_of_a_closed_view(fake, needs):
    needs("anywidget")
    page = with_clock(fake)
    listeners = "() => fakeWidget.model.listeners.length"
    once = page.page.evaluate(listeners)
    page.widget.view()
    assert page.page.evaluate(listeners) == 2 * once > 20
    page.page.wait_for_function("() => running.size === 2")
    page.press("Home", "Enter")
    # The cleanup itself, without what the front end takes away.
    page.page.evaluate("() => fakeWidget.views.at(-1).cleanup()")
    assert page.page.evaluate(listeners) == once
    page.widget.remove(1)
    assert page.page.evaluate(listeners) == 0
    assert page.page.evaluate("() => running.size") == 0
    page.page.evaluate("() => { fakeWidget.model.sent.length = 0; }")
    later(page, 60)
    page.widget.update(filter="head", _plan=READY, _payload=b"no more read")
    later(page, 1)
    assert page.widget.sent == []
    assert page.page.evaluate("() => document.querySelectorAll('.mv-widget').length") == 0
    assert page.widget.errors == []


TWIN = """name => { const outer = document.createElement('div'); outer.className = 'jp-OutputArea-child';
    outer.innerHTML = `<div id="${name}">a static tree</div>`; document.body.prepend(outer); }"""


def twin_page(fake, **traits: object):
    """A page with a static twin and a view that is made after it."""
    widget = metaviz.TreeWidget
    made = fake(widget._esm, widget._css, state_of(stack(2), depth=1, _twin="mv-twin-1"))
    made.page.evaluate(TWIN, "mv-twin-1")
    made.remove(0)
    made.update(**traits)
    made.view()
    return made


def test_the_static_twin_hides_while_a_view_lives_and_is_there_when_the_last_has_gone(fake, needs):
    needs("anywidget")
    made = twin_page(fake)
    twin = made.page.locator("#mv-twin-1")
    made.page.locator(".mv-widget").wait_for()
    twin.wait_for(state="hidden")
    made.view()
    made.root(2).locator(".mv-widget").wait_for()
    made.page.wait_for_timeout(100)
    made.remove(1)
    assert not twin.is_visible()
    made.remove(2)
    assert twin.is_visible()


def test_a_view_that_is_closed_before_it_was_drawn_hides_nothing_and_leaves_no_timer(fake, needs):
    needs("anywidget")
    page = with_clock(fake)
    page.widget.remove(1)
    page.widget.update(_twin="mv-twin-1")
    page.page.evaluate(TWIN, "mv-twin-1")
    # At once, as a cell that is run twice in a row does.
    page.page.evaluate("async () => { await fakeWidget.view(); await fakeWidget.remove(2); }")
    page.page.wait_for_timeout(200)
    assert page.page.locator("#mv-twin-1").is_visible()
    assert page.page.evaluate("() => running.size") == 0
    assert page.widget.errors == []


@pytest.mark.parametrize("data", [b"no deflate stream", b"", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_data_that_cannot_be_read_is_told_in_the_cell_and_the_twin_stays(fake, needs, data):
    needs("anywidget")
    made = twin_page(fake, _payload=data)
    broken = made.page.get_by_role("alert")
    broken.wait_for()
    said = broken.inner_text()
    assert said.startswith("metaviz front end failed: ")
    assert said.endswith("Next: run the cell again, or print(widget.tree) for the tree as text.")
    assert made.page.locator("#mv-twin-1").is_visible()


def test_data_that_goes_bad_later_is_told_once_and_brings_back_the_twin(fake, needs):
    needs("anywidget")
    made = twin_page(fake)
    made.page.locator("#mv-twin-1").wait_for(state="hidden")
    for data in (b"no deflate stream", b"nor this"):
        made.update(_payload=data)
        made.page.get_by_role("alert").wait_for()
    made.page.wait_for_timeout(100)
    assert made.page.get_by_role("alert").count() == 1
    assert made.page.locator("#mv-twin-1").is_visible()
