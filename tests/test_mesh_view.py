"""Meshes and shardings as text and as HTML without scripts."""

from __future__ import annotations

import dataclasses
import html.parser

import pytest
import torch

import metaviz
from metaviz.core.layout import Axis, MeshLayout
from metaviz.core.meshes import Meshes
from metaviz.core.sharding import Placement, Sharding
from metaviz.views.mesh import facts, slice_words, title

EVIL = "<img src=x onerror=alert(1)>"
TAGS = {
    "div",
    "style",
    "p",
    "b",
    "svg",
    "g",
    "title",
    "path",
    "text",
    "tspan",
    "dl",
    "dt",
    "dd",
    "pre",
    "code",
}
SUMMARY = "This is a plan: no process was started, and none is needed to look at it."


def text(layout: MeshLayout) -> list[str]:
    return str(layout).splitlines()


def grid(layout: MeshLayout) -> list[str]:
    """The lines between the title and what is known besides."""
    return [line for line in text(layout) if line.startswith("  ")]


class Page(html.parser.HTMLParser):
    """The tags, attributes and words of a piece of HTML."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data)


def test_a_mesh_of_one_axis_is_a_line_of_ranks():
    assert text(metaviz.mesh("dp=4")) == [
        "✎ planned  dp=4, 4 ranks, cuda",
        "   0 1 2 3",
        f"why  {SUMMARY}",
        "dp   1 group of 4; the first: 0, 1, 2, 3",
    ]
    assert grid(metaviz.mesh("dp=20")) == [
        "  " + "".join(f"{rank:>3}" for rank in range(16)) + " … 19",
    ]


def test_a_mesh_of_two_axes_is_a_grid_in_which_this_rank_is_marked():
    assert text(metaviz.mesh("dp=2,tp=4", rank=5, ranks_per_host=4)) == [
        "✎ planned  dp=2 × tp=4, 8 ranks on 2 hosts (assumed 4 a host), cuda",
        "   0 1 2 3",
        "   4*5 6 7",
        f"why      {SUMMARY}",
        "seen by  rank 5, dp=1, tp=1",
        "dp       4 groups of 2; that of rank 5: 1, 5; all of them cross hosts",
        "tp       2 groups of 4; that of rank 5: 4, 5, 6, 7; within hosts",
    ]


def test_further_axes_are_blocks_of_grids_with_their_place_above():
    assert grid(metaviz.mesh("pp=2,dp=2,tp=2", rank=6)) == [
        *("  pp=0", "   0 1", "   2 3", "  pp=1", "   4 5", "  *6 7"),
    ]
    four = grid(metaviz.mesh("a=2,pp=2,dp=2,tp=2"))
    assert four[::3] == ["  a=0, pp=0", "  a=0, pp=1", "  a=1, pp=0", "  a=1, pp=1"]
    five = grid(metaviz.mesh("pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=2"))
    assert five[-3:] == ["  pp=1, dp_replicate=1, dp_shard=1", "   28 29", "   30 31"]
    assert len(five) == 8 * 3


def test_what_does_not_fit_a_terminal_is_left_out_with_exact_counts():
    lines = grid(metaviz.mesh("pp=8,dp=32,tp=64"))
    assert lines[0] == "  pp=0"
    assert lines[1] == "  " + "".join(f"{rank:>6}" for rank in range(16)) + " … 63"
    assert lines[-2:] == ["  … 16 more rows", "  … 7 more blocks like that"]
    assert len(str(metaviz.mesh("pp=16,dp=128,cp=8,tp=8", ranks_per_host=8))) < 4000
    assert max(map(len, text(metaviz.mesh("dp=131072")))) < 200


def test_axes_of_size_1_and_custom_orders_are_drawn_as_they_are():
    assert grid(metaviz.mesh("pp=1,dp=1,tp=3")) == ["  pp=0", "   0 1 2"]
    assert grid(metaviz.mesh("dp=3,tp=1")) == ["   0", "   1", "   2"]
    assert grid(metaviz.mesh("dp=2,tp=2", ranks=[3, 10, 0, 2])) == ["    3 10", "    0  2"]


def test_ranks_that_are_left_out_are_said_to_be_idle():
    assert ("idle", "4, 5: not on the mesh") in facts(metaviz.mesh("dp=2,tp=2", world=6))
    many = dict(facts(metaviz.mesh("dp=2", world=64)))["idle"]
    assert many == "2, 3, 4 … 63 (62): not on the mesh"
    plan = metaviz.mesh("dp=2")
    away = dataclasses.replace(plan, state="ready", rank=5, world=6)
    assert ("this process", "rank 5, not on the mesh") in facts(away)
    assert "*" not in str(away)


def test_an_axis_says_its_backend_and_whether_it_is_the_whole_job():
    axes = (Axis("dp", 2, "gloo"), Axis("tp", 1, "nccl", True))
    assert dict(facts(MeshLayout(axes, (0, 1), "ready", rank=1))) == {
        "this process": "rank 1, dp=1, tp=0",
        "dp": "1 group of 2; that of this process: 0, 1; gloo",
        "tp": "2 groups of 1; that of this process: 1; it is the group of the whole job (WORLD), so never destroy it "
        "alone; nccl",
    }


def test_flattened_axes_and_the_axes_in_focus_are_named():
    layout = metaviz.mesh("pp=2,dp=2,cp=2").flattened(["dp", "cp"], "dp_cp")["dp_cp"]
    assert dict(facts(layout))["dp_cp"] == "dp and cp, flattened"
    assert dict(facts(layout))["in focus"] == "dp, cp"


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("unavailable", "✗ unavailable"),
        ("waiting", "… waiting  2 ranks"),
        ("ready", "● ready  2 ranks"),
        ("simulated", "≈ simulated  2 ranks"),
        ("stale", "✗ stale  2 ranks"),
    ],
)
def test_a_mesh_that_is_not_there_says_its_state_why_and_what_to_do(state, line):
    world = None if state == "unavailable" else 2
    layout = MeshLayout((), (), state, world=world, reason="It was so.", step="do_this()")
    assert text(layout) == [line, "why  It was so.", "Next: do_this()"]
    page = Page(layout._repr_html_())
    assert {line, "It was so.", "do_this()"} <= set(page.texts)


def test_a_planned_shape_that_is_awaited_is_drawn_with_its_state():
    layout = MeshLayout((Axis("dp", 2),), (0, 1), "waiting", reason="Not yet.", step="go()")
    assert text(layout) == [
        *(
            "… waiting  dp=2, 2 ranks, cuda",
            "   0 1",
            "why  Not yet.",
            "dp   1 group of 2; the first: 0, 1",
            "Next: go()",
        )
    ]


@pytest.mark.parametrize("name", [EVIL, "x" * 10_000, "a\nb", "\x1b[31m", "\u202e", "'\"&"])
def test_names_are_text_in_html_and_one_short_line_in_terminals(name):
    layout = metaviz.mesh({name: 2, "tp": 2}, rank=1, ranks_per_host=2)
    page = Page(layout._repr_html_())
    assert page.tags <= TAGS
    assert not any(attribute.startswith("on") for attribute in page.attributes)
    lines = text(layout)
    assert len(lines) == 7 and max(map(len, lines)) < 2000
    assert all(line.isprintable() for line in lines)
    assert len(layout._repr_html_()) < 40_000


def test_html_has_no_scripts_and_says_the_title_once():
    markup = metaviz.mesh("dp=2,tp=4", rank=5)._repr_html_()
    page = Page(markup)
    assert not page.tags & {"script", "iframe", "object", "img", "link"}
    assert "javascript:" not in markup and "http://" not in markup.replace("http://www.w3.org/2000/svg", "")
    assert page.texts.count("✎ planned  dp=2 × tp=4, 8 ranks, cuda") == 1
    # The members of groups are said in words below the drawing, and not in it again.
    assert [each for each in page.texts if "1, 5" in each] == ["4 groups of 2; that of rank 5: 1, 5"]


def test_several_meshes_are_drawn_below_each_other_with_their_names():
    found = Meshes({"mesh": metaviz.mesh("dp=2"), EVIL: metaviz.mesh("tp=4")})
    page = Page(found._repr_html_())
    assert "img" not in page.tags
    assert [each for each in page.texts if each in ("mesh", EVIL)] == ["mesh", EVIL]
    assert {title(each) for each in found} <= set(page.texts)


def test_a_sharding_says_each_slice_with_its_ranks_shape_and_bytes():
    layout = metaviz.mesh("dp=2,tp=2")
    sharding = Sharding("up.weight", (5, 4), torch.float32, layout, {"tp": Placement("shard", 0)})
    lines = str(sharding).splitlines()
    assert lines[0] == "up.weight  (5, 4) float32, 80 B, on dp=2 × tp=2"
    assert lines[-3:] == [
        "  ranks  slice       shape   bytes",
        "  0, 2   [0:3, 0:4]  (3, 4)  48 B",
        "  1, 3   [3:5, 0:4]  (2, 4)  32 B",
    ]
    page = Page(sharding._repr_html_())
    assert {"[0:3, 0:4]", "(3, 4)", "48 B", "[3:5, 0:4]", "(2, 4)", "32 B"} <= set(page.texts)
    assert "svg" in page.tags and "script" not in page.tags


def test_a_slice_in_several_runs_or_of_nothing_is_told_as_that():
    assert slice_words((((0, 2), (4, 6)), ((0, 3),))) == "[0:2+4:6, 0:3]"
    assert slice_words(((), ((0, 3),))) == "nothing"
    assert slice_words(()) == "[]"


def test_more_slices_than_can_be_read_are_counted():
    layout = metaviz.mesh("tp=64")
    sharding = Sharding("", (128,), torch.float32, layout, {"tp": Placement("shard", 0)})
    assert str(sharding).splitlines()[-1] == "  … 40 more slices"
    assert "… 40 more slices" in Page(sharding._repr_html_()).texts
