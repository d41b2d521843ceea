"""A tree widget from its first cell to its end: other cells, other views, busy kernels, and none at all."""

from __future__ import annotations

import json

import pytest
from browser.treepage import TreeOnPage

SETUP = "%load_ext metaviz\nimport torch, metaviz, time, threading\nfrom torch import nn"
BUILD = """%%meta_build --quiet
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)
model = Net()"""
SHOW = "w = metaviz.show(model)\nw"
ON_META = "print(sum(p.is_meta for p in model.parameters()))"
# The second tensor waits for the event: what goes on meanwhile goes on half-way, on any machine.
SLOW = """from metaviz.widgets import acting
go, materialize, steps = threading.Event(), acting.materialize, []
def slowly(*args, progress, **options):
    def step(done, total, path):
        steps.append(path)
        if len(steps) == 2:
            go.wait(60)
        time.sleep(0.12)
        progress(done, total, path)
    return materialize(*args, progress=step, **options)
acting.materialize = slowly"""


def test_what_other_cells_do_is_shown_in_every_view(lab):
    told = "print(w.selection, other.selection, repr(w.filter), w.expanded)"
    notebook = lab([SETUP, BUILD, SHOW, "w", "other = metaviz.show(model)\nother", "", told])

    def run(code: str) -> None:
        notebook.set_source(5, code)
        notebook.run_cell(5)
        assert notebook.output_text(5) == ""

    notebook.run_all()
    views = first, second, third = [TreeOnPage(notebook, number) for number in range(3)]
    run("metaviz.materialize(model, 'head');")
    for tree in views:
        tree.shows("head", "real")
        tree.row("Net").get_by_text("204 B on cpu", exact=True).wait_for()
    run("w.expanded = ['layers.*']")
    for tree in (first, second):
        tree.row("3").wait_for()
    assert "3" not in third.labels()
    run("w.selection = ['layers.1', 'head.weight']")
    for tree in (first, second):
        tree.root.get_by_text("1 subtree and 1 tensor, 1.06 KiB → cpu, fits").wait_for()
        assert {row["label"] for row in tree.rows() if row["tick"] == "true"} == {"1"}
    second.tick("2")
    notebook.eventually(6, "['layers.1', 'layers.2', 'head.weight'] [] '' ['', 'layers', 'layers.*']\n")
    assert {row["label"] for row in first.rows() if row["tick"] == "true"} == {"1", "2"}

    run("w.filter = 'is:real'")
    for tree in (first, second):
        tree.root.get_by_text("1 of 3", exact=True).wait_for()
        assert (tree.box.input_value(), tree.labels()) == ("is:real", ["Net", "head", "weight", "bias"])
    run("w.filter = ''")
    run("model.layers[1] = nn.Linear(16, 5)")
    for tree in (first, second):
        tree.shows("1", "real")
    run("del model.layers[2]")
    for tree in (first, second):
        tree.row("3").wait_for(state="detached")
        assert tree.labels() == ["Net", "layers", "0", "1", "2", "head"]
    notebook.eventually(6, "['layers.1', 'layers.2', 'head.weight'] [] '' ['', 'layers', 'layers.*']\n")
    run("w.close()")
    notebook.page.locator(".mv-widget").nth(1).wait_for(state="detached")
    assert notebook.page.locator(".mv-widget").count() == 1
    # What stays is the picture of what was there when the cell ran.
    assert notebook.page.locator(".mv-tree").first.get_by_text("layers.0 … 3", exact=True).is_visible()
    assert notebook.widget_errors == notebook.outside_requests == []


def test_work_goes_on_beside_cells_and_is_cancelled_without_a_trace(lab, shots):
    notebook = lab([SETUP, BUILD, SHOW, SLOW, ON_META, "", "print(6 * 7)"])
    for cell in range(4):
        notebook.run_cell(cell)
    tree = TreeOnPage(notebook)
    tree.tick("Net")
    tree.plans("1 subtree, 4.45 KiB → cpu, fits, 10 tensors from replay")
    tree.button("Materialize").click()
    tree.root.get_by_text("left, at layers.0.weight").wait_for()
    notebook.run_cell(6)
    assert notebook.output_text(6) == "42\n"
    tree.root.screenshot(path=shots / "widget-at-work.png")
    tree.button("Cancel").click()
    # The click and the cell come to the kernel by ways of their own; the work goes on only after both.
    notebook.set_source(6, "print(w._acting._stop.wait(20))\ngo.set()")
    notebook.run_cell(6)
    assert notebook.output_text(6) == "True\n"
    assert tree.outcome("cancelled").startswith("■ Cancelled at 1.06 KiB of 4.45 KiB, after layers.0.bias")
    notebook.run_cell(4)
    assert notebook.output_text(4) == "10\n"
    tree.root.screenshot(path=shots / "widget-cancelled.png")
    assert notebook.widget_errors == notebook.outside_requests == []


@pytest.mark.slow
@pytest.mark.parametrize("subshells", [True, False])
def test_a_click_while_a_cell_runs_is_done_during_it_or_after_it(lab, subshells):
    seconds = 4 if subshells else 14  # long enough for the widget to miss its kernel
    busy = f"began = time.time()\ntime.sleep({seconds})\nended = time.time()"
    notebook = lab([SETUP, "", BUILD, SHOW, busy, ON_META])
    if not subshells:
        kernel = "window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel"
        notebook.page.evaluate(f"() => {{ {kernel}.commsOverSubshells = 'disabled'; }}")
    for cell in (0, 2, 3):
        notebook.run_cell(cell)
    # When the work is done: the report is a trait of the widget, which tells who observes it.
    notebook.set_source(1, "at = []\nw.observe(lambda change: at.append(time.time()), 'report')")
    notebook.run_cell(1)
    tree = TreeOnPage(notebook)
    tree.tick("head")
    tree.plans("1 subtree, 204 B → cpu, fits, 2 tensors from replay")
    notebook.start_cell(4)
    tree.button("Materialize").click()
    if not subshells:
        tree.root.locator(".mv-note").get_by_text("No kernel answers").wait_for()
        assert "it does this as soon as it is free" in tree.outcome("error")
    assert tree.outcome().startswith("✓ materialized 2 tensors, 204 B")
    notebook.set_source(1, "print(at[0] < ended, began < at[0], len(at))")
    notebook.run_cell(1)
    assert notebook.output_text(1) == f"{subshells} True 1\n"
    notebook.run_cell(5)
    assert notebook.output_text(5) == "8\n"
    assert not tree.root.locator(".mv-note").is_visible()
    assert notebook.widget_errors == []


@pytest.mark.slow
def test_a_restarted_kernel_is_told_of_in_the_cell_and_a_reload_shows_the_static_tree(lab, shots):
    notebook = lab([SETUP, BUILD, SHOW])
    notebook.run_all()
    tree = TreeOnPage(notebook)
    notebook.save()
    notebook.restart_kernel()
    note = tree.root.locator(".mv-note")
    note.get_by_text("No kernel answers").wait_for()
    assert "run the cell again" in note.inner_text()
    tree.row("layers").locator(".mv-twist").click()  # can still be read
    assert "0 … 3" not in tree.labels()
    tree.root.screenshot(path=shots / "widget-no-kernel.png")
    notebook.run_all()
    again = TreeOnPage(notebook)
    again.tick("head")
    again.plans("1 subtree, 204 B → cpu, fits, 2 tensors from replay")
    assert not note.is_visible()
    notebook.reload()
    notebook.page.locator(".mv-tree").get_by_text("layers.0 … 3", exact=True).wait_for()
    notebook.shot(shots / "widget-reopened-restarted.png")
    assert notebook.widget_errors == notebook.outside_requests == []


@pytest.mark.slow
def test_a_reload_beside_a_living_kernel_shows_the_widget_again(lab):
    notebook = lab([SETUP, BUILD, SHOW, "print(w.selection)"])
    notebook.run_all()
    notebook.save()
    notebook.reload()
    tree = TreeOnPage(notebook)
    tree.tick("head")
    notebook.eventually(3, "['head']\n")
    assert not notebook.page.locator(".mv-tree").is_visible()
    assert notebook.widget_errors == notebook.outside_requests == []


@pytest.mark.slow
def test_a_cell_that_is_run_again_closes_what_it_has_shown_before(lab):
    living = """import ipywidgets.widgets.widget as held
print(len(held._instances), sorted({thread.name for thread in threading.enumerate() if "metaviz" in thread.name}))"""
    notebook = lab([SETUP, BUILD, "metaviz.show(model)", living])
    notebook.run_all()
    once = notebook.output_text(3)
    for _ in range(3):
        notebook.run_cell(2)
    notebook.eventually(3, once)
    assert once == "2 []\n"
    assert TreeOnPage(notebook).labels()[0] == "Net"
    assert notebook.page.locator(".mv-widget").count() == 1


@pytest.mark.slow
def test_a_reopened_notebook_shows_the_static_tree_whether_trusted_or_not(lab, lab_server, needs, shots):
    notebook = lab([SETUP, BUILD, SHOW])
    notebook.run_all()
    TreeOnPage(notebook)
    saved = notebook.save()
    trusted = "() => window.jupyterapp.shell.currentWidget.context.model.cells.get(2).trusted"
    static = notebook.page.locator(".mv-tree")
    for trust in (True, False):
        if not trust:
            # Another text than the one that was signed when it was saved.
            notebook.replace_file(saved | {"metadata": saved["metadata"] | {"title": "from elsewhere"}})
        lab_server.shut_down_kernels()
        notebook.reload()
        static.get_by_text("layers.0 … 3", exact=True).wait_for()
        assert notebook.page.evaluate(trusted) is trust
        assert static.get_by_text("1,139 parameters, 4.45 KiB", exact=True).is_visible()
        assert notebook.page.locator(".mv-widget").count() == 0
        notebook.shot(shots / f"widget-reopened-{'trusted' if trust else 'untrusted'}.png")
    exporter = needs("nbconvert").HTMLExporter()
    page, _ = exporter.from_notebook_node(needs("nbformat").reads(json.dumps(saved), as_version=4))
    notebook.page.set_content(page, wait_until="domcontentloaded")
    assert static.get_by_text("layers.0 … 3", exact=True).is_visible()
    notebook.shot(shots / "widget-nbconvert.png")
