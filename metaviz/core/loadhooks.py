"""Load hooks: what modules themselves do to a state dict before they load from it.

`torch.nn.utils.parametrizations.weight_norm` renames the entries of old checkpoints so, and models of many libraries
do. The hooks run on tensors on meta, recorded and aside, as init methods do: they can change the state dict, and
nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from metaviz.core.paths import below
from metaviz.core.record import recorded
from metaviz.core.sandbox import run_aside
from metaviz.core.tape import Tape
from metaviz.core.trials import TrialRecorder

#: Seconds that all hooks of a model may take.
SECONDS = 10.0


class Hooked(NamedTuple):
    """A state dict after the hooks.

    Attributes:
        tensors: Its tensors by name.
        notes: What could not be done, in sentences.
    """

    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...]


def has_hooks(model: nn.Module) -> bool:
    """Whether a module of a model wants to change what is loaded into it."""
    return any(True for _ in _with_hooks(model))


def hooked(model: nn.Module, tensors: Mapping[str, torch.Tensor], tape: Tape) -> Hooked:
    """Let the modules of a model do to a state dict what they do before loading from it.

    A class that loads in a way of its own (`_load_from_state_dict`) is not asked: that would load.

    Args:
        model: The model, which stays as it is.
        tensors: On meta and on the tape, by the names of the model.
        tape: What the hooks compute is recorded on it.
    """
    state, notes = dict(tensors), []

    def go() -> None:
        with recorded(lambda: TrialRecorder(tape, lambda _: True)):
            for path, module in _with_hooks(model):
                _run(module, f"{path}." if path else "", state, notes)

    outcome = run_aside(go, SECONDS)
    if not outcome.finished or outcome.error is not None:
        reason = "take too long" if not outcome.finished else f"raise {type(outcome.error).__name__}"
        return Hooked(dict(tensors), (f"The load hooks of the model {reason}, and were left out.",))
    return Hooked(state, tuple(notes))


def _with_hooks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in below(model):
        # A lazy module's own hook would give it its shape.
        if not isinstance(module, LazyModuleMixin) and _hooks(module):
            yield path, module


def _hooks(module: nn.Module) -> dict[int, Any]:
    return object.__getattribute__(module, "__dict__").get("_load_state_dict_pre_hooks") or {}


def _run(module: nn.Module, prefix: str, state: dict[str, torch.Tensor], notes: list[str]) -> None:
    """Run the hooks of a module on the part of a state dict that is its own, as loading does."""
    for hook in _hooks(module).values():
        own = {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
        given = dict(own)
        with _as_it_was(module):
            try:
                hook(own, prefix, {}, True, [], [], [])
            except Exception as error:
                what = getattr(hook, "hook", hook)
                name = getattr(what, "__qualname__", type(what).__name__)
                at = prefix.removesuffix(".") or "the root"
                notes.append(f"The load hook {name} of {at} was left out: it raises {type(error).__name__}.")
                continue
        for name in given:
            del state[name]
        state.update((name, each) for name, each in own.items() if name.startswith(prefix))


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back what a hook sets on its module."""
    space = object.__getattribute__(module, "__dict__")
    before = dict(space)
    held = {name: dict(space[name]) for name in ("_parameters", "_buffers", "_modules")}
    try:
        yield
    finally:
        space.clear()
        space.update(before)
        for name, known in held.items():
            space[name].clear()
            space[name].update(known)
