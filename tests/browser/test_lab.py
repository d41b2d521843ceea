"""The harness itself: what later tests rest on, each with the case that must not pass."""

from __future__ import annotations

WIDGET = """
import anywidget, traitlets

class Counter(anywidget.AnyWidget):
    _esm = '''
    export default { render({ model, el }) {
      const button = document.createElement("button");
      const paint = () => { button.textContent = `clicked ${model.get("clicks")} times`; };
      button.addEventListener("click", () => {
        if (model.get("broken")) throw new Error("broken on purpose");
        model.set("clicks", model.get("clicks") + 1);
        model.save_changes();
      });
      model.on("change:clicks", paint);
      paint();
      el.append(button);
    } };
    '''
    clicks = traitlets.Int(0).tag(sync=True)
    broken = traitlets.Bool(False).tag(sync=True)

counter = Counter()
counter
"""


def test_cells_run_and_their_outputs_can_be_read(lab, shots):
    notebook = lab(["%%markdown\n# Numbers", "print(6 * 7)", "[1, 2]", "{}['gone']"])
    notebook.run_cell(1)
    notebook.run_cell(2)
    notebook.run_cell(3)
    assert [notebook.output_text(index) for index in (1, 2, 3)] == ["42\n", "[1, 2]", "KeyError: 'gone'"]
    notebook.shot(shots / "cells.png")
    saved = notebook.save()
    assert [cell["cell_type"] for cell in saved["cells"]] == ["markdown", "code", "code", "code"]
    assert saved["cells"][1]["outputs"][0]["text"] == ["42\n"]


def test_a_click_reaches_the_kernel_and_its_answer_the_page(lab):
    notebook = lab([WIDGET, "print(counter.clicks)", "counter.clicks = 40"])
    notebook.run_all()
    notebook.page.get_by_text("clicked 40 times").click()
    notebook.page.get_by_text("clicked 41 times").wait_for()
    notebook.eventually(1, "41\n")
    assert notebook.widget_errors == []
    assert notebook.outside_requests == []


def test_an_error_in_a_widget_is_noticed(lab):
    notebook = lab([WIDGET.replace("Counter()", "Counter(broken=True)")])
    notebook.run_all()
    with notebook.page.expect_event("pageerror"):
        notebook.page.get_by_text("clicked 0 times").click()
    assert [error for error in notebook.widget_errors if "broken on purpose" in error]


def test_a_request_that_leaves_the_machine_is_refused_and_noticed(lab):
    notebook = lab(["from IPython.display import HTML\nHTML('<img src=\"http://example.invalid/x.png\">')"])
    with notebook.page.expect_event("requestfailed"):
        notebook.run_all()
    assert notebook.outside_requests == ["http://example.invalid/x.png"]


def test_each_test_starts_with_a_kernel_of_its_own(lab, lab_server):
    notebook = lab(["'counter' in globals()"])
    notebook.run_all()
    assert notebook.output_text(0) == "False"
    assert len(lab_server.request("GET", "kernels")) == 1


def test_the_dark_theme_can_be_looked_at(lab, shots):
    notebook = lab(["print('dark')"])
    notebook.theme("JupyterLab Dark")
    assert notebook.page.evaluate("() => document.body.dataset.jpThemeLight") == "false"
    notebook.shot(shots / "dark.png")
    notebook.theme("JupyterLab Light")
