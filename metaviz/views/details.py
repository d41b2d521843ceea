"""What a widget shows of one module or tensor beside the tree: words and code, all of it harmless text."""

from __future__ import annotations

from typing import Any

from metaviz.core import reasons
from metaviz.core.asking import tensor_at
from metaviz.core.columns import Columns
from metaviz.core.explain import Explained, explain
from metaviz.core.fold import Branch
from metaviz.core.placed import sharding
from metaviz.core.sources import Sources
from metaviz.core.tree import ModuleTree
from metaviz.core.units import format_bytes, format_exact, format_shape
from metaviz.views.lines import clean, describe

_LIMIT = 1000
_TENSORS = 40
_PARTNERS = 20
#: Of a larger part, asking each source about each tensor takes seconds.
LARGE = 4000
#: In a larger model, what Lightning would do takes seconds to find out.
MANY = 20_000


def details(
    tree: ModuleTree, start: int = 0, asked: Sources | None = None, brief: str = ""
) -> dict[str, Any]:
    """What is known of the root of a tree: what it is, its own tensors, each source's word, ties, code to paste.

    Args:
        tree: The part of a tree.
        start: The row that a front end calls 0.
        asked: What the sources have said before, for whoever asks again and again.
        brief: Why no source is asked now; they are if empty.

    Raises:
        UnknownPath: The model has nothing there any more.
    """
    columns, row = tree.columns, tree.root
    quick = columns.prediction is not None or len(columns.names) <= MANY
    short = bool(brief) or len(tree) > LARGE
    found = _short(columns, row, tree) if short else explain(tree, asked, lightning=quick)
    code = [("Next", found.step)] if found.step else []
    if columns.forms[row].cls == "DTensor":
        code.append(
            (
                "Which rank holds which slice",
                f"metaviz.sharding({columns.called}, {reasons.quoted(tree.path)})",
            )
        )
    return {
        "path": clean(tree.path, _LIMIT),
        "copy": tree.path.encode("utf-8", "backslashreplace").decode(),
        "title": clean(columns.forms[row].cls),
        "mark": columns.mark(row),
        "about": clean(f"{found.about} {brief}".strip(), _LIMIT),
        "answers": [(each.head, clean(each.text, _LIMIT)) for each in found.answers] + _sharded(tree),
        "tensors": _tensors(columns, row, start),
        "links": _links(columns, row, start),
        "code": [
            (clean(caption, _LIMIT), lines)
            for caption, lines in (*code, *map(tuple, found.snippets))
            if lines
        ],
    }


def _sharded(tree: ModuleTree) -> list[tuple[str, str]]:
    """What each axis of its mesh does to a sharded tensor."""
    if tree.columns.forms[tree.root].cls != "DTensor":
        return []
    placed = sharding(tensor_at(tree.model, tree.columns, tree.root)[0])
    words = [("sharded", clean(f"{format_shape(placed.shape)} over {placed.layout.shape_words}", _LIMIT))]
    rank = placed.layout.rank
    if rank in placed.layout.place_of:
        held = f"{format_shape(placed.shape_on(rank))} of it, {format_bytes(placed.nbytes_on(rank))}"
        words.append((f"rank {rank}", f"holds {held}"))
    return words + [("", clean(each, _LIMIT)) for each in placed.words]


def _short(columns: Columns, row: int, tree: ModuleTree) -> Explained:
    """What the tree itself knows of a large part, without asking each source again."""
    why, then = reasons.fact(columns, row), reasons.step(columns, row)
    about = f"{format_exact(columns.tally(row).tensors)} tensors. {why[0].upper()}{why[1:]}."
    called, path = columns.called, reasons.quoted(tree.path)
    more = f"print(metaviz.tree({called}).explain({path if tree.path else ''}))"
    return Explained(
        about,
        (),
        then and reasons.as_called(columns, then),
        (("What each source can do, in some seconds", more),),
    )


def _tensors(columns: Columns, row: int, start: int) -> list[dict[str, Any]]:
    """The tensors that a module itself holds; of a tensor, itself."""
    rows = (
        [row]
        if columns.forms[row].kind != "module"
        else [child for child in columns.children(row) if columns.forms[child].kind != "module"]
    )
    lines = []
    for each in rows[:_TENSORS]:
        line = describe(columns, Branch(each, each, 1, columns.names[each]))
        lines.append(
            {
                "row": each - start,
                "name": line.label,
                "cells": [line.amount, line.dtype, line.device, line.size],
                "note": line.note,
                "mark": line.mark,
                "reason": clean(reasons.fact(columns, each), _LIMIT),
            }
        )
    if len(rows) > _TENSORS:
        more = f"and {len(rows) - _TENSORS:,} more"
        lines.append({"row": -1, "name": more, "cells": [], "note": "", "mark": "", "reason": ""})
    return lines


def _links(columns: Columns, row: int, start: int) -> list[tuple[int, str, str]]:
    """(row, path, in words) of what shares its values with a tensor, or is the very same module."""
    words = {"tie": "the same tensor", "alias": "a view of the same memory", "shared": "the same module"}
    words["cycle"] = "it leads back to"
    what, first = columns.links.get(row, ("", row))
    found = [(first, what)] if what else []
    found += [(other, kind) for other, (kind, to) in columns.links.items() if to == first and other != row][
        : _PARTNERS - len(found)
    ]
    return [
        (other - start, clean(columns.path(other) or "the root", _LIMIT), words[kind])
        for other, kind in found
    ]
