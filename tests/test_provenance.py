"""Every value is traced to the line of the user's code that wrote it last."""

from __future__ import annotations

import inspect

import torch
from torch import nn

import metaviz
from metaviz.core.provenance import where
from metaviz.core.tape import tag_of


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(3, 3)
        self.scaled = nn.Parameter(torch.ones(3) * 0.5)
        self.norm = nn.LayerNorm(3)
        nn.init.zeros_(self.norm.weight)
        self.register_buffer("literal", torch.tensor(0.07))
        self.register_buffer("part", torch.zeros(4))
        self.part[1:] = 3
        helper(self.norm.bias)
        nn.init.trunc_normal_(self.plain.bias)


def helper(tensor):
    with torch.no_grad():
        tensor.normal_().mul_(2)


def line_with(text: str, within) -> int:
    lines, first = inspect.getsourcelines(within)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_each_tensor_names_the_op_and_the_line_of_its_last_write():
    model = metaviz.build(Layers)
    expected = {
        "plain.weight": ("kaiming_uniform_", line_with("nn.Linear", Layers)),
        "plain.bias": ("trunc_normal_", line_with("trunc_normal_", Layers)),
        "scaled": ("mul", line_with("* 0.5", Layers)),
        "norm.weight": ("zeros_", line_with("zeros_", Layers)),
        "norm.bias": ("mul_", line_with("mul_", helper)),
        "literal": ("constant", line_with("0.07", Layers)),
        "part": ("copy_", line_with("[1:] = 3", Layers)),
    }
    for path, (name, line) in expected.items():
        tensor = model.get_parameter(path) if "." in path or path == "scaled" else getattr(model, path)
        tag = tag_of(tensor)
        op = tag.tape.last_write(tag.storage)
        assert (op.name, op.where.filename, op.where.line) == (name, __file__, line)


def test_a_plan_says_it_in_words():
    model = metaviz.build(Layers)
    reasons = {tensor.path: tensor.reason for tensor in metaviz.plan(model).tensors}
    assert reasons["norm.weight"] == f"zeros_ at test_provenance.py:{line_with('zeros_', Layers)}"


def test_where_is_the_callers_line_and_one_object_per_line():
    places = [where() for _ in range(2)]
    assert places[0] is places[1]
    assert places[0].filename == __file__ and places[0].init is None
    assert places[0].line == line_with("where() for", test_where_is_the_callers_line_and_one_object_per_line)
