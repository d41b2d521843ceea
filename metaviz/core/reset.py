"""Reset: what the modules' own init methods would do to each tensor, found by trying them on shadows.

Three sorts of methods write a tensor: one of its own module (`reset_parameters`, else `_reset_parameters`), the same of
a module above it, and the one by which a model initializes all of its modules (`_init_weights(module)`, which in
transformers restores a subtree, too). They run in this order, children before parents; whoever writes last decides.
Modules that look alike are tried once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core.attributes import ATOMS, STANDARD, registered_ids
from metaviz.core.methods import MODEL, Call, model_method, own_method
from metaviz.core.paths import children_of, join
from metaviz.core.shadow import is_plain
from metaviz.core.tryout import Trial, Write, attempt

#: Seconds that methods which never end may cost in all; after that, no other one is tried.
_PATIENCE = 5.0


class Step(NamedTuple):
    """A method that may write a tensor: the trial, and where the tensor is below the module it was tried on."""

    call: Call
    trial: Trial
    key: tuple[str, str]

    @property
    def write(self) -> Write | None:
        """What it does to the tensor."""
        return self.trial.writes.get(self.key)

    @property
    def way(self) -> str:
        """What sort of method it is: ``"reset"``, ``"private"`` or ``"init_weights"``."""
        return {"reset_parameters": "reset", "_reset_parameters": "private"}.get(
            self.call.method, "init_weights"
        )


class _At(NamedTuple):
    path: str
    parent: nn.Module | None
    order: int


_Writers = tuple[tuple[nn.Module, tuple["Step | None", "Step | None"]], ...]


class Resets:
    """What init methods would do to the tensors of one model. Nothing of the model changes.

    Args:
        model: The root: methods of modules above it are not known.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._at: dict[int, _At] = {}
        self._kinds: dict[int, int] = {}
        self._children_first: list[nn.Module] = []
        self._found: dict[int, tuple[Step | None, Step | None]] = {}
        self._above: dict[int, _Writers] = {}
        self._givers: dict[int, nn.Module | None] = {}
        self._keep: list[Any] = []
        self._trials: dict[tuple, Trial] = {}
        self._ids: set[int] | None = None
        self._lost = 0.0
        self._index(model)

    def path(self, module: nn.Module) -> str:
        """The first path of a module."""
        return self._at[id(module)].path

    def steps(self, module: nn.Module, slot: str) -> list[Step]:
        """The methods that may write a tensor, in the order in which they are to run; its own module's also if not.

        Args:
            module: The module that holds the tensor.
            slot: Its name there.
        """
        here, path = self._tried_at(module), self.path(module)
        steps: tuple[list[Step], list[Step]] = [], []
        for step, sort in zip(here, steps, strict=True):
            if step is not None:
                sort.append(step._replace(key=("", slot)))
        for above, tried in self._writers_above(module):
            start = self.path(above)
            key = path[len(start) + 1 :] if start else path, slot
            for step, sort in zip(tried, steps, strict=True):
                if step is not None and key in step.trial.writes:
                    sort.append(step._replace(key=key))
        return steps[0] + steps[1]

    def alike(self, module: nn.Module, slot: str) -> tuple | None:
        """What is equal for tensors to which the same happens; None where modules above have a say in it."""
        if self._writers_above(module) or "parametrizations" in self.path(module):
            return None
        giver = self._giver(module)
        return self._kind(module), slot, None if giver is None else id(giver)

    def _writers_above(self, module: nn.Module) -> _Writers:
        """The modules above one whose methods write to modules below them, the nearest first."""
        above = self._at[id(module)].parent
        if above is None:
            return ()
        found = self._above.get(id(above))
        if found is None:
            tried = self._tried_at(above)
            writes = any(path for step in tried if step is not None for path, _ in step.trial.writes)
            found = self._writers_above(above)
            found = self._above[id(above)] = ((above, tried), *found) if writes else found
        return found

    def own(self, module: nn.Module) -> Trial | None:
        """The trial of the method that a module has for its own tensors, None if it has none."""
        own, _ = self._tried_at(module)
        return None if own is None else own.trial

    def _tried_at(self, module: nn.Module) -> tuple[Step | None, Step | None]:
        """The trials of a module's own method, and of what the model around it does to it."""
        found = self._found.get(id(module))
        if found is None:
            method, call = own_method(module), self.model_call(module)
            calls = None if method is None else Call(module, method), call
            own, model = (None if c is None else Step(c, self._tried(c, module), ("", "")) for c in calls)
            found = self._found[id(module)] = own, model
        return found

    def model_call(self, module: nn.Module) -> Call | None:
        """The call by which the nearest model around a module initializes it."""
        giver = self._giver(module)
        if giver is not None:
            return Call(giver, MODEL[0], module)
        found = model_method(module)
        return None if found is None else Call(module, found[0])

    def _giver(self, module: nn.Module | None) -> nn.Module | None:
        """The nearest module, from this one upwards, with a method that takes a module to be initialized."""
        if module is None:
            return None
        if id(module) not in self._givers:
            found = model_method(module)
            takes = found is not None and found[1]
            self._givers[id(module)] = module if takes else self._giver(self._at[id(module)].parent)
        return self._givers[id(module)]

    def order(self, call: Call) -> tuple[bool, int]:
        """Where a call comes in the order of all: own methods, children first, then those of models."""
        module = call.module if call.argument is None else call.argument
        return call.method not in ("reset_parameters", "_reset_parameters"), self._at[id(module)].order

    def before(self, module: nn.Module) -> list[Call]:
        """The own methods of all modules below one, children first."""
        below = [m for m in self._below(module) if m is not module]
        calls = [(m, own_method(m)) for m in below]
        return sorted((Call(m, method) for m, method in calls if method is not None), key=self.order)

    def _tried(self, call: Call, module: nn.Module) -> Trial:
        key = (call.method, self._kind(module), None if call.argument is None else id(call.module))
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = self._try(call, module)
        return trial

    def _try(self, call: Call, module: nn.Module) -> Trial:
        cls = type(call.module).__name__
        if self._lost >= _PATIENCE:
            return Trial(cls, call.method, "unfinished", "others took too long, so it was not tried")
        trial = attempt(call, outside=self.is_ours)
        if trial.state == "unfinished":
            self._lost += 1.0
        unready = any(write.unread for write in trial.writes.values())
        if children_of(module) and call.argument is None and (
            unready or trial.state in ("raises", "reads")
        ):
            # It may work with what its children's own methods have written before.
            again = attempt(call, self.before(module), self.is_ours)
            if again.state == "ran":
                return dataclasses.replace(again, after_children=True)
        return trial

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is registered in the model: no method on trial may write it, but its twin."""
        if self._ids is None:
            self._ids = registered_ids(self.model)
        return id(tensor) in self._ids

    def _index(self, model: nn.Module) -> None:
        """Note each module's first path, the module above it, and its place in the order: children first."""
        stack = [("", model, None, iter(children_of(model).items()))]
        self._at[id(model)] = _At("", None, 0)
        while stack:
            path, module, parent, children = stack[-1]
            for name, child in children:
                if isinstance(child, nn.Module) and id(child) not in self._at:
                    below = join(path, name)
                    self._at[id(child)] = _At(below, module, 0)
                    stack.append((below, child, module, iter(children_of(child).items())))
                    break
            else:
                stack.pop()
                self._at[id(module)] = _At(path, parent, len(self._children_first))
                self._children_first.append(module)

    def _below(self, module: nn.Module) -> Iterator[nn.Module]:
        todo, seen = [module], {id(module)}
        while todo:
            module = todo.pop()
            yield module
            for child in children_of(module).values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    todo.append(child)

    def _kind(self, module: nn.Module) -> int:
        """A number that modules share whose methods must do the same: class, tensors, settings, children."""
        if not self._kinds:
            known: dict[tuple, int] = {}
            for each in self._children_first:
                space = object.__getattribute__(each, "__dict__")
                key = (type(each), *self._settings(space), *self._inside(space.get("_modules") or {}))
                self._kinds[id(each)] = known.setdefault(key, len(known))
        return self._kinds[id(module)]

    def _inside(self, children: dict[str, nn.Module | None]) -> Iterator[Any]:
        for name, child in children.items():
            # A module that holds one of those above it is like no other.
            yield name, child if child is None else self._kinds.get(id(child), id(child))

    def _settings(self, space: dict[str, Any]) -> Iterator[Any]:
        for group in ("_parameters", "_buffers"):
            for name, tensor in (space.get(group) or {}).items():
                yield name, group, self._alike(tensor)
        yield space.get("training")
        for name, value in space.items():
            if name not in STANDARD:
                yield name, self._alike(value)

    def _alike(self, value: Any) -> Any:
        """Equal for values that cannot make a difference to a method."""
        kind = type(value)
        if kind in ATOMS:
            # True == 1 == 1.0, and a slice cannot be hashed.
            return kind, value if kind is not slice else repr(value)
        if issubclass(kind, torch.Tensor) and is_lazy(value):
            return kind, value.dtype
        if issubclass(kind, torch.Tensor) and is_plain(value) and value.is_meta:
            return kind, value.shape, value.dtype, value.stride(), value.requires_grad
        if kind in (tuple, list) and len(value) <= 16:
            return kind, tuple(map(self._alike, value))
        self._keep.append(value)
        return id(value)
