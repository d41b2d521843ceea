"""Trouble as text and HTML: what is wrong, how many tensors it concerns, which, and the way out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape

from metaviz.core.causes import Trouble
from metaviz.core.reasons import as_called
from metaviz.core.tree import ModuleTree
from metaviz.core.trouble import troubles
from metaviz.core.units import plural
from metaviz.views.lines import clean, named
from metaviz.views.pieces import LIMIT, WIDTH, code_block, page

SHOWN = 30
_SYMBOLS = {
    "blocked": ("✗", "bad"),
    "silent": ("≠", "bad"),
    "untold": ("?", "odd"),
    "lightning": ("!", "odd"),
}
_OTHER = ("!", "odd")
_NOTES = {"tied": ("·", "note"), "loaded": ("·", "note")}
_SAID = {"silent": "Reset gives other values: ", "untold": ""}


class TroubleReport:
    """The trouble of a tree: iterate for its entries; false where nothing is wrong.

    Attributes:
        entries: One for each cause, the worst first.
    """

    def __init__(self, entries: tuple[Trouble, ...], title: str) -> None:
        self.entries = entries
        self._title = title

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Trouble]:
        return iter(self.entries)

    def __str__(self) -> str:
        lines = [self._title]
        for entry in self.entries[:SHOWN]:
            symbol, _ = _symbol(entry)
            lines += ["", *_wrapped(f"{symbol} {_reason(entry)}")]
            where = _where(entry)
            lines += _wrapped(f"  {where}") if where else []
            steps = [clean(line, LIMIT) for line in (entry.fix or "").splitlines()]
            lines += [f"  {'Next: ' if line is steps[0] else ' ' * 6}{line}" for line in steps]
        lines += ["", self._more] if self._more else []
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{escape(self._title)}</b></p>"]
        if self.entries:
            parts.append(f"<ul>{''.join(map(_item, self.entries[:SHOWN]))}</ul>")
        parts += [f"<p>{self._more}</p>"] if self._more else []
        return page("".join(parts))

    @property
    def _more(self) -> str:
        return f"… and {plural(len(self.entries) - SHOWN, 'cause')} more" if len(self.entries) > SHOWN else ""


def trouble(tree: ModuleTree, *, search: bool = False) -> TroubleReport:
    """The trouble of a tree.

    Args:
        tree: What to look at.
        search: Whether to look for optimizers among all objects of the process.

    Raises:
        UnknownPath: The model is gone.
    """
    entries = tuple(
        entry._replace(fix=entry.fix and as_called(tree.columns, entry.fix))
        for entry in troubles(tree, search=search)
    )
    name = clean(tree.path or tree.row.cls)
    marks = tree.totals.marks
    if not entries:
        return TroubleReport((), f"No trouble in {name}: {_fine(tree)}.")
    own = [entry for entry in entries if entry.kind != "lightning"]
    if not own:
        return TroubleReport(
            entries, f"No trouble in {name} itself: {_fine(tree)}. But if Lightning gives it values:"
        )
    title = f"{plural(len(own), 'cause')} of trouble in {name}"
    if len(own) < len(entries):
        title += ", and what Lightning would do"
    if blocked := marks.get("blocked", 0):
        title += f"; {blocked:,} of {plural(sum(marks.values()), 'tensor')} blocked"
    return TroubleReport(entries, title)


def _fine(tree: ModuleTree) -> str:
    marks = tree.totals.marks
    if not marks:
        return "it has no tensors"
    words = {"real": "holds values", "ready": "can be given values"}
    said, number = " or ".join(words[mark] for mark in marks), sum(marks.values())
    return f"its tensor {said}" if number == 1 else f"each of its {number:,} tensors {said}"


def _symbol(entry: Trouble) -> tuple[str, str]:
    return {**_SYMBOLS, **_NOTES}.get(entry.kind, _OTHER)


def _reason(entry: Trouble) -> str:
    return _SAID.get(entry.kind, "") + clean(entry.reason.rstrip("."), LIMIT)


def _where(entry: Trouble) -> str:
    """How many tensors it is, in how many modules, and which; nothing where the reason names them."""
    if not entry.paths or all(path in entry.reason for path in entry.paths):
        return ""
    modules = f"{plural(entry.modules, 'module')}, " if entry.modules > 1 else ""
    return f"{modules}{plural(len(entry.paths), 'tensor')}: {named(entry.paths)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _item(entry: Trouble) -> str:
    symbol, kind = _symbol(entry)
    where = _where(entry)
    parts = [f'<li><span class="mv-{kind}">{symbol}</span> {escape(_reason(entry))}']
    if where:
        count, _, paths = where.partition(": ")
        parts.append(f'<div class="mv-where">{escape(count)}: <code>{escape(paths)}</code></div>')
    parts += [code_block(entry.fix)] if entry.fix else []
    return "".join((*parts, "</li>"))
