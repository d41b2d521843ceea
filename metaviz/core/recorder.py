"""The recorder: decides for each aten op of a constructor whether it goes to meta and on the tape, or runs for real.

Four sorts of tensors meet here. *Taped* ones are on meta but the constructor takes them for CPU tensors. *Real* ones
came from outside. *Foreign* ones the constructor itself put on meta: an ordinary build has no values for them either,
so nothing about them is recorded. Tensors of another tape are taken over first.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from metaviz.core.arrays import Arrays
from metaviz.core.generators import Generators
from metaviz.core.kinds import Kind, is_plain
from metaviz.core.provenance import said, where
from metaviz.core.replay import EagerDraws, OpDraw, plain_torch, replay, values_of_another
from metaviz.core.tape import (
    Op,
    Tag,
    Tape,
    Window,
    constant,
    map_tensors,
    tag_of,
    tensors_in,
    version_of,
    window_of,
)
from metaviz.core.units import format_bytes
from metaviz.errors import ValueRead

META = torch.device("meta")
CPU = torch.device("cpu")
aten = torch.ops.aten

# Below this a real tensor is copied when the tape takes it in; above, it is only watched for changes.
_COPY_LIMIT = 64 * 2**20

_NO_KWARGS: dict[str, Any] = {}


class Recorder:
    """Runs the ops of one recording.

    Args:
        tape: Where ops go.
        value_limit: Bytes that may be computed for real when the constructor reads values.
    """

    def __init__(self, tape: Tape, value_limit: int) -> None:
        self.tape = tape
        self.generators = Generators()
        self.by_name = self.is_bare = False
        self._context = device_context()
        self._limit = value_limit
        self._twins: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._flat: dict[int, torch.Tensor] = {}
        self._addresses: dict[int, torch.UntypedStorage] = {}
        self._read: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._arrays = Arrays(self._hold)

    def close(self) -> None:
        """Put the random generators back."""
        self._arrays.notice()
        self.generators.close()

    def default_device(self) -> torch.device | None:
        """The default device that the constructor itself has set, None if it did not."""
        context = device_context()
        return None if context is None or context is self._context else context.device

    def is_taped(self, tensor: torch.Tensor) -> bool:
        """Whether the constructor takes the meta ``tensor`` for one on the CPU."""
        if is_lazy(tensor):
            # Its class refuses every question but a few.
            with torch._C.DisableTorchFunctionSubclass():
                return tag_of(tensor) is not None
        tag = tag_of(tensor)
        return tag is not None and tag.tape is self.tape

    def guard(self, tensor: torch.Tensor) -> None:
        """Raise if ``tensor`` must not be given other memory; a constructor may do so with any."""

    def run(self, func: Any, kind: Kind, args: tuple, kwargs: dict) -> Any:
        """Do one aten op as the constructor expects it."""
        if kind.skippable is not None and not kwargs and kind.skippable(*args):
            window = window_of(args[0], self.tape)
            if window is not None:
                reads = () if self._covers(window) else (window.storage,)
                self._append(func, (window, *args[1:]), _NO_KWARGS, reads, (window,), (), kind.random)
                return args[0]
        if kind.name == "set_":
            return self._set(func, *args, **kwargs)
        taped, real, foreign = self._survey(args, kwargs)
        device = kwargs.get("device") if kind.has_device else None
        # C++ code asks for the device of the tensors that it works with: only by name is meta really meant.
        if device is not None and device.type == "meta" and self.by_name:
            return func(*args, **kwargs)
        if kind.factory and not (foreign and device is None):
            return self._make(func, kind, args, kwargs)
        if kind.name == "lift_fresh" and real:
            # The memory may be that of an array: torch.from_numpy comes to sight here only.
            return self.share(self.twin(args[0]), args[0], args[0])
        if not taped:
            return self.for_real(func, kind, args, kwargs) if real and kind.random else func(*args, **kwargs)
        if foreign:
            return self._with_foreign(func, kind, args, kwargs)
        if kind.differs:
            with contextlib.suppress(ValueRead):
                return self.for_real(func, kind, args, kwargs)
        if kind.reader or (real and any(not self.is_taped(t) for t in kind.targets(args, kwargs))):
            return self.for_real(func, kind, args, kwargs)
        if real:
            args, kwargs = map_tensors((args, kwargs), lambda t: t if self.is_taped(t) else self.twin(t))
        if device is not None:
            kwargs = {**kwargs, "device": META}
        return self._on_meta(func, kind, args, kwargs)

    def _survey(self, args: tuple, kwargs: dict) -> tuple[bool, bool, bool]:
        taped = real = foreign = False
        for tensor in tensors_in(args, kwargs):
            tag = tag_of(tensor)
            if tag is not None:
                taped = True
                if tag.tape is not self.tape:
                    self._take_over(tensor, tag)
            elif tensor.device.type == "meta":
                foreign = True
            else:
                real = True
        return taped, real, foreign

    def _take_over(self, tensor: torch.Tensor, tag: Tag) -> None:
        """Let the storage of an earlier build's tensor belong to this tape, with the values it has there."""
        storage = tensor.untyped_storage()
        number = self.tape.tag(storage)
        window = Window(number, torch.uint8, (storage.nbytes(),), (1,), 0)
        self.tape.append(Op(values_of_another, (tag.tape, tag.storage), {}, (), (window,), (window,)))

    def _make(self, func: Any, kind: Kind, args: tuple, kwargs: dict) -> torch.Tensor:
        """A factory: allocate on meta, record what fills it."""
        generator = kwargs.get("generator")
        kwargs = {
            name: None if name == "generator" else v for name, v in kwargs.items() if name != "pin_memory"
        }
        if "quantized" in kind.name or "sparse" in kind.name:
            return self.for_real(func, kind, args, kwargs)
        # The meta kernels of the fills are Python and slow; what they fill with is on the tape anyway.
        allocate = aten.empty.memory_format if kind.name in ("zeros", "ones", "rand", "randn") else func
        given = kwargs if allocate is func else {name: v for name, v in kwargs.items() if name != "generator"}
        out = allocate(*args, **{**given, "device": META})
        self.tape.tag(out.untyped_storage())
        if kind.empty or out.numel() == 0:
            return out
        window = window_of(out)
        if kind.fill is None:
            encoded = map_tensors((args, kwargs), window_of)
            reads = tuple({w.storage for w in map(window_of, tensors_in(args, kwargs))})
            self._append(func, *encoded, reads, (window,), (window,), kind.random, generator)
        else:
            fill, values = kind.fill
            if values is None:
                at = next(i for i, a in enumerate(func._schema.arguments) if a.name == "fill_value")
                values = (args[at],)
            self._append(fill, (window, *values), _NO_KWARGS, (), (window,), (), kind.random, generator)
        return out

    def _set(
        self, func: Any, tensor: torch.Tensor, source: Any = None, *rest: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Put a tensor on other memory: a taped one on the twin of what is real, as ``torch.load`` wants it."""
        if not self.is_taped(tensor):
            return func(tensor, *(() if source is None else (source, *rest)), **kwargs)
        if source is None:
            source = torch.empty(0, dtype=tensor.dtype, device=META)
            self.tape.tag(source.untyped_storage())
            return tensor.set_(source)
        if source.device.type == "cpu" and isinstance(source, torch.Tensor):
            source = self.twin(source)
        elif source.device.type == "cpu":
            with plain_torch():
                blank = torch.empty(0, dtype=torch.uint8, device=CPU)
                flat = self._flat.setdefault(source._cdata, blank.set_(source))
            # A file may fill the memory later.
            source = self.twin(flat, copy=False).untyped_storage()
        return func(tensor, source, *rest, **kwargs)

    def _with_foreign(self, func: Any, kind: Kind, args: tuple, kwargs: dict) -> Any:
        """Taped and foreign tensors in one op: what an ordinary build does without the foreign ones' values."""
        if any(self.is_taped(t) for t in kind.targets(args, kwargs)):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        return func(*args, **kwargs)

    def _on_meta(self, func: Any, kind: Kind, args: tuple, kwargs: dict) -> Any:
        """Run an op of taped tensors on meta and record it."""
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs = {**kwargs, "generator": None}
        if kind.skippable is not None and not kind.skippable(*args):
            # An ordinary build raises here.
            return self.for_real(func, kind, args, kwargs)
        try:
            out = args[0] if kind.skippable is not None else func(*args, **kwargs)
        except Exception as error:
            return self._where_meta_fails(error, func, kind, args, {**kwargs, "generator": generator})
        if kind.name == "resize_":
            storage = args[0].untyped_storage()
            self.tape.storages[tag_of(args[0]).storage].nbytes = storage.nbytes()
            return out
        outs = out if type(out) in (tuple, list) else (out,)
        if not all(map(is_plain, outs)):
            return self.for_real(
                func, kind, args, {**kwargs, "generator": generator} if generator else kwargs
            )
        targets = tuple(map(window_of, kind.targets(args, kwargs)))
        encoded = map_tensors((args, kwargs), window_of)
        sources = [window_of(t) for t in tensors_in(args, kwargs)]
        if kind.overwrites:
            for target in targets:
                if self._covers(target):
                    sources.remove(target)
        reads = tuple({w.storage for w in sources})
        outputs = tuple(map(self._fresh, outs))
        fresh = tuple(w for w in outputs if w is not None)
        if targets or fresh:
            self._append(
                func, *encoded, reads, targets + fresh, outputs if fresh else (), kind.random, generator
            )
        return out

    def _fresh(self, out: Any) -> Window | None:
        """Take a result of an op in; None for what is no new tensor (a number, a view of an argument)."""
        if not isinstance(out, torch.Tensor) or tag_of(out) is not None:
            return None
        self.tape.tag(out.untyped_storage())
        return window_of(out)

    def _covers(self, window: Window) -> bool:
        nbytes = self.tape.storages[window.storage].nbytes
        if window.offset or window.numel() * window.dtype.itemsize != nbytes:
            return False
        return window.is_dense()

    def _append(self, func, args, kwargs, reads, writes, outputs, random=False, generator=None) -> None:
        if self._arrays:
            self._arrays.notice([*reads, *(window.storage for window in writes)])
            self._arrays.forget(window.storage for window in writes)
        number = len(self.tape.ops)
        draw = self.generators.place(generator, OpDraw(self.tape, number)) if random else None
        self.tape.append(Op(func, args, kwargs, reads, writes, outputs, where(), draw))

    def composite(self, func: Any, tensor: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Record a whole torch.nn.init call that fills ``tensor`` from draws that depend on data."""
        window = window_of(tensor)
        reads = () if self._covers(window) else (window.storage,)
        kwargs = {
            name: value for name, value in arguments.items() if value is not tensor and name != "generator"
        }
        self._append(func, (window,), kwargs, reads, (window,), (), True, arguments.get("generator"))

    def _where_meta_fails(self, error: Exception, func: Any, kind: Kind, args: tuple, kwargs: dict) -> Any:
        """No meta kernel, a shape that depends on data, or plainly wrong arguments: only a real run can tell."""
        expected = isinstance(error, NotImplementedError) or type(error).__name__ in (
            "DynamicOutputShapeException",
            "DataDependentOutputException",
        )
        try:
            given = {k: v for k, v in kwargs.items() if v is not None or k != "generator"}
            return self.for_real(func, kind, args, given)
        except ValueRead:
            if expected:
                raise
            raise error from None
        except Exception as plain:
            # The error of an ordinary build; that meta failed before it is no news to the user.
            raise plain from None

    def for_real(self, func: Any, kind: Kind, args: tuple, kwargs: dict) -> Any:
        """Run an op on real values: what it gives are constants of the tape, what it writes too."""
        tensors = list(tensors_in(args, kwargs))
        taped = [t for t in tensors if self.is_taped(t)]
        targets = list(kind.targets(args, kwargs))
        copies = {id(t): self.value(t, kind.name) for t in taped}
        real_args, real_kwargs = map_tensors((args, kwargs), lambda t: copies.get(id(t), t))
        if kind.has_device and kwargs.get("device") is not None:
            real_kwargs["device"] = CPU
        if kind.random:
            out = self.generators.draw_now(func, real_args, real_kwargs)
        else:
            with plain_torch():
                out = func(*real_args, **real_kwargs)
        for target in targets:
            if id(target) in copies:
                self.freeze(target, copies[id(target)])
        if not taped and not kind.factory:
            return out
        given = {id(copies.get(id(t), t)): t for t in tensors}
        return map_tensors(out, lambda o: given[id(o)] if id(o) in given else self.twin(o))

    def value(self, tensor: torch.Tensor, reader: str) -> torch.Tensor:
        """A real copy of the values that the taped ``tensor`` has now in an ordinary build.

        Raises:
            ValueRead: More than ``value_limit`` bytes would have to be computed.
        """
        memory = self.memory_of(tensor, reader)
        with plain_torch():
            return window_of(tensor).on(memory).clone()

    def memory_of(self, tensor: torch.Tensor, reader: str) -> torch.UntypedStorage:
        """The whole storage of the taped ``tensor`` for real, as it is now: to be read only.

        Raises:
            ValueRead: More than ``value_limit`` bytes would have to be computed.
        """
        number = tag_of(tensor).storage
        self._arrays.notice([number])
        record = self.tape.storages[number]
        known = self._read.get(number)
        if known is None or known[0] != len(record.writers):
            cost = max(record.nbytes, self.tape.nbytes_of(self.tape.slice([number])))
            if cost > self._limit:
                raise ValueRead(_too_big(reader, cost, self._limit))
            with plain_torch():
                ((_, storage),) = replay(self.tape, [number], EagerDraws())
                whole = Window(number, torch.uint8, (record.nbytes,), (1,), 0)
                self._hold(whole, whole.on(storage))
            self._read[number] = known = (len(record.writers), storage)
        return known[1]

    def address_of(self, tensor: torch.Tensor) -> int:
        """Where the storage of the taped ``tensor`` begins: the same whenever it is asked for."""
        number = tag_of(tensor).storage
        try:
            now = self.memory_of(tensor, "data_ptr")
        except ValueRead:
            # Beyond what a process can map, and further apart than storages are long.
            return (1 << 60) + (number << 36)
        with plain_torch():
            memory = self._addresses.setdefault(number, torch.UntypedStorage(now.nbytes()))
            memory.copy_(now)
        return memory.data_ptr()

    def share(self, tensor: torch.Tensor, real: torch.Tensor, array: Any) -> torch.Tensor:
        """The taped ``tensor``, of which ``array`` has the memory in an ordinary build, and ``real`` here."""
        if real is not tensor and real.nbytes <= _COPY_LIMIT:
            self._arrays.watch(tensor, real, array)
        return tensor

    def freeze(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """From here on the taped ``tensor`` holds ``value``, which was computed for real."""
        self._hold(window_of(tensor), value)

    def _hold(self, window: Window, value: torch.Tensor) -> None:
        """From here on ``window`` holds ``value``: later replays agree with what the constructor has seen."""
        reads = () if self._covers(window) else (window.storage,)
        self.tape.append(Op(aten.copy_.default, (window, value), {}, reads, (window,), (), where()))

    def twin(self, real: torch.Tensor, copy: bool = True) -> torch.Tensor:
        """The meta tensor that stands for a real one, whose values the tape keeps.

        Quantized and sparse tensors have no meta twin that could be set on a storage: they stay what they are.
        """
        if real.is_quantized or real.layout is not torch.strided:
            return real
        known = self._twins.get(id(real))
        if known is not None and known[1] == version_of(real):
            return known[2]
        with plain_torch():
            small = copy and real.untyped_storage().nbytes() <= _COPY_LIMIT
            # What is only watched is kept itself: made in here, a detached one would not share its version.
            value = real.detach().clone() if small else real
            twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
        self.tape.tag(twin.untyped_storage())
        window = window_of(twin)
        self.tape.append(Op(constant, (value, version_of(value)), {}, (), (window,), (window,), where()))
        if real.requires_grad:
            twin.requires_grad_(True)
        self._twins[id(real)] = (real, version_of(real), twin)
        return twin


def device_context() -> Any:
    """What ``torch.set_default_device`` has set in this thread, None if nothing."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _too_big(reader: str, cost: int, limit: int) -> str:
    place = where()
    at = f" at {said(place)}" if place else ""
    reader = reader.replace("_local_scalar_dense", "item")
    return (
        f"The constructor reads values ({reader}{at}) that take {format_bytes(cost)} to compute, above the limit of "
        f"{format_bytes(limit)}. Allow it: with metaviz.recording(value_limit={cost}): model = ..."
    )
