"""What the tensors of a model hold while a recipe moves it off meta, and what `Module.to_empty` does to that."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from metaviz.core.signature import Signature

META, EMPTY, HELD, UNKNOWN = "on meta", "uninitialized", "holds values", "not known"


class Memory:
    """What one tensor holds at some point of a recipe.

    Attributes:
        tensor: The tensor of the model, or a meta tensor like it.
        state: `META`, `EMPTY`, `HELD` or `UNKNOWN`.
        written: What a method has written into it, where that is known.
        changed: Whether anything has happened to it.
    """

    __slots__ = ("changed", "state", "tensor", "written")

    def __init__(self, tensor: torch.Tensor, state: str, written: Signature | None = None) -> None:
        self.tensor = tensor
        self.state = state
        self.written = written
        self.changed = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """That of a tensor as the model has it."""
        return cls(tensor, META if tensor.device.type == "meta" else HELD)

    def become(self, state: str, written: Signature | None = None) -> None:
        """Hold something else from now on."""
        self.state, self.written, self.changed = state, written, True


Held = dict[str, Memory]


def empty(module: nn.Module, memories: Held, parameters: Callable[[str], bool]) -> tuple[str, str] | None:
    """What `module.to_empty(device=..., recurse=False)` does, slot by slot; the error that stops it, if any.

    Source: torch 2.13, torch/nn/modules/module.py, Module._apply.

    Args:
        module: The module.
        memories: What its slots hold; changed in place.
        parameters: Tells of a slot whether it is a parameter.
    """
    future = torch.__future__
    for name, memory in list(memories.items()):
        tensor = memory.tensor
        plain = type(tensor) in (nn.Parameter, torch.Tensor)
        if not plain and is_lazy(tensor):
            return _refusal(tensor)
        # What `Module._apply` puts into place of a parameter, or a parameter into whose place it puts other memory.
        swaps = future.get_swap_module_params_on_conversion() or (
            not plain and is_traceable_wrapper_subclass(tensor)
        )
        stays = memory.state != META and not future.get_overwrite_module_params_on_conversion()
        state = EMPTY if tensor.numel() else HELD
        if parameters(name) and swaps:
            if _is_watched(tensor, module):
                return "RuntimeError", f"_apply(): Couldn't swap {type(module).__name__}.{name}"
            memory.become(state)
        elif parameters(name) and stays:
            memory.become(state)
        else:
            memories[name] = Memory(tensor, state)
    return None


def _is_watched(tensor: torch.Tensor, module: nn.Module) -> bool:
    """Whether a weak reference hinders swapping; a recurrent layer lets go of its own before."""
    own = object.__getattribute__(module, "__dict__").get("_flat_weight_refs") or ()
    return any(all(ref is not each for each in own) for ref in weakref.getweakrefs(tensor))


def _refusal(tensor: torch.Tensor) -> tuple[str, str]:
    """The error that torch answers with when it is asked for memory like that of a lazy tensor."""
    try:
        with torch._C._EnableTorchFunction():
            torch.empty_like(type(tensor)(device="meta"), device="cpu")
    except Exception as error:
        return type(error).__name__, str(error)
    return "ValueError", ""
