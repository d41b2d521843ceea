"""The wishes of a browser: each is answered once, failures too."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from metaviz.core.asking import sources_for
from metaviz.core.tree import ModuleTree
from metaviz.errors import MetavizError, UnknownPath
from metaviz.views.details import details
from metaviz.widgets import acting, cells

if TYPE_CHECKING:
    from metaviz.widgets.tree import TreeWidget


def answer(widget: TreeWidget, message: Any, buffers: Any) -> None:
    """Answer a wish of the browser, once, whatever happens."""
    number, wish = message.get("id"), message.get("do")

    def reply(**said: Any) -> None:
        widget.send({"id": number, "ok": True, **said})

    def fail(error: BaseException) -> None:
        widget.send({"id": number, "ok": False, **acting.failed(error)})

    try:
        if wish == "ping":
            reply()
        elif wish == "cancel":
            widget._acting.cancel()
            reply()
        elif wish == "look":
            widget._follows.submit(lambda: widget._look(always=True))
            reply()
        elif wish == "details":
            dropped = functools.partial(fail, MetavizError("A newer question took its place"))
            widget._asks.submit(lambda: _tell(widget, message, reply, fail), dropped)
        elif wish in ("materialize", "unload"):
            widget._acting.begin(wish, message, reply, fail)
        else:
            fail(
                MetavizError(f"The front end asks for {wish!r}, which this version of metaviz does not know.")
            )
    except Exception as error:
        fail(error)


def _tell(widget: TreeWidget, message: Any, reply: Any, fail: Any) -> None:
    try:
        with widget._guard:
            seen, shape, start, known = widget._tree, widget._shape, widget._places.start, widget._known
        row = int(message["row"]) + start
        if message.get("shape") != shape or not start <= row < widget._places.stop:
            raise UnknownPath("The tree has changed in the meantime: choose the row again")
        part = ModuleTree(seen.columns, row, seen._model)
        try:
            if known is None:
                known = sources_for(seen.model, seen.columns)
            found = details(part, start, known)
            with widget._guard:
                # What was asked of a model that is shown no more would keep it alive.
                if widget.comm is not None and widget._tree is seen:
                    widget._known = known
        except cells.CellRuns as busy:
            found = details(part, start, brief=f"{busy}.")
        reply(row=message["row"], shape=shape, details=found)
    except Exception as error:
        fail(error)
