"""Reading ranges of bytes: just those, in parallel where it pays, and only of a file that is still the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

import metaviz
from metaviz.core.ahead import Ahead
from metaviz.core.stored import File, Piece, Stored, contiguous
from metaviz.errors import BadCheckpoint, StalePlan


def stored(path, shape=(4, 3), dtype=torch.float32, pieces=None) -> Stored:
    file = File.at(path)
    return Stored("x", shape, dtype, pieces or (Piece(file, 0, shape, contiguous(shape)),))


@pytest.fixture
def values(tmp_path) -> torch.Tensor:
    found = torch.randn(4, 3)
    (tmp_path / "x").write_bytes(bytes(found.view(-1).view(torch.uint8).tolist()))
    return found


def test_a_large_tensor_is_read_by_several_threads_and_is_the_same(tmp_path):
    found = torch.randint(0, 2**62, (9_000_001,))
    with open(tmp_path / "x", "wb") as file:
        file.write(b"123")
        file.write(memoryview(found.numpy()))
    there = stored(
        tmp_path / "x", found.shape, torch.int64, (Piece(File.at(tmp_path / "x"), 3, found.shape, (1,)),)
    )
    threads = threading.active_count()
    assert torch.equal(there.load(), found)
    assert threading.active_count() == threads


def test_boxes_of_a_tensor_are_put_together(tmp_path, values):
    file = File.at(tmp_path / "x")
    rows = [Piece(file, 12 * k, (1, 3), (3, 1), (3 - k, 0)) for k in range(4)]
    assert torch.equal(stored(tmp_path / "x", pieces=tuple(rows)).load(), values.flip(0))
    columns = [Piece(file, 4 * k, (4, 1), (3, 1), (0, 2 - k)) for k in range(3)]
    assert torch.equal(stored(tmp_path / "x", pieces=tuple(columns)).load(), values.flip(1))


@pytest.mark.parametrize("change", ["longer", "shorter", "other", "gone", "touched"])
def test_a_file_that_is_not_the_same_any_more_is_not_read(tmp_path, values, change):
    path = tmp_path / "x"
    there = stored(path)
    if change == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    elif change == "shorter":
        os.truncate(path, 10)
    elif change == "other":
        (tmp_path / "y").write_bytes(path.read_bytes())
        os.replace(tmp_path / "y", path)
    elif change == "gone":
        path.unlink()
    else:
        os.utime(path, ns=(0, 0))
    with pytest.raises(BadCheckpoint if change == "gone" else StalePlan, match="Next: "):
        there.load()


def test_a_range_that_reaches_beyond_the_file_is_refused(tmp_path, values):
    with pytest.raises(BadCheckpoint, match=r"ends at byte 48 B, in the middle of a tensor: it is cut short"):
        stored(tmp_path / "x", (5, 3)).load()


def test_a_folder_a_missing_and_a_forbidden_file_are_refused(tmp_path, monkeypatch):
    with pytest.raises(BadCheckpoint, match="it is no ordinary file"):
        File.at(tmp_path).head(8)
    with pytest.raises(BadCheckpoint, match=r"No such file or directory\. Next: import os; os\.listdir"):
        File.at(tmp_path / "nowhere")
    (tmp_path / "x").write_bytes(b"12345678")
    (tmp_path / "x").chmod(0)
    file = File.at(tmp_path / "x")
    if os.access(tmp_path / "x", os.R_OK):

        def forbidden(path, *_, **__):
            raise PermissionError(13, "Permission denied", path)

        monkeypatch.setattr("metaviz.core.stored.open", forbidden, raising=False)
    with pytest.raises(BadCheckpoint, match=r"cannot be read: Permission denied\. Next: import os; oct"):
        file.head(8)


def test_reading_ahead_gives_each_tensor_once_and_in_any_order(tmp_path):
    found = torch.arange(100.0).view(20, 5)
    (tmp_path / "x").write_bytes(bytes(found.view(-1).view(torch.uint8).tolist()))
    file = File.at(tmp_path / "x")
    rows = [Stored(str(k), (5,), torch.float32, (Piece(file, 20 * k, (5,), (1,)),)) for k in range(20)]
    before = threading.active_count()
    with Ahead(rows) as ahead:
        for k in (0, 1, 5, 2, 3, 4, 19, *range(6, 19)):
            assert torch.equal(ahead.load(rows[k]), found[k])
    with Ahead(rows) as ahead:
        ahead.load(rows[0])
    assert threading.active_count() == before


def test_an_error_while_reading_ahead_comes_when_the_tensor_is_wanted(tmp_path, values):
    good, bad = stored(tmp_path / "x"), stored(tmp_path / "x", (9, 9))
    with Ahead([good, bad]) as ahead:
        assert torch.equal(ahead.load(good), values)
        with pytest.raises(BadCheckpoint):
            ahead.load(bad)


def read_by(call: Callable[[], object]) -> int:
    """Bytes that the process reads from files while ``call`` runs, as the system counts them."""

    def counted() -> bytes:
        with open("/proc/self/io", "rb", buffering=0) as file:
            return file.read(4096)

    before = counted()
    call()
    return int(counted().split()[1]) - int(before.split()[1]) - len(before)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_only_the_wanted_bytes_are_read(tmp_path, unavailable, suffix):
    if not os.path.exists("/proc/self/io"):
        unavailable("the system does not count what a process reads")
    path = tmp_path / f"a.{suffix}"
    state = {f"layers.{k}.weight": torch.randn(500, 200) for k in range(10)}
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    metaviz.checkpoint(path)
    # Of four megabytes; reading by the block is part of it.
    assert read_by(lambda: metaviz.checkpoint(path)) < 80_000
    wanted = metaviz.checkpoint(path)["layers.3.weight"]
    assert read_by(wanted.load) == 500 * 200 * 4
    assert torch.equal(wanted.load(), state["layers.3.weight"])


def opened_and_then(change: Callable[[str], None]) -> Callable:
    """Stands in for ``open``: the file changes once it is open."""

    def opened(path, *how, **more):
        file = open(path, *how, **more)  # noqa: SIM115
        change(path)
        return file

    return opened


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(
    "change",
    [lambda path: os.utime(path, ns=(0, 0)), lambda path: os.truncate(path, 10)],
    ids=["written", "cut"],
)
def test_a_file_that_changes_while_it_is_read_gives_no_values(tmp_path, monkeypatch, values, change, large):
    there = stored(tmp_path / "x")
    if large:
        monkeypatch.setattr("metaviz.core.stored._PARALLEL_FROM", 16)
        monkeypatch.setattr("metaviz.core.stored.THREADS", 2)
    monkeypatch.setattr("metaviz.core.stored.open", opened_and_then(change), raising=False)
    with pytest.raises(StalePlan, match=r"was changed or replaced after its header was read"):
        there.load()


@pytest.fixture
def soon():
    """Ends a test that waits for ever."""

    def ring(*_: object) -> None:
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes by name")
@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pt"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_and_never_waited_for(tmp_path, soon, suffix):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    os.symlink("/dev/zero", tmp_path / f"zero{suffix}")
    for name in ("pipe", "zero"):
        with pytest.raises(BadCheckpoint, match=r"cannot be read: it is no ordinary file\. Next: "):
            metaviz.checkpoint(tmp_path / f"{name}{suffix}")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="the system sends signals to no thread")
def test_ctrl_c_while_a_large_tensor_is_read_leaves_no_thread_that_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("metaviz.core.stored.THREADS", 2)
    # Two gigabytes of nothing, of which no more is read than fits into the moment before the signal.
    with open(tmp_path / "x", "wb") as file:
        file.truncate(2**31)
    there = stored(tmp_path / "x", (2**31,), torch.uint8)

    def readers() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.startswith("metaviz-read")]

    def interrupt() -> None:
        while not readers():
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    watching = threading.Thread(target=interrupt, daemon=True)
    watching.start()
    with pytest.raises(KeyboardInterrupt):
        there.load()
    watching.join()
    deadline = time.monotonic() + 5
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not readers()
