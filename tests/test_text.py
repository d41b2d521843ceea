"""The text view: golden pictures, its width, and what it does with names that mean harm."""

from __future__ import annotations

import doctest
import unicodedata

import pytest
import torch
from torch import nn
from trees import (
    META,
    Holder,
    jumble,
    linear,
    meta,
    mixture,
    no,
    only,
    quirks,
    seen,
    stack,
    tiny_llama,
    weight,
    yes,
)

import metaviz
from metaviz.core import units
from metaviz.core.fold import outline
from metaviz.views import lines
from metaviz.views.html import html
from metaviz.views.lines import clean, next_step
from metaviz.views.text import WIDTH, text


def shown(model: nn.Module, answer=yes, **options) -> str:
    return text(seen(model, answer), **options)


def columns(line: str) -> int:
    """Width on a terminal."""
    visible = [char for char in line if not unicodedata.combining(char)]
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in visible)


def test_text_of_the_quirks_model(golden):
    golden(shown(quirks(), only("weight", "bias")))


def test_text_of_a_stack_with_one_block_materialized(golden):
    model = stack(80)
    model.layers[3].to_empty(device="cpu")
    golden(shown(model))


def test_text_of_a_mixture_of_experts(golden):
    golden(shown(mixture(80, 8)))


def test_text_of_stale_attributes_lazy_and_shared_modules(golden):
    block = linear(4, 4)
    model = Holder(first=block, again=block, lazy=nn.LazyLinear(3, device=META), mask=meta(1, 1).expand(9, 9))
    model.freqs_cis = meta(8, dtype=torch.complex64)
    model.cache = {"cos": [meta(3), meta(3), meta(3)]}
    model.hidden = [linear(1, 1, bias=False)]
    fused = meta(8, 4)
    model.q, model.k = nn.Parameter(fused[:4]), nn.Parameter(fused[4:])
    golden(shown(model))


def test_text_of_hostile_names(golden):
    model = Holder()
    for name in (
        "<img src=x onerror=alert(1)>",
        "line\nbreak",
        "\x1b[31mred\x1b[0m",
        "\u202egnp.exe",
        "bell\x07",
        "",
        "日本語の層",
        "n\u0303ame",
        "x" * 300,
        "a'b\"c",
    ):
        model._modules[name] = linear(1, 1, bias=False)
    model._modules["\x1b]0;title\x07"] = type("Cl\x1bass\n", (nn.Module,), {})()
    golden(shown(model, no))


def test_a_real_llama_unfolds_where_a_layer_was_materialized(needs):
    model = tiny_llama(needs("transformers"), layers=12).bfloat16()
    model.model.layers[3].to_empty(device="cpu")
    picture = [" ".join(line.strip("│├└─ ").split()) for line in shown(model).splitlines()]
    for line in (
        "embed_tokens Embedding (100, 32) 6.25 KiB bfloat16 meta ○ ready",
        "layers.0 … 2 3 × LlamaDecoderLayer 3 × 10.3 K 60.4 KiB bfloat16 meta ○ ready",
        "q_proj Linear (32, 32) 2.00 KiB bfloat16 meta ○ ready",
        "layers.3 LlamaDecoderLayer … 10.3 K 20.1 KiB bfloat16 cpu ● real",
        "layers.4 … 11 8 × LlamaDecoderLayer … 8 × 10.3 K 161 KiB bfloat16 meta ○ ready",
        "inv_freq buffer, not saved (4,) 8 B bfloat16 meta ○ ready",
        "126,880 parameters, 248 KiB; counted by path 130,080, 254 KiB",
        'Next: metaviz.materialize(model, device="cpu")',
    ):
        assert line in picture
    assert any("= model.embed_tokens.weight (100, 32) tied" in line for line in picture)


@pytest.mark.parametrize("make", [quirks, lambda: stack(80), lambda: mixture(4, 4), lambda: jumble(30)])
def test_lines_fit_in_the_width_and_hold_no_control_characters(make):
    model = make()
    for answer in (yes, no, only("weight")):
        picture = shown(model, answer)
        pictures = [line for line in picture.splitlines() if "metaviz.tree" not in line]
        assert max(map(columns, pictures)) <= WIDTH
        assert picture.replace("\n", "").isprintable()


def test_the_root_alone_and_single_tensors_have_a_text():
    assert shown(nn.Module()).splitlines()[1].split() == ["Module", "·", "empty"]
    one = text(seen(linear())["weight"]).splitlines()
    assert one[1].split() == ["weight", "(2,", "2)", "16", "B", "float32", "meta", "○", "ready"]
    assert one[-1] == 'Next: metaviz.materialize(model, "weight", device="cpu")'


def test_depth_and_rows_and_unfold_say_how_much_is_shown():
    model = seen(stack(6))
    assert [line.split()[1] for line in text(model, depth=1).splitlines()[2:4]] == ["layers.0", "head"]
    assert 'more inside: metaviz.tree(model)["layers.0"]' in text(model, depth=1)
    unfolded = text(model, unfold=True, rows=10_000)
    assert [f"{number}  Block" in unfolded for number in range(7)] == [True] * 6 + [False]
    assert len(text(seen(jumble(300)), rows=20).splitlines()) < 50


def test_a_wide_module_says_how_many_lines_are_missing():
    model = Holder(**{f"n{index}x": weight(index + 1) for index in range(100)})
    assert "└─ … 60 more" in shown(model)


def test_a_module_that_counts_more_by_path_says_so():
    block = linear(4, 4)
    picture = shown(Holder(stack=Holder(first=block, again=block, other=linear(1, 1))))
    assert "├─ first  Linear" in picture
    assert "└─ stack  Holder  42 by path  " in picture


def test_a_long_class_gives_way_before_a_name_or_a_note():
    named = type("AClassOfWhichTheNameIsLongerThanAnyLineHasRoomForAndThenSome", (Holder,), {})
    embed = weight(4, 4)
    picture = shown(Holder(embed=embed, output_projection=named(weight=embed)))
    (line,) = [line for line in picture.splitlines() if "output_projection" in line]
    assert line.startswith("└─ output_projection  AClass")
    assert "e  = embed  " in line
    assert columns(line) <= WIDTH


def test_a_chain_of_hundreds_of_modules_is_cut_where_rails_would_fill_the_line():
    model = linear()
    for _ in range(400):
        model = nn.Sequential(model)
    picture = shown(model).splitlines()
    assert picture[13].lstrip().startswith("└─ 0  Sequential  …")
    assert len(picture) == 19


def test_what_blocks_share_with_a_tensor_outside_is_not_summed():
    shared = weight(3)
    model = Holder(shared=shared, layers=nn.ModuleList(Holder(w=shared, x=weight(1)) for _ in range(4)))
    (line,) = [line for line in shown(model).splitlines() if "layers" in line]
    assert line.split()[-8:] == ["4", "×", "16", "B", "float32", "meta", "○", "ready"]


def test_the_next_step_for_a_large_model_is_one_block():
    with META:
        model = Holder(layers=nn.ModuleList(nn.Linear(8192, 8192, bias=False) for _ in range(8)))
    tree = seen(model)
    assert next_step(tree, outline(tree.columns, 0, lines=9)) == (
        'metaviz.materialize(model, "layers.0", device="cpu")'
    )
    assert shown(nn.Linear(2, 2)).splitlines()[-1] == "2 tensors: ● 2 real"


def test_blocked_tensors_are_told_by_reason_with_what_to_do():
    model = Holder(a=linear(), b=linear(), lazy=nn.LazyLinear(1, device=META))
    told = shown(model, no).splitlines()[-4:]
    assert told == [
        "✗ a.weight, a.bias, b.weight, …: A test says no",
        "  Next: fix(it)",
        "✗ lazy.weight, lazy.bias: lazy: its shape is unknown until the first forward",
        "  Next: metaviz.materialize(model); model(example_input)",
    ]


def net(depth: int = 3) -> nn.Module:
    """Built-in layers in a class of somebody's own, some of them with another init."""
    model = Holder(
        layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(depth)), own=nn.Parameter(torch.ones(4))
    )
    nn.init.zeros_(model.layers[0].weight)
    return model


def footer(model: nn.Module, **options) -> list[str]:
    return metaviz.tree(model, **options).text().split("\n\n")[1].splitlines()


def test_a_model_without_a_tape_says_that_reset_may_give_other_values():
    with META:
        model = net()
    assert footer(model) == [
        "64 parameters, 256 B",
        "7 tensors: ○ 6 ready  ✗ 1 blocked",
        "✗ own: Holder has no reset_parameters, and no tape knows the tensor",
        "? 6 by reset; whether as in an ordinary build, only a tape tells",
        "  Next: model = metaviz.build(type(model), *args)",
    ]
    # The layers alone are in classes of torch only, but a part of a model that is none.
    assert footer(model.layers)[1:] == [
        "6 tensors: ○ 6 ready",
        'Next: metaviz.materialize(model, device="cpu")',
    ]
    assert metaviz.tree(model)["layers"].text().splitlines()[-3].startswith("? 6 by reset")


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(2, 2),
        nn.Conv2d(1, 1, 3),
        nn.BatchNorm1d(2),
        nn.LSTM(2, 2),
        nn.Embedding(3, 2),
        nn.MultiheadAttention(4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_built_in_layers_are_ready_by_reset_without_a_warning(layer):
    lines = footer(nn.Sequential(layer.to("meta")))
    tensors = len(list(layer.parameters())) + len(list(layer.buffers()))
    assert lines[-2].endswith(f": ○ {tensors} ready")
    assert lines[-1] == 'Next: metaviz.materialize(model, device="cpu")'
    assert not any(line.startswith(("?", "≠", "✗")) for line in lines)


def test_a_tape_takes_the_doubt_away_and_tells_where_reset_is_wrong():
    model = metaviz.build(net)
    assert footer(model)[1:] == ["7 tensors: ○ 7 ready", 'Next: metaviz.materialize(model, device="cpu")']
    assert footer(model, source="reset")[1:] == [
        "7 tensors: ○ 6 ready  ✗ 1 blocked",
        "✗ own: Holder has no reset_parameters",
        '  Next: metaviz.materialize(model, "own", source="replay")',
        "≠ layers.0.weight: 1 by reset, with other values than in an ordinary build",
        '  Next: metaviz.tree(model, source="reset").trouble()',
    ]


def test_other_reasons_than_the_first_three_are_pointed_to():
    class Each(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = weight(2)

    model = Holder(**{f"m{n}": type(f"Each{n}", (Each,), {})() for n in range(5)})
    told = footer(model)[2:]
    stuck = [line.split(":")[0] for line in told if line.startswith("✗")]
    assert stuck == ["✗ m0.w", "✗ m1.w", "✗ m2.w", "✗ others for other reasons"]
    assert told[-1] == "  Next: metaviz.tree(model).trouble()"


def test_clean_spells_out_what_a_terminal_would_obey():
    assert clean("plain name") == "plain name"
    assert clean("a\nb\x1b[0m\u202e\u200f") == r"a\nb\x1b[0m\u202e\u200f"
    assert clean("x" * 1000) == "x" * 80 + "…" + "x" * 40


def test_a_tree_shows_itself_as_text_and_as_html():
    tree = metaviz.tree(linear())
    assert repr(tree) == text(tree) == tree.text()
    assert tree._repr_html_() == html(tree) == tree.html()
    assert tree.text(depth=0).splitlines()[1].startswith("Linear  …")


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(lines) == (0, 2)
    assert doctest.testmod(units).failed == 0
