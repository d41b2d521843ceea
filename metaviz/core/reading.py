"""Reading a tape backwards and forwards again: what a storage holds, in terms that name no storage and no seed."""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from metaviz.core.fills import COPIES, Fill, base_name, fill_of, folded
from metaviz.core.replay import plain_torch, values_of_another
from metaviz.core.tape import Op, Tape, Window, constant

aten = torch.ops.aten

# Bytes of one tensor on a tape that are worth reading to compare them.
_DIGEST_LIMIT = 64 * 2**20


class Patch(NamedTuple):
    """The last known write of a part of a storage: by which op, as entry number ``ref`` of the form."""

    window: Window
    op: Op
    ref: tuple
    fill: Fill | None
    base: Any


class Seen(NamedTuple):
    """What a window holds: the writes that can be seen through it, and the fill that they amount to, if they do."""

    parts: tuple
    layout: tuple
    fill: Fill | None
    hits: list[Patch]
    independent: bool


class Reading:
    """One pass over the ops that a window needs: what each storage holds, by entries that name no storage.

    Attributes:
        entries: One for each op, with all that is not a number.
        ops: The ops of the entries.
        numbers: The numbers among their arguments.
        draws: Whether one of them is random.
        blank: Whether one reads memory that nothing has written.
        unknown: Whether one has data that are too many to be compared.
    """

    def __init__(self) -> None:
        self.entries: list[tuple] = []
        self.ops: list[Op] = []
        self.numbers: list[Any] = []
        self.draws = False
        self.blank = False
        self.unknown = False
        self._memory: dict[tuple[int, int], list[Patch]] = {}

    def run(self, tape: Tape, ops: list[Op]) -> None:
        """Go through ``ops`` of ``tape``, which are in program order."""
        for op in ops:
            self.draws = self.draws or op.draw is not None
            if op.func is values_of_another:
                self._take_over(tape, op)
                continue
            source = copied(tape, op)
            if source is not None and source.dtype == op.writes[0].dtype:
                target = op.writes[0].storage
                patches = self._memory.get((id(tape), source.storage), ())
                self._memory[id(tape), target] = [_moved(patch, target) for patch in patches]
                continue
            self._note(tape, op)

    def _take_over(self, tape: Tape, op: Op) -> None:
        other, storage = op.args
        self.run(other, ops_of(other, storage))
        target = op.writes[0].storage
        patches = self._memory.get((id(other), storage), ())
        self._memory[id(tape), target] = [_moved(patch, target) for patch in patches]

    def _note(self, tape: Tape, op: Op) -> None:
        fill = fill_of(op)
        base = op if fill is not None and fill.draws else None
        if fill is not None:
            self.numbers += fill.numbers
            entry: tuple = (fill.name,)
        else:
            read = _read_windows(op)
            seen = {window: self.look(tape, window) for window in read}
            target = (op.outputs and op.outputs[0]) or op.writes[0]
            fill = folded(op, target, [(window, seen[window].fill) for window in read])
            base = next(
                (hit.base for each in seen.values() for hit in each.hits if hit.base is not None), None
            )
            entry = (op.func, self._encoded(_arguments(op), seen))
        number = len(self.entries)
        self.ops.append(op)
        self.entries.append((*entry, tuple(_layout(window, op.writes[0].offset) for window in op.writes)))
        for j, window in enumerate(op.writes):
            patches = self._memory.setdefault((id(tape), window.storage), [])
            patches[:] = [each for each in patches if not contains(window, each.window)]
            patches.append(Patch(window, op, (number, j), None if window.lazy else fill, base))

    def look(self, tape: Tape, window: Window) -> Seen:
        """What ``window`` holds now."""
        hits = []
        for patch in reversed(self._memory.get((id(tape), window.storage), ())):
            if _overlap(patch.window, window):
                hits.append(patch)
                if contains(patch.window, window):
                    break
        else:
            self.blank = self.blank or tape.unwritten(window) > 0
        hits.reverse()
        drawn = [id(hit.base) for hit in hits if hit.base is not None]
        # The same draw twice is no two draws.
        independent = len(set(drawn)) == len(drawn) and is_injective(window)
        fills = {hit.fill and hit.fill.canonical() for hit in hits if hit.window.dtype == window.dtype}
        alike = len(fills) == 1 and not any(hit.window.dtype != window.dtype for hit in hits)
        fill = hits[0].fill if alike and not window.lazy else None
        if fill is not None and fill.draws and not independent:
            fill = None
        parts = tuple((hit.ref, _layout(hit.window, window.offset)) for hit in hits)
        return Seen(parts, _layout(window, window.offset), fill, hits, independent)

    def form(self, seen: Seen) -> str:
        """What stands for all that ``seen`` comes from, but for the numbers."""
        return digest(repr((self.entries, seen.parts, seen.layout)).encode())

    def _encoded(self, value: Any, seen: dict[Window, Seen]) -> Any:
        if isinstance(value, Window):
            known = seen.get(value)
            return "target" if known is None else (known.parts, known.layout)
        if isinstance(value, bool | int | float | complex):
            self.numbers.append(value)
            return "#"
        if isinstance(value, torch.Tensor):
            self.unknown = self.unknown or value.nbytes > _DIGEST_LIMIT
            with plain_torch():
                return str(value.dtype), tuple(value.shape), "" if self.unknown else digest(content(value))
        if isinstance(value, list | tuple):
            return tuple(self._encoded(item, seen) for item in value)
        if value is None or isinstance(value, str | torch.dtype | torch.memory_format | torch.layout):
            return str(value)
        return type(value).__name__


def ops_of(tape: Tape, storage: int, before: int | None = None) -> list[Op]:
    """The ops that ``storage`` has its values from, in program order, as :meth:`Tape.slice` finds them.

    Where the constructor has read values, the tape keeps what it saw: that hides the ops, and changes no value.
    """
    chosen: set[int] = set()
    todo = [(storage, len(tape.ops) if before is None else before)]
    while todo:
        number = writer(tape, *todo.pop())
        if number is not None and number not in chosen:
            chosen.add(number)
            todo.extend((read, number) for read in tape.ops[number].reads)
    return [tape.ops[k] for k in sorted(chosen)]


def is_drawn(tape: Tape, storage: int, before: int | None = None) -> bool:
    """Whether a random op takes part in the values of ``storage``."""
    return any(
        op.draw is not None or (op.func is values_of_another and is_drawn(*op.args))
        for op in ops_of(tape, storage, before)
    )


def writer(tape: Tape, storage: int, before: int) -> int | None:
    """Number of the last op before op number ``before`` that wrote ``storage``, but for values that were only read."""
    writers = tape.storages[storage].writers
    at = len(writers) if before >= len(tape.ops) else bisect.bisect_left(writers, before)
    for number in reversed(writers[:at]) if at > 1 else writers[:at]:
        if not _was_read(tape.ops[number]):
            return number
    return None


def copied(tape: Tape, op: Op) -> Window | None:
    """What ``op`` copies, if it does no more than copy a whole storage as it lies, maybe to another float dtype."""
    if len(op.writes) != 1 or base_name(op) not in COPIES:
        return None
    target, source = op.writes[0], op.args[op.func is aten.copy_.default]
    if not isinstance(source, Window) or target.size != source.size or target.stride != source.stride:
        return None
    if target.lazy or source.lazy or not covers(tape, target) or not covers(tape, source):
        return None
    floats = target.dtype.is_floating_point and source.dtype.is_floating_point
    return source if target.dtype == source.dtype or floats else None


def settled(tape: Tape, storage: int, casts: bool = False) -> tuple[int | None, int]:
    """The number of the op that made what ``storage`` is a plain copy of, and the storage that it made it in."""
    before = len(tape.ops)
    while (number := writer(tape, storage, before)) is not None:
        source = copied(tape, tape.ops[number])
        if source is None or not (casts or source.dtype == tape.ops[number].writes[0].dtype):
            break
        storage, before = source.storage, number
    return number, storage


def covers(tape: Tape, window: Window) -> bool:
    """Whether ``window`` shows the whole of its storage."""
    nbytes = tape.storages[window.storage].nbytes
    return not window.offset and window.numel() * window.dtype.itemsize == nbytes and window.is_dense()


def contains(outer: Window, inner: Window) -> bool:
    """Whether every byte of ``inner`` is one of ``outer``, both on one storage."""
    if outer[2:5] == inner[2:5] and outer.dtype.itemsize == inner.dtype.itemsize:
        return True
    if not outer.is_dense():
        return False
    (start, stop), (first, last) = outer.extent(), inner.extent()
    return start <= first and last <= stop


def is_injective(window: Window) -> bool:
    """Whether no two elements lie at one place, as those of an expanded tensor do."""
    reach = 0
    for step, n in sorted((step, n) for step, n in zip(window.stride, window.size, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += (n - 1) * step
    return True


def brings(op: Op) -> bool:
    """Whether the values of ``op`` are on the tape itself."""
    return op.func is constant or (op.func is aten.copy_.default and isinstance(op.args[1], torch.Tensor))


def content(tensor: torch.Tensor) -> bytes:
    """The values of ``tensor`` in the order of its indices."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest(data: bytes) -> str:
    """Twelve bytes that stand for ``data``."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _was_read(op: Op) -> bool:
    """Whether ``op`` only keeps what a storage held when the constructor read it: see ``Recorder.memory_of``."""
    if op.func is not aten.copy_.default or not isinstance(op.args[1], torch.Tensor) or op.reads:
        return False
    window = op.args[0]
    return window.dtype == torch.uint8 and len(window.size) == 1


def _moved(patch: Patch, storage: int) -> Patch:
    return patch._replace(window=patch.window._replace(storage=storage))


def _overlap(one: Window, other: Window) -> bool:
    (a, b), (c, d) = one.extent(), other.extent()
    return a < d and c < b


def _layout(window: Window, origin: int) -> tuple:
    return tuple(window.size), tuple(window.stride), window.offset - origin, window.dtype, window.lazy


def _arguments(op: Op) -> list[Any]:
    """The arguments that matter, those that were left out too; not the device, not the generator."""
    if op.func is constant:
        return [op.args[0]]
    if not hasattr(op.func, "_schema"):
        return [*op.args, *op.kwargs.values()]
    given = len(op.args)
    return [
        op.args[i] if i < given else op.kwargs.get(name, default) for i, name, default in _parameters(op.func)
    ]


@functools.cache
def _parameters(func: Any) -> list[tuple[int, str, Any]]:
    return [
        (i, argument.name, argument.default_value)
        for i, argument in enumerate(func._schema.arguments)
        if argument.name not in ("device", "generator", "pin_memory")
    ]


def _read_windows(op: Op) -> list[Window]:
    """The windows whose content matters to ``op``, in the order of its arguments."""
    args = op.args[1:] if op.func is aten.copy_.default else op.args
    found = list(_windows((*args, *(value for name, value in op.kwargs.items() if name != "out"))))
    return [w for w in found if w.storage in op.reads]


def _windows(value: Any) -> Iterator[Window]:
    if isinstance(value, Window):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _windows(item)
