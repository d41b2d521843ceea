"""The magics in a real kernel: what a saved notebook keeps, and what a front end is told."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ANSI = re.compile(r"\x1b\[[\d;]*m")

CELLS = {
    "load": "%load_ext metaviz",
    "net": """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x""",
    "build": "%%meta_build\ntorch.manual_seed(1)\nmodel = Net()\nmodel.layers[0].weight.shape",
    "tree": "%meta_tree model layers.1",
    "bound": "t = %meta_tree model\nt.tree.totals.numel",
    "plan": "%meta_materialize model layers.1 --dry-run",
    "some": "%meta_materialize model layers.1",
    "bar": "%config MetavizMagics.progress_after = 0\nr = %meta_materialize model layers.2 layers.3",
    "unload": "%meta_unload model layers.1",
    "refused": "%meta_tree model lairs",
    "broken": """%%meta_build
kept = 1

class Bad(Net):
    def __init__(self):
        super().__init__()
        self.view = torch.ones(3).view(2, 2)

bad = Bad()""",
    "after": "kept, 'bad' in globals(), torch.empty(1).device.type, torch.cuda.is_initialized()",
    "status": "%metaviz",
    "compile": "%%meta_build\nx = = 1",
    "gone": "%unload_ext metaviz\n[n for n in get_ipython().magics_manager.magics['line'] if 'meta' in n]",
}


class Notebook:
    """A notebook that has run; `outputs("name")` are those of one cell of `CELLS`."""

    def __init__(self, client) -> None:
        self.client = client
        self.replies: dict[str, str] = {}

    def outputs(self, name: str) -> list[dict]:
        return self.client.nb.cells[list(CELLS).index(name)].outputs

    def text(self, name: str) -> str:
        """All that a cell showed, as plain text."""
        parts = []
        for output in self.outputs(name):
            if output.output_type == "stream":
                parts.append(output.text)
            elif output.output_type == "error":
                parts.append("\n".join(output.traceback))
            else:
                parts.append(output.data["text/plain"])
        return ANSI.sub("", "\n".join(parts))


def environment(folder: Path) -> dict[str, str]:
    """For a kernel that finds this checkout and no settings of the developer's."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "IPYTHONDIR": str(folder)}


@pytest.fixture(scope="module")
def notebook(needs, tmp_path_factory):
    nbclient, nbformat = needs("nbclient"), needs("nbformat")
    folder = tmp_path_factory.mktemp("kernel")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=120,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )
    notebook = Notebook(client)
    client.on_cell_executed = lambda cell, cell_index, execute_reply: notebook.replies.update(
        {list(CELLS)[cell_index]: execute_reply["content"]["status"]}
    )
    with client.setup_kernel(env=environment(folder)):
        for index, cell in enumerate(client.nb.cells):
            client.execute_cell(cell, index)
        yield notebook


def test_a_build_shows_its_output_then_a_line_and_a_tree(notebook):
    result, line, tree = notebook.outputs("build")
    assert (result.output_type, result.data["text/plain"]) == ("execute_result", "torch.Size([64, 64])")
    assert line.text.startswith("model: Net, 33.3 K parameters, 130 KiB on meta, built in ")
    assert tree.output_type == "display_data"


def test_what_a_magic_answers_is_the_output_of_its_cell(notebook):
    for name, start in {
        "plan": "2 tensors, 16.2 KiB",
        "some": "materialized 2 tensors",
        "unload": "unloaded 2",
    }.items():
        (output,) = notebook.outputs(name)
        assert output.output_type == "execute_result"
        assert output.data["text/plain"].startswith(start)
    assert notebook.text("bound") == "33280"


def test_the_saved_notebook_keeps_the_last_state_of_the_progress(notebook):
    (bar,) = notebook.outputs("bar")
    assert bar.output_type == "display_data"
    assert re.fullmatch(r"32\.5 KiB on cpu in .* [KM]iB/s", bar.data["text/plain"])
    assert '<progress max="1" value="1"' in bar.data["text/html"]
    assert bar.data["text/plain"] in bar.data["text/html"]


def test_quick_work_leaves_no_bar(notebook):
    assert len(notebook.outputs("some")) == 1


def test_a_refusal_is_one_line_on_standard_error_and_fails_the_cell(notebook):
    (output,) = notebook.outputs("refused")
    assert output.name == "stderr"
    assert output.text.startswith("UsageError: ") and output.text.count("\n") == 1
    assert notebook.replies["refused"] == "error"


def test_a_failing_constructor_is_reported_as_by_an_ordinary_cell(notebook):
    (error,) = notebook.outputs("broken")
    assert error.output_type == "error"
    assert error.ename == "RuntimeError" and "shape" in error.evalue
    text = notebook.text("broken")
    assert "line 9" in text and "line 7, in Bad.__init__(self)" in text
    assert not re.search(r"metaviz[/\\]|run_cell_magic|interactiveshell|During handling", text)
    assert notebook.replies["broken"] == "error"


def test_names_survive_the_failure_and_nothing_stays_on_meta(notebook):
    assert notebook.text("after") == "(1, False, 'cpu', False)"


def test_a_cell_that_does_not_compile_shows_where_and_fails(notebook):
    assert [output.output_type for output in notebook.outputs("compile")] == ["error", "stream"]
    assert "line 2" in notebook.text("compile")
    assert notebook.replies["compile"] == "error"


def test_the_status_is_text_and_a_table(notebook):
    (output,) = notebook.outputs("status")
    assert {"text/plain", "text/html"} <= output.data.keys()
    assert re.search(r"model +Net, .* on meta, .* on cpu", output.data["text/plain"])


def test_unload_takes_every_magic_away(notebook):
    assert notebook.text("gone") == "[]"


@pytest.fixture(scope="module")
def kernel(needs, tmp_path_factory):
    """A running kernel with the model of `CELLS`, and a client that plays the front end."""
    manager, client = needs("jupyter_client.manager").start_new_kernel(
        kernel_name="python3", env=environment(tmp_path_factory.mktemp("kernel"))
    )
    try:
        for name in ("load", "net", "build"):
            assert client.execute(CELLS[name], reply=True, timeout=120)["content"]["status"] == "ok"
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_front_end_gets_completions_and_help(kernel):
    _, client = kernel

    def matches(line: str) -> list[str]:
        return client.complete(line, len(line), reply=True, timeout=60)["content"]["matches"]

    assert matches("%meta_tree mo") == ["model"]
    assert matches("%meta_materialize model layers.1") == ["layers.1"]
    assert matches("%meta_materialize model layers.1.") == ["layers.1.weight", "layers.1.bias"]
    assert "cpu" in matches("%meta_materialize model --device ")
    page = client.inspect("%meta_tree", 6, reply=True, timeout=60)["content"]
    assert page["found"] and "--depth" in page["data"]["text/plain"]


LOAD = """import json, os, struct

path, tensors, step = os.environ["IPYTHONDIR"] + "/big.safetensors", 64, 16 * 2**20
header = json.dumps({f"{k}.weight": {"dtype": "F32", "shape": [2048, 2048],
                                     "data_offsets": [k * step, (k + 1) * step]} for k in range(tensors)}).encode()
with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header)
    file.truncate(8 + len(header) + tensors * step)  # a hole: it takes no room on the disk
with metaviz.recording():
    big = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(tensors)))
%config MetavizMagics.progress_after = 0"""


def test_an_interrupt_while_a_checkpoint_is_read_leaves_the_model_as_it_was(kernel):
    manager, client = kernel
    assert client.execute(f"import metaviz\n{LOAD}", reply=True, timeout=120)["content"]["status"] == "ok"
    shown: list[str] = []
    request = client.execute("%meta_materialize big --checkpoint path", stop_on_error=False)
    while not shown or not shown[-1].startswith("stopped"):
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == request and "data" in message["content"]:
            shown.append(message["content"]["data"]["text/plain"])
            if len(shown) == 1:
                manager.interrupt_kernel()
    reply = client._recv_reply(request, timeout=60)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert re.fullmatch(r"read 16\.0 MiB of 1\.00 GiB, .*/s, .* left, at 0\.weight", shown[0])
    assert shown[-1].startswith("stopped by KeyboardInterrupt at ")
    assert shown[-1].endswith(": the model is as it was before")
    again = "assert all(w.is_meta for w in big.parameters())\n%meta_materialize big 0 --checkpoint path"
    assert client.execute(again, reply=True, timeout=60)["content"]["status"] == "ok"


def test_an_interrupt_from_the_front_end_leaves_nothing_behind(kernel):
    manager, client = kernel
    source = "%%meta_build\nhalf = Net()\nprint('now')\nimport time\ntime.sleep(100)\nnever = Net()"
    request = client.execute(source, stop_on_error=False)  # else the kernel may abort the check below
    message = client.get_iopub_msg(timeout=60)
    while message["msg_type"] != "stream" or message["parent_header"]["msg_id"] != request:
        message = client.get_iopub_msg(timeout=60)
    manager.interrupt_kernel()
    reply = client._recv_reply(request, timeout=60)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    check = "assert half.layers[0].weight.is_meta and 'never' not in globals() and not torch.empty(1).is_meta"
    assert client.execute(check, reply=True, timeout=60)["content"]["status"] == "ok"
