"""What a function that is run aside may not do outside of the process, each with the real call."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aside import fresh, meanwhile, no_trace  # noqa: F401

from metaviz.core.sandbox import Outcome, run_aside


def use(method: Callable[..., Any], address: tuple[str, int]) -> None:
    with socket.socket() as unused:
        method(unused, address)


def exclusive(path: str) -> None:
    with open(path, "x"):
        pass


REFUSED = {
    "opens 'new.txt' for writing": lambda: Path("new.txt").write_text("new"),
    "opens 'exclusive.txt' for writing": lambda: exclusive("exclusive.txt"),
    "opens 'there.txt' for writing": lambda: os.open("there.txt", os.O_RDWR),
    "opens 'low.txt' for writing": lambda: os.open("low.txt", os.O_CREAT),
    "opens 'file descriptor 1' for writing": lambda: os.fdopen(1, "w", closefd=False),
    "calls os.remove on 'there.txt'": lambda: os.remove("there.txt"),
    "calls os.rename on 'there.txt'": lambda: os.replace("there.txt", "b"),
    "calls os.mkdir on 'd'": lambda: Path("d").mkdir(),
    "calls os.rmdir on 'empty'": lambda: os.rmdir(b"empty/"),
    "calls os.truncate on 'there.txt'": lambda: os.truncate("there.txt", 0),
    "calls os.chmod on 'there.txt'": lambda: Path("there.txt").chmod(0),
    "calls os.utime on 'there.txt'": lambda: os.utime("there.txt", (1, 1)),
    "calls os.symlink on 'there.txt'": lambda: os.symlink("there.txt", "s"),
    "calls os.link on 'there.txt'": lambda: os.link("there.txt", "l"),
    "calls os.chdir on 'empty'": lambda: os.chdir("empty"),
    "calls shutil.rmtree on 'empty'": lambda: shutil.rmtree("empty"),
    "calls shutil.copyfile on 'there.txt'": lambda: shutil.copy("there.txt", "copy.txt"),
    "calls tempfile.mkdtemp": lambda: tempfile.mkdtemp(dir="."),
    "calls sqlite3.connect on 'db'": lambda: sqlite3.connect("db"),
    "calls os.system": lambda: os.system("echo > ran.txt"),
    "calls subprocess.Popen": lambda: subprocess.run(["touch", "ran.txt"]),
    "calls os.posix_spawn on 'touch'": lambda: os.posix_spawn("/bin/touch", ["touch", "ran.txt"], {}),
    "calls os.fork": lambda: os.fork() or os._exit(0),
    "calls os.kill": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "calls socket.connect": lambda: use(socket.socket.connect, ("127.0.0.1", 9)),
    "calls socket.bind": lambda: use(socket.socket.bind, ("127.0.0.1", 0)),
    "calls socket.getaddrinfo": lambda: socket.create_connection(("localhost", 9)),
    "calls input": lambda: input(),
    "calls breakpoint": lambda: breakpoint(),
    "starts a thread": lambda: threading.Thread(target=print).start(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_the_world_is_refused_and_named(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.txt").write_text("as it was")
    (tmp_path / "empty").mkdir()
    before = (tmp_path / "there.txt").stat()
    outcome = run_aside(REFUSED[what], seconds=10)
    assert outcome.refused == what
    assert isinstance(outcome.error, PermissionError) and what in str(outcome.error)
    assert sorted(os.listdir(tmp_path)) == ["empty", "there.txt"]
    assert (tmp_path / "there.txt").stat() == before and Path.cwd() == tmp_path


def test_a_hook_that_could_not_be_removed_is_not_added():
    heard = []
    assert (
        run_aside(lambda: sys.addaudithook(lambda *event: heard.append(event))).refused
        == "calls sys.addaudithook"
    )
    sys.audit("metaviz.test")
    assert not heard


def test_swallowing_the_refusal_does_not_hide_it(tmp_path):
    def fn():
        for name in ("first.txt", "second.txt"):
            with contextlib.suppress(OSError):
                (tmp_path / name).write_text("new")
        return "went on"

    assert run_aside(fn) == Outcome("went on", None, True, "opens 'first.txt' for writing")
    assert not list(tmp_path.iterdir())


def test_other_threads_may_write_meanwhile(tmp_path):
    meanwhile(lambda: (tmp_path / "x.txt").write_text("written"))
    assert (tmp_path / "x.txt").read_text() == "written"


def test_writing_to_the_null_device_is_no_trace():
    def fn():
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            print("gone")

    assert run_aside(fn) == Outcome(finished=True)


def test_files_that_it_reads_are_read_and_named(tmp_path):
    (tmp_path / "values.txt").write_text("1")
    outcome = run_aside(lambda: [(tmp_path / "values.txt").read_text() for _ in range(2)])
    assert outcome == Outcome(["1", "1"], None, True, None, ("values.txt",))


@pytest.mark.parametrize("flags", [(), ("-B",)])
def test_a_fresh_module_can_be_imported_and_what_that_reads_is_not_named(flags, tmp_path):
    (tmp_path / "table.txt").write_text("7")
    (tmp_path / "fresh.py").write_text("VALUE = int(open('table.txt').read())")
    code = """
        from metaviz.core.sandbox import run_aside
        outcome = run_aside(lambda: __import__("fresh").VALUE)
        print(outcome.value, outcome.refused, outcome.read)
    """
    assert fresh(code, *flags, folder=tmp_path).split() == ["7", "None", "()"]


def test_what_an_import_sets_up_for_good_stays(tmp_path):
    (tmp_path / "setup_once.py").write_text(
        "import os, pathlib, sys, warnings, threading\n"
        "pathlib.Path('cache.txt').write_text('made')\n"
        "os.environ['METAVIZ_CACHE'] = 'cache.txt'\n"
        "warnings.filterwarnings('ignore', 'noise')\n"
        "sys.path.append('plugins')\n"
        "threading.Thread(target=int).start()\n"
    )
    code = """
        import os, sys, warnings
        from metaviz.core.sandbox import run_aside
        outcome = run_aside(lambda: __import__("setup_once"))
        print(outcome.error, outcome.refused)
        print(os.environ["METAVIZ_CACHE"], sys.path[-1])
        warnings.warn("noise")
    """
    assert fresh(code, folder=tmp_path).splitlines() == ["None None", "cache.txt plugins"]
    assert (tmp_path / "cache.txt").read_text() == "made"


def test_after_an_import_the_function_itself_is_still_refused_things(tmp_path):
    (tmp_path / "fresh.py").write_text("def write(): open('x.txt', 'w')")
    code = """
        from metaviz.core.sandbox import run_aside
        print(run_aside(lambda: __import__("fresh").write()).refused)
    """
    assert fresh(code, folder=tmp_path) == "opens 'x.txt' for writing\n"
    assert not (tmp_path / "x.txt").exists()


@pytest.mark.parametrize("flags", [(), ("-B",)])
def test_the_first_ops_of_a_process_on_meta_are_refused_nothing(flags):
    code = """
        import torch
        from metaviz.core.sandbox import run_aside
        def fn():
            for init in ("kaiming_uniform_", "xavier_normal_", "dirac_", "uniform_"):
                getattr(torch.nn.init, init)(torch.empty(8, 8, 8, device="meta"))
            torch.nn.MultiheadAttention(8, 2, device="meta")._reset_parameters()
            torch.nn.LSTM(4, 4, device="meta").reset_parameters()
            torch.manual_seed(1)
        print(run_aside(fn, seconds=60))
    """
    assert fresh(code, *flags) == f"{Outcome(finished=True)}\n"
