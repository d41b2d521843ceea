"""Plans, calls and progress in a line each."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from torch import nn
from trees import META, Block, Holder, linear, weight

import metaviz
from metaviz.views.planned import blocked_lines, call, plan_line, progress_line, rate, told


def stack(depth: int = 4) -> nn.Module:
    return metaviz.build(
        lambda: Holder(layers=nn.ModuleList(Block() for _ in range(depth)), head=nn.Linear(4, 2))
    )


def line(model: nn.Module, paths="", modules: int = 1, tensors: int = 0, **options) -> str:
    return plan_line(metaviz.plan(model, paths, **options), modules, tensors)


def hopeless(number: int) -> nn.Module:
    return Holder(**{f"b{k}": Holder(weight=weight(3)) for k in range(number)}, ok=linear())


def test_a_plan_says_what_is_chosen_how_much_where_and_from_what():
    assert line(stack(), ["layers.0", "layers.1", "head.weight"], 2, 1) == (
        "2 subtrees and 1 tensor, 256 B → cpu, fits, 9 tensors from replay"
    )
    assert line(stack(), "head.bias", 0, 1) == "1 tensor, 8 B → cpu, fits, 1 tensor from replay"


def test_a_plan_counts_each_source():
    model = stack()
    model.layers[0].norm.weight = weight(4)
    stored = {"layers.1.mlp.weight": torch.ones(4, 4), "head.bias": torch.ones(2)}
    assert line(model, checkpoint=stored) == (
        "1 subtree, 488 B → cpu, fits, 15 from replay, 2 from checkpoint, 1 from reset"
    )


def test_a_plan_counts_what_is_blocked_and_what_is_real_already():
    assert line(hopeless(5)) == "1 subtree, 24 B → cpu, fits, 2 tensors from reset, 5 blocked"
    model = stack()
    metaviz.materialize(model, "head")
    assert line(model) == "1 subtree, 448 B → cpu, fits, 16 tensors from replay, 2 real already"


def test_a_plan_counts_lazy_tensors_and_those_that_share_memory():
    model = metaviz.build(lambda: Holder(lazy=nn.LazyLinear(3), head=nn.Linear(2, 2)))
    assert line(model) == "1 subtree, 24 B → cpu, fits, 2 tensors from replay, 2 lazy"

    def fused():
        both = torch.rand(4)
        return Holder(one=nn.Parameter(both[:2]), other=nn.Parameter(both[2:]))

    assert line(metaviz.build(fused), "one", 0, 1) == (
        "1 tensor, 16 B → cpu, fits, 2 tensors from replay, 1 more that share their memory"
    )


@pytest.mark.parametrize(
    ("model", "path", "said"),
    [
        (hopeless(1), "b0", "nothing that a source can give values (1 tensor blocked)"),
        (linear().to_empty(device="cpu"), "", "nothing to materialize, all of 2 tensors hold values"),
        (
            nn.LazyLinear(3, device=META),
            "",
            "2 lazy tensors, which the first forward gives a shape and values",
        ),
        (nn.ReLU(), "", "no tensors in it"),
    ],
    ids=["blocked", "real", "lazy", "no tensors"],
)
def test_a_plan_of_nothing_says_why(model, path, said):
    assert line(model, path) == f"1 subtree: {said}"


def test_what_does_not_fit_is_said_with_both_numbers():
    found = line(Holder(big=nn.Linear(2**20, 2**20, bias=False, device=META)), "big")
    assert re.fullmatch(
        r"1 subtree, 4\.00 TiB → cpu, does NOT fit \(4\.00 TiB needed on cpu, [\d.]+ [KMGT]iB free\), "
        r"1 tensor from reset",
        found,
    )


def test_the_first_blocked_tensors_are_named_and_the_others_counted():
    reason = "Holder has no reset_parameters, and no tape knows the tensor."
    step = "model = metaviz.build(type(model), *args)"
    first = [(f"b{k}.weight", reason, step) for k in range(3)]
    assert blocked_lines(metaviz.plan(hopeless(3))) == first
    assert blocked_lines(metaviz.plan(hopeless(5))) == [*first, ("and 2 more", "", "")]
    assert blocked_lines(metaviz.plan(stack())) == []


def test_a_blocked_tensor_of_a_hostile_name_is_a_harmless_line():
    model = Holder()
    model._modules["line\nbreak\x1b[0m"] = Holder(weight=weight(3))
    assert blocked_lines(metaviz.plan(model))[0][0] == r"line\nbreak\x1b[0m.weight"


@pytest.mark.parametrize(
    ("message", "said", "step"),
    [
        ("It is so. Next: do(it)", "It is so.", "do(it)"),
        ("It is so.", "It is so.", ""),
        ("One. Next: a. Next: b(c)", "One. Next: a.", "b(c)"),
        ("One\nTwo\x1b[0m. Next: do(it)", "One\nTwo\\x1b[0m.", "do(it)"),
        ("", "", ""),
    ],
)
def test_the_next_step_is_told_apart_from_the_words(message, said, step):
    assert told(message) == (said, step)


def test_a_very_long_message_is_cut_in_the_middle():
    said, step = told("x" * 9999 + ". Next: do(it)")
    assert len(said) == 400 and said.startswith("x" * 266 + "…") and said.endswith("x.")
    assert step == "do(it)"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (("materialize", "model", [""], {}), "metaviz.materialize(model)"),
        (("unload", "net", ["layers.0"], {}), 'metaviz.unload(net, "layers.0")'),
        (("plan", "model", ["a", "b"], {"device": '"cpu"'}), 'metaviz.plan(model, ["a", "b"], device="cpu")'),
        (
            ("materialize", "model", [""], {"device": '"cpu"', "checkpoint": "'x.pt'"}),
            "metaviz.materialize(model, device=\"cpu\", checkpoint='x.pt')",
        ),
    ],
)
def test_a_click_is_a_call_to_paste(given, code):
    assert call(*given) == code


def test_a_long_selection_is_called_by_its_widget_if_that_has_a_name():
    paths = [f"layers.{k}" for k in range(31)]
    assert call("unload", "model", paths, {}, "w") == "metaviz.unload(model, w.selection)"
    assert call("unload", "model", paths[:30], {}, "w").count("layers.") == 30
    assert call("unload", "model", paths, {}).count("layers.") == 31


@pytest.mark.parametrize("path", ['say "hi"', "back\\slash", "line\nbreak", "🔥", "\u202eevil", "{x}"])
def test_a_call_with_a_hostile_path_is_valid_code_that_means_that_path(path):
    for paths in ([path], [path, "b"]):
        code = call("materialize", "model", paths, {})
        assert code.isprintable()
        given = ast.literal_eval(ast.parse(code, mode="eval").body.args[1])
        assert given == (path if len(paths) == 1 else paths)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((2**30, 4 * 2**30, 2.0, "a.b"), "1.00 GiB of 4.00 GiB, 512 MiB/s, 6.00 s left, at a.b"),
        ((0, 100, 0.0, "x", "read "), "read 0 B of 100 B, 0 B/s, at x"),
        ((100, 100, 1.0, "x"), "100 B of 100 B, 100 B/s, at x"),
        ((0, 0, 0.0, "x"), "0 B of 0 B, 0 B/s, at x"),
    ],
)
def test_progress_says_how_much_how_fast_how_long_and_where(given, said):
    assert progress_line(*given) == said


def test_a_rate_is_bytes_per_second_even_in_no_time():
    assert rate(2048, 2.0) == "1.00 KiB/s"
    assert rate(0, 0.0) == "0 B/s"
    assert rate(1, 0.0) == "954 MiB/s"
