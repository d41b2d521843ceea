"""Progress: nothing for quick work, a bar that is kept up to date, and a last state that is true."""

from __future__ import annotations

import io
import signal
import sys

import pytest
import torch
from IPython.core.displaypub import CapturingDisplayPublisher
from shell import new_shell

from metaviz.core.apply import Report
from metaviz.magics.progress import Progress


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shell(tmp_path):
    with new_shell(tmp_path) as shell:
        yield shell


@pytest.fixture
def screen(shell):
    """The bundles that a notebook would get, in order."""
    shell.ip.display_pub = CapturingDisplayPublisher()
    return shell.ip.display_pub.outputs


def done(nbytes: int = 4 * 2**30, seconds: float = 4.0) -> Report:
    return Report("materialized", (None,) * 9, {}, (), (), (), (), torch.device("cpu"), nbytes, seconds)


def test_quick_work_shows_nothing(shell, screen):
    clock = Clock()
    with Progress(shell.ip, 1.0, clock) as progress:
        for step in range(9):
            clock.now += 0.1
            progress(step, 9, "layers.0")
        progress.finish(done())
    assert screen == []


def test_long_work_is_one_output_that_is_replaced(shell, screen):
    clock = Clock()
    with Progress(shell.ip, 1.0, clock) as progress:
        clock.now += 1.0
        progress(2**30, 4 * 2**30, "layers.<0>.weight")
        clock.now += 1.0
        progress(2 * 2**30, 4 * 2**30, "layers.1.weight")
    first, second = screen
    assert first["data"]["text/plain"] == (
        "1.00 GiB of 4.00 GiB, 1.00 GiB/s, 3.00 s left, at layers.<0>.weight"
    )
    assert second["data"]["text/plain"] == (
        "2.00 GiB of 4.00 GiB, 1.00 GiB/s, 2.00 s left, at layers.1.weight"
    )
    assert "layers.&lt;0&gt;.weight" in first["data"]["text/html"]
    assert f'<progress max="{4 * 2**30}" value="{2**30}"' in first["data"]["text/html"]
    assert [output.get("update", False) for output in screen] == [False, True]
    assert first["transient"] == second["transient"]


def test_reading_says_so_and_at_the_beginning_and_the_end_no_time_is_left_to_tell(shell, screen):
    clock = Clock()
    with Progress(shell.ip, 0.0, clock, verb="read") as progress:
        for nbytes in (0, 2**20, 4 * 2**20):
            clock.now += 1.0
            progress(nbytes, 4 * 2**20, "w")
    assert [output["data"]["text/plain"] for output in screen] == [
        "read 0 B of 4.00 MiB, 0 B/s, at w",
        "read 1.00 MiB of 4.00 MiB, 512 KiB/s, 6.00 s left, at w",
        "read 4.00 MiB of 4.00 MiB, 1.33 MiB/s, at w",
    ]


def test_it_is_shown_at_most_ten_times_a_second(shell, screen):
    clock = Clock()
    with Progress(shell.ip, 1.0, clock) as progress:
        for step in range(3000):
            clock.now += 0.001
            progress(step, 3000, "w")
    assert 15 <= len(screen) <= 21


def test_the_last_state_says_what_was_done_and_how_fast(shell, screen):
    clock = Clock()
    with Progress(shell.ip, 1.0, clock) as progress:
        clock.now += 2
        progress(1, 2, "w")
        report = done()
        assert progress.finish(report) is report
    assert screen[-1]["data"]["text/plain"] == "4.00 GiB on cpu in 4.00 s, 1.00 GiB/s"
    assert '<progress max="1" value="1"' in screen[-1]["data"]["text/html"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("full")])
def test_the_last_state_after_an_error_says_that_nothing_was_changed(shell, screen, error):
    clock = Clock()
    with pytest.raises(type(error)), Progress(shell.ip, 1.0, clock) as progress:
        clock.now += 2
        progress(2**20, 2**21, "layers.3.mlp")
        raise error
    assert screen[-1]["data"]["text/plain"] == (
        f"stopped by {type(error).__name__} at 1.00 MiB of 2.00 MiB, after layers.3.mlp: "
        "the model is as it was before"
    )
    assert screen[-1]["update"]


def test_an_interrupt_after_the_work_does_not_say_that_nothing_was_changed(shell, screen):
    clock = Clock()
    with pytest.raises(KeyboardInterrupt), Progress(shell.ip, 1.0, clock) as progress:
        clock.now += 2
        progress(1, 1, "w")
        progress.finish(done())
        raise KeyboardInterrupt
    assert " on cpu in " in screen[-1]["data"]["text/plain"]


def test_a_terminal_gets_one_line_that_is_written_over(shell, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", Terminal())
    clock = Clock()
    with Progress(shell.ip, 1.0, clock) as progress:
        for step in (1, 2):
            clock.now += 1.0
            progress(step, 4, "a.very.long.path" * step * 10)
        progress.finish(done(2**20))
        written = sys.stdout.getvalue()
    assert written.count("\n") == 0 and written.count("\r") == 3
    assert max(map(len, written.split("\r"))) == 100
    assert "[#####...............] 1 B of 4 B, 1 B/s, 3.00 s left, at a.very" in written


def test_a_file_gets_the_last_state_only(shell, capsys):
    clock = Clock()
    with Progress(shell.ip, 1.0, clock) as progress:
        clock.now += 2.0
        progress(1, 4, "a")
        progress.finish(done(2**20, 1.0))
    assert capsys.readouterr().out == ("[####################] 1.00 MiB on cpu in 1.00 s, 1.00 MiB/s\n")


MODEL = "%%meta_build --quiet\nmodel = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])"


@pytest.fixture
def loaded(shell):
    shell("%load_ext metaviz")
    shell("import torch")
    shell(MODEL)
    shell("%config MetavizMagics.progress_after = 0")
    return shell


def test_the_magic_shows_the_progress_of_its_work(loaded):
    ran = loaded("%meta_materialize model")
    assert ran.error is None
    last = ran.shown[-1]["text/plain"]
    assert last.startswith("1.12 KiB on cpu in ")
    assert ran.value.nbytes == 8 * (64 + 8) * 4 // 2


def test_an_interrupt_in_the_middle_leaves_the_model_and_a_true_last_state(loaded, monkeypatch):
    shown = CapturingDisplayPublisher.publish

    def publish(self, *args, **kwargs):
        shown(self, *args, **kwargs)
        if len(self.outputs) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(CapturingDisplayPublisher, "publish", publish)
    ran = loaded("%meta_materialize model")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert all(p.is_meta for p in loaded.names()["model"].parameters())
    assert ran.shown[-1]["text/plain"].startswith(
        "stopped by KeyboardInterrupt at 256 B of 1.12 KiB, after 0.weight"
    )
    monkeypatch.undo()
    assert loaded("%meta_materialize model").error is None
