"""Safetensors files: the names, shapes, dtypes and places of their tensors, from the header.

Source: the format as https://huggingface.co/docs/safetensors describes it: eight bytes with the length of a header
in JSON, the header, and the values, in the order of their offsets and without gaps.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch

from metaviz.core.stored import File, Piece, Stored, contiguous
from metaviz.core.units import format_bytes
from metaviz.errors import BadCheckpoint

# The library refuses longer ones, too: nobody has to fear that a few bytes make him parse gigabytes.
_LONGEST = 100_000_000

_ONCE = frozenset({"__metadata__", "dtype", "shape", "data_offsets"})

_DTYPES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def safetensors(file: File) -> dict[str, Stored]:
    """The tensors of a file by name.

    Raises:
        BadCheckpoint: The header is not one, or speaks of bytes that are not there.
    """
    header, begin = _header(file)
    found, reached = {}, 0
    for name, entry in sorted(header.items(), key=lambda pair: _offsets(file, *pair)):
        start, stop = _offsets(file, name, entry)
        found[name] = stored = _stored(file, name, entry, begin + start)
        if start != reached or (stored.dtype is not None and stop - start != stored.nbytes):
            raise _bad(
                file, f"the header says that {name!r} is {_words(stored)} at bytes {start:,} to {stop:,}"
            )
        reached = stop
    if begin + reached != file.nbytes:
        raise _bad(
            file,
            f"it is {file.nbytes:,} bytes long, and the header speaks of {begin + reached:,}",
            cut=file.nbytes < begin + reached,
        )
    return {name: found[name] for name in header}


def _header(file: File) -> tuple[dict[str, Any], int]:
    """The parsed header, and where the values begin."""
    head = file.head(8)
    if len(head) < 8:
        raise _bad(file, f"it has only {len(head)} bytes", cut=True)
    length = int.from_bytes(head, "little")
    if length > min(_LONGEST, file.nbytes - 8):
        if not file.head(1, 8) == b"{":
            raise _bad(file, f"it begins with {head!r}, which is no safetensors file")
        raise _bad(
            file,
            f"its first bytes say that the header has {format_bytes(length)}, and the file {format_bytes(file.nbytes)}",
            cut=length <= _LONGEST,
        )
    text = file.head(length, 8)
    try:
        header = _parsed(text)
    except (ValueError, RecursionError) as error:
        raise _bad(file, f"its header is no JSON ({type(error).__name__})") from None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise _bad(file, "its header does not map names to tensors")
    return header, 8 + length


def _parsed(text: bytes) -> Any:
    """The header without its metadata. As strict as the library: what one reads and the other refuses is a trap."""
    # From text, as of bytes Python would take UTF-16, too.
    header = json.loads(
        text.decode(),
        object_pairs_hook=_unique,
        parse_int=_number,
        parse_float=_number,
        parse_constant=_number,
    )
    if isinstance(header, dict):
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        ):
            raise ValueError("metadata that is no text")
        # Half a surrogate pair can neither be printed nor stored.
        "".join(header).encode()
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs) and not _ONCE.isdisjoint(found):
        names = [name for name, _ in pairs]
        if any(names.count(name) > 1 for name in _ONCE):
            raise ValueError("a field that is given twice")
    return found


def _number(digits: str) -> int | float:
    """A number of JSON. Python would also take NaN, and what is too large for a float."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number that is none")
    return int(digits) if digits.isdigit() else value


def _offsets(file: File, name: str, entry: dict[str, Any]) -> tuple[int, int]:
    match entry:
        case {"data_offsets": [start, stop]} if type(start) is type(stop) is int and 0 <= start <= stop:
            return start, stop
    raise _bad(file, f"the header has no place for {name!r}")


def _stored(file: File, name: str, entry: dict[str, Any], offset: int) -> Stored:
    shape, kind = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise _bad(file, f"the header has no shape for {name!r}")
    shape = tuple(shape)
    if math.prod(max(n, 1) for n in shape) > 2**62:
        raise _bad(file, f"the header says that {name!r} has the shape {shape}")
    if not isinstance(kind, str):
        raise _bad(file, f"the header has no dtype for {name!r}")
    dtype = getattr(torch, _DTYPES.get(kind, ""), None)
    if dtype is None:
        return Stored(
            name, shape, None, trouble=f"its dtype is {kind!r}, which torch {torch.__version__} has not"
        )
    if kind == "F4":
        # Two of them are one element of torch.
        if not shape or shape[-1] % 2:
            return Stored(name, shape, None, trouble="it has half an element of float4_e2m1fn_x2 at an end")
        shape = (*shape[:-1], shape[-1] // 2)
    return Stored(name, shape, dtype, (Piece(file, offset, shape, contiguous(shape)),))


def _words(stored: Stored) -> str:
    return f"{stored.shape} {str(stored.dtype).removeprefix('torch.')}"


def _bad(file: File, what: str, cut: bool = False) -> BadCheckpoint:
    why = "It is cut short" if cut else "It is damaged, or no safetensors file"
    return BadCheckpoint(
        f"{os.fspath(file.path)!r} cannot be read: {what}. {why}. Next: download or copy the file again"
    )
