"""Helpers for tests of functions that are run aside: another thread meanwhile, a fresh interpreter."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metaviz.core import silence
from metaviz.core.sandbox import Outcome, run_aside

ROOT = Path(__file__).parents[1]


def ends(done: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether ``done()`` comes true before long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if done():
            return True
        time.sleep(0.005)
    return False


def nobody_aside() -> bool:
    return not any(thread.name == "metaviz aside" for thread in threading.enumerate())


def stand_ins() -> tuple:
    return (
        sys.stdout,
        sys.stderr,
        logging.Logger.callHandlers,
        threading.Thread.start,
        silence.UNHEARD in warnings.filters,
    )


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    before = stand_ins()
    yield
    assert ends(nobody_aside)
    assert all(now is then for now, then in zip(stand_ins(), before, strict=True))


def meanwhile(act: Callable[[], Any], aside: Callable[[], None] = lambda: None) -> tuple[Outcome, Any]:
    """The outcome of ``aside``, and what ``act()`` in another thread returns while that runs."""
    entered, acted, answers = threading.Event(), threading.Event(), []

    def other() -> None:
        entered.wait(10)
        try:
            answers.append(act())
        finally:
            acted.set()

    def fn() -> None:
        aside()
        entered.set()
        acted.wait(10)
        aside()

    thread = threading.Thread(target=other)
    thread.start()
    outcome = run_aside(fn, seconds=10)
    thread.join()
    assert outcome.error is None
    return outcome, answers[0]


def fresh(code: str, *flags: str, folder: Path | None = None) -> str:
    """What a new interpreter prints that runs ``code``."""
    command = [sys.executable, *flags, "-c", textwrap.dedent(code)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), folder and str(folder))))}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr
