"""Reading ranges of bytes: just those, in parallel where it pays, and only of a file that is still the same."""

from __future__ import annotations

import os
import threading

import pytest
import torch

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
