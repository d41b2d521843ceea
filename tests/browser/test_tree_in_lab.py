"""The static tree in a real JupyterLab: it opens by click, follows the theme, and names from a model stay text."""

from __future__ import annotations

CELLS = [
    "%load_ext metaviz\nfrom torch import nn",
    """%%meta_build
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(12))
        self.add_module("<img src=x onerror=alert(1)>", nn.Linear(3, 3))
model = Net()""",
    "%meta_materialize model layers.3",
    "%meta_tree model --static",
]


def test_a_tree_opens_by_click_and_is_legible_in_both_themes(lab, shots):
    notebook = lab(CELLS)
    dialogs = []
    notebook.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    notebook.run_all()
    assert notebook.output_text(2).startswith("materialized 12 tensors")

    tree = notebook.page.locator(".mv-tree").last
    folded = tree.get_by_text("layers.4 … 11", exact=True)
    folded.wait_for()
    is_open = "e => e.closest('details').open"
    before = folded.evaluate(is_open)
    folded.click()
    assert folded.evaluate(is_open) != before

    assert tree.locator("img").count() == 0
    assert tree.get_by_text("<img src=x onerror=alert(1)>", exact=True).count() == 1
    assert dialogs == []
    name = tree.get_by_text("layers.3", exact=True)
    colour = "e => getComputedStyle(e).color"
    light = name.evaluate(colour)
    # JupyterLab gives code a background of its own: a column of grey boxes would drown the names.
    assert name.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"
    notebook.shot(shots / "tree-light.png")
    notebook.theme("JupyterLab Dark")
    assert name.evaluate(colour) != light
    notebook.shot(shots / "tree-dark.png")
    assert notebook.outside_requests == []
