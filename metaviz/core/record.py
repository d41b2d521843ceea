"""Recording: run a constructor as if on CPU while every tensor it makes lands on meta and every op on a tape.

Two thread-local modes work together. :class:`_FunctionMode` sees Python-level calls: there the constructor is told that
it runs on CPU, and there values that it brings along are kept. :class:`_DispatchMode` sees aten ops, also those that
C++ code and legacy constructors make: there they are sent to meta and recorded.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from metaviz.core.disguise import HANDLERS, call_on
from metaviz.core.kinds import kind_of
from metaviz.core.living import living
from metaviz.core.origin import remember
from metaviz.core.paths import modules
from metaviz.core.recorder import Recorder, device_context
from metaviz.core.tape import Tape
from metaviz.errors import NestedRecording

VALUE_LIMIT = 64 * 2**20

T = TypeVar("T")
_active = threading.local()


class recording:
    """Context in which every model is built on the meta device, with a tape.

    Inside, constructors run unchanged and believe that they are on the CPU; every tensor that they make has a shape
    and a dtype but no memory, and each op that creates or writes one is recorded. Outside, nothing of the process has
    changed: not the random generators, the default device or dtype, nor any class. Only the calling thread records.

    Args:
        value_limit: Bytes that may be computed for real when the constructor reads values (``.item()``, ``if tensor:``,
            boolean masks). Default 64 MiB.

    Raises:
        NestedRecording: This thread is recording already.
        ValueRead: While inside: the constructor reads values that take more than ``value_limit`` bytes.

    Example:
        >>> with metaviz.recording():
        ...     model = torch.nn.Linear(4, 4)
        >>> model.weight.device
        device(type='meta')
    """

    def __init__(self, *, value_limit: int = VALUE_LIMIT) -> None:
        self.tape = Tape()
        self._value_limit = value_limit
        self._built: list[torch.nn.Module] | None = None

    def __enter__(self) -> recording:
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorded(lambda: Recorder(self.tape, self._value_limit)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            # Nobody hands over what a `with` block has built.
            for module in living(torch.nn.Module) if self._built is None else self._built:
                remember(module, lambda _, tag: tag.tape is self.tape)
        else:
            # Not by assignment: a frozen dataclass forbids that.
            error.with_traceback(_without_our_frames(trace))


@contextlib.contextmanager
def recorded(make: Callable[[], Recorder]) -> Iterator[Recorder]:
    """The modes that make the code inside, in this thread, go through the recorder that ``make`` gives.

    Raises:
        NestedRecording: This thread is recording already.
    """
    if getattr(_active, "recording", False):
        raise NestedRecording(
            "A recording is running in this thread already, and its tape takes in everything that is built here. "
            "Leave out the inner metaviz.build(...) or metaviz.recording(): call the constructor itself."
        )
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, _active, "recording", False)
        _active.recording = True
        stack.enter_context(_restored_process_state())
        recorder = make()
        stack.callback(recorder.close)
        stack.enter_context(_FunctionMode(recorder))
        stack.enter_context(_DispatchMode(recorder))
        yield recorder


def build(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call ``fn(*args, **kwargs)`` and return its model on the meta device, with a tape.

    Args:
        fn: A module class, or any callable that makes one (``LlamaForCausalLM``, ``AutoModel.from_config``).
        *args: Passed to ``fn``.
        **kwargs: Passed to ``fn``.

    Returns:
        What ``fn`` returns. Its tensors are on meta; :func:`metaviz.materialize` gives chosen parts the values that
        an ordinary CPU build with the current seed would have given.

    Raises:
        NestedRecording: Called within another recording of this thread.
        ValueRead: The constructor reads values that take more than 64 MiB to compute; use
            ``with metaviz.recording(value_limit=...)`` then.

    Example:
        >>> model = metaviz.build(torch.nn.Linear, 8192, 8192)
        >>> model.weight.is_meta
        True
    """
    __tracebackhide__ = True
    with recording() as rec:
        result = fn(*args, **kwargs)
        if isinstance(result, torch.nn.Module):
            rec._built = [module for _, module in modules(result)]
        return result


class _FunctionMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self._recorder, func, args, kwargs or {})
        if kwargs:
            if kwargs.get("device") is not None:
                return call_on(kwargs["device"], self._recorder, func, args, kwargs)
            return func(*args, **kwargs)
        return func(*args)


class _DispatchMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap the method below to keep the compiler out. Nothing here is ever compiled, and the wrapper
        # costs as much as recording an op does.
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = kind_of(func)
        if kind.window:
            return func(*args, **(kwargs or {}))
        # Ops that come straight from C++ arrive with the function mode still on: its disguise is not for us.
        with torch._C.DisableTorchFunction():
            return self._recorder.run(func, kind, args, kwargs or {})


@contextlib.contextmanager
def _restored_process_state():
    """Put the default device, the default dtype and the grad mode back; make CPU the default device in between."""
    context, dtype, grad = device_context(), torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        # Libraries ask for the default device to decide whether they initialize at all.
        modes = _get_current_function_mode_stack()
        around = [mode.device.type for mode in modes if isinstance(mode, DeviceContext)]
        with torch.device("cpu") if around and around[-1] != "cpu" else contextlib.nullcontext():
            yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if device_context() is not context:
            torch.set_default_device(context and context.device)
            if context is None:
                # In torch 2.6, get_default_device raises where this is None.
                del torch._GLOBAL_DEVICE_CONTEXT.device_context


def _without_our_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """``trace`` without the frames of this package, and of the calls from here into torch."""
    if trace is None:
        return None
    rest = _without_our_frames(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return rest
    return types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


_OURS = (os.path.dirname(__file__) + os.sep, torch._ops.__file__)
