"""Folders of torch.distributed.checkpoint: shards of real processes, read as whole tensors."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stored import read_by
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OlderProperties
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

import metaviz
from metaviz.core.distributed import _gaps, distributed
from metaviz.core.stored import Stored
from metaviz.errors import BadCheckpoint, StalePlan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

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
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7), nn.Linear(7, 1))
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
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7), nn.Linear(7, 1))


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
    # One row over two processes: one has nothing.
    assert {piece.size for piece in checkpoint["model.3.weight"].pieces} == {(1, 7)}
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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "log2"),
        ("torch", "float32.__class__"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("pathlib", "Path.unlink"),
    ],
)
def test_only_the_classes_of_the_metadata_are_known_and_dots_lead_nowhere(tmp_path, module, name):
    parts = (b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + b"".join(parts) + b"\x93.")
    with pytest.raises(BadCheckpoint) as caught:
        distributed(str(tmp_path))
    assert f"wants '{module}.{name}', and unpickling that could run any code, so nothing was" in str(
        caught.value
    )
    assert f"dcp_to_torch_save({str(tmp_path)!r}, 'model.pt')" in str(caught.value)


def saved(folder: Path, state: dict, change: Callable[[Metadata], object] = lambda metadata: None) -> Path:
    dcp.save(state, checkpoint_id=folder)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def test_a_pickle_cannot_change_the_stand_ins_for_those_that_are_read_after_it(tmp_path):
    saved(tmp_path / "good", {"a": torch.ones(3)})
    name = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    # The state of the class itself, which would be that of all its instances.
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + name + b"N}\x8c\x0c__setstate__" + name + b"s\x86b.")
    with pytest.raises(BadCheckpoint, match=r"is no pickle of such metadata \(TypeError"):
        distributed(str(tmp_path))
    assert torch.equal(distributed(str(tmp_path / "good"))[0]["a"].load(), torch.ones(3))


def place_of(metadata: Metadata, name: str):
    return next(place for index, place in metadata.storage_data.items() if index.fqn == name)


def part(at: tuple[int, ...], size: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(at), torch.Size(size))


def parts(*found: ChunkStorageMetadata) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["bad"], "chunks", list(found))


def placed(**changes: object) -> Callable[[Metadata], None]:
    return lambda metadata: vars(place_of(metadata, "bad")).update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (parts(), "the .metadata lists no part of it"),
        (parts(part((0, 0), (3, 4))), "its parts have only 12 of its 24 elements"),
        (parts(part((0, 0), (6, 4)), part((5, 3), (1, 1))), r"its parts at (0, 0) and (5, 3) overlap"),
        (parts(part((3, 0), (6, 4))), r"its part (6, 4) at (3, 0) reaches out of its shape (6, 4)"),
        (parts(part((0,), (24,))), r"its part (24,) at (0,) reaches out of its shape (6, 4)"),
        (
            parts(part((0, 0), (3, 4)), part((3, 0), (3, 4))),
            r"the .metadata does not say where its part at (3, 0) is",
        ),
        (placed(transform_descriptors=["stream.zstd/1"]), "such as a compression, which only torch can undo"),
        (placed(relative_path="__7_0.distcp"), "its file '__7_0.distcp' is missing or cannot be read"),
        (placed(length=10**9), "its file '__0_0.distcp' is cut short: it has "),
        (placed(offset=-1), "its file '__0_0.distcp' is cut short: it has "),
    ],
)
def test_a_tensor_that_cannot_be_read_says_why_and_takes_no_other_away(tmp_path, change, words):
    saved(tmp_path, {"bad": torch.randn(6, 4), "good": torch.arange(3)}, change)
    found, _ = distributed(str(tmp_path))
    assert words in found["bad"].trouble and not found["bad"].pieces
    assert torch.equal(found["good"].load(), torch.arange(3))


def test_bytes_of_another_tensor_are_not_taken(tmp_path):
    def swapped(metadata: Metadata) -> None:
        one, two = place_of(metadata, "a"), place_of(metadata, "b")
        vars(one).update(offset=two.offset, length=two.length)

    saved(tmp_path, {"a": torch.randn(6), "b": torch.randn(5)}, swapped)
    with pytest.raises(
        BadCheckpoint, match=r"something else than the float32 \(6,\) that the .metadata beside it"
    ):
        distributed(str(tmp_path))[0]["a"].load()


def test_a_file_that_was_replaced_after_the_metadata_was_read_is_not_read(tmp_path):
    found, _ = distributed(str(saved(tmp_path, {"a": torch.randn(6)})))
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 5000)
    with pytest.raises(StalePlan, match=r"was changed or replaced after its header was read"):
        found["a"].load()


def test_a_dtype_of_a_newer_torch_takes_only_its_own_tensor_away(tmp_path):
    saved(tmp_path, {"a": torch.ones(3), "b": torch.ones(3).bfloat16()})
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"\x8c\x08bfloat16", b"\x8c\x08bfloat99"))
    found, _ = distributed(str(tmp_path))
    assert found["b"].trouble.startswith("its dtype is 'bfloat99', which torch ")
    assert torch.equal(found["a"].load(), torch.ones(3))


def test_what_older_versions_of_torch_have_saved_is_read(tmp_path):
    def older(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"].properties = OlderProperties(dtype=torch.float32)
        vars(metadata).pop("version", None)
        del metadata.storage_meta

    assert torch.equal(
        distributed(str(saved(tmp_path, {"a": torch.ones(3)}, older)))[0]["a"].load(), torch.ones(3)
    )


def test_the_optimizer_is_left_out_beside_a_model_and_nowhere_else(tmp_path):
    model = nn.Linear(3, 2)
    moments = {"state": {"weight": {"exp_avg": torch.ones(2, 3), "step": torch.tensor(3.0)}}, "lr": 0.1}
    found, notes = distributed(
        str(saved(tmp_path / "both", {"model": model.state_dict(), "optimizer_0": moments}))
    )
    assert list(found) == ["model.weight", "model.bias"]
    assert notes == [
        "Left out, as the optimizer's: 2 tensors such as optimizer_0.state.weight.exp_avg.",
        "1 entry is no tensor: optimizer_0.lr.",
    ]
    found, notes = distributed(str(saved(tmp_path / "alone", {"optimizer": moments})))
    assert list(found) == ["optimizer.state.weight.exp_avg", "optimizer.state.weight.step"]
    # A model may have modules and parameters that are called so.
    named = {"optimizer.weight": torch.ones(2), "optim": torch.ones(1), "encoder.weight": torch.ones(3)}
    found, notes = distributed(str(saved(tmp_path / "named", named)))
    assert (list(found), notes) == (list(named), [])


def test_only_the_metadata_is_read_until_values_are_wanted(tmp_path, unavailable):
    if not os.path.exists("/proc/self/io"):
        unavailable("the system does not count what a process reads")
    saved(tmp_path, {f"{k}": torch.randn(300, 100) for k in range(20)})
    found: dict[str, Stored] = {}
    assert (
        read_by(lambda: found.update(distributed(str(tmp_path))[0]))
        == (tmp_path / ".metadata").stat().st_size
    )
    # The values, and the little pickle before them.
    assert 0 <= read_by(found["7"].load) - 300 * 100 * 4 < 50_000


def test_a_channels_last_tensor_keeps_its_layout(tmp_path):
    value = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    stored = distributed(str(saved(tmp_path, {"a": value})))[0]["a"]
    assert stored.stride == value.stride() == stored.load().stride()
    assert torch.equal(stored.load(), value)


@st.composite
def boxes(draw) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, and boxes that are all of it; often one of them is taken away, moved, or twice there."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    found = [
        (tuple(start for start, _ in sides), tuple(stop - start for start, stop in sides))
        for sides in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
    ]
    chosen = draw(st.integers(0, len(found) - 1))
    match draw(st.sampled_from(["right", "right", "lost", "twice", "moved"])):
        case "lost":
            del found[chosen]
        case "twice":
            found.append(found[chosen])
        case "moved":
            size = found[chosen][1]
            at = tuple(draw(st.integers(0, whole - n)) for whole, n in zip(shape, size, strict=True))
            found[chosen] = (at, size)
    return shape, draw(st.permutations(found))


@settings(max_examples=400)
@given(boxes())
def test_boxes_are_good_just_if_each_element_is_in_one_of_them(case):
    shape, found = case
    times = torch.zeros(shape, dtype=torch.int64)
    for at, size in found:
        times[tuple(slice(start, start + n) for start, n in zip(at, size, strict=True))] += 1
    assert (_gaps(shape, found) == "") == bool((times == 1).all())


def test_metadata_that_leads_out_of_its_folder_is_refused(tmp_path):
    def leading_out(metadata: Metadata) -> None:
        place_of(metadata, "a").relative_path = "../secret"

    saved(tmp_path, {"a": torch.ones(3)}, leading_out)
    with pytest.raises(BadCheckpoint, match="outside of the folder: nothing was read"):
        metaviz.checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"nonsense", pickle.dumps({"a": 1})])
def test_metadata_that_is_none_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"It is damaged, or none of torch.distributed.checkpoint"):
        metaviz.checkpoint(tmp_path)
