"""Folders of torch.distributed.checkpoint: shards of real processes, read as whole tensors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import metaviz
from metaviz.errors import BadCheckpoint

SHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7))
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/whole.pt")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "scale": torch.arange(3.0)}
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=4)
"""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """What four processes have saved: FSDP2 along one axis of their mesh, tensor parallel along the other."""
    folder = tmp_path_factory.mktemp("sharded")
    script = folder / "save.py"
    script.write_text(SHARDED)
    command = [sys.executable, "-W", "ignore", str(script), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_shards_of_a_mesh_of_four_processes_are_whole_again(sharded):
    whole = torch.load(sharded / "whole.pt")
    checkpoint = metaviz.checkpoint(sharded / "saved")
    assert checkpoint.format == "distributed"
    assert len(checkpoint["model.0.weight"].pieces) == 4
    # Seven rows over two processes: one has four, the other three.
    assert {piece.size for piece in checkpoint["model.2.weight"].pieces} == {(4, 6), (3, 6)}
    model = metaviz.build(net)
    report = metaviz.materialize(model, checkpoint=checkpoint)
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole[name]), name
    assert "'model.' was taken off its names." in str(report)
    assert report.match.unexpected == ("scale",)


def test_a_missing_file_takes_only_what_it_holds_away(sharded, tmp_path):
    whole = metaviz.checkpoint(sharded / "saved")
    gone = whole["scale"].pieces[0].file.name
    for file in (sharded / "saved").iterdir():
        if file.name != gone:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoint = metaviz.checkpoint(tmp_path)
    for name, stored in checkpoint.items():
        if gone in {piece.file.name for piece in whole[name].pieces}:
            assert stored.trouble == f"its file {gone!r} is missing or cannot be read"
            with pytest.raises(BadCheckpoint, match="is missing or cannot be read"):
                stored.load()
        else:
            assert torch.equal(stored.load(), whole[name].load())
    assert any(gone in note for note in checkpoint.notes)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_what_one_process_has_saved_is_read_bit_for_bit(tmp_path):
    state = {
        "a": torch.randn(5, 3),
        "half": torch.randn(4).bfloat16(),
        "count": torch.tensor(7),
        "turned": torch.randn(3, 4).t(),
        "nothing": torch.empty(0, 2),
    }
    dcp.save(state, checkpoint_id=tmp_path)
    checkpoint = metaviz.checkpoint(tmp_path)
    for name, value in state.items():
        assert torch.equal(checkpoint[name].load(), value), name


class Evil:
    def __reduce__(self):
        return os.system, ("echo > ran",)


def test_metadata_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(BadCheckpoint, match=r"wants '.*\.system', and unpickling that could run any code"):
        metaviz.checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_metadata_that_leads_out_of_its_folder_is_refused(tmp_path):
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../secret"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadCheckpoint, match="outside of the folder: nothing was read"):
        metaviz.checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"nonsense", pickle.dumps({"a": 1})])
def test_metadata_that_is_none_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"It is damaged, or none of torch.distributed.checkpoint"):
        metaviz.checkpoint(tmp_path)
