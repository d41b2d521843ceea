"""What a constructor must not notice: answers of Python-level torch calls as they would be on the CPU."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.utils import _device

from metaviz.core.recorder import CPU, META, Recorder
from metaviz.core.replay import plain_torch
from metaviz.core.tape import map_tensors, tag_of, tensors_in

Handler = Callable[[Recorder, Any, tuple, dict], Any]
HANDLERS: dict[Any, Handler] = {}


def _handles(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


def as_cpu(device: Any) -> torch.device:
    """The device that stands for ``device`` while recording: meta where meta is asked for by name, else CPU."""
    # torch.device(0) raises on a machine with no accelerator.
    return META if not isinstance(device, int) and torch.device(device).type == "meta" else CPU


def call_on(device: Any, recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Call ``func`` on what stands for ``device``."""
    device = as_cpu(device)
    before, recorder.by_name = recorder.by_name, device is META
    try:
        return func(*args, **{**kwargs, "device": device})
    finally:
        recorder.by_name = before


@_handles(*_device._device_constructors() - {torch.tensor, torch.as_tensor, torch.asarray})
def _factory(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    device = kwargs.get("device")
    if device is None:
        recorder.is_bare = True
        # A default device set in the constructor: "cuda" would ask a driver that may not be there.
        device = recorder.default_device()
    out = kwargs.get("out")
    if out is not None and recorder.is_taped(out):
        # The result is where `out` is; named, as a default device of the user would add its own.
        return func(*args, **{**kwargs, "device": META})
    return func(*args, **kwargs) if device is None else call_on(device, recorder, func, args, kwargs)


@_handles(Tensor.device.__get__)
def _device_of(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> torch.device:
    return CPU if recorder.is_taped(args[0]) else func(*args)


@_handles(Tensor.is_cpu.__get__)
def _is_cpu(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> bool:
    return recorder.is_taped(args[0]) or func(*args)


# torch.nn.init functions that draw in a loop which depends on the values drawn. On meta they return early: the tape
# takes the call as one op then. Source: torch 2.13, torch/nn/init.py, _no_grad_trunc_normal_.
_COMPOSITES = {fn.__code__: fn for fn in [getattr(init, "_no_grad_trunc_normal_", None)] if fn is not None}


@_handles(Tensor.is_meta.__get__)
def _is_meta(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> bool:
    if not recorder.is_taped(args[0]):
        return func(*args)
    frame = sys._getframe(2)
    composite = _COMPOSITES.get(frame.f_code)
    if composite is None:
        return False
    names = composite.__code__.co_varnames[: composite.__code__.co_argcount]
    recorder.composite(composite, args[0], {name: frame.f_locals[name] for name in names})
    return True


@_handles(Tensor.type)
def _type(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    if len(args) == 1 and not kwargs:
        return func(*args).replace("torch.meta.", "torch.")
    kind = kwargs.get("dtype", args[1] if len(args) > 1 else None)
    if isinstance(kind, str):
        kind = kind.replace("torch.cuda.", "torch.")
    dtype = kind if isinstance(kind, torch.dtype) else getattr(torch, _dtype_name(kind))
    return args[0].to(dtype)


def _dtype_name(kind: Any) -> str:
    """``"float32"`` of ``"torch.FloatTensor"`` or of the class itself."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    stem = name.rsplit(".", 1)[-1].removesuffix("Tensor").lower()
    return {"byte": "uint8", "char": "int8"}.get(stem, stem)


@_handles(Tensor.data_ptr)
def _data_ptr(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> int:
    """An address where the values can be read; one where nothing lies, to compare, where they would take too much."""
    tensor = args[0]
    if not recorder.is_taped(tensor):
        return func(*args)
    return recorder.address_of(tensor) + tensor.storage_offset() * tensor.element_size()


@_handles(Tensor.to)
def _to(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Tensor:
    tensor = args[0]
    device, dtype, again = _parse_to(args[1:], kwargs)
    if not recorder.is_taped(tensor):
        if device is None or tensor.device.type == "meta":
            return func(*args, **kwargs)
        return tensor.to(device=as_cpu(device), dtype=dtype, copy=again)
    if device is not None and as_cpu(device) is META:
        kind = {"dtype": tensor.dtype if dtype is None else dtype}
        return call_on(META, recorder, torch.empty_strided, (tensor.size(), tensor.stride()), kind)
    layout = kwargs.get("memory_format", torch.preserve_format)
    return tensor.to(tensor.dtype if dtype is None else dtype, copy=again, memory_format=layout)


def _parse_to(args: tuple, kwargs: dict) -> tuple[Any, torch.dtype | None, bool]:
    """Device, dtype and copy of the three ways to call ``Tensor.to``."""
    rest = list(args)
    device, dtype, other = kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    elif rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    elif rest:
        device = rest.pop(0)
        if rest and not isinstance(rest[0], bool):
            dtype = rest.pop(0)
    if other is not None:
        device, dtype = other.device, other.dtype
        device = CPU if tag_of(other) is not None else device
    return device, dtype, rest[1] if len(rest) > 1 else kwargs.get("copy", False)


_MOVES = [
    getattr(Tensor, name) for name in ("cpu", "cuda", "xpu", "ipu", "hpu", "mtia") if hasattr(Tensor, name)
]


@_handles(*_MOVES, Tensor.pin_memory, Tensor.share_memory_)
def _stay(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Tensor:
    if recorder.is_taped(args[0]):
        return args[0]
    return args[0] if func in _MOVES and args[0].device.type == "cpu" else func(*args, **kwargs)


@_handles(torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer)
def _bring_data(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Factories that carry data, which a meta build would lose: run for real, keep the result, hand out its twin."""
    device = kwargs.get("device")
    if device is None and func is not torch.from_numpy:
        recorder.is_bare = True
        device = recorder.default_device()
    if device is not None:
        if as_cpu(device) is META:
            return call_on(META, recorder, func, args, kwargs)
        kwargs = {**kwargs, "device": CPU}
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, Tensor) and func is not torch.tensor:
        return data.to(kwargs.get("dtype") or data.dtype, copy=bool(kwargs.get("copy")))
    args, kwargs = map_tensors((args, kwargs), functools.partial(_real, recorder, func))
    with plain_torch():
        real = func(*args, **kwargs)
    twin = recorder.twin(real).requires_grad_(real.requires_grad)
    if func is not torch.tensor and type(data).__name__ == "ndarray":
        recorder.share(twin, real, data)
    return twin


@_handles(Tensor.new_tensor, Tensor.new)
def _bring_data_like(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Tensor:
    like, *rest = args
    carries_data = func is Tensor.new_tensor or (rest and not all(isinstance(item, int) for item in rest))
    if not recorder.is_taped(like) or not carries_data or any(isinstance(item, torch.Size) for item in rest):
        return func(*args, **kwargs)
    data = rest[0] if rest else kwargs.pop("data")
    kwargs = {"dtype": like.dtype, **{k: v for k, v in kwargs.items() if v is not None}}
    return _bring_data(recorder, torch.tensor, (data,), kwargs)


def _real(recorder: Recorder, func: Any, tensor: Tensor) -> Tensor:
    return recorder.value(tensor, func.__name__) if recorder.is_taped(tensor) else tensor


_READERS = [Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__reduce_ex__, Tensor.__dlpack__]


@_handles(*_READERS)
def _read(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    real = _real(recorder, func, args[0])
    if real is not args[0]:
        real.requires_grad_(args[0].requires_grad)
    # Some of these refuse what requires gradients, unless there are none to be had.
    grad = torch.is_grad_enabled()
    with plain_torch(), torch.set_grad_enabled(grad):
        result = func(real, *args[1:], **kwargs)
    if real is not args[0] and func in (Tensor.numpy, Tensor.__array__):
        recorder.share(args[0], real, result)
    return result


@_handles(Tensor.untyped_storage)
def _storage_of(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> torch.UntypedStorage:
    """``pickle`` and ``torch.save`` write the memory itself: for them, and only for them, it has to be real."""
    asker = sys._getframe(3)
    pickles = asker.f_code is Tensor._reduce_ex_internal.__code__ and recorder.is_taped(args[0])
    if pickles and asker.f_back.f_back.f_code is not copy.copy.__code__:
        return recorder.memory_of(args[0], "pickle")
    return func(*args, **kwargs)


_SPARSE = [
    getattr(torch, f"sparse_{kind}_tensor") for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")
]


@_handles(*_SPARSE)
def _sparse(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Sparse tensors have no twin on meta: they are made for real."""
    device = kwargs.get("device")
    if device is not None and as_cpu(device) is META:
        return call_on(META, recorder, func, args, kwargs)
    args, kwargs = map_tensors((args, kwargs), functools.partial(_real, recorder, func))
    with plain_torch():
        return func(*args, **{**kwargs, "device": CPU})


_SOBOL = [
    getattr(torch, f"_sobol_engine_{name}") for name in ("draw", "ff_", "initialize_state_", "scramble_")
]
# C++ code that goes another way for tensors on meta or while a dispatch mode is on, and rounds otherwise there.
# Source: torch 2.13, aten/src/ATen/native/BatchLinearAlgebra.cpp, isTensorSubclassLike.
_ROUNDS_OTHERWISE = [torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_rank]


@_handles(Tensor.apply_, Tensor.map_, Tensor.map2_, torch.unravel_index, *_SOBOL, *_ROUNDS_OTHERWISE)
def _in_reality(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Calls that need the values themselves: done for real, and what they write and give is kept."""
    if not any(recorder.is_taped(tensor) for tensor in tensors_in(args, kwargs)):
        return func(*args, **kwargs)
    real_args, real_kwargs = map_tensors((args, kwargs), functools.partial(_real, recorder, func))
    with plain_torch():
        result = func(*real_args, **real_kwargs)
    if func.__name__.endswith("_"):
        recorder.freeze(args[0], real_args[0])
        return args[0]
    return map_tensors(result, recorder.twin)


@_handles(torch.linalg.matrix_norm, torch.linalg.norm)
def _norm(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Tensor:
    order = kwargs.get("ord", args[1] if len(args) > 1 else None)
    if order in (2, -2, "nuc") and args[0].dim() > 1:
        return _in_reality(recorder, func, args, kwargs)
    return func(*args, **kwargs)


@_handles(Tensor.__getitem__, Tensor.__setitem__)
def _index(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Lists and arrays in an index: torch puts them on the device of the tensor, where meta would lose them."""
    tensor, index, *value = args
    if recorder.is_taped(tensor):
        if type(index) is tuple:
            index = tuple(_listed(recorder, item) for item in index)
        elif not isinstance(index, list) or all(isinstance(item, int) for item in index):
            index = _listed(recorder, index)
    return func(tensor, index, *value)


def _listed(recorder: Recorder, item: Any) -> Any:
    if not isinstance(item, list | tuple | range) and type(item).__name__ != "ndarray":
        return item
    found = _bring_data(recorder, torch.tensor, (item,), {})
    return found if found.dtype in (torch.bool, torch.uint8) else found.long()


@_handles(Tensor.__repr__, Tensor.__format__)
def _print(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> str:
    tensor = args[0]
    if not recorder.is_taped(tensor) or tensor.numel() > 1000:
        with plain_torch():
            return func(*args, **kwargs)
    real = recorder.value(tensor, func.__name__).requires_grad_(tensor.requires_grad and tensor.is_leaf)
    with plain_torch():
        return func(real, *args[1:], **kwargs)


@_handles(Tensor.__deepcopy__)
def _deepcopy(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """As on the CPU: a deepcopy copies a storage once, so that copies of views share memory as the originals do."""
    tensor, memo = args
    if not recorder.is_taped(tensor) or not tensor.is_leaf or type(tensor) is not Tensor:
        return func(*args, **kwargs)
    if id(tensor) in memo:
        return memo[id(tensor)]
    storage = tensor.untyped_storage()
    with torch.no_grad():
        if storage._cdata not in memo:
            flat = torch.empty(0, dtype=torch.uint8, device=META).set_(storage)
            memo[storage._cdata] = flat.clone().untyped_storage()
        blank = torch.empty(0, dtype=tensor.dtype, device=META)
        twin = blank.set_(memo[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        # As torch does it: the copy of a conjugated view has its values in memory.
        twin = twin.conj_physical() if tensor.is_conj() else twin
        twin = twin.neg() if tensor.is_neg() else twin
    twin.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = twin
    return twin


@_handles(Tensor.data.__set__)
def _set_data(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> None:
    tensor, value = args
    recorder.guard(tensor)
    if recorder.is_taped(tensor) and value.device.type == "cpu":
        value = recorder.twin(value)
    elif tensor.device.type == "cpu" and recorder.is_taped(value):
        value = recorder.value(value, "data")
    return func(tensor, value)
