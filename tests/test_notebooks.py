"""The notebooks run from top to bottom, and what is saved in them is what a reader sees on GitHub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def saved(request, needs):
    return needs("nbformat").read(request.param, as_version=4)


@pytest.fixture(scope="module")
def run(saved, needs):
    nbclient = needs("nbclient")
    needs("transformers")
    fresh = saved.copy()
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    # What is saved is read where no kernel is: GitHub refuses notebooks whose widgets have no state.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("METAVIZ_STATIC", "1")
        client = nbclient.NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(FOLDER)}})
        client.execute()
    return fresh


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell) -> str:
    """All text that a cell puts out."""
    return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def cell_with(notebook, source: str):
    return next(cell for cell in code(notebook) if source in cell.source)


def test_only_the_cells_that_show_a_mistake_end_in_one_and_in_a_few_lines(run):
    for cell in code(run):
        errors = [o for o in cell.outputs if o.output_type == "error"]
        assert errors == [], cell.source
        refused = [o for o in cell.outputs if o.get("name") == "stderr" and o.text.startswith("UsageError: ")]
        assert bool(refused) == ("raises-exception" in cell.metadata.get("tags", [])), cell.source
        assert all(o.text.count("\n") <= 4 for o in refused)


def only_in(notebook: str):
    return pytest.mark.parametrize("saved", [FOLDER / f"{notebook}.ipynb"], indirect=True, ids=[notebook])


@only_in("01_first_look")
def test_the_first_notebook_shows_what_its_text_promises(run):
    build = said(cell_with(run, "%%meta_build"))
    assert "model: LlamaForCausalLM, 70.6 B parameters, 263 GiB on meta" in build
    assert "80 × LlamaDecoderLayer" in build
    usual = said(cell_with(run, "to_empty"))
    assert "11 tensors hold whatever was in memory" in usual
    assert "instead of 0.02\n" in usual
    assert "output head still tied to the embedding: False" in usual
    taped = said(cell_with(run, "taped = metaviz.build"))
    assert "equal to the ordinary build, bit for bit: True" in taped
    assert "output head still tied to the embedding: True" in taped
    assert "does NOT fit" in said(cell_with(run, "metaviz.plan(model)"))
    assert "materialized 8 tensors, 576 MiB, on cpu" in said(cell_with(run, "--dtype bfloat16"))
    assert "1 … 78" in said(cell_with(run, "--depth 2"))
    assert said(cell_with(run, "attention = model")) == "(torch.Size([1, 8, 8192]), torch.bfloat16, True)"
    assert said(cell_with(run, "out = layer(")) == "(torch.Size([1, 8, 4096]), torch.bfloat16, True)"
    assert said(cell_with(run, "before = layer")).endswith("True")


@only_in("02_why_reset_parameters")
def test_the_second_notebook_predicts_what_lightning_does(run, needs):
    needs("lightning")
    raised = said(cell_with(run, "import _materialize_meta_tensors"))
    message, _, devices = raised.partition("\n\n")
    assert message.startswith("TypeError: Materialization requires that the `ViT.reset_parameters` method")
    assert devices.split().count("cpu") == 1
    assert devices.split().count("meta") == 10
    silent = said(cell_with(run, "import _materialize_distributed_module"))
    left = "cls_token attention.in_proj_weight attention.in_proj_bias"
    assert silent.endswith(f"never written: {left}\n")
    trouble = " ".join(said(cell_with(run, "%meta_tree model --blocked")).split())
    assert message in trouble
    assert "AttributeError: 'ViT' object has no attribute 'reset_parameters'" in trouble
    assert "ModelParallelStrategy leaves 3 tensors uninitialized" in trouble
    assert str(tuple(left.split())) in said(cell_with(run, "predicted = ")).replace("\n ", "")


@only_in("02_why_reset_parameters")
def test_the_second_notebook_tells_the_broken_contracts_apart(run):
    table = said(cell_with(run, "pd.DataFrame"))
    wrong = {"scaled.gamma", "moving.average", "rotary.inv_freq", "needy.weight"}
    wrong |= {f"normed.fc.parametrizations.weight.original{n}" for n in (0, 1)}
    rows = [line.split() for line in table.splitlines() if "True " in line or "False " in line]
    assert {row[0] for row in rows if row[1] == "False"} == wrong
    assert {row[0] for row in rows if row[1:3] == ["True", "False"]} == {
        "residual.norm.weight",
        "small.fc.weight",
    }
    assert said(cell_with(run, "ordinary = Gallery()")) == "True"
    assert "torch.nn.init.zeros_(self.cls_token)" in said(cell_with(run, "explain()"))
    patched = said(cell_with(run, "ViT.reset_parameters = reset_parameters"))
    assert patched.count("gets through") == 3
    assert patched.count("other values than in an ordinary build: attention.out_proj.bias") == 3
    assert "{'init_weights'} {True}" in said(cell_with(run, "v.faithful for v in"))


@only_in("03_real_weights")
def test_the_third_notebook_loads_real_weights(run):
    assert "104 tensors, 86.6 MiB" in said(cell_with(run, "%meta_checkpoint model"))
    assert "has 103 of 103 tensors that the model saves" in said(cell_with(run, "metaviz.match(bert"))
    assert "32 tensors, 14,195,712 of 90,856,960 bytes" in said(
        cell_with(run, '["encoder.layer.0", "encoder.layer.3"]')
    )
    assert said(cell_with(run, "file.get_tensor")).split("\n")[0] == "True"
    assert "torch.Size([1, 7, 384])" in said(cell_with(run, "file.get_tensor"))
    assert "167,510,364" in said(cell_with(run, "plan.memory"))
    assert said(cell_with(run, "def embedding")).split("\n")[0] == "True"
    head = said(cell_with(run, "BertForMaskedLM, config"))
    assert head.count("cls.predictions") == 5 and "replay: normal_ at" in head
    tree = said(cell_with(run, "%meta_tree bert --checkpoint"))
    assert "105 tensors: ○ 105 ready (103 from the checkpoint, 2 from replay)" in tree
    refused = said(cell_with(run, "%meta_materialize fresh"))
    assert "Nothing of the state dict fits the model" in refused and "key_map=[('student', '')]" in refused
    assert "has 103 of 103 tensors" in said(cell_with(run, "--key-map student="))
    assert (
        said(cell_with(run, "%meta_checkpoint model wide")).count("✗ does not fit   6  encoder.layer.*") == 3
    )
    refused = said(cell_with(run, "%meta_materialize wide"))
    assert "has the shape (384, 1536) in model.safetensors, as " not in refused
    assert "It has the shape (384, 1536) in model.safetensors, and (384, 2048) is wanted." in refused


@only_in("04_device_mesh")
def test_the_fourth_notebook_waits_plans_and_simulates(run, needs):
    needs("lightning")
    early = "Accessing the device mesh before processes have initialized is not allowed."
    assert said(cell_with(run, "strategy.device_mesh")) == f"RuntimeError: {early}\n"
    awaited = said(cell_with(run, "%meta_mesh strategy"))
    assert awaited.startswith("… waiting  data_parallel=1 × tensor_parallel=1") and early in awaited
    assert "No process group yet" in said(cell_with(run, "del strategy"))
    assert said(cell_with(run, "init_device_mesh")).startswith("● ready  dp=1 × tp=1, 1 rank, cpu")
    assert said(cell_with(run, "destroy_process_group")).startswith("✗ stale  dp=1 × tp=1")
    assert "that of rank 21: 20, 21, 22, 23; within hosts" in said(cell_with(run, "%meta_mesh pp=2"))
    assert "8 key-value heads cannot be divided among tp=16" in said(cell_with(run, "num_key_value_heads"))
    assert "multiplied should equal the world size (2)" in said(cell_with(run, "metaviz.mesh(wrong)"))
    assert "3.62 GiB of parameters and buffers in all" in said(cell_with(run, '"**.q_proj"'))
    column_wise = said(cell_with(run, "simulate=True"))
    assert re.search(r"^  1 +\[6:9, 0:16\] +\(3, 16\) +192 B$", column_wise, re.MULTILINE)
    assert re.search(r"^  5 +\[8:16, 6:12\] +\(8, 6\)", said(code(run)[-1]), re.MULTILINE)


def test_the_saved_outputs_are_those_of_a_run_and_name_no_machine(saved):
    for cell in code(saved):
        assert cell.execution_count is not None, cell.source
    assert any("text/html" in o.get("data", {}) for cell in code(saved) for o in cell.outputs)
    assert "widgets" not in saved.metadata
    for cell in saved.cells:
        text = cell.source + "".join(map(str, cell.get("outputs", [])))
        assert not re.search(r"/(home|root|tmp|opt|usr)/|site-packages", text), cell.source
