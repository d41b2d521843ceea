"""What stands beside the tree about one row: of each kind of row, in words that can be shown as they are."""

from __future__ import annotations

import gc
import json
import re

import pytest
import torch
from front import unpack
from torch import nn
from trees import META, Holder, linear, meta, mixture, quirks, stack, weight

import metaviz
from metaviz.core.asking import sources_for
from metaviz.errors import UnknownPath
from metaviz.views.details import LARGE, details
from metaviz.views.payload import payload


def told(model: nn.Module, path: str = "", **options) -> dict:
    tree = metaviz.tree(model, **options)
    found = details(tree[path] if path else tree)
    # What is sent has to be JSON.
    return json.loads(json.dumps(found))


def texts(found) -> list[str]:
    """All strings in it, however deep."""
    if isinstance(found, str):
        return [found]
    items = found.values() if isinstance(found, dict) else found if isinstance(found, list) else []
    return [text for item in items for text in texts(item)]


def test_a_module_is_told_with_its_own_tensors_what_each_source_says_and_the_next_step():
    model = metaviz.build(lambda: Holder(mlp=nn.Linear(4, 4)))
    found = told(model, "mlp")
    assert found["about"] == "mlp (Linear) is a module of 20 parameters in 2 tensors, 80 B on meta."
    assert [found[name] for name in ("path", "copy", "title", "mark")] == ["mlp", "mlp", "Linear", "ready"]
    assert found["answers"][:2] == [
        ["replay", "All 2 tensors can be given values by replay"],
        ["reset", "All 2 tensors can be given values by reset"],
    ]
    assert found["code"] == [["Next", 'metaviz.materialize(model, "mlp", device="cpu")']]
    assert [each["name"] for each in found["tensors"]] == ["weight", "bias"]
    assert found["tensors"][0]["cells"] == ["(4, 4)", "float32", "meta", "64 B"]
    assert found["tensors"][0]["reason"].startswith("kaiming_uniform_ at ")
    assert (found["tensors"][1]["mark"], found["tensors"][1]["note"]) == ("ready", "")


def test_a_tensor_is_told_with_itself():
    found = told(quirks(), "frozen.bias")
    assert found["about"] == "frozen.bias (Parameter) is a frozen parameter (16,) in bfloat16, 32 B on meta."
    (itself,) = found["tensors"]
    assert (itself["name"], itself["note"], itself["cells"]) == (
        *("bias", "frozen"),
        ["(16,)", "bfloat16", "meta", "32 B"],
    )


def test_a_real_tensor_needs_nothing():
    found = told(quirks(), "real.weight")
    assert (found["mark"], found["answers"], found["code"]) == ("real", [], [])
    assert found["about"].endswith("Holds values on cpu.")


def test_a_blocked_tensor_says_who_cannot_and_why():
    found = told(quirks(), "inv_freq")
    assert found["mark"] == "blocked"
    answers = dict(found["answers"])
    assert answers["replay"].startswith("no. No tape knows this tensor")
    assert answers["reset"] == "no. Holder has no reset_parameters"
    assert found["code"] == [["Next", "model = metaviz.build(type(model), *args)"]]
    assert found["tensors"][0]["note"] == "buffer, not saved"


def test_a_stale_attribute_says_that_it_is_one():
    model = Holder()
    model.cache = meta(3)
    found = told(model, "cache")
    assert "it is stale: Module.to and to_empty never see it" in found["about"]
    assert found["tensors"][0]["note"] == "stale attribute"


def test_ties_link_both_ways():
    rows = unpack(payload(metaviz.tree(quirks()))).paths
    assert told(quirks(), "head.weight")["links"] == [
        [rows.index("embed.weight"), "embed.weight", "the same tensor"]
    ]
    assert told(quirks(), "embed.weight")["links"] == [
        [rows.index("head.weight"), "head.weight", "the same tensor"]
    ]
    assert told(quirks(), "again")["links"] == [[rows.index("first"), "first", "the same module"]]
    assert told(quirks(), "norm")["links"] == []


def test_a_view_and_a_cycle_link_to_what_they_repeat():
    base = meta(8)
    model = Holder(base=base, part=base[2:4], inner=Holder())
    model.inner._modules["back"] = model
    rows = unpack(payload(metaviz.tree(model))).paths
    assert told(model, "part")["links"] == [[rows.index("base"), "base", "a view of the same memory"]]
    assert told(model, "inner.back")["links"] == [[0, "the root", "it leads back to"]]


def test_rows_are_counted_from_the_row_that_the_front_end_calls_0():
    model = stack(3)
    model.layers[1].mlp.weight = model.layers[1].norm.weight
    tree = metaviz.tree(model)
    part = tree["layers.1"]
    found = details(part["mlp.weight"], part.root)
    paths = unpack(payload(part)).paths
    assert found["path"] == "layers.1.mlp.weight"
    assert found["tensors"][0]["row"] == paths.index("mlp.weight")
    assert found["links"] == [(paths.index("norm.weight"), "layers.1.norm.weight", "the same tensor")]


def test_many_tensors_and_many_ties_are_counted_beyond_the_first():
    one = weight(2)
    model = Holder(**{f"t{k}": weight(2) for k in range(45)}, **{f"tie{k}": one for k in range(30)})
    found = told(model)
    assert len(found["tensors"]) == 41
    assert found["tensors"][40] == {
        **{"row": -1, "name": "and 35 more", "cells": [], "note": "", "mark": "", "reason": ""}
    }
    assert len(told(model, "tie0")["links"]) == len(told(model, "tie5")["links"]) == 20


def test_a_large_part_is_told_without_asking_each_source():
    model = mixture(4, 160)
    assert len(metaviz.tree(model)) > LARGE
    found = told(model)
    assert found["answers"] == []
    assert re.match(r"1,930 tensors\. ", found["about"])
    assert ["What each source can do, in some seconds", "print(metaviz.tree(model).explain())"] in found[
        "code"
    ]
    assert told(model, "layers.0.gate")["answers"][1][0] == "reset"


def test_the_code_calls_the_model_as_its_user_does():
    tree = metaviz.tree(stack(2))
    tree.columns.called = "net"
    assert details(tree["head"])["code"] == [("Next", 'metaviz.materialize(net, "head", device="cpu")')]


def test_a_checkpoint_is_asked_too():
    stored = {"weight": torch.ones(2, 2)}
    model = linear()
    answers = dict(told(model, "weight", checkpoint=stored)["answers"])
    assert answers["checkpoint"].startswith("yes: ")
    assert dict(told(model, "bias", checkpoint=stored)["answers"])["checkpoint"].startswith("no")


def test_all_that_is_told_of_a_hostile_model_is_harmless():
    model = type("Bad\n<b>", (Holder,), {})()
    for name in ("line\nbreak", "\u202egnp", "\x1b[31m", "<img src=x>", "🔥", "n" * 10_000, "\ud800"):
        model._modules[name] = Holder(weight=weight(2))
        model._parameters[name + "p"] = model._modules[name].weight
        found = json.loads(json.dumps(details(metaviz.tree(model)[name])))
        copied = found.pop("copy")
        assert copied == name.encode("utf-8", "backslashreplace").decode()
        assert [text for text in texts(found) if not text.isprintable() or len(text) > 12_000] == []
    assert [text for text in texts(told(model)["about"]) if not text.isprintable()] == []


def test_code_for_a_hostile_path_is_one_printable_line_of_python():
    model = Holder()
    model._modules['say "hi"\n'] = linear()
    ((_, code),) = told(model, 'say "hi"\n')["code"]
    assert code.isprintable()
    compile(code, "code", "eval")


def test_a_row_that_is_gone_is_refused():
    model = stack(2)
    tree = metaviz.tree(model)
    asked = sources_for(model, tree.columns)
    del model.layers[1]
    with pytest.raises(UnknownPath, match="any more"):
        details(tree["layers.1"], 0, asked)


def test_of_a_model_that_is_gone_the_tree_tells_what_it_knows():
    model = Holder(only=nn.Linear(2, 2, device=META))
    tree = metaviz.tree(model)["only"]
    del model
    gc.collect()
    with pytest.raises(UnknownPath):
        _ = tree.model
    found = details(tree)
    assert found["answers"] == []
    assert found["about"].startswith("only (Linear) is a module of 6 parameters in 2 tensors, 24 B on meta.")
