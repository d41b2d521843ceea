"""How a checkpoint fits a model, as text and HTML: one line for each thing to know, with counts and the first names."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from metaviz.core.conversion import needs_map
from metaviz.core.match import Match
from metaviz.core.naming import mapped, suggestion
from metaviz.core.units import format_exact
from metaviz.views.checkpoint import spelled
from metaviz.views.lines import clean, named
from metaviz.views.pieces import WIDTH, code_block, page

_REASONS = 5
_FROM = {
    "replay": "from replay",
    "reset": "from reset",
    "real": "holds values already",
    "": "nobody has values for it",
}


class Line(NamedTuple):
    """Some tensors of which the same is to be said.

    Attributes:
        words: What they are: `"missing"`.
        count: How many.
        names: The first of them, those that differ in a number only as one.
        reason: What else is to know.
        bad: Whether they keep a load from being complete.
    """

    words: str
    count: int
    names: str
    reason: str
    bad: bool = False


def text(match: Match) -> str:
    """A match as lines of text."""
    lines = list(_lines(match))
    first = max(len(line.words) for line in lines)
    second = max(len(format_exact(line.count)) for line in lines)
    said = [clean(match.summary, 400), *(clean(note, 400) for note in match.notes), ""]
    for line in lines:
        start = f"{'✗' if line.bad else ' '} {line.words:{first}}  {format_exact(line.count):>{second}}  "
        about = ": ".join(filter(None, (line.names, line.reason)))
        said += textwrap.wrap(
            start + about, WIDTH, subsequent_indent=" " * len(start), break_on_hyphens=False
        )
    said += ["", *_hints(match), f"Next: {_step(match)}"]
    return "\n".join(said)


def html(match: Match) -> str:
    """A match as static HTML."""
    parts = [f"<p><b>{escape(clean(match.summary, 400))}</b></p>"]
    parts += [f'<p class="mv-where">{escape(clean(note, 400))}</p>' for note in match.notes]
    parts.append("<dl>")
    for line in _lines(match):
        words = f'<span class="mv-bad">✗ {line.words}</span>' if line.bad else line.words
        names = f" <code>{escape(line.names)}</code>" if line.names else ""
        reason = f' <span class="mv-where">{escape(line.reason)}</span>' if line.reason else ""
        parts.append(f"<dt>{words}</dt><dd>{format_exact(line.count)}{names}{reason}</dd>")
    parts.append("</dl>")
    parts += [f"<p>{escape(hint)}</p>" for hint in _hints(match)]
    return page("".join((*parts, code_block(_step(match)))))


def _lines(match: Match) -> Iterator[Line]:
    yield Line("found", len(match.found), "", "")
    refused = _by(match.refused, match.refused.get)
    for reason, paths in list(refused.items())[:_REASONS]:
        yield Line("does not fit", len(paths), named(paths), clean(reason.rstrip("."), 400), True)
    if others := [path for paths in list(refused.values())[_REASONS:] for path in paths]:
        yield Line("does not fit", len(others), named(others), "for other reasons: match.refused", True)
    for words, lacking in (("missing", match.missing), ("never saved", match.not_saved)):
        for source, paths in _by(lacking, match.elsewhere.get).items():
            yield Line(words, len(paths), named(paths), _FROM.get(source, ""), source == "")
    for (there, here), paths in _by(match.casts, match.casts.get).items():
        yield Line("cast", len(paths), named(paths), f"{there} there, {here} here")
    rest = {
        "tied": (match.tied, "stored under another of its names"),
        "not needed": (match.ignored, "not persistent in the model"),
        "unexpected": (match.unexpected, "the model has no place for it"),
    }
    for words, (names, reason) in rest.items():
        if names:
            yield Line(words, len(names), named(names), reason)


def _by(paths: Iterable[str], key) -> dict:
    """The paths by what ``key`` says about them."""
    groups: dict = {}
    for path in paths:
        groups.setdefault(key(path), []).append(path)
    return groups


def _hints(match: Match) -> list[str]:
    """What could be done about names that seem to belong together."""
    return needs_map(match.missing, match.unexpected) if _renamed(match) is None else []


def _renamed(match: Match) -> tuple[str, str] | None:
    """A pair for a `key_map` that would find most of what is missing."""
    pair = suggestion(match.unexpected, match.missing)
    if pair is None or match.checkpoint.key_map is not None:
        return None
    found = set(mapped(match.unexpected, [pair]).values()).intersection(match.missing)
    return pair if 2 * len(found) > len(match.missing) else None


def _step(match: Match) -> str:
    model, where = match.called, spelled(match.checkpoint)
    if (pair := _renamed(match)) is not None:
        return f"metaviz.match({model}, metaviz.checkpoint({where}, key_map=[{clean(repr(pair), 1000)}]))"
    if match.shapes:
        return f"print(metaviz.checkpoint({where}))  # build the model with the configuration of this one"
    return f"metaviz.materialize({model}, checkpoint={where})"
