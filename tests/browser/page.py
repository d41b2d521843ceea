"""A notebook in JupyterLab or Notebook 7 as a user has it: open it, run cells, read and see what they show.

Reads go to the document model, not to the page, wherever the page is not what a test is about: the model
is complete while the front end still draws.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

CHROMIUM_OPTIONS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-sandbox",  # the sandbox does not start as root, as in most containers
]

NOTEBOOK = "const doc = window.jupyterapp.shell.currentWidget;"
CELL = f"{NOTEBOOK} const cell = doc.context.model.cells.get(index);"
IDLE = f"""{NOTEBOOK}
    const kernel = doc && doc.context && doc.context.sessionContext.session?.kernel;
    const idle = kernel && kernel.connectionStatus === "connected" && kernel.status === "idle";"""

# A count left from an earlier run would pass for one of this run, and a fresh kernel starts at 1 again.
FORGET_COUNTS = """for (const cell of cells) if (cell.type === "code") cell.executionCount = null;"""


def write_notebook(path: Path, cells: list[str]) -> None:
    """Write a notebook of ``cells``; one that starts with ``%%markdown`` becomes a text cell."""
    made = [
        new_markdown_cell(source.removeprefix("%%markdown").lstrip())
        if source.startswith("%%markdown")
        else new_code_cell(source)
        for source in cells
    ]
    # With no kernel named, JupyterLab opens a dialog that asks for one.
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=made, metadata={"kernelspec": kernel}), path)


class NotebookPage:
    """One notebook, open in one page.

    Attributes:
        page: Playwright's page, for locators and clicks.
        console: What the page wrote to the browser's console.
        widget_errors: Uncaught errors that came through a widget's own module.
        outside_requests: Addresses off this machine that the page asked for; all were refused.
        websocket_bytes: How much the server has sent over websockets; take the difference of two readings.
    """

    def __init__(self, page, server, path: str) -> None:
        self.page = page
        self._server = server
        self._path = path
        self._address = ""
        self.console: list[str] = []
        self.widget_errors: list[str] = []
        self.outside_requests: list[str] = []
        self.websocket_bytes = 0
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", self._note_error)
        page.on("request", self._note_request)
        page.on("websocket", lambda socket: socket.on("framereceived", self._note_frame))

    def _note_error(self, error) -> None:
        # anywidget imports a widget's module from a blob: address; the front ends have errors of their own.
        stack = getattr(error, "stack", None) or str(error)
        if "blob:" in stack:
            self.widget_errors.append(stack)

    def _note_request(self, request) -> None:
        here = (self._server.url, self._server.url.replace("http", "ws", 1), "data:", "blob:")
        if not request.url.startswith(here):
            self.outside_requests.append(request.url)

    def _note_frame(self, frame: str | bytes) -> None:
        self.websocket_bytes += len(frame.encode() if isinstance(frame, str) else frame)

    def open(self, workspace: str) -> NotebookPage:
        """Load JupyterLab with just this notebook, and wait for its kernel."""
        # A workspace of its own and ?reset: no tabs of an earlier test are restored.
        self._address = f"{self._server.url}/lab/workspaces/{workspace}/tree/{self._path}"
        return self._load(f"?reset&token={self._server.token}")

    def open_in_notebook7(self) -> NotebookPage:
        """Load Notebook 7 with this notebook, and wait for its kernel."""
        self._address = f"{self._server.url}/notebooks/{self._path}"
        return self._load(f"?token={self._server.token}")

    def _load(self, query: str) -> NotebookPage:
        self.page.goto(self._address + query, wait_until="domcontentloaded")
        self._wait_until_ready()
        # The server keeps the theme that an earlier test has chosen.
        self.theme("JupyterLab Light")
        return self

    def _wait_until_ready(self) -> None:
        self.page.wait_for_function("() => window.jupyterapp?.restored")
        self.page.evaluate("() => window.jupyterapp.restored.then(() => true)")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        self.page.wait_for_function(f"() => {{ {IDLE} return Boolean(idle); }}")

    def reload(self) -> None:
        """Load the page anew as F5 does; the kernel lives on, what was not saved is lost."""
        # A document with changes would stop the browser with a question.
        self.page.evaluate(f"() => {{ {NOTEBOOK} doc.context.model.dirty = false; }}")
        self.page.goto(self._address, wait_until="domcontentloaded")
        self._wait_until_ready()

    def restart_kernel(self) -> None:
        """Restart the kernel without the dialog that asks for it; cells keep their outputs."""
        self.page.evaluate(
            f"""async () => {{ {NOTEBOOK}
                const {{ sessionContext }} = doc.context;
                await sessionContext.restartKernel();
                // The old kernel's "idle" can still stand; only the new one answers this.
                await sessionContext.session.kernel.requestKernelInfo();
            }}"""
        )
        self._wait_until_idle()

    def resize(self, width: int, height: int) -> None:
        """Give the window another size, in CSS pixels; it starts with 1280 by 900."""
        self.page.set_viewport_size({"width": width, "height": height})

    def command(self, name: str, **arguments: object) -> None:
        """Run one of the front end's own commands and wait until it is done."""
        self.page.evaluate(
            "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => true)",
            [name, arguments],
        )

    def run_all(self, seconds: float = 120) -> None:
        """Run every cell and wait until each has run and the kernel is idle."""
        self.page.evaluate(
            f"""() => {{ {NOTEBOOK} const {{ cells }} = doc.context.model; {FORGET_COUNTS}
                window.jupyterapp.commands.execute("notebook:run-all-cells"); }}"""
        )
        ran = "cell.type !== 'code' || !cell.sharedModel.getSource().trim() || cell.executionCount != null"
        self.page.wait_for_function(
            f"() => {{ {IDLE} return idle && [...doc.context.model.cells].every(cell => {ran}); }}",
            timeout=seconds * 1000,
        )

    def start_cell(self, index: int) -> None:
        """Begin to run one cell, again if it has run, and wait for nothing."""
        self.page.evaluate(
            f"""(index) => {{ {CELL} const cells = [cell]; {FORGET_COUNTS}
                doc.content.activeCellIndex = index; doc.content.deselectAll();
                window.jupyterapp.commands.execute("notebook:run-cell"); }}""",
            index,
        )

    def run_cell(self, index: int, seconds: float = 60) -> None:
        """Run one cell, again if it has run, and wait for the kernel's answer."""
        self.start_cell(index)
        self.page.wait_for_function(
            f"(index) => {{ {CELL} return cell.executionCount !== null; }}",
            arg=index,
            timeout=seconds * 1000,
        )

    def set_source(self, index: int, source: str) -> None:
        """Replace the source of one cell."""
        self.page.evaluate(
            f"([index, source]) => {{ {CELL} cell.sharedModel.setSource(source); }}", [index, source]
        )

    def outputs(self, index: int) -> list[dict]:
        """The outputs of one code cell, as nbformat writes them."""
        return self.page.evaluate(f"(index) => {{ {CELL} return cell.outputs.toJSON(); }}", index)

    def output_text(self, index: int) -> str:
        """What one code cell printed, returned as plain text, or raised."""
        return "".join(_plain_text(output) for output in self.outputs(index))

    def eventually(self, index: int, expected: str, seconds: float = 10) -> None:
        """Run a cell until it prints ``expected``.

        ipywidgets holds a trait's update back while an earlier one is unanswered, so a cell that is run
        right after quick clicks or keys can reach the kernel before the last of them does.
        """
        deadline = time.monotonic() + seconds
        self.run_cell(index)
        while self.output_text(index) != expected and time.monotonic() < deadline:
            self.page.wait_for_timeout(100)
            self.run_cell(index)
        assert self.output_text(index) == expected, self.output_text(index)

    def theme(self, name: str) -> None:
        """Change the theme, ``"JupyterLab Dark"``. The server remembers it: put it back."""
        self.command("apputils:change-theme", theme=name)
        # The body has no box of its own, so it never counts as visible.
        self.page.wait_for_selector(f"body[data-jp-theme-name='{name}']", state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def save(self) -> dict:
        """Save, and read the file that was written."""
        self.command("docmanager:save")
        return json.loads((self._server.root / self._path).read_text())

    def replace_file(self, notebook: dict) -> None:
        """Put another file in the place of the one that was saved, as who downloads one; see it with ``reload()``."""
        (self._server.root / self._path).write_text(json.dumps(notebook))

    def shot(self, path: Path) -> None:
        """Take a picture of what the window shows."""
        self.page.screenshot(path=path)


def _plain_text(output: dict) -> str:
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    text = output["text"] if output["output_type"] == "stream" else output["data"].get("text/plain", "")
    return text if isinstance(text, str) else "".join(text)
