"""What `show` gives where: text, a static picture, or a widget in a real kernel whose front end is played."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from front import WAIT, unpack
from shell import new_shell
from trees import linear, stack

import metaviz
from metaviz.core.tree import ModuleTree
from metaviz.errors import BadMesh, UnknownPath

ROOT = Path(__file__).parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = """import metaviz, os, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

torch.manual_seed(3)
net = metaviz.build(Net)
torch.manual_seed(3)
ordinary = Net()"""


def test_without_a_kernel_a_model_is_its_tree():
    model = stack(2)
    shown = metaviz.show(model)
    assert type(shown) is ModuleTree
    assert str(shown) == str(metaviz.tree(model))
    assert metaviz.show(model, "layers.1").path == "layers.1"
    assert metaviz.show(shown) is shown
    assert metaviz.show(shown, "head").path == "head"
    assert type(metaviz.show(model, static=True)) is ModuleTree


def test_in_a_terminal_a_model_is_its_tree_too(tmp_path, monkeypatch):
    # A doctest that ran before leaves it there, and then IPython keeps its own from the user.
    monkeypatch.delattr(builtins, "_", raising=False)
    with new_shell(tmp_path) as shell:
        ran = shell(
            "import metaviz, torch\nmodel = torch.nn.Linear(2, 3, device='meta')\nmetaviz.show(model)"
        )
        assert type(ran.value) is ModuleTree
        assert "Linear" in ran.out
        assert 'metaviz.materialize(model, device="cpu")' in ran.out


def test_what_cannot_be_shown_is_refused_as_by_tree_and_mesh():
    with pytest.raises(UnknownPath, match="lairs"):
        metaviz.show(linear(), "lairs")
    with pytest.raises(ValueError, match="source"):
        metaviz.show(linear(), source="magic")
    with pytest.raises(BadMesh):
        metaviz.show("no mesh at all")


def loaded_by(statement: str) -> set[str]:
    """Which libraries of Jupyter are there in a new process after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules.keys() & {{'anywidget', 'ipywidgets', 'IPython'}})"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


def test_only_who_wants_a_widget_loads_jupyter():
    look = "import metaviz, torch\nmetaviz.tree(torch.nn.Linear(2, 2))._repr_html_()"
    assert loaded_by(f"{look}\nassert {{'show', 'TreeWidget'}} <= set(metaviz.__all__)") == set()
    assert loaded_by("import metaviz\nmetaviz.TreeWidget") == {"anywidget", "ipywidgets", "IPython"}


def test_the_front_end_is_one_module_that_loads_nothing():
    folder = Path(metaviz.__file__).parent / "widgets"
    sources = {path.name: path.read_text("utf-8") for path in folder.glob("*.js")}
    sent = [metaviz.TreeWidget._esm, metaviz.MeshWidget._esm]
    assert {"rows.js", "tree.js", "mesh.js"} <= sources.keys()
    assert [name for name, text in sources.items() if not any(text.strip() in esm for esm in sent)] == []
    for esm in sent:
        assert len(re.findall(r"^export default ", esm, re.MULTILINE)) == 1
        # The name space of SVG is an address, and nothing is fetched from it.
        addresses = set(re.findall(r"https?://[\w./-]+", esm)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set()
        assert (
            re.findall(r"^\s*import\b|\bimport\(|\bfetch\(|XMLHttpRequest|\beval\(", esm, re.MULTILINE) == []
        )
    for path in folder.glob("*.css"):
        assert not re.search(r"@import|url\((?!\s*[\"']?data:)", path.read_text("utf-8"))


class Cell:
    """What one run of a cell sent.

    Attributes:
        status: `"ok"` or `"error"`.
        outputs: The data of what it showed.
        opened: Comm → the first state of each widget of ours that it made.
        closed: The comms that it closed.
    """

    def __init__(self, status: str, messages: list[dict[str, Any]]) -> None:
        self.status = status
        self.messages = messages
        contents = [(each["msg_type"], each["content"]) for each in messages]
        self.outputs = [c["data"] for kind, c in contents if kind in ("display_data", "execute_result")]
        self.closed = [c["comm_id"] for kind, c in contents if kind == "comm_close"]
        self.opened = {
            c["comm_id"]: c["data"]["state"]
            for kind, c in contents
            if kind == "comm_open" and "_anywidget_id" in c["data"]["state"]
        }
        self.error = next((c["evalue"] for kind, c in contents if kind == "error"), None)
        self.text = "".join(c["text"] for kind, c in contents if kind == "stream")


class Kernel:
    """A real kernel, and its front end that is played."""

    def __init__(self, client) -> None:
        self.client = client

    def run(self, source: str, cell: str | None = None) -> Cell:
        """Run a cell, as JupyterLab does: with the id of the cell among the metadata."""
        content = {"code": source, "silent": False, "store_history": True, "user_expressions": {}}
        content |= {"allow_stdin": False, "stop_on_error": False}
        number = self._send("execute_request", content, {"cellId": cell} if cell else {})
        status = self.client._recv_reply(number, timeout=WAIT)["content"]["status"]
        found: list[dict[str, Any]] = []
        while True:
            message = self.client.get_iopub_msg(timeout=WAIT)
            if message["parent_header"].get("msg_id") != number:
                continue
            found.append(message)
            if message["content"].get("execution_state") == "idle":
                return Cell(status, found)

    def _send(self, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None) -> str:
        message = self.client.session.msg(kind, content, metadata=metadata)
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def says(self, comm: str, method: str, **content: Any) -> None:
        """Send a widget a message."""
        self._send("comm_msg", {"comm_id": comm, "data": {"method": method, **content}})

    def hears(self, comm: str, wanted) -> dict[str, Any]:
        """The next message of a widget for which `wanted(data, buffers)` is true."""
        while True:
            message = self.client.get_iopub_msg(timeout=WAIT)
            content = message["content"]
            if message["msg_type"] == "comm_msg" and content["comm_id"] == comm:
                found = wanted(content["data"], message.get("buffers", []))
                if found:
                    return found


@pytest.fixture(scope="module")
def kernel(needs, tmp_path_factory):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "IPYTHONDIR": str(tmp_path_factory.mktemp("kernel")),
        "METAVIZ_STATIC": "0",
    }
    start = needs("jupyter_client.manager").start_new_kernel
    manager, client = start(kernel_name="python3", env=environment)
    try:
        made = Kernel(client)
        ran = made.run(SETUP)
        assert ran.status == "ok", ran.error
        yield made
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def answer(data: dict[str, Any], buffers: Any) -> Any:
    return data["method"] == "custom" and data["content"]


def test_in_a_kernel_a_model_is_a_widget_below_its_static_twin(kernel):
    ran = kernel.run("metaviz.show(net)", "twin")
    ((comm, state),) = ran.opened.items()
    twin, widget = ran.outputs
    assert twin["text/html"].startswith(f'<div id="{state["_twin"]}"><div class="mv-tree">')
    assert "Net" in twin["text/plain"] and "3 × Linear" not in twin["text/plain"]
    assert "layers" in twin["text/html"]
    assert WIDGET not in twin
    assert widget[WIDGET]["model_id"] == comm
    assert widget["text/plain"] == "What can be clicked needs a running kernel: run this cell again."
    assert "text/html" not in widget
    (buffer,) = next(each["buffers"] for each in ran.messages if each["content"].get("comm_id") == comm)
    assert unpack(bytes(buffer)).paths[:3] == ["", "layers", "layers.0"]


def test_a_widget_with_a_name_is_shown_by_its_name_and_no_value_is_shown_twice(kernel):
    ran = kernel.run("w = metaviz.show(net, 'layers', depth=0)\nw", "named")
    assert [sorted(each) for each in ran.outputs] == [
        ["text/html", "text/plain"],
        [WIDGET, "text/plain"],
    ]
    ((comm, state),) = ran.opened.items()
    assert state["_opened"]["rows"] == []
    again = kernel.run("w", "elsewhere")
    assert again.opened == {} and again.closed == []
    assert again.outputs[1][WIDGET]["model_id"] == comm


def test_the_same_cell_again_closes_what_it_has_shown_before(kernel):
    (first,) = kernel.run("metaviz.show(net)", "again").opened
    (other,) = kernel.run("metaviz.show(net)", "another").opened
    again = kernel.run("metaviz.show(net)", "again")
    assert first in again.closed and other not in again.closed
    two = kernel.run(
        "from IPython.display import display\nfor k in range(2): display(metaviz.show(net))", "two"
    )
    assert len(two.opened) == 2 and two.closed == []
    closed = kernel.run("from IPython.display import display\ndisplay(metaviz.show(net))", "two").closed
    assert two.opened.keys() <= set(closed)


def test_without_the_id_of_a_cell_nothing_is_closed(kernel):
    assert kernel.run("metaviz.show(net)").opened
    assert kernel.run("metaviz.show(net)").closed == []


def test_where_widgets_are_turned_off_it_is_a_static_picture(kernel):
    for source in (
        "metaviz.show(net, static=True)",
        "os.environ['METAVIZ_STATIC'] = '1'\nmetaviz.show(net)",
        "%load_ext metaviz\n%meta_tree net",
        "os.environ['METAVIZ_STATIC'] = '0'\n%meta_tree --static net",
    ):
        ran = kernel.run(source, "static")
        assert ran.status == "ok", ran.error
        assert ran.opened == {}
        (shown,) = ran.outputs
        assert shown.keys() == {"text/plain", "text/html"}
        assert "<script" not in shown["text/html"]
    assert len(kernel.run("%meta_tree net", "static").opened) == 1


def test_a_click_changes_the_tensors_of_the_kernel_and_code_calls_the_model_by_its_name(kernel):
    ((comm, _),) = kernel.run("metaviz.show(net)", "click").opened.items()
    kernel.says(comm, "update", state={"_ticked": {"shape": 1, "rows": [1]}}, buffer_paths=[])
    plan = kernel.hears(
        comm,
        lambda data, _: (
            data["method"] == "update"
            and data["state"].get("_plan", {}).get("state") == "ready"
            and data["state"]["_plan"]
        ),
    )
    assert plan["call"] == 'metaviz.materialize(net, "layers", device="cpu")'
    kernel.says(comm, "custom", content={"id": "a", "do": "materialize", "shape": 1, "rows": [1]})
    said = kernel.hears(comm, answer)
    assert (said["id"], said["ok"]) == ("a", True)
    check = (
        "assert torch.equal(net.layers[1].weight, ordinary.layers[1].weight) and net.head.weight.is_meta\n"
        "metaviz.unload(net)"
    )
    assert kernel.run(check).status == "ok"


def test_after_a_cell_that_changes_the_model_the_tree_is_another_one(kernel):
    ((comm, _),) = kernel.run("model = metaviz.build(Net)\nmetaviz.show(model)", "follow").opened.items()
    changed = kernel.client.execute("model.layers[1] = nn.Identity()")

    def packed(data, buffers):
        return data["method"] == "update" and ["_payload"] in data["buffer_paths"] and bytes(buffers[0])

    found = unpack(kernel.hears(comm, packed))
    assert found.look("layers.1")[1] == "Identity"
    kernel.client._recv_reply(changed, timeout=WAIT)
    kernel.client.execute("del model")
    gone = kernel.hears(comm, lambda data, _: data["method"] == "update" and data["state"].get("_gone"))
    assert gone == "The model is gone: nothing else holds it. Run the cell that makes it again."


def test_when_all_widgets_are_closed_nothing_runs_after_cells_any_more(kernel):
    hooked = (
        "[each for each in get_ipython().events.callbacks['post_run_cell'] if 'metaviz' in each.__module__]"
    )
    kernel.run("metaviz.show(net)", "last")
    ran = kernel.run(f"print(len({hooked}))")
    assert ran.text == "1\n"
    closed = kernel.run(
        "from metaviz.widgets import notebook\nfor widget in list(notebook.live): widget.close()"
    )
    assert closed.status == "ok", closed.error
    assert kernel.run(f"print(len({hooked}), len(notebook.live))").text == "0 0\n"
