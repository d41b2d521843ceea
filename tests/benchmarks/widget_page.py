"""Times and sizes of widgets in a real JupyterLab page; what `tree_widget.py` and `tree_widget_peers.py` share.

Run nothing here. All times are of the page's own clock; a moment in the kernel is brought to it by the time of day,
as both are on one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "benchmarks")]
sys.path[:0] = FOLDERS

import psutil  # noqa: E402
from browser.page import CHROMIUM_OPTIONS, NotebookPage, write_notebook  # noqa: E402
from browser.server import LabServer  # noqa: E402

EMPTY = """import anywidget
class Empty(anywidget.AnyWidget):
    _esm = 'export default { render({ el }) { el.innerHTML = "<b class=bench-empty>here</b>"; } };'
"""
EMPTY_IS_THERE = "() => [...document.querySelectorAll('.bench-empty')]"
# When each cell begins and ends in the kernel, by the time of day.
HOOKS = """import gc, json, time
import metaviz
spans = []
begun = lambda info: spans.append([time.time() * 1000, None])
ended = lambda result: spans[-1].__setitem__(1, time.time() * 1000)
get_ipython().events.register("pre_run_cell", begun)
get_ipython().events.register("post_run_cell", ended)
"""
LAST_SPAN = "print(json.dumps(spans[-2]))"

# Before any script of the page: how much comes in, when, and when something is inflated.
INIT = """
window.bench = { frames: [], inflates: [] };
window.WebSocket = class extends window.WebSocket {
    constructor(...args) {
        super(...args);
        this.addEventListener("message", ({ data }) => window.bench.frames.push(
            [performance.now(), data.byteLength ?? data.size ?? data.length]));
    }
};
window.DecompressionStream = class extends window.DecompressionStream {
    constructor(...args) { super(...args); window.bench.inflates.push(performance.now()); }
};
// When the frame that is being made is out: what its callbacks post is handled after it.
window.bench.out = () => new Promise((done) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => done(performance.now());
    port2.postMessage(0);
});
window.bench.painted = () => new Promise(requestAnimationFrame).then(window.bench.out);
"""

# Run a cell and look, frame by frame, for an element that was not there before.
FIRST_PAINT = """async ([index, there, seconds]) => {
    const find = eval(there), before = new Set(find()), { bench } = window;
    const doc = window.jupyterapp.shell.currentWidget, cell = doc.context.model.cells.get(index);
    cell.executionCount = null;
    doc.content.activeCellIndex = index;
    doc.content.deselectAll();
    bench.frames.length = bench.inflates.length = 0;
    const start = performance.now();
    window.jupyterapp.commands.execute("notebook:run-cell");
    let rows = null;
    while (performance.now() - start < seconds * 1000) {
        await new Promise(requestAnimationFrame);
        if (find().some((each) => !before.has(each))) { rows = performance.now(); break; }
    }
    if (rows === null) return null;
    return { start, rows, paint: await bench.out(), origin: performance.timeOrigin };
}"""

ELEMENTS = """() => {
    let count = 0;
    const walk = (root) => root.querySelectorAll("*").forEach((each) => {
        count++;
        if (each.shadowRoot) walk(each.shadowRoot);
    });
    walk(document);
    return count;
}"""


class WidgetPage(NotebookPage):
    """A notebook whose cells are timed."""

    def first_paint(self, index: int, there: str, seconds: float = 60) -> dict[str, float] | None:
        """Run a cell until an element is painted that `there` did not list before; None if none comes in time.

        Returns:
            `paint` and `start` in ms, and `bytes` that came over websockets until the kernel was idle again.
        """
        found = self.page.evaluate(FIRST_PAINT, [index, there, seconds])
        if found is None:
            return None
        self.run_until_idle(index, seconds)
        found["frames"], found["inflates"] = self.page.evaluate("() => [bench.frames, bench.inflates]")
        found["bytes"] = sum(size for _, size in found["frames"])
        return found

    def run_until_idle(self, index: int, seconds: float = 60) -> None:
        """Wait until a cell that was started has run, and all that it has sent was handled."""
        self.page.wait_for_function(
            """(index) => { const doc = jupyterapp.shell.currentWidget;
                return doc.context.model.cells.get(index).executionCount !== null
                    && doc.context.sessionContext.session.kernel.status === "idle"; }""",
            arg=index,
            timeout=seconds * 1000,
        )
        self.page.wait_for_timeout(200)

    def ask(self, index: int, seconds: float = 300) -> object:
        """Run a cell that prints JSON."""
        self.run_cell(index, seconds)
        text = self.output_text(index)
        try:
            return json.loads(text)
        except ValueError:
            raise RuntimeError(f"cell {index}: {text[-2000:]}") from None

    def elements(self) -> int:
        """How many elements the page has, those in shadow roots included."""
        return self.page.evaluate(ELEMENTS)

    def heap(self) -> tuple[float, float]:
        """Bytes of JavaScript objects, and of array buffers beside them, after a collection."""
        if not hasattr(self, "_devtools"):
            self._devtools = self.page.context.new_cdp_session(self.page)
            self._devtools.send("HeapProfiler.enable")
            self._devtools.send("Performance.enable")
        for _ in range(2):
            self._devtools.send("HeapProfiler.collectGarbage")
        metrics = self._devtools.send("Performance.getMetrics")["metrics"]
        used = next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")
        return used, self._devtools.send("Runtime.getHeapUsage").get("backingStorageSize", 0.0)

    @contextlib.contextmanager
    def profile(self) -> Iterator[dict[str, float]]:
        """Milliseconds in the functions of widgets' modules, callees included, while the block runs."""
        devtools = self.page.context.new_cdp_session(self.page)
        devtools.send("Profiler.enable")
        devtools.send("Profiler.setSamplingInterval", {"interval": 200})
        devtools.send("Profiler.start")
        found: dict[str, float] = {}
        yield found
        found.update(_inclusive(devtools.send("Profiler.stop")["profile"]))
        devtools.detach()


def _inclusive(profile: dict) -> dict[str, float]:
    nodes = {node["id"]: node for node in profile["nodes"]}
    above = {child: node["id"] for node in profile["nodes"] for child in node.get("children", ())}
    total: dict[str, float] = {}
    for number, micros in zip(profile["samples"], profile["timeDeltas"], strict=True):
        names, each = set(), number
        leaf = nodes[number]["callFrame"]["functionName"]
        if leaf in ("(idle)", "(garbage collector)"):
            names.add(leaf)
        while each is not None:
            frame = nodes[each]["callFrame"]
            if frame["url"].startswith("blob:"):
                names.add(frame["functionName"] or "(anonymous)")
            each = above.get(each)
        for name in names:
            total[name] = total.get(name, 0) + micros / 1000
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))


@contextlib.contextmanager
def notebook(cells: list[str]) -> Iterator[WidgetPage]:
    """A notebook in a server and a browser of its own."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("There is no Chromium on PATH. Next, on Debian: apt-get install chromium")
    leave_nothing()
    # The kernel inherits it.
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    with LabServer() as server, sync_playwright() as driver:
        write_notebook(server.root / "bench.ipynb", cells)
        browser = driver.chromium.launch(executable_path=program, args=CHROMIUM_OPTIONS)
        context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        context.set_default_timeout(60_000)
        context.route(re.compile(r"^https?://(?!127\.0\.0\.1[:/])"), lambda route: route.abort())
        context.add_init_script(INIT)
        page = WidgetPage(context.new_page(), server, "bench.ipynb").open("bench")
        page.command("application:toggle-left-area")
        yield page
        browser.close()


def guarded(arguments: list[str], seconds: float, most: float = 8e9) -> str | dict:
    """What a script of this folder prints as JSON in its last line; words where it took too long or too much.

    Args:
        arguments: The script and its arguments. It runs in a process of its own, which is ended with all that it has
            started.
        seconds: How long it may take.
        most: How many bytes it and all it has started may use.
    """
    script, *others = arguments
    command = [sys.executable, str(Path(__file__).parent / script), *others]
    # What is ended leaves its folders: they are in one that is not.
    folder = tempfile.TemporaryDirectory(prefix="metaviz-bench-", ignore_cleanup_errors=True)
    inherited = os.environ | {"TMPDIR": folder.name}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=inherited)
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(running.stdout), daemon=True)
    reader.start()
    why, deadline = "", time.monotonic() + seconds
    leave_nothing()
    try:
        while running.poll() is None and not why:
            time.sleep(0.25)
            if time.monotonic() > deadline:
                why = f"not back after {seconds:.0f} s"
            elif _memory(running.pid) > most:
                why = f"ended at {most / 1e9:.0f} GB of memory"
    finally:
        if running.poll() is None:
            _end(running.pid)
        running.wait()
        folder.cleanup()
    reader.join(5)
    if why or running.returncode:
        return why or f"failed with status {running.returncode}"
    return json.loads(printed[-1])


def _family(number: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(number)
        return [parent, *parent.children(recursive=True)]
    return []


def _memory(number: int) -> int:
    total = 0
    for each in _family(number):
        with contextlib.suppress(psutil.Error):
            # What processes share is counted for each of them: a guard may be early.
            total += each.memory_info().rss
    return total


def _end(number: int) -> None:
    """End a process and all that it has started; stopped first, so that none of them starts another one."""
    stopped: list[psutil.Process] = []
    while found := [each for each in _family(number) if each not in stopped]:
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.suspend()
        stopped += found
    for each in stopped:
        with contextlib.suppress(psutil.Error):
            each.kill()
    psutil.wait_procs(stopped, timeout=10)


def leave_nothing() -> None:
    """Have who ends this script end its server and kernels too: they are in process groups of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
