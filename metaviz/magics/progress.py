"""Progress of long work: one bar that updates in place and stays readable in a saved notebook."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from IPython.core.displaypub import DisplayPublisher
from IPython.display import display

from metaviz.core.apply import Report
from metaviz.core.units import format_bytes, format_seconds
from metaviz.views.planned import progress_line, rate

PER_SECOND = 10


class Progress:
    """Pass it as ``progress=`` and call :meth:`finish` with the report. Quick work shows nothing.

    The last state stays true: what was done and how fast, or where it stopped and that nothing was changed.

    Args:
        shell: The IPython shell.
        after: Seconds of work before anything is shown.
        clock: Seconds as a float.
        verb: What is done to the bytes: ``"read"``; nothing is said if empty.

    Example:
        >>> with Progress(shell) as progress:
        ...     report = progress.finish(metaviz.materialize(model, progress=progress))
    """

    def __init__(
        self, shell: Any, after: float = 1.0, clock: Any = time.perf_counter, verb: str = ""
    ) -> None:
        self._screen = _Line() if type(shell.display_pub) is DisplayPublisher else _Output()
        self._clock = clock
        self._verb = f"{verb} " if verb else ""
        self._began = clock()
        self._next = self._began + after
        self._shown = self._finished = False
        self._state: tuple[int, int, str] = (0, 0, "")

    def __call__(self, done: int, total: int, path: str) -> None:
        """Note how far the work is, and show it at most ten times a second."""
        self._state = done, total, path
        now = self._clock()
        if now >= self._next:
            self._next = now + 1 / PER_SECOND
            self._shown = True
            spent = now - self._began
            self._screen.write(done, total, progress_line(done, total, spent, path, self._verb))

    def finish(self, report: Report) -> Report:
        """Show the end, if anything was shown, and hand the report back."""
        self._finished = True
        if self._shown:
            # The report follows and says what was done; this is what it does not say.
            pace = f"{format_seconds(report.seconds)}, {rate(report.nbytes, report.seconds)}"
            self._screen.write(1, 1, f"{format_bytes(report.nbytes)} on {report.device} in {pace}")
        return report

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._shown:
            if error is not None and not self._finished:
                done, total, path = self._state
                where = f"at {format_bytes(done)} of {format_bytes(total)}, after {path}"
                text = f"stopped by {type(error).__name__} {where}: the model is as it was before"
                self._screen.write(done, total, text)
            self._screen.close()


class _Output:
    """One output of a notebook that is replaced; text for whatever shows no HTML."""

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, done: int, total: int, text: str) -> None:
        style = "width: 16em; vertical-align: middle"
        bar = f'<progress max="{max(total, 1)}" value="{done}" style="{style}"></progress>'
        markup = f'<div style="font-variant-numeric: tabular-nums">{bar}&ensp;{html.escape(text)}</div>'
        bundle = {"text/plain": text, "text/html": markup}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def close(self) -> None:
        pass


class _Line:
    """One line of a terminal that is written over; where output goes to a file, only its last state."""

    _WIDTH = 100

    def __init__(self) -> None:
        self._text = ""
        self._length = 0

    def write(self, done: int, total: int, text: str) -> None:
        filled = 20 * done // max(total, 1)
        self._text = f"[{'#' * filled}{'.' * (20 - filled)}] {text}"
        if sys.stdout.isatty():
            line = self._text if len(self._text) <= self._WIDTH else self._text[: self._WIDTH - 1] + "…"
            print("\r" + line.ljust(self._length), end="", flush=True)
            self._length = len(line)

    def close(self) -> None:
        print("\r" + self._text.ljust(self._length) if sys.stdout.isatty() else self._text, flush=True)
