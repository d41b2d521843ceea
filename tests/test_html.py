"""The HTML view: well-formed, escaped, bounded, readable without its style sheet."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from trees import META, Holder, jumble, linear, mixture, no, quirks, seen, stack, yes

import metaviz
from metaviz.core.tree import tree
from metaviz.views import html as view
from metaviz.views.html import MAX_BYTES, html
from metaviz.views.text import text

VOID = {"br", "img", "hr", "input", "link", "meta"}


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps the text of each line, tags by name and all attributes."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[str] = []
        self.deepest = 0
        self.words = ""
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in VOID
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes += attrs
        self.deepest = max(self.deepest, len(self.open))
        if dict(attrs).get("class", "").startswith("mv-row"):
            self.rows.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words += data
        if self.rows and ("summary" in self.open or "li" in self.open or len(self.rows) == 1):
            self.rows[-1] += data


def read(model: nn.Module, answer=yes) -> Reader:
    return Reader(html(seen(model, answer)))


def test_every_line_reads_as_one_sentence_without_the_style_sheet():
    assert read(Holder(q=linear(3, 2, bias=False), fc=linear(2, 1))).rows == [
        "module · shape/params · size · dtype · device · mark",
        "Holder · 9 · 36 B · float32 · meta · ○ ready",
        "q Linear · (2, 3) · 24 B · float32 · meta · ○ ready",
        "fc Linear · (1, 2) + bias · 12 B · float32 · meta · ○ ready",
        "weight · (1, 2) · 8 B · float32 · meta · ○ ready",
        "bias · (1,) · 4 B · float32 · meta · ○ ready",
    ]


def test_structure_is_nested_details_in_nested_lists_and_nothing_that_runs():
    page = read(quirks())
    assert set(page.tags) <= {"div", "style", "span", "ul", "li", "details", "summary", "code", "em", "b"}
    assert {name for name, _ in page.attributes} <= {"class", "title", "open"}
    classes = {each for name, value in page.attributes if name == "class" for each in value.split()}
    assert all(each.startswith("mv-") for each in classes)
    assert page.tags.count("details") == page.tags.count("summary") > 5


def test_the_style_sheet_touches_nothing_but_the_tree():
    selectors = re.findall(r"([^{}]+){[^{}]*}", view.STYLE)
    assert len(selectors) > 20
    assert all(
        part.startswith(".mv-tree") for selector in selectors for part in re.split(r",(?![^(]*\))", selector)
    )
    assert "url(" not in view.STYLE
    assert "@import" not in view.STYLE


def test_names_from_a_model_are_text_and_never_markup():
    model = Holder()
    evil = "<img src=x onerror=alert(1)>"
    model._modules[evil] = linear()
    model._modules['"><script>alert(2)</script>'] = type("<b>Class</b>", (nn.Linear,), {})(1, 1, device=META)
    model._buffers["&lt;\x00\u202e"] = torch.zeros(1)
    page = read(model, no)
    assert {"img", "script"}.isdisjoint(page.tags)
    assert any(row.startswith(evil) for row in page.rows)
    assert any(r"&lt;\x00\u202e" in row for row in page.rows)
    assert "<b>Class</b>" in page.words
    assert "<img" not in html(seen(model))


def test_a_reason_and_a_fix_are_text_too():
    from metaviz.core.verdict import Verdict

    def answer(*rest):
        return Verdict(False, None, "<script>1</script>", "<script>2</script>")

    page = read(linear(), answer)
    assert "script" not in page.tags
    assert "<script>2</script>" in page.words


def test_repeated_blocks_are_one_line_that_opens_and_states_stand_apart():
    model = stack(80)
    model.layers[3].to_empty(device="cpu")
    rows = read(model).rows
    assert [row for row in rows if "Block" in row] == [
        "layers.0 … 2 3 × Block · 3 × 28 · 336 B · float32 · meta · ○ ready",
        "layers.3 Block · 28 · 112 B · float32 · cpu · ● real",
        "layers.4 … 79 76 × Block · 76 × 28 · 8.31 KiB · float32 · meta · ○ ready",
    ]
    assert len(rows) == 2 + 3 * 7 + 3


def test_little_is_open_at_first_and_twins_are_closed():
    model = stack(80)
    model.layers[3].to_empty(device="cpu")
    page = html(seen(model))
    opened = [part.split("<code>")[1].split("</code>")[0] for part in page.split("<details open>")[1:]]
    assert opened[:2] == ["Holder", "layers.0 … 2"]
    assert '<details><summary class="mv-row"><span class="mv-name" title="layers.3">' in page


def test_what_is_left_out_says_how_to_see_it(monkeypatch):
    monkeypatch.setattr(view, "MAX_LINES", 8)
    monkeypatch.setattr(view, "MAX_WIDTH", 4)
    wide = Holder(**{f"n{index}x": linear(index + 1, 1) for index in range(9)})
    rows = read(Holder(wide=wide, deep=Holder(deeper=Holder(a=linear(), b=linear())))).rows
    assert '… 5 more: metaviz.tree(model)["wide"].rows' in rows
    assert any(row.endswith('inside: metaviz.tree(model)["deep.deeper"]') for row in rows)


@pytest.fixture(scope="module")
def experts() -> nn.Module:
    """41,284 modules: 80 layers of 128 experts of 3 projections."""
    model = mixture(80, 128)
    assert sum(1 for _ in model.modules()) == 41_284
    return model


def test_a_mixture_of_41_284_modules_fits_in_a_few_kilobytes(experts):
    shown = seen(experts)
    assert len(text(shown).encode()) <= 5000
    assert len(html(shown).encode()) <= 12_000
    assert shown.totals.numel == sum(p.numel() for p in experts.parameters())
    assert shown.totals.marks == {"ready": 30_882}


def test_html_is_bounded_for_any_model():
    for model in (jumble(3000), jumble(30)):
        page = html(seen(model, no))
        assert len(page.encode()) <= MAX_BYTES
        Reader(page)
    assert "more: <code>metaviz.tree(model)" in html(seen(jumble(3000)))


def test_html_of_a_very_deep_model_is_shallow_enough_for_browsers():
    model = linear()
    for _ in range(400):
        model = nn.Sequential(model)
    page = read(model)
    assert page.deepest < 200
    assert any("342 rows inside: metaviz.tree(model)" in row for row in page.rows)


def test_doubt_about_reset_is_said_and_its_next_step_is_code():
    with META:
        model = Holder(fc=nn.Linear(2, 2))
    page = html(tree(model))
    assert (
        '<div><span class="mv-partial">?</span> 2 by reset; whether as in an ordinary build, only a tape tells. '
        "Next: <code>model = metaviz.build(type(model), *args)</code></div>"
    ) in page
    assert "only a tape tells" not in html(tree(nn.Linear(2, 2, device=META)))


def test_with_a_checkpoint_the_footer_says_how_many_tensors_come_from_which_source():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 3) for _ in range(3))
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.layers[0].weight
            self.again = self.layers[1]
            self.register_buffer("steps", torch.zeros(2), persistent=False)

    model = metaviz.build(Net)
    state = {name: value for name, value in Net().state_dict().items() if not name.startswith("layers.2")}
    seen = tree(model, checkpoint=state)
    assert ('<span class="mv-ready">○ 7 ready</span> (4 from the checkpoint, 3 from replay)') in html(seen)
    assert "\n7 tensors: ○ 7 ready (4 from the checkpoint, 3 from replay)\n" in text(seen)
    for part, words in {
        "again": "2 tensors: ○ 2 ready (2 from the checkpoint)",
        "head": "1 tensor: ○ 1 ready (1 from the checkpoint)",
        "layers.2.bias": "1 tensor: ○ 1 ready (1 from replay)",
    }.items():
        assert f"\n{words}\n" in text(seen[part])
    assert "(" not in text(tree(model)).partition("tensors: ")[2].splitlines()[0]


def test_the_footer_says_totals_marks_and_the_next_step():
    page = read(quirks())
    for words in (
        "2,752 parameters (272 frozen)",
        "counted by path 4,624",
        "● 2 real (hold values)",
        "(can be given values)",
        'Next: metaviz.materialize(model, device="cpu")',
    ):
        assert words in page.words
