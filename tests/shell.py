"""A real IPython shell inside the test process: `run` a cell, see what it showed and wrote."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

ANSI = re.compile(r"\x1b\[[\d;]*m")


class Ran:
    """What one cell did.

    Attributes:
        value: Its last expression.
        error: The exception it ended with, or None.
        out: What it wrote to standard output, tracebacks included, without colours.
        err: What it wrote to standard error.
        shown: MIME bundles that it displayed, `Out[n]` not among them.
    """

    def __init__(self, shell: InteractiveShell, source: str) -> None:
        publisher = CapturingDisplayPublisher()
        before, shell.display_pub = shell.display_pub, publisher
        try:
            with capture_output(display=False) as captured:
                result = shell.run_cell(source, store_history=True)
        finally:
            shell.display_pub = before
        self.value: Any = result.result
        self.error = result.error_before_exec or result.error_in_exec
        self.out = ANSI.sub("", captured.stdout)
        self.err = ANSI.sub("", captured.stderr)
        self.shown = [output["data"] for output in publisher.outputs]


class Shell:
    """A shell with metaviz loaded; `shell("code")` runs a cell."""

    def __init__(self, ip: InteractiveShell) -> None:
        self.ip = ip

    def __call__(self, source: str) -> Ran:
        return Ran(self.ip, source)

    def names(self) -> dict[str, Any]:
        """The user's namespace."""
        return self.ip.user_ns


@contextlib.contextmanager
def new_shell(folder: Any) -> Iterator[Shell]:
    """A fresh shell that leaves the process as it was; its files are in `folder`."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.ipython_dir = str(folder)
    InteractiveShell.clear_instance()
    hooks = sys.displayhook, sys.excepthook, sys.modules["__main__"]
    ip = InteractiveShell.instance(config=config, user_module=types.ModuleType("__main__"))
    try:
        yield Shell(ip)
    finally:
        ip.restore_sys_module_state()
        InteractiveShell.clear_instance()
        sys.displayhook, sys.excepthook, sys.modules["__main__"] = hooks
