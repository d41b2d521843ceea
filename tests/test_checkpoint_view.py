"""What a checkpoint shows of itself: exact counts in a few lines, harmless whatever the names in it are."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

import metaviz
from metaviz.views.checkpoint import MOST, text

W = torch.ones(2, 3)


def lines(state) -> list[list[str]]:
    """The cells of the table."""
    table = str(metaviz.checkpoint(state)).split("\n\n")[1]
    return [re.split(r"  +", line) for line in table.splitlines()[1:]]


def test_a_checkpoint_shows_names_that_differ_in_numbers_as_one(golden):
    state = {f"layers.{k}.{name}": torch.ones(2, 3) for k in (0, 1, 2, 7) for name in ("up", "<b>down</b>")}
    checkpoint = metaviz.checkpoint(state | {"head": torch.ones(5, dtype=torch.bfloat16)})
    golden(str(checkpoint))
    page = checkpoint._repr_html_()
    assert "&lt;b&gt;down&lt;/b&gt;" in page and "<b>down" not in page


def test_a_module_and_a_tensor_of_one_name_have_their_own_lines():
    assert lines({"a": W, "a.b": W.clone()}) == [
        ["a", "1", "(2, 3)", "float32", "24 B"],
        ["a.b", "1", "(2, 3)", "float32", "24 B"],
    ]


def test_shapes_and_dtypes_that_differ_within_a_line_are_told():
    state = {"l.0.w": W, "l.1.w": torch.ones(4), "l.2.w": torch.ones(4, dtype=torch.int8)}
    assert lines(state) == [["l.0–2.w", "3", "(2, 3) and 1 other", "float32, int8", "44 B"]]


def test_what_is_stored_once_counts_once():
    state = {"embed.w": W, "head.w": W}
    assert [cells[-1] for cells in lines(state)] == ["24 B", "shared"]
    assert "2 tensors, 24 B" in str(metaviz.checkpoint(state))
    assert "\nfloat32 24 B\n" in str(metaviz.checkpoint(state))


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["l.0.w", "l.1.w", "l.5.w"], "l.0–1,5.w"),
        (["l.0.w", "l.00.w"], "l.0.w"),  # one is no number, so they share no line
        (["l.*.0.w", "l.*.1.w"], "l.*.0–1.w"),
        (["v1.0.w", "v1.1.w"], "v1.0–1.w"),
        (["0", "1"], "0–1"),
        ([f"l.{n}.w" for n in range(0, 40, 2)], "l.0,…,38.w"),
        (["٣.w"], "٣.w"),
    ],
)
def test_numbers_in_names_are_ranges(names, shown):
    assert lines(dict.fromkeys(names, W))[0][0] == shown


def test_a_number_of_thousands_of_digits_is_a_name():
    assert lines({f"l.{'1' * 5000}.w": W})[0][0].startswith("l.1111")


def test_names_are_text_and_stay_on_their_line():
    name = '<img src=x onerror=alert(1)>"\n\x1b[31m\u202e' + "n" * 10_000
    checkpoint = metaviz.checkpoint({name: W, "layers.0." + "m" * 10_000: W})
    assert "\x1b" not in str(checkpoint) and "\u202e" not in str(checkpoint)
    assert max(map(len, str(checkpoint).splitlines())) < 120
    page = checkpoint._repr_html_()
    assert "<img" not in page and "&lt;img" in page and "\u202e" not in page
    assert len(page) < 10_000


def test_what_has_no_values_says_why_and_takes_no_bytes():
    shown = str(metaviz.checkpoint(nn.Linear(2, 2, device="meta").state_dict()))
    assert shown.startswith("the state dict: 2 tensors, 0 B")
    assert "✗ 2 tensors without values: it is on meta, so there are no values in it" in shown
    assert shown.count("no values\n") == 2


def test_shards_are_named_and_a_missing_one_is_no_obstacle(tmp_path, needs):
    save = needs("safetensors.torch").save_file
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, shard in zip("ab", shards, strict=False):
        save({f"{name}.w": W}, tmp_path / shard)
    index = {f"{name}.w": shard for name, shard in zip("abc", shards, strict=True)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    shown = str(metaviz.checkpoint(tmp_path))
    assert "3 tensors, 48 B in 2 files (safetensors)" in shown
    assert "2 files: model-00001-of-00003.safetensors, model-00002-of-00003.safetensors\n" in shown
    assert re.search(r"\nc\.w +1  \? +\? +no values\n", shown)
    assert "✗ 1 tensor without values: its file 'model-00003-of-00003.safetensors' is missing" in shown


def test_the_next_step_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(2, 3).state_dict(), "it's.pt")
    code = str(metaviz.checkpoint("it's.pt")).rpartition("Next: ")[2]
    assert eval(code, {"metaviz": metaviz, "model": nn.Linear(2, 3)}).missing == ()
    mapped = metaviz.checkpoint({"net.weight": W}, key_map=[("net", "")])
    assert str(mapped).endswith("Next: metaviz.match(model, checkpoint)")


def test_a_hundred_thousand_names_make_a_short_page():
    state = dict.fromkeys(
        (f"layers.{k}.experts.{j}.w" for k in range(100) for j in range(1000)), torch.ones(1)
    )
    checkpoint = metaviz.checkpoint(state)
    assert "layers.0–99.experts.0–999.w" in str(checkpoint)
    assert "100,000" in str(checkpoint)
    assert len(checkpoint._repr_html_()) < 10_000


def test_of_too_many_kinds_the_rest_is_counted():
    checkpoint = metaviz.checkpoint({f"n{k}": W.clone() for k in range(MOST + 40)})
    assert "\n… and 40 tensors of 40 kinds\n" in text(checkpoint)
    assert "… and 40 tensors of 40 kinds" in checkpoint._repr_html_()
    assert "\nfloat32 2.34 KiB\n" in text(checkpoint)


def test_what_a_name_has_in_common_with_the_line_above_is_dimmed():
    page = metaviz.checkpoint({"a.b.c": W, "a.bd": W, "a.b.e": W})._repr_html_()
    assert '<td><span class="mv-where">a.<wbr></span>bd</td>' in page
    assert "<td>a.<wbr>b.<wbr>c</td>" in page
