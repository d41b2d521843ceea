"""From the rows that a front end knows to the paths that people know, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from metaviz.core.columns import Columns
from metaviz.core.fold import runs
from metaviz.core.paths import glob, is_glob, nearest, some
from metaviz.errors import UnknownPath

# Of a long list of siblings the first ones are enough to start with.
_LINES = 18


class Places:
    """The rows of one tree; row 0 is its root, which may be a part of a model.

    Args:
        columns: The rows of the whole model.
        start: The row of the root.
    """

    def __init__(self, columns: Columns, start: int) -> None:
        self.columns = columns
        self.start = start
        self.stop = columns.ends[start]

    def __len__(self) -> int:
        return self.stop - self.start

    def path(self, row: int) -> str:
        """The path of a row in the model."""
        return self.columns.path(row + self.start)

    def row(self, path: str) -> int | None:
        """The row at a path; None if the tree has none there."""
        found = self.columns.find(path)
        return found - self.start if found is not None and self.start <= found < self.stop else None

    def rows(self, paths: str | Iterable[str]) -> list[int]:
        """The rows at some paths or globs, in the order of the tree and without those below another.

        Raises:
            TypeError: A path is not a string.
            UnknownPath: There is nothing at a path.
        """
        listed = [paths] if isinstance(paths, str) else list(paths)
        found: set[int] = set()
        for path in listed:
            if not isinstance(path, str):
                raise TypeError(f"A path is a string, and this is of type {type(path).__name__}.")
            row = self.row(path)
            if row is not None:
                found.add(row)
                continue
            matches = self._matching(path) if is_glob(path) else []
            if not matches:
                raise UnknownPath(self._no_such(path))
            found.update(matches)
        return self.outermost(found)

    def _matching(self, pattern: str) -> list[int]:
        matches = glob(pattern)
        return [
            row - self.start
            for path, row in self.columns.index.items()
            if self.start <= row < self.stop and matches(path)
        ]

    def _no_such(self, path: str) -> str:
        inside = self.columns.path(self.start)
        within = (each for each in self.columns.index if each.endswith(f".{path}"))
        near = next(within, "") or nearest(path, self.columns.index)
        hint = (
            f" The nearest is {near!r}. Next: metaviz.tree({self.columns.called})[{near!r}]" if near else ""
        )
        known = [self.columns.names[child] for child in self.columns.children(self.start)]
        return (
            f"The tree has no module or tensor {path!r}. Right below {inside or 'the root'!r} there are: "
            f"{some(known)}.{hint}"
        )

    def outermost(self, rows: Iterable[int]) -> list[int]:
        """Rows in the order of the tree, without those that are below another one."""
        kept: list[int] = []
        end = 0
        for row in sorted(rows):
            if row >= end:
                kept.append(row)
                end = self.columns.ends[row + self.start] - self.start
        return kept

    def is_module(self, row: int) -> bool:
        """Whether a row is a module."""
        return self.columns.forms[row + self.start].kind == "module"

    def holds(self, row: int) -> bool:
        """Whether there are rows below a row."""
        return self.columns.ends[row + self.start] > row + self.start + 1

    def above(self, row: int) -> Iterator[int]:
        """The rows above a row, from below."""
        row = self.columns.parents[row + self.start]
        while row >= self.start:
            yield row - self.start
            row = self.columns.parents[row]

    def repeated(self, row: int) -> set[int]:
        """The rows right below a row that are shown as parts of runs."""
        found = set()
        for run in runs(self.columns, row + self.start):
            each = run.row
            for _ in range(run.count if run.count > 1 else 0):
                found.add(each - self.start)
                each = self.columns.ends[each]
        return found

    def opened(self, paths: Iterable[str]) -> tuple[list[int], list[int]]:
        """The rows that are open, and those that stand outside of their runs, for a list of `expanded`.

        Raises:
            UnknownPath: There is nothing at a path.
        """
        is_open: set[int] = set()
        unfolded: set[int] = set()
        repeated: dict[int, set[int]] = {}
        for path in paths:
            if path == "*" or path.endswith(".*"):
                (row,) = self.rows(path.removesuffix("*").removesuffix("."))
                unfolded.update(child - self.start for child in self.columns.children(row + self.start))
                is_open.update((row, *self.above(row)))
                continue
            for row in self.rows(path):
                is_open.add(row)
                for above in self.above(row):
                    if above not in repeated:
                        is_open.add(above)
                        repeated[above] = self.repeated(above)
                    # To be seen, it has to stand outside of the run that it is in.
                    if row in repeated[above] and row not in unfolded:
                        unfolded.update(repeated[above])
                    row = above
        return sorted(is_open), sorted(unfolded)

    def expanded(self, is_open: Iterable[int], unfolded: Iterable[int]) -> list[str]:
        """The paths that say what is open: modules, and `"layers.*"` where neighbours are shown one by one."""
        paths = [self.path(row) for row in is_open if self.is_module(row) and self.holds(row)]
        parents = dict.fromkeys(self.columns.parents[row + self.start] for row in unfolded)
        above = [self.columns.path(row) for row in parents if row >= self.start]
        return paths + [f"{path}.*" if path else "*" for path in above]

    def first_look(self, depth: int | None = None) -> list[int]:
        """The rows to open at first: level by level while there is room, or `depth` levels."""
        used, level, found = 1, [self.start], []
        while level and len(found) < (depth if depth is not None else self.stop):
            below: list[int] = []
            lines = 0
            for row in level:
                branches = runs(self.columns, row)
                lines += len(branches)
                # What holds tensors only says enough by its name and size.
                below += [each.row for each in branches if each.count == 1 and self._has_modules(each.row)]
            if depth is None and used + lines > _LINES and found:
                break
            used += lines
            found.append([row - self.start for row in level if self.holds(row - self.start)])
            level = below
        return sorted(row for rows in found for row in rows)

    def _has_modules(self, row: int) -> bool:
        return any(self.columns.forms[child].kind == "module" for child in self.columns.children(row))


def ranges(rows: Sequence[int]) -> list[list[int]]:
    """Sorted rows as `[first, last + 1]` of those in a row."""
    found: list[list[int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1][1] = row + 1
        else:
            found.append([row, row + 1])
    return found


def unranged(pairs: Iterable[Sequence[int]], limit: int) -> list[int]:
    """The rows of some ranges, none of them beyond ``limit``."""
    return [row for first, end in pairs for row in range(max(0, first), min(end, limit))]
