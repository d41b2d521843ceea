"""Recipes that take a whole model off meta by `to_empty` and `reset_parameters`, gone through in thought.

Each goes through the modules in its own order and keeps book of what every slot holds: still on meta, uninitialized
memory, or values. What a method does is rehearsed (`core/rehearsal.py`), for modules alike in a like state once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from metaviz.core.attributes import registered_ids, slots
from metaviz.core.loads import loaded
from metaviz.core.memory import EMPTY, HELD, META, UNKNOWN, Held, Memory, empty
from metaviz.core.methods import delegates, lookup
from metaviz.core.origin import origin_of
from metaviz.core.paths import below, children_of, join
from metaviz.core.rehearsal import Rehearsal, rehearse
from metaviz.core.reset import PATIENCE, Resets
from metaviz.core.signature import Signature, same, signature


class Row(NamedTuple):
    """A slot of the model as it is given."""

    module: nn.Module
    name: str
    path: str
    kind: str
    tensor: torch.Tensor


class Look:
    """What the recipes share: the modules in order, and what has been found out about methods.

    Args:
        model: The root.
        resets: Tells which modules are alike.
    """

    def __init__(self, model: nn.Module, resets: Resets) -> None:
        self.model = model
        self.paths: dict[int, str] = {}
        self.modules: list[nn.Module] = []
        for path, module in below(model):
            self.paths[id(module)] = path
            self.modules.append(module)
        self.ours = registered_ids(model)
        self.rows = list(self._rows())
        self.attributes = any(row.kind == "attribute" for row in self.rows)
        groups: dict[int, list[Row]] = {}
        for row in self.rows:
            if row.kind != "attribute":
                groups.setdefault(id(row.tensor), []).append(row)
        self.tied = [group for group in groups.values() if len(group) > 1]
        self._resets = resets
        self._known: dict[tuple, Rehearsal] = {}
        self._compared: dict[tuple[int, int], bool] = {}
        self._lost = 0.0

    def _rows(self) -> Iterator[Row]:
        for module in self.modules:
            above = self.paths[id(module)]
            for slot in _slots(module, self.ours):
                yield Row(module, slot.name, join(above, slot.name), slot.kind, slot.tensor)

    def rehearse(self, module: nn.Module, held: Callable[[nn.Module], Held], grad: bool) -> Rehearsal:
        """What the method of a module does at this point.

        Args:
            module: The module.
            held: Tells of a module what its slots hold.
            grad: Whether gradients are on.
        """
        if lookup(module, "reset_parameters") is None and not delegates(module):
            return Rehearsal("not callable" if _is_none(module) else "missing")
        key = (self._resets.kind(module), grad, *_states(module, held))
        found = self._known.get(key)
        if found is None:
            if self._lost >= PATIENCE:
                return Rehearsal("unknown", None, "others took too long, so it was not tried")
            began = time.monotonic()
            found = self._known[key] = rehearse(module, held, self.ours, grad)
            if found.state == "unknown":
                self._lost += time.monotonic() - began
        return found

    def differs(self, row: Row, written: Signature | None) -> bool:
        """Whether what a method writes into a slot is known to be other than what the constructor wrote."""
        if written is None:
            return False
        # Methods of modules that are alike write the very same signature.
        key = id(row.tensor), id(written)
        found = self._compared.get(key)
        if found is None:
            found = self._compared[key] = _differs(row, written)
        return found


def _differs(row: Row, written: Signature) -> bool:
    origin = origin_of(row.tensor, row.module, row.name)
    if origin is None:
        return False
    if loaded(origin.tape, origin.window):
        return True
    return same(signature(origin.tape, origin.window), written) is False


def _is_none(module: nn.Module) -> bool:
    """Whether a module has the method, and it is None."""
    spaces = [object.__getattribute__(module, "__dict__")]
    spaces += [
        type.__getattribute__(base, "__dict__") for base in type.__getattribute__(type(module), "__mro__")
    ]
    return any("reset_parameters" in space for space in spaces)


def _slots(module: nn.Module, ours: set[int]) -> list:
    """The slots of a module; none of one whose constructor has not come that far."""
    space = object.__getattribute__(module, "__dict__")
    if not {"_parameters", "_buffers", "_non_persistent_buffers_set"} <= space.keys():
        return []
    return list(slots(module, ours))


def _states(module: nn.Module, held: Callable[[nn.Module], Held]) -> Iterator[tuple]:
    """The state of all memory below a module, and which slots share one."""
    numbers: dict[int, int] = {}
    inside = below(module) if children_of(module) else (("", module),)
    for path, each in inside:
        for name, memory in held(each).items():
            yield path, name, memory.state, numbers.setdefault(id(memory), len(numbers))


class Stop(Exception):
    """A recipe raises something: type name, message, path of the module."""


class Recipe:
    """One recipe going through a model.

    Args:
        look: At the model.
    """

    grad = True

    def __init__(self, look: Look) -> None:
        self.look = look
        self.held: dict[int, Held] = {id(module): {} for module in look.modules}
        self.attributes: dict[int, Held] = {id(module): {} for module in look.modules}
        self.unknown: list[str] = []
        self.warns: set[str] = set()
        self._parameters: set[tuple[int, str]] = set()
        memories: dict[int, Memory] = {}
        for row in look.rows:
            memory = memories.get(id(row.tensor))
            if memory is None:
                memory = memories[id(row.tensor)] = Memory.of(row.tensor)
            group = self.attributes if row.kind == "attribute" else self.held
            group[id(row.module)][row.name] = memory
            if row.kind == "parameter":
                self._parameters.add((id(row.module), row.name))
        self._before = [(memories[id(row.tensor)], memories[id(row.tensor)].state) for row in look.rows]
        self._new: list[tuple[nn.Module, str]] = []

    def run(self) -> None:
        """Go through the model.

        Raises:
            Stop: The recipe raises something.
        """
        raise NotImplementedError

    def of(self, module: nn.Module) -> Held:
        """What the slots of a module hold now."""
        return self.held.get(id(module), {})

    def now(self, module: nn.Module, name: str) -> Memory | None:
        """What a slot holds now, None where there is no such slot any more."""
        return self.held[id(module)].get(name) or self.attributes[id(module)].get(name)

    def is_on_meta(self, module: nn.Module) -> bool:
        """Whether a module itself holds a tensor on meta."""
        return any(memory.state == META for memory in self.of(module).values())

    def empty(self, module: nn.Module) -> None:
        """Give the tensors of a module uninitialized memory.

        Raises:
            Stop: One of them has no size yet, or cannot be swapped.
        """
        error = empty(module, self.of(module), lambda name: (id(module), name) in self._parameters)
        if isinstance(module, nn.RNNBase) and error is None:
            # Its `_apply` makes its lists of weights anew.
            loose = self.attributes[id(module)]
            for name in [name for name in loose if name.startswith("_flat_weights[")]:
                del loose[name]
        if error is not None:
            raise Stop(*error, self.look.paths[id(module)])

    def reset(self, module: nn.Module) -> str:
        """Call the method of a module; the state of the rehearsal.

        Raises:
            Stop: The method raises something.
        """
        found = self.look.rehearse(module, self.of, self.grad)
        if found.state == "unknown":
            self.unknown.append(self.look.paths[id(module)])
            for memory in self.of(module).values():
                memory.become(UNKNOWN)
        self._apply(module, found)
        if found.error is not None:
            raise Stop(*found.error, self.look.paths[id(module)])
        return found.state

    def _apply(self, base: nn.Module, found: Rehearsal) -> None:
        named = {path for key, effect in found.effects.items() for path, _ in (key, effect.same_as or key)}
        modules = dict(below(base)) if named - {""} else {"": base}
        fresh: dict[tuple[str, str], Memory] = {}
        for (path, name), effect in found.effects.items():
            held = (self.attributes if effect.attribute else self.held)[id(modules[path])]
            if self.now(modules[path], name) is None:
                self._new.append((modules[path], name))
            if effect.state is None:
                self.held[id(modules[path])].pop(name, None)
                self.attributes[id(modules[path])].pop(name, None)
            elif effect.tensor is None:
                held[name].become(effect.state, effect.written)
            else:
                other, slot = effect.same_as or ("", "")
                known = fresh.get((other, slot)) or (effect.same_as and self.of(modules[other]).get(slot))
                held[name] = known or Memory(effect.tensor, effect.state, effect.written)
                fresh[path, name] = held[name]

    def told(self) -> dict[str, Any]:
        """What comes of it, by the names of the fields of `Outcome`."""
        error = message = at = None
        try:
            self.run()
        except Stop as stop:
            error, message, at = stop.args
        told: dict[str, Any] = {"error": error, "message": message, "at": at}
        told |= {name: tuple(paths) for name, paths in self._lists(error is not None).items()}
        told["untied"] = tuple(self._untied())
        return told | {"warns": tuple(sorted(self.warns)), "unknown": tuple(self.unknown)}

    def _lists(self, stopped: bool) -> dict[str, list[str]]:
        names = ("moved", "uninitialized", "overwritten", "left", "never", "otherwise")
        found: dict[str, list[str]] = {name: [] for name in names}
        registered, given = set(), set()
        if self.look.attributes:
            registered = {id(memory) for held in self.held.values() for memory in held.values()}
            given = {
                id(before)
                for row, (before, _) in zip(self.look.rows, self._before, strict=True)
                if row.kind != "attribute"
            }
        for row, (before, state) in zip(self.look.rows, self._before, strict=True):
            memory = self.now(row.module, row.name)
            if memory is None:
                continue
            ours = row.kind != "attribute"
            if memory.state == META:
                if not ours and id(memory) not in registered:
                    found["left"].append(row.path)
                elif ours and stopped:
                    found["never"].append(row.path)
                continue
            if memory.state == EMPTY:
                found["uninitialized"].append(row.path)
            if state == HELD and (memory is not before or memory.changed):
                found["overwritten"].append(row.path)
            if state == META and (ours or id(before) not in given):
                found["moved"].append(row.path)
                if memory.state == HELD and self.look.differs(row, memory.written):
                    found["otherwise"].append(row.path)
        for module, name in self._new:
            memory = self.now(module, name)
            if memory is not None and memory.state == EMPTY:
                found["uninitialized"].append(join(self.look.paths[id(module)], name))
        return found

    def _untied(self) -> Iterator[tuple[str, ...]]:
        for group in self.look.tied:
            if len({id(self.now(row.module, row.name)) for row in group}) > 1:
                yield tuple(row.path for row in group)


class Fsdp(Recipe):
    """Source: lightning 2.6, lightning/fabric/utilities/init.py, `_materialize_meta_tensors`."""

    def run(self) -> None:
        """Module by module, parents first: memory, then the method, with gradients on."""
        for module in self.look.modules:
            if not self.is_on_meta(module):
                continue
            self.empty(module)
            if self.reset(module) == "missing":
                message = (
                    f"Materialization requires that the `{type(module).__name__}.reset_parameters` method is "
                    "implemented. This method is used to initialize any children parameters or buffers in this "
                    "module."
                )
                raise Stop("TypeError", message, self.look.paths[id(module)])


class ModelParallel(Recipe):
    """Source: lightning 2.6, lightning/fabric/utilities/init.py, `_materialize_distributed_module`."""

    def run(self) -> None:
        """Memory for all, then the methods, parents first, with gradients on."""
        if not any(map(self.is_on_meta, self.look.modules)):
            return
        for module in self._children_first():
            self.empty(module)
        for module in self.look.modules:
            if self.of(module) and self.reset(module) in ("missing", "not callable"):
                self.warns.add(type(module).__name__)

    def _children_first(self) -> Iterator[nn.Module]:
        """The modules as `Module._apply` comes to them first; emptied memory is as empty when emptied again."""
        stack, seen = [(self.look.model, iter(_distinct(self.look.model)))], {id(self.look.model)}
        while stack:
            module, children = stack[-1]
            child = next(children, None)
            if child is None:
                stack.pop()
                yield module
            elif id(child) not in seen:
                seen.add(id(child))
                stack.append((child, iter(_distinct(child))))


class TorchFsdp(Recipe):
    """Source: torch 2.13, torch/distributed/fsdp/_init_utils.py, `_materialize_meta_module`."""

    grad = False

    def run(self) -> None:
        """Module by module, level by level, also those that hold values: memory, then the method, without gradients."""
        if not any(map(self.is_on_meta, self.look.modules)):
            return
        queue, seen = deque([self.look.model]), {id(self.look.model)}
        while queue:
            module = queue.popleft()
            new = [child for child in _distinct(module) if id(child) not in seen]
            seen.update(map(id, new))
            queue.extend(new)
            if self.of(module):
                self._materialize(module)

    def _materialize(self, module: nn.Module) -> None:
        self.empty(module)
        state = self.reset(module)
        where = self.look.paths[id(module)]
        if state == "missing":
            message = f"'{type(module).__name__}' object has no attribute 'reset_parameters'"
            raise Stop("AttributeError", message, where)
        if state == "not callable":
            kind = type(lookup(module, "reset_parameters")).__name__
            raise Stop("TypeError", f"'{kind}' object is not callable", where)


def _distinct(module: nn.Module) -> list[nn.Module]:
    """The children of a module, each once."""
    return list({id(child): child for child in children_of(module).values() if child is not None}.values())
