"""Meshes and shardings as SVG: well formed, of bounded size, with the right marks, and readable without colour."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
import torch

import metaviz
from metaviz.core.layout import MeshLayout
from metaviz.core.sharding import Placement, Sharding
from metaviz.errors import BadMesh
from metaviz.views.svg import HUES, SIGNS, hue_of, sharding_svg, svg

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<img src=x onerror=alert(1)>"


class Drawing:
    """A drawing, read as XML."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.root = ElementTree.fromstring(text)
        boxes = [each for each in self.root.iter(f"{SVG}g") if "mv-b" in (each.get("class") or "").split()]
        self.boxes = {each.find(f"{SVG}text[@class='mv-n']").text: each for each in boxes}

    def having(self, kind: str) -> list[str]:
        """The numbers in the boxes of a class."""
        return [rank for rank, box in self.boxes.items() if kind in box.get("class").split()]

    def signs(self) -> dict[str, str]:
        """Rank → sign, of the boxes that have one."""
        found = {rank: box.find(f"{SVG}text[@class='mv-sign']") for rank, box in self.boxes.items()}
        return {rank: sign.text for rank, sign in found.items() if sign is not None}

    def links(self) -> Counter:
        """(hue, whether dashed) → how many lines."""
        kinds = [(each.get("class") or "").split() for each in self.root.iter(f"{SVG}path")]
        return Counter(
            (
                next(int(name[-1]) for name in kind if name[:4] == "mv-l" and name[4:].isdigit()),
                "mv-cross" in kind,
            )
            for kind in kinds
            if "mv-link" in kind
        )

    @property
    def words(self) -> list[str]:
        return ["".join(each.itertext()) for each in self.root.iter(f"{SVG}text")]


def test_this_rank_and_its_groups_are_marked_by_hue_and_by_sign():
    drawing = Drawing(metaviz.mesh("pp=2,dp=2,tp=4", rank=5)._repr_svg_())
    assert len(drawing.boxes) == 16
    assert drawing.having("mv-me") == ["5"]
    assert drawing.having("mv-a0") == ["4", "6", "7"]
    assert drawing.having("mv-a1") == ["1"]
    assert drawing.having("mv-a2") == ["13"]
    assert drawing.signs() == {"4": "●", "6": "●", "7": "●", "1": "■", "13": "▲"}
    assert drawing.boxes["13"].get("data-p") == "13"
    assert drawing.boxes["13"].find(f"{SVG}title").text == "rank 13: pp=1, dp=1, tp=1"


def test_the_legend_says_whose_groups_are_marked_and_lists_their_members():
    words = Drawing(metaviz.mesh("dp=2,tp=4", rank=5, ranks_per_host=4)._repr_svg_()).words
    assert words[0] == "✎ planned  dp=2 × tp=4, 8 ranks on 2 hosts (assumed 4 a host), cuda"
    assert words[-5:] == [
        "□ rank 5: dp=1, tp=1, host 1 (local rank 1) (this process)",
        "■ dp: 1, 5",
        "● tp: 4, 5, 6, 7",
        "- - 4 of 4 groups along dp cross hosts",
        "Hosts are shaded in turn; dashed lines leave a host.",
    ]
    other = Drawing(metaviz.mesh("dp=2,tp=4", rank=5).svg(rank=2)).words
    assert other[-3:] == ["□ rank 2: dp=0, tp=2", "■ dp: 2, 6", "● tp: 0, 1, 2, 3"]


def test_a_widget_has_no_legend_as_it_says_all_that_below():
    layout = metaviz.mesh("dp=2,tp=4", rank=5, ranks_per_host=4)
    words = Drawing(svg(layout, legend=False)).words
    assert [each for each in words if "this process" in each or each.startswith(("✎", "■ dp:"))] == []
    assert words[-1] == "Hosts are shaded in turn; dashed lines leave a host."


def test_a_long_group_is_told_by_its_first_members_its_last_and_its_number():
    words = Drawing(metaviz.mesh("dp=64", rank=3)._repr_svg_()).words
    assert words[-1] == "● dp: 0, 1, 2, 3 … 63 (64 ranks)"


def test_links_are_dashed_where_they_leave_a_host():
    crossing = Drawing(metaviz.mesh("dp=2,tp=4", rank=0, ranks_per_host=4)._repr_svg_())
    assert crossing.links() == {(0, False): 3, (1, True): 1}
    inside = Drawing(metaviz.mesh("dp=2,tp=4", rank=0, ranks_per_host=8)._repr_svg_())
    assert inside.links() == {(0, False): 3, (1, False): 1}
    half = Drawing(metaviz.mesh("dp=2,tp=4", rank=0, ranks_per_host=2)._repr_svg_())
    assert half.links() == {(0, False): 2, (0, True): 1, (1, True): 1}


def test_a_link_over_what_is_folded_away_is_dashed_if_anything_there_leaves_a_host():
    # Drawn are the first 511 places and the last one; before and behind the gap there are ranks of one host.
    ranks = [*range(8, 518), 0, *range(518, 606), 1]
    drawing = Drawing(metaviz.mesh("dp=600", rank=0, ranks=ranks, ranks_per_host=4)._repr_svg_())
    assert len(drawing.boxes) == 512
    # 128 hosts side by side, then rank 0, then the gap.
    assert drawing.links() == {(0, True): 127 + 1 + 1, (0, False): 511 - 129}


def test_hosts_are_shaded_in_turn():
    drawing = Drawing(metaviz.mesh("dp=2,tp=4", ranks_per_host=2)._repr_svg_())
    assert drawing.having("mv-shade") == ["2", "3", "6", "7"]
    assert Drawing(metaviz.mesh("dp=2,tp=4")._repr_svg_()).having("mv-shade") == []


def test_groups_along_an_axis_are_told_apart_by_colour_and_by_sign():
    drawing = Drawing(metaviz.mesh("dp=4,tp=2").svg(colour="tp"))
    assert [drawing.having(f"mv-c{hue}") for hue in range(4)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
        ["6", "7"],
    ]
    assert drawing.signs() == dict(zip("01234567", "○○□□△△◇◇", strict=True))
    assert "○ □ △ ◇ ☆ ✛ tell the 4 groups along tp apart." in drawing.words


def test_36_groups_differ_in_colour_or_sign():
    drawing = Drawing(metaviz.mesh("dp=36,tp=1").svg(colour="tp"))
    signs = drawing.signs()
    looks = {(signs[rank], next(h for h in range(6) if rank in drawing.having(f"mv-c{h}"))) for rank in signs}
    assert len(signs) == 32 and len(looks) == 32


@pytest.mark.parametrize(
    ("spec", "boxes", "left_out"),
    [
        ("pp=8,dp=32,cp=8,tp=8", 3 * 4 * 8 * 8, "15,616 of 16,384 ranks are folded away along pp, dp"),
        ("pp=16,dp=128,cp=8,tp=8", 3 * 4 * 8 * 8, "130,304 of 131,072 ranks are folded away along pp, dp"),
        ("dp=131072", 512, "130,560 of 131,072 ranks are folded away along dp"),
        ("dp=1024,tp=128", 32 * 32, "130,048 of 131,072 ranks are folded away along dp, tp"),
        ("pp=32,dp=64,tp=64", 8 * 8 * 16, "130,048 of 131,072 ranks are folded away along pp, dp, tp"),
    ],
)
def test_many_ranks_are_folded_with_exact_counts_and_the_drawing_stays_small(spec, boxes, left_out):
    layout = metaviz.mesh(spec, rank=12_345, ranks_per_host=8)
    text = layout.svg(colour=layout.names[-1])
    drawing = Drawing(text)
    assert len(drawing.boxes) == boxes <= 4000
    assert len(text.encode()) <= 500_000
    assert f"… {left_out}" in drawing.words
    assert drawing.having("mv-me") == ["12345"]


@pytest.mark.parametrize("rank", [0, 1, 6_000, 9_999, 16_383])
def test_the_picked_rank_is_never_folded_away_and_neither_are_the_ends_of_axes(rank):
    drawing = Drawing(metaviz.mesh("pp=8,dp=32,cp=8,tp=8").svg(rank=rank))
    assert drawing.having("mv-me") == [str(rank)]
    assert {"0", "16383"} <= drawing.boxes.keys()


@pytest.mark.parametrize(
    "name", [EVIL, "x" * 10_000, "a\nb", "&amp;", "\x00\x1b[31m", "\u202eabc", '"quoted"', "\ud800"]
)
def test_a_name_of_an_axis_is_text_and_nothing_else(name):
    layout = metaviz.mesh({name: 512, "tp": 2}, rank=1)
    for text in (layout._repr_svg_(), layout.svg(colour=name), layout[name]._repr_svg_()):
        drawing = Drawing(text)
        assert len(text.encode()) < 500_000
        kinds = {each.tag.removeprefix(SVG) for each in drawing.root.iter()}
        assert kinds <= {"svg", "style", "g", "title", "path", "text", "tspan"}
        assert not any(key.startswith("on") for each in drawing.root.iter() for key in each.attrib)
        assert all(word.isprintable() for word in drawing.words)


def test_a_sub_mesh_in_focus_is_underlined_and_the_other_axes_are_dimmed():
    drawing = Drawing(metaviz.mesh("pp=2,dp=2,tp=2")["dp", "tp"]._repr_svg_())
    spans = {each.text: each.get("class") for each in drawing.root.iter(f"{SVG}tspan") if each.get("class")}
    assert spans["pp (2)"] == "mv-dim mv-h2"
    assert spans["dp (2)"] == "mv-focus mv-h1"
    assert spans["tp (2)"] == "mv-focus mv-h0"
    assert "text-decoration:underline" in drawing.text
    plain = Drawing(metaviz.mesh("pp=2,dp=2,tp=2")._repr_svg_())
    assert {each.get("class") for each in plain.root.iter(f"{SVG}tspan") if each.text == "dp (2)"} == {
        "mv-strong mv-h1"
    }


def test_each_axis_says_its_sign_its_size_and_how_it_runs():
    words = Drawing(metaviz.mesh("pp=2,a=2,b=2,c=2,tp=1024")._repr_svg_()).words
    assert words[1:6] == ["★pp (2)panels", "◆a (2)panels", "▲b (2)floors", "■c (2)↓", "●tp (1,024)→"]
    assert Drawing(metaviz.mesh("dp=3")._repr_svg_()).words[1] == "●dp (3)→"


@pytest.mark.parametrize("state", ["planned", "simulated", "waiting", "ready", "stale"])
def test_the_state_is_said_in_the_drawing_and_to_screen_readers(state):
    plan = metaviz.mesh("dp=2,tp=2")
    drawing = Drawing(MeshLayout(plan.axes, plan.ranks, state)._repr_svg_())
    assert state in drawing.words[0]
    assert drawing.root.get("class") == f"mv-mesh mv-{state}"
    assert drawing.root.get("role") == "img"
    assert drawing.root.get("aria-label") == f"Device mesh dp=2 × tp=2, {state}: 4 ranks"


def test_ranks_that_are_not_on_the_mesh_are_said():
    assert "not on the mesh: 4, 5, 6, 7" in Drawing(metaviz.mesh("dp=2,tp=2", world=8)._repr_svg_()).words


def test_a_process_that_is_not_on_the_mesh_marks_nobody():
    plan = metaviz.mesh("dp=2,tp=2")
    drawing = Drawing(MeshLayout(plan.axes, plan.ranks, "ready", rank=7, world=8)._repr_svg_())
    assert drawing.having("mv-me") == [] and drawing.signs() == {} and not drawing.links()


@pytest.mark.parametrize(
    ("world", "rank", "boxes", "said"),
    [
        (None, None, ["?"] * 4, "A mesh is awaited; how many ranks there will be is not known."),
        (2, 1, ["0", "1"], "A mesh of 2 ranks is awaited. This process is rank 1."),
        (1, 0, ["0"], "A mesh of 1 rank is awaited. This process is rank 0."),
        (4096, None, [str(rank) for rank in range(16)], "A mesh of 4,096 ranks is awaited."),
    ],
)
def test_a_mesh_that_is_awaited_shows_as_many_places_as_are_known(world, rank, boxes, said):
    drawing = Drawing(MeshLayout((), (), "waiting", rank, world)._repr_svg_())
    numbers = [each.text for each in drawing.root.iter(f"{SVG}text") if each.get("class") == "mv-n"]
    assert numbers == boxes
    assert drawing.words[-1] == drawing.root.get("aria-label") == said
    assert ("… 4,080 more" in drawing.words) == (world == 4096)
    assert drawing.having("mv-me") == ([str(rank)] if rank is not None else [])


def test_where_there_can_be_no_mesh_none_is_promised():
    drawing = Drawing(MeshLayout((), (), "unavailable")._repr_svg_())
    assert drawing.words == ["✗ unavailable", "There will be no mesh here."]
    assert drawing.boxes == {}


def test_an_unknown_rank_or_axis_is_refused():
    with pytest.raises(BadMesh, match="Rank 9 is not on this mesh"):
        metaviz.mesh("dp=2,tp=4").svg(rank=9)
    with pytest.raises(BadMesh, match=r"There is no axis 'pp'\. There are: dp, tp"):
        metaviz.mesh("dp=2,tp=4").svg(colour="pp")


def test_the_fastest_axis_has_the_first_hue_and_a_seventh_begins_anew():
    layout = metaviz.mesh("a=1,b=1,c=1,d=1,e=1,f=1,g=1")
    assert [hue_of(layout, name) for name in "abcdefg"] == [0, 5, 4, 3, 2, 1, 0]
    assert len(HUES) == len(SIGNS) == len(set(HUES)) == len(set(SIGNS)) == 6


def cut(text: str) -> list[tuple[str, str]]:
    """What each box of a sharding says, and what it says under a pointer."""
    boxes = [each for each in ElementTree.fromstring(text).iter(f"{SVG}g") if each.get("class")]
    return [(each.find(f"{SVG}text").text, each.find(f"{SVG}title").text) for each in boxes]


def test_a_sharding_is_drawn_as_its_cuts_with_the_ranks_that_hold_each():
    layout = metaviz.mesh("dp=2,tp=2")
    placements = {"dp": Placement("shard", 0), "tp": Placement("shard", 1)}
    assert cut(sharding_svg(Sharding("", (8, 6), torch.float32, layout, placements))) == [
        ("0", "[0:4, 0:3], rank 0"),
        ("1", "[0:4, 3:6], rank 1"),
        ("2", "[4:8, 0:3], rank 2"),
        ("3", "[4:8, 3:6], rank 3"),
    ]
    rows = Sharding("", (5,), torch.float32, layout, {"tp": Placement("shard", 0)})
    assert cut(sharding_svg(rows)) == [("0, 2", "[0:3], ranks 0, 2"), ("1, 3", "[3:5], ranks 1, 3")]


def test_a_sharding_that_cannot_be_drawn_well_is_not():
    layout = metaviz.mesh("dp=2,tp=64")
    cube = Sharding("", (8, 8, 8), torch.float32, layout, {"dp": Placement("shard", 0)})
    many = Sharding("", (64, 2), torch.float32, layout, {"tp": Placement("shard", 0)})
    none = Sharding("", (0, 2), torch.float32, layout, {"tp": Placement("shard", 0)})
    assert sharding_svg(cube) == sharding_svg(many) == sharding_svg(none) == ""
