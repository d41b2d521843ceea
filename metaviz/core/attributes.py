"""Every place where a module holds a tensor: its registered slots, and those that torch never lists.

`Module.to_empty` and `Module.to` see `_parameters` and `_buffers` only. A tensor in a plain attribute, a
list, a dict, a dataclass, a partial or an unregistered module stays behind; here it is found, and can be
re-pointed.

Looking runs no code of the objects that are looked at: it reads instance dictionaries, `__slots__`
descriptors and the base classes' own iterators. Their properties, `__getattr__`, `__iter__`, `__eq__` and
`__len__` never run.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

# What every module has: its registries and hooks. Only the hooks can hold a tensor that is not registered.
STANDARD = frozenset(vars(nn.Module()))
HOOKS = frozenset(name for name in STANDARD if name.endswith("_hooks"))
# Values that cannot hold a tensor, named so that the common case costs one set lookup.
_NUMBERS = (int, float, bool, str, bytes, complex, type(None), range, slice)
_CODE = (type, types.BuiltinFunctionType, types.ModuleType)
ATOMS = frozenset((*_NUMBERS, *_CODE, types.GeneratorType, torch.dtype, torch.device, torch.Size))
MAX_DEPTH = 16
MAX_ENTRIES = 100_000
MAX_VISITS = 20_000


class Slot:
    """One place that holds a tensor.

    Attributes:
        name: Where it is, relative to its module: `"weight"`, `"cache['cos'][0]"`, `"layers[0].bias"`.
        kind: `"parameter"`, `"buffer"` or `"attribute"`.
        tensor: The tensor that the slot holds.
        persistent: Whether a state dict holds it; None unless it is a buffer.
        reference: True for an attribute that holds a tensor which the model has registered, such as
            `nn.LSTM._flat_weights`.
    """

    __slots__ = ("_put", "kind", "name", "persistent", "reference", "tensor")

    def __init__(
        self,
        name: str,
        kind: str,
        tensor: torch.Tensor,
        put: Callable[[Any], object] | None,
        persistent: bool | None = None,
        reference: bool = False,
    ):
        self.name = name
        self.kind = kind
        self.tensor = tensor
        self.persistent = persistent
        self.reference = reference
        self._put = put

    @property
    def settable(self) -> bool:
        """Whether the slot can be pointed at another tensor."""
        return self._put is not None

    def set(self, tensor: torch.Tensor) -> None:
        """Point the slot at another tensor.

        Raises:
            TypeError: The holder cannot change: a tuple, a frozenset, a frozen dataclass.
        """
        if self._put is None:
            raise TypeError(
                f"Cannot set {self.name!r}: a tuple, a frozenset or a frozen dataclass holds it. "
                "Keep the tensor in a list or a dict, or register it: module.register_buffer(name, tensor)."
            )
        self._put(tensor)
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, {self.kind!r}, settable={self.settable})"


class Trouble(NamedTuple):
    """An attribute that could not be looked through."""

    name: str
    cls: str
    reason: str


class _TooWide(Exception):
    """A container has more entries than are looked at, and some could hold a tensor."""


def slots(module: nn.Module, registered: Collection[int] | None = None) -> Iterator[Slot]:
    """Every tensor that one module holds itself: parameters, buffers, then those in plain attributes.

    Registered children are not entered; a module hidden in a plain list or attribute is.

    Args:
        module: The module whose own slots are wanted.
        registered: `registered_ids(root)` of the model around it. By default only what is registered in
            `module` and below counts: an unregistered link to a parent (`self.parent = [parent]`) then looks
            like a hidden module.

    Example:
        >>> [slot.name for slot in slots(nn.Linear(2, 3, device="meta"))]
        ['weight', 'bias']
    """
    space = object.__getattribute__(module, "__dict__")
    # A constructor that never called super().__init__() has none of these.
    parameters, buffers = space.get("_parameters", {}), space.get("_buffers", {})
    for name, tensor in parameters.items():
        if tensor is not None:
            yield Slot(name, "parameter", tensor, _item(parameters, name))
    transient = space.get("_non_persistent_buffers_set", ())
    for name, tensor in buffers.items():
        if tensor is not None:
            yield Slot(name, "buffer", tensor, _item(buffers, name), persistent=name not in transient)
    found = suspects(space)
    if found:
        scanner = Scanner(lambda: registered_ids(module) if registered is None else registered)
        for slot in scanner.scan(space, found):
            if isinstance(slot, Slot):
                yield slot


def registered_ids(root: nn.Module) -> set[int]:
    """The ids of every module below `root`, itself included, and of all their parameters and buffers."""
    ids = {id(root)}
    stack = [root]
    while stack:
        space = object.__getattribute__(stack.pop(), "__dict__")
        ids.update(map(id, space.get("_parameters", {}).values()))
        ids.update(map(id, space.get("_buffers", {}).values()))
        for child in space.get("_modules", {}).values():
            if id(child) not in ids and issubclass(type(child), nn.Module):
                ids.add(id(child))
                stack.append(child)
    ids.discard(id(None))
    return ids


def suspects(space: dict[str, Any]) -> list[str]:
    """The names in a module's `__dict__` whose values could hold a tensor; most modules have none."""
    return [
        name
        for name in space
        if (name not in STANDARD or (name in HOOKS and space[name])) and type(space[name]) not in ATOMS
    ]


class Scanner:
    """Looks for tensors through plain attributes, each object at most once in the life of a scanner.

    Args:
        registered: Gives the ids of the modules and tensors that are registered in the model: its modules are
            not entered, its tensors are yielded as references. Called once, and only if one is met at all.
    """

    def __init__(self, registered: Callable[[], Collection[int]]):
        self._registered = functools.cache(registered)
        self._seen: set[int] = set()
        self._openers: dict[type, Callable | None] = {}

    def scan(self, space: dict[str, Any], names: list[str]) -> Iterator[Slot | Trouble]:
        """Depth first, in the order of `names`.

        Args:
            space: The `__dict__` of a module.
            names: Which of its entries to look through, such as `suspects(space)`.
        """
        stack = [(name, space[name], _item(space, name), 0) for name in reversed(names)]
        visits = 0
        while stack:
            name, value, put, depth = stack.pop()
            if issubclass(type(value), torch.Tensor):
                yield Slot(name, "attribute", value, put, reference=id(value) in self._registered())
                continue
            opener = _open_hooks if name in HOOKS else self._opener(type(value))
            if opener is None or id(value) in self._seen:
                continue
            if opener is _open_module and id(value) in self._registered():
                continue
            self._seen.add(id(value))
            visits += 1
            if visits > MAX_VISITS:
                yield Trouble(name, type(value).__name__, _limit(f"{MAX_VISITS:,} objects"))
                return
            if depth == MAX_DEPTH:
                yield Trouble(name, type(value).__name__, _limit(f"{MAX_DEPTH} levels"))
                continue
            try:
                inner = [(name + step, child, put) for step, child, put in opener(value)]
            except _TooWide:
                yield Trouble(name, type(value).__name__, f"it has more than {MAX_ENTRIES:,} entries")
                continue
            except Exception as error:
                yield Trouble(name, type(value).__name__, f"it raised {type(error).__name__} when looked at")
                continue
            # A hidden module is as deep as its author made it, and never endless: each object is seen once.
            deeper = depth if opener is _open_module else depth + 1
            stack.extend((step, child, put, deeper) for step, child, put in reversed(inner))

    def _opener(self, cls: type) -> Callable | None:
        try:
            return self._openers[cls]
        except KeyError:
            opener = self._openers[cls] = _find_opener(cls)
            return opener


Entries = Iterator[tuple[str, Any, Callable[[Any], object] | None]]


def _item(holder: Any, key: Any) -> Callable[[Any], object]:
    return functools.partial(operator.setitem, holder, key)


def _limit(what: str) -> str:
    return f"only the first {what} of this attribute were looked through"


def _open_module(module: nn.Module) -> Entries:
    space = object.__getattribute__(module, "__dict__")
    for registry in ("_parameters", "_buffers", "_modules"):
        held = space.get(registry, {})
        for name, value in held.items():
            yield f".{name}", value, _item(held, name)
    for name in suspects(space):
        yield f".{name}", space[name], _item(space, name)


def _open_dict(value: dict) -> Entries:
    for index, (key, child) in enumerate(_possible(dict.items(value), dict.__len__(value))):
        yield f"[{_key(key, index)}]", child, _item(value, key)


def _open_hooks(value: dict) -> Entries:
    # Their keys count all hooks of the process: a place in the order is the same in every build.
    for index, (key, hook) in enumerate(dict.items(value)):
        yield f"[{index}]", hook, _item(value, key)


def _open_list(value: list | deque) -> Entries:
    base = list if issubclass(type(value), list) else deque
    for index, child in _possible(enumerate(base.__iter__(value)), base.__len__(value)):
        yield f"[{index}]", child, _item(value, index)


def _open_tuple(value: tuple) -> Entries:
    for index, child in _possible(enumerate(tuple.__iter__(value)), tuple.__len__(value)):
        yield f"[{index}]", child, None


def _open_set(value: set | frozenset) -> Entries:
    base = set if issubclass(type(value), set) else frozenset
    for index, child in _possible(enumerate(base.__iter__(value)), base.__len__(value)):
        yield f"{{{index}}}", child, functools.partial(_replace, value, child) if base is set else None


def _replace(holder: set, old: Any, new: Any) -> None:
    holder.add(new)
    holder.discard(old)


def _open_partial(value: functools.partial) -> Entries:
    yield ".func", value.func, None
    for index, child in enumerate(value.args):
        yield f".args[{index}]", child, None
    for name, child in value.keywords.items():
        yield f".keywords[{name!r}]", child, _item(value.keywords, name)


def _open_function(value: types.FunctionType) -> Entries:
    if str(value.__module__).partition(".")[0] in _CLOSED:
        return
    for index, cell in enumerate(value.__closure__ or ()):
        try:
            child = cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
        yield f".__closure__[{index}].cell_contents", child, functools.partial(setattr, cell, "cell_contents")
    for index, child in enumerate(value.__defaults__ or ()):
        yield f".__defaults__[{index}]", child, None


def _open_method(value: types.MethodType) -> Entries:
    yield ".__self__", value.__self__, None


def _open_object(value: Any) -> Entries:
    cls = type(value)
    params = type.__getattribute__(cls, "__dict__").get("__dataclass_params__")
    frozen = params is not None and params.frozen
    if type.__getattribute__(cls, "__dictoffset__"):
        space = object.__getattribute__(value, "__dict__")
        for name, child in _possible(space.items(), len(space)):
            yield f".{name}", child, None if frozen else _item(space, name)
    for base in type.__getattribute__(cls, "__mro__"):
        for name, member in type.__getattribute__(base, "__dict__").items():
            # SimpleNamespace lists its own `__dict__` as a member, which was read above.
            if type(member) is types.MemberDescriptorType and not name.startswith("__"):
                try:
                    child = member.__get__(value)
                except AttributeError:
                    continue
                yield f".{name}", child, None if frozen else functools.partial(member.__set__, value)


def _possible(entries: Iterable[tuple[Any, Any]], length: int) -> list[tuple[Any, Any]]:
    """The (key, value) pairs whose values could hold a tensor; a vocabulary of words has none."""
    some = [entry for entry in islice(entries, MAX_ENTRIES) if type(entry[1]) not in ATOMS]
    if some and length > MAX_ENTRIES:
        raise _TooWide
    return some


def _key(key: Any, index: int) -> str:
    """A dict key as code. One of a class that is not built in is named by it: its repr is code of theirs."""
    if type(key) in (str, int, float, bool, bytes, type(None)):
        return repr(key)
    if type(key) is tuple:
        return "(" + ", ".join(_key(each, index) for each in key) + ("," if len(key) == 1 else "") + ")"
    return f"<{type(key).__name__} {index}>"


_OPENERS: tuple[tuple[type | tuple[type, ...], Callable], ...] = (
    (nn.Module, _open_module),
    (dict, _open_dict),
    ((list, deque), _open_list),
    (tuple, _open_tuple),
    ((set, frozenset), _open_set),
    (functools.partial, _open_partial),
    (types.FunctionType, _open_function),
    (types.MethodType, _open_method),
)
# Objects of these packages lead to the whole process (loggers, threads, trainers), not to a module's tensors.
_CLOSED = sys.stdlib_module_names | {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "IPython"}
_OPEN = ("types", "torch.distributions", "torch.optim")


def _find_opener(cls: type) -> Callable | None:
    if cls in ATOMS or issubclass(cls, type):
        return None
    for bases, opener in _OPENERS:
        if issubclass(cls, bases):
            return opener
    home = type.__getattribute__(cls, "__module__")
    if type(home) is not str or (home.partition(".")[0] in _CLOSED and not home.startswith(_OPEN)):
        return None
    slotted = any("__slots__" in type.__getattribute__(base, "__dict__") for base in cls.__mro__)
    return _open_object if type.__getattribute__(cls, "__dictoffset__") or slotted else None
