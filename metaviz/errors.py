"""Every error that metaviz raises on purpose.

Each message says what happened, where, why, and then the next step as code.
"""

from __future__ import annotations


class MetavizError(Exception):
    """Base of every error that metaviz raises on purpose."""

    def __str__(self) -> str:
        # Names that others gave stand in the message, and a terminal obeys control characters.
        return "\n".join(map(spelled_out, Exception.__str__(self).split("\n")))


def spelled_out(line: str) -> str:
    """A line with its control characters, escapes and direction marks as they are written in code."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


class UnknownPath(MetavizError, KeyError):
    """A module or tensor path that the model does not have."""


class NestedRecording(MetavizError):
    """A recording was started inside another one of the same thread."""


class ValueRead(MetavizError):
    """A constructor asked for values that cannot be computed within the limit."""


class CannotMaterialize(MetavizError):
    """Some chosen tensors have no source that can give them values."""


class BadCheckpoint(MetavizError):
    """A file or folder that cannot be read as a checkpoint, or only by running code that it brings along."""


class CheckpointMismatch(CannotMaterialize):
    """A checkpoint that does not fit the model: other names, or other shapes."""


class UnknownDevice(MetavizError):
    """A device that this machine does not have, or that cannot hold values."""


class NotEnoughMemory(MetavizError):
    """The chosen tensors are larger than the free memory of the device."""


class StalePlan(MetavizError):
    """The model, or something that the tape points to, changed after it was looked at."""


class WouldLoseValues(MetavizError):
    """Unloading would throw away values that cannot be had again."""


class BadMesh(MetavizError):
    """A description of a device mesh that means nothing, or a question about an axis or rank that it does not have."""
