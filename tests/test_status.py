"""`%metaviz`: what it says of the session, and that it starts nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shell import new_shell
from torch import nn

import metaviz
from metaviz.magics.status import MAGICS, Line, Page

ROOT = Path(__file__).parents[1]


@pytest.fixture
def shell(tmp_path):
    with new_shell(tmp_path) as shell:
        shell("%load_ext metaviz")
        shell("import torch\nfrom torch import nn")
        yield shell


def lines(page: Page) -> dict[str, str]:
    return {line.head: line.text for line in page.lines}


def test_versions_and_the_free_memory_of_the_cpu_are_there(shell):
    said = lines(shell("%metaviz").value)
    assert said["metaviz"].startswith(f"{metaviz.__version__}, torch {torch.__version__}, Python 3.")
    assert re.fullmatch(r".+, [\d,.]+ [KMGT]iB free of [\d,.]+ [KMGT]iB in all", said["cpu"])


def test_each_model_is_there_with_its_bytes_by_device(shell):
    shell("%%meta_build --quiet\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))")
    shell("plain = nn.Linear(8, 8)\nsecond_name = model\nnumber = 3")
    shell("%meta_materialize model 0")
    said = lines(shell("%metaviz").value)
    assert said["model"] == "Sequential, 30 parameters, 80 B on cpu, 40 B on meta"
    assert said["plain"] == "Linear, 72 parameters, 288 B on cpu"
    assert "second_name" not in said and "number" not in said


def test_a_session_without_a_model_says_how_to_build_one(shell):
    said = repr(shell("%metaviz").value)
    assert (
        "\nmodels   No name holds one yet.\n             %%meta_build\n             model = Net()\n" in said
    )


def test_many_models_are_counted(shell):
    shell("for i in range(25):\n    globals()[f'net{i}'] = nn.Linear(1, 1)")
    said = lines(shell("%metaviz").value)
    assert said["…"] == "and 5 more models"


def test_a_default_device_that_is_meta_is_warned_of(shell):
    assert "default device" not in lines(shell("%metaviz").value)
    with torch.device("meta"):
        page = shell("%metaviz").value
    (warning,) = [line for line in page.lines if line.warning]
    assert warning.text.startswith("meta: what torch makes outside of metaviz has no values")
    assert warning.code == "torch.set_default_device(None)"


def test_the_default_device_that_a_cell_has_set_is_seen():
    code = """
import torch
from metaviz.magics.status import status
torch.set_default_device("meta")
print([line.head for line in status({}).lines if line.warning])
torch.set_default_device(None)
print([line.head for line in status({}).lines if line.warning])
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert answer.stdout == "['default device']\n[]\n", answer.stderr


def test_looking_draws_no_number(shell, generators_stay):
    shell("model = nn.Linear(2, 2, device='meta')")
    assert shell("%metaviz").error is None
    assert shell("%meta_tree model").error is None


def test_a_device_that_is_not_started_is_not_asked():
    code = """
import torch
from metaviz.magics.status import free
print(free(torch.device("cuda:0")), torch.cuda.is_initialized())
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert answer.stdout == "free memory not asked, that would start CUDA False\n", answer.stderr


@pytest.mark.gpu
def test_the_way_to_a_tree_and_the_status_start_no_cuda(tmp_path):
    code = """
import torch
from shell import new_shell
with new_shell(".") as shell:
    for cell in ("%load_ext metaviz", "import torch", "%%meta_build\\nmodel = torch.nn.Linear(2, 2)",
                 "%meta_tree model", "%metaviz"):
        print(shell(cell).error, torch.cuda.is_initialized())
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert answer.stdout.splitlines() == ["None False"] * 5, answer.stderr


def test_help_has_an_example_of_every_magic_that_is_registered(shell):
    page = shell("%metaviz help").value
    ours = shell.ip.magics_manager.registry["MetavizMagics"].magics
    expected = [f"%%{name}" for name in ours["cell"]] + [f"%{name}" for name in ours["line"]]
    assert sorted(line.head for line in page.lines if line.head) == sorted(expected)
    assert all(line.code for line in page.lines)
    assert page.lines == MAGICS


def test_the_examples_of_the_help_run_one_after_the_other(shell, tmp_path, monkeypatch):
    stored = {
        f"layers.{k}.{name}": torch.ones(1, *more)
        for k in (0, 1)
        for name, *more in (("weight", 1), ("bias",))
    }
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    shell("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
          "        self.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])")  # fmt: skip
    for line in MAGICS:
        assert shell(line.code).error is None, line.code


def test_a_name_of_the_user_is_text_in_the_page():
    page = Page([Line("<b>net", "a & b", "x < 1")])
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: seen.append(tag)
    parser.feed(page._repr_html_())
    assert "b" not in seen
    assert "&lt;b&gt;net" in page._repr_html_() and "a &amp; b" in page._repr_html_()


def test_a_model_that_never_called_its_parent_is_no_obstacle(shell):
    shell("class Bare(nn.Module):\n    def __init__(self):\n        pass\nbare = Bare()")
    assert "bare" in lines(shell("%metaviz").value)
    assert isinstance(shell.names()["bare"], nn.Module)
