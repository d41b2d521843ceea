"""Safetensors headers, with the library itself as the judge."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import metaviz
from metaviz.core.headers import safetensors
from metaviz.core.stored import File
from metaviz.errors import BadCheckpoint

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
    *(
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
]


def written(path: Path, header: object, values: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + values)
    return path


def values(dtype: torch.dtype) -> torch.Tensor:
    """Any bits that may be there: NaNs with a payload among them."""
    if dtype is torch.bool:
        return torch.tensor([[True, False], [False, True]])
    return torch.randint(0, 256, (3, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)


def test_every_dtype_and_shape_is_read_as_the_library_reads_it(tmp_path):
    state = {name: values(getattr(torch, name)) for name in DTYPES if hasattr(torch, name)}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "one": torch.ones(1)}
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    there = load_file(tmp_path / "a.safetensors")
    found = safetensors(File.at(tmp_path / "a.safetensors"))
    assert set(found) == set(state) and len(state) > 20
    for name, stored in found.items():
        value = stored.load()
        assert (value.dtype, value.shape) == (there[name].dtype, there[name].shape)
        assert torch.equal(value.view(-1).view(torch.uint8), there[name].view(-1).view(torch.uint8))


def judged(path: Path) -> dict[str, torch.Tensor] | str:
    """What the library reads of a file, or why it reads nothing."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
        return str(error)


def compare(path: Path) -> None:
    """The library and we refuse the same, and read the same of what is left."""
    there = judged(path)
    try:
        found = safetensors(File.at(path))
    except BadCheckpoint as error:
        assert str(error).endswith("Next: download or copy the file again")
        assert isinstance(there, str), f"it is fine, and gives {there}"
        return
    if isinstance(there, str):
        # Only here a dtype that nobody knows takes no more than its own tensor away.
        assert "unknown variant" in there and any("its dtype is" in each.trouble for each in found.values())
        return
    assert set(found) == set(there)
    for name, value in there.items():
        assert torch.equal(found[name].load().view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), (
            name
        )


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
names = st.sampled_from(["a", "b", "__metadata__", "dtype", ""])
numbers = st.one_of(
    st.integers(-1, 20), st.just(1e400), st.just(2**63), st.just(0.5), st.just("8"), st.none()
)
entries = st.one_of(
    st.just(ENTRY),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "F16", "U8", "BOOL", "I64", "X1", 3, None]),
            "shape": st.one_of(st.lists(numbers, max_size=2), st.just(3), st.just([2])),
            "data_offsets": st.one_of(st.lists(numbers, max_size=3), st.just([0, 8]), st.just([8, 16])),
        },
    ),
    st.just(3),
)
headers = st.one_of(
    st.dictionaries(names, entries, max_size=3).map(lambda found: json.dumps(found).encode()),
    st.binary(max_size=20),
    st.just(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'
    ),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers, st.integers(-2, 24), st.integers(-2, 3))
def test_what_the_library_refuses_is_refused_and_what_it_takes_is_read_alike(tmp_path, header, size, off):
    path = written(
        tmp_path / "a.safetensors",
        header,
        bytes(range(max(size, 0))),
        max(0, len(header) + (off if off > 1 else 0)),
    )
    compare(path)


@pytest.mark.parametrize(
    ("header", "values", "length", "words"),
    [
        ({"a": ENTRY}, b"1234", None, "It is cut short"),
        ({"a": ENTRY}, b"12345678", 10**9, "the header has 954 MiB"),
        ({"a": ENTRY}, b"12345678", 300, "It is cut short"),
        ({"a": ENTRY}, b"123456789", None, "is 9 bytes|bytes long, and the header speaks of"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, b"1" * 12, None, "is .* at bytes 4 to 12"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, b"1" * 12, None, "at bytes 4 to 12"),
        ({"a": {**ENTRY, "data_offsets": [0, 4]}}, b"1234", None, "at bytes 0 to 4"),
        ({"a": {**ENTRY, "shape": [-2]}}, b"1" * 8, None, "no shape for 'a'"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"1" * 8, None, "no place for 'a'"),
        ({"a": 3}, b"", None, "does not map names to tensors"),
        (b"[]", b"", None, "does not map names to tensors"),
        (b"{nonsense", b"", None, "its header is no JSON"),
        (b"[" * 50_000, b"", None, "its header is no JSON"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path, header, values, length, words):
    path = written(tmp_path / "a.safetensors", header, values, length)
    with pytest.raises(BadCheckpoint, match=words) as caught:
        metaviz.checkpoint(path)
    assert str(caught.value).endswith("Next: download or copy the file again")


@pytest.mark.parametrize("content", [b"", b"123", b"PK\x03\x04 something else", b"<html>not found</html>"])
def test_another_kind_of_file_is_refused(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"cannot be read: it (has only|begins with)"):
        metaviz.checkpoint(tmp_path / "a.safetensors")


def test_an_unknown_dtype_takes_only_its_own_tensor_away(tmp_path):
    header = {"a": ENTRY, "b": {"dtype": "X9", "shape": [4], "data_offsets": [8, 10]}}
    checkpoint = metaviz.checkpoint(written(tmp_path / "a.safetensors", header, b"1234567890"))
    assert checkpoint["b"].trouble.startswith("its dtype is 'X9', which torch ")
    assert checkpoint["a"].load().shape == (2,)


def test_values_that_are_not_aligned_are_read(tmp_path):
    value = torch.randn(2)
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {**ENTRY, "data_offsets": [1, 9]},
    }
    path = written(tmp_path / "a.safetensors", header, b"x" + bytes(value.view(torch.uint8).tolist()))
    assert torch.equal(metaviz.checkpoint(path)["b"].load(), value)
    model = metaviz.build(torch.nn.Linear, 2, 1, bias=False)
    key_map = {"b": "weight"}
    with pytest.raises(metaviz.MetavizError, match=r"shape \(2,\)"):
        metaviz.materialize(model, checkpoint=metaviz.checkpoint(path, key_map=key_map))


U8 = '"dtype":"U8","shape":[1],"data_offsets":[0,1]'


@pytest.mark.parametrize(
    "header",
    [
        f'{{"a":{{{U8},"dtype":"I8"}}}}',
        f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{{{U8}}}}}',
        f'{{"__metadata__":{{"a":1}},"a":{{{U8}}}}}',
        f'{{"__metadata__":["a"],"a":{{{U8}}}}}',
        f'{{"a":{{{U8.replace("[0,1]", "[false,true]")}}}}}',
        f'{{"a":{{{U8},"more":NaN}}}}',
        f'{{"a":{{{U8},"more":1e400}}}}',
        f'{{"a":{{{U8.replace("[0,1]", "[-0,1]")}}}}}',
        f'{{"a":{{{U8.replace("[1]", "[1.0]")}}}}}',
        f'{{"a":{{{U8.replace("[1]", "[true]")}}}}}',
        f'{{"a":{{{U8.replace("[1]", "[99999999999, 99999999999, 0]")}}}}}',
        f'{{"\\ud800":{{{U8}}}}}',
        f'{{"a":{{{U8}}}}}\0',
        f'{{"a":{{{U8}}}}}'.encode("utf-16-le"),
        b"\xef\xbb\xbf" + f'{{"a":{{{U8}}}}}'.encode(),
        b'{"a\xff":{' + U8.encode() + b"}}",
    ],
)
def test_a_header_that_the_library_refuses_and_python_would_read_is_refused(tmp_path, header):
    path = written(tmp_path / "a.safetensors", header if isinstance(header, bytes) else header.encode(), b"1")
    assert isinstance(judged(path), str)
    with pytest.raises(BadCheckpoint, match="Next: "):
        safetensors(File.at(path))


@pytest.mark.parametrize(
    "header",
    [
        f'{{"__metadata__":null,"a":{{{U8}}}}}',
        f'{{"__metadata__":{{"a":"1","a":"2"}},"a":{{{U8}}}}}',
        f'{{"a":{{{U8},"more":[1,-2,0.5]}}}}',
        f'  {{"a":{{{U8}}}}}   ',
        f'{{"":{{{U8}}}}}',
        f'{{"a":{{{U8}}},"b":{{"dtype":"F32","shape":[0,7],"data_offsets":[1,1]}}}}',
        f'{{"b":{{"dtype":"F32","shape":[7,0],"data_offsets":[0,0]}},"a":{{{U8}}}}}',
    ],
)
def test_an_odd_header_that_the_library_takes_is_taken(tmp_path, header):
    path = written(tmp_path / "a.safetensors", header.encode(), b"1")
    found = safetensors(File.at(path))
    assert {name: stored.load().tolist() for name, stored in found.items()} == {
        name: value.tolist() for name, value in judged(path).items()
    }


GOOD = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": ENTRY,
        "b": {"dtype": "I16", "shape": [2, 2], "data_offsets": [8, 16]},
        "c": {"dtype": "U8", "shape": [], "data_offsets": [16, 17]},
    }
).encode()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(GOOD) - 1), st.integers(0, 2), st.sampled_from(b'0123456789-.eE{}[]",: a')
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_header_with_wrong_letters_is_read_just_as_the_library_reads_it(tmp_path, changes):
    text = bytearray(GOOD)
    for place, length, letter in changes:
        text[place : place + length] = [letter]
    path = written(tmp_path / "a.safetensors", bytes(text), bytes(range(17)))
    compare(path)
