"""Load hooks: what modules themselves do to a state dict before they load from it.

`torch.nn.utils.parametrizations.weight_norm` renames the entries of old checkpoints so, and models of many libraries
do. A hook runs aside, on shadows of its modules and on meta tensors, and what it computes is recorded: it can change
the state dict, and nothing else.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from metaviz.core.paths import below
from metaviz.core.record import recorded
from metaviz.core.sandbox import run_aside
from metaviz.core.shadow import Shadows
from metaviz.core.tape import Tape, Window, window_of
from metaviz.core.trials import StrictRecorder
from metaviz.core.written import first_unread

aten = torch.ops.aten

#: Seconds that all hooks of a model may take.
SECONDS = 10.0

_STORED = "stored"
_COPIES = {aten.clone.default, aten.copy_.default}
_LONGEST = 200


class Hooked(NamedTuple):
    """A state dict after the hooks.

    Attributes:
        tensors: Its tensors by name. What no hook has changed is the same object as before.
        notes: What could not be done, in sentences.
    """

    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...]


def has_hooks(model: nn.Module) -> bool:
    """Whether a module of a model wants to change what is loaded into it."""
    return any(True for _ in _with_hooks(model))


def hooked(model: nn.Module, tensors: Mapping[str, torch.Tensor], tape: Tape) -> Hooked:
    """Let the modules of a model do to a state dict what they do before loading from it.

    Modules are visited as `torch.nn.Module.load_state_dict` visits them, and a hook sees the names below its module. A
    hook that fails is left out as a whole. A class that loads in a way of its own (`_load_from_state_dict`) is not
    asked: that would load.

    Args:
        model: The model, which stays as it is.
        tensors: On meta and on the tape, by the names of the model. They are not written to.
        tape: What the hooks compute is recorded on it.
    """
    work = _Work(tape, tensors)
    outcome = run_aside(lambda: work.run(model), SECONDS)
    if not outcome.finished or outcome.error is not None:
        reason = "take too long" if not outcome.finished else f"raise {type(outcome.error).__name__}"
        return Hooked(dict(tensors), (f"The load hooks of the model {reason}, and were left out.",))
    return Hooked(work.state, tuple(work.notes))


def _with_hooks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in below(model):
        # A lazy module's own hook would give it its shape.
        if not isinstance(module, LazyModuleMixin) and _hooks(module):
            yield path, module


def _hooks(module: nn.Module) -> dict[int, Any]:
    return object.__getattribute__(module, "__dict__").get("_load_state_dict_pre_hooks") or {}


class _LeftOut(Exception):
    """Why what a hook does cannot be used."""


class _StoredWritten(RuntimeError):
    """A hook writes to what is stored."""


class _Recorder(StrictRecorder):
    """Lets a hook write to nothing that is stored, for the tape could not take that back."""

    def __init__(self, tape: Tape, stored: set[int]) -> None:
        super().__init__(tape, lambda _: True)
        self._stored = stored

    def guard(self, tensor: torch.Tensor) -> None:
        """Raise if ``tensor`` has no stand-in, or is stored."""
        super().guard(tensor)
        self._keep([window_of(tensor)])

    def _append(self, func, args, kwargs, reads, writes, *rest) -> None:
        self._keep(writes)
        super()._append(func, args, kwargs, reads, writes, *rest)

    def _hold(self, window: Window, value: torch.Tensor) -> None:
        self._keep([window])
        super()._hold(window, value)

    def _keep(self, written: Any) -> None:
        if any(window.storage in self._stored for window in written):
            self._stop(_STORED, "it writes to a stored tensor", _StoredWritten)


class _Work:
    """A state dict on its way through the hooks."""

    def __init__(self, tape: Tape, tensors: Mapping[str, torch.Tensor]) -> None:
        self.state, self.notes = dict(tensors), []
        self._tape = tape

    def run(self, model: nn.Module) -> None:
        """Run all hooks."""
        for path, module in _with_hooks(model):
            for hook in list(_hooks(module).values()):
                self._apply(hook, module, path)

    def _apply(self, hook: Any, module: nn.Module, path: str) -> None:
        prefix = f"{path}." if path else ""
        given = {name: tensor for name, tensor in self.state.items() if name.startswith(prefix)}
        code = getattr(hook, "hook", hook)
        called = f"The load hook {getattr(code, '__qualname__', type(code).__name__)} of {path or 'the root'}"
        begins = len(self._tape.ops)
        try:
            found, errors = self._result(hook, module, prefix, given)
        except _LeftOut as reason:
            self.notes.append(f"{called} was left out: {reason}.")
            found, errors = given, []
        self._forget(begins, found)
        if errors:
            self.notes.append(f"{called} says: {str(errors[0]).partition(chr(10))[0][:_LONGEST]}")
        for name in given:
            del self.state[name]
        self.state.update(found)

    def _forget(self, begins: int, found: Mapping[str, torch.Tensor]) -> None:
        """Let go of what a hook has computed for nothing: it may hold the values of a model that is real."""
        needed = set(self._tape.slice(window_of(tensor).storage for tensor in found.values()))
        for number in range(begins, len(self._tape.ops)):
            if number not in needed:
                self._tape.ops[number].args, self._tape.ops[number].kwargs = (), {}

    def _result(
        self, hook: Any, module: nn.Module, prefix: str, given: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list]:
        """What a hook makes of a state dict, and what it complains about."""
        for copied in (False, True):
            recorder = _Recorder(self._tape, {window_of(tensor).storage for tensor in given.values()})
            shadows, errors, failed = Shadows(self._tape), [], None
            try:
                with recorded(lambda recorder=recorder: recorder):
                    # Not the tensors themselves: `unsqueeze_` and others change those without writing.
                    own = {
                        name: tensor.clone() if copied else tensor.detach() for name, tensor in given.items()
                    }
                    kept = {id(own[name]): (own[name], window_of(own[name]), given[name]) for name in given}
                    _aimed_at_shadows(hook, module, shadows)(own, prefix, {}, True, [], [], errors)
            except Exception as error:
                failed = error
            trespassed = shadows.restore()
            # Copies of everything are made for those few hooks only that write to what they are given.
            if copied or recorder.problem is None or recorder.problem[0] != _STORED:
                break
        if recorder.problem is not None:
            raise _LeftOut(recorder.problem[1])
        if failed is not None:
            raise _LeftOut(f"it raises {type(failed).__name__}")
        if trespassed:
            raise _LeftOut("it changes a module of the model")
        return self._settled(own, prefix, kept, recorder), errors

    def _settled(
        self, found: dict[Any, Any], prefix: str, kept: dict[int, tuple], recorder: StrictRecorder
    ) -> dict[str, torch.Tensor]:
        """The entries that loading would go on with, those that are unchanged as they were given."""
        settled = {}
        for name, value in found.items():
            if not isinstance(name, str) or not name.startswith(prefix):
                continue
            if not isinstance(value, torch.Tensor):
                raise _LeftOut(f"it makes an object of type {type(value).__name__} of {name}")
            value = value if value.is_meta else recorder.twin(value)
            window = window_of(value, self._tape)
            known = kept.get(id(value))
            if known is not None and window == known[1] and self._writers(window) == 1:
                settled[name] = known[2]
            elif window is not None and self._has_values(window, name):
                settled[name] = value
        return settled

    def _writers(self, window: Window) -> int:
        return len(self._tape.storages[window.storage].writers)

    def _has_values(self, window: Window, name: str) -> bool:
        """Whether a tensor is made of what is stored; not if it is a copy of what the model has not got yet."""
        if not self._tape.unwritten(window) and not first_unread(self._tape, window):
            return True
        # A module that loads a copy of its own values keeps them: nothing is loaded.
        if all(self._tape.ops[k].func in _COPIES for k in self._tape.slice([window.storage])):
            return False
        raise _LeftOut(f"it makes {name} of values that the model does not have yet")


def _aimed_at_shadows(hook: Any, module: nn.Module, shadows: Shadows) -> Callable[..., Any]:
    """A hook that means shadows where it means modules."""
    code = _aimed(getattr(hook, "hook", hook), shadows)
    if type(code) is types.FunctionType:
        code = _rebuilt(code, shadows)
    return functools.partial(code, shadows.of(module)) if getattr(hook, "with_module", False) else code


def _aimed(value: Any, shadows: Shadows) -> Any:
    kind = type(value)
    if issubclass(kind, nn.Module):
        return shadows.of(value)
    if kind is types.MethodType:
        return types.MethodType(value.__func__, _aimed(value.__self__, shadows))
    if kind is functools.partial:
        args = [_aimed(each, shadows) for each in value.args]
        keywords = {name: _aimed(each, shadows) for name, each in value.keywords.items()}
        return functools.partial(_aimed(value.func, shadows), *args, **keywords)
    if kind is weakref.ref and issubclass(type(value()), nn.Module):
        return weakref.ref(shadows.of(value()))
    return value


def _rebuilt(function: types.FunctionType, shadows: Shadows) -> types.FunctionType:
    """A function whose closure and defaults are aimed at shadows."""

    def cell(given: types.CellType) -> types.CellType:
        try:
            return types.CellType(_aimed(given.cell_contents, shadows))
        except ValueError:  # a name that has no value yet
            return given

    closure = None if function.__closure__ is None else tuple(map(cell, function.__closure__))
    defaults = tuple(_aimed(each, shadows) for each in function.__defaults__ or ())
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
    new.__kwdefaults__ = {
        name: _aimed(each, shadows) for name, each in (function.__kwdefaults__ or {}).items()
    }
    return new
