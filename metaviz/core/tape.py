"""The tape: what a meta build did to tensors, in program order, and how to do it again.

A tensor is stored as a :class:`Window` on a storage, so that views, ties, ``expand`` and ``.data =`` come out right
by construction and view ops need no record. A storage carries its own mark (:class:`Tag`), which lives exactly as
long as the storage does: ids and ``data_ptr`` (0 on meta) are never compared.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from metaviz.core.rng import Stream
from metaviz.errors import StalePlan

MARK = "_metaviz"


class Window(NamedTuple):
    """A tensor as the tape stores it: a window on storage number ``storage``.

    ``lazy`` tells views whose values are not those in memory: 1 for conjugated, 2 for negated, 3 for both.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    lazy: int = 0

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def is_contiguous(self) -> bool:
        """Whether the elements lie in memory in the order of their indices, without gaps."""
        expected = 1
        for n, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and step != expected:
                return False
            expected *= n
        return True

    def is_dense(self) -> bool:
        """Whether the elements lie side by side in memory, each in a place of its own, in whatever order."""
        expected = 1
        for step, n in sorted((step, n) for step, n in zip(self.stride, self.size, strict=True) if n != 1):
            if step != expected:
                return False
            expected *= n
        return True

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that this window shows of ``memory``."""
        blank = torch.empty(0, dtype=self.dtype, device=memory.device)
        view = blank.set_(memory, self.offset, self.size, self.stride)
        if self.lazy:
            torch._C._set_conj(view, bool(self.lazy & 1))
            torch._C._set_neg(view, bool(self.lazy & 2))
        return view

    def extent(self) -> tuple[int, int]:
        """First byte and one past the last byte that the window can reach."""
        item = self.dtype.itemsize
        if 0 in self.size:
            return self.offset * item, self.offset * item
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset * item, (last + 1) * item


class Tag(NamedTuple):
    """What a storage on meta carries: which tape it is on, and its number there.

    ``source`` is None where the storage is that very storage of the tape; a copy cast to another dtype names the window
    that it holds.
    """

    tape: Tape
    storage: int
    source: Window | None = None


class Where(NamedTuple):
    """The user's line that caused an op; ``init`` is the torch.nn.init function or load_state_dict on the way."""

    init: str | None
    filename: str
    line: int


class Op:
    """One recorded operation.

    ``args`` and ``kwargs`` hold windows where tensors were. ``reads`` are the storages whose earlier content matters,
    ``writes`` the windows it writes (outputs included), ``outputs`` where its results go. ``draw`` is its place among
    the random ops: ``(stream, index)``. ``default_dtype`` is torch's when the op was done: ``linspace`` and
    divisions of integers ask for it.
    """

    __slots__ = ("args", "default_dtype", "draw", "func", "kwargs", "outputs", "reads", "where", "writes")

    def __init__(self, func, args, kwargs, reads, writes, outputs, where=None, draw=None):
        self.func: Callable = func
        self.args: tuple = args
        self.kwargs: dict[str, Any] = kwargs
        self.reads: tuple[int, ...] = reads
        self.writes: tuple[Window, ...] = writes
        self.outputs: tuple[Window | None, ...] = outputs
        self.where: Where | None = where
        self.draw: tuple[Stream, int] | None = draw
        self.default_dtype: torch.dtype = torch.get_default_dtype()

    @property
    def name(self) -> str:
        """The op as people call it: ``uniform_``, ``ones_``, ``trunc_normal_``."""
        if self.where and self.where.init:
            return self.where.init
        packet = getattr(self.func, "overloadpacket", None)
        name = packet.__name__ if packet else self.func.__name__
        return name.removeprefix("_no_grad_")


class Storage:
    """What the tape knows of one storage: its size and the numbers of the ops that wrote it."""

    __slots__ = ("nbytes", "writers")

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.writers: list[int] = []


class Tape:
    """Everything that one meta build did to tensors.

    The tape holds no tensor of the model, so it dies with the last storage that carries its tag.

    Attributes:
        ops: What was done, in program order.
        storages: What to know of each storage, by its number.
        parts: (first op, name) of the parts that a tape is put together from, each the same in any other order.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.parts: list[tuple[int, str]] = []

    def tag(self, storage: torch.UntypedStorage) -> int:
        """Take ``storage`` in as a new one and return its number."""
        number = len(self.storages)
        self.storages.append(Storage(storage.nbytes()))
        setattr(storage, MARK, Tag(self, number))
        return number

    def append(self, op: Op) -> int:
        """Put ``op`` at the end and return its number."""
        number = len(self.ops)
        self.ops.append(op)
        for window in op.writes:
            writers = self.storages[window.storage].writers
            if not writers or writers[-1] != number:
                writers.append(number)
        return number

    def key(self, number: int) -> str:
        """A name for an op, which does not change where other parts are left out."""
        at = bisect.bisect_right(self.parts, number, key=lambda part: part[0]) - 1
        if at < 0:
            return str(number)
        first, name = self.parts[at]
        # Only what draws counts: values that are there already are taken in where they are first met.
        return f"{name}/{sum(op.draw is not None for op in self.ops[first:number])}"

    def slice(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Numbers of the ops that storages need to have their values just ``before`` an op, in program order.

        Walks back from each storage over the ops that wrote it, and over what each of them read as of that op, and
        stops at writes that leave nothing of what was there before.
        """
        end = len(self.ops) if before is None else before
        chosen: set[int] = set()
        todo = [(storage, end) for storage in storages]
        while todo:
            storage, end = todo.pop()
            writers = self.storages[storage].writers
            at = bisect.bisect_left(writers, end) - 1
            if at < 0 or writers[at] in chosen:
                continue
            chosen.add(writers[at])
            todo.extend((read, writers[at]) for read in self.ops[writers[at]].reads)
        return sorted(chosen)

    def last_write(self, storage: int) -> Op | None:
        """The op that wrote ``storage`` last: where its values come from."""
        writers = self.storages[storage].writers
        return self.ops[writers[-1]] if writers else None

    def unwritten(self, window: Window) -> int:
        """How many bytes of ``window`` no op of an ordinary build ever writes."""
        storage = self.storages[window.storage]
        writes = [w for k in storage.writers for w in self.ops[k].writes if w.storage == window.storage]
        exact = storage.nbytes <= _EXACT_NBYTES
        reached, end = window.extent()
        missing = 0
        # Where gaps are not looked for, a write that has some counts as none: better no values than garbage.
        for start, stop in sorted(w.extent() for w in writes if w.is_dense()):
            missing += max(0, min(start, end) - reached)
            reached = max(reached, stop)
        missing += max(0, end - reached)
        if missing and exact and not all(each.is_dense() for each in (window, *writes)):
            wanted, written = _bits(window), functools.reduce(operator.or_, map(_bits, writes), 0)
            return (wanted & (wanted ^ written)).bit_count()
        return missing

    def nbytes_of(self, ops: Iterable[int]) -> int:
        """Bytes of all the storages that ``ops`` write."""
        touched = {window.storage for k in ops for window in self.ops[k].writes}
        return sum(self.storages[s].nbytes for s in touched)


# Above this, what strided writes leave out is not worked out.
_EXACT_NBYTES = 2**30


def _bits(window: Window) -> int:
    """The bytes of its storage that a window reaches, as the bits of a number."""
    item = window.dtype.itemsize
    found = (1 << item) - 1
    for n, step in zip(window.size, window.stride, strict=True):
        found = _repeated(found, n, step * item)
    return found << window.offset * item


def _repeated(bits: int, n: int, step: int) -> int:
    """``bits`` ``n`` times, each time ``step`` further up."""
    if n < 2:
        return bits * n
    half = _repeated(bits, n // 2, step)
    twice = half | half << n // 2 * step
    return twice | bits << (n - 1) * step if n % 2 else twice


def tag_of(tensor: torch.Tensor) -> Tag | None:
    """The tag of the storage of ``tensor``, or None if no tape knows it."""
    try:
        return getattr(tensor.untyped_storage(), MARK, None)
    except (
        NotImplementedError,
        RuntimeError,
        ValueError,
    ):  # sparse, lazy and other tensors without a storage
        return None


def window_of(tensor: torch.Tensor, tape: Tape | None = None) -> Window | None:
    """``tensor`` as a window, if its storage is on ``tape`` (any tape if None)."""
    tag = tag_of(tensor)
    if tag is None or (tape is not None and tag.tape is not tape):
        return None
    return window(tag.storage, tensor)


def window(storage: int, tensor: torch.Tensor) -> Window:
    """``tensor`` as a window on storage number ``storage``."""
    lazy = tensor.is_conj() + 2 * tensor.is_neg()
    return Window(storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), lazy)


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` has been written to; 0 for one made in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def constant(value: torch.Tensor, version: int) -> torch.Tensor:
    """The op of a value that was there before or beside the build: a fresh copy of ``value``.

    Raises:
        StalePlan: ``value`` was too big to copy when it was recorded, and has been written to since.
    """
    if version_of(value) != version:
        raise StalePlan(
            f"A {tuple(value.shape)} tensor that the constructor read has been changed since the build, so its "
            "values then are gone. Build the model again: model = metaviz.build(...)"
        )
    return value.clone()


def map_windows(value: Any, fn: Callable[[Window], Any]) -> Any:
    """``value`` with each window in it, also within lists and tuples, replaced by ``fn(window)``."""
    kind = type(value)
    if kind is Window:
        return fn(value)
    if kind is list or kind is tuple:
        return kind(map_windows(item, fn) for item in value)
    return value


def map_tensors(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with each tensor in it, also within lists, tuples and dicts, replaced by ``fn(tensor)``."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: map_tensors(item, fn) for name, item in value.items()}
    if isinstance(value, list | tuple):
        mapped = [map_tensors(item, fn) for item in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return value


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an op, also within lists and tuples."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) is list or type(value) is tuple:
            found += tensors_in(value, {})
    return found
