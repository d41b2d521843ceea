"""What a tree widget does for its user: plan, materialize, unload, cancel; each in a thread of its own."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from metaviz.core import devices, watch
from metaviz.core.apply import materialize, unload
from metaviz.core.checkpoint import Checkpoint
from metaviz.core.plan import SHORT, floating, plan
from metaviz.core.reasons import quoted, with_name
from metaviz.core.units import format_bytes
from metaviz.errors import MetavizError, StalePlan
from metaviz.views.lines import clean
from metaviz.views.planned import blocked_lines, call, plan_line, progress_line, rate, told
from metaviz.widgets import cells, notebook
from metaviz.widgets.worker import Latest

if TYPE_CHECKING:
    from metaviz.widgets.places import Places
    from metaviz.widgets.tree import TreeWidget

_PER_SECOND = 10
_OPTIONS = ("device", "source", "rng", "dtype", "blocked")
_DEFAULTS = {"device": "cpu", "source": "auto", "rng": "eager", "dtype": "", "blocked": "error"}
_BUSY = "This tree is at work already: wait for it, or press Cancel"
_AFTER = "The plan follows after the running cell: init methods are tried between cells."


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

    def think(self, now: bool = False) -> None:
        """Plan what is chosen now, soon. Until then there is no plan: an older one is of another choice.

        Args:
            now: Plan in this thread, before this returns.
        """
        widget = self._widget
        with widget._guard:
            places, paths = widget._places, list(widget.selection)
        if not paths:
            self._plans.drop()
            widget.publish(_plan={"state": "none"})
            widget.tell_user(plan=None)
            return
        widget.publish(_plan={**widget._plan, "state": "thinking", "can": False})
        widget.tell_user(plan=None)
        if now:
            self._plans.drop()
            self._planned(paths, places)
        else:
            self._plans.submit(lambda: self._planned(paths, places))

    def resume(self) -> None:
        """A cell has ended: plan what had to wait for that."""
        if self._widget._plan.get("state") == "after":
            self.think()

    def _planned(self, paths: list[str], places: Places) -> None:
        widget = self._widget
        try:
            options = self._options()
            found = plan(widget.model, paths, **_arguments(options, widget))
        except cells.CellRuns:
            self._say(paths, places, None, {"state": "after", "line": _AFTER})
            return
        except Exception as error:
            self._say(paths, places, None, {"state": "failed", **failed(error)})
            return
        modules = sum(places.is_module(row) for row in places.rows(paths))
        name = notebook.called(widget)
        words = {
            "state": "ready",
            "line": plan_line(found, modules, len(paths) - modules),
            "blocked": [
                (path, why, with_name(step, self._called)) for path, why, step in blocked_lines(found)
            ],
            "can": bool(found.tensors or found.lazy)
            and found.fits
            and (not found.blocked or options["blocked"] == "skip"),
            "fits": found.fits,
            "loads": bool(found.kept),
            "call": call("materialize", self._called, paths, _code(options, widget), name),
            "unload": call("unload", self._called, paths, {}, name),
        }
        self._say(paths, places, found, words)

    def _say(self, paths: list[str], places: Places, found: Any, words: dict[str, Any]) -> None:
        """Tell of the plan for a choice. A newer one, or the same in a newer tree, has a plan of its own on the way."""
        widget = self._widget
        with widget._guard:
            if paths != widget.selection or places is not widget._places:
                return
            widget.publish(_plan=words)
        widget.tell_user(plan=found)

    @property
    def _called(self) -> str:
        return self._widget.called

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
                    "The model has changed since this was chosen, and nothing was done: look at the tree, choose again"
                )
            paths = [places.path(int(row)) for row in wish["rows"] if 0 <= int(row) < len(places)]
            if not paths:
                raise MetavizError("Nothing is chosen: tick a row, or press Space on it")
            options = {name: str(wish.get(name, getattr(widget, name))) for name in _OPTIONS}
            self._stop.clear()
            job = lambda: self._work(verb, paths, options, reply, fail)  # noqa: E731
            threading.Thread(target=job, name=f"metaviz-{verb}", daemon=True).start()
        except BaseException:
            self._one.release()
            raise

    def _work(self, verb: str, paths: list[str], options: dict[str, str], reply: Any, fail: Any) -> None:
        widget, facts, code = self._widget, {}, ""
        try:
            given = _code(options, widget) if verb == "materialize" else {}
            code = call(verb, self._called, paths, given)
            started = {"state": "running", "verb": verb, "text": "looking at the model …", "part": 0}
            widget.publish(_progress=started, _outcome={})
            with cells.beside(self._turn):
                report = self._called_for(verb, paths, options)
        except BaseException as error:
            outcome, answer, state = failed(error), functools.partial(fail, error), "stopped"
        else:
            first, *others = str(report).splitlines()
            pace = (
                f", {rate(report.nbytes, report.seconds)}" if verb == "materialize" and report.nbytes else ""
            )
            outcome = {"kind": "done", "text": first + pace, "more": [clean(line, 300) for line in others]}
            answer, state, facts = functools.partial(reply, text=first), "done", {"report": report}
            # The rows are those that were drawn; only their marks are others.
            widget.changed_by_itself()
        # Free before the browser hears of it: a quick second click is a new one.
        self._one.release()
        try:
            widget.publish(_progress={"state": state}, _outcome={**outcome, "call": code})
            widget.publish(_devices=choices(widget.device))
            widget.tell_user(**facts)
            self.think()
        finally:
            answer()

    def _turn(self) -> None:
        """Wait for the end of a cell, for a moment in which settings of the process change."""
        if self._stop.is_set():
            raise Cancelled("Cancelled while a cell was running: the model is as it was before")
        self._widget.publish(_progress={**self._widget._progress, "text": "waiting for the running cell …"})

    def _called_for(self, verb: str, paths: list[str], options: dict[str, str]) -> Any:
        widget = self._widget
        if watch.fingerprint(widget.model) != widget._print:
            widget.follow()
            raise StalePlan(
                "The model was changed since this was drawn, and nothing was done. The tree follows now"
            )
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
                # The model is locked here: who holds the guard and waits for the model must not be waited for.
                widget.publish_if_free(
                    _progress={"state": "running", "verb": verb, "text": text, "part": part}
                )

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
        code["checkpoint"] = notebook.called(stored) or _checkpoint(stored)
    return code


def _checkpoint(stored: Checkpoint) -> str:
    """Code that opens a checkpoint again."""
    path = "state" if stored.path is None else repr(stored.path)
    return path if stored.key_map is None else f"metaviz.checkpoint({path}, key_map={stored.key_map!r})"


def check_dtype(name: str) -> str:
    """The name of a dtype to cast to, as materialize takes it.

    Raises:
        ValueError: It is none.
    """
    if name not in ("", "checkpoint"):
        floating(name)
    return SHORT.get(name, name.removeprefix("torch."))


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
    if not isinstance(error, MetavizError | cells.CellRuns):
        text = f"{type(error).__name__}: {text}"
    return {"kind": "error", "text": text, "next": step}
