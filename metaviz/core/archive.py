"""Files of ``torch.save``: what tensors are in them and where, from the pickle alone; no value is read.

The pickle goes through torch's own weights-only unpickler, which builds tensors and plain containers and calls
nothing else. Its storages are made on meta here, so that its tensors say which bytes of the file they are.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import _weights_only_unpickler

from metaviz.core.stored import File, Piece, Stored, readable
from metaviz.errors import BadCheckpoint

_PLACE = "_metaviz_place"
# Source: the ZIP specification (APPNOTE.TXT 4.3.7): the fixed part of a local file header ends with these lengths.
_LOCAL_HEADER, _LENGTHS_AT = 30, 26
# What torch's unpickler raises, besides its own error, for bytes that are no longer the pickle that was written.
_DAMAGED = (EOFError, LookupError, ValueError, ArithmeticError, AssertionError, AttributeError)


class Archive:
    """A file of ``torch.save``, or a part of a file that is one.

    Args:
        file: The file.
        offset: Where the archive begins in it.
        nbytes: How long it is; None for the rest of the file.

    Attributes:
        content: What was saved, with tensors on meta.

    Raises:
        BadCheckpoint: It is none, is cut short, or asks for code to be run.
    """

    def __init__(self, file: File, offset: int = 0, nbytes: int | None = None) -> None:
        self._file = file
        self._offset = offset
        with readable(file.path), open(file.path, "rb") as source:
            part = _Part(source, offset, file.nbytes - offset if nbytes is None else nbytes)
            try:
                self.content = self._read(part)
            except (*_DAMAGED, zipfile.BadZipFile, zlib.error, struct.error) as error:
                raise BadCheckpoint(
                    f"{file.path!r} cannot be read as a file of torch.save: {error}. It may be cut short. "
                    "Next: download or copy the file again"
                ) from None
            except pickle.UnpicklingError as error:
                raise _refused(file, str(error)) from None
            except (NotImplementedError, RuntimeError, TypeError) as error:
                first = str(error).partition(". ")[0]
                raise BadCheckpoint(
                    f"{file.path!r} holds a tensor that cannot be described without its values, such as a quantized "
                    f"one: {first}. Next: metaviz.checkpoint(torch.load({file.path!r}))"
                ) from None

    def _read(self, part: _Part) -> Any:
        archive = zipfile.ZipFile(part)
        entries = {name.partition("/")[2]: entry for name, entry in archive.NameToInfo.items()}
        if "constants.pkl" in entries:
            raise BadCheckpoint(
                f"{self._file.path!r} holds a TorchScript program. "
                f"Next: metaviz.checkpoint(torch.jit.load({self._file.path!r}).state_dict())"
            )
        if "data.pkl" not in entries:
            raise BadCheckpoint(
                f"{self._file.path!r} is a ZIP file, but none of torch.save. Next: import zipfile; "
                f"zipfile.ZipFile({self._file.path!r}).namelist()"
            )
        if entries["data.pkl"].compress_type != zipfile.ZIP_STORED:
            raise self._compressed()
        order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
        if order != b"little":
            raise BadCheckpoint(
                f"{self._file.path!r} was saved on a big-endian machine. Next: state = torch.load("
                f"{self._file.path!r}); metaviz.checkpoint(state)"
            )
        self._data = {
            name.removeprefix("data/"): entry for name, entry in entries.items() if name.startswith("data/")
        }
        self._part = part
        unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(archive.read(entries["data.pkl"])))
        unpickler.persistent_load = self._storage
        # torch notes sparse tensors here, to look at their values after the next torch.load.
        waiting = getattr(torch._utils, "_sparse_tensors_to_validate", [])
        known = len(waiting)
        try:
            return unpickler.load()
        finally:
            del waiting[known:]

    def _storage(self, saved: tuple) -> torch.storage.TypedStorage:
        """The storage that the pickle refers to, on meta, with the place of its bytes noted."""
        _, kind, key, _, numel = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        nbytes = numel * dtype.itemsize
        storage = torch.UntypedStorage(nbytes, device="meta")
        setattr(storage, _PLACE, (self._begin(key, nbytes), nbytes))
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _begin(self, key: str, nbytes: int) -> int:
        """Where in the file the bytes of a storage begin."""
        entry = self._data[key]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise self._compressed()
        self._part.seek(entry.header_offset + _LENGTHS_AT)
        begin = entry.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", self._part.read(4)))
        if entry.file_size < nbytes or begin + nbytes > self._part.nbytes:
            raise self._damaged(entry.file_size, f"a storage of {nbytes:,}")
        return self._offset + begin

    def _compressed(self) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self._file.path!r} is compressed, so no part of it can be read by itself. "
            f"Next: torch.save(torch.load({self._file.path!r}), 'plain.pt')"
        )

    def _damaged(self, nbytes: int, what: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self._file.path!r} has {nbytes:,} bytes for {what}: it is damaged. "
            "Next: download or copy the file again"
        )

    def stored(self, name: str, tensor: torch.Tensor) -> Stored:
        """A tensor of :attr:`content` as a stored one."""
        shape = tuple(tensor.shape)
        try:
            begin, nbytes = getattr(tensor.untyped_storage(), _PLACE)
        except (AttributeError, NotImplementedError, RuntimeError):
            kind = str(tensor.layout).removeprefix("torch.")
            kind = "quantized" if tensor.is_quantized else kind if kind != "strided" else "subclass"
            return Stored(
                name, shape, tensor.dtype, trouble=f"it is a {kind} tensor, which has no plain bytes"
            )
        if tensor.is_conj() or tensor.is_neg():
            return Stored(
                name, shape, tensor.dtype, trouble="its values are those of another, conjugated or negated"
            )
        start = tensor.storage_offset() * tensor.itemsize
        piece = Piece(self._file, begin + start, shape, tensor.stride())
        # On meta a storage grows with what is made of it, where torch.load refuses.
        if start + piece.span(tensor.itemsize) > nbytes:
            raise self._damaged(nbytes, f"{name!r} with the shape {shape}")
        return Stored(name, shape, tensor.dtype, (piece,))


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, source: io.BufferedReader, offset: int, nbytes: int) -> None:
        self._source = source
        self._offset = offset
        self.nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.nbytes - self._at)]
        self._source.seek(self._offset + self._at)
        count = self._source.readinto(view)
        self._at += count
        return count


def is_legacy(head: bytes) -> bool:
    """Whether a file begins as those of torch.save did before version 1.6: a pickle of a magic number."""
    return head.startswith((b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\nl\xfc\x9cF\xf9"))


def load_legacy(file: File) -> Any:
    """What such a file holds, read as a whole: it has no places that could be read by themselves."""
    file.check()
    try:
        return torch.load(file.path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(file, str(error)) from None
    except (*_DAMAGED, RuntimeError, TypeError) as error:
        raise BadCheckpoint(
            f"{file.path!r} cannot be read: {error}. Next: download or copy the file again"
        ) from None


def _refused(file: File, reason: str) -> BadCheckpoint:
    """The error for a pickle that wants more than tensors and plain containers."""
    # torch adds advice of its own, which would run the code.
    said = next((line for line in reason.splitlines() if "GLOBAL" in line or "Unsupported" in line), "")
    word = said.partition("GLOBAL ")[2].split(" ")[0] or said.partition("class ")[2].split(" ")[0]
    wants = f"It wants {word.strip('.')!r}, and unpickling" if word else "Unpickling"
    return BadCheckpoint(
        f"{file.path!r} holds more than tensors and plain containers. {wants} that could run any code, so nothing "
        "was loaded. If you know the class and trust it: with torch.serialization.safe_globals([TheClass]): "
        f"metaviz.checkpoint({file.path!r}). Or save only the state dict: torch.save(model.state_dict(), 'model.pt')"
    )


def dicts_of_tensors(content: Any) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The dicts in ``content``, to the second level, that hold tensors by name, with the keys that lead to them."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while todo:
        way, found = todo.pop(0)
        if not isinstance(found, Mapping):
            continue
        if any(isinstance(value, torch.Tensor) for value in found.values()) and all(
            isinstance(name, str) for name in found
        ):
            yield way, found
        elif len(way) < 2:
            todo += [((*way, name), value) for name, value in found.items() if isinstance(name, str)]
