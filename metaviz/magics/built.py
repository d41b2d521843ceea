"""What a cell built: the models that it bound to names, what they would weigh, and what the cell cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from metaviz.core import devices
from metaviz.core.tree import ModuleTree, tree
from metaviz.core.units import format_bytes, format_count, format_seconds
from metaviz.magics.names import models

# Fewer new modules than this are no reason for a cell to be slow.
_MANY_IMPORTS = 20
# What fits on a line of a notebook.
_WIDTH = 104
_TREES = 3
_LINES = 20


class Meter:
    """Time, memory and names around a cell.

    Args:
        namespace: The user's namespace.

    Attributes:
        cost: What the cell took, in words; set when it has ended.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self.cost = ""

    def __enter__(self) -> Meter:
        self._before = dict(self._namespace)
        self._imported = set(sys.modules)
        self._nbytes = devices.resident_nbytes()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, nbytes = time.perf_counter() - self._began, devices.resident_nbytes() - self._nbytes
        note = " with imports" if len(sys.modules.keys() - self._imported) > _MANY_IMPORTS else ""
        self.cost = f"in {format_seconds(seconds)}{note}, resident memory {_signed(nbytes)}"

    def models(self) -> list[tuple[str, nn.Module]]:
        """The models that are new under their names, and no parts of others."""
        old = {id(thing) for thing in self._before.values()}
        return [(name, model) for name, model in models(self._namespace).items() if id(model) not in old]


class Opened(ModuleTree):
    """A tree that shows only its upper levels."""

    def __init__(self, tree: ModuleTree, depth: int) -> None:
        super().__init__(tree.columns, tree.root, tree._model)
        self._depth = depth

    def __repr__(self) -> str:
        return self.text(depth=self._depth)

    def _repr_html_(self) -> str:
        return self.html(depth=self._depth)


def describe(seen: ModuleTree) -> str:
    """``"LlamaForCausalLM, 70.6 B parameters, 131 GiB on meta"``."""
    totals = seen.totals
    where = ", ".join(f"{format_bytes(nbytes)} on {device}" for device, nbytes in totals.devices.items())
    return f"{seen.row.cls}, {format_count(totals.numel)} parameters, {where or 'no tensors'}"


def report(meter: Meter, trees: bool = True) -> Iterator[str | ModuleTree]:
    """What to show after a cell: a line for each model, and its tree unless there are many."""
    seen = [(name, tree(model)) for name, model in meter.models()]
    if not seen:
        yield f"Recorded {meter.cost}. No name holds a new model: bind it in the cell, as in model = Net()"
    for name, each in seen[:_LINES]:
        each.columns.called = name
        line, cost = f"{name}: {describe(each)}", f"built {meter.cost}"
        between = ", " if len(line) + len(cost) < _WIDTH else "\n"
        yield line + between + cost if len(seen) == 1 else line
        if trees and len(seen) <= _TREES:
            yield each
    if len(seen) > _LINES:
        yield f"… and {len(seen) - _LINES} more. See them: %metaviz"
    if len(seen) > 1:
        yield f"{len(seen)} models, built {meter.cost}"


def _signed(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 0 else f"+{format_bytes(nbytes)}"
