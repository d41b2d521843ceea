"""Silences chosen threads: what they print, warn of and log goes nowhere, and what others say is heard as before.

Streams, loggers and warning filters belong to the process. So while any thread is silenced, things that ask which
thread is speaking stand in for them; they are taken away with the last silenced thread.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, TextIO


class _Here(threading.local):
    sink: TextIO | None = None


here = _Here()
# (owner, name of the attribute, what stands in, what was there)
_stand_ins: list[tuple[Any, str, Any, Any]] = []
_filters: list[list] = []
# Kept, since `print` holds no reference to the stream that it prints to: where it is still in `write` of a stand-in
# that another thread takes away, that must not be freed.
_streams: deque[_Stream] = deque(maxlen=32)


def nowhere() -> TextIO:
    """A stream that forgets; each thread needs its own, since it may close or detach what it prints to."""
    return io.TextIOWrapper(io.BufferedWriter(_Nowhere()), "utf-8", "replace")


def begin() -> None:
    """Put the stand-ins in place: a thread is silent from when it sets ``here.sink``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            other = _stand_in_for(stream)
            stand_in(sys, name, other, other._real)
    log = logging.Logger.callHandlers

    # Handlers keep the stream that they began with, so a record must be stopped before it gets to any.
    @functools.wraps(log)
    def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
        if here.sink is None:
            log(logger, record)

    stand_in(logging.Logger, "callHandlers", call_handlers, log)
    # Not by `filterwarnings`: that makes every module forget which warnings it has shown.
    warnings.filters.insert(0, UNHEARD)
    _filters.append(warnings.filters)


def _stand_in_for(stream: Any) -> _Stream:
    if type(stream) is _Stream:
        # Another thread's redirect_stdout has brought one of ours back.
        return stream
    for known in _streams:
        if known._real is stream:
            return known
    _streams.append(_Stream(stream))
    return _streams[-1]


def stand_in(owner: Any, name: str, value: Any, before: Any) -> None:
    """Set an attribute until :func:`end`."""
    setattr(owner, name, value)
    _stand_ins.append((owner, name, value, before))


def end() -> None:
    """Take the stand-ins away, save those that somebody has replaced meanwhile."""
    while _stand_ins:
        owner, name, value, before = _stand_ins.pop()
        if getattr(owner, name) is value:
            setattr(owner, name, before)
    # Where another thread is inside of catch_warnings, it has put a copy in the place of the list.
    for filters in (*_filters, warnings.filters):
        while UNHEARD in filters:
            filters.remove(UNHEARD)
    _filters.clear()


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _Stream:
    """Stands in for `sys.stdout` or `sys.stderr`: the real one, save for silenced threads.

    Whoever got hold of it may keep it for good. It asks at each call, and passes for the real one.
    """

    __slots__ = ("_real",)

    def __init__(self, real: Any) -> None:
        object.__setattr__(self, "_real", real)

    @property
    def __class__(self) -> type:
        return type(self._real)

    # These two by name: handlers of other threads keep `stream.write` itself.
    @property
    def write(self) -> _Write:
        return _Write(self._real.write)

    def flush(self) -> None:
        _target(self).flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(_target(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_target(self), name, value.real if type(value) is _Write else value)

    def __delattr__(self, name: str) -> None:
        delattr(_target(self), name)

    def __dir__(self) -> list[str]:
        return dir(_target(self))

    def __iter__(self) -> Iterator[str]:
        return iter(_target(self))

    def __enter__(self) -> Any:
        return _target(self).__enter__()

    def __exit__(self, *error: Any) -> Any:
        return _target(self).__exit__(*error)


class _Write:
    """`write` of a stream, save for silenced threads.

    It keeps the real one of its time: IPython puts a `write` that calls the one before it in its place while a cell
    runs, and puts that back. Asking the stream again would then go round in circles, for good.
    """

    __slots__ = ("real",)

    def __init__(self, real: Any) -> None:
        self.real = real

    def __call__(self, text: str) -> int:
        return (self.real if here.sink is None else here.sink.write)(text)


def _target(stream: _Stream) -> Any:
    sink = here.sink
    return stream._real if sink is None else sink


class _Silenced:
    """In the place of a filter's regular expression: every text matches, in silenced threads.

    `warnings.catch_warnings` would do this to all threads, and a warning that is merely not shown counts as shown once.
    This filter says "ignore" before any other is asked, which leaves no note, and elsewhere it has no say.
    """

    def match(self, text: str) -> bool:
        return here.sink is not None


UNHEARD = ("ignore", _Silenced(), Warning, None, 0)
