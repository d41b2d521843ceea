"""Trouble and explanations in a real JupyterLab: legible in both themes, and names from a model stay text."""

from __future__ import annotations

CELLS = [
    "%load_ext metaviz\nimport torch\nfrom torch import nn\nimport metaviz",
    """class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Norm()) for _ in range(12))
        self.add_module("<img src=x onerror=alert(1)>", Norm())
        nn.init.zeros_(self.blocks[11][0].weight)
        self.cache = [torch.zeros(3)]

with torch.device("meta"):
    plain = Net()
model = metaviz.build(Net)""",
    "%meta_tree plain --blocked",
    'metaviz.tree(model).explain("blocks.0.1")',
    "%meta_tree model --source reset",
]


def test_trouble_and_explanations_are_legible_in_both_themes(lab, shots):
    notebook = lab(CELLS)
    dialogs = []
    notebook.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    notebook.run_all()
    assert "Norm has no reset_parameters" in notebook.output_text(2)
    assert "13 modules, 13 tensors" in notebook.output_text(2)
    code = notebook.page.locator("pre", has_text="torch.nn.init.ones_(self.weight)").last
    code.scroll_into_view_if_needed()
    colour = "e => getComputedStyle(e).color"
    light = code.evaluate(colour)
    notebook.shot(shots / "trouble-light.png")
    notebook.theme("JupyterLab Dark")
    assert code.evaluate(colour) != light
    notebook.shot(shots / "trouble-dark.png")
    assert notebook.page.locator(".jp-OutputArea img").count() == 0
    assert dialogs == []
    assert notebook.outside_requests == []
