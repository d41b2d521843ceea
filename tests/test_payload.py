"""The data of a tree widget, taken apart again: what is in it, how small it is, and what hostile names become."""

from __future__ import annotations

import dataclasses
import itertools
import re
import zlib
from pathlib import Path

import pytest
import torch
from front import Unpacked, unpack
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trees import (
    META,
    Holder,
    build,
    jumble,
    linear,
    meta,
    mixture,
    only,
    plans,
    quirks,
    seen,
    stack,
    tiny_llama,
    weight,
    yes,
)

import metaviz
from metaviz.views.payload import ROW_BYTES, Head, payload

ROWS_JS = Path(metaviz.__file__).parent / "widgets" / "rows.js"
KIND, CLS, AMOUNT, SIZE, NBYTES, DTYPE, DEVICE, MARK, SOURCE, NOTES = range(10)


def packed(model: nn.Module, answer=yes, part: str = "") -> Unpacked:
    tree = seen(model, answer)
    return unpack(payload(tree[part] if part else tree))


def typedef(name: str) -> str:
    """What `rows.js` says of one of its types, without the outer brackets."""
    comment = ROWS_JS.read_text("utf-8").partition("/**")[2].partition("*/")[0]
    told = [re.sub(r"\s*\n \*\s*", " ", part) for part in comment.split("@typedef ")]
    (found,) = [part for part in told if re.search(rf"[\]}}]}} {name}\b", part)]
    return found.partition(f"}} {name}")[0][2:-1]


def entries(text: str) -> list[str]:
    """The parts of a tuple or object type that commas set apart, at its first level."""
    found, depth = [""], 0
    for char in text:
        depth += (char in "[{<") - (char in "]}>")
        if char == "," and not depth:
            found.append("")
        else:
            found[-1] += char
    return [each.strip() for each in found]


def test_the_front_end_knows_each_field_of_the_head_and_no_other():
    fields = [entry.partition(":")[0] for entry in entries(typedef("Head"))]
    assert fields == [field.name for field in dataclasses.fields(Head)]


def test_a_look_and_a_run_have_the_entries_that_the_front_end_reads():
    model = packed(stack(2))
    assert len(model.looks[0]) == len(entries(typedef("Look"))) == 10
    assert len(model.head["runs"][0]) == len(entries(typedef("Run"))) == 7
    assert [type(each) for each in model.looks[0]] == [str] * 4 + [int] + [str] * 4 + [list]
    assert [type(each) for each in model.head["runs"][0]] == [int] * 2 + [str] * 4 + [int]


def test_the_numbers_of_the_entries_are_those_of_the_front_end():
    (line,) = re.findall(r"^const (KIND = 0.*);$", ROWS_JS.read_text("utf-8"), re.MULTILINE)
    told = {name: int(number) for name, number in (each.split(" = ") for each in line.split(", "))}
    names = ("KIND", "CLS", "AMOUNT", "SIZE", "NBYTES", "DTYPE", "DEVICE", "MARK", "SOURCE", "NOTES")
    assert told == {name: globals()[name] for name in names}
    look = packed(quirks()).look("inv_freq")
    assert [look[told[name]] for name in names] == [
        *("transient", "", "(8,)", "32 B", 32),
        *("float32", "meta", "ready", "replay", [["plain", "buffer, not saved"]]),
    ]


def test_names_and_depths_say_where_each_row_is():
    model = packed(stack(2))
    assert model.names[0] == "" and model.head["title"] == "Holder"
    assert model.paths == [
        *("", "layers", "layers.0", "layers.0.norm", "layers.0.norm.weight", "layers.0.norm.bias"),
        *("layers.0.mlp", "layers.0.mlp.weight", "layers.0.mlp.bias", "layers.1", "layers.1.norm"),
        *("layers.1.norm.weight", "layers.1.norm.bias", "layers.1.mlp", "layers.1.mlp.weight"),
        *("layers.1.mlp.bias", "head", "head.weight", "head.bias"),
    ]
    assert model.depths == [0, 1, 2, 3, 4, 4, 3, 4, 4, 2, 3, 4, 4, 3, 4, 4, 1, 2, 2]
    assert model.head["rows"] == 19


def test_the_head_says_what_the_whole_is():
    head = packed(quirks(), only("weight", "bias")).head
    assert head["summary"][0] == ("2,752 parameters (272 frozen), 10.4 KiB; counted by path 4,624, 17.7 KiB")
    assert head["marks"] == [["real", "2 real"], ["ready", "8 ready"], ["blocked", "7 blocked"]]
    assert head["symbols"] == {"real": "●", "ready": "○", "partial": "◐", "blocked": "✗", "empty": "·"}


def test_looks_say_what_each_row_is():
    model = quirks()
    model.cache = meta(3)
    model = packed(model, only("weight", "bias"))
    assert model.look("embed")[:9] == [
        *("module", "Embedding", "1,600", "6.25 KiB", 6400, "float32", "meta", "ready", "replay"),
    ]
    assert model.look("frozen.bias") == [
        *("parameter", "", "(16,)", "32 B", 32, "bfloat16", "meta", "ready", "replay"),
        [["plain", "frozen"]],
    ]
    assert model.look("norm.running_mean")[KIND] == "buffer"
    assert model.look("norm.running_mean")[MARK] == "blocked"
    assert model.look("norm")[MARK] == "partial"
    assert model.look("real.weight")[DEVICE : SOURCE + 1] == ["cpu", "real", ""]
    assert model.look("cache")[KIND] == "attribute"
    assert model.look("cache")[NOTES] == [["stale", "stale attribute"]]


def test_blocks_that_look_alike_are_one_run():
    model = packed(stack(80))
    assert model.head["runs"] == [[2, 80, "0 … 79", "80 × Block", "80 × 28", "8.75 KiB", 8960]]
    assert len(model.head["looks"]) == 10


def test_a_block_in_another_state_parts_a_run():
    model = stack(8)
    model.layers[3].to_empty(device="cpu")
    runs = packed(model).head["runs"]
    assert [run[:3] for run in runs] == [[2, 3, "0 … 2"], [30, 4, "4 … 7"]]


def test_runs_are_there_on_each_level():
    runs = packed(mixture(3, 4)).head["runs"]
    assert [(run[1], run[2], run[3]) for run in runs] == [
        (3, "0 … 2", "3 × Holder"),
        *[(4, "0 … 3", "4 × Expert")] * 3,
    ]


def test_a_tied_tensor_links_to_the_first_one_and_looks_like_itself():
    model = packed(quirks())
    rows = {path: row for row, path in enumerate(model.paths)}
    assert model.head["links"] == [
        [rows["again"], rows["first"]],
        [rows["head.weight"], rows["embed.weight"]],
    ]
    tied = model.look("head.weight")
    assert (tied[SIZE], tied[NOTES]) == ("tied", [["link", "= embed.weight"]])
    assert model.look("embed.weight")[NOTES] == []
    assert model.look("again")[NOTES] == [["link", "shared with first"]]


def test_two_ties_of_one_shape_each_name_their_own_partner():
    model = Holder(one=weight(2), other=weight(2))
    model._modules["below"] = Holder(first=model.one, second=model.other)
    seen_as = packed(model)
    assert seen_as.look("below.first")[NOTES] == [["link", "= one"]]
    assert seen_as.look("below.second")[NOTES] == [["link", "= other"]]


def test_two_siblings_of_one_object_are_two_rows_and_the_second_is_a_link():
    block = linear()
    model = packed(Holder(one=block, other=block))
    assert model.paths == ["", "one", "one.weight", "one.bias", "other"]
    assert model.head["links"] == [[4, 1]]
    assert model.look("other")[CLS : SIZE + 1] == ["Linear", "6", "shared"]


def test_a_part_starts_at_row_0_and_leaves_out_links_that_lead_out_of_it():
    whole, part = packed(stack(3)), packed(stack(3), part="layers.1")
    assert part.head["title"] == "layers.1 Block"
    assert part.depths == [0, 1, 2, 2, 1, 2, 2]
    assert part.paths[1:] == ["norm", "norm.weight", "norm.bias", "mlp", "mlp.weight", "mlp.bias"]
    assert part.looks == whole.looks[9:16]
    assert packed(quirks(), part="head").head["links"] == []
    assert packed(stack(3), part="layers").head["runs"][0][:2] == [1, 3]


def test_a_model_without_tensors_is_a_tree_all_the_same():
    model = packed(nn.Sequential(nn.ReLU()))
    assert model.head["summary"] == ["0 parameters, 0 B"]
    assert (model.head["marks"], model.head["runs"]) == ([], [])
    assert model.looks == [
        ["module", "Sequential", "", "", 0, "", "", "empty", "", []],
        ["module", "ReLU", "", "", 0, "", "", "empty", "", []],
    ]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("line\nbreak\ttab", r"line\nbreak\ttab"),
        ("\u202egnp.exe".replace(".", ""), r"\u202egnpexe"),
        ("🔥 ñ 层", "🔥 ñ 层"),
        ("<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\ud800", r"\ud800"),
        ("", ""),
        ("a" * 10_000 + "z", "a" * 133 + "…" + "a" * 65 + "z"),
    ],
    ids=["control", "right to left", "emoji", "HTML", "escape", "surrogate", "empty", "long"],
)
def test_a_name_of_the_authors_choice_is_a_harmless_line(name, kept):
    model = Holder()
    model._modules[name] = Holder(weight=weight(2))
    found = packed(model)
    assert found.names == ["", kept, "weight"]
    assert len(found.names[1]) <= 200 and found.names[1].isprintable()


def test_all_words_are_harmless_lines():
    cls = type("Bad\n\u202e<b>", (Holder,), {})
    model = cls(**{"one\n" * 3000: weight(2)})
    model.register_parameter("tie", model._parameters["one\n" * 3000])
    block = Holder(weight=weight(3))
    for number in range(3):
        model._modules[f"\x1b{number}"] = Holder(weight=weight(3))
    model._modules["\nshared"] = model._modules["\nagain"] = block
    found = packed(model)
    words = [found.head["title"], *found.head["summary"], *found.names]
    words += [word for look in found.looks for word in look if isinstance(word, str)]
    words += [text for look in found.looks for _, text in look[NOTES]]
    words += [word for run in found.head["runs"] for word in run if isinstance(word, str)]
    assert any("shared" in word for word in words) and len(found.head["runs"]) == 1
    assert [word for word in words if not word.isprintable() or len(word) > 1200] == []


def test_a_module_that_lies_2000_deep_is_told_with_its_depth():
    inner: nn.Module = Holder(weight=weight(2))
    for _ in range(2000):
        inner = Holder(inner=inner)
    model = packed(inner)
    assert model.depths == list(range(2002))
    assert model.names[-1] == "weight"
    assert (model.head["runs"], model.head["links"]) == ([], [])


@given(plans())
def test_any_model_is_unpacked_as_its_tree_has_it(plan):
    tree = seen(build(plan))
    found = unpack(payload(tree))
    columns = tree.columns
    rows = range(len(columns.names))
    assert found.paths == [columns.path(row) for row in rows]
    assert [look[MARK] for look in found.looks] == [columns.mark(row) for row in rows]
    assert found.head["links"] == [[row, first] for row, (_, first) in columns.links.items()]
    assert [look[CLS] for look in found.looks if look[KIND] == "module"] == [
        columns.forms[row].cls for row in rows if columns.forms[row].kind == "module"
    ]


@given(st.lists(st.integers(1, 4), max_size=12), st.booleans())
def test_the_members_of_a_run_are_neighbours_with_one_look(widths, tied):
    model = nn.Sequential(*(linear(2, width) for width in widths))
    if tied and len(widths) > 1:
        model[-1].bias = model[0].bias
    found = packed(model)
    for first, count, *_ in found.head["runs"]:
        rows = [row for row in range(first, first + 3 * count) if found.depths[row] == 1]
        assert rows == list(range(first, first + 3 * count, 3))
        assert len({tuple(map(repr, found.looks[row])) for row in rows}) == 1
    # No two neighbours that look alike stand side by side.
    together = {row for first, count, *_ in found.head["runs"] for row in range(first, first + 3 * count, 3)}
    alike = {1 + 3 * k for k, pair in enumerate(itertools.pairwise(widths)) if pair[0] == pair[1]}
    assert alike - together <= ({1 + 3 * (len(widths) - 2)} if tied else set())


def size_of(model: nn.Module) -> tuple[float, float]:
    """Bytes a row: of the columns as they are, and of all but the names, deflated."""
    sent = payload(seen(model))
    found = unpack(sent)
    rows, names = found.head["rows"], zlib.compress("\n".join(found.head["names"]).encode())
    return found.column_nbytes / rows, (len(sent) - len(names)) / rows


def test_a_row_takes_ten_bytes_before_it_is_deflated():
    for model in (stack(80), quirks(), mixture(4, 16), linear()):
        assert size_of(model)[0] == ROW_BYTES == 10


def test_a_repetitive_model_takes_five_bytes_a_row_at_most(needs):
    for model in (mixture(8, 64), tiny_llama(needs("transformers"), 64)):
        assert 0 < size_of(model)[1] <= 5


def test_a_real_architecture_takes_five_bytes_a_row_at_most(needs):
    transformers = needs("transformers")
    config = transformers.Qwen3MoeConfig(num_hidden_layers=24)
    with META:
        model = transformers.Qwen3MoeForCausalLM(config)
    assert len(list(model.named_modules())) > 200
    assert 0 < size_of(model)[1] <= 5


def test_a_model_of_which_no_two_modules_are_alike_takes_sixteen_bytes_a_row_at_most():
    model = jumble(300)
    assert len(unpack(payload(seen(model))).head["looks"]) > 600
    assert 0 < size_of(model)[1] <= 16


def test_the_same_tree_gives_the_same_bytes():
    model = quirks()
    assert payload(seen(model)) == payload(seen(model))
    before = payload(seen(model))
    model.own.gain = nn.Parameter(torch.ones(16))
    assert payload(seen(model)) != before
