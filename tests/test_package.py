"""What is shipped: the wheel, the list of dependencies, the top level, and what mybinder.org is told."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import metaviz

ROOT = Path(__file__).parents[1]
BINDER = ROOT / "binder"
DEPENDENCIES = {"torch", "ipywidgets", "anywidget", "ipykernel", "pandas", "safetensors", "psutil"}
TOP_LEVEL = {
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "binder",
    "metaviz",
    "notebooks",
    "pyproject.toml",
    "tests",
}


def run(*command: str | Path, path: Path, cwd: Path) -> str:
    """What ``command`` prints, run with no program but its own to be found and no package index."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    answer = subprocess.run(
        command, cwd=cwd, env=kept | {"PATH": str(path), "PIP_NO_INDEX": "1"}, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def no_programs(tmp_path_factory) -> Path:
    """An empty folder to be PATH: no node, no npm, no git."""
    return tmp_path_factory.mktemp("no-programs")


@pytest.fixture(scope="module")
def wheel(needs, no_programs, tmp_path_factory) -> Path:
    needs("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, path=no_programs, cwd=ROOT)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def requirements(metadata) -> list[str]:
    """What a plain install asks for, without the extras."""
    return [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel, checkout):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if not name.startswith("torch_metaviz-")}
    assert inside == {
        str(path.relative_to(ROOT)) for path in checkout if path.is_relative_to(ROOT / "metaviz")
    }
    assert "metaviz/core/__init__.py" in inside
    assert [name for name in names - inside if name.endswith("licenses/LICENSE")]


def test_the_wheel_is_named_as_agreed(metadata):
    assert metadata["Name"] == "torch-metaviz"
    assert metadata["Version"] == metaviz.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_dependencies_are_the_agreed_ones(metadata):
    asked = requirements(metadata)
    assert {re.match(r"[\w-]+", line).group() for line in asked} == DEPENDENCIES
    assert "torch>=2.6" in asked
    # Lower bounds only: a notebook's environment has its own reasons for what is newest in it.
    assert [line for line in asked if not re.fullmatch(r"[\w-]+>=[\d.]+", line)] == []


def test_the_wheel_installs_and_imports_elsewhere_without_node(needs, wheel, no_programs, tmp_path):
    needs("pip")
    folder = tmp_path / "fresh"
    venv.create(folder, symlinks=os.name != "nt")
    variables = {"base": str(folder), "platbase": str(folder)}
    python = Path(sysconfig.get_path("scripts", "venv", variables)) / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", wheel, path=no_programs, cwd=tmp_path)

    # torch is taken from where the tests have it: the folder on the search path, but no .pth file in it,
    # so that an editable install of this checkout is not seen.
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import metaviz; print(metaviz.__version__); print(metaviz.__file__)"
    version, file = run(python, "-c", code, path=no_programs, cwd=tmp_path).splitlines()
    assert version == metaviz.__version__
    assert Path(file) == site / "metaviz" / "__init__.py"


def test_the_top_level_holds_only_the_agreed_names(checkout):
    names = {path.relative_to(ROOT).parts[0] for path in checkout}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_binder_installs_what_the_package_needs_from_conda_forge(needs, metadata):
    environment = needs("yaml").safe_load((BINDER / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    # conda-forge's plain "pytorch" may be a CUDA build, which does not fit into a Binder image.
    wanted = {line.replace("torch>=", "pytorch-cpu>=") for line in requirements(metadata)}
    listed = [line for line in environment["dependencies"] if isinstance(line, str)]
    by_pip = [line for part in environment["dependencies"] if isinstance(part, dict) for line in part["pip"]]
    assert wanted <= set(listed)
    extras = {line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist") if "'lab'" in line}
    assert len(extras) > 1
    assert extras <= {*listed, *by_pip}
    # repo2docker picks its base environment by this very spelling.
    assert [line for line in listed if re.fullmatch(r"python=3\.\d+", line)]


def test_binder_starts_its_server_with_one_thread_for_each_operation():
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS'], sys.argv[1:])"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [BINDER / "start", sys.executable, "-c", code, "an argument"]
    assert subprocess.check_output(command, env=environment, text=True) == "1 ['an argument']\n"


@pytest.mark.parametrize("script", ["binder/postBuild", "binder/start", ".ci/run"])
def test_a_script_is_executable_and_names_no_address(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert "://" not in path.read_text()
