"""Which methods a module has to initialize itself or others, found without calling anything of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

#: What a module may do for its own tensors, the better known name first.
OWN = ("reset_parameters", "_reset_parameters")
#: What a model may do for all of its modules: with the module as argument, or with none.
MODEL = ("_init_weights", "init_weights")


class Call(NamedTuple):
    """A method of ``module``, called with ``argument`` where that is a module.

    Attributes:
        module: Whose method.
        method: Its name.
        argument: The module that it is told to initialize, or None.
    """

    module: nn.Module
    method: str
    argument: nn.Module | None = None


def lookup(module: nn.Module, name: str) -> Any:
    """What ``module.name`` is made of (a function, a property, a value), None where there is no such thing.

    Reads dictionaries only: properties, `__getattr__` and metaclasses of the model's author do not run.
    """
    space = object.__getattribute__(module, "__dict__")
    if name in space:
        return space[name]
    found = _of_class(type(module), name)
    if found is not None:
        return found
    for group in ("_parameters", "_buffers", "_modules"):
        held = space.get(group)
        if held and name in held:
            return held[name]
    return None


def delegates(module: nn.Module) -> bool:
    """Whether the class answers for attributes that it does not have, as wrappers do."""
    cls = type(module)
    return _of_class(cls, "__getattr__") is not nn.Module.__getattr__ or (
        _of_class(cls, "__getattribute__") is not object.__getattribute__
    )


def _of_class(cls: type, name: str) -> Any:
    for base in type.__getattribute__(cls, "__mro__"):
        space = type.__getattribute__(base, "__dict__")
        if name in space:
            return space[name]
    return None


def own_method(module: nn.Module) -> str | None:
    """The name of the method that initializes the module's own tensors, None if it has none."""
    for name in OWN:
        if lookup(module, name) is not None:
            return name
    return OWN[0] if delegates(module) else None


def model_method(module: nn.Module) -> tuple[str, bool] | None:
    """The method by which a model initializes its modules, and whether it takes the module as its argument."""
    for name in MODEL:
        found = lookup(module, name)
        function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        if callable(function):
            needed = [*_needed(function, skip=not isinstance(found, staticmethod))]
            if len(needed) <= 1 and (not needed or name == MODEL[0]):
                return name, bool(needed)
    return None


def needed_arguments(method: Callable) -> list[str]:
    """The names of the arguments without which a bound method cannot be called."""
    return list(_needed(method, skip=False))


def _needed(function: Callable, skip: bool) -> Iterator[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C
        return
    for parameter in parameters[1:] if skip else parameters:
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            yield parameter.name
