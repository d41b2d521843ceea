"""Which checkpoint a path means: names of files, links, indexes, and what is said where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import metaviz
from metaviz.core.folder import find
from metaviz.errors import BadCheckpoint

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]


def write(folder: Path, *names: str) -> Path:
    """Files of one tensor each, which is called as its file is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        content = {name: torch.ones(1)}
        (save_file if name.endswith(".safetensors") else torch.save)(content, folder / name)
    return folder


def write_index(folder: Path, names=SHARDS, called: str = INDEX) -> Path:
    (folder / called).write_text(json.dumps({"weight_map": {name: name for name in names}}))
    return folder / called


def refusal(path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        metaviz.checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "diffusion_pytorch_model.fp16.safetensors",
        "a.pt",
        "a.pth",
        "pytorch_model.bin",
        "epoch=3-step=100.ckpt",
        "adapter_model.bin",
    ],
)
def test_one_file_in_a_folder_is_the_checkpoint(tmp_path, name):
    folder = write(tmp_path, name)
    write(tmp_path, "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "training_args.bin")
    write(tmp_path, "rng_state.pth", "rng_state_3.pth", "random_states_0.pkl", "sampler.bin")
    (tmp_path / "config.json").write_text("{}")
    assert list(metaviz.checkpoint(folder)) == [name]
    assert list(metaviz.checkpoint(f"{folder}{os.sep}")) == [name]
    assert list(metaviz.checkpoint(folder / name)) == [name]


@pytest.mark.parametrize(
    ("written", "name"),
    [("a.safetensors", "A.SAFETENSORS"), ("a.pt", "A.PT"), ("a.safetensors", "0a1b2c"), ("a.pt", "weights")],
)
def test_a_file_is_known_by_its_content_where_its_name_says_nothing(tmp_path, written, name):
    write(tmp_path, written)
    os.replace(tmp_path / written, tmp_path / name)
    assert list(metaviz.checkpoint(tmp_path / name)) == [written]


def test_the_users_home_is_found(tmp_path, monkeypatch):
    write(tmp_path, "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert metaviz.checkpoint("~/model.safetensors").path == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("called", [INDEX, "model.safetensors.index.fp16.json", "x.bin.index.json"])
def test_an_index_names_the_files_and_their_format(tmp_path, called):
    write(tmp_path, *SHARDS)
    index = write_index(tmp_path, called=called)
    found = find(str(index))
    assert found.format == ("torch" if ".bin." in called else "safetensors")
    assert found.index == {name: str(tmp_path / name) for name in SHARDS}
    assert find(str(tmp_path)) == found


def test_an_index_may_name_files_in_folders_below(tmp_path):
    write(tmp_path / "part", *SHARDS)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: f"part/{name}" for name in SHARDS}}))
    assert list(metaviz.checkpoint(tmp_path)) == SHARDS


def test_a_download_cache_of_links_is_read_through_and_found_from_above(tmp_path):
    """The layout of the cache of huggingface_hub: snapshots of links to blobs without a suffix."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    write(blobs, *SHARDS)
    write_index(blobs)
    snapshot.mkdir(parents=True)
    for k, name in enumerate((*SHARDS, INDEX)):
        os.replace(blobs / name, blobs / str(k))
        (snapshot / name).symlink_to(Path("..", "..", "blobs", str(k)))
    assert list(metaviz.checkpoint(snapshot)) == SHARDS
    assert refusal(tmp_path).endswith(f"Next: metaviz.checkpoint({str(snapshot)!r})")


def test_a_link_to_nowhere_is_a_missing_file(tmp_path):
    write(tmp_path, *SHARDS)
    write_index(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).symlink_to(tmp_path / "gone")
    checkpoint = metaviz.checkpoint(tmp_path)
    assert checkpoint[SHARDS[0]].trouble == ""
    assert checkpoint[SHARDS[1]].trouble == f"its file {SHARDS[1]!r} is missing"


def test_shards_without_an_index_say_which_of_them_are_missing(tmp_path):
    write(tmp_path, "m-00002-of-00004.bin", "m-00003-of-00004.bin")
    checkpoint = metaviz.checkpoint(tmp_path)
    assert len(checkpoint) == 2
    assert checkpoint.notes[1] == "Of its 4 files 2 are missing: 1, 4."


def test_a_number_of_shards_that_nobody_has_is_no_trouble(tmp_path):
    write(tmp_path, "x-00001-of-99999999999999999999.safetensors")
    assert "99,999,999,999,999,999,998 are missing: 2, 3" in metaviz.checkpoint(tmp_path).notes[1]


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors", "pytorch_model.bin"],
        ["last.ckpt", "epoch=3.ckpt"],
        ["consolidated.00.pth", "consolidated.01.pth"],
        [*SHARDS, "consolidated.safetensors"],
    ],
)
def test_of_several_the_user_has_to_say_which(tmp_path, names):
    write(tmp_path, *names)
    said = refusal(tmp_path)
    assert "There are 2 checkpoints in" in said
    step = said.partition("Next: ")[2]
    assert len(eval(step, {"metaviz": metaviz})) == 1


def test_an_index_goes_with_its_shards_and_not_with_other_files(tmp_path):
    write(tmp_path, *SHARDS, "pytorch_model.bin")
    write_index(tmp_path)
    said = refusal(tmp_path)
    assert f"There are 2 checkpoints in {str(tmp_path)!r}: {INDEX}, pytorch_model.bin." in said
    (tmp_path / "pytorch_model.bin").unlink()
    assert list(metaviz.checkpoint(tmp_path)) == SHARDS


@pytest.mark.parametrize("depth", ["step-9", "a/b/c"])
def test_a_folder_without_one_names_the_nearest_below(tmp_path, depth):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.json").write_text("{}")
    write(tmp_path / depth, "model.safetensors")
    assert refusal(tmp_path).endswith(f"Next: metaviz.checkpoint({str(tmp_path / depth)!r})")


def test_a_ring_of_links_ends(tmp_path):
    for k in range(4):
        (tmp_path / str(k)).symlink_to(tmp_path)
    assert refusal(tmp_path).endswith(f"Next: import os; os.listdir({str(tmp_path)!r})")


@pytest.mark.parametrize("path", ["", "a\0b.pt", "nowhere", "nowhere/model.safetensors"])
def test_what_is_not_there_is_said(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"{path!r} cannot be read: " in refusal(path)


def test_what_is_no_ordinary_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert "it is no ordinary file" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["//host/share", "C:x", "c:/x", "a/..", "..", "/", "\\x", "a\\..\\b", "a\0"])
def test_an_index_leads_nowhere_else(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    said = refusal(tmp_path)
    assert f"says that 'w' is in {file!r}, which is outside of its folder: nothing was read" in said
