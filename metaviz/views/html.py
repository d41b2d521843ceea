"""A tree as static HTML: nested `<details>`, no scripts, the same words as the text view.

The markup reads well without its style sheet, which some places that show notebooks drop: names are `<code>`,
classes `<em>`, levels are nested lists, and cells are set apart by dots that the style sheet hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from metaviz.core.fold import Branch, hidden, outline, worth_opening
from metaviz.core.reasons import as_called, quoted
from metaviz.core.tree import ModuleTree
from metaviz.core.units import format_exact, plural
from metaviz.views.lines import (
    DOUBTS,
    MEANINGS,
    SYMBOLS,
    clean,
    describe,
    marks,
    next_step,
    obstacles,
    origins,
    summary,
)

MAX_BYTES = 300_000
MAX_LINES = 500
MAX_WIDTH = 100
# As many lines as are seen at first; the rest is closed.
OPEN_LINES = 24
# Browsers flatten what is nested some 500 elements deep, and a level takes three.
DEEPEST = 60
TITLE = 200

_HUES = {"real": "#1a7f37", "ready": "#1f6feb", "partial": "#9a6700", "blocked": "#cf222e"}
DIM = "var(--jp-ui-font-color2,color-mix(in srgb,currentColor 66%,transparent))"
RULE = "color-mix(in srgb,currentColor 17%,transparent)"
HOVER = "var(--jp-layout-color2,color-mix(in srgb,currentColor 7%,transparent))"
UI = "var(--jp-ui-font-family,system-ui,sans-serif)"
CODE = "var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace)"


def hue(mark: str) -> str:
    """The colour of a mark, as a style."""
    # Mixed with the colour of the text around it, a hue is darker on a light page and lighter on a dark one.
    return f"color:{_HUES[mark]};color:color-mix(in srgb,{_HUES[mark]} 76%,currentColor)"


# Doubled class names outweigh what JupyterLab says about lists and code in its outputs. No font size on a
# row makes the dots between its cells vanish.
_RULES = {
    ".mv-tree.mv-tree": f"font:13px/1.4 {UI};max-width:960px;container-type:inline-size",
    ".mv-tree.mv-tree ul": "list-style:none;margin:0;padding:0",
    ".mv-tree.mv-tree li": "margin:0;padding:0",
    ".mv-tree.mv-tree ul ul": f"margin-left:7px;padding-left:11px;border-left:1px solid {RULE}",
    ".mv-tree .mv-row": "display:flex;align-items:center;min-height:24px;padding:0 4px 0 18px;font-size:0;"
    "border-radius:3px;position:relative",
    ".mv-tree .mv-row>*": "font-size:13px",
    ".mv-tree .mv-row:hover": f"background:{HOVER}",
    ".mv-tree summary.mv-row": "cursor:pointer;list-style:none",
    ".mv-tree summary.mv-row::-webkit-details-marker": "display:none",
    ".mv-tree summary.mv-row::before": 'content:"";position:absolute;left:5px;border:4px solid transparent;'
    f"border-right-width:0;border-left:5px solid {DIM}",
    ".mv-tree details[open]>summary.mv-row::before": "transform:rotate(90deg)",
    ".mv-tree summary.mv-row:focus-visible": "outline:2px solid var(--jp-brand-color1,#1f6feb);"
    "outline-offset:-2px",
    ".mv-tree .mv-name": "flex:1 1 0;min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap",
    ".mv-tree.mv-tree.mv-tree code": f"font-family:{CODE};font-size:inherit;background:none;padding:0;color:inherit;"
    "white-space:nowrap;unicode-bidi:isolate",
    ".mv-tree.mv-tree.mv-tree .mv-root code": "font-weight:600",
    ".mv-tree.mv-tree em": f"font-style:normal;color:{DIM};margin-left:3px;unicode-bidi:isolate",
    ".mv-tree .mv-note": f"color:{DIM};font-size:12px;font-style:italic;margin-left:6px;unicode-bidi:isolate",
    ".mv-tree .mv-stale": hue("partial"),
    ".mv-tree .mv-cell": f"flex:none;text-align:right;margin-left:12px;white-space:nowrap;color:{DIM};"
    "font-variant-numeric:tabular-nums",
    ".mv-tree .mv-amount": "width:144px",
    ".mv-tree .mv-size": "width:68px;color:inherit",
    ".mv-tree .mv-dtype": "width:80px",
    ".mv-tree .mv-device": "width:58px",
    ".mv-tree .mv-mark": "width:80px;box-sizing:border-box;padding:0 8px;border:1px solid transparent;"
    "border-radius:9px;font-size:12px;line-height:17px;text-align:left",
    **{f".mv-tree .mv-{mark}": hue(mark) for mark in _HUES},
    ".mv-tree .mv-mark.mv-ready": "border-color:color-mix(in srgb,currentColor 36%,transparent)",
    ".mv-tree .mv-mark:is(.mv-real,.mv-partial,.mv-blocked)": "background:color-mix(in srgb,currentColor 13%,"
    "transparent)",
    ".mv-tree .mv-head": f"border-bottom:1px solid {RULE};border-radius:0;margin-bottom:2px",
    ".mv-tree .mv-head>.mv-name,.mv-tree .mv-head>.mv-cell": f"font-size:11px;line-height:17px;color:{DIM}",
    ".mv-tree .mv-head:hover": "background:none",
    ".mv-tree.mv-tree .mv-foot": f"margin-top:4px;padding:6px 4px 2px 18px;border-top:1px solid {RULE};"
    f"font-size:12px;line-height:1.6",
    ".mv-tree .mv-foot>div+div": f"color:{DIM}",
    ".mv-tree.mv-tree.mv-tree .mv-foot code": f"background:{HOVER};padding:1px 5px;border-radius:3px;"
    "color:var(--jp-ui-font-color1,inherit)",
}
_NARROW = {640: ".mv-tree :is(.mv-dtype,.mv-device)", 480: ".mv-tree .mv-amount"}
STYLE = "".join(f"{selector}{{{rules}}}" for selector, rules in _RULES.items()) + "".join(
    f"@container (max-width:{width}px){{{selector}{{display:none}}}}" for width, selector in _NARROW.items()
)


def html(tree: ModuleTree, *, depth: int | None = None) -> str:
    """A tree as HTML of at most 300 kB, whatever the model.

    Args:
        tree: What to show.
        depth: How many levels below the root there are to open; None for all.
    """
    lines = MAX_LINES
    while True:
        drawn = _draw(tree, lines, DEEPEST if depth is None else depth)
        if len(drawn.encode()) <= MAX_BYTES:
            return drawn
        # Only names full of characters that have to be escaped get here.
        lines //= 2


def _draw(tree: ModuleTree, lines: int, depth: int) -> str:
    top = outline(tree.columns, tree.root, lines=lines, depth=depth, width=MAX_WIDTH)
    seen = _first_seen(tree, top)
    head = _row("div", "mv-head", "module", "", "", ("shape/params", "size", "dtype", "device"), "mark")
    parts = [f'<div class="mv-tree"><style>{STYLE}</style>{head}<ul>']
    parts += _branches(tree, top, seen)
    parts += ["</ul>", *_footer(tree, top), "</div>"]
    return "".join(parts)


def _first_seen(tree: ModuleTree, top: Branch) -> set[int]:
    """Rows of the branches that are open at first, level by level."""
    seen, todo, used = set(), [top], 1
    for branch in todo:
        below = branch.branches or []
        if branch is top or (below and used + len(below) <= OPEN_LINES):
            seen.add(branch.row)
            used += len(below)
            todo += worth_opening(tree.columns, below)
    return seen


def _branches(tree: ModuleTree, top: Branch, seen: set[int]) -> Iterator[str]:
    """The markup of a branch and of all that is below it, in order."""
    todo: list[Branch | str] = [top]
    while todo:
        branch = todo.pop()
        if isinstance(branch, str):
            yield branch
            continue
        yield "<li>"
        if branch.branches is None and not hidden(tree.columns, branch):
            yield _line(tree, branch, top, "div")
            yield "</li>"
            continue
        yield "<details open>" if branch.row in seen else "<details>"
        yield _line(tree, branch, top, "summary")
        yield "<ul>"
        todo.append("</ul></details></li>")
        path = clean(quoted(tree.columns.path(branch.row)), TITLE)
        if branch.branches is None:
            more = plural(tree.columns.ends[branch.row] - branch.row - 1, "row")
            todo.append(_more(f"… {more} inside:", f"metaviz.tree({tree.columns.called})[{path}]"))
        elif branch.missing:
            todo.append(
                _more(
                    f"… {format_exact(branch.missing)} more:",
                    f"metaviz.tree({tree.columns.called})[{path}].rows",
                )
            )
        todo += reversed(branch.branches or [])


def _more(words: str, code: str) -> str:
    return (
        f'<li><div class="mv-row"><span class="mv-name">{words} <code>{escape(code)}</code></span></div></li>'
    )


def _line(tree: ModuleTree, branch: Branch, top: Branch, tag: str) -> str:
    root = branch is top
    line = describe(tree.columns, branch, tree.path if root else None)
    # The root of a model has no name, so its class stands in the place of one.
    label, cls = (line.label, line.cls) if line.label else (line.cls, "")
    title = clean(tree.columns.path(branch.shown), TITLE)
    cells = (line.amount, line.size, line.dtype, line.device)
    return _row(
        tag,
        "mv-root" if root else "",
        f"<code>{escape(label)}</code>",
        cls,
        line.note,
        cells,
        line.mark,
        title,
    )


def _row(
    tag: str, kind: str, name: str, cls: str, note: str, cells: tuple[str, ...], mark: str, title: str = ""
) -> str:
    """One line; the dots between cells are for pages that drop the style sheet."""
    title = f' title="{escape(title)}"' if title else ""
    parts = [f'<{tag} class="mv-row{" " + kind if kind else ""}"><span class="mv-name"{title}>{name}']
    if cls:
        parts.append(f" <em>{escape(cls)}</em>")
    if note:
        stale = " mv-stale" if note.startswith("stale") else ""
        parts.append(f' <span class="mv-note{stale}">{escape(note)}</span>')
    parts.append("</span>")
    for column, cell in zip(("amount", "size", "dtype", "device"), cells, strict=True):
        dot = " · " if cell else " "
        parts.append(f'{dot}<span class="mv-cell mv-{column}">{escape(cell)}</span>')
    symbol = SYMBOLS.get(mark)
    words = f"{symbol} {mark}" if symbol else mark
    parts.append(f' · <span class="mv-cell mv-mark mv-{mark}">{words}</span></{tag}>')
    return "".join(parts)


def _footer(tree: ModuleTree, top: Branch) -> Iterator[str]:
    yield '<div class="mv-foot">'
    first, *others = summary(tree)
    yield f"<div><b>{escape(first)}</b></div>"
    for line in others:
        yield f"<div>{escape(line)}</div>"
    told = MEANINGS | {"ready": origins(tree) or MEANINGS["ready"]}
    counts = [
        f'<span class="mv-{mark}">{SYMBOLS[mark]} {escape(words)}</span> ({told[mark]})'
        for mark, words in marks(tree)
    ]
    if counts:
        tensors = plural(sum(tree.totals.marks.values()), "tensor")
        yield f"<div>{tensors}: {' · '.join(counts)}</div>"
    for mark, names, reason, step in obstacles(tree):
        code = f". Next: <code>{escape(as_called(tree.columns, step))}</code>" if step else ""
        about = (f"<code>{escape(names)}</code> " if names else "") + escape(reason)
        hue_of = "blocked" if mark == "blocked" else "partial"
        yield f'<div><span class="mv-{hue_of}">{(SYMBOLS | DOUBTS)[mark]}</span> {about}{code}</div>'
    step = next_step(tree, top)
    if step:
        yield f"<div>Next: <code>{escape(clean(as_called(tree.columns, step), 1000))}</code></div>"
    yield "</div>"
