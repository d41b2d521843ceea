"""Small models of the kinds that go wrong on the meta device, each with the right verdict for every tensor.

An expectation is one of these words; what is not real or lazy can always be given values by replay:

* ``reset``, ``private``, ``init_weights``: that sort of method gives the values, as an ordinary build has them.
* ``reset!``, ``private!``, ``init_weights!``: it gives other values than an ordinary build has.
* ``no no_method``, ``no part``, ...: no method can, and this is the kind of the reason.
* ``real``, ``lazy``: it has values already, or no shape yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

CASES: list[Case] = []


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what is right for its tensors.

    Attributes:
        make: Makes the model.
        expected: `{path: expectation}` for all of its tensors.
        on_meta: What is otherwise under `torch.device("meta")`, where the tape is missing; None if it cannot be
            built there.
    """

    make: Callable[[], nn.Module]
    expected: dict[str, str]
    on_meta: dict[str, str] | None

    def __str__(self) -> str:
        return self.make.__name__


def case(expected: dict[str, str], on_meta: dict[str, str] | None = {}) -> Callable:  # noqa: B006
    """Add a function that makes a model to the cases, with what is right for it."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES.append(Case(make, expected, on_meta))
        return make

    return add


def linear(path: str, expectation: str = "reset") -> dict[str, str]:
    """The same for the weight and the bias of a layer."""
    return {f"{path}.weight": expectation, f"{path}.bias": expectation}


def holding(**children: nn.Module) -> nn.Module:
    """A module with these children."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module
