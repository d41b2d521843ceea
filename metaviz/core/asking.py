"""Asking a model about the rows of its tree: from a row back to the tensors, and their verdicts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from metaviz.core.attributes import registered_ids, slots
from metaviz.core.columns import Columns
from metaviz.core.loading import Loading
from metaviz.core.paths import children_of
from metaviz.core.sources import Slot, Sources, check_source
from metaviz.core.verdict import Verdict, together
from metaviz.errors import UnknownPath


def sources_for(model: nn.Module, columns: Columns) -> Sources:
    """All that can give the tensors of a model values, the checkpoint that its tree was made with included."""
    return Sources(model, None if columns.checkpoint is None else Loading(model, columns.checkpoint))


def verdicts_below(model: nn.Module, columns: Columns, row: int, source: str) -> dict[str, Verdict]:
    """The verdicts on the tensors at and below a row, by their paths, ties too.

    Raises:
        UnknownPath: The model has nothing at one of the rows any more.
        ValueError: There is no such source.
    """
    check_source(source, True if source != "checkpoint" else columns.checkpoint)
    asked, known, found = sources_for(model, columns), {}, {}
    registered = functools.cache(lambda: registered_ids(model))
    for each in range(row, columns.ends[row]):
        if columns.forms[each].facts is not None:
            tensor, slot = tensor_at(model, columns, each, registered)
            if id(tensor) not in known:
                known[id(tensor)] = asked.verdict(tensor, slot, source)
            found[columns.path(each)] = known[id(tensor)]
    return found


def verdict_at(model: nn.Module, columns: Columns, row: int, source: str) -> Verdict:
    """The verdict on a row of the tree of a model, as the model is now.

    Raises:
        UnknownPath: The model has nothing at that row any more.
        ValueError: There is no such source.
    """
    check_source(source, True if source != "checkpoint" else columns.checkpoint)
    asked = sources_for(model, columns)
    if columns.forms[row].kind != "module":
        if row in columns.troubles:
            return Verdict(False, None, columns.troubles[row], kind="unsupported")
        tensor, slot = tensor_at(model, columns, row)
        return asked.verdict(tensor, slot, source)
    found = [asked.verdict(tensor, slot, source) for tensor, slot in tensors_below(model, columns, row)]
    return together([verdict for verdict in found if verdict.kind != "real"], source)


def tensors_below(model: nn.Module, columns: Columns, row: int) -> Iterator[tuple[torch.Tensor, Slot]]:
    """Each tensor below a row once, with its first place."""
    seen: set[int] = set()
    registered = functools.cache(lambda: registered_ids(model))
    for each in range(row, columns.ends[row]):
        if columns.forms[each].facts is not None:
            tensor, slot = tensor_at(model, columns, each, registered)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor, slot


def tensor_at(
    model: nn.Module, columns: Columns, row: int, registered: Callable[[], Collection[int]] | None = None
) -> tuple[torch.Tensor, Slot]:
    """The tensor of a row, and where the model holds it.

    Args:
        model: The model.
        columns: The rows of its tree.
        row: Which.
        registered: Gives `registered_ids(model)`: who asks for many rows need not have it made for each attribute.

    Raises:
        UnknownPath: There is none any more.
    """
    module = module_at(model, columns, columns.parents[row])
    name, kind = columns.names[row], columns.forms[row].kind
    space = object.__getattribute__(module, "__dict__")
    if kind == "attribute":
        known = registered_ids(model) if registered is None else registered()
        held = {slot.name: slot.tensor for slot in slots(module, known)}
    else:
        held = space["_parameters" if kind == "parameter" else "_buffers"]
    if held.get(name) is None:
        raise _gone(columns, row)
    return held[name], Slot(module, name, kind)


def module_at(model: nn.Module, columns: Columns, row: int) -> nn.Module:
    """The module of a row.

    Raises:
        UnknownPath: There is none any more.
    """
    rows = [row]
    while columns.parents[rows[-1]] >= 0:
        rows.append(columns.parents[rows[-1]])
    module = model
    for each in reversed(rows[:-1]):
        child = children_of(module).get(columns.names[each])
        if child is None:
            raise _gone(columns, each)
        module = child
    return module


def _gone(columns: Columns, row: int) -> UnknownPath:
    return UnknownPath(
        f"The model has no {columns.path(row)!r} any more: it was changed since the tree was made. "
        "Next: tree = metaviz.tree(model)"
    )
