"""What a browser does with a tree widget, done in Python: unpacks its data, plays its side of the comm."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn
from trees import Block, Holder

import metaviz
from metaviz.core.tree import ModuleTree

WAIT = 30


class Unpacked(NamedTuple):
    """A payload, taken apart: the head, and per row the look, the name and the depth."""

    head: dict[str, Any]
    looks: list[list[Any]]
    names: list[str]
    depths: list[int]
    column_nbytes: int

    @property
    def paths(self) -> list[str]:
        """The path of each row below the first one, from names and depths alone, as the front end makes it."""
        parts: list[str] = []
        found = []
        for name, depth in zip(self.names, self.depths, strict=True):
            parts[max(depth - 1, 0) :] = [name] if depth else []
            found.append(".".join(parts))
        return found

    def look(self, path: str) -> list[Any]:
        """The look of the row at a path."""
        return self.looks[self.paths.index(path)]


def unpack(packed: bytes) -> Unpacked:
    """Read a payload as `views/payload.py` describes it."""
    raw = zlib.decompress(packed)
    length = int.from_bytes(raw[:4], "little")
    head, columns = json.loads(raw[4 : 4 + length]), raw[4 + length :]
    rows = head["rows"]
    look, name, depth = array("I"), array("I"), array("H")
    for column, start, size in ((look, 0, 4), (name, 4 * rows, 4), (depth, 8 * rows, 2)):
        column.frombytes(columns[start : start + size * rows])
    return Unpacked(
        head,
        [head["looks"][each] for each in look],
        [head["names"][each] for each in name],
        list(depth),
        len(columns),
    )


def eventually(true: Callable[[], Any], seconds: float = WAIT) -> Any:
    """Wait until something is so, and give it back; fail if it does not come about."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
    return found


class Front:
    """The browser's side of one widget.

    Attributes:
        sent: Each message that the widget has sent, in order: `(method, content)`.
        state: What the browser knows of the widget: as it was at first, and what it was told since.
    """

    def __init__(self, widget: Any) -> None:
        self.widget = widget
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.state: dict[str, Any] = widget.get_state()
        self._number = 0
        widget.comm.publish_msg = self._hear

    def _hear(self, msg_type: str, data: Any = None, buffers: Any = None, **rest: Any) -> None:
        data = data or {}
        method = data.get("method", msg_type)
        state = dict(data.get("state") or {})
        for (name,), buffer in zip(data.get("buffer_paths") or (), buffers or (), strict=True):
            state[name] = bytes(buffer)
        if method == "update":
            self.state.update(state)
        self.sent.append((method, data["content"] if method == "custom" else state))

    def says(self, method: str, **content: Any) -> None:
        """Send the kernel a message, as the browser's comm does."""
        message = {"content": {"data": {"method": method, **content}}, "buffers": []}
        self.widget.comm.handle_msg(message)

    def sets(self, **traits: Any) -> None:
        """Change traits in the browser."""
        self.says("update", state=traits, buffer_paths=[])

    def asks(self, wish: str, **facts: Any) -> str:
        """Send a wish, and give back its id."""
        self._number += 1
        number = f"view-{self._number}"
        self.says("custom", content={"id": number, "do": wish, **facts})
        return number

    def answers(self, number: str) -> list[dict[str, Any]]:
        """What was answered to a wish so far."""
        return [
            content for method, content in list(self.sent) if method == "custom" and content["id"] == number
        ]

    def wish(self, what: str, **facts: Any) -> dict[str, Any]:
        """Send a wish, and wait for its answer."""
        number = self.asks(what, **facts)
        return eventually(lambda: self.answers(number))[0]

    def acts(self, verb: str, *paths: str, **options: Any) -> dict[str, Any]:
        """Press a button: materialize or unload some paths, and wait for the answer."""
        return self.wish(verb, rows=self.rows(*paths), shape=self.state["_shape"], **options)

    def ticks(self, *paths: str) -> None:
        """Tick the rows at some paths, and no others."""
        self.sets(_ticked={"shape": self.state["_shape"], "rows": self.rows(*paths)})

    def rows(self, *paths: str) -> list[int]:
        """The rows at some paths, as the browser numbers them."""
        known = self.payload.paths
        return [known.index(path) for path in paths]

    def updates(self, trait: str) -> list[Any]:
        """The values of a trait that the widget has told of, one after the other."""
        return [state[trait] for method, state in list(self.sent) if method == "update" and trait in state]

    def marks(self, *paths: str) -> list[str]:
        """The marks of the rows at some paths, as the browser shows them now."""
        shown = self.payload
        return [shown.look(path)[7] for path in paths]

    @property
    def payload(self) -> Unpacked:
        """The tree that the browser shows now."""
        return unpack(self.state["_payload"])


@contextlib.contextmanager
def showing() -> Iterator[Callable[..., Front]]:
    """Gives a function that shows a model, and closes what it has shown afterwards."""
    made: list[Front] = []
    kept: list[object] = []

    def show(model: nn.Module | ModuleTree, *, keep: bool = True, **options: Any) -> Front:
        # A widget does not keep its model alive.
        kept.append(model if keep else None)
        made.append(Front(metaviz.TreeWidget(model, **options)))
        return made[-1]

    try:
        yield show
    finally:
        for each in made:
            each.widget.close()
        quiet()


def built(depth: int = 4) -> nn.Module:
    """A recorded model: `layers.0 …`, each with `norm` and `mlp`, and `head`."""
    return metaviz.build(
        lambda: Holder(layers=nn.ModuleList(Block() for _ in range(depth)), head=nn.Linear(4, 2))
    )


def quiet() -> None:
    """Wait until no thread of a widget is at work."""
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("metaviz-")])
