"""The mesh widget from Python and from a browser that is played: traits, following from waiting to stale, its end."""

from __future__ import annotations

import gc
import sys
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator

import comm
import pytest
import traitlets
from front import Front
from ipywidgets.widgets.widget import _instances
from torch import distributed

import metaviz
from metaviz.core.layout import MeshLayout
from metaviz.errors import BadMesh
from metaviz.widgets import notebook
from metaviz.widgets.mesh import MeshWidget

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def front(needs) -> Iterator[Callable[..., Front]]:
    """`front("dp=2,tp=4")` shows a mesh and gives the browser's side of the widget."""
    needs("anywidget")
    made: list[Front] = []

    def show(what=None, plan=None, **options) -> Front:
        layout = metaviz.mesh(what, **(plan or {})) if isinstance(what, str | dict) else what
        made.append(Front(MeshWidget(layout, **options)))
        return made[-1]

    yield show
    for each in made:
        each.widget.close()


@pytest.fixture
def gloo() -> Iterator[Callable[[], object]]:
    """`gloo()` makes a group of this process alone, and a mesh of it; both are gone after the test."""
    hook = sys.excepthook
    assert not distributed.is_initialized()

    def start(names=("dp",)):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        return distributed.device_mesh.init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)

    yield start
    if distributed.is_initialized():
        distributed.destroy_process_group()
    sys.excepthook = hook


def marked(browser: Front) -> list[str]:
    """The numbers of the boxes that are marked as the picked one, in the drawing that the browser has."""
    drawing = ElementTree.fromstring(browser.state["_svg"])
    boxes = [each for each in drawing.iter() if "mv-me" in (each.get("class") or "").split()]
    return [box.find("{*}text").text for box in boxes]


def fact(browser: Front, head: str) -> str:
    return dict(browser.state["_facts"])[head]


def test_the_browser_is_sent_the_drawing_and_what_is_known(front):
    browser = front("dp=2,tp=4", {"rank": 5})
    state = browser.state
    assert state["_state"] == "planned"
    assert state["_title"] == "✎ planned  dp=2 × tp=4, 8 ranks, cuda"
    assert state["_axes"] == [["dp", 2, 1, "dp"], ["tp", 4, 0, "tp"]]
    assert (state["_place"], state["colour"], state["_choices"], state["_step"]) == (5, "", [], "")
    assert marked(browser) == ["5"]
    assert fact(browser, "tp") == "2 groups of 4; that of rank 5: 4, 5, 6, 7"
    assert repr(browser.widget) == "<MeshWidget: ✎ planned  dp=2 × tp=4, 8 ranks, cuda>"
    assert browser.widget.rank is None and browser.widget.mesh.coordinate == (1, 1)


def test_a_rank_that_is_set_from_code_is_marked_in_the_browser(front):
    browser = front("dp=2,tp=4")
    assert browser.state["_place"] == -1 and marked(browser) == []
    browser.widget.rank = 6
    assert browser.state["_place"] == 6 and marked(browser) == ["6"]
    assert fact(browser, "dp") == "4 groups of 2; that of rank 6: 2, 6"
    browser.widget.rank = None
    assert browser.state["_place"] == -1 and marked(browser) == []
    assert fact(browser, "dp") == "4 groups of 2; the first: 0, 4"


def test_a_place_that_is_picked_in_the_browser_is_the_rank_there(front):
    browser = front("dp=2,tp=2", {"ranks": [3, 1, 0, 2]})
    heard = []
    browser.widget.observe(lambda change: heard.append(change["new"]), "rank")
    browser.sets(_place=0)
    assert browser.widget.rank == 3 and marked(browser) == ["3"]
    browser.sets(_place=2)
    assert browser.widget.rank == 0 and marked(browser) == ["0"]
    assert heard == [3, 0]
    assert fact(browser, "dp") == "2 groups of 2; that of rank 0: 3, 0"


def test_a_place_that_is_not_there_is_not_taken_and_the_browser_is_told_the_true_one(front):
    browser = front("dp=2,tp=2", {"rank": 1})
    browser.sets(_place=3)
    browser.sets(_place=4)
    assert browser.widget.rank == 3 and browser.state["_place"] == 3
    browser.sets(_place=10**9)
    assert browser.widget.rank == 3 and browser.state["_place"] == 3


@pytest.mark.parametrize("rank", [8, -1])
def test_a_rank_that_is_not_on_the_mesh_is_refused_and_changes_nothing(front, rank):
    browser = front("dp=2,tp=4")
    browser.widget.rank = 2
    with pytest.raises(BadMesh, match=f"Rank {rank} is not on this mesh, which has 8 ranks from 0 to 7"):
        browser.widget.rank = rank
    assert browser.widget.rank == 2 and marked(browser) == ["2"]
    with pytest.raises(traitlets.TraitError):
        browser.widget.rank = "3"


def test_the_axis_to_colour_by_is_set_from_code_and_from_the_browser(front):
    browser = front("dp=2,tp=4")
    assert "mv-c0" not in browser.state["_svg"].partition("</style>")[2]
    browser.widget.colour = "tp"
    assert browser.state["colour"] == "tp"
    assert browser.state["_svg"].partition("</style>")[2].count("mv-b mv-c0") == 4
    browser.sets(colour="dp")
    assert browser.widget.colour == "dp"
    assert browser.state["_svg"].partition("</style>")[2].count("mv-b mv-c0") == 2
    browser.sets(colour="")
    assert browser.widget.colour == ""
    with pytest.raises(BadMesh, match=r"There is no axis 'pp'\. There are: dp, tp"):
        browser.widget.colour = "pp"
    assert browser.widget.colour == ""


def test_what_a_stale_browser_says_changes_nothing_and_spoils_no_later_drawing(front):
    browser = front("dp=2,tp=4")
    widget = browser.widget
    widget.colour = "dp"
    widget.set_state({"colour": "gone"})
    widget.set_state({"_place": 99})
    assert (widget.colour, widget.rank) == ("dp", None)
    widget.rank = 5
    assert marked(browser) == ["5"]
    with pytest.raises(BadMesh, match="There is no axis 'gone'"):
        widget.colour = "gone"
    assert widget.colour == "dp"


def test_axes_with_strange_names_can_be_coloured_by_too(front):
    browser = front({EVIL: 2, "a\nb": 2})
    assert browser.state["_axes"] == [[EVIL, 2, 1, EVIL], [r"a\nb", 2, 0, "a\nb"]]
    browser.sets(colour="a\nb")
    assert browser.widget.colour == "a\nb"
    assert browser.state["_svg"].partition("</style>")[2].count("mv-b mv-c0") == 2
    assert "<img" not in browser.state["_svg"]


@pytest.mark.parametrize("wish", ["ping", "look"])
def test_a_wish_is_answered_once(front, wish):
    browser = front("dp=2")
    number = browser.asks(wish)
    assert browser.answers(number) == [{"id": number, "ok": True}]


def test_the_drawing_to_download_has_a_title_and_a_legend(front):
    browser = front("dp=2,tp=2")
    browser.widget.rank = 3
    answer = browser.wish("svg")
    assert answer["ok"] and answer["svg"] == browser.widget.mesh.svg(rank=3)
    assert "● tp: 2, 3" in answer["svg"] and "● tp: 2, 3" not in browser.state["_svg"]


@pytest.mark.parametrize("message", [{"do": "dance"}, {}])
def test_an_unknown_wish_is_answered_with_an_error(front, message):
    browser = front("dp=2")
    browser.says("custom", content={"id": "view-0", **message})
    assert browser.answers("view-0") == [
        {
            "id": "view-0",
            "ok": False,
            "kind": "error",
            "text": f"The front end asks for {message.get('do')!r}, which is not known here.",
            "next": "",
        }
    ]


def test_a_picture_that_waits_turns_into_the_mesh_goes_stale_and_waits_again(front, gloo):
    names: dict[str, object] = {}
    browser = front(namespace=lambda: names)
    widget = browser.widget
    assert browser.state["_state"] == "waiting"
    assert browser.state["_step"].startswith("torch.distributed.init_process_group(")
    assert "this process was started alone" in fact(browser, "why")
    assert "this looks again after each cell" in fact(browser, "since")
    assert "A mesh is awaited" in browser.state["_svg"]

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    widget.follow()
    assert browser.state["_state"] == "waiting"
    assert "No name holds a mesh yet." in fact(browser, "why")
    assert browser.state["_step"].startswith("mesh = torch.distributed.device_mesh.init_device_mesh(")

    names["mesh"] = distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    widget.follow()
    assert browser.state["_title"] == "● ready  dp=1 × tp=1, 1 rank, cpu"
    assert (browser.state["_step"], browser.state["_place"], marked(browser)) == ("", 0, ["0"])
    assert "since" not in dict(browser.state["_facts"])
    told = len(browser.sent)
    widget.follow()
    assert len(browser.sent) == told

    distributed.destroy_process_group()
    widget.follow()
    assert browser.state["_state"] == "stale"
    assert fact(browser, "why").startswith("Its process group was destroyed")
    assert browser.state["_svg"].startswith('<svg class="mv-mesh mv-stale"')

    # A new group, whose names are those of the old one: the old mesh stays stale, the new one is there beside it.
    names["again"] = gloo()
    widget.follow()
    assert browser.state["_choices"] == ["again", "mesh"]
    assert (browser.state["_chosen"], browser.state["_state"]) == ("again", "ready")
    browser.sets(_chosen="mesh")
    assert browser.state["_state"] == "stale"

    names.clear()
    widget.follow()
    assert (browser.state["_state"], browser.state["_choices"], browser.state["_axes"]) == ("waiting", [], [])


def test_a_mesh_that_is_given_is_followed_without_being_kept_alive(front, gloo):
    mesh = gloo()
    browser = front(metaviz.mesh(mesh))
    assert browser.state["_state"] == "ready"
    distributed.destroy_process_group()
    browser.widget.follow()
    assert browser.state["_state"] == "stale"
    alive = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert alive() is None
    browser.widget.follow()
    assert browser.state["_title"] == "✗ stale  dp=1, 1 rank, cpu"


def test_a_mesh_that_was_found_among_names_goes_stale_in_its_picture(front, gloo):
    names = {"mesh": gloo()}
    browser = front(metaviz.mesh(namespace=names), namespace=lambda: names)
    assert browser.state["_state"] == "ready"
    distributed.destroy_process_group()
    browser.widget.follow()
    assert browser.state["_state"] == "stale"


def test_a_simulated_mesh_is_marked_so_and_stale_once_it_is_closed(front):
    hook = sys.excepthook
    with metaviz.mesh("dp=2,tp=4", simulate=True) as world:
        browser = front(world)
        assert browser.state["_state"] == "simulated"
        assert browser.state["_title"].startswith("≈ simulated  dp=2 × tp=4")
    browser.widget.follow()
    assert browser.state["_state"] == "stale"
    assert sys.excepthook is hook


def test_several_meshes_are_a_choice(front):
    names = {"small": metaviz.mesh("dp=2"), "large": metaviz.mesh("pp=2,tp=4")}
    browser = front(namespace=lambda: names)
    widget = browser.widget
    assert browser.state["_choices"] == ["small", "large"] and browser.state["_chosen"] == "small"
    assert widget.mesh.size == 2
    browser.sets(_chosen="large")
    assert widget.mesh.size == 8 and browser.state["_title"].startswith("✎ planned  pp=2 × tp=4")
    widget.rank, widget.colour = 7, "tp"
    widget.follow()
    assert (widget.mesh.size, widget.rank, widget.colour) == (8, 7, "tp")
    browser.sets(_chosen="small")
    # What the other mesh does not have is not kept.
    assert (widget.mesh.size, widget.rank, widget.colour) == (2, None, "")
    browser.sets(_chosen="tiny")
    assert widget.mesh.size == 2
    del names["small"]
    widget.follow()
    assert (widget.mesh.size, browser.state["_choices"]) == (8, [])


def test_a_plan_among_the_names_that_cannot_be_is_said_and_hides_nothing(front):
    class Dims:
        def __init__(self, tp):
            self.pp = self.cp = self.dp_shard = self.dp_replicate = 1
            self.tp = tp

    names: dict[str, object] = {"dims": Dims(0)}
    browser = front(namespace=lambda: names)
    assert browser.state["_state"] == "waiting"
    assert fact(browser, "note").startswith("dims: The size of 'tp' is 0")
    names["dims"] = Dims(4)
    browser.widget.follow()
    assert browser.widget.mesh.shape == (1, 1, 1, 1, 4)


def test_nothing_is_drawn_again_after_a_cell_that_changed_nothing(front):
    browser = front("pp=8,dp=32,cp=8,tp=8")
    browser.widget.rank = 5
    drawing = browser.state["_svg"]
    told = len(browser.sent)
    for _ in range(3):
        browser.widget.follow()
    assert len(browser.sent) == told and browser.widget._svg is drawing


def test_what_has_no_mesh_is_refused():
    with pytest.raises(BadMesh, match="An object of type int has no mesh"):
        MeshWidget(3)


def test_without_a_kernel_show_gives_the_layout_itself():
    layout = metaviz.show("dp=2,tp=4")
    assert isinstance(layout, MeshLayout) and layout.shape == (2, 4)
    assert metaviz.show(layout) is layout


def test_who_shows_no_widgets_gets_the_picture_and_the_text(front):
    widget = front("dp=2,tp=4").widget
    data = widget._repr_mimebundle_()
    data = data[0] if isinstance(data, tuple) else data
    assert data["text/html"] == widget.mesh._repr_html_()
    assert data["text/plain"] == str(widget.mesh)
    assert notebook.WIDGET in data


def test_a_widget_that_is_closed_is_forgotten(needs):
    needs("anywidget")

    def counts():
        gc.collect()
        return len(comm.get_comm_manager().comms), len(_instances), len(notebook.live)

    before = counts()
    gone = []
    for _ in range(200):
        widget = MeshWidget(metaviz.mesh("pp=2,dp=2,tp=2"))
        widget.rank = 3
        gone.append(weakref.ref(widget))
        widget.close()
        del widget
    assert counts() == before
    assert [each for each in gone if each() is not None] == []
