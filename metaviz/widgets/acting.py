"""What a tree widget does for its user: plan, materialize, unload, cancel; each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from metaviz.core import devices
from metaviz.core.apply import materialize, unload
from metaviz.core.plan import floating, plan
from metaviz.core.reasons import quoted
from metaviz.core.units import format_bytes
from metaviz.errors import MetavizError, StalePlan
from metaviz.views.lines import clean
from metaviz.views.planned import blocked_lines, call, plan_line, progress_line, rate, told
from metaviz.widgets import notebook
from metaviz.widgets.worker import Latest

if TYPE_CHECKING:
    from metaviz.widgets.places import Places
    from metaviz.widgets.tree import TreeWidget

_PER_SECOND = 10
_OPTIONS = ("device", "source", "rng", "dtype", "blocked")
_DEFAULTS = {"device": "cpu", "source": "auto", "rng": "eager", "dtype": "", "blocked": "error"}
_BUSY = "This tree is at work already. Next: wait for it, or press Cancel"


class Cancelled(MetavizError):
    """The user pressed Cancel."""


class Acting:
    """The actions of one widget. At most one changes the model at a time."""

    def __init__(self, widget: TreeWidget) -> None:
        self._widget = widget
        self._plans = Latest("metaviz-plan")
        self._one = threading.Lock()
        self._stop = threading.Event()
        self._spoke = 0.0

    def think(self) -> None:
        """Plan what is chosen now, soon."""
        with self._widget._guard:
            rows, places = list(self._widget._ticked.get("rows", ())), self._widget._places
        if not rows:
            self._plans.drop()
            self._widget.publish(plan=None, _plan={"state": "none"})
            return
        self._plans.submit(lambda: self._planned(rows, places))

    def _planned(self, rows: list[int], places: Places) -> None:
        widget = self._widget
        self._say(rows, places, _plan={**widget._plan, "state": "thinking"})
        try:
            paths, options = list(map(places.path, rows)), self._options()
            found = plan(widget.model, paths, **_arguments(options, widget))
        except Exception as error:
            self._say(rows, places, plan=None, _plan={"state": "failed", **failed(error)})
            return
        modules, name = sum(map(places.is_module, rows)), notebook.called(widget)
        words = {
            "state": "ready",
            "line": plan_line(found, modules, len(rows) - modules),
            "blocked": blocked_lines(found),
            "can": bool(found.tensors or found.lazy)
            and found.fits
            and (not found.blocked or options["blocked"] == "skip"),
            "fits": found.fits,
            "loads": bool(found.kept),
            "call": call("materialize", self._called, paths, _code(options, widget), name),
            "unload": call("unload", self._called, paths, {}, name),
        }
        self._say(rows, places, plan=found, _plan=words)

    def _say(self, rows: list[int], places: Places, **facts: Any) -> None:
        """Tell of the plan for a choice. A newer one, or the same in a newer tree, has a plan of its own on the way."""
        widget = self._widget
        with widget._guard:
            if rows == widget._ticked.get("rows") and places is widget._places:
                widget.publish(**facts)

    @property
    def _called(self) -> str:
        return self._widget._tree.columns.called

    def _options(self) -> dict[str, str]:
        return {name: getattr(self._widget, name) for name in _OPTIONS}

    def cancel(self) -> None:
        """Stop what is at work, before its next tensor; the model stays as it was."""
        self._stop.set()
        self._plans.drop()

    def begin(
        self,
        verb: str,
        wish: Mapping[str, Any],
        reply: Callable[..., None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Materialize or unload, and answer when it is done.

        Args:
            verb: `"materialize"` or `"unload"`.
            wish: What the browser asks for. Its rows and options come along, as traits may arrive later.
            reply: Called with what was done.
            fail: Called with what went wrong.
        """
        if not self._one.acquire(blocking=False):
            fail(MetavizError(_BUSY))
            return
        try:
            widget = self._widget
            with widget._guard:
                shape, places = widget._shape, widget._places
            if wish.get("shape") != shape:
                raise StalePlan(
                    "The model has changed since this was chosen, and nothing was done. Next: look at the tree, "
                    "choose again"
                )
            paths = [places.path(int(row)) for row in wish["rows"] if 0 <= int(row) < len(places)]
            if not paths:
                raise MetavizError("Nothing is chosen. Next: tick a row, or press Space on it")
            options = {name: str(wish.get(name, getattr(widget, name))) for name in _OPTIONS}
            self._stop.clear()
            job = lambda: self._work(verb, paths, options, reply, fail)  # noqa: E731
            threading.Thread(target=job, name=f"metaviz-{verb}", daemon=True).start()
        except BaseException:
            self._one.release()
            raise

    def _work(self, verb: str, paths: list[str], options: dict[str, str], reply: Any, fail: Any) -> None:
        widget = self._widget
        given = _code(options, widget) if verb == "materialize" else {}
        code = call(verb, self._called, paths, given, notebook.called(widget))
        widget.publish(
            _progress={"state": "running", "verb": verb, "text": "looking at the model …", "part": 0},
            _outcome={},
        )
        try:
            report = self._called_for(verb, paths, options)
        except BaseException as error:
            outcome = {**failed(error), "call": code}
            self._done({"state": "stopped"}, outcome)
            fail(error)
        else:
            first, *others = str(report).splitlines()
            pace = (
                f", {rate(report.nbytes, report.seconds)}" if verb == "materialize" and report.nbytes else ""
            )
            outcome = {"kind": "done", "text": first + pace, "more": [clean(line, 300) for line in others]}
            self._done({"state": "done"}, {**outcome, "call": code}, report=report)
            reply(text=first)

    def _done(self, progress: dict[str, Any], outcome: dict[str, Any], **facts: Any) -> None:
        # Free before the browser hears of it: a quick second click is a new one.
        self._one.release()
        self._widget.publish(
            _progress=progress, _outcome=outcome, _devices=choices(self._widget.device), **facts
        )
        self.think()

    def _called_for(self, verb: str, paths: list[str], options: dict[str, str]) -> Any:
        widget = self._widget
        if verb == "unload":
            return unload(widget.model, paths)
        self._spoke = began = time.perf_counter()
        reads = "read " if widget._tree.columns.checkpoint is not None else ""

        def progress(done: int, total: int, path: str) -> None:
            if self._stop.is_set():
                raise Cancelled(
                    f"Cancelled at {format_bytes(done)} of {format_bytes(total)}, after {path}: "
                    "the model is as it was before"
                )
            now = time.perf_counter()
            if now - self._spoke >= 1 / _PER_SECOND:
                self._spoke = now
                text = progress_line(done, total, now - began, clean(path), reads)
                part = done / max(total, 1)
                widget.publish(_progress={"state": "running", "verb": verb, "text": text, "part": part})

        return materialize(
            widget.model,
            paths,
            **_arguments(options, widget),
            blocked=options["blocked"],
            progress=progress,
        )


def _arguments(options: Mapping[str, str], widget: TreeWidget) -> dict[str, Any]:
    return {
        "device": options["device"],
        "source": options["source"],
        "rng": options["rng"],
        "dtype": options["dtype"] or None,
        "checkpoint": widget._tree.columns.checkpoint,
    }


def _code(options: Mapping[str, str], widget: TreeWidget) -> dict[str, str]:
    """The options that are not as usual, and the device, as code."""
    code = {
        name: quoted(value) for name, value in options.items() if name == "device" or value != _DEFAULTS[name]
    }
    stored = widget._tree.columns.checkpoint
    if stored is not None:
        code["checkpoint"] = notebook.called(stored) or (
            "state" if stored.path is None else repr(stored.path)
        )
    return code


def check_dtype(name: str) -> str:
    """The name of a dtype to cast to, as materialize takes it.

    Raises:
        ValueError: It is none.
    """
    if name not in ("", "checkpoint"):
        floating(name)
    return name.removeprefix("torch.")


def choices(chosen: str = "cpu") -> list[dict[str, str]]:
    """The devices to choose from. Memory is told for the CPU, and for an accelerator that is chosen.

    Asking an accelerator takes memory of it (see :func:`metaviz.core.devices.listed`), so nobody is asked unasked.
    """
    known = [name for name in devices.names() if name != "cpu"]
    found = [{"name": "cpu", "text": _memory("cpu")}]
    found += [{"name": name, "text": _memory(name) if name == chosen else name} for name in known]
    return [*found, {"name": "auto", "text": "auto: spread over all"}]


def _memory(name: str) -> str:
    known = devices.described(devices.resolve(name))
    free, total = known.free_nbytes, known.total_nbytes
    if free is None:
        return name
    of = "" if total is None else f" of {format_bytes(total)}"
    return f"{name}: {format_bytes(free)} free{of}"


def failed(error: BaseException) -> dict[str, str]:
    """An error in words, with the next step as code."""
    if isinstance(error, Cancelled):
        return {"kind": "cancelled", "text": str(error), "next": ""}
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        said = str(error).strip().splitlines() or ["no more memory"]
        return {
            "kind": "error",
            "text": f"Out of memory, and the model is as it was before: {clean(said[0], 300)}",
            "next": "",
        }
    text, step = told(str(error))
    if not isinstance(error, MetavizError):
        text = f"{type(error).__name__}: {text}"
    return {"kind": "error", "text": text, "next": step}
