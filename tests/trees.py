"""Small models, each a trap or a shape of its own, and answers for their tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

from metaviz.core.tree import ModuleTree, tree
from metaviz.core.verdict import Verdict

META = torch.device("meta")


def yes(tensor, module, name, kind):
    return Verdict(True, True, "a test says so", None, "replay", "replay")


def no(tensor, module, name, kind):
    return Verdict(False, None, "A test says no.", "fix(it)")


def only(*names):
    """An answer that can fill the tensors of these names, and no other."""
    return lambda tensor, module, name, kind: (yes if name in names else no)(tensor, module, name, kind)


def seen(model: nn.Module, answer=yes) -> ModuleTree:
    return tree(model, answer=answer)


def row(model: nn.Module, path: str, answer=yes):
    return seen(model, answer)[path].row


def meta(*shape, **options):
    return torch.empty(shape, device=META, **options)


def weight(*shape, **options):
    return nn.Parameter(meta(*shape), **options)


def linear(rows=2, columns=2, **options):
    return nn.Linear(rows, columns, device=META, **options)


class Holder(nn.Module):
    """A module made of what it is given: modules, parameters, and buffers for plain tensors."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self._modules[name] = part
            elif isinstance(part, nn.Parameter):
                self._parameters[name] = part
            else:
                self.register_buffer(name, part)


def quirks() -> nn.Module:
    """Tied, shared, frozen, bfloat16, batch norm, unsaved buffer, parametrization, mixed devices."""
    with META:
        shared = nn.Linear(16, 16)
        model = Holder(
            embed=nn.Embedding(100, 16),
            first=shared,
            again=shared,
            frozen=nn.Linear(16, 16, dtype=torch.bfloat16).requires_grad_(False),
            norm=nn.BatchNorm1d(16),
            normed=torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            own=Holder(gain=weight(16)),
            head=nn.Linear(16, 100, bias=False),
        )
        model.head.weight = model.embed.weight
        model.register_buffer("inv_freq", torch.empty(8), persistent=False)
    model._modules["real"] = nn.Linear(16, 16)
    return model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Linear(4, 4)


def stack(depth: int) -> nn.Module:
    """`layers.0 … depth - 1`, all alike, on meta."""
    with META:
        return Holder(layers=nn.ModuleList(Block() for _ in range(depth)), head=nn.Linear(4, 2))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(4, 8, bias=False)
        self.up_proj = nn.Linear(4, 8, bias=False)
        self.down_proj = nn.Linear(8, 4, bias=False)


def mixture(layers: int, experts: int, device=META) -> nn.Module:
    """A mixture of experts on meta; 80 layers of 128 experts make 41,284 modules."""
    with device:
        return Holder(
            embed=nn.Embedding(16, 4),
            layers=nn.ModuleList(
                Holder(
                    norm=nn.RMSNorm(4),
                    gate=nn.Linear(4, experts, bias=False),
                    experts=nn.ModuleList(Expert() for _ in range(experts)),
                )
                for _ in range(layers)
            ),
            norm=nn.RMSNorm(4),
        )


def tiny_llama(transformers, layers: int) -> nn.Module:
    """A Llama of 34,144 parameters (with 3 layers) on meta, its head tied to its embedding."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    # Some versions import more of torch here, which fails in a meta context.
    cls = transformers.LlamaForCausalLM
    with META:
        return cls(config)


def jumble(width: int) -> nn.Module:
    """Many modules of which no two are alike, with names full of characters that HTML has to escape."""
    model = Holder()
    for index in range(width):
        model._modules["<&>'\"" * 20 + str(index)] = linear(index + 1, 1)
    return model


class Plan(NamedTuple):
    """How to make a random model: for each module its children and tensors, by number."""

    children: list[list[int]]
    tensors: list[list[tuple[str, int]]]


@st.composite
def plans(draw):
    size = draw(st.integers(1, 9))
    children = [
        draw(st.lists(st.integers(0, index - 1), max_size=4)) if index else [] for index in range(size)
    ]
    slots = st.lists(st.tuples(st.sampled_from(["parameter", "buffer"]), st.integers(0, 5)), max_size=3)
    return Plan(children, [draw(slots) for _ in range(size)])


def build(plan: Plan) -> nn.Module:
    """A model whose modules and tensors are shared, tied and views of each other as it comes."""
    base = meta(8)
    pool = [meta(2), meta(2), torch.zeros(3), base[:4], base[2:], meta(1).expand(5)]
    parameters = [nn.Parameter(tensor, requires_grad=index % 2 == 0) for index, tensor in enumerate(pool)]
    modules = []
    for children, tensors in zip(plan.children, plan.tensors, strict=True):
        module = nn.Module()
        for name, (kind, index) in enumerate(tensors):
            if kind == "parameter":
                module.register_parameter(f"t{name}", parameters[index])
            else:
                module.register_buffer(f"t{name}", pool[index])
        for name, child in enumerate(children):
            module.add_module(str(name), modules[child])
        modules.append(module)
    return modules[-1]
