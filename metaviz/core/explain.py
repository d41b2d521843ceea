"""Everything that is known about one module or tensor: what it is, what each source can do, and code to paste."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from metaviz.core.asking import sources_for, tensor_at, tensors_below
from metaviz.core.causes import Authors, module_of
from metaviz.core.columns import Columns
from metaviz.core.initcode import reset_method
from metaviz.core.methods import lookup
from metaviz.core.origin import origin_of
from metaviz.core.paths import modules
from metaviz.core.reasons import as_called, fact, step
from metaviz.core.sources import SOURCES, Slot, Sources
from metaviz.core.units import format_bytes, format_exact, plural
from metaviz.core.verdict import Verdict, together
from metaviz.errors import UnknownPath

# What a method of its own would cure.
_CURABLE = {
    *("no_method", "not_written", "part", "reads", "raises", "arguments", "not_callable"),
    *("unfinished", "refused"),
}
_CLASSES = 3
# So many modules of one class tell whether all of them were built alike.
_COMPARED = 50


class Answer(NamedTuple):
    """What a source, or Lightning, would do.

    Attributes:
        head: `"replay"`, `"reset"` or `"Lightning"`.
        text: In a sentence, without a full stop.
    """

    head: str
    text: str


class Snippet(NamedTuple):
    """Code to paste.

    Attributes:
        caption: What it is for.
        code: Lines of Python.
    """

    caption: str
    code: str


class Explained(NamedTuple):
    """What :func:`explain` finds.

    Attributes:
        about: What it is, in a sentence or two.
        answers: What each source, and Lightning, would do where there are no values yet.
        step: The next step as code, None where there is nothing to do.
        snippets: Code that helps reset.
    """

    about: str
    answers: tuple[Answer, ...]
    step: str | None
    snippets: tuple[Snippet, ...]


def explain(tree: Any, asked: Sources | None = None, lightning: bool = True) -> Explained:
    """What is known about the root of a tree; of one whose model is gone, what the tree itself knows.

    Args:
        tree: The :class:`metaviz.ModuleTree` of a module or tensor.
        asked: Who asks again and again keeps what :func:`metaviz.core.asking.sources_for` has found out.
        lightning: Whether to say what Lightning would do, which is worked out for the whole model at first.

    Raises:
        UnknownPath: The model has no such module or tensor any more.
    """
    columns, row = tree.columns, tree.root
    about, then, tally = _about(columns, row), step(columns, row), columns.tally(row)
    then = then and as_called(columns, then)
    pointer = row in columns.troubles or columns.links.get(row, ("",))[0] in ("shared", "cycle")
    model = None if pointer or tally.real == tally.tensors else _model(tree)
    if model is None:
        return Explained(f"{about} {_why(columns, row)}", (), then, ())
    asked = _Asked(model, columns, row, asked)
    if asked.is_done:
        return Explained(
            f"{about} It holds values by now: this tree shows it as it was before",
            (),
            as_called(columns, _AGAIN),
            (),
        )
    what, first = columns.links.get(row, ("", row))
    path = columns.path(first if what == "tie" else row)
    answers = tuple(asked.answers())
    if lightning:
        answers += (Answer("Lightning", tree.lightning.words(path)),)
    return Explained(about, answers, then, tuple(asked.snippets()))


def _model(tree: Any) -> nn.Module | None:
    try:
        return tree.model
    except UnknownPath:
        return None


class _Asked:
    """The tensors without values at and below a row, and what can be done for them."""

    def __init__(self, model: nn.Module, columns: Columns, row: int, known: Sources | None) -> None:
        self._model, self._columns, self._row = model, columns, row
        self._sources = known or sources_for(model, columns)
        self._single = columns.forms[row].kind != "module"
        below = [tensor_at(model, columns, row)] if self._single else tensors_below(model, columns, row)
        self._below = [
            (tensor, slot) for tensor, slot in below if self._verdict(tensor, slot, "auto").kind != "real"
        ]

    @property
    def is_done(self) -> bool:
        """Whether all of it has been given values since the tree was made."""
        return not self._below

    def _verdict(self, tensor: Any, slot: Slot, source: str) -> Verdict:
        return self._sources.verdict(tensor, slot, source)

    def answers(self) -> Iterator[Answer]:
        for source in SOURCES[1:]:
            if source == "checkpoint" and self._columns.checkpoint is None:
                continue
            found = [self._verdict(tensor, slot, source) for tensor, slot in self._below]
            verdict = found[0] if self._single else together(found, source)
            doubt = verdict.faithful is None and self._authored()
            if self._single:
                yield Answer(source, _said(verdict, doubt))
            else:
                yield Answer(source, verdict.reason.rstrip(".") + (_DOUBT if verdict.can and doubt else ""))

    def _authored(self) -> bool:
        """Whether a class of somebody else is around any of the tensors, which may give them other values."""
        columns, authors = self._columns, Authors(self._columns, self._model)
        rows = range(self._row, columns.ends[self._row])
        return any(
            authors.above(columns.parents[row]) for row in rows if columns.forms[row].facts is not None
        )

    def snippets(self) -> Iterator[Snippet]:
        """A `reset_parameters` for each class below that lacks one, or has one that does not do it."""
        found: dict[type, nn.Module] = {}
        for tensor, slot in self._below:
            cls = type(slot.module)
            # A method on a class of torch would concern all models of the process.
            if slot.module is None or cls in found or module_of(cls).startswith("torch."):
                continue
            # Without a tape, nobody knows what the constructor did.
            if _origin(tensor, slot) and self._lacks(tensor, slot):
                found[cls] = slot.module
        for cls, module in list(found.items())[:_CLASSES]:
            yield self._snippet(cls, module)
        if len(found) > _CLASSES:
            names = ", ".join(cls.__name__ for cls in list(found)[_CLASSES:])
            yield Snippet(f"And for {names}: explain their paths", "")

    def _lacks(self, tensor: Any, slot: Slot) -> bool:
        verdict = self._verdict(tensor, slot, "reset")
        # What a model does for its modules, Lightning does not call.
        return verdict.kind in _CURABLE or (verdict.can and lookup(slot.module, "reset_parameters") is None)

    def _snippet(self, cls: type, module: nn.Module) -> Snippet:
        code = _method(module)
        others = [each for _, each in modules(self._model) if type(each) is cls][:_COMPARED]
        caption = f"A reset_parameters for every {cls.__name__}, for reset and for Lightning"
        if any(_method(other) != code for other in others):
            path = self._sources.resets.path(module) or "the model"
            caption += f"; as {path} was built, while others got other values"
        return Snippet(caption, code)


def _origin(tensor: Any, slot: Slot) -> Any:
    return origin_of(tensor, slot.module, slot.name if slot.kind != "attribute" else None)


def _method(module: nn.Module) -> str:
    """A `reset_parameters` for the class of a module that does for all its own tensors what the constructor did."""
    entries = []
    space = object.__getattribute__(module, "__dict__")
    for group, kind in (("_parameters", "parameter"), ("_buffers", "buffer")):
        for name, tensor in (space.get(group) or {}).items():
            if tensor is not None:
                origin = origin_of(tensor, module, name) if tensor.device.type == "meta" else None
                entries.append((name, origin and origin.tape, origin and origin.window, kind))
    cls = type(module)
    code = reset_method(cls.__name__, entries).rstrip()
    home = module_of(cls)
    # A class of the notebook is at hand, one made in a function nowhere.
    if home == "__main__" or cls.__qualname__ != cls.__name__ or not _is_dotted(home):
        return code
    return f"from {home} import {cls.__name__}\n\n{code}"


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


_AGAIN = "tree = metaviz.tree(model)"
_DOUBT = ". Whether they come out as in an ordinary build is not known"


def _said(verdict: Verdict, doubt: bool) -> str:
    """A verdict on a tensor in words."""
    if not verdict.can:
        return f"no. {verdict.reason.rstrip('.')}"
    words = (
        "with other values" if verdict.faithful is False else "perhaps with other values" if doubt else "yes"
    )
    return f"{words}: {verdict.reason.rstrip('.')}"


def _about(columns: Columns, row: int) -> str:
    form, path = columns.forms[row], columns.path(row)
    what = f"{path} ({form.cls})" if path else form.cls
    return f"{what} is {_module(columns, row) if form.kind == 'module' else _tensor(columns, row)}."


def _why(columns: Columns, row: int) -> str:
    why, source = fact(columns, row), columns.forms[row].source
    why = f"{source} gives its values: {why}" if source else why
    return f"{why[0].upper()}{why[1:]}."


def _module(columns: Columns, row: int) -> str:
    tally, (numel, nbytes) = columns.tally(row), columns.by_path(row)
    places = ", ".join(sorted({device for device, _ in tally.where})) or "no device"
    text = f"a module of {plural(tally.numel, 'parameter')} in {plural(tally.tensors, 'tensor')}"
    text += f", {format_bytes(tally.nbytes)} on {places}"
    if (numel, nbytes) != (tally.numel, tally.nbytes):
        text += f" (counted by path {format_exact(numel)} and {format_bytes(nbytes)})"
    return text


def _tensor(columns: Columns, row: int) -> str:
    form = columns.forms[row]
    if form.facts is None:
        return "an attribute"
    facts = form.facts
    saved = {True: "saved ", False: "unsaved ", None: ""}[form.persistent]
    kind = {"parameter": "" if facts.requires_grad else "frozen ", "buffer": saved, "attribute": "plain "}[
        form.kind
    ]
    shape = "of unknown shape" if facts.shape is None else str(facts.shape)
    article = "an" if kind.startswith("u") else "a"
    text = f"{article} {kind}{form.kind} {shape} in {facts.dtype}, {format_bytes(facts.nbytes)} on {facts.device}"
    link, first = columns.links.get(row, ("", -1))
    if link == "tie":
        text += f", the same tensor as {columns.path(first)}"
    elif link == "alias":
        text += f", a view of the storage of {columns.path(first)}"
    if form.kind == "attribute" and facts.device == "meta":
        text += "; it is stale: Module.to and to_empty never see it"
    return text
