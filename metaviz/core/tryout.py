"""Try out an init method: record it on shadows, and say which tensors it writes, with what, and what it needs."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core import provenance
from metaviz.core.methods import Call, lookup, needed_arguments
from metaviz.core.paths import below
from metaviz.core.record import recorded
from metaviz.core.recorder import Recorder
from metaviz.core.sandbox import Outcome, run_aside
from metaviz.core.shadow import Shadows
from metaviz.core.signature import Signature, signature
from metaviz.core.tape import Tape, Window, window_of
from metaviz.core.trials import StrictRecorder, TrialRecorder
from metaviz.core.written import first_unread, rows_left_out

#: Seconds after which a method is given up on.
LIMIT = 1.0

# What was given up on and still runs: the code of the method, and its run. It would only get stuck again.
_stuck: list[tuple[Any, Run]] = []


class Write(NamedTuple):
    """What a method does to one tensor.

    Attributes:
        nbytes: Bytes of the tensor.
        missing: How many of them it never writes.
        rows: Which rows it leaves out, in words, where some.
        fresh: Whether it puts another tensor into the slot.
        unread: Name of an op that takes values from memory that nothing has written, or None.
        signature: What it writes.
        reshaped: Whether what it puts into the slot has another shape.
    """

    nbytes: int
    missing: int
    rows: str
    fresh: bool
    unread: str | None
    signature: Signature | None
    reshaped: bool = False

    @property
    def whole(self) -> bool:
        """Whether the tensor has its values after it, whatever was there before."""
        return not self.missing and self.unread is None


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What came of trying one method.

    Attributes:
        cls: Class of the module whose method it is.
        method: Name of the method.
        state: ``"ran"``, ``"missing"``, ``"not callable"``, ``"arguments"``, ``"raises"``, ``"reads"``,
            ``"unfinished"``, ``"refused"`` or ``"unsupported"``.
        detail: What it raised, what it needs, or what it was refused.
        error: Type name and message of what it raises with gradients on, as Lightning and most recipes call it.
        writes: By (path below the module, slot).
        deletes: Slots that are gone afterwards, as in `writes`.
        bare: Whether it makes a tensor on the default device, whatever that is.
        after_children: Whether it works with what its children's own methods have written before it.
        decides: Whether it decides by a value that it draws: what it did here, it may not do the next time.
        elsewhere: Whether it draws from Python's or NumPy's generators, so that its numbers look like constants.
        notes: What else there is to say: files that it reads.
    """

    cls: str
    method: str
    state: str
    detail: str = ""
    error: tuple[str, str] | None = None
    writes: dict[tuple[str, str], Write] = dataclasses.field(default_factory=dict)
    deletes: tuple[tuple[str, str], ...] = ()
    bare: bool = False
    after_children: bool = False
    decides: bool = False
    elsewhere: bool = False
    notes: tuple[str, ...] = ()

    @property
    def needs_no_grad(self) -> bool:
        """Whether it only runs with gradients off."""
        return self.state == "ran" and self.error is not None


class Made(NamedTuple):
    """Where a run has put the values of one slot: a window of its tape, and whether the tensor is still the same."""

    window: Window
    same: bool


def attempt(
    call: Call, before: Iterable[Call] = (), outside: Callable[[torch.Tensor], bool] = lambda _: False
) -> Trial:
    """Try a method, after others whose values it may need, on shadows of their modules.

    Args:
        call: The method.
        before: Methods that run first; only what `call` itself writes is told.
        outside: Tells of a tensor without a stand-in whether it must not be written to.
    """
    return _trial(call, list(before), outside, grad=True)


def _trial(call: Call, before: list[Call], outside: Callable, grad: bool) -> Trial:
    run = Run([*before, call], outside, grad=grad)
    cls = type(call.module).__name__
    code = getattr(lookup(call.module, call.method), "__code__", None)
    _stuck[:] = [each for each in _stuck if not each[1].over]
    if code is not None and any(code is each for each, _ in _stuck):
        return Trial(cls, call.method, "unfinished", "it did not finish before, and still runs")
    outcome = run_aside(run.go, LIMIT, run.abandon)
    if run.started and not run.over:
        _stuck.append((code, run))
    state, detail = run.state(outcome)
    if grad and state == "raises" and isinstance(outcome.error, RuntimeError):
        again = _trial(call, before, outside, grad=False)
        return dataclasses.replace(again, error=(type(outcome.error).__name__, said(outcome.error)))
    error = (type(outcome.error).__name__, said(outcome.error)) if state == "raises" and grad else None
    notes = tuple(f"it reads the file {name}" for name in outcome.read)
    if state != "ran":
        return Trial(cls, call.method, state, detail, error, notes=notes)
    writes, deletes = outcome.value
    drawn = {"decides": run.decides, "elsewhere": run.elsewhere}
    return Trial(cls, call.method, state, "", error, writes, deletes, run.is_bare, **drawn, notes=notes)


class Run:
    """One run of methods on shadows of their modules."""

    def __init__(
        self,
        calls: list[Call],
        outside: Callable[[torch.Tensor], bool],
        *,
        grad: bool,
        names: Sequence[str] = (),
    ) -> None:
        self.calls = calls
        self._names = names
        self.tape = Tape()
        self.shadows = Shadows(self.tape)
        self.grad = grad
        self.started = self.over = False
        self._outside = outside
        self._problem: tuple[str, str] | None = None
        # Which of the methods is at work.
        self.at = 0
        self.elsewhere = False
        self._recorder: TrialRecorder | None = None

    def go(self, take: Callable[[], Any] | None = None) -> Any:
        """Run the methods, and put back what they have changed.

        Args:
            take: Takes what is wanted from the run while there are shadows; by default that is (writes, deletes) of
                the last method.
        """
        self.started = True
        others = other_generators()
        try:
            begins = self.record()
            self.elsewhere = others != other_generators()
            if self._problem:
                return None
            return self._effects(self.calls[-1], begins) if take is None else take()
        finally:
            self.restore()
            self.over = True

    def restore(self) -> None:
        """Put back what the methods have changed of the model itself; that they did is a problem."""
        if self.shadows.restore():
            self._problem = (
                "unsupported",
                "it changes a module of the model, which it knows by another name than self",
            )

    def record(self) -> int:
        """Run the methods; the number of the op that the last one begins with."""
        begins = 0
        with recorded(self._make_recorder), torch.set_grad_enabled(self.grad):
            for at, call in enumerate(self.calls):
                self.at, begins = at, len(self.tape.ops)
                if self._names:
                    self.tape.parts.append((begins, self._names[at]))
                module = self._shadow(call.module)
                method = None if module is None else self._method(module, call)
                if method is None:
                    break
                method(*([] if call.argument is None else [self.shadows.of(call.argument)]))
        return begins

    def abandon(self) -> None:
        """Put the generators back for a run that does not end."""
        if self._recorder is not None:
            self._recorder.close()

    def reached(self) -> list[tuple[torch.Generator, Any]]:
        """The generators that were drawn from, and the places in their streams where an ordinary run leaves them."""
        return [] if self._recorder is None else self._recorder.generators.reached()

    @property
    def is_bare(self) -> bool:
        """Whether a tensor was made without saying on which device."""
        return self._recorder is not None and self._recorder.is_bare

    @property
    def decides(self) -> bool:
        """Whether a method has asked for a value that it has drawn."""
        return self._recorder is not None and self._recorder.decides

    def state(self, outcome: Outcome) -> tuple[str, str]:
        """The state of the trial, and its detail."""
        if not outcome.finished:
            if not self.started:
                return "unfinished", "too many others still run, so it was not tried"
            return "unfinished", f"it did not finish within {LIMIT:g} s"
        if outcome.refused:
            return "refused", outcome.refused
        if self._problem:
            return self._problem
        if outcome.error is None:
            return "ran", ""
        # Not by the error: a method may catch it and raise another one.
        if self._recorder is not None and self._recorder.problem is not None:
            return self._recorder.problem
        return "raises", _said(outcome.error)

    def _make_recorder(self) -> Recorder:
        self._recorder = StrictRecorder(self.tape, self._outside)
        return self._recorder

    def _shadow(self, module: nn.Module) -> nn.Module | None:
        try:
            return self.shadows.of(module)
        except TypeError as error:
            self._problem = "unsupported", said(error)
            return None

    def _callable(self, module: nn.Module, call: Call) -> Callable | None:
        try:
            method = getattr(module, call.method)
        except AttributeError:
            self._problem = "missing", ""
            return None
        if not callable(method):
            self._problem = "not callable", type(method).__name__
            return None
        return method

    def _method(self, module: nn.Module, call: Call) -> Callable | None:
        method = self._callable(module, call)
        if method is None:
            return None
        needed = [] if call.argument is not None else needed_arguments(method)
        if needed:
            self._problem = "arguments", ", ".join(needed)
            return None
        return method

    def _effects(
        self, call: Call, begins: int
    ) -> tuple[dict[tuple[str, str], Write], tuple[tuple[str, str], ...]]:
        base = call.module if call.argument is None else call.argument
        writes: dict[tuple[str, str], Write] = {}
        deletes = []
        # Of what has no shadow, nothing can have been written.
        for path, module in below(base, lambda module: id(module) in self.shadows.made):
            made = self.made(module)
            for name, tensor in named(module):
                found = made.get(name)
                if found is None:
                    if not is_lazy(tensor):
                        deletes.append((path, name))
                elif begins <= _last(self.tape, found.window):
                    writes[path, name] = self._write(found, tensor)
        return writes, tuple(deletes)

    def made(self, module: nn.Module) -> dict[str, Made]:
        """Where the tensors of a module are now: by slot, as far as they are on the tape."""
        shadow = self.shadows.of(module)
        twins = {name: self.shadows.twin_of(tensor) for name, tensor in named(module)}
        found = {}
        for name, tensor in named(shadow):
            window = window_of(tensor, self.tape)
            if window is not None:
                found[name] = Made(window, tensor is twins.get(name))
        return found

    def _write(self, made: Made, tensor: torch.Tensor) -> Write:
        window = made.window
        start, stop = window.extent()
        if window.size != tuple(tensor.shape):
            return Write(stop - start, stop - start, "", not made.same, None, None, True)
        missing = self.tape.unwritten(window)
        unread = None if missing else first_unread(self.tape, window)
        known = None if missing or unread else signature(self.tape, window)
        rows = rows_left_out(self.tape, window) if missing else ""
        return Write(stop - start, missing, rows, not made.same, unread, known)


provenance.callers.add(Run.record.__code__)


def other_generators() -> tuple:
    """Where Python's and NumPy's global generators are."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, words, *rest = numpy.random.get_state()
    return random.getstate(), name, words.tobytes(), *rest


def said(error: BaseException) -> str:
    """The message of an error, whose author may have made even that raise."""
    try:
        return str(error)
    except Exception as another:
        return f"its message cannot be read ({type(another).__name__})"


def named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a module by name: registered ones and those in attributes of its own, not in containers."""
    space = object.__getattribute__(module, "__dict__")
    registered = [*(space.get("_parameters") or {}).items(), *(space.get("_buffers") or {}).items()]
    plain = [(name, value) for name, value in space.items() if issubclass(type(value), torch.Tensor)]
    return [(name, tensor) for name, tensor in (*registered, *plain) if tensor is not None]


def _last(tape: Tape, window: Window) -> int:
    writers = tape.storages[window.storage].writers
    return writers[-1] if writers else -1


def _said(error: BaseException) -> str:
    message = said(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0][:200]}" if message else type(error).__name__
