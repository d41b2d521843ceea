"""One browser and one server for the session; a fresh page, folder and kernel for each test."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser.fake import FakeWidget
from browser.page import CHROMIUM_OPTIONS, NotebookPage, write_notebook
from browser.server import LabServer

HERE = Path(__file__).parent
CALL_FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.browser)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call":
        item.stash[CALL_FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def chromium(needs, unavailable):
    playwright = needs("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        unavailable("no Chromium on PATH; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab_server(needs) -> Iterator[LabServer]:
    needs("jupyterlab")
    with LabServer() as server:
        yield server


@pytest.fixture(scope="session")
def shots() -> Path:
    """The folder for pictures that a person should look at; git ignores it."""
    folder = HERE / "shots"
    folder.mkdir(exist_ok=True)
    return folder


def _context(chromium):
    """A fresh browser context; a request that leaves this machine is refused at once."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(60_000)
    context.route(re.compile(r"^https?://(?!127\.0\.0\.1[:/])"), lambda route: route.abort())
    return context


def _notebooks(
    chromium, server: LabServer, shots: Path, request, show: Callable[[NotebookPage, str], NotebookPage]
) -> Iterator[Callable[[list[str]], NotebookPage]]:
    """What ``lab`` and ``nb7`` share; ``show(notebook, slug)`` opens the page in its front end."""
    slug = re.sub(r"\W+", "-", request.node.name)
    context = _context(chromium)
    opened: list[NotebookPage] = []

    def open_notebook(cells: list[str]) -> NotebookPage:
        path = f"{slug}/{len(opened)}.ipynb"
        write_notebook(server.root / path, cells)
        opened.append(NotebookPage(context.new_page(), server, path))
        return show(opened[-1], slug)

    yield open_notebook
    if request.node.stash.get(CALL_FAILED, False):
        for index, notebook in enumerate(opened):
            notebook.shot(shots / f"failed-{slug}-{index}.png")
            print("\n".join(["browser console:", *notebook.console[-40:], *notebook.widget_errors]))
    context.close()
    server.shut_down_kernels()


@pytest.fixture
def lab(chromium, lab_server, shots, request) -> Iterator[Callable[[list[str]], NotebookPage]]:
    """``lab(cells)`` writes a notebook, opens it in JupyterLab and waits for its kernel.

    A request that leaves this machine is refused at once and noted in ``outside_requests``. Where the test
    fails, a picture of each page is kept in ``shots/`` and the browser's console is printed.
    """

    def show(notebook: NotebookPage, slug: str) -> NotebookPage:
        return notebook.open(workspace=f"{slug}-{os.getpid()}")

    yield from _notebooks(chromium, lab_server, shots, request, show)


@pytest.fixture
def nb7(chromium, lab_server, needs, shots, request) -> Iterator[Callable[[list[str]], NotebookPage]]:
    """``nb7(cells)`` does in Notebook 7 what ``lab(cells)`` does in JupyterLab."""
    needs("notebook")

    def show(notebook: NotebookPage, slug: str) -> NotebookPage:
        return notebook.open_in_notebook7()

    yield from _notebooks(chromium, lab_server, shots, request, show)


@pytest.fixture
def fake(chromium, needs, shots, request) -> Iterator[Callable[..., FakeWidget]]:
    """``fake(esm, css, state)`` shows a widget's front end alone: a page, no server and no kernel.

    Further arguments are those of ``FakeWidget``. Each call has a page of its own. Where the test fails, a
    picture of each page is kept in ``shots/`` and its errors are printed.
    """
    needs("jupyterlab")  # its themes hold the colours
    slug = re.sub(r"\W+", "-", request.node.name)
    context = _context(chromium)
    # No server is there to be slow: what has not come within ten seconds will not come.
    context.set_default_timeout(10_000)
    shown: list[FakeWidget] = []

    def show(esm: str, css: str = "", state: dict | None = None, **options: object) -> FakeWidget:
        shown.append(FakeWidget(context.new_page(), esm, css, state, **options))
        return shown[-1]

    yield show
    if request.node.stash.get(CALL_FAILED, False):
        for index, page in enumerate(context.pages):
            page.screenshot(path=shots / f"failed-{slug}-{index}.png")
        print("\n".join(["page errors:", *(error for widget in shown for error in widget.errors)]))
    context.close()
