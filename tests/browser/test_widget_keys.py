"""The tree by keyboard alone, in JupyterLab and in Notebook 7, whose own keys are never pressed by it."""

from __future__ import annotations

import pytest
from browser.treepage import TreeOnPage

CELLS = [
    "%load_ext metaviz\nfrom torch import nn\nimport metaviz",
    """%%meta_build --quiet
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 10)
        self.add_module("<img src=x onerror=alert(1)>", nn.Linear(3, 3))
model = Net()""",
    "w = metaviz.show(model, depth=0)\nw",
    "print(w.selection)",
]
HOSTILE = "<img src=x onerror=alert(1)>"
# Keys, then the name of the row where they lead.
WALK = [
    ("Home", "Net"),
    ("ArrowRight", "Net"),  # opens
    ("ArrowRight", "embed"),  # goes in
    ("ArrowDown", "blocks"),
    ("ArrowUp", "embed"),
    ("End", HOSTILE),
    ("ArrowUp ArrowUp", "blocks"),
    ("ArrowRight ArrowRight", "0 … 2"),
    ("ArrowRight ArrowRight", "0"),
    ("ArrowRight ArrowRight", "attn"),
    ("ArrowLeft", "0"),  # attn is closed: to what it is in
    ("ArrowLeft", "0"),  # closes
    ("*", "0"),  # opens it and what is beside it
    ("ArrowDown ArrowDown", "mlp"),
    ("PageDown", HOSTILE),
    ("PageUp", "Net"),
    ("h", "head"),
    ("Home e m", "embed"),
]


@pytest.mark.parametrize("front_end", ["lab", "nb7"])
def test_the_whole_pattern_is_walked_and_the_notebook_takes_no_key(front_end, request):
    notebook = request.getfixturevalue(front_end)(CELLS)
    dialogs = []
    notebook.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    notebook.run_all()
    tree = TreeOnPage(notebook)
    cells = [cell["cell_type"] for cell in notebook.save()["cells"]]
    tree.tree.focus()
    seen = []
    for keys, _ in WALK:
        tree.press(*keys.split())
        seen.append((keys, tree.active()))
    assert seen == WALK

    tree.press("Home", "ArrowDown", " ", "Enter")
    tree.root.get_by_role("region", name="Details").get_by_text("embed", exact=True).wait_for()
    notebook.eventually(3, "['embed']\n")
    # What came into the page later keeps the notebook's keys off, too.
    tree.root.get_by_role("region", name="Details").get_by_role("button", name="Copy Next").focus()
    notebook.page.keyboard.press("b")
    assert [cell["cell_type"] for cell in notebook.save()["cells"]] == cells
    tree.press("Escape")
    assert not tree.root.get_by_role("region", name="Details").is_visible()
    # Each of these letters does something to cells in a notebook: adds, deletes, cuts, changes.
    tree.press(*"abddmxyz")
    assert tree.tree.evaluate("e => e === document.activeElement")
    assert [cell["cell_type"] for cell in notebook.save()["cells"]] == cells == ["code"] * 4
    assert tree.row(HOSTILE).locator("img").count() == 0 and tree.root.locator("img").count() == 0
    tree.press("Escape")
    assert not tree.tree.evaluate("e => e === document.activeElement")
    tree.press("/")
    notebook.page.keyboard.type("class:Linear mlp")
    tree.root.get_by_text("1 of 3", exact=True).wait_for()
    notebook.page.keyboard.press("Enter")
    tree.root.get_by_text("2 of 3", exact=True).wait_for()
    notebook.page.keyboard.press("Shift+Enter")
    tree.root.get_by_text("1 of 3", exact=True).wait_for()
    assert [cell["cell_type"] for cell in notebook.save()["cells"]] == cells
    assert dialogs == notebook.widget_errors == notebook.outside_requests == []
