"""The house rules that a machine can read, each with a twin that proves that it can be broken."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "metaviz"

LAYERS = ["errors", "core", "views", "widgets", "magics"]  # each may import those before it
FOREIGN = {
    "errors": set(),
    "core": {"torch"},
    "views": set(),
    "widgets": {"IPython", "anywidget", "ipywidgets", "torch", "traitlets"},
    "magics": {"IPython", "ipywidgets", "torch", "traitlets"},
}
ONE_FILE_EACH = {
    "core/checkpoint.py": {"safetensors"},
    "core/devices.py": {"psutil"},
    "core/mt19937.py": {"numpy"},
    "views/table.py": {"pandas"},
}
HEAVY = ["IPython", "ipywidgets", "anywidget", "pandas", "transformers", "lightning", "timm", "accelerate"]
DOORS = {"load_ipython_extension", "unload_ipython_extension"}


def imports(node: ast.AST, package: list[str]) -> Iterator[str]:
    """Absolute dotted names that one statement or call imports, seen from inside ``package``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        start = ".".join([*base, *([node.module] if node.module else [])])
        # "from metaviz import core" imports a layer, "from metaviz.core import tree" a module of one.
        yield from (f"{start}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        match node.args:
            case [ast.Constant(value=str(name)), *_]:
                yield ".".join(package) + name if name.startswith(".") else name


def walk(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Every node with the names of the functions around it."""
    for child in ast.iter_child_nodes(node):
        yield child, inside
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from walk(child, (*inside, child.name) if is_function else inside)


def import_faults(path: str, source: str) -> list[str]:
    """What the imports of ``metaviz/<path>`` do that their layer may not."""
    package = ["metaviz", *Path(path).parts[:-1]]
    layer = Path(path).parts[0].removesuffix(".py")
    if layer not in (*LAYERS, "__init__"):
        return [f"{path} belongs to no layer"]
    judge = door_fault if layer == "__init__" else layer_fault
    faults = []
    for node, inside in walk(ast.parse(source)):
        for name in imports(node, package):
            if fault := judge(path, layer, name.split("."), inside):
                faults.append(f"{path}:{node.lineno} imports {name}: {fault}")
    return faults


def layer_fault(path: str, layer: str, name: list[str], inside: tuple[str, ...]) -> str | None:
    """Why a module of ``layer`` may not import ``name``, or None."""
    if name[0] == "metaviz":
        target = name[1] if name[1:] and name[1] in LAYERS else "__init__"
        if target == "__init__":
            return None if layer == "magics" else "the public door is for magics only"
        return None if LAYERS.index(target) <= LAYERS.index(layer) else f"{target} is above {layer}"
    allowed = FOREIGN[layer] | ONE_FILE_EACH.get(path, set()) | sys.stdlib_module_names
    return None if name[0] in allowed else f"{name[0]} has no place here"


def door_fault(path: str, layer: str, name: list[str], inside: tuple[str, ...]) -> str | None:
    """Why ``metaviz/__init__.py`` may not import ``name``, or None."""
    target = name[1] if name[0] == "metaviz" and name[1:] else name[0]
    if target == "magics":
        return None if DOORS.intersection(inside) else "magics load with the extension, not before"
    lazy_only = target in ("views", "widgets") or target in HEAVY
    return (
        "only inside a function, so that importing metaviz stays light" if lazy_only and not inside else None
    )


def package_files() -> dict[str, str]:
    """Path inside the package → source."""
    found = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert {"__init__.py", "errors.py"} <= found.keys()
    return found


def test_imports_point_down_only():
    assert [fault for path, source in package_files().items() for fault in import_faults(path, source)] == []


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("errors.py", "from metaviz.core import tape", "core is above errors"),
        ("core/plan.py", "from ..views import text", "views is above core"),
        ("core/plan.py", "from .. import views", "views is above core"),
        ("core/plan.py", "def late():\n    import metaviz.magics", "magics is above core"),
        ("core/plan.py", "import importlib\nimportlib.import_module('metaviz.views')", "views is above core"),
        ("core/plan.py", "from metaviz import plan", "for magics only"),
        ("core/tree.py", "if TYPE_CHECKING:\n    import pandas", "pandas has no place here"),
        ("core/tree.py", "from IPython.display import HTML", "IPython has no place here"),
        ("core/tree.py", "import ipywidgets", "ipywidgets has no place here"),
        ("core/tree.py", "import transformers", "transformers has no place here"),
        ("core/tree.py", "import numpy", "numpy has no place here"),
        ("core/tree.py", "import psutil", "psutil has no place here"),
        ("views/html.py", "import pandas as pd", "pandas has no place here"),
        ("views/text.py", "from ..widgets.tree import TreeWidget", "widgets is above views"),
        ("widgets/tree.py", "from ..magics import MetaMagics", "magics is above widgets"),
        ("helpers.py", "", "belongs to no layer"),
        ("__init__.py", "from .magics import MetaMagics", "load with the extension"),
        ("__init__.py", "def tree(model):\n    from . import magics", "load with the extension"),
        ("__init__.py", "from .widgets.tree import TreeWidget", "only inside a function"),
        ("__init__.py", "import pandas", "only inside a function"),
    ],
)
def test_an_import_that_points_up_is_found(path, source, fault):
    found = import_faults(path, source)
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/plan.py", "import json\nimport torch\nfrom . import tree\nfrom ..errors import MetavizError"),
        ("core/devices.py", "import psutil"),
        ("views/table.py", "import pandas as pd\nfrom metaviz.core.tree import ModuleTree"),
        ("magics.py", "import metaviz\nfrom IPython.core.magic import Magics\nfrom .widgets import tree"),
        (
            "__init__.py",
            "from .core.tree import tree\ndef load_ipython_extension(ip):\n    from . import magics",
        ),
        ("__init__.py", "def __getattr__(name):\n    from .widgets.tree import TreeWidget"),
    ],
)
def test_an_import_that_points_down_is_left_alone(path, source):
    assert import_faults(path, source) == []


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy modules are there in a new process after ``statement``."""
    code = f"import sys\n{statement}\nprint(*sys.modules.keys() & {set(HEAVY)})"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


def test_importing_metaviz_loads_nothing_of_jupyter_and_no_optional_library():
    assert loaded_by("import metaviz") == set()


def test_a_heavy_import_would_be_seen():
    assert "pandas" in loaded_by("import metaviz, pandas")


def prints(source: str) -> list[int]:
    """Lines that write to the standard streams."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "builtins.print"))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr"))
        or (isinstance(node, ast.ImportFrom) and node.module == "sys" and names(node) & {"stdout", "stderr"})
    ]


def names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def test_core_never_prints():
    core = {path: source for path, source in package_files().items() if path.startswith("core/")}
    assert {path: lines for path, source in core.items() if (lines := prints(source))} == {}


@pytest.mark.parametrize(
    "source", ["def f():\n    print(1)", "\nsys.stdout.write('1')", "\nfrom sys import stderr as out"]
)
def test_a_print_would_be_found(source):
    assert prints(source) == [2]


def too_long(path: str, source: str) -> list[str]:
    """Files of over 400 lines and functions of over 50, docstrings apart, with their lengths."""
    lines = source.count("\n")
    faults = [f"{path}: {lines} lines"] if lines > 400 else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                length -= node.body[0].end_lineno - node.body[0].lineno + 1
            if length > 50:
                faults.append(f"{path}: {node.name} has {length} lines")
    return faults


def test_files_and_functions_stay_short():
    assert [fault for path, source in package_files().items() for fault in too_long(path, source)] == []


def test_a_long_file_and_a_long_function_would_be_found():
    assert too_long("a.py", "x = 1\n" * 400) == []
    assert too_long("a.py", "x = 1\n" * 401) == ["a.py: 401 lines"]
    assert too_long("a.py", "def f():\n" + "    x = 1\n" * 49) == []
    assert too_long("a.py", "def f():\n" + "    x = 1\n" * 50) == ["a.py: f has 51 lines"]
    told = '    """Words.\n\n    More words.\n    """\n'
    assert too_long("a.py", "def f():\n" + told + "    x = 1\n" * 50) == ["a.py: f has 51 lines"]


def ruff(*arguments: str, source: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, input=source, cwd=ROOT, capture_output=True, text=True)


def test_the_code_is_linted_and_public_names_have_docstrings(needs):
    needs("ruff")
    checked = ruff("check", "--no-cache", "--output-format=concise", ".")
    assert checked.returncode == 0, checked.stdout


def test_the_code_is_formatted(needs):
    needs("ruff")
    checked = ruff("format", "--no-cache", "--check", "--output-format=concise", ".")
    assert checked.returncode == 0, checked.stdout


def test_a_public_function_without_a_docstring_would_be_found(needs):
    needs("ruff")
    source = '"""A module."""\n\n\ndef look(model):\n    return model\n'
    checked = ruff("check", "--no-cache", "--stdin-filename", "metaviz/core/look.py", "-", source=source)
    assert checked.returncode == 1
    assert "D103" in checked.stdout


MACHINE_PATH = re.compile(
    r"""(?<![\w.~/$}-])                                   # not the middle of an address or another path
        (?: /(?:home|mnt|opt|root|srv|tmp|Users|work|workspace)/[\w.-]
          | [A-Z]:\\+Users\\ )""",
    re.VERBOSE,
)


def machine_paths(text: str) -> list[int]:
    """Numbers of the lines that name a folder of somebody's machine."""
    return [number for number, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)]


def test_no_file_names_a_path_of_a_machine(checkout):
    texts = {
        path: path.read_bytes().decode("utf-8", "replace") for path in checkout if path != Path(__file__)
    }
    assert ROOT / "pyproject.toml" in texts
    found = {str(path.relative_to(ROOT)): machine_paths(text) for path, text in texts.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    ['"/home/ada/model.pt"', "see /tmp/x", "File /opt/venv/lib/x.py", "C:\\Users\\ada", "=/root/.cache"],
)
def test_a_path_of_a_machine_would_be_found(line):
    assert machine_paths(f"\n{line}") == [2]


@pytest.mark.parametrize(
    "line", ["https://host.example/home/x", "/usr/bin/env bash", "tests/tmp/x", "$HOME/work/x"]
)
def test_an_address_and_a_relative_path_are_left_alone(line):
    assert machine_paths(line) == []
