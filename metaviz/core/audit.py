"""Watches what a thread reaches for outside of the process: refuses changes, notes which files it reads.

Python reports such calls to an audit hook before it makes them. Imports may do as they like: a module is imported once
per process, by whoever comes first, and relies on what it did then. (The first ops on meta import parts of torch that
make a folder for temporary files and set a variable.) What raises no event is out of reach: C and C++ code
that opens files, `os._exit`, `os.write` to a descriptor that is open already, `multiprocessing` by spawn.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

# Of Python's audit events (https://docs.python.org/3/library/audit_events.html) those of calls that change something
# that outlives the process, that reach another one, that ask the user, or that start what runs on unseen.
_REFUSED = {
    "os": "chdir chflags chmod chown exec fork forkpty kill killpg link lockf mkdir posix_spawn remove removexattr "
    "rename rmdir setxattr spawn startfile startfile/2 symlink system truncate utime",
    "shutil": "chown copyfile copymode copystat copytree make_archive move rmtree unpack_archive",
    "tempfile": "mkdtemp mkstemp",
    "subprocess": "Popen",
    "_winapi": "CreateProcess",
    "pty": "spawn",
    "_thread": "start_joinable_thread start_new_thread",
    "signal": "pthread_kill",
    "resource": "setrlimit",
    "socket": "bind connect getaddrinfo gethostbyaddr gethostbyname getnameinfo sendmsg sendto sethostname",
    "urllib": "Request",
    "webbrowser": "open",
    "sqlite3": "connect",
    "syslog": "openlog syslog",
    "winreg": "CreateKey DeleteKey DeleteValue SaveKey SetValue",
    "builtins": "breakpoint input",
    "sys": "addaudithook remote_exec",
}
_NO_FILE = {"fork", "forkpty", "kill", "killpg", "system"}
_HEEDED = {f"{module}.{name}" for module, names in _REFUSED.items() for name in names.split()}
_HEEDED |= {"open", "os.putenv", "os.unsetenv"}
# Calls whose first argument is a path or a descriptor.
_ON_FILES = (
    "shutil.",
    "sqlite3.",
    *(f"os.{name}" for name in _REFUSED["os"].split() if name not in _NO_FILE),
)
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Refused(PermissionError):
    """What a read-only file system would answer: code that can do without goes on."""


class Watch:
    """What one thread reached for.

    Attributes:
        refused: The first thing that it was refused, as a verb phrase, or None.
        read: Base names of the files that it opened for reading, without those that imports opened.
        environ: Names of the environment variables that it set or deleted, and their values before.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self.read: dict[str, None] = {}
        self.environ: dict[str, str | None] = {}

    def refuse(self, what: str) -> None:
        """Raise in the thread that does ``what``."""
        self.refused = self.refused or what
        raise Refused(
            errno.EPERM, f"a dry run may not change anything outside of the process, and this {what}"
        )

    def heed(self, event: str, args: tuple, frame: types.FrameType) -> None:
        """Let through, note or refuse what ``frame`` is about to do."""
        if _is_import(frame):
            return
        if event == "open":
            path, mode, flags = args
            if flags & _FOR_WRITING or set(mode or "") & set("wax+"):
                if path != os.devnull:
                    self.refuse(f"opens {_base_name(path)!r} for writing")
            elif not isinstance(path, int):
                self.read[_base_name(path)] = None
        elif event in ("os.putenv", "os.unsetenv"):
            # Seeding functions set variables. That can be put back, so it is no reason to stop them.
            name = os.fsdecode(args[0])
            self.environ.setdefault(name, os.environ.get(name))
        elif event.startswith("_thread."):
            self.refuse("starts a thread")
        else:
            on_file = event.startswith(_ON_FILES) and isinstance(args[0], (str, bytes, os.PathLike))
            on = f" on {_base_name(args[0])!r}" if on_file else ""
            self.refuse(f"calls {event.removeprefix('builtins.')}{on}")

    def put_back_environ(self) -> None:
        """Give the environment variables their values from before."""
        for name, value in self.environ.items():
            if value is not None:
                os.environ[name] = value
            elif name in os.environ:
                del os.environ[name]


class _Here(threading.local):
    watch: Watch | None = None


here = _Here()


@functools.cache
def install() -> None:
    """Add the audit hook. It cannot be removed, so this is for when it is needed first."""
    sys.addaudithook(_hook)


def _hook(event: str, args: tuple) -> None:
    # Every event of every thread comes by, and `id()` is one of them.
    if event in _HEEDED and here.watch is not None:
        here.watch.heed(event, args, sys._getframe(1))


def refusing(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """``threading.Thread.start`` as it is for threads that are watched."""

    @functools.wraps(start)
    def start_thread(thread: threading.Thread) -> None:
        if here.watch is not None and not _is_import(sys._getframe(1)):
            here.watch.refuse("starts a thread")
        start(thread)

    return start_thread


def _base_name(path: Any) -> str:
    if isinstance(path, int):
        return f"file descriptor {path}"
    path = os.fsdecode(path)
    return os.path.basename(path.rstrip(os.sep)) or path


def _is_import(frame: types.FrameType | None) -> bool:
    """Whether a module is being imported, or the text of a traceback being read."""
    while frame is not None:
        if frame.f_globals.get("__name__") in ("importlib._bootstrap", "linecache"):
            return True
        frame = frame.f_back
    return False
