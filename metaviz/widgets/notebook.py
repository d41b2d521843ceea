"""Widgets in a notebook: how one is put into a cell, when it is one too many, and when to look at the model again."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
import weakref
from typing import Any

from IPython import get_ipython
from IPython.display import publish_display_data

from metaviz.widgets import cells

#: The widgets that are not closed.
live: weakref.WeakSet[Any] = weakref.WeakSet()

# Widget → the cells that show it, and the run of each.
_cells: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_OFF = ("", "0", "false", "no", "off")
_hooked: list[weakref.ref[Any]] = []

WIDGET = "application/vnd.jupyter.widget-view+json"
_CLOSED = "This widget was closed. Next: metaviz.show(...) makes a new one."
_NO_KERNEL = "What can be clicked needs a running kernel: run this cell again."


def has_front_end() -> bool:
    """Whether there is a kernel, and widgets are not turned off with `METAVIZ_STATIC=1`."""
    shell = get_ipython()
    return hasattr(shell, "kernel") and os.environ.get("METAVIZ_STATIC", "").lower() in _OFF


def new_key() -> str:
    """A name for a static twin that no other one has."""
    return f"mv-twin-{uuid.uuid4().hex}"


def called(thing: Any) -> str | None:
    """The name that the user's namespace has for something; None if it has none."""
    space = getattr(get_ipython(), "user_ns", {})
    return next(
        (name for name, held in list(space.items()) if held is thing and not name.startswith("_")), None
    )


def names() -> dict[str, Any]:
    """What the user's names are bound to."""
    return dict(getattr(get_ipython(), "user_ns", {}))


def bundle(made: Any, shown: Any) -> Any:
    """What a widget shows, with a picture for all who show no widgets."""
    data = made[0] if isinstance(made, tuple) else made
    static = {"text/plain": repr(shown), "text/html": shown._repr_html_()}
    data = {**(data or {}), **static}
    return (data, *made[1:]) if isinstance(made, tuple) else data


def put(widget: Any, made: Any, shown: Any) -> None:
    """Show a widget in the cell that runs, below a static twin that hides while the widget lives.

    JupyterLab shows an error for a saved widget without its state, even where there is HTML in the same output; the
    twin is an output of its own.
    """
    close_predecessors(widget)
    if widget.comm is None:
        publish_display_data({"text/html": shown._repr_html_(), "text/plain": f"{shown!r}\n{_CLOSED}"})
        return
    data = dict(made[0] if isinstance(made, tuple) else made or {})
    # The twin says it all; a reader without a kernel needs no second tree.
    data["text/plain"] = _NO_KERNEL
    data.pop("text/html", None)
    publish_display_data(
        {"text/html": f'<div id="{widget._twin}">{shown._repr_html_()}</div>', "text/plain": repr(shown)}
    )
    publish_display_data(data, metadata=made[1] if isinstance(made, tuple) else {})
    hook()


def close_predecessors(widget: Any) -> None:
    """Close what an earlier run of this cell has shown: its output is gone, and nothing else would ever close it."""
    cell, run = _this_cell()
    if cell is None:
        return
    for other, shown_in in list(_cells.items()):
        if other is not widget and shown_in.get(cell, run) != run:
            del shown_in[cell]
            if not shown_in:
                other.close()
    _cells.setdefault(widget, {})[cell] = run


def _this_cell() -> tuple[str | None, Any]:
    shell = get_ipython()
    parent = getattr(shell, "parent_header", None) or {}
    if hasattr(shell, "get_parent"):
        parent = shell.get_parent() or {}
    metadata = parent.get("metadata", {}) if isinstance(parent, dict) else {}
    # VS Code has no cell ids in its messages; there widgets stay until they are closed.
    return metadata.get("cellId"), parent.get("header", {}).get("msg_id")


def hook() -> None:
    """Have widgets look at their models after each cell, and take turns with cells."""
    shell = get_ipython()
    events = getattr(shell, "events", None)
    if events is not None and not any(known() is shell for known in _hooked):
        _hooked.append(weakref.ref(shell))
        events.register("pre_run_cell", cells.begins)
        events.register("post_run_cell", _after_cell)
        if _in_cell():
            cells.begins()


def _in_cell() -> bool:
    """Whether a cell runs in this thread: the one that shows the first widget began before anybody looked."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_globals.get("__name__", "").startswith("IPython."):
            return True
        frame = frame.f_back
    return False


def _after_cell(result: Any) -> None:
    cells.ends()
    for widget in list(live):
        # One that cannot look keeps no other from looking.
        with contextlib.suppress(Exception):
            widget.follow()
    if not live:
        unhook()


def unhook() -> None:
    """Do nothing after cells any more, unless there are widgets that need it."""
    shell = get_ipython()
    if not live and any(known() is shell for known in _hooked):
        _hooked[:] = [known for known in _hooked if known() is not shell]
        shell.events.unregister("pre_run_cell", cells.begins)
        shell.events.unregister("post_run_cell", _after_cell)
        cells.ends()
