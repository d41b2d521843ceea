"""One pass over a model: what every row of its tree is, without holding on to a tensor.

Only `_modules`, `_parameters`, `_buffers` and `__dict__` are read, never an attribute by name: a child named
`half` is shadowed by a method, and a property may raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from metaviz.core.attributes import Scanner, Slot, Trouble, registered_ids, suspects
from metaviz.core.columns import Columns, Form
from metaviz.core.measure import Facts, Refusal, measure, unfillable
from metaviz.core.tally import Tally, corrections, total


def walk(model: nn.Module, answer: Callable) -> Columns:
    """The rows of a model, in time linear in its modules, tensors and slots.

    Args:
        model: The root.
        answer: `answer(tensor, module, name, kind)` says for a meta tensor whether a source can fill it.
    """
    # Without this, a property of a tensor subclass runs its `__torch_function__`, and a recording would
    # answer "cpu".
    with torch._C.DisableTorchFunction():
        return _Walk(model, answer).run()


class _Walk:
    def __init__(self, model: nn.Module, answer: Callable):
        self.model = model
        self.answer = answer
        self.columns = Columns()
        self.forms: dict[tuple, Form] = {}
        self.builds: dict[tuple, int] = {}
        self.known: dict[tuple, Facts] = {}
        self.modules: dict[int, int] = {}
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        # Links below the modules that are still open: (row, row that it repeats, what).
        self.open_links: list[tuple[int, int, str]] = []
        # Tensors that only exist while something holds them (scripted modules make them on the way) keep
        # their ids.
        self.alive: list[Any] = []
        self.scanner: Scanner | None = None

    def run(self) -> Columns:
        columns, modules = self.columns, self.modules
        opened = self.module("", -1, self.model)
        stack = [opened] if type(opened) is tuple else []
        while stack:
            row, parts, children, links, cls = stack[-1]
            for name, child in children:
                if child is None:
                    continue
                if id(child) in modules:
                    parts += (name, self.again(name, row, type(child).__name__, modules[id(child)]))
                    continue
                opened = self.module(name, row, child)
                if type(opened) is tuple:
                    stack.append(opened)
                    break
                parts += (name, opened)
            else:
                stack.pop()
                form = self.close(row, parts, links, cls)
                if stack:
                    stack[-1][1].extend((columns.names[row], form))
        columns.fixes = corrections(columns)
        return columns

    def row(self, name: Any, parent: int, form: Form | None = None) -> int:
        columns, row = self.columns, len(self.columns.names)
        columns.names.append(name if type(name) is str else str(name))
        columns.parents.append(parent)
        columns.ends.append(row + 1)
        columns.forms.append(form)
        return row

    def module(self, name: str, parent: int, module: nn.Module) -> Form | tuple:
        """Make the rows of a module and its own tensors; its form, or a stack entry if it has children."""
        row, links, cls = self.row(name, parent), len(self.open_links), type(module)
        self.modules[id(module)] = row
        parts: list[Any] = [id(cls)]
        children: list[tuple[str, Any]] = []
        try:
            space = object.__getattribute__(module, "__dict__")
            for key, tensor in space["_parameters"].items():
                if tensor is not None:
                    parts += (key, self.tensor(key, row, module, tensor, "parameter"))
            if space["_buffers"]:
                transient = space["_non_persistent_buffers_set"]
                for key, tensor in space["_buffers"].items():
                    if tensor is not None:
                        parts += (key, self.tensor(key, row, module, tensor, "buffer", key not in transient))
            if found := suspects(space):
                self.attributes(row, module, space, found, parts)
            if space["_modules"]:
                children = list(space["_modules"].items())
        except Exception as error:
            self.broken(row, module, error, parts)
        if children:
            return row, parts, iter(children), links, cls.__name__
        return self.close(row, parts, links, cls.__name__)

    def broken(self, row: int, module: Any, error: Exception, parts: list[Any]) -> None:
        if not issubclass(type(module), nn.Module):
            reason = "this is not a torch.nn.Module"
        elif isinstance(error, KeyError) and error.args[:1] == ("_parameters",):
            reason = "its __init__ never called super().__init__()"
        else:
            reason = f"it raised {type(error).__name__} when looked at"
        self.columns.troubles[row] = reason
        parts += (reason, Form("module", "", Tally(tensors=1, blocked=1), object()))

    def attributes(
        self, row: int, module: nn.Module, space: dict, found: list[str], parts: list[Any]
    ) -> None:
        if self.scanner is None:
            self.scanner = Scanner(lambda: registered_ids(self.model))
        for slot in self.scanner.scan(space, found):
            if isinstance(slot, Slot):
                if not slot.reference:
                    parts += (slot.name, self.tensor(slot.name, row, module, slot.tensor, "attribute"))
            else:
                parts += (slot.name, self.trouble(slot, row))

    def trouble(self, trouble: Trouble, parent: int) -> Form:
        key = ("trouble", trouble.cls)
        form = self.forms.get(key)
        if form is None:
            form = self.forms[key] = Form("attribute", trouble.cls, Tally(), key, "blocked")
        self.columns.troubles[self.row(trouble.name, parent, form)] = trouble.reason
        return form

    def tensor(
        self, name: str, parent: int, module: Any, tensor: Any, kind: str, persistent: bool | None = None
    ) -> Form:
        """Make the row of a tensor."""
        columns, first, reply = self.columns, self.tensors.get(id(tensor)), None
        facts, storage = measure(tensor, self.known)
        if first is not None:
            reply = columns.answers.get(first)
        elif facts.empty:
            reply = unfillable(facts) or self.ask(tensor, module, name, kind)
        source = reply.source if reply else None
        key = (kind, persistent, facts, source, reply and reply.can)
        form = self.forms.get(key)
        if form is None:
            mark = "real" if reply is None else "ready" if reply.can else "blocked"
            build = self.build((kind, persistent, facts.cls, facts.shape, facts.dtype, facts.requires_grad))
            form = self.forms[key] = Form(kind, facts.cls, _tally(kind, mark, facts), build, mark)
            form.source, form.persistent, form.facts = source, persistent, facts
        row = self.row(name, parent, form)
        if reply is not None:
            columns.answers[row] = reply
        if first is not None:
            self.link(row, first, "tie")
            return form
        self.tensors[id(tensor)] = row
        self.alive.append(tensor)
        other = self.storages.setdefault(storage, row)
        if other != row:
            self.link(row, other, "alias")
        return form

    def build(self, key: tuple) -> int:
        return self.builds.setdefault(key, len(self.builds))

    def ask(self, tensor: Any, module: Any, name: str, kind: str) -> Any:
        try:
            return self.answer(tensor, module, name, kind)
        except Exception as error:
            return Refusal(f"asking for its source raised {type(error).__name__}: {error}", None)

    def again(self, name: str, parent: int, cls: str, first: int) -> Form:
        """The row of a module that was met before: a leaf that points there."""
        above = parent
        while above > first:
            above = self.columns.parents[above]
        what = "cycle" if above == first else "shared"
        key = (what, cls)
        form = self.forms.get(key)
        if form is None:
            form = self.forms[key] = Form("module", cls, Tally(), key)
        self.link(self.row(name, parent, form), first, what)
        return form

    def link(self, row: int, first: int, what: str) -> None:
        self.columns.links[row] = (what, first)
        self.columns.outward[row] = ((0, first, what),)
        self.open_links.append((row, first, what))

    def close(self, row: int, parts: list[Any], links: int, cls: str) -> Form:
        """Give a module its form, once everything below it has one."""
        columns = self.columns
        if len(self.open_links) > links:
            below = self.open_links[links:]
            # A link inside the subtree is part of what it looks like, by its place in it; one that leads out
            # of it has to lead to the same row to look the same.
            parts += [(start - row, first - row, what) for start, first, what in below if first >= row]
            out = [link for link in below if link[1] < row]
            self.open_links[links:] = out
            if out:
                columns.outward[row] = tuple((start - row, first, what) for start, first, what in out)
        key = tuple(parts)
        form = self.forms.get(key)
        if form is None:
            tally = total(part.tally for part in parts if type(part) is Form)
            build = self.build(tuple(part.build if type(part) is Form else part for part in parts))
            form = self.forms[key] = Form("module", cls, tally, build)
        columns.forms[row] = form
        columns.ends[row] = len(columns.names)
        return form


def _tally(kind: str, mark: str, facts: Facts) -> Tally:
    """What one tensor adds to the sums of the modules above it."""
    numel = min(facts.numel, facts.room) if kind == "parameter" else 0
    tally = Tally(numel, 0 if facts.requires_grad else numel, facts.nbytes, tensors=1)
    setattr(tally, mark, 1)
    tally.where[facts.device, facts.dtype] = facts.nbytes
    tally.stale = int(kind == "attribute" and facts.empty)
    return tally
