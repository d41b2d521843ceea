"""The tree widget in a real JupyterLab, on a Llama: drawn, searched, ticked, brought to life, and looked at."""

from __future__ import annotations

import json

from browser.axe import serious
from browser.treepage import TreeOnPage

LLAMA = """%load_ext metaviz
import torch, metaviz
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
                     num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)"""
BUILD = """%%meta_build --quiet
torch.manual_seed(5)
model = LlamaForCausalLM(config)"""
# By torch alone: all that is on meta can be filled from the tape, so a module is ready while it holds any.
MARKS = """import json
state = lambda found: "ready" if any(found) else "real"
tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
expected = {path: state([tensor.is_meta]) for path, tensor in tensors}
for path, module in model.named_modules():
    held = [*module.parameters(), *module.buffers()]
    expected[path] = state([tensor.is_meta for tensor in held]) if held else "empty"
print(json.dumps(expected))"""
EQUAL = """torch.manual_seed(5)
ordinary = LlamaForCausalLM(config)
filled = [name for name, tensor in model.named_parameters() if not tensor.is_meta]
same = all(torch.equal(model.get_parameter(name), ordinary.get_parameter(name)) for name in filled)
print(len(filled), same)"""
WIDTHS = (800, 1600)
THEMES = ("Light", "Dark")


def test_a_llama_is_drawn_searched_ticked_and_brought_to_life(lab):
    notebook = lab([LLAMA, BUILD, "w = %meta_tree model\nw", MARKS, "print(w.selection)", EQUAL])
    notebook.run_all()
    tree = TreeOnPage(notebook)
    tree.open("Expand all")
    expected = json.loads(notebook.output_text(3))
    assert len(expected) == 144
    assert set(expected.values()) == {"ready", "empty"}
    assert tree.marks() == expected
    # The static twin is only for those who have no kernel.
    assert not notebook.page.locator(".mv-tree").is_visible()

    tree.box.fill("layers.4.*.q_proj")
    tree.root.get_by_text("1 of 1", exact=True).wait_for()
    assert tree.labels() == ["LlamaForCausalLM", "model", "layers", "4", "self_attn", "q_proj"]
    assert tree.root.locator(".mv-hit mark").all_inner_texts() == ["q_proj"]
    tree.box.fill("is:blocked")
    tree.root.get_by_text("nothing found", exact=True).wait_for()
    tree.box.fill("layers.4")
    tree.root.get_by_text("1 of 1", exact=True).wait_for()
    tree.tick("4")
    tree.box.fill("")
    notebook.eventually(4, "['model.layers.4']\n")
    tree.plans("1 subtree, 120 KiB → cpu, fits, 9 tensors from replay")

    tree.button("Materialize").click()
    assert tree.outcome().startswith("✓ materialized 9 tensors")
    equal_call = tree.root.get_by_role("group", name="the call that this was")
    assert equal_call.inner_text() == 'metaviz.materialize(model, "model.layers.4", device="cpu")'
    notebook.run_cell(5)
    assert notebook.output_text(5) == "9 True\n"
    tree.root.get_by_text("9 real", exact=False).wait_for()
    notebook.run_cell(3)
    expected = json.loads(notebook.output_text(3))
    assert expected["model.layers.4.mlp"] == "real" and expected["model.layers.3.mlp"] == "ready"
    tree.open("Expand all")
    assert tree.marks() == expected

    tree.button("Unload").click()
    tree.root.get_by_text("unloaded 9 tensors").wait_for()
    notebook.eventually(5, "0 True\n")
    assert notebook.widget_errors == notebook.outside_requests == []


def test_in_both_themes_and_widths_nothing_is_in_the_way_of_people(lab, shots):
    notebook = lab([LLAMA, BUILD, "w = %meta_tree model\nw.columns = [*w.columns]\nw"])
    notebook.run_all()
    notebook.command("application:toggle-left-area")
    tree = TreeOnPage(notebook)
    tree.open("3 levels")
    tree.row("0 … 5").locator(".mv-twist").click()
    tree.tick("2")
    tree.tick("norm")
    tree.plans("2 subtrees, 121 KiB → cpu, fits, 10 tensors from replay")
    tree.row("2").locator(".mv-cls").click()
    tree.root.locator(".mv-answers").wait_for()
    for theme in THEMES:
        notebook.theme(f"JupyterLab {theme}")
        for width in WIDTHS:
            notebook.resize(width, 1100)
            tree.root.scroll_into_view_if_needed()
            tree.root.screenshot(path=shots / f"widget-{theme.lower()}-{width}.png")
        assert serious(notebook.page, ".mv-widget") == []
    assert notebook.widget_errors == notebook.outside_requests == []


def test_a_tree_of_many_rows_is_typed_into_walked_and_found_again_where_it_was(lab):
    build = "model = nn.Sequential(*[nn.Linear(2, 2 + i % 2, device='meta') for i in range(3000)])"
    notebook = lab(
        ["import metaviz\nfrom torch import nn", build, "w = metaviz.show(model)\nw", "print(w.filter)"]
    )
    notebook.run_all()
    tree = TreeOnPage(notebook)
    tree.open("Expand all")
    tree.tree.evaluate("e => { e.scrollTop = 120_000; }")
    tree.row("1667").wait_for()
    before = tree.labels()
    assert len(tree.root.get_by_role("treeitem").all()) < 40
    # JupyterLab takes what is off the screen out of the page, and puts it back.
    tree.root.evaluate(
        """root => { const home = root.parentElement; root.remove();
                     requestAnimationFrame(() => requestAnimationFrame(() => home.append(root))); }"""
    )
    tree.row("1667").wait_for()
    assert tree.labels() == before

    tree.box.press_sequentially("name:299 class:linear", delay=10)
    tree.root.get_by_text("1 of 13", exact=True).wait_for()
    notebook.eventually(3, "name:299 class:linear\n")
    assert tree.box.input_value() == "name:299 class:linear"
    assert tree.labels() == ["Sequential", "299", "1299", "2299", *map(str, range(2990, 3000))]
    tree.box.fill("")
    tree.press("End")
    assert tree.active() == "bias"
    tree.press("PageUp", "ArrowLeft")
    assert tree.active() == "2993"
    assert notebook.widget_errors == notebook.outside_requests == []
