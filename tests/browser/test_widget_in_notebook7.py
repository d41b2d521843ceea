"""The tree widget in a real Notebook 7: ticked, brought to life, followed; and readable when it is opened again."""

from __future__ import annotations

from browser.axe import serious
from browser.treepage import TreeOnPage

CELLS = [
    "%load_ext metaviz\nimport torch, metaviz\nfrom torch import nn",
    """%%meta_build --quiet
torch.manual_seed(3)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)""",
    "w = %meta_tree model\nw",
    "print(w.selection, w.filter)",
    """torch.manual_seed(3)
ordinary = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)
filled = [name for name, tensor in model.named_parameters() if not tensor.is_meta]
print(len(filled), all(torch.equal(model.get_parameter(n), ordinary.get_parameter(n)) for n in filled))""",
]


def test_a_tree_is_ticked_and_brought_to_life_in_notebook_7(nb7, shots):
    notebook = nb7(CELLS)
    notebook.run_all()
    tree = TreeOnPage(notebook)
    tree.box.fill("linear1")
    tree.root.get_by_text("1 of 4", exact=True).wait_for()
    tree.button("Tick matches").click()
    chosen = [f"layers.{layer}.linear1" for layer in range(4)]
    notebook.eventually(3, f"{chosen} linear1\n")
    tree.plans("4 subtrees, 8.50 KiB → cpu, fits, 8 tensors from replay")
    tree.button("Materialize").click()
    assert tree.outcome().startswith("✓ materialized 8 tensors")
    notebook.run_cell(4)
    assert notebook.output_text(4) == "8 True\n"
    tree.shows("linear1", "real")

    notebook.set_source(3, "metaviz.unload(model, 'layers.0.linear1');")
    notebook.run_cell(3)
    tree.shows("linear1", "ready")
    notebook.theme("JupyterLab Dark")
    notebook.resize(1000, 1000)
    assert serious(notebook.page, ".mv-widget") == []
    notebook.shot(shots / "widget-notebook7-dark.png")
    notebook.theme("JupyterLab Light")
    notebook.save()
    notebook.restart_kernel()
    notebook.reload()
    static = notebook.page.locator(".mv-tree")
    static.get_by_text("layers.0 … 3", exact=True).wait_for()
    assert notebook.page.locator(".mv-widget").count() == 0
    assert notebook.widget_errors == notebook.outside_requests == []
