"""The tree on its page: rows and what they say, scrolling, filter, ticks, order, columns, several views, new data."""

from __future__ import annotations

import json
import zlib
from array import array

import pytest
from browser.faketree import FakeTree, shown, state_of
from torch import nn
from trees import META, Holder, linear, quirks, stack, tiny_llama

import metaviz

HOSTILE = {
    "<img src=x onerror=alert(1)>": "<img src=x onerror=alert(1)>",
    "two\nlines": r"two\nlines",
    "\u05e2\u05d1\u202egnp": "\u05e2\u05d1\\u202egnp",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629": "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "👩‍👩‍👧": "👩\\u200d👩\\u200d👧",
    "x" * 10_000: f"{'x' * 133}…{'x' * 66}",
    "&lt;b&gt;": "&lt;b&gt;",
    "__proto__": "__proto__",
    "constructor": "constructor",
}


@pytest.fixture
def show(fake, needs):
    """``show(model, ...)`` gives the page of a tree."""
    needs("anywidget")
    return lambda model, **options: shown(fake, model, **options)


def test_the_rows_of_a_llama_say_what_it_is(show, needs):
    page = show(tiny_llama(needs("transformers"), 6))
    page.open("2 levels")
    rows = [
        (row["level"], row["label"], row["at"], row["of"], row["tick"], row["open"]) for row in page.rows()
    ]
    assert rows == [
        (1, "LlamaForCausalLM", 1, 1, "false", "true"),
        (2, "model", 1, 2, "false", "true"),
        (3, "embed_tokens", 1, 4, "false", "false"),
        (3, "layers", 2, 4, "false", "false"),
        (3, "norm", 3, 4, "false", "false"),
        (3, "rotary_emb", 4, 4, "false", "false"),
        (2, "lm_head", 2, 2, "false", "true"),
        (3, "weight", 1, 1, "false", None),
    ]
    cells = page.row("embed_tokens").evaluate(
        "e => [...e.querySelectorAll('.mv-cell')].map(c => c.textContent)"
    )
    assert cells == ["3,200", "12.5 KiB", "", "float32", "meta", "○ ready"]
    weight = page.row("weight")
    assert weight.locator(".mv-b-link").inner_text() == "= model.embed_tokens.weight"
    spoken = weight.get_attribute("aria-label")
    assert spoken.startswith("weight, (100, 32), tied, meta, ready, = model.embed_tokens.weight")
    weight.locator(".mv-b-link").click()
    assert page.active_row()["label"] == "weight"
    assert page.active_row()["level"] == 4  # that of the embedding, which was opened for it


def test_hostile_names_are_text_and_rows_keep_their_height(show):
    with META:
        model = Holder(**{name: nn.Linear(2, 2) for name in HOSTILE})
    page = show(model, depth=1)
    dialogs = []
    page.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    assert [row["label"] for row in page.rows()] == ["Holder", *HOSTILE.values()]
    heights = page.root.evaluate(
        "e => [...e.querySelectorAll('.mv-row:not([hidden])')].map(r => r.getBoundingClientRect().height)"
    )
    assert set(heights) == {24}
    assert page.root.locator("img, b").count() == 0
    # A long name gives way to the columns, not the other way round.
    assert page.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert page.tree.evaluate("e => e.scrollWidth <= e.clientWidth")
    x = "e => new Set([...e.querySelectorAll('.mv-pane .mv-pill')].map(p => p.getBoundingClientRect().x)).size"
    assert page.root.evaluate(x) == 1
    page.type("onerror")
    assert page.root.locator("mark").all_inner_texts() == ["onerror"]
    page.type("\u05e2")
    assert page.labels() == ["Holder", "\u05e2\u05d1\\u202egnp"]
    assert dialogs == page.widget.errors == page.widget.outside_requests == []


def test_repeated_blocks_are_one_row_that_unfolds(show):
    page = show(stack(24), depth=2)
    run = page.row("0 … 23")
    assert run.locator(".mv-cls").inner_text() == "24 × Block"
    assert run.get_attribute("aria-expanded") == "false"
    run.locator(".mv-twist").click()
    assert [label for level, label in page.whole() if level == 4] == [str(k) for k in range(24)]
    # Of each block its own row; seven rows are one block.
    assert page.widget.saved[-1]["_opened"]["unfolded"] == [[row, row + 1] for row in range(2, 170, 7)]
    page.row("0 … 23").dblclick(position={"x": 200, "y": 8})
    assert [label for level, label in page.whole() if level == 4] == []


def test_one_block_that_has_values_stands_by_itself(show):
    model = stack(24)
    metaviz.materialize(model, "layers.11", device="cpu", source="reset")
    page = show(model, depth=2)
    assert page.whole()[2:5] == [(3, "0 … 10"), (3, "11"), (3, "12 … 23")]
    assert page.row("11").locator(".mv-pill").inner_text() == "● real"
    assert page.row("11").locator(".mv-c-device").inner_text() == "cpu"


def large(count: int) -> bytes:
    """The data of a tree whose rows are called 0, 1, 2 … below each other; a tenth of them hold the nine after them."""
    look = ["module", "Linear", "6", "24 B", 24, "float32", "meta", "ready", "replay", []]
    head = {
        **{
            "title": "Large",
            "summary": [],
            "marks": [],
            "symbols": {},
            "rows": count,
            "runs": [],
            "links": [],
        },
        **{"names": [str(row) for row in range(count)], "looks": [look]},
    }
    said = json.dumps(head).encode()
    said += b" " * (-len(said) % 4)
    depths = array("H", [0, *(2 if row % 10 else 1 for row in range(10, count + 9))])
    columns = (array("I", [0] * count), array("I", range(count)), depths)
    return zlib.compress(b"".join((len(said).to_bytes(4, "little"), said, *(c.tobytes() for c in columns))))


def all_open(count: int) -> dict:
    return {"_payload": large(count), "_opened": {"shape": 1, "rows": [[0, count]], "unfolded": []}}


def test_of_fifty_thousand_rows_few_are_elements_and_none_is_blank_while_they_are_scrolled(show):
    page = show(linear(), **all_open(50_001))
    assert page.tree.evaluate("e => e.scrollHeight / 24") == 50_001
    wrong, most, end = page.tree.evaluate(
        """async scroller => {
            const frame = () => new Promise(requestAnimationFrame);
            const wrong = [], counts = [], steps = Array(30).fill(100).concat(Array(30).fill(1437));
            for (const [step, by] of [...steps, 90000, -500, -1e6, 1e6, -24, 1e6].entries()) {
                scroller.scrollTop += by;
                await frame(); await frame();
                counts.push(scroller.querySelectorAll(".mv-row").length);
                const outer = scroller.getBoundingClientRect();
                const boxes = [...scroller.querySelectorAll(".mv-row:not([hidden])")]
                    .map(row => [row.getBoundingClientRect(), row.querySelector(".mv-label").textContent])
                    .sort(([one], [other]) => one.top - other.top);
                // Each row where it belongs, from the upper edge to the lower one.
                const right = boxes.every(([box, label]) => Math.abs(box.top - outer.top + scroller.scrollTop
                    - 24 * (label === "Large" ? 0 : Number(label))) < 0.6);
                if (!right || boxes[0][0].top > outer.top || boxes.at(-1)[0].bottom < outer.bottom) wrong.push(step);
            }
            return [wrong, Math.max(...counts), scroller.scrollTop]; }"""
    )
    assert (wrong, end) == ([], 50_001 * 24 - 480)
    assert most <= 100
    page.press("End")
    assert (page.active_row()["label"], page.labels()[-1]) == ("50000", "50000")
    page.type("name:4999")
    assert page.found() == "1 of 15"  # 4999, 14999 … 44999, 49990 … 49999
    page.button("↑").click()
    assert page.active_row()["label"] == "49999"
    assert page.root.locator("[role=treeitem]").count() <= 100


def test_rows_beyond_what_a_browser_scrolls_are_all_reached(show):
    # At 24 pixels each, they are higher than an element is made: 8 million pixels.
    page = show(linear(), **all_open(400_001))
    assert page.tree.evaluate("e => e.scrollHeight") == 8_000_000
    page.press("End")
    assert page.active_row()["label"] == "400000"
    edge = page.tree.evaluate("e => e.getBoundingClientRect().bottom")
    assert page.rows()[-1]["y"] + 24 == pytest.approx(edge, abs=2)
    page.press("ArrowUp", "ArrowUp", "PageUp")
    assert page.active_row()["label"] == "399979"
    page.tree.evaluate("e => { e.scrollTop = 4_000_000; }")
    page.settle()
    labels = [int(label) for label in page.labels()]
    assert labels[0] == pytest.approx(200_000, abs=20)
    assert labels == list(range(labels[0], labels[0] + len(labels)))
    assert len(labels) >= 20
    page.press("Home")
    assert page.labels()[:3] == ["Large", "1", "2"]


def test_ticks_are_shown_on_all_rows_and_saved_as_the_outermost(show):
    page = show(stack(3), depth=2)
    page.open("Expand all")
    page.tick("1")
    page.press("End", "ArrowUp", "ArrowUp", " ")
    assert page.active_row()["label"] == "head"
    # Three blocks of seven rows each begin at row 2.
    assert page.widget.saved[-1] == {"_ticked": {"shape": 1, "rows": [9, 23]}}
    page.press("Home")
    ticks = [(row["label"], row["tick"]) for row in page.rows()]
    assert ticks[:4] == [("Holder", "mixed"), ("layers", "mixed"), ("0 … 2", "mixed"), ("0", "false")]
    page.tick("0 … 2")
    assert page.widget.saved[-1]["_ticked"]["rows"] == [0]
    page.row("mlp").locator(".mv-box").click()
    # Unticked inside of what is ticked: all the rest of it stays ticked.
    assert page.widget.saved[-1]["_ticked"]["rows"] == [3, 9, 16, 23]
    page.widget.update(_ticked={"shape": 1, "rows": [0]})
    assert {row["tick"] for row in page.all_rows()} == {"true"}


def test_matches_are_ticked_all_at_once(show):
    page = show(stack(4), depth=1)
    page.type("norm is:module")
    assert page.found() == "1 of 4"
    page.button("Tick matches").click()
    assert len(page.widget.get("_ticked")["rows"]) == 4
    page.type("")
    page.open("Expand all")
    ticked = [row["label"] for row in page.all_rows() if row["tick"] == "true"]
    assert ticked == ["norm", "weight", "bias"] * 4
    page.type("norm is:module")
    page.button("Tick matches").click()
    assert page.widget.get("_ticked")["rows"] == []


def test_a_filter_keeps_what_is_above_counts_and_marks_and_can_be_looked_into(show):
    page = show(stack(60), depth=1)
    page.type("class:Linear mlp")
    assert page.found() == "1 of 60"
    assert page.seen()[:4] == [(1, "Holder"), (2, "layers"), (3, "0"), (4, "mlp")]
    assert page.root.locator("mark").first.inner_text() == "mlp"
    page.button("↓").click()
    page.button("↓").click()
    assert page.found() == "3 of 60"
    page.button("↑").click()
    assert page.found() == "2 of 60"
    page.row("mlp").locator(".mv-twist").click()
    assert page.seen()[:6] == [(1, "Holder"), (2, "layers"), (3, "0"), (4, "mlp"), (5, "weight"), (5, "bias")]
    # What is opened in a filtered tree is not what is open without a filter.
    assert [list(each) for each in page.widget.saved] == [["filter"]]
    page.type("mlp nothing")
    assert (page.found(), page.seen()) == ("nothing found", [])
    assert all(page.button(name).is_disabled() for name in ("↓", "↑", "Tick matches"))
    page.type("is:purple")
    assert page.found().startswith("is:purple is not known. There are: real, ready, partial, blocked")
    assert page.box.get_attribute("aria-invalid") == "true"
    assert page.seen()[0] == (1, "Holder")  # what cannot be meant hides nothing
    page.type("")
    assert not page.root.locator(".mv-found").is_visible()
    assert page.box.get_attribute("aria-invalid") == "false"


def test_where_a_filter_has_led_is_in_sight_once_it_is_taken_away(show):
    page = show(stack(60), depth=2)
    page.open("Expand all")
    page.type("head")
    assert page.active_row()["label"] == "head"
    page.box.press("Escape")
    assert page.active_row()["label"] == "head"


def test_a_filter_from_python_is_in_the_box_and_a_search_changes_the_trait(show):
    page = show(quirks(), depth=1)
    page.widget.set("filter", "is:real is:module")
    page.settle()
    assert (page.box.input_value(), page.found()) == ("is:real is:module", "1 of 1")
    assert page.widget.saved == []
    page.type("embed")
    assert page.widget.saved == [{"filter": "embed"}]


def test_levels_are_opened_and_closed_by_the_list_of_them(show):
    page = show(quirks(), depth=0)
    lines = dict.fromkeys(["1 level", "2 levels", "Expand all", "Collapse all"], 0)
    for choice in lines:
        page.open(choice)
        lines[choice] = len(page.all_rows())
        assert page.root.get_by_label("Expand", exact=True).input_value() == ""
    assert lines["Collapse all"] == 1
    assert lines["1 level"] == 11
    assert 11 < lines["2 levels"] < lines["Expand all"]
    assert lines["Expand all"] == len(metaviz.tree(quirks()).columns.names)
    assert page.widget.saved[-1] == {"_opened": {"shape": 1, "rows": [], "unfolded": []}}


def test_the_largest_come_first_if_that_is_wanted(show):
    with META:
        model = Holder(small=nn.Linear(2, 2), large=nn.Linear(64, 64), middle=nn.Linear(8, 8))
    page = show(model, depth=1)
    order = page.button("Largest first")
    order.click()
    assert page.labels() == ["Holder", "large", "middle", "small"]
    assert (order.get_attribute("aria-pressed"), page.widget.saved) == ("true", [{"sort": "size"}])
    order.click()
    assert page.labels() == ["Holder", "small", "large", "middle"]
    assert page.widget.get("sort") == "model"
    share = page.row("large").locator(".mv-bar > span").evaluate("e => e.style.width")
    assert float(share.removesuffix("%")) == pytest.approx(100 * 4160 / (4160 + 6 + 72))


def test_columns_are_chosen_and_those_without_room_give_way(show):
    page = show(stack(2), depth=1)
    heads = "e => [...e.querySelectorAll('.mv-header .mv-cell')].map(c => c.textContent)"
    assert page.root.evaluate(heads) == ["shape / params", "size", "share", "dtype", "device", "mark"]
    page.root.locator("summary").click()
    for name in ("dtype", "share", "class"):
        page.root.get_by_role("group", name="Columns").get_by_label(name, exact=True).uncheck()
    assert page.root.evaluate(heads) == ["shape / params", "size", "device", "mark"]
    assert page.widget.saved[-1] == {"columns": ["amount", "size", "device", "mark"]}
    assert (
        page.root.locator(".mv-pane .mv-cls").all_inner_texts().count("")
        == page.root.locator(".mv-pane .mv-cls").count()
    )
    page.page.set_viewport_size({"width": 420, "height": 800})
    page.page.wait_for_function("() => document.querySelectorAll('.mv-header .mv-cell').length === 2")
    assert page.root.evaluate(heads) == ["size", "mark"]
    assert page.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_views_of_one_widget_agree(show):
    first = show(stack(4), depth=1)
    first.widget.view()
    second = FakeTree(first.widget, 1)
    first.tick("head")
    assert [row["tick"] for row in second.rows()] == ["mixed", "false", "true"]
    second.row("layers").locator(".mv-twist").click()
    assert first.labels() == second.labels() == ["Holder", "layers", "0 … 3", "head"]
    second.type("bias")
    assert (first.box.input_value(), first.found()) == ("bias", second.found())
    assert first.labels() == second.labels()
    second.button("Largest first").click()
    assert first.button("Largest first").get_attribute("aria-pressed") == "true"
    ids = first.page.evaluate("() => [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_new_marks_leave_the_focus_what_is_open_and_the_scrolling_as_they_were(show):
    model = stack(24)
    page = show(model, depth=2)
    page.open("Expand all")
    page.press("Home", *["ArrowDown"] * 2)
    assert page.active_row()["label"] == "0 … 23"
    metaviz.materialize(model, "head", device="cpu", source="reset")
    page.widget.update(_payload=state_of(model)["_payload"])
    page.page.wait_for_function("() => document.querySelector('.mv-marks').textContent.includes('2 real')")
    # On the run itself, not on the first of its members.
    assert page.active_row()["label"] == "0 … 23"
    # What was scrolled away from stays so.
    page.tree.evaluate("e => { e.scrollTop = 2000; }")
    page.settle()
    before = page.seen()
    metaviz.materialize(model, "layers.0", device="cpu", source="reset")
    page.widget.update(_payload=state_of(model)["_payload"])
    page.page.wait_for_function("() => document.querySelector('.mv-marks').textContent.includes('6 real')")
    page.settle()
    assert page.tree.evaluate("e => e.scrollTop") == 2000
    assert len(page.seen()) == len(before)
    page.press("Home", "ArrowDown", "ArrowDown")
    assert page.active_row()["label"] == "0"


def test_a_new_shape_keeps_the_focus_on_the_same_path_or_on_what_it_was_in(show):
    with META:
        model = Holder(first=nn.Linear(2, 2), deep=Holder(inner=nn.Linear(3, 3)), last=nn.Linear(4, 4))
    page = show(model, depth=3)
    page.press("End")
    assert page.active_row()["label"] == "last"
    model._modules = {"new": linear(), **model._modules}
    page.widget.update(**_with_shape(state_of(model, depth=3), 2))
    page.row("new").wait_for()
    assert page.active_row()["label"] == "last"
    page.press("ArrowUp", "ArrowRight", "ArrowRight")
    row = page.active_row()
    assert (row["label"], row["level"], row["at"], row["of"], row["open"]) == ("weight", 4, 1, 2, None)
    del model.deep.inner
    page.widget.update(**_with_shape(state_of(model, depth=3), 3))
    page.page.wait_for_function(
        "() => document.querySelector('.mv-scroll').textContent.includes('inner') === false"
    )
    assert page.active_row()["label"] == "deep"


def _with_shape(state: dict, shape: int) -> dict:
    """The traits of a tree of another shape than the first."""
    return {
        "_shape": shape,
        "_payload": state["_payload"],
        "_opened": {**state["_opened"], "shape": shape},
        "_ticked": {"shape": shape, "rows": []},
    }


def test_ticks_and_open_rows_of_a_shape_that_is_not_shown_are_not_taken(show):
    page = show(stack(3), depth=1)
    page.widget.update(_ticked={"shape": 7, "rows": [1]}, _opened={"shape": 7, "rows": [], "unfolded": []})
    page.settle()
    assert [row["tick"] for row in page.rows()] == ["false"] * 3
    page.widget.update(_ticked={"shape": 1, "rows": [1, 10**6]})
    assert [row["tick"] for row in page.rows()] == ["mixed", "true", "false"]
    assert page.widget.errors == []
