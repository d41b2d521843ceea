"""Trouble: one entry for each cause, exact counts, a way out, and nothing where nothing is wrong."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import nn
from trees import META, Holder, linear, stack, weight

import metaviz
from metaviz.core.tree import tree
from metaviz.errors import UnknownPath
from metaviz.views import trouble as view
from metaviz.views.lines import named


class Norm(nn.Module):
    """No reset_parameters."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Net(nn.Module):
    def __init__(self, depth: int = 3, width: int = 4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), Norm(width)) for _ in range(depth))


def on_meta(make, *arguments):
    with META:
        return make(*arguments)


def kinds(report) -> list[str]:
    return [entry.kind for entry in report]


def test_three_or_three_thousand_tensors_of_one_cause_are_one_entry():
    for depth in (3, 3000):
        model = on_meta(Net, depth)
        first = next(iter(tree(model).trouble()))
        assert first.kind == "blocked"
        assert first.reason == "Norm has no reset_parameters, and no tape knows the tensor"
        assert (first.modules, len(first.paths)) == (depth, depth)
        assert first.paths[-1] == f"blocks.{depth - 1}.1.weight"
        assert first.fix == "model = metaviz.build(type(model), *args)"


def test_text_of_the_trouble_of_a_model_without_a_tape(golden):
    model = on_meta(Net)
    golden(str(tree(model).trouble()))


def test_text_of_the_trouble_that_reset_would_make(golden):
    def make():
        model = Net()
        for block in (model.blocks[0], model.blocks[2]):
            nn.init.zeros_(block[0].weight)
        return model

    model = metaviz.build(make)
    golden(re.sub(r"\.py:\d+", ".py:…", str(tree(model, source="reset").trouble())))


def test_where_nothing_is_wrong_one_line_says_so():
    healthy = linear()
    for report, text in (
        (tree(healthy).trouble(), "No trouble in Linear: each of its 2 tensors can be given values."),
        (tree(healthy)["bias"].trouble(), "No trouble in bias: its tensor can be given values."),
    ):
        assert (str(report), len(report), bool(report)) == (text, 0, False)
        assert text in report._repr_html_()
    real, none = nn.Linear(2, 2), nn.Identity()
    assert str(tree(real).trouble()) == "No trouble in Linear: each of its 2 tensors holds values."
    assert str(tree(none).trouble()) == "No trouble in Identity: it has no tensors."


def test_a_model_that_is_half_there_would_lose_what_it_has():
    half = nn.Sequential(nn.Linear(2, 2), linear())
    assert kinds(tree(half).trouble()) == ["escaped", "lightning", "lightning"]
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    metaviz.materialize(model, "0")
    report = tree(model).trouble()
    assert [entry.reason for entry in report] == [
        "Lightning's FSDPStrategy, which leaves it to torch, empties 2 tensors of their values",
        "Lightning's ModelParallelStrategy empties 2 tensors of their values",
    ]
    assert {entry.paths for entry in report} == {("0.weight", "0.bias")}
    assert kinds(tree(model)["1"].trouble()) == []


def test_other_shapes_are_no_other_cause():
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(9, 4), nn.Linear(16, 4, bias=False))
        for layer in model:
            nn.init.normal_(layer.weight, std=0.02)
        return model

    model = metaviz.build(make)
    (silent,) = [entry for entry in tree(model, source="reset").trouble() if entry.kind == "silent"]
    assert silent.paths == ("0.weight", "1.weight", "2.weight")
    assert silent.reason.startswith("Linear.reset_parameters(): uniform_(…) at linear.py:")
    assert silent.fix == 'metaviz.materialize(model, ["0.weight", "1.weight", "2.weight"], source="replay")'
    assert "silent" not in kinds(tree(model).trouble())


def test_the_fix_of_silent_trouble_gives_the_ordinary_values():
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nn.init.zeros_(model[1].weight)
        return model

    model = metaviz.build(make)
    (silent,) = [entry for entry in tree(model, source="reset").trouble() if entry.kind == "silent"]
    exec(silent.fix, {"metaviz": metaviz, "model": model})
    assert torch.equal(model[1].weight, torch.zeros(4, 4))


def test_what_lightning_does_wrong_is_told_with_its_exact_message(needs):
    needs("lightning")
    from lightning.fabric.utilities.init import _materialize_meta_tensors

    model = on_meta(Net)
    fsdp, parallel = (entry for entry in tree(model).trouble() if entry.kind == "lightning")
    with pytest.raises(TypeError) as raised:
        _materialize_meta_tensors(on_meta(Net), torch.device("cpu"))
    assert fsdp.reason.startswith(
        f"Lightning's recipe for FSDP stops at blocks.0.1 with TypeError: {raised.value} "
    )
    assert fsdp.reason.endswith(
        "By then it moves 3 tensors off meta and leaves 1 tensor uninitialized. Where it is left to torch: "
        "AttributeError: 'Norm' object has no attribute 'reset_parameters'"
    )
    assert parallel.reason == "Lightning's ModelParallelStrategy leaves 3 tensors uninitialized"
    assert parallel.paths == ("blocks.0.1.weight", "blocks.1.1.weight", "blocks.2.1.weight")


def test_the_trouble_of_a_part_is_that_of_its_tensors():
    model = on_meta(Net)
    shown = tree(model)
    assert shown["blocks.1"].trouble().entries[0].paths == ("blocks.1.1.weight",)
    assert kinds(shown["blocks.1.1"].trouble()) == ["blocked", "lightning"]
    assert kinds(shown["blocks.1.0"].trouble()) == ["untold"]
    assert str(shown["blocks.0.1"].trouble()).startswith(
        "1 cause of trouble in blocks.0.1, and what Lightning would do; 1 of 1 tensor blocked\n"
    )


def test_findings_around_the_model_are_trouble_and_optimizers_on_request_only():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert kinds(tree(model).trouble()) == []
    (entry,) = tree(model).trouble(search=True)
    assert (entry.kind, entry.paths) == ("optimizer", ("0.weight", "0.bias"))
    del optimizer


def test_a_tensor_is_told_once_where_a_finding_says_more():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2))

    model = metaviz.build(lambda: nn.Sequential(nn.LazyLinear(2), Late()))
    found = [entry for entry in tree(model).trouble() if entry.kind != "lightning"]
    assert sorted(entry.kind for entry in found) == ["lazy", "uninitialized"]


def test_trouble_of_a_model_that_is_gone_is_refused():
    shown = tree(linear())
    gc.collect()
    with pytest.raises(UnknownPath, match="The model of this tree is gone"):
        shown.trouble()


def test_names_in_trouble_are_text_and_never_markup():
    model = Holder(
        **{"<img src=x onerror=alert(1)>": Holder(w=weight(2)), "line\nbreak\u202e": Holder(w=weight(2))}
    )
    model._modules["x"] = type("<script>Cls\n", (Holder,), {})(w=weight(2))
    report = tree(model).trouble()
    assert str(report).replace("\n", "").isprintable()
    assert r"line\nbreak\u202e.w" in str(report)
    page = report._repr_html_()
    assert "<img" not in page
    assert "<script" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_many_causes_are_cut_off_and_counted(monkeypatch):
    monkeypatch.setattr(view, "SHOWN", 3)
    model = Holder(**{f"m{n}": type(f"Norm{n}", (Holder,), {})(w=weight(2)) for n in range(5)})
    report = tree(model).trouble()
    assert len(report) == 7
    assert str(report).splitlines()[-1] == "… and 4 causes more"
    assert report._repr_html_().count("<li>") == 3


def test_lines_of_trouble_fit_in_the_width_code_aside():
    model = on_meta(Net)
    lines = [line for line in str(tree(model).trouble()).splitlines() if "Next: " not in line]
    assert max(map(len, lines)) <= 100


def test_html_of_trouble_is_well_formed_and_its_style_touches_nothing_else():
    from test_html import Reader

    from metaviz.views.pieces import STYLE

    model = on_meta(Net)
    page = Reader(tree(model).trouble()._repr_html_())
    assert set(page.tags) <= {"div", "style", "p", "b", "ul", "li", "span", "code", "pre"}
    assert all(rule.startswith(".mv-page") for rule in STYLE.split("}") if rule)
    assert "Lightning's recipe for FSDP stops at blocks.0.1" in page.words


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (("a.weight",), "a.weight"),
        (("l.0.w", "l.1.w", "head"), "l.*.w, head"),
        (("l.0.1.w", "l.1.1.w"), "l.*.1.w"),
        (("a", "b", "c", "d"), "a, b, c, …"),
        (("l.0.w",), "l.0.w"),
        (("x1.w", "x2.w"), "x1.w, x2.w"),
        (("l.0.0.w", "l.0.1.w", "l.1.0.w", "l.1.1.w"), "l.*.*.w"),
        (("l.0.0.w", "l.0.1.w", "l.1.0.w"), "l.*.0.w, l.0.1.w"),
    ],
)
def test_paths_that_differ_in_a_number_are_named_as_a_glob(paths, text):
    assert named(paths) == text


def test_a_glob_in_a_report_means_the_same_to_materialize():
    model = metaviz.build(Net)
    plan = metaviz.plan(model, named(tuple(f"blocks.{n}.1.weight" for n in range(3))))
    assert [tensor.path for tensor in plan.tensors] == [f"blocks.{n}.1.weight" for n in range(3)]


def test_a_stack_of_built_in_layers_in_torch_containers_is_no_trouble():
    with META:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(50)))
    assert not tree(model).trouble()
    somebodys = stack(3)
    assert kinds(tree(somebodys).trouble()) == ["untold"]


def test_what_only_lightning_would_do_is_no_trouble_of_the_model_itself():
    model = metaviz.build(lambda: nn.MultiheadAttention(4, 2))
    report = tree(model).trouble()
    assert {entry.kind for entry in report} == {"lightning"}
    title = (
        "No trouble in MultiheadAttention itself: each of its 4 tensors can be given values. But if Lightning"
    )
    assert str(report).startswith(title)
