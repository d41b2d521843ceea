"""Reset: what the modules' own init methods would do to each tensor, found by trying them on shadows.

Three sorts of methods write a tensor: one of its own module (`reset_parameters`, else `_reset_parameters`), the same of
a module above it, and the one by which a model initializes all of its modules (`_init_weights(module)`, which in
transformers restores a subtree, too). They run in this order, children before parents; whoever writes last decides.
Modules that look alike are tried once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from metaviz.core.alike import Kinds
from metaviz.core.attributes import registered_ids
from metaviz.core.methods import MODEL, OWN, Call, model_method, own_method
from metaviz.core.paths import below, children_of
from metaviz.core.tryout import Trial, Write, attempt

#: Seconds that methods which never end may cost in all; after that, no other one is tried.
PATIENCE = 5.0


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


_Writers = tuple[tuple[nn.Module, tuple["Step | None", "Step | None"]], ...]


class Resets:
    """What init methods would do to the tensors of one model. Nothing of the model changes.

    Args:
        model: The root: methods of modules above it are not known.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._above_of: dict[int, tuple[nn.Module | None, str]] = {}
        self._methods: dict[int, tuple[str | None, tuple[str, bool] | None]] = {}
        self._children_first: list[nn.Module] = []
        self._found: dict[int, tuple[Step | None, Step | None]] = {}
        self._above: dict[int, _Writers] = {}
        self._givers: dict[int, nn.Module | None] = {}
        self._own: dict[int, Trial | None] = {}
        self._trials: dict[tuple, Trial] = {}
        self._ids: set[int] | None = None
        self._lost = 0.0
        self._index(model)

    def path(self, module: nn.Module) -> str:
        """The first path of a module."""
        names: list[str] = []
        above: nn.Module | None = module
        while above is not None:
            above, name = self._above_of[id(above)]
            names.append(name)
        return ".".join(names[-2::-1])

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
        return self.kind(module), slot, None if giver is None else id(giver)

    def _writers_above(self, module: nn.Module) -> _Writers:
        """The modules above one whose methods write to modules below them, the nearest first."""
        waiting: list[nn.Module] = []
        above = self._above_of[id(module)][0]
        while above is not None and id(above) not in self._above:
            waiting.append(above)
            above = self._above_of[id(above)][0]
        found: _Writers = () if above is None else self._above[id(above)]
        for above in reversed(waiting):
            tried = self._tried_at(above)
            if any(path for step in tried if step is not None for path, _ in step.trial.writes):
                found = ((above, tried), *found)
            self._above[id(above)] = found
        return found

    def own(self, module: nn.Module) -> Trial | None:
        """The trial of the method that a module has for its own tensors, None if it has none."""
        kind = self.kind(module)
        if kind not in self._own:
            method = self._methods_of(module)[0]
            self._own[kind] = None if method is None else self._tried(Call(module, method), module)
        return self._own[kind]

    def _tried_at(self, module: nn.Module) -> tuple[Step | None, Step | None]:
        """The trials of a module's own method, and of what the model around it does to it."""
        found = self._found.get(id(module))
        if found is None:
            method, call = self._methods_of(module)[0], self.model_call(module)
            calls = None if method is None else Call(module, method), call
            own, model = (None if c is None else Step(c, self._tried(c, module), ("", "")) for c in calls)
            found = self._found[id(module)] = own, model
        return found

    def _methods_of(self, module: nn.Module) -> tuple[str | None, tuple[str, bool] | None]:
        """The names of the module's own method, and of the one by which it initializes others; asked once per kind."""
        kind = self.kind(module)
        found = self._methods.get(kind)
        if found is None:
            found = self._methods[kind] = own_method(module), model_method(module)
        return found

    def model_call(self, module: nn.Module) -> Call | None:
        """The call by which the nearest model around a module initializes it."""
        giver = self._giver(module)
        if giver is not None:
            return Call(giver, MODEL[0], module)
        found = self._methods_of(module)[1]
        return None if found is None else Call(module, found[0])

    def _giver(self, module: nn.Module) -> nn.Module | None:
        """The nearest module, from this one upwards, with a method that takes a module to be initialized."""
        passed: list[nn.Module] = []
        above: nn.Module | None = module
        while above is not None and id(above) not in self._givers:
            passed.append(above)
            method = self._methods_of(above)[1]
            if method is not None and method[1]:
                self._givers[id(above)] = above
                break
            above = self._above_of[id(above)][0]
        giver = None if above is None else self._givers[id(above)]
        for each in passed:
            self._givers[id(each)] = giver
        return giver

    def order(self, call: Call) -> tuple[bool, int]:
        """Where a call comes in the order of all: own methods, children first, then those of models."""
        module = call.module if call.argument is None else call.argument
        return call.method not in OWN, self._order[id(module)]

    def before(self, module: nn.Module) -> list[Call]:
        """The own methods of all modules below one, children first."""
        inside = [each for _, each in below(module) if each is not module]
        calls = [(each, self._methods_of(each)[0]) for each in inside]
        return sorted((Call(each, method) for each, method in calls if method is not None), key=self.order)

    def _tried(self, call: Call, module: nn.Module) -> Trial:
        key = (call.method, self.kind(module), None if call.argument is None else id(call.module))
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = self._try(call, module)
        return trial

    def _try(self, call: Call, module: nn.Module) -> Trial:
        cls = type(call.module).__name__
        if self._lost >= PATIENCE:
            return Trial(cls, call.method, "unfinished", "others took too long, so it was not tried")
        trial = attempt(call, outside=self.is_ours)
        if trial.state == "unfinished":
            self._lost += 1.0
        unready = any(write.unread for write in trial.writes.values())
        if children_of(module) and call.argument is None and (unready or trial.state in ("raises", "reads")):
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
        """Note the module above each, its name there, and all of them in their order: children first."""
        stack: list[tuple[nn.Module, Iterator]] = [(model, iter(children_of(model).items()))]
        above = self._above_of
        above[id(model)] = None, ""
        while stack:
            module, children = stack[-1]
            for name, child in children:
                if id(child) not in above and isinstance(child, nn.Module):
                    above[id(child)] = module, name
                    inside = children_of(child)
                    if inside:
                        stack.append((child, iter(inside.items())))
                        break
                    self._children_first.append(child)
            else:
                stack.pop()
                self._children_first.append(module)

    @cached_property
    def _order(self) -> dict[int, int]:
        return {id(module): at for at, module in enumerate(self._children_first)}

    def kind(self, module: nn.Module) -> int:
        """A number that modules share whose methods must do the same."""
        return self._kinds.of[id(module)]

    @cached_property
    def _kinds(self) -> Kinds:
        return Kinds(self._children_first)
