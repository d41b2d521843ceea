"""Verify: compare a tensor that was loaded with what is stored.

What was cast or sent to a device is compared as a whole. What was read straight into place can only be wrong by the
place, so of these the first, middle and last pages are compared: a whole comparison takes a quarter of the time of
reading.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from metaviz.core.stored import File, Piece, Stored, contiguous
from metaviz.errors import StalePlan

_CHUNK = 64 * 2**20
_BLOCK, _BLOCKS = 4 * 2**10, 3


class Verifier:
    """Compares tensors with what is stored.

    Files are mapped for this, and what was just read is in the memory of the system: nothing is read twice. One
    mapping is kept until another file is looked at: to make and end one stops threads that are getting memory.
    """

    def __init__(self) -> None:
        self._file: File | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def same(self, stored: Stored, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds what is stored, cast to its dtype: bit for bit, NaNs included.

        Args:
            stored: What is stored.
            tensor: Of the same shape, on any device.

        Raises:
            StalePlan: The file has been changed.
        """
        tensor = _plain(tensor)
        if stored.value is not None:
            return _equal(_plain(stored.value).reshape(tensor.shape).to(tensor.device), tensor)
        return all(
            _equal(there.to(tensor.device), here)
            for piece in stored.pieces
            for there, here in self._chunks(piece, stored.dtype, _box(tensor.reshape(stored.shape), piece))
        )

    def _chunks(
        self, piece: Piece, dtype: torch.dtype, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of what is stored, with the same parts of the tensor."""
        span = piece.span(dtype.itemsize)
        if not span:
            return
        there = self._mapped(piece.file)[piece.offset : piece.offset + span]
        if piece.stride != contiguous(piece.size) or not tensor.is_contiguous():
            yield _viewed(there, dtype).as_strided(piece.size, piece.stride), tensor
            return
        here, step = tensor.view(-1), _CHUNK // dtype.itemsize
        if here.dtype == dtype and here.device.type == "cpu" and span > _BLOCK * _BLOCKS * 4:
            yield _spread(there, span), _spread(here.view(torch.uint8), span)
            return
        for start in range(0, here.numel(), step):
            # Reading what is mapped of a file that has been cut short would end the process.
            piece.file.check()
            part = there[start * dtype.itemsize : (start + step) * dtype.itemsize]
            yield _viewed(part, dtype), here[start : start + step]

    def _mapped(self, file: File) -> torch.Tensor:
        file.check()
        if self._file != file:
            mapped = torch.UntypedStorage.from_file(file.path, False, file.nbytes)
            self._file, self._bytes = file, torch.empty(0, dtype=torch.uint8).set_(mapped)
        return self._bytes


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Values as they are meant: a conjugated or negated view has other bits in memory."""
    return tensor.detach().resolve_conj().resolve_neg()


def _box(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(piece.at, piece.size, strict=bool(piece.at))):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _spread(memory: torch.Tensor, span: int) -> torch.Tensor:
    """Blocks of bytes, the first and the last among them, as one tensor."""
    step = (span - _BLOCK) // (_BLOCKS - 1)
    blocks = memory.as_strided((_BLOCKS - 1, _BLOCK), (step, 1))
    return torch.cat([blocks.flatten(), memory[span - _BLOCK : span]])


def _viewed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    aligned = part.storage_offset() % dtype.itemsize == 0
    return (part if aligned else part.clone()).view(dtype)


def _equal(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; they are compared as the widest integers that both can be seen as."""
    pair = [each.contiguous().view(-1).view(torch.uint8) for each in (there.to(here.dtype), here)]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all((each.numel() | each.storage_offset()) % dtype.itemsize == 0 for each in pair):
            return torch.equal(*(each.view(dtype) for each in pair))
    return torch.equal(*pair)


def differs(stored: Stored, path: str) -> StalePlan:
    """The error for a tensor that is not what is stored."""
    return StalePlan(
        f"{path} is not what is stored as {stored.name!r}: the file changed while it was read, or memory is damaged. "
        "Nothing of the model was changed. Next: metaviz.materialize(model, paths, checkpoint=checkpoint)"
    )
