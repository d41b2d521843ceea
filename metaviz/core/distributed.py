"""Folders of ``torch.distributed.checkpoint``: tensors that many processes have saved, each its own boxes of them.

``.metadata`` is a pickle, and torch reads it with all that a pickle may do. Here stand-ins take the place of its
classes: they keep what was saved of them and can do nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from metaviz.core.archive import Archive
from metaviz.core.folder import _leads_out
from metaviz.core.paths import some
from metaviz.core.stored import File, Piece, Stored
from metaviz.core.units import format_exact, plural
from metaviz.errors import BadCheckpoint

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Where TensorProperties was in older versions of torch.
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    # The folder that was saved to, if it was given as a path; Python 3.13 has the classes in the second module.
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}
# How trainers call the part of a checkpoint that is the optimizer's.
_OPTIMIZER = re.compile(r"optim(izer)?s?(_states?)?(_\d+)?")
_DTYPE = re.compile(r"[a-z]+\d\w*")

_Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A :class:`Piece` that is a file of ``torch.save`` inside of another file.

    Where its values are and how they lie is looked up when it is asked for: a large checkpoint has tens of thousands
    of them, and a look into each takes a quarter of a millisecond.

    Attributes:
        file: The file that has it.
        begin: Where the inner file begins in it.
        nbytes: How long the inner file is.
        size: Shape of the box.
        at: Where in the tensor the box begins.
        dtype: Its dtype.
    """

    file: File
    begin: int
    nbytes: int
    size: tuple[int, ...]
    at: tuple[int, ...]
    dtype: torch.dtype

    @property
    def offset(self) -> int:
        """The first byte of its values."""
        return _opened(self).offset

    @property
    def stride(self) -> tuple[int, ...]:
        """How its elements lie in those bytes."""
        return _opened(self).stride

    span = Piece.span


@functools.lru_cache(maxsize=4096)
def _opened(chunk: Chunk) -> Piece:
    chunk.file.check()
    archive = Archive(chunk.file, chunk.begin, chunk.nbytes)
    tensor = archive.content
    if isinstance(tensor, torch.Tensor) and (tensor.shape, tensor.dtype) == (chunk.size, chunk.dtype):
        stored = archive.stored("", tensor)
        if not stored.trouble:
            return stored.pieces[0]
    raise BadCheckpoint(
        f"{chunk.file.path!r} has at byte {format_exact(chunk.begin)} something else than the {_word(chunk.dtype)} "
        f"{chunk.size} that the .metadata beside it speaks of: they do not belong together. "
        "Next: download or copy the folder again"
    )


def distributed(folder: str) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a folder of ``torch.distributed.checkpoint`` by name, and what else is to know, in sentences.

    Only ``.metadata`` is read.

    Raises:
        BadCheckpoint: It cannot be read, is damaged, leads out of the folder, or wants to run code.

    Example:
        >>> tensors, notes = distributed("step-1000")
    """
    source = File.at(os.path.join(folder, ".metadata"))
    try:
        return _found(folder, _unpickled(source))
    except _Malformed as error:
        raise BadCheckpoint(
            f"{source.path!r} cannot be read: {error}. It is damaged, or none of torch.distributed.checkpoint. "
            "Next: download or copy the folder again"
        ) from None


def _found(folder: str, metadata: object) -> tuple[dict[str, Stored], list[str]]:
    entries = _field(metadata, "state_dict_metadata", dict)
    files = _Files(folder, _field(metadata, "storage_data", dict))
    tensors, others = {}, []
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise _Malformed(f"it has the name {name!r}, which is no text")
        if "chunks" in _saved(entry):
            tensors[name] = _stored(files, name, entry)
        else:
            others.append(name)
    notes = []
    theirs = _of_optimizer(tensors, _saved(metadata).get("planner_data"))
    if 0 < len(theirs) < len(tensors):
        tensors = {name: stored for name, stored in tensors.items() if name not in theirs}
        notes.append(
            f"Left out, as the optimizer's: {plural(len(theirs), 'tensor')} such as {next(iter(theirs))}."
        )
    if others:
        words = "1 entry is no tensor" if len(others) == 1 else f"{len(others):,} entries are no tensors"
        notes.append(f"{words}: {some(others)}.")
    if files.missing:
        count = f"{plural(len(files.missing), 'file')} of {len(files.known):,}"
        notes.append(f"Missing or not readable: {count}: {some(files.missing)}.")
    return tensors, notes


def _of_optimizer(names: Mapping[str, Stored], ways: Any) -> dict[str, None]:
    """Which tensors are the optimizer's. ``ways`` has the keys that led to each in the dict that was saved."""
    ways = ways if isinstance(ways, dict) else {}
    theirs = {}
    for name in names:
        match ways.get(name, tuple(name.split(".", 1))):
            # A module may be called so, too: then its tensors were saved by their names, in no dict of their own.
            case (str(first), _, *_) if _OPTIMIZER.fullmatch(first):
                theirs[name] = None
    return theirs


class _Files:
    """The files that hold values, and where in them.

    Args:
        folder: Where they are.
        places: What the metadata says of each chunk.

    Attributes:
        known: The files that were asked for, by name; None if it cannot be read.
    """

    def __init__(self, folder: str, places: dict[Any, Any]) -> None:
        self._folder = folder
        self._places = {
            (_field(index, "fqn", str), _dims(index, "offset")): place
            for index, place in places.items()
            if _saved(index).get("offset") is not None
        }
        self.known: dict[str, File | None] = {}

    @property
    def missing(self) -> list[str]:
        """Names of those that cannot be read."""
        return [name for name, file in self.known.items() if file is None]

    def chunk(self, name: str, dtype: torch.dtype, box: _Box) -> Chunk | str:
        """Where a chunk is, or why it cannot be read."""
        at, size = box
        place = self._places.get((name, at))
        if place is None:
            return f"the .metadata does not say where its part at {at} is"
        path, begin, nbytes = (
            _field(place, key, kind)
            for key, kind in (("relative_path", str), ("offset", int), ("length", int))
        )
        if _leads_out(path):
            raise BadCheckpoint(
                f"The .metadata of {self._folder!r} says that {name!r} is in {path!r}, which is outside of the folder: "
                "nothing was read. Next: download or copy the folder again"
            )
        if transforms := _saved(place).get("transform_descriptors"):
            return f"it was saved through {transforms!r}, such as a compression, which only torch can undo"
        file = self._file(path)
        if file is None:
            return f"its file {path!r} is missing or cannot be read"
        if begin < 0 or nbytes < 0 or begin + nbytes > file.nbytes:
            return f"its file {path!r} is cut short: it has {file.nbytes:,} bytes and not {begin + nbytes:,}"
        return Chunk(file, begin, nbytes, size, at, dtype)

    def _file(self, path: str) -> File | None:
        if path not in self.known:
            try:
                self.known[path] = File.at(os.path.join(self._folder, path))
            except BadCheckpoint:
                self.known[path] = None
        return self.known[path]


def _stored(files: _Files, name: str, entry: object) -> Stored:
    shape = _dims(entry, "size")
    boxes = [(_dims(each, "offsets"), _dims(each, "sizes")) for each in _field(entry, "chunks", list)]
    dtype = _dtype(_saved(entry).get("properties"))
    if isinstance(dtype, str):
        return Stored(
            name, shape, None, trouble=f"its dtype is {dtype!r}, which torch {torch.__version__} has not"
        )
    # Processes that got no part of a small tensor may have saved an empty one.
    filled = [box for box in boxes if 0 not in box[1]] or boxes[:1]
    trouble = _gaps(shape, filled)
    chunks = [] if trouble else [files.chunk(name, dtype, box) for box in filled]
    trouble = trouble or next((each for each in chunks if isinstance(each, str)), "")
    return (
        Stored(name, shape, dtype, trouble=trouble) if trouble else Stored(name, shape, dtype, tuple(chunks))
    )


def _gaps(shape: tuple[int, ...], boxes: Sequence[_Box]) -> str:
    """Why the boxes are not just all of the tensor, ``""`` if they are."""
    for at, size in boxes:
        if not len(at) == len(size) == len(shape) or any(
            start + n > whole for start, n, whole in zip(at, size, shape, strict=True)
        ):
            return f"its part {size} at {at} reaches out of its shape {shape}"
    if pair := _overlap(boxes, len(shape)):
        return f"its parts at {pair[0][0]} and {pair[1][0]} overlap"
    there, all_of_it = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    if not boxes:
        return "the .metadata lists no part of it"
    if there != all_of_it:
        return f"its parts have only {there:,} of its {all_of_it:,} elements"
    return ""


def _overlap(boxes: Sequence[_Box], dims: int) -> tuple[_Box, _Box] | None:
    """Two boxes that have elements in common."""
    if len(boxes) < 2:
        return None
    # Along the dim with the most cuts few boxes are met at a time: comparing all with all takes minutes for thousands.
    dim = max(range(dims), key=lambda dim: len({at[dim] for at, _ in boxes}), default=None)
    if dim is None:
        return boxes[0], boxes[1]
    open_: list[_Box] = []
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        open_ = [other for other in open_ if other[0][dim] + other[1][dim] > box[0][dim]]
        for other in open_:
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(*other, *box, strict=True)):
                return other, box
        open_.append(box)
    return None


class _Malformed(ValueError):
    """What is wrong with the metadata, as a part of a sentence."""


class _StandIn:
    """Stands for any object of the metadata, with its state as ``saved``.

    A pickle sets the state of what it has made by ``__setstate__``, so it can set nothing else, of the class neither.
    """

    saved: Any = None

    def __init__(self, *given: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.saved = state


class _Unpickler(pickle.Unpickler):
    """Makes plain containers, dtypes and stand-ins, and calls nothing else."""

    def __init__(self, content: bytes, path: str) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global; looked up by its whole name, so that dots lead nowhere."""
        if name in _CLASSES.get(module, ()):
            return _StandIn
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and _DTYPE.fullmatch(name):
            # Not getattr, which imports parts of torch.
            found = vars(torch).get(name, name)
            if isinstance(found, torch.dtype | str):
                return found
        folder = os.path.dirname(self._path)
        raise BadCheckpoint(
            f"{self._path!r} wants {f'{module}.{name}'!r}, and unpickling that could run any code, so nothing was "
            "loaded. If you know where the folder is from and trust it: from torch.distributed.checkpoint.format_utils "
            f"import dcp_to_torch_save; dcp_to_torch_save({folder!r}, 'model.pt')"
        )


def _unpickled(source: File) -> object:
    try:
        return _Unpickler(source.head(source.nbytes), source.path).load()
    except BadCheckpoint:
        raise
    except Exception as error:
        # Bytes that are no pickle raise nearly anything.
        first = str(error).partition("\n")[0]
        raise _Malformed(f"it is no pickle of such metadata ({type(error).__name__}: {first})") from None


def _saved(thing: object) -> Mapping[str, Any]:
    """What was saved of an object, by attribute."""
    return thing.saved if isinstance(thing, _StandIn) and isinstance(thing.saved, dict) else {}


def _field(thing: object, name: str, kind: type) -> Any:
    value = _saved(thing).get(name)
    if type(value) is not kind:
        raise _Malformed(f"it has no {name!r} where one belongs")
    return value


def _dims(thing: object, name: str) -> tuple[int, ...]:
    dims = _field(thing, name, tuple)
    if not all(type(n) is int and n >= 0 for n in dims) or math.prod(max(n, 1) for n in dims) > 2**62:
        raise _Malformed(f"it has {dims!r} as {name!r}")
    return dims


def _dtype(properties: object) -> torch.dtype | str:
    """The dtype; as text where this torch has none like it."""
    match properties:
        case _StandIn(saved=(torch.dtype() | str() as dtype, *_)):
            return dtype
    raise _Malformed("it has a tensor without a dtype")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
