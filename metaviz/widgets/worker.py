"""Work beside the kernel's main thread: cells run on, and clicks are answered, while it goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from metaviz.widgets import cells

Job = Callable[[], None]


def _nothing() -> None:
    pass


class Latest:
    """Does the newest of the jobs given to it, one at a time; what was not begun when a newer one came is dropped.

    Its thread ends when there is nothing to do, so an idle one costs nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._next: tuple[Job, Job] | None = None
        self._busy = False

    def submit(self, job: Job, dropped: Job = _nothing) -> None:
        """Do a job soon, or call ``dropped``. Both have to catch their own errors: nobody is there to hear of them."""
        with self._lock:
            older, self._next = self._next, (job, dropped)
            start = not self._busy
            self._busy = True
        if older is not None:
            older[1]()
        if start:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def drop(self) -> None:
        """Drop the job that was not begun yet."""
        with self._lock:
            older, self._next = self._next, None
        if older is not None:
            older[1]()

    def _run(self) -> None:
        while True:
            with self._lock:
                found, self._next = self._next, None
                if found is None:
                    self._busy = False
                    return
            try:
                with cells.beside():
                    found[0]()
            except Exception:
                # It should have caught that itself; those that come after it are done all the same.
                said = threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                threading.excepthook(said)
                del said
            # Nothing is kept that the job holds on to.
            del found
