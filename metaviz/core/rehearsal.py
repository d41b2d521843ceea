"""Rehearsing init methods in the middle of a recipe that moves a model off meta module by module.

Unlike a trial on its own (`core/tryout.py`), a method here meets tensors in three states: those still on meta, memory
that nothing has written, and values. Nothing of the model changes, and no memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from metaviz.core.memory import EMPTY, HELD, META, UNKNOWN, Held, Memory
from metaviz.core.methods import Call
from metaviz.core.paths import below
from metaviz.core.replay import plain_torch
from metaviz.core.sandbox import run_aside
from metaviz.core.shadow import Shadows, is_plain
from metaviz.core.signature import Signature, signature
from metaviz.core.tape import Op, Tape, Window, tag_of, tensors_in, window, window_of
from metaviz.core.trials import OutsideTensor, TrialRecorder
from metaviz.core.tryout import LIMIT, Run, named, said
from metaviz.core.written import first_unread
from metaviz.errors import MetavizError

_ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "npu", "xla", "mtia", "ipu")


class Effect(NamedTuple):
    """What a method does to one slot.

    Attributes:
        state: Of the tensor in the slot afterwards; None where the slot is gone.
        tensor: What it puts there, None for the tensor that was there.
        same_as: The (path, name) of another slot that holds the same tensor, where it puts one.
        written: What it writes.
        attribute: Whether the slot is a plain attribute.
    """

    state: str | None
    tensor: torch.Tensor | None = None
    same_as: tuple[str, str] | None = None
    written: Signature | None = None
    attribute: bool = False


class Rehearsal(NamedTuple):
    """What came of a method.

    Attributes:
        state: `"ran"`, `"missing"`, `"not callable"`, `"raises"` or `"unknown"`.
        error: Type name and message of what it raises.
        why: Why it is not known.
        effects: By path below the module, and slot.
    """

    state: str
    error: tuple[str, str] | None = None
    why: str = ""
    effects: dict[tuple[str, str], Effect] = {}  # noqa: RUF012


def rehearse(module: nn.Module, held: Callable[[nn.Module], Held], ours: set[int], grad: bool) -> Rehearsal:
    """Find out what `module.reset_parameters()` does at this point.

    Args:
        module: The module.
        held: Tells of a module what its slots hold now; None for one that is not registered.
        ours: The ids of all tensors of the model.
        grad: Whether gradients are on.
    """
    run = _Run(module, held, ours, grad)
    outcome = run_aside(run.go, LIMIT, run.abandon)
    state, detail = run.state(outcome)
    if state in ("missing", "not callable"):
        return Rehearsal(state)
    if state in ("unfinished", "refused", "unsupported") or isinstance(
        outcome.error, OutsideTensor | MetavizError
    ):
        return Rehearsal("unknown", None, detail)
    if run.doubt:
        return Rehearsal("unknown", None, run.doubt)
    effects = run.effects
    if state == "raises":
        return Rehearsal("raises", (type(outcome.error).__name__, said(outcome.error)), "", effects)
    return Rehearsal("ran", None, "", effects)


class _Shadows(Shadows):
    """Shadows of modules as they are at some point of a recipe: what is on meta has twins that are on no tape."""

    def __init__(self, tape: Tape, held: Callable[[nn.Module], Held]) -> None:
        super().__init__(tape)
        self._held = held
        self.twins: dict[int, tuple[Memory, torch.Tensor]] = {}

    def of(self, module: nn.Module) -> nn.Module:
        known = id(module) in self.made
        shadow = super().of(module)
        if not known:
            space = object.__getattribute__(shadow, "__dict__")
            for name, memory in (self._held(module) or {}).items():
                for group in ("_parameters", "_buffers"):
                    if name in (space.get(group) or ()):
                        space[group][name] = self.stand_in(memory)
        return shadow

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta" or is_lazy(tensor) or not is_plain(tensor):
            return super().twin(tensor)
        with plain_torch():
            twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            if type(tensor) is not torch.Tensor:
                twin = torch.Tensor._make_subclass(type(tensor), twin, False)
            return twin.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def stand_in(self, memory: Memory) -> torch.Tensor:
        """The meta tensor that stands for a memory."""
        known = self.twins.get(id(memory))
        if known is None:
            known = self.twins[id(memory)] = memory, self._stand_in(memory)
        return known[1]

    def _stand_in(self, memory: Memory) -> torch.Tensor:
        tensor = memory.tensor
        moved = memory.state != META and (tensor.device.type == "meta" or memory.state == EMPTY)
        if not moved or is_lazy(tensor) or not is_plain(tensor):
            return self._copy(tensor)
        with plain_torch():
            size = tensor.size()
            stride = (
                tensor.stride() if window(0, tensor).is_dense() else torch.empty(size, device="meta").stride()
            )
            # `empty_like` would do the same, but on meta it is slow and imports sympy.
            twin = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
            number = self.tape.tag(twin.untyped_storage())
            if memory.state in (HELD, UNKNOWN):
                whole = Window(number, torch.uint8, (twin.untyped_storage().nbytes(),), (1,), 0)
                self.tape.append(Op(_given, (), {}, (), (whole,), (whole,)))
            parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(twin, tensor.requires_grad) if parameter else twin


def _given() -> torch.Tensor:
    """The op of values that an earlier method has given, which this look does not know."""
    raise OutsideTensor("it reads values that another module's method gives")


class _Run(Run):
    """One run of `reset_parameters`, whose effects are told even if it raises."""

    def __init__(
        self, module: nn.Module, held: Callable[[nn.Module], Held], ours: set[int], grad: bool
    ) -> None:
        self.is_ours = lambda tensor: id(tensor) in ours
        super().__init__([Call(module, "reset_parameters")], self.is_ours, grad=grad)
        self.shadows = _Shadows(self.tape, held)
        self.doubt = ""
        self.effects: dict[tuple[str, str], Effect] = {}
        self._held = held

    def go(self) -> None:
        try:
            self.record()
        finally:
            try:
                if not self._problem:
                    self.effects = dict(self._found())
            finally:
                self.restore()

    def _make_recorder(self) -> TrialRecorder:
        self._recorder = _Recorder(self)
        return self._recorder

    def _method(self, module: nn.Module, call: Call) -> Callable | None:
        method = self._callable(module, call)
        if method is None:
            return None

        def watched() -> None:
            with _Mixed(self.tape), _Elsewhere(self):
                method()

        return watched

    def _found(self) -> Iterator[tuple[tuple[str, str], Effect]]:
        places: dict[int, tuple[str, str]] = {}
        shadows = list(below(self.calls[0].module, lambda module: id(module) in self.shadows.made))
        for path, module in shadows:
            for name, twin in self._before(module).items():
                places.setdefault(id(twin), (path, name))
        for path, module in shadows:
            before = self._before(module)
            after = dict(named(self.shadows.of(module)))
            for name, tensor in after.items():
                effect = self._effect(tensor, before.get(name), (path, name), places)
                if effect is not None:
                    attribute = name in object.__getattribute__(self.shadows.of(module), "__dict__")
                    yield (path, name), effect._replace(attribute=attribute)
            for name in before.keys() - after.keys():
                yield (path, name), Effect(None)

    def _before(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The twins that a module had before the method ran."""
        found = {name: self.shadows.twin_of(tensor) for name, tensor in named(module)}
        moved = {name: self.shadows.stand_in(memory) for name, memory in (self._held(module) or {}).items()}
        return {name: twin for name, twin in {**found, **moved}.items() if twin is not None}

    def _effect(
        self,
        tensor: torch.Tensor,
        before: torch.Tensor | None,
        key: tuple[str, str],
        places: dict[int, tuple[str, str]],
    ) -> Effect | None:
        seen = window_of(tensor, self.tape)
        fresh = tensor is not before
        same_as = places.setdefault(id(tensor), key)
        put = tensor if fresh else None
        if seen is None:
            # Still on meta, or real: made by an op that has no meta kernel.
            state = META if tensor.device.type == "meta" else HELD
            return Effect(state, put, same_as if same_as != key else None) if fresh else None
        writers = [k for k in self.tape.storages[seen.storage].writers if not _is_given(self.tape.ops[k])]
        if not fresh and not writers:
            return None
        slice_ = self.tape.slice([seen.storage])
        unwritten = seen.numel() and (self.tape.unwritten(seen) or first_unread(self.tape, seen) is not None)
        known = not unwritten and not any(self.tape.ops[k].func is _given for k in slice_)
        written = signature(self.tape, seen) if known and writers else None
        return Effect(EMPTY if unwritten else HELD, put, same_as if same_as != key else None, written)


class _Recorder(TrialRecorder):
    """Notices where a method decides by values that nobody has written."""

    def __init__(self, run: _Run) -> None:
        super().__init__(run.tape, run.is_ours)
        self._run = run

    def memory_of(self, tensor: torch.Tensor, reader: str) -> torch.UntypedStorage:
        asked = window_of(tensor)
        if self.tape.unwritten(asked) or first_unread(self.tape, asked) is not None:
            self._run.doubt = f"it reads uninitialized memory ({reader})"
        return super().memory_of(tensor, reader)


def _is_given(op: Op) -> bool:
    """Whether an op stands for what was there before the method ran."""
    return op.func is _given or getattr(op.func, "__module__", None) == Shadows.__module__


class _Mixed(TorchDispatchMode):
    """Lets ops fail that take tensors on meta and others, as they do in torch."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            tensors = tensors_in(args, kwargs or {})
            far = [tensor for tensor in tensors if tensor.device.type == "meta" and tag_of(tensor) is None]
            if far and len(far) < len(tensors):
                self._ask(func, args, kwargs or {}, {id(tensor) for tensor in far})
                # Torch then does it on meta, whatever it writes to.
                with plain_torch():
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _ask(func: Any, args: tuple, kwargs: dict, far: set[int]) -> None:
        """Let torch do the op with small tensors on the same devices; raise what it says about them."""

        def small(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                device = "meta" if id(value) in far else "cpu"
                return torch.ones((1,) * value.dim(), dtype=value.dtype, device=device)
            return type(value)(map(small, value)) if type(value) in (list, tuple) else value

        with plain_torch():
            try:
                func(*map(small, args), **{name: small(value) for name, value in kwargs.items()})
            except Exception as error:
                if "meta" in str(error):
                    raise


class _Elsewhere(TorchFunctionMode):
    """Notices what asks for an accelerator by name: whether there is one decides what happens."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for value in (getattr(func, "__name__", ""), *args, *(kwargs or {}).values()):
            kind = value.type if isinstance(value, torch.device) else value
            if isinstance(kind, str) and kind.partition(":")[0] in _ACCELERATORS:
                self._run.doubt = f"it works on {kind}"
        return func(*args, **(kwargs or {}))
