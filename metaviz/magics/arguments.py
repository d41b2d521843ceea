"""Reading the line of a magic. Whatever is wrong with it is said in one line, without a traceback."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Callable, Iterator

from IPython.core.error import UsageError

from metaviz.core import plan
from metaviz.errors import MetavizError

LONGEST = 200

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_SCALE = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read(magic: Callable, line: str) -> argparse.Namespace:
    """The arguments of ``magic`` in ``line``, quotes taken off; options may stand between paths.

    Raises:
        UsageError: The line cannot be read, or does not fit the magic.
    """
    name = magic.__name__
    try:
        words = shlex.split(line)
    except ValueError as error:
        message = str(error).lower()
        raise UsageError(f"The arguments cannot be read: {message}. What they are: %{name}?") from None
    for word in words:
        if len(word) > LONGEST:
            raise UsageError(
                f"An argument has {len(word):,} characters: {word[:20]}… "
                f"Pass the name of the model, not its value: %{name} model"
            )
    try:
        return magic.parser.parse_intermixed_args(words)
    except UsageError as error:
        raise UsageError(f"{error}. What can be given: %{name}?") from None


# In prose, `model` is a word and a part of paths: only as an argument, or right after "Next:", is it a name.
_NAMED = re.compile(r"(?<=\()model(?=[,).])|(?<=Next: )model(?=\b)")


@contextlib.contextmanager
def one_line_errors(called: str = "model") -> Iterator[None]:
    """Show what metaviz refuses as one line: the traceback would only lead through the magic.

    Args:
        called: What the user calls the model, for the code in the message.
    """
    try:
        yield
    except MetavizError as error:
        raise UsageError(_NAMED.sub(lambda _: called, str(error))) from None


def size(text: str) -> int:
    """Bytes from text.

    Raises:
        argparse.ArgumentTypeError: It is no size.

    Example:
        >>> size("256MiB"), size("1.5 GB"), size("4096")
        (268435456, 1500000000, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MiB")
    unit = (match[2] or "").lower()
    return round(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _SCALE[unit[:1]])


def floating(text: str) -> str:
    """The name of a floating-point dtype, or ``checkpoint``.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if text == "checkpoint":
        return text
    try:
        plan.floating(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating-point dtype such as bfloat16") from None
    return text


def levels(text: str) -> int:
    """How many levels to open, from 0.

    Raises:
        argparse.ArgumentTypeError: It is no such number.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of levels such as 2")
    return int(text)
