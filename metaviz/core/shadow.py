"""Shadows: copies of modules on which an init method can be tried, so that the modules themselves stay as they are.

A shadow has its module's class and a `__dict__` of its own, with meta twins of the tensors. Its children are made when
something asks for them: trying a method of a model with 20,000 modules must not copy them all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core.attributes import ATOMS
from metaviz.core.replay import plain_torch
from metaviz.core.tape import Op, Tape, Window, window_of

# transformers leaves this on what it has initialized, and skips that from then on.
_DONE = "_is_hf_initialized"
_CONTAINERS = (list, dict, set, tuple, deque, OrderedDict, defaultdict)
# A vocabulary is copied, not looked through.
_WIDE = 10_000
# Of these nothing is put back: they have stand-ins, or belong to the program and not to the model.
_LEFT_ALONE = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


class Shadows:
    """The shadows of one try, and the meta twins of their tensors on one tape.

    Args:
        tape: The tape that the try is recorded on. A twin of a real tensor has its values there, one of a meta tensor
            has none.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.made: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._watched: dict[int, tuple[Any, Any]] = {}
        self._classes: dict[int, tuple[type, dict[str, Any]]] = {}
        self._registries: set[int] = set()

    def of(self, module: nn.Module) -> nn.Module:
        """The shadow of a module.

        Raises:
            TypeError: The class makes no instances without its constructor, such as a scripted module's.
        """
        known = self.made.get(id(module))
        if known is not None:
            return known[1]
        with plain_torch():
            shadow = object.__new__(type(module))
            self.made[id(module)] = module, shadow
            self._watch_class(type(module))
            self._watch_module(module)
            space = object.__getattribute__(module, "__dict__")
            own = object.__getattribute__(shadow, "__dict__")
            for name, value in space.items():
                if name not in (_DONE, "_modules"):
                    # Most of what a module has are empty dicts for hooks.
                    empty = type(value) in (dict, OrderedDict) and not value
                    own[name] = value.copy() if empty else self._copy(value)
            if "_modules" in space:
                own["_modules"] = _Children(space["_modules"], self.of)
            for name in _slot_names(type(module)):
                if hasattr(module, name):
                    object.__setattr__(shadow, name, self._copy(getattr(module, name)))
        return shadow

    def restore(self) -> bool:
        """Put back what a try has set on objects that shadows and modules share, such as a config.

        Returns:
            Whether a module itself was among them: the method has reached it by another way than its shadow.
        """
        trespassed = False
        for held, before in self._watched.values():
            if len(held) != len(before) or not all(map(_is_same, _items(held), _items(before))):
                trespassed = trespassed or id(held) in self._registries
                held.clear()
                (held.extend if isinstance(held, list | deque) else held.update)(before)
        for cls, before in self._classes.values():
            now = type.__getattribute__(cls, "__dict__")
            for name in [name for name in now if name not in before and not name.startswith("__")]:
                type.__delattr__(cls, name)
            for name in [name for name in before if now.get(name) is not before[name]]:
                type.__setattr__(cls, name, before[name])
        return trespassed

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta tensor that stands for ``tensor``; views of one storage have twins on one storage.

        Tensors without a plain storage (sharded, sparse, quantized) are given back as they are.
        """
        if is_lazy(tensor):
            return type(tensor)(device="meta", dtype=tensor.dtype)
        if not is_plain(tensor):
            return tensor
        window = Window(
            self._storage(tensor), tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )
        twin = window.on(self._storages[tensor.untyped_storage()._cdata])
        if type(tensor) is not torch.Tensor:
            twin = torch.Tensor._make_subclass(type(tensor), twin, False)
        twin.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        twin.__dict__.update({name: value for name, value in tensor.__dict__.items() if name != _DONE})
        return twin

    def twin_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The twin that ``tensor`` has in the shadows made so far."""
        known = self._copies.get(id(tensor))
        return None if known is None else known[1]

    def _storage(self, tensor: torch.Tensor) -> int:
        """The number on the tape of the storage that stands for that of ``tensor``."""
        real = tensor.untyped_storage()
        known = self._storages.get(real._cdata)
        if known is None:
            known = self._storages[real._cdata] = torch.UntypedStorage(real.nbytes(), device="meta")
            number = self.tape.tag(known)
            if tensor.device.type != "meta":
                whole = Window(number, torch.uint8, (real.nbytes(),), (1,), 0)
                value = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(real)
                self.tape.append(Op(_values, (value,), {}, (), (whole,), (whole,)))
        return window_of(torch.empty(0, dtype=torch.uint8, device="meta").set_(known)).storage

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        known = self._copies.get(id(value))
        if known is not None:
            return known[1]
        if issubclass(kind, torch.Tensor):
            return self._noted(value, self.twin(value))
        if issubclass(kind, nn.Module):
            return self.of(value)
        if kind in _CONTAINERS:
            return self._container(value, kind)
        if kind is types.MethodType and issubclass(type(value.__self__), nn.Module):
            return self._noted(value, types.MethodType(value.__func__, self.of(value.__self__)))
        if kind is functools.partial:
            args, keywords = self._copy(value.args), self._copy(value.keywords)
            return self._noted(value, functools.partial(self._copy(value.func), *args, **keywords))
        for each in (value, *_led_to(value)):
            self._watch(each)
        return self._noted(value, value)

    def _watch_class(self, cls: type) -> None:
        """Note what a class and those below it hold, without torch's own."""
        for base in type.__getattribute__(cls, "__mro__"):
            if base is nn.Module:
                return
            # By identity: a metaclass may forbid hashing.
            if id(base) not in self._classes and not _module_of(base).startswith("torch."):
                space = dict(type.__getattribute__(base, "__dict__"))
                self._classes[id(base)] = base, space
                for value in space.values():
                    self._watch(value)

    def _watch_module(self, module: nn.Module) -> None:
        """Note what a module itself holds, which a method may know under another name than `self`."""
        space = object.__getattribute__(module, "__dict__")
        for held in (space, *(space.get(group) for group in ("_parameters", "_buffers", "_modules"))):
            if type(held) in (dict, OrderedDict) and id(held) not in self._watched:
                self._watched[id(held)] = held, held.copy()
                self._registries.add(id(held))

    def _watch(self, value: Any) -> None:
        """Note what an object that is not copied holds, the objects and containers below it included."""
        todo = [value]
        while todo and len(self._watched) < _WIDE:
            value = todo.pop()
            kind = type(value)
            if issubclass(kind, nn.Module):
                self._watch_module(value)
            if kind in ATOMS or id(value) in self._watched or issubclass(kind, _LEFT_ALONE):
                continue
            if kind in (list, dict, set, OrderedDict, defaultdict, deque):
                held = value
            elif type.__getattribute__(kind, "__dictoffset__"):
                held = object.__getattribute__(value, "__dict__")
            else:
                continue
            if len(held) <= _WIDE:
                self._watched[id(value)] = held, held.copy()
                todo += held.values() if isinstance(held, dict) else held

    def _container(self, value: Any, kind: type) -> Any:
        if kind is tuple:
            return self._noted(value, tuple(map(self._copy, value)))
        new = self._noted(value, value.copy())
        if len(value) > _WIDE or kind is set:
            return new
        for key, item in list(new.items() if isinstance(new, dict) else enumerate(new)):
            if type(item) not in ATOMS:
                new[key] = self._copy(item)
        return new

    def _noted(self, value: Any, twin: Any) -> Any:
        # The original is kept, too, so that no other object gets its id.
        self._copies[id(value)] = value, twin
        return twin


def _led_to(value: Any) -> Iterator[nn.Module]:
    """The modules that a function of a module, or a weak reference, leads back to."""
    if type(value) is weakref.ref and issubclass(type(value()), nn.Module):
        yield value()
    if type(value) is types.FunctionType:
        for cell in value.__closure__ or ():
            # A name may have no value yet.
            with contextlib.suppress(ValueError):
                if issubclass(type(cell.cell_contents), nn.Module):
                    yield cell.cell_contents


class _Children(dict):
    """The children of a shadow, each of which becomes a shadow when it is asked for."""

    def __init__(
        self, children: dict[str, nn.Module | None], shadow: Callable[[nn.Module], nn.Module]
    ) -> None:
        super().__init__(children)
        self._shadow = shadow
        self._given = dict(children)

    def __getitem__(self, name: str) -> Any:
        child = super().__getitem__(name)
        if child is None or child is not self._given.get(name):
            return child
        child = self._shadow(child)
        del self._given[name]
        super().__setitem__(name, child)
        return child

    def __iter__(self) -> Iterator[str]:
        # A dict whose class has an iterator of its own is copied item by item, through the method above.
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            child = self[name]
            del self[name]
            return child
        return super().pop(name, *default)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


def _module_of(cls: type) -> str:
    return str(type.__getattribute__(cls, "__dict__").get("__module__"))


def _items(held: Any) -> Any:
    return held.items() if isinstance(held, dict) else held


def _is_same(a: Any, b: Any) -> bool:
    """Whether two items of a container are the same objects; of a dict they are key and value."""
    if type(a) is tuple and type(b) is tuple and len(a) == len(b):
        return all(map(operator.is_, a, b))
    return a is b


def _slot_names(cls: type) -> list[str]:
    """The names of the `__slots__` of a class, without a question to its metaclass."""
    spaces = [type.__getattribute__(base, "__dict__") for base in type.__getattribute__(cls, "__mro__")]
    return [
        name for space in spaces for name, held in space.items() if type(held) is types.MemberDescriptorType
    ]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage that it is a window on."""
    kind = type(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    if kind is nn.Parameter or kind is torch.Tensor:
        return True
    return not hasattr(kind, "__tensor_flatten__") and all(b.__name__ != "FakeTensor" for b in kind.__mro__)


def _values(value: torch.Tensor) -> torch.Tensor:
    """The op of the values that a real tensor has."""
    return value.clone()
