"""The harness beyond JupyterLab: a widget without a kernel, axe, Notebook 7, restart and reload."""

from __future__ import annotations

import pytest
from browser.axe import serious

COUNTER = """
export default { render({ model, el }) {
  const button = document.createElement("button");
  const paint = () => { button.textContent = `clicked ${model.get("clicks")} times`; };
  button.addEventListener("click", () => {
    model.set("clicks", model.get("clicks") + 1);
    model.save_changes();
    model.send({ clicked: true }, undefined, [new Uint8Array([7])]);
  });
  model.on("change:clicks", paint);
  model.on("msg:custom", (content, buffers) => { button.title = `${content.say} ${buffers.length}`; });
  paint();
  el.append(button);
  return () => { document.body.dataset.cleaned = "yes"; };
} };
"""

WIDGET = f"""
import anywidget, traitlets

class Counter(anywidget.AnyWidget):
    _esm = '''{COUNTER}'''
    clicks = traitlets.Int(0).tag(sync=True)

counter = Counter()
counter
"""


def test_a_click_is_saved_once_and_both_views_follow_either_side(fake):
    widget = fake(COUNTER, state={"clicks": 1})
    second = widget.view()
    widget.root().get_by_role("button").click()
    assert second.inner_text() == widget.root().inner_text() == "clicked 2 times"
    assert (widget.saved, widget.sent, widget.sent_buffers) == (
        [{"clicks": 2}],
        [{"clicked": True}],
        [[b"\7"]],
    )
    widget.update(clicks=40, note="from Python")
    assert second.inner_text() == "clicked 40 times"
    assert len(widget.saved) == 1
    second.get_by_role("button").click()
    assert widget.wait_for_saved(2)[1] == {"clicks": 41}
    widget.answer({"say": "hello"}, [b"ab"])
    assert second.get_by_title("hello 1").count() == 1
    assert widget.errors == widget.outside_requests == []


def test_a_closed_view_runs_its_cleanup_and_hears_nothing_more(fake):
    widget = fake(COUNTER, state={"clicks": 1})
    second = widget.view()
    widget.page.evaluate("() => { window.kept = document.querySelectorAll('button')[1]; }")
    widget.remove(1)
    widget.set("clicks", 5)
    assert second.count() == 0
    assert widget.page.evaluate("() => [kept.textContent, document.body.dataset.cleaned]") == [
        "clicked 1 times",
        "yes",
    ]
    assert widget.root().inner_text() == "clicked 5 times"


def test_only_a_value_that_differs_is_a_change_and_is_saved(fake):
    listening = """
    window.heard = [];
    export default {
      initialize({ model }) {
        model.on("change:list change:data", (_, value) => heard.push(value.constructor.name));
      },
      render({ model }) { window.front = model; },
    };
    """
    widget = fake(listening, state={"list": [{"a": 1}], "data": b"\0\1\2", "none": None})
    run = widget.page.evaluate
    widget.update(list=[{"a": 1}], data=b"\0\1\2", none=None)
    run("() => { front.set('list', [{ a: 1 }]); front.save_changes(); }")
    assert (run("() => heard"), widget.saved) == ([], [])
    assert run("() => front.get('data').getUint8(2)") == 2
    widget.set("data", b"\0\1\3")
    assert (run("() => heard"), widget.get("data")) == (["DataView"], b"\0\1\3")
    run("() => { front.set({ list: [], data: new Uint8Array([9]) }); front.save_changes(); }")
    run("() => { front.set('none', 0); front.save_changes(); }")
    assert run("() => heard") == ["DataView", "Array", "Uint8Array"]
    assert widget.saved == [{"list": [], "data": b"\t"}, {"none": 0}]


def test_an_error_in_the_front_end_is_noticed_and_themes_differ(fake):
    broken = "export default { render({ el }) { el.onclick = () => { throw new Error('on purpose'); }; } }"
    widget = fake(broken, "div { height: 9px; color: var(--jp-ui-font-color1); }")
    with widget.page.expect_event("pageerror"):
        widget.root().click()
    assert [error for error in widget.errors if "on purpose" in error]
    colour = "e => getComputedStyle(e).color"
    light = widget.root().evaluate(colour)
    widget.theme("dark")
    assert widget.root().evaluate(colour) != light
    with pytest.raises(Exception, match="gone wrong"):
        fake("export default { render() { throw new Error('gone wrong'); } }")


def test_a_button_without_a_name_is_serious_and_its_twin_with_one_is_not(fake):
    page = fake("export default { render({ el }) { el.append(document.createElement('button')); } }").page
    [line] = serious(page, ".fake-view")
    assert line.startswith("critical: button-name: ")
    page.locator("button").evaluate("button => button.setAttribute('aria-label', 'Fill')")
    assert serious(page, ".fake-view") == []


def test_notebook_7_runs_cells_and_shows_widgets(nb7, shots):
    notebook = nb7([WIDGET, "print(counter.clicks)", "print(6 * 7)"])
    notebook.run_cell(2)
    assert notebook.output_text(2) == "42\n"
    notebook.run_all()
    notebook.page.get_by_text("clicked 0 times").click()
    notebook.eventually(1, "1\n")
    assert serious(notebook.page, ".jp-OutputArea-output button") == []
    notebook.theme("JupyterLab Dark")
    notebook.resize(900, 700)
    notebook.shot(shots / "notebook7-dark.png")
    notebook.theme("JupyterLab Light")
    assert notebook.save()["cells"][2]["outputs"][0]["text"] == ["42\n"]
    assert notebook.widget_errors == notebook.outside_requests == []


def test_a_restart_forgets_and_a_reload_remembers(lab):
    notebook = lab(["x = globals().get('x', 0) + 1\nprint(x)", "print('#' * 100_000)"])
    notebook.run_cell(0)
    notebook.save()
    notebook.reload()
    assert notebook.output_text(0) == "1\n"
    notebook.run_cell(0)
    assert notebook.output_text(0) == "2\n"
    notebook.restart_kernel()
    notebook.run_cell(0)
    assert notebook.output_text(0) == "1\n"
    before = notebook.websocket_bytes
    notebook.run_all()
    assert notebook.output_text(0) == "2\n"
    assert 100_000 < notebook.websocket_bytes - before < 150_000
