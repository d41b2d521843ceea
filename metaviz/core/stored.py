"""Stored tensors: where in which files the bytes of a tensor lie, and reading just those.

Every format comes down to this: a tensor is a number of pieces, each a range of bytes of one file. Headers tell where
they are, and values are read when they are wanted, by plain reads: a file that is mapped into memory and then cut
short or written to takes the process down with it, or changes the model behind its back.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from metaviz.core.units import format_bytes
from metaviz.errors import BadCheckpoint, StalePlan

# Small enough that Ctrl-C is heard soon, large enough that the calls cost nothing.
_CHUNK = 8 * 2**20
# Fresh memory is slow to get: two threads at it take half the time.
_PARALLEL_FROM = 64 * 2**20
THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A file as it was when its header was read.

    Attributes:
        path: Where it is.
        stamp: What tells it from another file at that place, or from itself after a change.
    """

    path: str
    stamp: tuple[int, ...]

    @classmethod
    def at(cls, path: str | os.PathLike) -> File:
        """The file at ``path``, as it is now.

        Raises:
            BadCheckpoint: There is none, or it cannot be looked at.
        """
        with readable(path):
            try:
                found = os.stat(path)
            except ValueError as error:  # a NUL in it
                raise OSError(str(error)) from None
        if not stat.S_ISREG(found.st_mode):
            # Opening a pipe waits for someone to write to it, and reading a device may never end.
            raise BadCheckpoint(
                f"{os.fspath(path)!r} cannot be read: it is no ordinary file. "
                "Next: metaviz.checkpoint('model.safetensors')"
            )
        return cls(os.fspath(path), _stamp(found))

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.stamp[0]

    @property
    def name(self) -> str:
        """Its name, without the folder."""
        return os.path.basename(self.path)

    def head(self, nbytes: int, offset: int = 0) -> bytes:
        """Up to ``nbytes`` bytes from ``offset`` on."""
        with readable(self.path), open(self.path, "rb", buffering=0) as file:
            file.seek(offset)
            found = b""
            while len(found) < nbytes and (more := file.read(nbytes - len(found))):
                found += more
            return found

    def check(self) -> None:
        """Make sure that it is still the same.

        Raises:
            StalePlan: It is not.
        """
        with readable(self.path):
            now = _stamp(os.stat(self.path))
        if now != self.stamp:
            raise StalePlan(
                f"{self.path!r} was changed or replaced after its header was read, so the places of its tensors are "
                f"not known any more. Nothing of the model was changed. Next: metaviz.checkpoint({self.path!r})"
            )


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


@contextlib.contextmanager
def readable(path: str | os.PathLike) -> Iterator[None]:
    """Turn what the system says about a file that cannot be read into an error of ours."""
    try:
        yield
    except OSError as error:
        name = os.fspath(path)
        advice = {
            FileNotFoundError: f"Next: import os; os.listdir({os.path.dirname(name) or '.'!r})",
            PermissionError: f"Next: import os; oct(os.stat({name!r}).st_mode)  # who may read it",
        }.get(type(error), f"Next: open({name!r}, 'rb').read(8)")
        raise BadCheckpoint(f"{name!r} cannot be read: {error.strerror or error}. {advice}") from None


class Piece(NamedTuple):
    """A range of bytes that holds a box of a tensor.

    Attributes:
        file: The file that has it.
        offset: Its first byte there.
        size: Shape of the box.
        stride: How its elements lie in those bytes.
        at: Where in the tensor the box begins; empty for all of the tensor.
    """

    file: File
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    at: tuple[int, ...] = ()

    def span(self, itemsize: int) -> int:
        """Bytes from its first element to its last."""
        if 0 in self.size:
            return 0
        return (1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))) * itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint, known from its header.

    Attributes:
        name: Its name there.
        shape: Its shape; None where its file is missing.
        dtype: Its dtype; None where this torch has none like it.
        pieces: Where its values are.
        value: The tensor itself, where the checkpoint is a state dict.
        trouble: Why it has no values, or none that can be read; ``""`` if it has.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    pieces: tuple[Piece, ...] = ()
    value: torch.Tensor | None = dataclasses.field(default=None, repr=False, compare=False)
    trouble: str = ""

    @property
    def numel(self) -> int:
        """Number of elements; 0 where its shape is not known."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * (0 if self.dtype is None else self.dtype.itemsize)

    @property
    def stride(self) -> tuple[int, ...]:
        """How its elements lie in memory when it is read."""
        if self.value is not None:
            return tuple(torch.empty_like(self.value, device="meta").stride())
        if len(self.pieces) == 1:
            return self.pieces[0].stride
        return contiguous(self.shape)

    @property
    def place(self) -> object:
        """Equal for stored tensors that are the same values in the same place under several names."""
        if self.value is not None:
            held = self.value
            return held.untyped_storage()._cdata, held.storage_offset(), self.shape, held.stride(), self.dtype
        return self.pieces, self.dtype

    def load(self, stop: threading.Event | None = None) -> torch.Tensor:
        """Read it: a new tensor on the CPU, laid out as :attr:`stride` says.

        Args:
            stop: Another thread sets it when nobody wants the tensor any more.

        Raises:
            BadCheckpoint: The bytes are not there.
            StalePlan: The file has been changed since its header was read.
        """
        if self.trouble:
            raise BadCheckpoint(f"{self.name!r} cannot be read: {self.trouble}. Next: print(checkpoint)")
        if self.value is not None:
            return torch.empty_like(self.value, device="cpu").copy_(self.value)
        first, *others = self.pieces
        if not others and first.size == self.shape:
            return _read(first, self.dtype, stop)
        whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for piece in self.pieces:
            part = whole
            for dim, (start, length) in enumerate(zip(piece.at, piece.size, strict=True)):
                part = part.narrow(dim, start, length)
            if part.is_contiguous() and piece.stride == contiguous(piece.size):
                _read_into(piece.file, piece.offset, part, part.nbytes, stop)
            else:
                part.copy_(_read(piece, self.dtype, stop))
        return whole


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in the order of their indices."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _read(piece: Piece, dtype: torch.dtype, stop: threading.Event | None) -> torch.Tensor:
    """A piece as a tensor of its own."""
    span = piece.span(dtype.itemsize)
    memory = torch.UntypedStorage(span)
    _read_into(piece.file, piece.offset, memory, span, stop)
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, piece.size, piece.stride)


def _read_into(
    file: File,
    offset: int,
    memory: torch.Tensor | torch.UntypedStorage,
    nbytes: int,
    stop: threading.Event | None,
) -> None:
    """Read a range of bytes into memory."""
    stop = threading.Event() if stop is None else stop
    file.check()
    if nbytes:
        array = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        # Ctrl-C at a bad moment leaves a thread to itself, which then must not write to what was given back.
        array.owner = memory
        view = memoryview(array).cast("B")
        if nbytes <= _PARALLEL_FROM or THREADS < 2:
            _read_part(file, offset, view, stop)
        else:
            _read_in_parallel(file, offset, view, stop)
    # What was read is only good if nobody has written to the file in the meantime.
    file.check()


def _read_in_parallel(file: File, offset: int, view: memoryview, stop: threading.Event) -> None:
    step = -(-len(view) // THREADS)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="metaviz-read") as pool:
        try:
            parts = [
                pool.submit(_read_part, file, offset + start, view[start : start + step], stop)
                for start in range(0, len(view), step)
            ]
            for part in parts:
                part.result()
        except BaseException:
            # The threads write to memory that is given back when an error or Ctrl-C goes on from here.
            stop.set()
            raise


def _read_part(file: File, offset: int, view: memoryview, stop: threading.Event) -> None:
    with readable(file.path), open(file.path, "rb", buffering=0) as source:
        source.seek(offset)
        done = 0
        while done < len(view) and not stop.is_set():
            count = source.readinto(view[done : done + _CHUNK])
            if not count:
                file.check()
                raise BadCheckpoint(
                    f"{file.path!r} ends at byte {format_bytes(offset + done)}, in the middle of a tensor: it is cut "
                    f"short. Nothing of the model was changed. Next: download or copy the file again"
                )
            done += count
