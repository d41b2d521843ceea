"""Replay: run a slice of the tape for real, in program order, and hand out each storage as soon as it is done."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from metaviz.core import turns
from metaviz.core.rng import DrawCount, count_draws
from metaviz.core.tape import Op, Tape, Window, map_windows, tensors_in

CPU = torch.device("cpu")


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Torch as it is in a fresh process: none of the caller's modes, no grad, no autocast, no inference tensors."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def values_of_another(tape: Tape, storage: int) -> torch.Tensor:
    """The op of a storage that another tape made: its bytes there, uint8 ``(nbytes,)``."""
    ((_, memory),) = replay(tape, [storage], EagerDraws())
    return torch.empty(0, dtype=torch.uint8).set_(memory)


class EagerDraws:
    """Random ops give what an ordinary CPU build gives: each gets the state the CPU generator would have there."""

    device = CPU

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def run(self, op: Op, key: str, args: tuple, kwargs: dict) -> Any:
        """Run a random op."""
        stream, index = op.draw
        self._generator.set_state(stream.state_before(index))
        began = time.perf_counter()
        result = _call(op.func, args, kwargs, self._generator)
        stream.remember(index + 1, self._generator.get_state(), time.perf_counter() - began)
        return result


class KeyedDraws:
    """Each random op has its own generator on the target device, seeded by (seed, key of the op)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device)

    def run(self, op: Op, key: str, args: tuple, kwargs: dict) -> Any:
        """Run a random op."""
        key = f"{op.draw[0].seed}/{key}".encode()
        # 63 bits: manual_seed refuses more on some devices.
        self._generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1)
        return _call(op.func, args, kwargs, self._generator)


class DeviceDraws:
    """Random ops draw from the target device's global generator, as torch's own recipe does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, op: Op, key: str, args: tuple, kwargs: dict) -> Any:
        """Run a random op."""
        return op.func(*args, **kwargs)


def draws_for(rng: str, device: torch.device) -> EagerDraws | KeyedDraws | DeviceDraws:
    """The way to draw that ``rng`` (``"eager"``, ``"keyed"`` or ``"device"``) names."""
    kinds = {"eager": lambda _: EagerDraws(), "keyed": KeyedDraws, "device": DeviceDraws}
    if rng not in kinds:
        raise ValueError(f"rng={rng!r} is not one of 'eager', 'keyed', 'device'.")
    return kinds[rng](device)


def replay(
    tape: Tape,
    storages: Iterable[int],
    draws: EagerDraws | KeyedDraws | DeviceDraws,
    before: int | None = None,
) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Run what ``storages`` need and yield ``(storage number, memory)`` when its values are final.

    The memory is on ``draws.device``. A storage is dropped as soon as no later op of the slice uses it, so the peak is
    what is being worked on plus what the caller keeps. Call it under :func:`plain_torch`.
    """
    wanted = set(storages)
    ops, done_after = _schedule(tape, wanted, before)
    done = {storage for storages in done_after.values() for storage in storages}
    memory: dict[int, torch.UntypedStorage] = {}
    for storage in wanted - done:
        yield storage, _blank(tape, storage, draws.device)
    for k in ops:
        _run(tape, k, memory, draws)
        for storage in done_after.get(k, ()):
            if storage in wanted:
                yield storage, memory.pop(storage)
            else:
                del memory[storage]


def order(tape: Tape, storages: Iterable[int]) -> list[int]:
    """The numbers of the ops that :func:`replay` runs for ``storages``, in its order."""
    return _schedule(tape, set(storages))[0]


def peak_nbytes(tape: Tape, storages: Iterable[int], stays: dict[int, int], copies: dict[int, int]) -> int:
    """Most bytes that :func:`replay` and its caller have in use at any time.

    Args:
        tape: The tape.
        storages: The storages to be replayed.
        stays: For each, bytes of its memory that the caller keeps.
        copies: For each, bytes that the caller allocates for copies when it gets it.
    """
    wanted = set(storages)
    ops, done_after = _schedule(tape, wanted)
    live: set[int] = set()
    now = most = 0
    for k in ops:
        op = tape.ops[k]
        for storage in _touched(op):
            if storage not in live:
                live.add(storage)
                now += tape.storages[storage].nbytes
        # A torch.nn.init call that was taken as one op works with copies of its tensor, and so does another tape.
        times = 4 * (not op.outputs or op.func is values_of_another) * (not hasattr(op.func, "_schema"))
        inner = times * sum(tape.storages[w.storage].nbytes for w in op.writes)
        most = max(most, now + inner)
        for storage in done_after.get(k, ()):
            most = max(most, now + copies.get(storage, 0))
            now += copies.get(storage, 0) - tape.storages[storage].nbytes
            now += stays.get(storage, 0) if storage in wanted else 0
    return most


def _schedule(
    tape: Tape, wanted: set[int], before: int | None = None
) -> tuple[list[int], dict[int, list[int]]]:
    """The ops to run, and which storages are done after which of them."""
    ops = _by_chain(tape, tape.slice(wanted, before))
    last: dict[int, int] = {}
    for k in ops:
        last.update((s, k) for s in _touched(tape.ops[k]))
    done_after: dict[int, list[int]] = {}
    for storage, k in last.items():
        done_after.setdefault(k, []).append(storage)
    return ops, done_after


def _by_chain(tape: Tape, ops: list[int]) -> list[int]:
    """``ops`` with those that have a storage to do with one another together, each such chain in program order.

    A cast at the end of a constructor (``self.half()``) would else keep all that is to be cast until then.
    """
    leads: dict[int, int] = {}

    def chain(storage: int) -> int:
        while (above := leads.setdefault(storage, storage)) != storage:
            leads[storage] = storage = leads[above]
        return storage

    for k in ops:
        first, *others = _touched(tape.ops[k])
        for other in others:
            leads[chain(other)] = chain(first)
    of = {k: chain(next(_touched(tape.ops[k]))) for k in ops}
    begins: dict[int, int] = {}
    for k in ops:
        begins.setdefault(of[k], k)
    return sorted(ops, key=lambda k: (begins[of[k]], k))


def _touched(op: Op) -> Iterator[int]:
    yield from op.reads
    for window in op.writes:
        yield window.storage


def _blank(tape: Tape, storage: int, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(tape.storages[storage].nbytes, device=device)


def _run(tape: Tape, number: int, memory: dict[int, torch.UntypedStorage], draws: Any) -> None:
    op = tape.ops[number]

    def tensor(window: Window) -> torch.Tensor:
        if window.storage not in memory:
            memory[window.storage] = _blank(tape, window.storage, draws.device)
        return window.on(memory[window.storage])

    args = map_windows(op.args, tensor)
    kwargs = {name: map_windows(value, tensor) for name, value in op.kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = draws.device
    with _default_dtype(op.default_dtype, _asks_for_default(op, args, kwargs)):
        result = draws.run(op, tape.key(number), args, kwargs) if op.draw else op.func(*args, **kwargs)
    del args, kwargs
    results = result if isinstance(result, tuple | list) else (result,)
    for window, out in zip(op.outputs, results, strict=bool(op.outputs)):
        if window is not None:
            memory[window.storage] = _as_recorded(tape, window, out, draws.device)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype, matters: bool) -> Iterator[None]:
    """The default dtype of the build, where that matters."""
    if not matters or dtype == torch.get_default_dtype():
        yield
        return
    with turns.around():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _asks_for_default(op: Op, args: tuple, kwargs: dict) -> bool:
    """Whether the result of an op may depend on the default dtype: not if it works on floats, or is told the dtype."""
    # A function of torch.nn.init may do anything.
    if hasattr(op.func, "_schema") and kwargs.get("dtype") is not None:
        return False
    floats = any(t.is_floating_point() or t.is_complex() for t in tensors_in(args, kwargs))
    return not hasattr(op.func, "_schema") or not floats


def _as_recorded(tape: Tape, window: Window, out: torch.Tensor, device: torch.device) -> torch.UntypedStorage:
    """The storage of ``out``, laid out as on the tape: a kernel may choose other strides than its meta twin."""
    storage = out.untyped_storage()
    same_place = out.stride() == window.stride and out.storage_offset() == window.offset
    if same_place and out.device == device and storage.nbytes() == tape.storages[window.storage].nbytes:
        return storage
    storage = _blank(tape, window.storage, device)
    # Kernels give empty results where nobody needs the values: the statistics of a batch norm in eval mode.
    if out.numel() and window.numel():
        window.on(storage).copy_(out)
    return storage


@functools.cache
def _takes_generator(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return any(argument.name == "generator" for argument in schema.arguments)
    return "generator" in inspect.signature(func).parameters


def _call(func: Any, args: tuple, kwargs: dict, generator: torch.Generator) -> Any:
    """Run a random op with ``generator``, and leave the global generator as it was."""
    if _takes_generator(func):
        return func(*args, **{**kwargs, "generator": generator})
    device = generator.device
    with (
        turns.around(),
        torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
    ):
        if device.type == "cpu":
            torch.default_generator.set_state(generator.get_state())
            result = func(*args, **kwargs)
            generator.set_state(torch.default_generator.get_state())
            return result
        torch.get_device_module(device).manual_seed(generator.initial_seed())
        return func(*args, **kwargs)


class OpDraw:
    """A random op of the tape as one draw of a stream (see :class:`metaviz.core.rng.Draw`)."""

    __slots__ = ("number", "tape")

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape = tape
        self.number = number

    def count(self) -> DrawCount | None:
        """What the op takes from the generator, None if only running it tells."""
        op = self.tape.ops[self.number]
        if not hasattr(op.func, "_schema") or len(op.writes) != 1:
            return None
        (window,) = op.writes
        return count_draws(op.func, op.args, window.numel(), window.dtype, window.is_contiguous())

    def run(self, generator: torch.Generator) -> None:
        """Run the op in scratch memory, for what it does to ``generator``."""
        tape, op = self.tape, self.tape.ops[self.number]
        with plain_torch():
            memory = dict(replay(tape, op.reads, EagerDraws(), before=self.number))
            _run(tape, self.number, memory, _Given(generator))


class _Given:
    device = CPU

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def run(self, op: Op, key: str, args: tuple, kwargs: dict) -> Any:
        return _call(op.func, args, kwargs, self._generator)
