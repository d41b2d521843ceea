"""The rows of a model in columns: what `walk` writes and what everything about a tree is read from.

Rows are numbered in the order of the walk: a module, its parameters, buffers and attributes, then its children.
What rows that look alike have in common is one `Form`, made once: each of the 10,240 experts of a mixture costs
a name and a few references.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from metaviz.core.checkpoint import Checkpoint
from metaviz.core.measure import Facts
from metaviz.core.tally import Tally, by_path, total


class Form:
    """What all rows that look alike have in common.

    Attributes:
        kind: `"module"`, `"parameter"`, `"buffer"` or `"attribute"`.
        cls: Name of the class.
        tally: Sums over the slots below; a tensor's own numbers.
        mark: Of a tensor; a module's follows from its tally.
        source: What would fill a tensor, or None.
        build: Equal for rows that look alike but for the devices and marks of their tensors.
        persistent: Of a buffer.
        facts: Of a tensor: shape, dtype, bytes.
    """

    __slots__ = ("build", "cls", "facts", "kind", "mark", "persistent", "source", "tally")

    def __init__(self, kind: str, cls: str, tally: Tally, build: object, mark: str | None = None):
        self.kind, self.cls, self.tally, self.build, self.mark = kind, cls, tally, build, mark
        self.source: str | None = None
        self.persistent: bool | None = None
        self.facts: Facts | None = None


class Columns:
    """The rows of a model: one entry per row in each list, and only the rows concerned in each dict.

    Attributes:
        names: Last part of the path.
        parents: Row of the module that has this row; -1 for the root.
        ends: The rows from this one up to here lie below it.
        forms: The `Form` of each row.
        answers: Row → what the source said about a meta tensor.
        links: Row → ("tie" / "alias" / "shared" / "cycle", the earlier row that it repeats).
        outward: Row → links of its subtree that lead out of it, as (offset in the subtree, row, what).
        troubles: Row → why it could not be looked at.
        fixes: Row → what to add to its form's tally so that every storage counts once.
        prediction: What Lightning would do, once it has been asked for.
        called: What the user calls the model, for code to paste.
        source: Which source was asked about the meta tensors; `"auto"` for the best of all.
        checkpoint: The checkpoint that was asked, None where none was given.
    """

    def __init__(self):
        self.source = "auto"
        self.checkpoint: Checkpoint | None = None
        self.prediction: Any = None
        self.called = "model"
        self.names: list[str] = []
        self.parents: list[int] = []
        self.ends: list[int] = []
        self.forms: list[Form] = []
        self.answers: dict[int, Any] = {}
        self.links: dict[int, tuple[str, int]] = {}
        self.outward: dict[int, tuple[tuple[int, int, str], ...]] = {}
        self.troubles: dict[int, str] = {}
        self.fixes: dict[int, Tally] = {}

    def path(self, row: int) -> str:
        """Dotted path of a row; `""` for the root."""
        parts = []
        while row > 0:
            parts.append(self.names[row])
            row = self.parents[row]
        return ".".join(reversed(parts))

    def children(self, row: int) -> Iterator[int]:
        """The rows right below a row."""
        child, end = row + 1, self.ends[row]
        while child < end:
            yield child
            child = self.ends[child]

    def tally(self, row: int) -> Tally:
        """Sums over the tensors below a row, each storage counted once."""
        tally = self.forms[row].tally
        return total((tally, self.fixes[row])) if row in self.fixes else tally

    def mark(self, row: int) -> str:
        """The mark of a row."""
        return "blocked" if row in self.troubles else self.forms[row].mark or self.tally(row).mark

    def by_path(self, row: int) -> tuple[int, int]:
        """(numel, nbytes) below a row with every slot counted."""
        tally, (numel, nbytes) = self.forms[row].tally, self.shared.get(row, (0, 0))
        return tally.numel + numel, tally.nbytes + nbytes

    @cached_property
    def shared(self) -> dict[int, tuple[int, int]]:
        """Row → (numel, nbytes) that count by path once more than by storage, for rows with any."""
        return by_path(self)

    @cached_property
    def sources(self) -> list[frozenset[str]]:
        """For each row the sources of the ready tensors below it."""
        nothing: frozenset[str] = frozenset()
        found = [nothing if not form.source else frozenset((form.source,)) for form in self.forms]
        for row in range(len(found) - 1, 0, -1):
            parent = self.parents[row]
            if not found[row] <= found[parent]:
                found[parent] = found[parent] | found[row]
        return found

    @cached_property
    def index(self) -> dict[str, int]:
        """Path → row."""
        paths = [""]
        names, parents = self.names, self.parents
        for row in range(1, len(names)):
            above = paths[parents[row]]
            paths.append(f"{above}.{names[row]}" if above else names[row])
        index: dict[str, int] = {}
        for row, path in enumerate(paths):
            index.setdefault(path, row)
        return index

    def find(self, path: str) -> int | None:
        """The row at a path, also one that leads through a module that is shared; None if there is none."""
        for _ in range(self.limit):
            if path in self.index:
                return self.index[path]
            path = self._through(path)
            if path is None:
                return None
        return None

    # A path can lead around a cycle for ever; one that passes through more shared modules than this is none.
    limit = 100

    def _through(self, path: str) -> str | None:
        """The path with its longest part that names a shared module replaced by that module's first path."""
        front, _, back = path.rpartition(".")
        while front:
            row = self.index.get(front)
            if row is not None:
                what, first = self.links.get(row, ("", row))
                if what not in ("shared", "cycle"):
                    return None
                start = self.path(first)
                return f"{start}.{back}" if start else back
            front, _, last = front.rpartition(".")
            back = f"{last}.{back}"
        return None
