"""What is known about one module or tensor, as a text that shows itself well in notebooks."""

from __future__ import annotations

import textwrap
from html import escape

from metaviz.core.explain import Explained, explain
from metaviz.core.tree import ModuleTree
from metaviz.views.lines import clean
from metaviz.views.pieces import WIDTH, code_block, page

LIMIT = 1000


class Explanation(str):
    """A paragraph with the code to paste. It is its text; in a notebook it shows as HTML."""

    _markup = ""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._markup


def explanation(tree: ModuleTree, *, path: str = "") -> Explanation:
    """The explanation of a module or tensor of a tree.

    Args:
        tree: Where to look.
        path: As for `tree[path]`.

    Raises:
        UnknownPath: There is no such module or tensor.
    """
    found = explain(tree[path])
    made = Explanation(_text(found))
    made._markup = _html(found)
    return made


def _text(found: Explained) -> str:
    lines = _wrapped(clean(found.about, LIMIT))
    width = max((len(answer.head) for answer in found.answers), default=0)
    for head, said in found.answers:
        start = f"{head:<{width}}  "
        lines += _wrapped(start + clean(said, LIMIT), len(start))
    if found.step:
        lines.append(f"Next: {clean(found.step, LIMIT)}")
    for caption, code in found.snippets:
        lines += ["", *_wrapped(clean(caption, LIMIT) + (":" if code else ""))]
        lines += [clean(line, LIMIT) for line in code.splitlines()]
    return "\n".join(lines)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _html(found: Explained) -> str:
    parts = [f"<p>{escape(clean(found.about, LIMIT))}</p>"]
    if found.answers:
        rows = (
            f"<dt>{escape(head)}</dt> <dd>{escape(clean(said, LIMIT))}</dd>" for head, said in found.answers
        )
        parts.append(f"<dl>{''.join(rows)}</dl>")
    if found.step:
        parts.append(f"<p>Next:</p>{code_block(found.step)}")
    for caption, code in found.snippets:
        parts.append(f"<p>{escape(clean(caption, LIMIT))}{':' if code else ''}</p>")
        parts += [code_block(code)] if code else []
    return page("".join(parts))
