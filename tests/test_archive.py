"""Files of torch.save: what is in them is known from the pickle alone, and no code of it runs."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.archive import Archive
from metaviz.core.stored import File
from metaviz.errors import BadCheckpoint


def odd() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 4)
    return {
        "plain": torch.randn(3, 2),
        "parameter": nn.Parameter(torch.randn(2)),
        "turned": torch.randn(4, 6).t(),
        "part": base[1:3, 1:],
        "column": base[:, 2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(3, dtype=torch.complex64),
        "bits": torch.tensor([float("nan"), float("inf"), -0.0]),
        "half": torch.randn(3).bfloat16(),
        "tie": base,
        "again": base,
    }


@pytest.mark.parametrize("offset", [0, 1000])
def test_every_layout_is_read_bit_for_bit(tmp_path, offset):
    torch.save(odd(), buffer := io.BytesIO())
    torch.manual_seed(0)
    content = buffer.getvalue()
    (tmp_path / "a.pt").write_bytes(b"x" * offset + content + b"y" * offset)
    expected = torch.load(io.BytesIO(content))
    archive = Archive(File.at(tmp_path / "a.pt"), offset, len(content))
    for name, tensor in archive.content.items():
        value = archive.stored(name, tensor).load()
        assert value.stride() == expected[name].stride(), name
        pair = (each.contiguous().view(-1).view(torch.uint8) for each in (value, expected[name].detach()))
        assert torch.equal(*pair), name


def test_tied_tensors_are_in_one_place(tmp_path):
    torch.save(odd(), tmp_path / "a.pt")
    checkpoint = metaviz.checkpoint(tmp_path / "a.pt")
    assert checkpoint["tie"].place == checkpoint["again"].place
    assert checkpoint.nbytes == sum(s.nbytes for name, s in checkpoint.items() if name != "again")


class Evil:
    def __reduce__(self):
        return os.system, ("echo > ran",)


class Net(nn.Linear):
    pass


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    ("content", "wants"),
    [
        ({"a": torch.ones(2), "x": Evil()}, r"\.system"),
        (Net(2, 2), r"test_archive\.Net"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch, content, wants, new):
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(
        BadCheckpoint, match=f"It wants '.*{wants}', and unpickling that could run any code"
    ) as caught:
        metaviz.checkpoint(tmp_path / "a.pt")
    assert "torch.save(model.state_dict(), 'model.pt')" in str(caught.value)
    assert not (tmp_path / "ran").exists()


class Config:
    def __init__(self):
        self.width = 3


def test_a_class_that_the_user_trusts_can_be_allowed(tmp_path):
    torch.save({"config": Config(), "state_dict": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match="Config"):
        metaviz.checkpoint(tmp_path / "a.pt")
    with torch.serialization.safe_globals([Config]):
        assert list(metaviz.checkpoint(tmp_path / "a.pt")) == ["a"]


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_short_is_refused(tmp_path, keep):
    torch.save(odd(), buffer := io.BytesIO())
    content = buffer.getvalue()
    (tmp_path / "a.pt").write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(BadCheckpoint, match="Next: "):
        metaviz.checkpoint(tmp_path / "a.pt")


def rewritten(content: bytes, change=lambda name, data: data, compression=zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return target.getvalue()


@pytest.mark.parametrize(
    ("change", "compression", "words"),
    [
        (lambda name, data: data, zipfile.ZIP_DEFLATED, "is compressed"),
        (lambda name, data: data[:4] if "/data/" in name else data, zipfile.ZIP_STORED, "it is damaged"),
        (lambda name, data: b"big" if "byteorder" in name else data, zipfile.ZIP_STORED, "big-endian"),
        (
            lambda name, data: None if "data.pkl" in name else data,
            zipfile.ZIP_STORED,
            "but none of torch.save",
        ),
        (lambda name, data: None if "/data/" in name else data, zipfile.ZIP_STORED, "may be cut short"),
    ],
)
def test_an_archive_that_is_not_as_torch_writes_it_is_refused(tmp_path, change, compression, words):
    torch.save({"a": torch.randn(100)}, buffer := io.BytesIO())
    (tmp_path / "a.pt").write_bytes(rewritten(buffer.getvalue(), change, compression))
    with pytest.raises(BadCheckpoint, match=words):
        metaviz.checkpoint(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_program_of_torchscript_is_refused_with_the_way_out(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "a.pt")
    with pytest.raises(
        BadCheckpoint, match=r"TorchScript program\. Next: metaviz\.checkpoint\(torch\.jit\.load"
    ):
        metaviz.checkpoint(tmp_path / "a.pt")


def test_tensors_without_plain_bytes_are_there_with_the_reason(tmp_path):
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "turned": torch.randn(2, dtype=torch.complex64).conj(),
        "a": torch.ones(2),
    }
    torch.save(state, tmp_path / "a.pt")
    checkpoint = metaviz.checkpoint(tmp_path / "a.pt")
    assert checkpoint["sparse"].trouble == "it is a sparse_coo tensor, which has no plain bytes"
    assert "conjugated" in checkpoint["turned"].trouble and checkpoint["a"].trouble == ""
    # Nothing waits for torch's next load to look at it.
    assert torch._utils._sparse_tensors_to_validate == []
    torch.load(io.BytesIO(saved(state)))


def saved(content) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


def test_a_pickle_of_something_else_is_refused(tmp_path):
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BadCheckpoint, match=r"that is neither a safetensors file nor one of torch.save"):
        metaviz.checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        # The tensor is said to have 64 elements, of a storage that has 4.
        ((b"K\x04\x85", b"K\x40\x85"), r"has 16 bytes for 'a' with the shape \(64,\): it is damaged"),
        # The storage is said to have 64 elements, and its record has 16 bytes.
        ((b"K\x04tq", b"K\x40tq"), r"has 16 bytes for a storage of 256: it is damaged"),
    ],
)
def test_a_tensor_never_reaches_into_the_bytes_of_another(tmp_path, lie, words):
    def lying(name: str, data: bytes) -> bytes:
        return data.replace(*lie, 1) if name.endswith("data.pkl") else data

    content = rewritten(saved({"a": torch.zeros(4), "b": torch.ones(400)}), lying)
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=words):
        metaviz.checkpoint(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["pickle", "archive", "old"])
def test_bytes_that_were_damaged_are_read_or_refused_and_nothing_else(tmp_path, way):
    draw, refused = random.Random(way), 0
    state = {name: value for name, value in odd().items() if name != "scalar"} | {
        "text": "words",
        "list": [1, 2.5, None],
    }
    torch.save(state, buffer := io.BytesIO(), _use_new_zipfile_serialization=way != "old")
    content, path = buffer.getvalue(), tmp_path / "a.pt"

    def damaged(data: bytes) -> bytes:
        place, wrong = draw.randrange(len(data)), bytes(draw.randrange(256) for _ in range(draw.randrange(3)))
        return data[:place] + wrong + data[place + draw.randrange(4) :]

    for _ in range(300):
        if way == "pickle":
            path.write_bytes(
                rewritten(content, lambda name, data: damaged(data) if "data.pkl" in name else data)
            )
        else:
            path.write_bytes(damaged(content))
        try:
            for each in metaviz.checkpoint(path).values():
                if not each.trouble and each.numel < 1000:
                    assert each.load().shape == each.shape
        except BadCheckpoint as error:
            assert "Next: " in str(error) or "metaviz.checkpoint" in str(error)
            refused += 1
    assert refused > 20
