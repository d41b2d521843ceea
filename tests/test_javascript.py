"""The front ends are type-checked: with the types that their comments give, as strictly as TypeScript can."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import metaviz

STRICT = [
    "--allowJs",
    "--checkJs",
    "--noEmit",
    "--strict",
    "--target",
    "es2022",
    "--lib",
    "es2022,dom,dom.iterable",
]
WIDGETS = ["TreeWidget", "MeshWidget"]


@pytest.fixture
def tsc() -> str:
    found = shutil.which("tsc")
    if found is None:
        pytest.skip("no tsc on PATH, which comes with TypeScript and needs node; metaviz needs neither")
    return found


def complaints(tsc: str, folder: Path, source: str) -> list[str]:
    """What tsc finds wrong with a module."""
    path = folder / "widget.js"
    path.write_text(source, "utf-8")
    run = subprocess.run([tsc, *STRICT, path.name], cwd=folder, capture_output=True, text=True, timeout=300)
    found = run.stdout.splitlines()
    assert bool(run.returncode) == bool(found), run.stderr
    return found


@pytest.mark.parametrize("name", WIDGETS)
def test_the_files_of_a_front_end_fit_together_as_one_module(tsc, tmp_path, name, needs):
    needs("anywidget")
    assert complaints(tsc, tmp_path, getattr(metaviz, name)._esm) == []


def test_a_wrong_type_in_a_front_end_is_found(tsc, tmp_path, needs):
    needs("anywidget")
    wrong = metaviz.TreeWidget._esm.replace("const HEIGHT = 24;", "const HEIGHT = 'tall';")
    assert any("error TS2" in line for line in complaints(tsc, tmp_path, wrong))


@pytest.mark.parametrize("name", WIDGETS)
def test_a_front_end_asks_nobody_on_the_network_and_builds_no_markup_from_text(name, needs):
    needs("anywidget")
    source = getattr(metaviz, name)._esm
    asking = [
        "import ",
        "import(",
        "fetch(",
        "XMLHttpRequest",
        "WebSocket",
        "https://",
        "eval(",
        "new Function",
    ]
    assert [word for word in asking if word in source] == []
    markup = [
        word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write") if word in source
    ]
    assert markup == []
