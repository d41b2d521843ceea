"""`TreeWidget`: the tree of a model in a notebook, to look at, to choose from and to act on.

Traits are facts, Python → browser and back; messages are wishes of the browser, each answered once. Rows are numbered
as in the payload; a number means nothing without the `shape` that it belongs to, which changes with the module tree.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import anywidget
import traitlets
from torch import nn

from metaviz.core import devices, watch
from metaviz.core.sources import SOURCES, Sources, check_source
from metaviz.core.tree import ModuleTree, tree
from metaviz.views.payload import payload
from metaviz.widgets import acting, cells, notebook, wishes
from metaviz.widgets.files import joined
from metaviz.widgets.places import Places, ranges, unranged
from metaviz.widgets.worker import Latest

COLUMNS = ("class", "amount", "size", "share", "dtype", "device", "mark")

# What the browser may set besides the traits that are for everybody.
_FROM_BROWSER = ("_ticked", "_opened")


def _clean_ticks(value: dict[str, Any], places: Places) -> dict[str, Any] | None:
    rows = value.get("rows")
    if not isinstance(rows, list | tuple):
        return None
    known = [row for row in rows if type(row) is int and 0 <= row < len(places)]
    return {"rows": places.outermost(known)}


def _clean_opened(value: dict[str, Any], places: Places) -> dict[str, Any] | None:
    cleaned = {}
    for name in ("rows", "unfolded"):
        pairs = value.get(name)
        if not isinstance(pairs, list | tuple):
            return None
        sane = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
        cleaned[name] = [list(pair) for pair in sane if all(type(edge) is int for edge in pair)]
    return cleaned


class TreeWidget(anywidget.AnyWidget):
    """A model as a tree that can be opened, searched, ticked and acted on.

    It follows the model: what other cells do to it is shown after they have run. It does not keep it alive.

    Args:
        model: A model, or a :class:`metaviz.ModuleTree` of one or of a part.
        source: Whose marks to show, as for :func:`metaviz.tree`.
        checkpoint: Where values can be read from, as for :func:`metaviz.materialize`.
        depth: How many levels to open at first.
        called: What the user calls the model, for code to paste; found among the notebook's names if None.

    Attributes:
        selection: Paths of the ticked modules and tensors, a module for all that is below it. Can be set, globs too.
        filter: What the box says: ``"is:blocked dtype:bf16"``.
        expanded: Paths of the open modules; ``"layers.*"`` where repeated blocks are shown one by one. Can be set.
        plan: The :class:`metaviz.Plan` for the selection, None where nothing is ticked or it cannot be made.
        report: The :class:`metaviz.Report` of the last thing done here.
        device: Where to materialize, as for :func:`metaviz.materialize`.
        source: ``"auto"``, ``"checkpoint"``, ``"replay"`` or ``"reset"``.
        rng: ``"eager"``, ``"keyed"`` or ``"device"``.
        dtype: ``""`` for the dtype that each tensor has, ``"checkpoint"``, or a dtype such as ``"bfloat16"``.
        blocked: ``"error"``, or ``"skip"`` to leave on meta what cannot be filled.
        sort: ``"model"`` or ``"size"``: the order of siblings.
        columns: Which columns to show.

    Raises:
        TypeError: ``model`` is neither.

    Example:
        >>> widget = metaviz.show(model)  # doctest: +SKIP
        >>> widget.selection = ["layers.0", "head"]  # doctest: +SKIP
    """

    _esm = joined(
        *("rows.js", "filter.js", "ticks.js", "parts.js", "rowlist.js", "side.js", "bar.js", "tools.js"),
        *("kernel.js", "keys.js", "tree.js"),
    )
    _css = joined("tree.css")

    _payload = traitlets.Bytes().tag(sync=True)
    _shape = traitlets.Int().tag(sync=True)
    _ticked = traitlets.Dict().tag(sync=True)
    _opened = traitlets.Dict().tag(sync=True)
    _plan = traitlets.Dict().tag(sync=True)
    _progress = traitlets.Dict().tag(sync=True)
    _outcome = traitlets.Dict().tag(sync=True)
    _devices = traitlets.List().tag(sync=True)
    _sources = traitlets.List().tag(sync=True)
    _twin = traitlets.Unicode().tag(sync=True)
    _gone = traitlets.Unicode().tag(sync=True)

    filter = traitlets.Unicode().tag(sync=True)
    sort = traitlets.Enum(("model", "size"), "model").tag(sync=True)
    columns = traitlets.List(traitlets.Enum(COLUMNS), list(COLUMNS)).tag(sync=True)
    device = traitlets.Unicode("cpu").tag(sync=True)
    source = traitlets.Enum(SOURCES, "auto").tag(sync=True)
    rng = traitlets.Enum(("eager", "keyed", "device"), "eager").tag(sync=True)
    dtype = traitlets.Unicode().tag(sync=True)
    blocked = traitlets.Enum(("error", "skip"), "error").tag(sync=True)

    selection = traitlets.List(traitlets.Unicode())
    expanded = traitlets.List(traitlets.Unicode())
    plan = traitlets.Any(None, allow_none=True)
    report = traitlets.Any(None, allow_none=True)

    def __init__(
        self,
        model: nn.Module | ModuleTree,
        *,
        source: str = "auto",
        checkpoint: Any = None,
        depth: int | None = None,
        called: str | None = None,
    ) -> None:
        seen = model if isinstance(model, ModuleTree) else tree(model, source=source, checkpoint=checkpoint)
        self._named = called
        self._guard = threading.RLock()
        self._model = weakref.ref(seen.model)
        self._tree = seen
        self._print = watch.fingerprint(seen.model)
        # What the sources have said of the model as it is now; they are asked when somebody wants to know.
        self._known: Sources | None = None
        self._places = Places(seen.columns, seen.root)
        # What the browser has said last, and need not be told again.
        self._said: dict[str, list[str]] = {}
        # The last good values of what the browser may set.
        self._sane: dict[str, dict[str, Any]] = {}
        # Whether a look was begun and not ended.
        self._overdue = False
        self._acting = acting.Acting(self)
        first = self._places.first_look(depth)
        super().__init__(
            _payload=payload(seen),
            _shape=1,
            _ticked={"shape": 1, "rows": []},
            _opened={"shape": 1, "rows": ranges(first), "unfolded": []},
            _sources=[
                each for each in SOURCES if each != "checkpoint" or seen.columns.checkpoint is not None
            ],
            _devices=acting.choices(),
            _twin=notebook.new_key(),
            source=seen.columns.source,
        )
        self._follows = Latest("metaviz-follow")
        self._asks = Latest("metaviz-details")
        self.observe(self._choose_again, ["device", "source", "rng", "dtype", "blocked"])
        self.on_msg(wishes.answer)
        notebook.live.add(self)
        watch.listen(self.follow)
        # Also where it is shown inside of another widget.
        notebook.hook()

    @property
    def called(self) -> str:
        """What the user calls the model."""
        model = self._model()
        found = None if model is None else notebook.called(model)
        return self._named or found or self._tree.columns.called

    @property
    def tree(self) -> ModuleTree:
        """The :class:`metaviz.ModuleTree` that is shown."""
        return self._tree

    @property
    def model(self) -> nn.Module:
        """The model.

        Raises:
            UnknownPath: It is gone: a widget does not keep it alive.
        """
        return self._tree.model

    def close(self) -> None:
        """Take the widget away, in all cells, and free all that belongs to it. What it has begun is cancelled."""
        if self.comm is not None:
            self._acting.cancel()
            self._follows.drop()
            self._asks.drop()
            watch.leave(self.follow)
            notebook.live.discard(self)
            notebook.unhook()
            self._known = None
            self.layout.close()
        super().close()

    def publish(self, **facts: Any) -> None:
        """Set what only the browser looks at, from any thread, as one message."""
        with self._guard, self.hold_sync():
            for name, value in facts.items():
                self.set_trait(name, value)

    def publish_if_free(self, **facts: Any) -> None:
        """As `publish`, or not at all where the guard is taken: for what comes again anyway."""
        if self._guard.acquire(blocking=False):
            try:
                self.publish(**facts)
            finally:
                self._guard.release()

    def tell_user(self, **facts: Any) -> None:
        """Set traits that the user's own functions may observe; what those raise is said in the widget."""
        for name, value in facts.items():
            try:
                self.set_trait(name, value)
            except Exception as error:
                said = acting.failed(error)
                self.publish(_outcome={**said, "text": f"What observes {name!r} raised {said['text']}"})

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take what the browser says; ipywidgets calls it."""
        known = {key: value for key, value in sync_data.items() if key in _FROM_BROWSER or key[0] != "_"}
        # Threads of ours may be setting other traits.
        with self._guard:
            super().set_state(known)

    @traitlets.validate("selection")
    def _known_selection(self, proposal: Any) -> list[str]:
        return [self._places.path(row) for row in self._places.rows(proposal["value"])]

    @traitlets.validate("expanded")
    def _known_expanded(self, proposal: Any) -> list[str]:
        if proposal["value"] == self._said.get("expanded"):
            return proposal["value"]
        return self._places.expanded(*self._places.opened(proposal["value"]))

    @traitlets.validate("_ticked", "_opened")
    def _sane_rows(self, proposal: Any) -> dict[str, Any]:
        name, value = proposal["trait"].name, proposal["value"]
        if value.get("shape") == self._shape:
            clean = _clean_ticks if name == "_ticked" else _clean_opened
            cleaned = clean(value, self._places)
            if cleaned is not None:
                self._sane[name] = {**cleaned, "shape": self._shape}
        # What belongs to another tree, or means nothing, changes nothing: by now the trait itself may have it.
        return self._sane[name]

    @traitlets.validate("source")
    def _known_source(self, proposal: Any) -> str:
        check_source(proposal["value"], self._tree.columns.checkpoint)
        return proposal["value"]

    @traitlets.validate("device")
    def _known_device(self, proposal: Any) -> str:
        value = proposal["value"]
        return value if value == "auto" else str(devices.resolve(value))

    @traitlets.validate("dtype")
    def _known_dtype(self, proposal: Any) -> str:
        return acting.check_dtype(proposal["value"])

    @traitlets.observe("selection")
    def _selected(self, change: Any) -> None:
        by_code = change["new"] != self._said.get("selection")
        if by_code:
            self._ticked = {"shape": self._shape, "rows": self._places.rows(change["new"])}
        # Who sets it in code reads the plan in the next line; who clicks shall not wait.
        self._acting.think(now=by_code)

    @traitlets.observe("expanded")
    def _expanded(self, change: Any) -> None:
        if change["new"] != self._said.get("expanded"):
            is_open, unfolded = self._places.opened(change["new"])
            self._opened = {"shape": self._shape, "rows": ranges(is_open), "unfolded": ranges(unfolded)}

    @traitlets.observe("_ticked")
    def _ticked_there(self, change: Any) -> None:
        self._said["selection"] = [self._places.path(row) for row in change["new"]["rows"]]
        self.selection = self._said["selection"]

    @traitlets.observe("_opened")
    def _opened_there(self, change: Any) -> None:
        pairs = (change["new"][key] for key in ("rows", "unfolded"))
        is_open, unfolded = (unranged(each, len(self._places)) for each in pairs)
        self._said["expanded"] = self._places.expanded(is_open, unfolded)
        self.expanded = self._said["expanded"]

    def _choose_again(self, change: Any) -> None:
        if change["name"] == "source":
            # The marks are those of the source that was chosen.
            self._follows.submit(lambda: self._look(always=True))
        if change["name"] == "device":
            self._devices = acting.choices(self.device)
        self._acting.think()

    def follow(self) -> None:
        """Look whether the model was changed, in a while, and show it as it is then."""
        # It holds the model, which shall live no longer than its user wants.
        self._known = None
        self._follows.submit(self._look)
        self._acting.resume()

    def changed_by_itself(self) -> None:
        """The model was changed from here: its marks have to be drawn anew, and its rows are as they were."""
        model = self._model()
        if model is not None:
            self._overdue, self._print = True, watch.fingerprint(model)
            self.follow()

    def _look(self, always: bool = False) -> None:
        model = self._model()
        if model is None:
            self.publish(_gone="The model is gone: nothing else holds it. Run the cell that makes it again.")
            return
        try:
            seen_as = watch.fingerprint(model)
            if always or self._overdue or seen_as != self._print:
                self._overdue = True
                self._show_anew(model, seen_as)
                self._overdue = False
        except cells.CellRuns:
            # After the cell it is looked at anyway.
            return
        except Exception as error:
            self.publish(_outcome=acting.failed(error))

    def _show_anew(self, model: nn.Module, seen_as: int) -> None:
        columns, path = self._tree.columns, self._tree.path
        found = tree(model, source=self.source, checkpoint=columns.checkpoint)
        found.columns.called = self.called
        if path and path not in found:
            self.publish(_gone=f"The model has no {path!r} any more. Next: metaviz.show({self.called})")
            return
        seen = found[path]
        places, packed = Places(seen.columns, seen.root), payload(seen)
        with self._guard:
            same = (columns.names, columns.parents) == (seen.columns.names, seen.columns.parents)
            selection = [path for path in self.selection if places.row(path) is not None]
            opened = self._opened if same else self._carried(places)
            self._tree, self._places, self._print, self._known = seen, places, seen_as, None
            shape = self._shape + (not same)
            rows = [row for path in selection if (row := places.row(path)) is not None]
            with self.hold_sync():
                self._shape, self._payload, self._gone = shape, packed, ""
                if not same:
                    self._ticked = {"shape": shape, "rows": places.outermost(rows)}
                    self._opened = {**opened, "shape": shape}
        self._acting.think()

    def _carried(self, places: Places) -> dict[str, Any]:
        """What is open, in the rows of another tree: what is not there any more is left out."""
        there = [
            path
            for path in self.expanded
            if places.row(path.removesuffix("*").removesuffix(".") if path.endswith("*") else path)
            is not None
        ]
        is_open, unfolded = places.opened(there)
        return {"rows": ranges(is_open), "unfolded": ranges(unfolded)}

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return notebook.bundle(super()._repr_mimebundle_(**options), self._tree)

    def _ipython_display_(self) -> None:
        notebook.put(self, super()._repr_mimebundle_(), self._tree)

    def __repr__(self) -> str:
        chosen = f", {len(self.selection):,} chosen" if self.selection else ""
        return f"<TreeWidget of {self.called}: {len(self._places):,} rows{chosen}>"
