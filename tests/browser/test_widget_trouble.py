"""What cannot be done is said in the widget, in words; names from a model stay names, whatever they hold."""

from __future__ import annotations

from browser.axe import serious
from browser.treepage import TreeOnPage

CELLS = [
    "%load_ext metaviz\nimport torch, metaviz\nfrom torch import nn",
    r"""class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = Norm(), nn.Linear(8, 8)
        self.cache = torch.zeros(3)
        for name in ("<b onclick=alert(1)>bold</b>", "two\nlines", "\u05e2\u05d1\u202e", "🙂" * 3, "x" * 10_000, 'a"b'):
            self.add_module(name, nn.Linear(2, 2))
with torch.device("meta"):
    model = Net()""",
    "w = metaviz.show(model)\nw",
    "print(sum(p.is_meta for p in model.parameters()), w.selection)",
    """from metaviz.widgets import acting
materialize = acting.materialize
def full(*args, **options):
    raise MemoryError("cannot allocate 1 TiB")
acting.materialize = full""",
]
# Direction marks and line ends are spelled out; of what is long, the middle is left out.
SHOWN_NAMES = [
    "<b onclick=alert(1)>bold</b>",
    r"two\nlines",
    "\u05e2\u05d1\\u202e",
    "🙂🙂🙂",
    f"{'x' * 133}…{'x' * 66}",
    'a"b',
]


def test_trouble_is_told_in_words_and_hostile_names_stay_names(lab, shots):
    notebook = lab(CELLS)
    dialogs = []
    notebook.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    for cell in range(3):
        notebook.run_cell(cell)
    notebook.command("application:toggle-left-area")
    tree = TreeOnPage(notebook)
    tree.open("1 level")
    assert tree.labels() == ["Net", "cache", "norm", "head", *SHOWN_NAMES]
    # A long name gives way to the columns, not the other way round.
    assert tree.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert tree.root.locator("b, img").count() == 0

    tree.tick("Net")
    tree.plans("1 subtree, 432 B → cpu, fits, 14 tensors from reset, 2 blocked")
    assert tree.button("Materialize").is_disabled()
    blocked = tree.root.get_by_role("list", name="Blocked").get_by_role("listitem")
    why = "has no reset_parameters, and no tape knows the tensor.\nmodel = metaviz.build(type(model), *args)"
    assert blocked.all_inner_texts() == [f"cache Net {why}", f"norm.weight Norm {why}"]
    assert serious(notebook.page, ".mv-widget") == []
    tree.root.screenshot(path=shots / "widget-blocked.png")
    notebook.run_cell(4)
    tree.root.get_by_label("leave out what is blocked").check()
    tree.button("Materialize").click()
    assert (
        tree.outcome("error") == "✗ Out of memory, and the model is as it was before: cannot allocate 1 TiB"
    )
    tree.root.screenshot(path=shots / "widget-error.png")
    notebook.set_source(4, "acting.materialize = materialize")
    notebook.run_cell(4)
    tree.button("Materialize").click()
    assert tree.outcome().startswith("✓ materialized 14 tensors")
    tree.shows("norm", "blocked")
    notebook.eventually(3, "1 ['']\n")
    assert dialogs == notebook.widget_errors == notebook.outside_requests == []
