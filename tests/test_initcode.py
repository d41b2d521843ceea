"""Code to paste: it does what the constructor did, or says that it does not; no name of a model gets to be code."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import init
from torch.nn.utils import parametrizations

import metaviz
from metaviz.core.initcode import Entry, reset_method
from metaviz.core.origin import origin_of
from metaviz.core.paths import Model
from metaviz.core.signature import same, signature


def entries(model: nn.Module) -> list[Entry]:
    found = []
    for place in Model(model).places:
        if not place.slot.reference:
            origin = origin_of(place.slot.tensor, place.module, place.slot.name)
            window = origin and origin.window
            found.append((place.path, origin and origin.tape, window, place.slot.kind))
    return found


def method_of(code: str) -> Callable[[nn.Module], None]:
    """The pasted method, attached to a class of its own."""
    space = {"torch": torch, "Net": type("Net", (), {})}
    exec(compile(code, "<pasted>", "exec"), space)
    return space["Net"].reset_parameters


def garbage(model: nn.Module) -> nn.Module:
    """The meta model on the CPU, with values that no constructor leaves."""
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model


class Holder(nn.Module):
    """One parameter, and the buffers that are handed over."""

    def __init__(self, weight: torch.Tensor, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def sinusoids() -> torch.Tensor:
    table, angles = torch.zeros(6, 4), torch.arange(6.0)[:, None] * torch.exp(torch.arange(2) * -1.5)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()
    return table


def normed(model: nn.Module) -> nn.Module:
    for name, tensor in model.named_parameters():
        init.zeros_(tensor) if name.endswith("bias") else init.normal_(tensor, 0, 0.02)
    return model


FIXED = {
    "zeros": lambda: Holder(torch.zeros(3)),
    "a bool and an int": lambda: Holder(
        torch.ones(3), mask=torch.ones(2, dtype=torch.bool), steps=torch.tensor(7)
    ),
    "a small number": lambda: Holder(1e-5 * torch.ones(300)),
    "infinity": lambda: Holder(torch.full((3,), -math.inf)),
    "half": lambda: Holder(torch.full((3,), 0.1).half()),
    "data": lambda: Holder(torch.tensor([[0.1, math.inf], [3.0, -2.5e-8]])),
    "rotary": lambda: Holder(1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64)),
    "rotary in another way": lambda: Holder(torch.exp(torch.arange(0, 64, 2) * (-math.log(10000.0) / 64))),
    "positions": lambda: Holder(torch.ones(1), ids=torch.arange(100).expand(1, -1)),
    "sinusoids": lambda: Holder(sinusoids()),
    "causal mask": lambda: Holder(torch.full((9, 9), -math.inf).triu(1)),
    "copies": lambda: Holder(torch.linspace(0, 1, 20).clone(), other=torch.linspace(0, 1, 20)),
    "dirac": lambda: Holder(init.dirac_(torch.empty(3, 3, 5))),
    "eye": lambda: Holder(init.eye_(torch.empty(9, 4))),
    "transposed": lambda: Holder(torch.arange(12.0).view(3, 4).T),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
}
DRAWN = {
    "Linear": lambda: nn.Linear(4, 5),
    "Linear in half": lambda: nn.Linear(4, 5).half(),
    "Linear with 0.02": lambda: normed(nn.Linear(4, 5)),
    "scaled": lambda: Holder(torch.randn(4, 5) * 0.02),
    "Embedding with a padding row": lambda: nn.Embedding(6, 4, padding_idx=2),
    "three in one": lambda: Holder(
        [w := torch.empty(6, 4), init.normal_(w[:2]), init.normal_(w[2:4], std=2), init.zeros_(w[4:])][0]
    ),
    "truncated": lambda: Holder(init.trunc_normal_(torch.empty(9, 4), std=0.02)),
    "truncated where it is felt": lambda: Holder(init.trunc_normal_(torch.empty(9, 4))),
    "orthogonal": lambda: Holder(init.orthogonal_(torch.empty(4, 5))),
    "orthogonal with a gain": lambda: Holder(init.orthogonal_(torch.empty(4, 5), 2**0.5)),
    "exponential": lambda: Holder(torch.empty(3).exponential_(2.0)),
    "random integers": lambda: Holder(torch.empty(9).random_(0, 5)),
    "a walk": lambda: Holder(torch.randn(9).cumsum(0)),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "LSTM": lambda: nn.LSTM(4, 4, 2),
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)),
}


@pytest.mark.parametrize("make", FIXED.values(), ids=FIXED)
def test_the_code_gives_the_very_values_where_nothing_is_drawn(make):
    code = reset_method("Net", entries(metaviz.build(make)))
    model, eager = garbage(metaviz.build(make)), make()
    method_of(code)(model)
    for name, tensor in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), (name, code)


@pytest.mark.parametrize("make", DRAWN.values(), ids=DRAWN)
def test_the_code_draws_from_the_distribution_of_the_constructor(make):
    built = entries(metaviz.build(make))
    method = method_of(reset_method("Net", built))
    model = metaviz.build(make)
    with metaviz.recording():
        method(model)
    for (path, tape, window, _), (_, again, done, _) in zip(built, entries(model), strict=True):
        assert same(signature(tape, window), signature(again, done)) is True, path
    real = garbage(metaviz.build(make))
    method(real)
    assert not any(tensor.isnan().any() for tensor in real.state_dict().values())


@pytest.mark.parametrize("name", ["scaled", "Embedding with a padding row", "orthogonal", "a walk"])
def test_the_code_gives_the_very_draws_under_one_seed(name):
    # What is left of an nn.Linear draws in another order; these have one tensor.
    method = method_of(reset_method("Net", entries(metaviz.build(DRAWN[name]))))
    real = garbage(metaviz.build(DRAWN[name]))
    torch.manual_seed(3)
    method(real)
    torch.manual_seed(3)
    torch.testing.assert_close(real.weight, DRAWN[name]().weight)


def test_the_code_is_what_one_would_write():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.bias = nn.Parameter(torch.empty(4).normal_(0, 0.02))
            self.gamma = nn.Parameter(1e-5 * torch.ones(4))
            self.proj = nn.Parameter(init.xavier_uniform_(torch.empty(4, 4)))
            self.table = nn.Parameter(init.normal_(torch.empty(5, 4)))
            init.zeros_(self.table[0])
            self.register_buffer("inv_freq", 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64))
            self.register_buffer("pair", torch.tensor([0.5, 2.0]))

    arange = 'torch.arange(0, 64, 2, dtype=torch.int64, device="cpu").to(torch.float32)'
    code = reset_method("Block", entries(metaviz.build(Block)))
    assert code.splitlines() == [
        "@torch.no_grad()",
        "def reset_parameters(self):",
        "    torch.nn.init.ones_(self.scale)",
        "    torch.nn.init.normal_(self.bias, 0.0, 0.02)",
        "    torch.nn.init.constant_(self.gamma, 1e-05)",
        "    torch.nn.init.xavier_uniform_(self.proj)",
        "    torch.nn.init.normal_(self.table, 0.0, 1.0)",
        "    torch.nn.init.zeros_(self.table[0])",
        f"    x1 = 10000.0 ** ({arange} / 64)",
        "    self.inv_freq.copy_(1.0 / x1)",
        '    self.pair.copy_(torch.tensor([0.5, 2.0], dtype=torch.float32, device="cpu"))',
        "",
        "Block.reset_parameters = reset_parameters",
    ]


def test_fills_alone_need_no_decorator():
    assert reset_method("Net", entries(metaviz.build(nn.Linear, 4, 4))).startswith("def reset_parameters")


@pytest.mark.parametrize(
    "make",
    [
        lambda: init.sparse_(torch.empty(4, 4), 0.5),
        lambda: torch.empty(3),
        lambda: torch.linalg.qr(torch.randn(4, 4))[0],
        lambda: torch.tensor([float(x) for x in range(50)]),
    ],
    ids=["sparse", "empty", "qr", "much data"],
)
def test_what_is_not_understood_is_named_and_raises(make):
    code = reset_method("Net", entries(metaviz.build(lambda: Holder(make(), one=torch.ones(2)))))
    model = garbage(metaviz.build(lambda: Holder(torch.empty(4, 4), one=torch.ones(2))))
    with pytest.raises(NotImplementedError, match=r"Net\.reset_parameters does not fill: weight"):
        method_of(code)(model)
    assert model.one.tolist() == [1, 1]
    assert "# weight: " in code


@pytest.mark.parametrize("second", [torch.clone, lambda drawn: drawn.cumsum(0)], ids=["a copy", "a sum"])
def test_tensors_that_come_from_one_draw_are_not_drawn_apart(second):
    def make() -> nn.Module:
        drawn = torch.randn(9)
        return Holder(drawn, other=second(drawn), own=torch.randn(9).cumsum(0))

    code = reset_method("Net", entries(metaviz.build(make)))
    assert "# other: it comes from the same draw as weight; copy how from the constructor" in code
    with pytest.raises(NotImplementedError, match=r"does not fill: other$"):
        method_of(code)(garbage(metaviz.build(make)))


def test_a_tied_tensor_is_filled_under_both_its_names():
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    model = garbage(metaviz.build(tied))
    method_of(reset_method("Net", entries(metaviz.build(tied))))(model)
    assert not model[1].weight.isnan().any()


def test_a_tensor_that_no_tape_knows_is_named_and_raises():
    code = reset_method("Net", [("weight", None, None, "parameter")])
    assert "# weight: no tape knows where its values come from; fill it by hand" in code
    with pytest.raises(NotImplementedError):
        method_of(code)(nn.Linear(1, 1))


def test_no_tensors_make_a_method_that_does_nothing():
    assert method_of(reset_method("Net", []))(nn.Identity()) is None


def test_tensors_in_attributes_leave_meta_too():
    class Cached(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.cache = {'a\n"]; oops(': [torch.arange(30.0) * 2]}

    code = reset_method("Net", entries(metaviz.build(Cached)))
    model = garbage(metaviz.build(Cached))
    method_of(code)(model)
    ((cached,),) = model.cache.values()
    assert cached.tolist() == [2.0 * x for x in range(30)]


EVIL = [
    "half",
    "class",
    "__private",
    "0",
    "<img src=x>",
    "a b",
    "x\n    oops()",
    "x'] + oops() + ['",
    'x"] #',
    "ﬁ",
    "\u202egnp",
    "\\",
]


@pytest.mark.parametrize("name", EVIL, ids=ascii)
@pytest.mark.parametrize("known", [True, False])
def test_names_are_only_ever_looked_up(name, known):
    model = Holder(torch.full((3,), 9.0))
    model._parameters[name] = model._parameters.pop("weight")
    built = entries(metaviz.build(nn.LayerNorm, 3))[0][1:] if known else (None, None, "parameter")
    code = reset_method(name, [(name, *built)])
    assert {node.func.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)} <= {"type", "NotImplementedError"}  # fmt: skip
    assert code.isprintable() or all(line.isprintable() for line in code.split("\n"))
    # Without the line that attaches it to a class of this name.
    code = "\n".join(code.rstrip().split("\n")[:-1]) + "\nNet.reset_parameters = reset_parameters"
    if known:
        method_of(code)(model)
        assert model._parameters[name].tolist() == [1, 1, 1]
    else:
        with pytest.raises(NotImplementedError):
            method_of(code)(model)


@pytest.mark.parametrize(
    "name", ["f().weight", "cache[f()]", "a b", "x\ny", "x; y", "cache['…'][0]", "x[0:1]"]
)
def test_an_attribute_that_is_no_plain_look_up_is_left_to_the_user(name):
    built = entries(metaviz.build(nn.LayerNorm, 3))[0][1:3]
    code = reset_method("Net", [(name, *built, "attribute")])
    lines = [line for line in code.splitlines() if line.startswith("    ")]
    if lines[0].startswith("    #"):
        assert lines[1].startswith("    raise NotImplementedError(")
    else:
        assert code.isascii() and "'\\u2026'" in lines[1]


def test_paths_through_numbered_and_parametrized_modules_lead_there():
    model = metaviz.build(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3), dim=None)))
    code = reset_method("Net", [entry for entry in entries(model) if entry[0].endswith("bias")])
    assert "self._modules['0'].bias" in code
    path = "parametrizations.weight.original1"
    nested = reset_method("Net", [(path, *entries(model)[0][1:])])
    assert "self.parametrizations.weight.original1" in nested


def test_writing_code_draws_nothing_and_changes_no_model(generators_stay):
    model = metaviz.build(DRAWN["orthogonal"])
    before = {name: (tensor.is_meta, tensor._version) for name, tensor in model.named_parameters()}
    reset_method("Net", entries(model))
    assert {name: (tensor.is_meta, tensor._version) for name, tensor in model.named_parameters()} == before
