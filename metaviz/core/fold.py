"""Folding: what to show of a tree when there is room for some lines only.

Repeated blocks become one line, `layers.0 … 79`, as long as they look alike and are in the same state; a
block that was materialized stands out of its run. Two rows look alike when they have one `Form`, so folding
compares references.
"""

from __future__ import annotations

from collections import deque

from metaviz.core.columns import Columns

# A ModuleList has no forward: where its blocks fold into so many runs, they are shown in its place.
INLINE_RUNS = 5
_DIGITS = "0123456789"


class Branch:
    """One line of a drawing: a row, or a run of rows that look alike, with the lines below it.

    Attributes:
        row: The row; the first one of a run.
        last: The last row of a run; `row` itself where there is one only.
        count: How many rows the line stands for.
        label: Name to show: `"q_proj.weight"`, `"layers.0 … 79"`.
        shown: Row whose numbers are shown: a module with one tensor and nothing else shares a line with it.
        pair: Whether it is a module of nothing but a weight and its bias, which one line can describe.
        branches: The lines below, those of the first row of a run; None where they are left out.
        missing: How many rows right below are left out because there are too many.
    """

    __slots__ = ("branches", "count", "label", "last", "missing", "pair", "row", "shown")

    def __init__(self, row: int, last: int, count: int, label: str):
        self.row = self.shown = row
        self.last = last
        self.count = count
        self.label = label
        self.branches: list[Branch] | None = None
        self.missing = 0
        self.pair = False


def outline(
    columns: Columns,
    root: int,
    *,
    lines: int,
    depth: int | None = None,
    width: int = 40,
    unfold: bool = False,
    brief: bool = False,
) -> Branch:
    """The lines of a drawing, opened level by level while there is room.

    Args:
        columns: The rows.
        root: Row to start from.
        lines: How many lines there is room for.
        depth: How many levels below the root to open; None for all.
        width: How many lines to show right below any one.
        unfold: Whether to show each of some repeated blocks.
        brief: Whether to leave closed what a line says already: pairs of weight and bias, and blocks that are
            built like an earlier neighbour and are in another state.
    """
    top = Branch(root, root, 1, columns.names[root])
    todo = deque([(top, 0)])
    used = 1
    while todo:
        branch, level = todo.popleft()
        if level == depth or columns.ends[branch.shown] == branch.shown + 1:
            continue
        below = _below(columns, branch.row, unfold)
        wanted = min(len(below), width)
        # Better closed than cut off after a line or two; only the root is always opened.
        if used + wanted > lines and branch is not top:
            continue
        # A line that says "1 more" would take the place of that one.
        shown = len(below) if len(below) == width + 1 else wanted
        branch.missing = sum(each.count for each in below[shown:])
        branch.branches = below = below[:shown]
        used += len(below)
        todo.extend((each, level + 1) for each in (worth_opening(columns, below) if brief else below))
    return top


def hidden(columns: Columns, branch: Branch) -> bool:
    """Whether there are rows below a branch that its drawing leaves out altogether."""
    return branch.branches is None and not branch.pair and columns.ends[branch.shown] > branch.shown + 1


def _below(columns: Columns, parent: int, unfold: bool) -> list[Branch]:
    """The lines right below a row."""
    lines: list[Branch] = []
    for branch in runs(columns, parent, unfold):
        inner = runs(columns, branch.row, unfold) if _is_list(columns, branch) else []
        if 0 < len(inner) <= INLINE_RUNS:
            for each in inner:
                each.label = f"{branch.label}.{each.label}"
            lines += inner
        else:
            lines.append(branch)
    for branch in lines:
        only = branch.row + 1
        if (
            branch.count == 1
            and columns.ends[branch.row] == only + 1
            and columns.forms[only].kind != "module"
        ):
            # A lone "weight" goes without saying: `q_proj  Linear  (4096, 4096)`.
            branch.label += "" if columns.names[only] == "weight" else f".{columns.names[only]}"
            branch.shown = only
        branch.pair = branch.count == 1 and _is_pair(columns, branch.row)
    return lines


def _is_list(columns: Columns, branch: Branch) -> bool:
    return branch.count == 1 and columns.forms[branch.row].cls == "ModuleList"


def runs(columns: Columns, parent: int, unfold: bool = False) -> list[Branch]:
    """The rows right below a row, with neighbours that look alike and are numbered on as one."""
    branches: list[Branch] = []
    previous = None
    for row in columns.children(parent):
        if previous is not None and not unfold and alike(columns, previous.last, row):
            previous.last = row
            previous.count += 1
        else:
            previous = Branch(row, row, 1, columns.names[row])
            branches.append(previous)
    for branch in branches:
        if branch.count > 1:
            branch.label = run_label(columns, branch.row, branch.last)
    return branches


def run_label(columns: Columns, first: int, last: int) -> str:
    """What a run is called: `"0 … 79"`, `"layer_0 … 11"`."""
    name = columns.names[first]
    end = "]" if name.endswith("]") else ""
    return f"{name.removesuffix(end)} … {_number(columns.names[last])}{end}"


def worth_opening(columns: Columns, branches: list[Branch]) -> list[Branch]:
    """The branches that hold more than their lines say: not the pairs, and of those built alike the first.

    Another one of the same build is worth opening where its state is mixed, or where it is small.
    """
    builds = set()
    chosen = []
    for branch in branches:
        build, tally = columns.forms[branch.row].build, columns.tally(branch.row)
        mixed = 0 < tally.real < tally.tensors or columns.mark(branch.row) == "partial"
        if not branch.pair and (build not in builds or mixed or not _has_modules(columns, branch.row)):
            builds.add(build)
            chosen.append(branch)
    return chosen


def _is_pair(columns: Columns, row: int) -> bool:
    """Whether a module holds a weight and a bias that differ in nothing but shape, and nothing else."""
    weight, bias = row + 1, row + 2
    if columns.ends[row] != row + 3 or columns.names[weight : bias + 1] != ["weight", "bias"]:
        return False
    if weight in columns.links or bias in columns.links or row in columns.troubles:
        return False
    one, two = columns.forms[weight], columns.forms[bias]
    same = all(getattr(one, name) == getattr(two, name) for name in ("kind", "cls", "mark", "source"))
    if not same or one.facts is None or two.facts is None:
        return False
    facts = ("dtype", "device", "requires_grad", "state")
    return all(getattr(one.facts, name) == getattr(two.facts, name) for name in facts)


def _has_modules(columns: Columns, row: int) -> bool:
    return any(columns.forms[child].kind == "module" for child in columns.children(row))


def alike(columns: Columns, row: int, following: int) -> bool:
    """Whether a row and its next sibling look alike and are numbered on: `layers.3` and `layers.4`."""
    if columns.forms[row] is not columns.forms[following] or following in columns.troubles:
        return False
    if columns.outward.get(row) != columns.outward.get(following):
        return False
    name, number = columns.names[row], _number(columns.names[following])
    stem = columns.names[following].removesuffix("]")[: -len(number) or None]
    end = "]" * name.endswith("]")
    return bool(number) and name == f"{stem}{int(number) - 1}{end}" and columns.names[following].endswith(end)


def _number(name: str) -> str:
    """The number at the end of a name, `""` where there is none."""
    name = name.removesuffix("]")
    # Longer ones are no counters, and int() refuses to read the longest.
    number = name[len(name.rstrip(_DIGITS)) :]
    return number if len(number) < 10 else ""
