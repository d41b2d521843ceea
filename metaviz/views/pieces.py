"""What pages about trouble and explanations are made of. They read well without the style sheet, too."""

from __future__ import annotations

from html import escape

from metaviz.views.html import CODE, DIM, HOVER, RULE, UI, hue
from metaviz.views.lines import clean

WIDTH = 100
LIMIT = 1000

_RULES = {
    ".mv-page.mv-page": f"font:13px/1.5 {UI};max-width:960px",
    ".mv-page.mv-page p": "margin:6px 0 2px;padding:0",
    ".mv-page.mv-page ul": "list-style:none;margin:6px 0 0;padding:0",
    ".mv-page.mv-page li": f"margin:0;padding:6px 0 8px 20px;text-indent:-16px;border-top:1px solid {RULE}",
    ".mv-page.mv-page li>*": "text-indent:0",
    ".mv-page.mv-page li>span": "display:inline-block;width:12px",
    ".mv-page.mv-page dl": "display:grid;grid-template-columns:max-content 1fr;gap:2px 12px;margin:6px 0;padding:0",
    ".mv-page.mv-page dt": f"color:{DIM};font-weight:400;margin:0;padding:0;width:auto",
    ".mv-page.mv-page dd": "margin:0;padding:0;width:auto",
    ".mv-page.mv-page code": f"font-family:{CODE};font-size:12px;background:none;padding:0;color:inherit;"
    "unicode-bidi:isolate;overflow-wrap:anywhere",
    ".mv-page.mv-page pre": f"font:12px/1.5 {CODE};background:{HOVER};color:inherit;margin:4px 0;padding:5px 10px;"
    "border-radius:3px;white-space:pre-wrap;overflow-wrap:anywhere;width:fit-content;max-width:100%;"
    "box-sizing:border-box",
    ".mv-page.mv-page table": "border-collapse:collapse;margin:4px 0;font-variant-numeric:tabular-nums;border:0",
    ".mv-page.mv-page.mv-page tbody tr": "background:none",
    ".mv-page.mv-page.mv-page tbody tr:hover": f"background:{HOVER}",
    ".mv-page.mv-page th,.mv-page.mv-page td": "text-align:left;padding:2px 16px 2px 0;border:0;white-space:nowrap;"
    "max-width:none",
    ".mv-page.mv-page th": f"color:{DIM};font-weight:400",
    ".mv-page.mv-page td": f"border-top:1px solid {RULE}",
    ".mv-page.mv-page td:first-child": f"font-family:{CODE};font-size:12px;white-space:normal;overflow-wrap:break-word",
    ".mv-page.mv-page :is(th,td):is(:nth-child(2),:nth-child(5))": "text-align:right",
    ".mv-page.mv-page .mv-where": f"color:{DIM}",
    **{
        f".mv-page .mv-{kind}": hue(mark) + ";font-weight:600"
        for kind, mark in {"bad": "blocked", "odd": "partial", "note": "ready", "good": "real"}.items()
    },
}
STYLE = "".join(f"{selector}{{{rules}}}" for selector, rules in _RULES.items())


def page(markup: str) -> str:
    """A piece of markup with the style sheet."""
    return f'<div class="mv-page"><style>{STYLE}</style>{markup}</div>'


def code_block(code: str) -> str:
    """Lines of code to copy."""
    lines = "\n".join(clean(line, LIMIT) for line in code.splitlines())
    return f"<pre><code>{escape(lines)}</code></pre>"
