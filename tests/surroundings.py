"""Small models with something wrong around them, and what `findings` says of them."""

from __future__ import annotations

import functools

import torch
from torch import nn

import metaviz
from metaviz.core.around import Finding, findings


def kinds(model: nn.Module, **options) -> list[tuple[str, tuple[str, ...]]]:
    return [(found.kind, found.paths) for found in findings(model, **options)]


def only(model: nn.Module, **options) -> Finding:
    (found,) = findings(model, **options)
    return found


def on_meta(fn) -> nn.Module:
    with torch.device("meta"):
        return fn()


def run(finding: Finding, **names) -> dict:
    """Do what the fix says."""
    names = {"metaviz": metaviz, "torch": torch, **names}
    exec(finding.fix, names)
    return names


class Constructed(nn.Module):
    """A linear layer, then whatever `change` does to the module in its constructor."""

    def __init__(self, change=lambda module: None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        change(self)

    def forward(self, x):
        return self.layer(x)


def hide(module):
    table = torch.arange(4).float()
    module.freqs = torch.polar(torch.ones(4), table)
    module.cache = {"cos": [table.cos()]}
    module.call = functools.partial(torch.add, table.sin())


def rotary(module):
    module.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 4, 2) / 4), persistent=False)
    module.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
    module.norm = nn.BatchNorm1d(4)
