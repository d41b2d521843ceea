"""The mesh widget's front end alone: clicks and keys, what is marked at once and said, and no key for the notebook."""

from __future__ import annotations

import json

import pytest
from browser.axe import serious

import metaviz
from metaviz.widgets.mesh import MeshWidget

EVIL = "<img src=x onerror=alert(1)>"
# Boxes with a class, by their numbers.
HAVING = (
    """(root, kind) => [...root.querySelectorAll(`.mv-b.${kind} .mv-n`)].map((each) => each.textContent)"""
)
SIGNS = """root => Object.fromEntries([...root.querySelectorAll(".mv-b")]
    .map((box) => [box.querySelector(".mv-n").textContent, box.querySelector(".mv-sign")?.textContent ?? ""])
    .filter(([, sign]) => sign))"""


class MeshOnPage:
    """One view of a mesh widget in an empty page."""

    def __init__(self, widget) -> None:
        self.widget = widget
        self.page = widget.page
        self.root = widget.root().locator(".mv-mesh-widget")
        self.stage = self.root.get_by_role("application")
        self.told = self.root.locator(".mv-told")

    def having(self, kind: str) -> list[str]:
        return self.stage.evaluate(HAVING, kind)

    def signs(self) -> dict[str, str]:
        return self.stage.evaluate(SIGNS)

    def click(self, rank: int) -> None:
        self.stage.locator(".mv-n").get_by_text(str(rank), exact=True).click()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture
def mesh(fake, needs):
    """`mesh("dp=2,tp=4")` shows a mesh as its widget sends it; nobody answers."""
    needs("anywidget")

    def show(what, rank=None, colour="", theme="light", **plan):
        widget = MeshWidget(what if isinstance(what, metaviz.MeshLayout) else metaviz.mesh(what, **plan))
        widget.rank, widget.colour = rank, colour
        state = {name: value for name, value in widget.get_state().items() if name not in ("_esm", "_css")}
        state.pop("layout", None)
        widget.close()
        shown = fake(MeshWidget._esm, MeshWidget._css, json.loads(json.dumps(state)), theme=theme)
        return MeshOnPage(shown)

    yield show


def test_a_click_marks_the_rank_and_its_groups_at_once_by_hue_and_sign(mesh):
    page = mesh("pp=2,dp=2,tp=4", rank=0)
    assert page.having("mv-me") == ["0"]
    assert page.signs() == {"1": "●", "2": "●", "3": "●", "4": "■", "8": "▲"}
    page.click(14)
    assert page.widget.get("_place") == 14
    assert page.widget.saved == [{"_place": 14}]
    assert page.having("mv-me") == ["14"]
    assert page.having("mv-a0") == ["12", "13", "15"]
    assert page.signs() == {"12": "●", "13": "●", "15": "●", "10": "■", "6": "▲"}
    # The kernel has drawn the lines, and they are those of another rank.
    assert not page.stage.locator(".mv-links").is_visible()
    page.click(0)
    assert page.signs() == {"1": "●", "2": "●", "3": "●", "4": "■", "8": "▲"}
    assert page.stage.locator(".mv-links").is_visible()
    assert page.widget.errors == page.widget.outside_requests == []


def test_who_listens_is_told_rank_coordinate_and_host(mesh):
    page = mesh("dp=2,tp=4", ranks_per_host=4)
    assert page.told.get_attribute("role") == "status"
    assert page.told.inner_text() == "No rank is picked."
    page.click(6)
    assert page.told.inner_text() == "rank 6: dp=1, tp=2, host 1 (local rank 2)"
    page.press("ArrowLeft")
    assert page.told.inner_text() == "rank 5: dp=1, tp=1, host 1 (local rank 1)"
    described = page.stage.get_attribute("aria-describedby").split()
    assert page.told.get_attribute("id") in described
    keys = page.root.locator(".mv-keys")
    assert keys.get_attribute("id") in described
    assert keys.inner_text() == "Keys: ← → tp, ↑ ↓ dp"


# Keys on a mesh of 2 × 3 × 4 × 3 × 4 ranks, and the coordinate where they lead.
WALK = [
    ("ArrowRight", [0, 0, 0, 0, 0]),  # from nowhere to the first
    ("ArrowRight ArrowRight", [0, 0, 0, 0, 2]),
    ("ArrowDown", [0, 0, 0, 1, 2]),
    ("ArrowUp ArrowUp", [0, 0, 0, 2, 2]),  # round the end
    ("PageDown", [0, 0, 1, 2, 2]),
    ("PageUp PageUp", [0, 0, 3, 2, 2]),
    ("+", [0, 1, 3, 2, 2]),
    ("- -", [0, 2, 3, 2, 2]),
    ("Shift+ArrowRight", [1, 2, 3, 2, 2]),
    ("Shift+ArrowLeft", [0, 2, 3, 2, 2]),
    ("Shift+ArrowDown", [0, 2, 3, 2, 2]),  # there is no sixth axis
    ("End", [1, 2, 3, 2, 3]),
    ("ArrowRight", [1, 2, 3, 2, 0]),
    ("Home", [0, 0, 0, 0, 0]),
    ("ArrowLeft", [0, 0, 0, 0, 3]),
]
SIZES = [2, 3, 4, 3, 4]


def test_each_axis_has_its_keys_and_none_of_them_reaches_the_notebook(mesh):
    page = mesh("a=2,b=3,c=4,d=3,e=4")
    page.page.evaluate("() => { window.heard = []; addEventListener('keydown', (e) => heard.push(e.key)); }")
    page.stage.focus()
    seen = []
    for keys, _ in WALK:
        page.press(*keys.split())
        place, coordinate = page.widget.get("_place"), []
        for size in reversed(SIZES):
            coordinate.insert(0, place % size)
            place //= size
        seen.append(coordinate)
    assert seen == [where for _, where in WALK]
    page.press("d", "d", "a", "x", "Enter")
    assert page.page.evaluate("() => heard") == []
    assert page.stage.get_attribute("data-lm-suppress-shortcuts") == "true"
    assert page.root.locator(".mv-keys").inner_text() == (
        "Keys: ← → e, ↑ ↓ d, Page ↑ ↓ c, + − b, Shift ← → a"
    )
    page.press("Escape")
    assert page.page.evaluate("() => document.activeElement === document.body")


def test_keys_with_ctrl_or_alt_are_the_browsers(mesh):
    page = mesh("dp=2,tp=4", rank=5)
    page.stage.focus()
    page.press("Control+ArrowRight", "Alt+ArrowRight")
    assert page.widget.saved == []


def test_a_rank_that_is_folded_away_is_told_and_then_drawn_by_the_kernel(mesh):
    page = mesh("dp=600", rank=510)
    page.stage.focus()
    page.press("ArrowRight")
    assert page.widget.get("_place") == 511
    assert page.having("mv-me") == []
    assert page.told.inner_text() == "dp=511"
    layout = metaviz.mesh("dp=600")
    page.widget.update(_svg=metaviz.views.svg.svg(layout, rank=511, legend=False), _place=511)
    assert page.having("mv-me") == ["511"]
    assert page.told.inner_text() == "rank 511: dp=511"


def test_keys_scroll_the_drawing_to_the_rank_that_they_lead_to(mesh):
    page = mesh("pp=8,dp=32,cp=8,tp=8", rank=0)
    page.page.set_viewport_size({"width": 700, "height": 600})
    page.stage.focus()
    page.press("End")
    page.widget.update(
        _svg=metaviz.views.svg.svg(metaviz.mesh("pp=8,dp=32,cp=8,tp=8"), rank=16383, legend=False)
    )
    inner = page.stage.locator(".mv-me path").bounding_box()
    outer = page.stage.bounding_box()
    assert page.having("mv-me") == ["16383"]
    assert outer["x"] <= inner["x"] and inner["x"] + inner["width"] <= outer["x"] + outer["width"]
    assert outer["y"] <= inner["y"] and inner["y"] + inner["height"] <= outer["y"] + outer["height"]


def test_colour_and_mesh_are_chosen_from_lists_with_names(mesh):
    page = mesh("dp=2,tp=4")
    page.root.get_by_label("Colour by", exact=True).select_option(label="tp")
    assert page.widget.saved == [{"colour": "tp"}]
    assert not page.root.get_by_label("Mesh", exact=True).is_visible()
    page.widget.update(_choices=["small", "large"], _chosen="small")
    page.root.get_by_label("Mesh", exact=True).select_option(label="large")
    assert page.widget.saved[-1] == {"_chosen": "large"}


def test_signs_of_groups_come_back_once_the_marked_axis_has_passed_by(mesh):
    page = mesh("dp=2,tp=2", rank=0, colour="tp")
    assert page.signs() == {"0": "○", "1": "●", "2": "■", "3": "□"}
    page.click(3)
    assert page.signs() == {"0": "○", "1": "■", "2": "●", "3": "□"}
    page.click(0)
    assert page.signs() == {"0": "○", "1": "●", "2": "■", "3": "□"}


def test_a_name_is_text_wherever_it_is_shown(mesh):
    page = mesh({EVIL: 2, "a\nb": 2}, rank=1)
    dialogs = []
    page.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.click(2)
    assert page.told.inner_text() == rf"rank 2: {EVIL}=1, a\nb=0"
    assert page.root.locator("img, script").count() == 0
    page.root.get_by_label("Colour by", exact=True).select_option(label=EVIL)
    assert page.widget.saved[-1] == {"colour": EVIL}
    assert dialogs == page.widget.errors == page.widget.outside_requests == []


def test_the_drawing_is_downloaded_with_its_legend(mesh):
    page = mesh("dp=2,tp=2", rank=3)
    legend = metaviz.mesh("dp=2,tp=2").svg(rank=3)
    with page.page.expect_download() as download:
        page.root.get_by_role("button", name="Save as SVG").click()
        asked = next(each for each in page.widget.wait_for_sent(1) if each["do"] == "svg")
        page.widget.answer({"id": asked["id"], "ok": True, "svg": legend})
    assert download.value.suggested_filename == "mesh.svg"
    assert download.value.path().read_text(encoding="utf-8") == legend


def test_a_mesh_that_is_awaited_has_nothing_to_pick_and_says_the_next_step(mesh):
    page = mesh(metaviz.mesh(namespace={}))
    page.stage.focus()
    page.press("ArrowRight", "Home", "End")
    page.stage.locator(".mv-n").first.click()
    assert page.widget.saved == []
    step = page.root.get_by_role("group", name="the next step").inner_text()
    assert step.startswith('torch.distributed.init_process_group("gloo"')
    assert page.root.locator(".mv-title").inner_text() == "… waiting"
    assert page.told.inner_text() == page.root.locator(".mv-keys").inner_text() == ""
    assert not page.root.get_by_label("Colour by", exact=True).is_visible()


def test_a_view_that_is_closed_leaves_nothing_behind(mesh):
    page = mesh("dp=2,tp=4")
    page.widget.remove()
    assert page.page.evaluate("() => fakeWidget.model.listeners.length") == 0
    page.widget.set("_place", 3)
    assert page.widget.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [500, 1600])
@pytest.mark.parametrize("spec", ["pp=4,dp=4,tp=8", "pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=4"])
def test_people_who_use_a_keyboard_or_a_screen_reader_are_not_kept_out(mesh, shots, spec, width, theme):
    page = mesh(spec, rank=37, colour="tp", theme=theme, ranks_per_host=8)
    page.page.set_viewport_size({"width": width, "height": 1000})
    page.stage.focus()
    assert serious(page.page, ".mv-mesh-widget") == []
    page.page.screenshot(path=shots / f"mesh-alone-{spec.count('=')}d-{theme}-{width}.png", full_page=True)
