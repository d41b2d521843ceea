"""What can be said about a tensor without touching its values: shape, dtype, device, bytes, storage.

The bytes of a tensor are never more than its storage holds: an expanded buffer counts what is there. A wrapper
such as DTensor counts what this process holds of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin


class Facts:
    """What is known about a tensor; tensors that are alike share one.

    Attributes:
        cls: Name of the class.
        shape: As ints (strings where symbolic); None where it is not known.
        dtype: Such as `"bfloat16"`.
        device: Such as `"meta"` or `"cuda:0"`.
        requires_grad: Whether it is trained.
        numel: Elements.
        nbytes: Bytes, never more than its storage holds.
        held: Bytes that the storage holds.
        room: Elements that the storage holds.
        state: `"lazy"` or `"fake"` for those two kinds of tensors, else `""`.
    """

    __slots__ = (
        "cls",
        "device",
        "dtype",
        "held",
        "nbytes",
        "numel",
        "requires_grad",
        "room",
        "shape",
        "state",
    )

    def __init__(self, cls: str, dtype: Any, device: Any, requires_grad: bool, state: str = ""):
        self.cls = cls
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = str(device)
        self.requires_grad = requires_grad
        self.state = state
        self.shape: tuple[int | str, ...] | None = None
        self.numel = self.nbytes = self.held = self.room = 0

    @property
    def empty(self) -> bool:
        """Whether the tensor holds no values."""
        return self.device == "meta" or self.state != ""

    def sized(self, shape: Any, numel: int, itemsize: int, held: int) -> Facts:
        """Set what follows from the shape and the bytes that the storage holds."""
        self.shape = tuple(dim if type(dim) is int else str(dim) for dim in shape)
        self.numel = numel
        self.held = held
        self.nbytes = min(numel * itemsize, held)
        # A storage that was resized to nothing (sharded training does) says nothing about the parameter.
        self.room = held // itemsize if held and itemsize else numel
        return self


class Refusal(NamedTuple):
    """Why no source is asked, in the form of an answer of one."""

    reason: str
    fix: str | None
    can: bool = False
    source: str | None = None


_REFUSALS = {
    "lazy": Refusal(
        "lazy: its shape is unknown until the first forward",
        "metaviz.materialize(model); model(example_input)",
    ),
    "fake": Refusal(
        "fake: it was made under a FakeTensorMode and can never hold values",
        "with metaviz.recording(): model = ...  # outside of FakeTensorMode",
    ),
}


def unfillable(facts: Facts) -> Refusal | None:
    """Why no source can fill such a tensor, or None where it is worth asking."""
    return _REFUSALS.get(facts.state)


def measure(tensor: torch.Tensor, known: dict[tuple, Facts]) -> tuple[Facts, int]:
    """The facts of a tensor, and an identity of the storage that it views.

    Args:
        tensor: Any tensor, subclasses included.
        known: Facts by what they follow from, kept by the caller.
    """
    cls = type(tensor)
    if cls is nn.Parameter or cls is torch.Tensor:
        try:
            storage = tensor.untyped_storage()
            held = storage.nbytes()
            key = (cls, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, held)
            facts = known.get(key)
            if facts is None:
                facts = Facts(cls.__name__, tensor.dtype, tensor.device, tensor.requires_grad)
                known[key] = facts.sized(tensor.shape, tensor.numel(), tensor.itemsize, held)
            return facts, storage._cdata
        except (NotImplementedError, RuntimeError, TypeError):
            pass  # sparse, opaque and nested tensors have no storage or no plain shape
    facts, storage = _measure_odd(tensor, cls)
    key = tuple(getattr(facts, name) for name in Facts.__slots__)
    return known.setdefault(key, facts), storage


def _measure_odd(tensor: torch.Tensor, cls: type) -> tuple[Facts, int]:
    """The same for a tensor of which any part may be missing."""
    if issubclass(cls, UninitializedTensorMixin):
        return Facts(cls.__name__, tensor.dtype, tensor.device, tensor.requires_grad, "lazy"), id(tensor)
    fake = any(base.__name__ == "FakeTensor" for base in cls.__mro__)
    facts = Facts(
        cls.__name__,
        _read(lambda: tensor.dtype, "unknown"),
        _read(lambda: tensor.device, "unknown"),
        _read(lambda: tensor.requires_grad, False),
        "fake" if fake else "",
    )
    numel = _read(lambda: int(tensor.numel()), 0)
    itemsize = _read(lambda: tensor.itemsize, 0)
    inner = _read(lambda: [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]], [])
    # A DTensor of torch 2.13 lists its device mesh there, too.
    inner = [part for part in inner if issubclass(type(part), torch.Tensor)]
    storages = [_read(part.untyped_storage, None) for part in inner or [tensor]]
    if None in storages:
        stored = numel if tensor.layout == torch.strided else _read(tensor._nnz, numel)
        held, storage = stored * itemsize, id(tensor)
    else:
        held, storage = sum(each.nbytes() for each in storages), storages[0]._cdata
    shape = _read(lambda: tuple(tensor.shape), None)
    facts.sized(shape or (), numel, itemsize, held)
    if shape is None:
        facts.shape = None
    if inner:
        # Packed or sharded: the bytes are those of the parts, the elements those of the whole.
        facts.nbytes, facts.room = held, numel
    return facts, storage


def _read(get, default):
    try:
        return get()
    except Exception:
        return default
