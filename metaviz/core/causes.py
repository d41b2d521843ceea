"""Causes of trouble in the rows of a tree: what blocks tensors, and which may come out otherwise than they should."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from metaviz.core.columns import Columns
from metaviz.core.paths import children_of
from metaviz.core.reasons import fact, quoted, step

_LISTED = 3
# What numbers stand in brackets differs from shape to shape, and is no other cause.
_NUMBERS = re.compile(r"\([^()]*\d[^()]*\)")


class Trouble(NamedTuple):
    """One cause of trouble.

    Attributes:
        kind: `"blocked"` (no source), `"silent"` (reset gives other values), `"untold"` (whether it does is not
            known), `"lightning"`, or the kind of a `metaviz.Finding`.
        reason: What it is, in a sentence.
        paths: The tensors concerned, the first path of each.
        fix: The next step as code, None where there is none.
    """

    kind: str
    reason: str
    paths: tuple[str, ...]
    fix: str | None = None

    @property
    def modules(self) -> int:
        """How many modules hold the tensors concerned."""
        return len({path.rpartition(".")[0] for path in self.paths})


def by_cause(columns: Columns, kind: str, rows: Iterable[int]) -> list[Trouble]:
    """Rows of tensors by what is wrong with them, in the order of the first of each.

    Args:
        columns: The rows.
        kind: `"blocked"`, `"silent"` or `"untold"`.
        rows: The tensors concerned, in order.
    """
    groups: dict[str, dict[int, str]] = {}
    for row in rows:
        reason = fact(columns, row)
        groups.setdefault(_NUMBERS.sub("(…)", reason), {})[row] = reason
    return [_trouble(columns, kind, cause, reasons) for cause, reasons in groups.items()]


def _trouble(columns: Columns, kind: str, cause: str, reasons: dict[int, str]) -> Trouble:
    paths = tuple(columns.path(row) or "the root" for row in reasons)
    first, *others = dict.fromkeys(
        step(columns, row) if kind == "blocked" else columns.answers[row].fix for row in reasons
    )
    fix = replayed(paths) if others and first and 'source="replay"' in first else first
    said = set(reasons.values())
    return Trouble(kind, said.pop() if len(said) == 1 else cause, paths, fix)


def replayed(paths: tuple[str, ...]) -> str:
    """The code that gives some tensors the values that are on the tape; to all where they are many."""
    listed = f"[{', '.join(map(quoted, paths))}]" if len(paths) > 1 else quoted(paths[0])
    chosen = f", {listed}" if len(paths) <= _LISTED else ""
    return f'metaviz.materialize(model{chosen}, source="replay")'


def wrong(columns: Columns, root: int) -> Iterator[int]:
    """The tensors below a row that reset gives other values than an ordinary build."""
    return _reset(columns, root, False)


def untold(columns: Columns, root: int, model: nn.Module | None) -> Iterator[int]:
    """The tensors below a row of which nobody can tell whether reset gives them what an ordinary build would.

    Layers of torch.nn in containers of torch.nn are what their own methods make them: no constructor of
    somebody else could have given them other values.

    Args:
        columns: The rows.
        root: Where to start.
        model: The model; None if it is gone.
    """
    authors = Authors(columns, model)
    return (row for row in _reset(columns, root, None) if authors.above(columns.parents[row]))


def _reset(columns: Columns, root: int, faithful: bool | None) -> Iterator[int]:
    """The first slots of tensors on which this is the verdict of reset, in the order of the walk."""
    if "reset" not in columns.sources[root]:
        return
    for row in range(root, columns.ends[root]):
        tied = columns.links.get(row, ("",))[0] == "tie"
        if columns.forms[row].source == "reset" and not tied and columns.answers[row].faithful is faithful:
            yield row


def module_of(cls: type) -> str:
    """Name of the Python module of a class, whatever its metaclass says."""
    return str(type.__getattribute__(cls, "__module__"))


class Authors:
    """Tells whether a class from outside of torch.nn is at the row of a module or above it.

    Args:
        columns: The rows.
        model: The model; None if it is gone.
    """

    def __init__(self, columns: Columns, model: nn.Module | None) -> None:
        self._columns = columns
        self._modules: dict[int, nn.Module | None] = {0: model}
        self._found: dict[int, bool] = {-1: False}

    def above(self, row: int) -> bool:
        """Whether there is one; where the model is gone, there may have been."""
        todo = [row]
        while todo[-1] not in self._found:
            todo.append(self._columns.parents[todo[-1]])
        found = self._found[todo.pop()]
        while todo:
            row = todo.pop()
            module = self._module(row)
            found = found or module is None or not module_of(type(module)).startswith("torch.nn.")
            self._found[row] = found
        return found

    def _module(self, row: int) -> nn.Module | None:
        """The module of a row whose parent's is known."""
        if row not in self._modules:
            parent = self._modules[self._columns.parents[row]]
            found = None if parent is None else children_of(parent).get(self._columns.names[row])
            self._modules[row] = found
        return self._modules[row]
