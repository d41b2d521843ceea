"""Why a row has its mark, in a sentence with the next step as code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from metaviz.core.columns import Columns
from metaviz.core.units import format_exact, plural

_DONE = {"checkpoint": "loaded", "replay": "replayed", "reset": "reset"}


def reason(columns: Columns, row: int) -> str:
    """The sentence of one row: `"12 of its 14 tensors can be replayed; blocked: pos, scale. Next: …"`."""
    return ". Next: ".join(filter(None, (fact(columns, row), step(columns, row))))


def fact(columns: Columns, row: int) -> str:
    """Why a row has its mark, without the next step and without a full stop."""
    if row in columns.troubles:
        return columns.troubles[row]
    what, first = columns.links.get(row, ("", -1))
    if what in ("shared", "cycle"):
        path = columns.path(first) or "the root"
        return f"shared with {path}" if what == "shared" else f"leads back to {path}, which it is a part of"
    if columns.forms[row].kind == "module":
        return _counts(columns, row)
    answer = columns.answers.get(row)
    if answer is None:
        return f"holds values on {columns.forms[row].facts.device}"
    return answer.reason.rstrip(".")


def step(columns: Columns, row: int) -> str | None:
    """The next step as code, or None where there is nothing to do."""
    what, first = columns.links.get(row, ("", -1))
    if what in ("shared", "cycle"):
        return f"tree[{quoted(columns.path(first))}]"
    mark, path = columns.mark(row), columns.path(row)
    if mark == "ready":
        answer = columns.answers.get(row)
        if columns.source == "reset" and answer is not None and answer.faithful is False and answer.fix:
            return answer.fix
        where = f", {quoted(path)}" if path else ""
        source = "" if columns.source == "auto" else f', source="{columns.source}"'
        if columns.checkpoint is not None:
            source += f", checkpoint={'state' if columns.checkpoint.path is None else repr(columns.checkpoint.path)}"
        return f'metaviz.materialize(model{where}, device="cpu"{source})'
    first = next(blocked(columns, row), None)
    if first is None:
        return None
    if mark == "partial":
        return f"metaviz.tree(model).explain({quoted(columns.path(first))})"
    return columns.answers[first].fix if first in columns.answers else None


# Not in quotes, where it is a path, and not a part of another name.
_MODEL = re.compile(r"""(?<![\w."'])model(?![\w"'])""")


def as_called(columns: Columns, code: str) -> str:
    """Code to paste, with the model as the user calls it."""
    return with_name(code, columns.called)


def with_name(code: str, name: str) -> str:
    """Code in which `model` is called otherwise."""
    return code if name == "model" else _MODEL.sub(lambda _: name, code)


def quoted(path: str) -> str:
    """A path as code, in the kind of quotes that the rest of the code is in."""
    return f'"{path}"' if path.isprintable() and not set(path) & set('"\\') else repr(path)


def blocked(columns: Columns, row: int) -> Iterator[int]:
    """The blocked tensors below a row, itself included, in the order of the walk."""
    todo = [row]
    while todo:
        row = todo.pop()
        form = columns.forms[row]
        if form.mark == "blocked" and form.tally.blocked:
            if columns.links.get(row, ("",))[0] != "tie":
                yield row
        elif form.tally.blocked:
            if row in columns.troubles:
                yield row
            todo.extend(reversed(list(columns.children(row))))


def _counts(columns: Columns, row: int) -> str:
    """How many of the tensors below a module can be given values, and which cannot."""
    tally = columns.tally(row)
    if not tally.tensors:
        return "no tensors below"
    others = tally.tensors - tally.real
    # "its tensor", "its 2 tensors"
    every = f"its {plural(tally.tensors, 'tensor')}".replace(" 1 ", " ")
    if not others:
        return f"{every} {'holds' if tally.tensors == 1 else 'hold'} values"
    holds = "holds" if tally.real == 1 else "hold"
    start = f"{format_exact(tally.real)} of {every} {holds} values; " if tally.real else ""
    rest = every if not start else "the other one" if others == 1 else f"the other {format_exact(others)}"
    done = _verb(columns, row)
    if tally.ready == others:
        return f"{start}{rest} can be {done}"
    if not tally.ready:
        first = next(blocked(columns, row), row)
        why = f": {fact(columns, first)}" if first != row else ""
        cannot = f"{rest} cannot" if others == 1 else f"none of {rest} can"
        return f"{start}{cannot} be given values{why}"
    names = []
    for tensor in blocked(columns, row):
        if len(names) == 3:
            names.append("…")
            break
        names.append(columns.path(tensor) or "the root")
    return f"{start}{format_exact(tally.ready)} of {rest} can be {done}; blocked: {', '.join(names)}"


def _verb(columns: Columns, row: int) -> str:
    """What the sources of the ready tensors below do."""
    found = columns.sources[row]
    return " or ".join(done for source, done in _DONE.items() if source in found) or "given values"


def unknown(columns: Columns, root: int, path: str) -> str:
    """What to say about a path that leads nowhere: the nearest one that does, or what there is."""
    where = columns.path(root) or "the model"
    near = _nearest(columns, root, path)
    if near:
        return f"No module or tensor {path!r} in {where}. The nearest is {near!r}. Next: tree[{quoted(near)}]"
    names = [columns.names[child] for child in columns.children(root)]
    some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"No module or tensor {path!r} in {where}. " + (
        f"It has: {some}" if names else "It has nothing below it."
    )


def _nearest(columns: Columns, root: int, path: str) -> str | None:
    """The path that follows this one part by part, taking the most similar name where a part is wrong."""
    row, parts = root, path.split(".")
    for part in parts:
        below = {columns.names[child]: child for child in columns.children(row)}
        close = [part] if part in below else get_close_matches(part, below, n=1)
        if not close:
            break
        row = below[close[0]]
    else:
        return columns.path(row)
    # Whoever leaves out the front of a path means one that ends like it.
    ending = next((known for known in columns.index if known.endswith(f".{path}")), None)
    return ending or columns.path(row) or None
