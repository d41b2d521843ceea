"""The tree by keyboard alone: the pattern of the WAI-ARIA authoring practices, key by key, and what is beyond it."""

from __future__ import annotations

import pytest
from browser.faketree import FRAMES, FakeTree, shown
from torch import nn
from trees import META, Holder, linear, stack


@pytest.fixture
def show(fake, needs):
    """``show(model, ...)`` gives the page of a tree, with the keyboard in it."""
    needs("anywidget")

    def show(model: nn.Module, **options: object) -> FakeTree:
        page = shown(fake, model, **options)
        page.tree.focus()
        return page

    return show


def nested() -> nn.Module:
    """`Holder`: alpha.{one.{weight, bias}, two}, beta.{0 … 2}, Bravo, gamma."""
    with META:
        return Holder(
            alpha=Holder(one=nn.Linear(2, 2), two=nn.Linear(3, 3)),
            beta=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
            Bravo=nn.Linear(5, 5),
            gamma=nn.Identity(),
        )


def walk(page: FakeTree, keys: str) -> str:
    page.press(*keys.split())
    row = page.active_row()
    return f"{row['label']} {row['level']} {row['at']}/{row['of']} {row['open'] or '-'}"


# Keys, then where they lead: name, level, place, of how many, whether it is open. Each goes on from the one before.
WALK = [
    ("Home", "Holder 1 1/1 false"),
    ("ArrowUp", "Holder 1 1/1 false"),  # the first row is the end of the way
    ("ArrowLeft", "Holder 1 1/1 false"),  # nothing is above it
    ("ArrowRight", "Holder 1 1/1 true"),  # opens, and stays
    ("ArrowRight", "alpha 2 1/4 false"),  # then goes in
    ("ArrowRight ArrowRight", "one 3 1/2 false"),
    ("ArrowRight ArrowRight", "weight 4 1/2 -"),
    ("ArrowRight", "weight 4 1/2 -"),  # nothing is in it
    ("ArrowDown", "bias 4 2/2 -"),
    ("ArrowDown", "two 3 2/2 false"),
    ("ArrowUp", "bias 4 2/2 -"),
    ("ArrowLeft", "one 3 1/2 true"),  # to what it is in
    ("ArrowLeft", "one 3 1/2 false"),  # closes
    ("ArrowLeft", "alpha 2 1/4 true"),
    ("End", "gamma 2 4/4 -"),
    ("ArrowDown", "gamma 2 4/4 -"),  # the last row is the end of the way
    ("ArrowUp ArrowUp", "beta 2 2/4 false"),
    ("ArrowRight ArrowRight", "0 … 2 3 1/1 false"),
    ("ArrowRight ArrowRight", "0 4 1/3 false"),
    ("ArrowLeft", "0 … 2 3 1/1 true"),
    ("ArrowLeft", "0 … 2 3 1/1 false"),
    ("ArrowLeft ArrowLeft", "beta 2 2/4 false"),
    ("Home", "Holder 1 1/1 true"),
]


def test_arrows_home_and_end_walk_open_and_close_and_a_reader_is_told_where(show):
    page = show(nested(), depth=0)
    assert [(keys, walk(page, keys)) for keys, _ in WALK] == WALK


def test_a_star_opens_what_is_beside_a_row_and_stays_there(show):
    page = show(nested(), depth=1)
    page.press("Home", "ArrowDown", "*")
    assert page.active_row()["label"] == "alpha"
    assert [line for line in page.whole() if line[0] == 3] == [
        (3, "one"),
        (3, "two"),
        (3, "0 … 2"),
        (3, "weight"),
        (3, "bias"),
    ]
    page.press("ArrowDown", "*")
    assert [label for level, label in page.whole() if level == 4] == ["weight", "bias"] * 2


def test_a_page_is_what_is_seen_less_one_row_so_that_nobody_loses_the_thread(show):
    page = show(stack(60), depth=2)
    page.open("Expand all")
    page.press("Home", "PageDown")
    view = page.tree.evaluate("e => e.clientHeight / 24")
    assert view == 20
    labels = [label for _, label in page.whole()]
    assert page.active_row()["label"] == labels[19]
    page.press("PageDown")
    assert page.active_row()["label"] == labels[38]
    page.press("PageUp", "PageUp", "PageUp")
    assert page.active_row()["label"] == "Holder"
    page.press("End", "PageDown")
    assert page.active_row()["label"] == labels[-1]
    # Whatever the key, the row that it leads to is in sight.
    for key in ["PageUp", "PageUp", "ArrowUp", "Home", "PageDown", "ArrowDown", "End"]:
        page.press(key)
        page.settle()
        assert page.tree.evaluate(
            """e => { const row = document.getElementById(e.getAttribute("aria-activedescendant"));
                const [inner, outer] = [row, e].map(each => each.getBoundingClientRect());
                return inner.top >= outer.top && inner.bottom <= outer.bottom; }"""
        )


def test_typing_goes_to_the_next_name_that_begins_so(show):
    page = show(nested(), depth=1)
    page.page.clock.install()
    page.press("Home")
    found = []
    for letters in ["b", "b", "b", "be", "br", "G", "x", "alp", "hold"]:
        page.press(*letters)
        found.append((letters, page.active_row()["label"]))
        page.page.clock.run_for(1000)
    assert found == [
        ("b", "beta"),
        ("b", "Bravo"),
        ("b", "beta"),  # round again
        ("be", "beta"),
        ("br", "Bravo"),
        ("G", "gamma"),
        ("x", "gamma"),  # no such name
        ("alp", "alpha"),
        ("hold", "Holder"),
    ]
    # The same letter, typed fast, goes on too, as in any list.
    page.press("Home", "b", "b")
    assert page.active_row()["label"] == "Bravo"
    page.press("b")
    assert page.active_row()["label"] == "beta"


def test_a_name_of_two_equal_letters_is_found_before_the_next_with_one(show):
    page = show(Holder(la=linear(), lb=linear(), ll=linear()), depth=1)
    page.press("Home", "l", "l")
    assert page.active_row()["label"] == "ll"


def test_space_ticks_and_unticks_the_row_and_enter_and_escape_open_and_close_details(show):
    page = show(nested(), depth=1)
    details = page.root.get_by_role("region", name="Details")
    page.press("Home", "ArrowDown", " ")
    assert page.active_row()["tick"] == "true"
    assert page.widget.saved[-1] == {"_ticked": {"shape": 1, "rows": [1]}}
    assert page.rows()[0]["tick"] == "mixed"
    page.press(" ")
    assert page.active_row()["tick"] == "false"
    assert page.widget.saved[-1] == {"_ticked": {"shape": 1, "rows": []}}
    page.press("Enter")
    assert details.is_visible()
    wish = page.wait_for_wish("details")
    assert {name: wish[name] for name in ("do", "row", "shape")} == {"do": "details", "row": 1, "shape": 1}
    # Details follow the keyboard.
    page.press("ArrowDown")
    assert page.wait_for_wish("details", 2)["row"] == 8
    page.press("Escape")
    assert not details.is_visible()
    assert page.tree.evaluate("e => e === document.activeElement")
    page.press("Escape")
    assert not page.tree.evaluate("e => e === document.activeElement")


def test_slash_goes_to_the_filter_and_f3_and_enter_to_the_next_match_and_arrow_down_back(show):
    page = show(nested(), depth=0)
    page.press("/")
    assert page.box.evaluate("e => e === document.activeElement")
    page.page.keyboard.type("weight")
    page.settle()
    count = 6
    assert (page.active_row()["label"], page.found()) == ("weight", f"1 of {count}")
    page.page.keyboard.press("Enter")
    assert page.found() == f"2 of {count}"
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.press("Shift+Enter")
    assert page.found() == f"{count} of {count}"
    page.page.keyboard.press("Enter")
    assert page.found() == f"1 of {count}"
    page.page.keyboard.press("ArrowDown")
    assert page.tree.evaluate("e => e === document.activeElement")
    page.page.keyboard.press("F3")
    page.page.keyboard.press("F3")
    assert page.found() == f"3 of {count}"
    page.page.keyboard.press("Shift+F3")
    assert page.found() == f"2 of {count}"
    path = page.page.evaluate("() => fakeWidget.model.saved.map(each => Object.keys(each)).flat()")
    assert set(path) == {"filter"}
    page.box.focus()
    page.page.keyboard.press("Escape")
    assert (page.box.input_value(), page.widget.get("filter")) == ("", "")
    # The match is in a closed module again: what it is in is where the keyboard is now.
    assert page.active_row()["label"] == "Holder"


def test_the_page_around_hears_no_key_and_keys_with_ctrl_are_left_to_the_browser(show):
    page = show(nested(), depth=1)
    page.page.evaluate(
        """() => { window.heard = []; window.kept = [];
            document.addEventListener("keydown", (event) => heard.push(event.key));
            window.addEventListener("keydown", (event) => kept.push(event), true); }"""
    )
    keys = ["a", "x", "d", "d", "ArrowDown", "ArrowRight", "Home", "PageDown", "*", " ", "Enter", "F3", "Tab"]
    page.press(*keys)
    for part in [page.box, page.root.locator("summary"), page.root.get_by_label("Device", exact=True)]:
        part.focus()
        page.page.keyboard.press("b")
    assert page.page.evaluate("() => heard") == []
    page.tree.focus()
    prevented = page.page.evaluate("() => kept.map(event => [event.key, event.defaultPrevented])")
    assert dict(prevented) == {key: key not in ("Tab", "b") for key in [*keys, "b"]}
    page.page.evaluate("() => { kept.length = 0; }")
    for chord in ["Control+k", "Alt+k", "Meta+k", "Control+Home"]:
        page.page.keyboard.press(chord)
    letters = page.page.evaluate(
        "() => kept.filter(e => ['k', 'Home'].includes(e.key)).map(e => e.defaultPrevented)"
    )
    assert letters == [False] * 4


def test_all_that_takes_the_focus_keeps_a_notebooks_shortcuts_off_and_shows_that_it_has_it(show):
    model = stack(3)
    page = show(
        model,
        depth=1,
        _outcome={"kind": "error", "text": "no", "next": "fix(it)", "call": "call(it)", "more": []},
    )
    page.widget.update(
        _plan={
            "state": "ready",
            "line": "1 subtree",
            "blocked": [["a", "b", "c"]],
            "can": True,
            "fits": True,
            "loads": True,
            "call": "metaviz.materialize(model)",
            "unload": "x",
        }
    )
    page.type("weight")
    page.press("Home", "Enter")
    page.wait_for_wish("details")
    wish = page.wishes("details")[-1]
    tensors = [
        {"row": k, "name": f"t{k}", "cells": ["2"], "note": "", "mark": "ready", "reason": "why"}
        for k in (4, 5)
    ]
    page.widget.answer(
        {
            "id": wish["id"],
            "ok": True,
            "details": {
                "path": "",
                "copy": "",
                "title": "Holder",
                "mark": "ready",
                "about": "about",
                "answers": [["a", "b"]],
                "tensors": tensors,
                "links": [[4, "x.y", "the same tensor"]],
                "code": [["Next", "fix(it)"]],
            },
        }
    )
    page.root.locator(".mv-choose").evaluate("e => { e.open = true; }")
    page.settle()
    found = page.root.evaluate(
        """async root => {
            const all = [...root.querySelectorAll("button, input, select, summary, textarea, a, [tabindex]")]
                .filter(e => !e.disabled && e.checkVisibility());
            const look = e => { const s = getComputedStyle(e);
                return [s.outlineStyle, s.outlineWidth, s.boxShadow, s.borderColor].join(); };
            const found = [];
            for (const each of all) {
                document.activeElement.blur();
                const before = look(each);
                each.focus({ focusVisible: true });
                found.push([each.tagName, each.getAttribute("aria-label") ?? each.textContent,
                    each === document.activeElement, each.hasAttribute("data-lm-suppress-shortcuts"),
                    before !== look(each)]);
            }
            return found; }"""
    )
    assert len(found) > 25
    assert [each for each in found if each[2:] != [True, True, True]] == []


def test_the_row_that_the_keyboard_is_at_is_told_from_the_others_by_more_than_its_colour(show):
    page = show(nested(), depth=1)
    page.press("Home", "ArrowDown")
    page.settle()
    shadows = page.root.evaluate(
        "root => [...root.querySelectorAll('[role=treeitem]:not([hidden])')].map(e => getComputedStyle(e).boxShadow)"
    )
    assert [shadow != "none" for shadow in shadows].count(True) == 1


def test_the_active_row_stays_known_to_a_reader_until_it_is_scrolled_away(show):
    page = show(stack(60), depth=2)
    page.open("Expand all")
    page.press("Home", "ArrowDown")
    assert page.active_row()["label"] == "layers"
    page.tree.evaluate(f"e => {{ e.scrollTop = 1000; return ({FRAMES})(); }}")
    # An id that leads to no element is a fault; what is off the screen is not in the page.
    assert page.tree.get_attribute("aria-activedescendant") is None
    page.press("ArrowDown")
    assert page.active_row()["label"] == "0 … 59"
