"""Tab completion in the lines of our magics: models, one level of paths at a time, devices, options.

Only names that are there are listed: no property is read and nothing is imported or evaluated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from IPython.core import completer

from metaviz.core import devices
from metaviz.core.folder import SUFFIXES
from metaviz.magics import names

LIMIT = 200

# "%meta_tree m", "%%meta_build --v", "t = %meta_tree m"; the part up to the cursor.
_LINE = re.compile(r"\s*(?:[\w.]+\s*=\s*)?%{0,2}(?P<magic>\w+)(?P<words>\s.*)$")


def matcher(shell: Any, magics: Mapping[str, Callable]) -> Callable | None:
    """A matcher for ``shell.Completer.custom_matchers``; None where IPython is too old for them (before 8.6).

    Args:
        shell: The IPython shell.
        magics: Our magics by name.
    """
    if not hasattr(completer, "context_matcher"):
        return None

    @completer.context_matcher(identifier="metaviz")
    def metaviz_matcher(context: completer.CompletionContext) -> completer.SimpleMatcherResult:
        found = _LINE.match(context.text_until_cursor)
        magic = magics.get(found["magic"]) if found else None
        if magic is None:
            return {"completions": [], "suppress": False}
        *words, word = re.split(r"\s+", found["words"].lstrip())
        texts = list(itertools.islice(candidates(magic, shell.user_ns, words, word), LIMIT))
        # With no answer from us, others would look for Python in this line, and evaluate attributes to do so.
        texts = texts or [word] * bool(word)
        completions = [completer.SimpleCompletion(text, type="argument") for text in texts]
        return {
            "completions": completions,
            "matched_fragment": word,
            "suppress": bool(completions),
            "ordered": True,
        }

    return metaviz_matcher


def candidates(magic: Callable, namespace: Mapping[str, Any], words: list[str], word: str) -> Iterator[str]:
    """What ``word`` can become after ``words``, all of it, not only what is missing.

    Args:
        magic: Whose line it is; its parser knows the options.
        namespace: The user's namespace.
        words: The words before.
        word: The word at the cursor, which may be empty.
    """
    options = {text: action for action in magic.parser._actions for text in action.option_strings}
    option, equals, value = word.partition("=")
    if equals and option in options:
        stored = options[option].dest == "checkpoint"
        found = _stored(namespace, value) if stored else _starting(_values(options[option]), value)
        return (f"{option}={text}" for text in found)
    if words and words[-1] in options and options[words[-1]].dest == "checkpoint":
        return _stored(namespace, word)
    if words and words[-1] in options and options[words[-1]].nargs != 0:
        return _starting(_values(options[words[-1]]), word)
    if word.startswith("-"):
        return _starting(options, word)
    given = _positionals(options, words)
    slots = [action for action in magic.parser._actions if not action.option_strings]
    if not slots:
        return iter(())
    slot = slots[min(len(given), len(slots) - 1)]
    if slot.dest == "checkpoint":
        return _stored(namespace, word)
    if slot.dest == "model" and given:
        return _models(namespace, word) if len(given) < len(slots) else iter(())
    if slot.choices:
        return _starting(slot.choices, word) if len(given) < len(slots) else iter(())
    return _paths(namespace, given[0], word) if given else _models(namespace, word)


def _positionals(options: Mapping[str, argparse.Action], words: list[str]) -> list[str]:
    """The words that are neither options nor their values."""
    takes = [word in options and options[word].nargs != 0 for word in words]
    pairs = zip(words, [False, *takes], strict=False)
    return [word for word, is_value in pairs if not is_value and not word.startswith("-")]


def _values(action: argparse.Action) -> Iterable[str]:
    if action.dest == "device":
        return [*devices.names(), "auto"]
    if action.dest == "dtype":
        return ("bfloat16", "float16", "float32", "float64", "checkpoint")
    return action.choices or ()


def _models(namespace: Mapping[str, Any], word: str) -> Iterator[str]:
    """``model``; after a dot the modules that the thing before it holds: ``trainer.`` → ``trainer.model``."""
    base, dot, start = word.rpartition(".")
    return (f"{base}{dot}{name}" for name in _starting(names.parts(namespace, base), start))


def _paths(namespace: Mapping[str, Any], model: str, word: str) -> Iterator[str]:
    """The modules and tensors one level below what is written already."""
    base, dot, start = word.rpartition(".")
    return (f"{base}{dot}{name}" for name in _starting(names.slots(namespace, model, base), start))


def _stored(namespace: Mapping[str, Any], word: str) -> Iterator[str]:
    """Names that are bound to a path or a state dict, then folders and files that may be checkpoints."""
    for name, thing in list(namespace.items()):
        if not name.startswith("_") and issubclass(type(thing), os.PathLike | Mapping):
            yield from _starting([name], word)
    folder, start = os.path.split(word)
    with contextlib.suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(start) and not (entry.name.startswith(".") and not start):
                path = os.path.join(folder, entry.name)
                if entry.is_dir():
                    yield from _readable([path + os.sep])
                elif os.path.splitext(entry.name)[1] in SUFFIXES:
                    yield from _readable([path])


def _readable(paths: Iterable[str]) -> Iterator[str]:
    return (path for path in paths if re.fullmatch(r"[\w:./~+@-]+", path))


def _starting(texts: Iterable[str], start: str) -> Iterator[str]:
    # A name with blanks or quotes in it could not be read back from the line.
    return (text for text in texts if text.startswith(start) and re.fullmatch(r"[\w:.-]+", text))
