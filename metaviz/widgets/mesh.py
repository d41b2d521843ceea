"""`MeshWidget`: a device mesh in a notebook. It waits with you, shows the layout once it is there, and goes stale."""

from __future__ import annotations

import dataclasses
import datetime
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from metaviz.core.layout import MeshLayout
from metaviz.core.meshes import Meshes, among, mesh_of, nothing
from metaviz.errors import BadMesh, MetavizError
from metaviz.views import mesh as words
from metaviz.views import svg
from metaviz.views.lines import clean
from metaviz.widgets import notebook
from metaviz.widgets.files import joined


class MeshWidget(anywidget.AnyWidget):
    """A mesh to look at: click a rank, or go there with the arrow keys, for its groups along each axis.

    After each cell it looks again, so a mesh that is awaited shows as soon as it is there, and one that was destroyed
    is marked stale. Nothing is started to find out.

    Args:
        what: What :func:`metaviz.mesh` takes; None for whatever the notebook's names hold.
        ranks_per_host: How many ranks a host has, as for :func:`metaviz.mesh`.

    Attributes:
        rank: The picked rank; None if none is. Can be set.
        colour: The axis whose groups are told apart by colour; `""` for none. Can be set.
        mesh: The :class:`metaviz.MeshLayout` that is shown.

    Example:
        >>> widget = metaviz.show(metaviz.mesh("dp=2,tp=4"))  # doctest: +SKIP
        >>> widget.rank = 5  # doctest: +SKIP
    """

    _esm = joined("parts.js", "kernel.js", "mesh.js")
    _css = joined("mesh.css")

    _svg = traitlets.Unicode().tag(sync=True)
    _title = traitlets.Unicode().tag(sync=True)
    _state = traitlets.Unicode().tag(sync=True)
    _facts = traitlets.List().tag(sync=True)
    _step = traitlets.Unicode().tag(sync=True)
    _axes = traitlets.List().tag(sync=True)
    _choices = traitlets.List().tag(sync=True)
    _chosen = traitlets.Unicode().tag(sync=True)
    _place = traitlets.Int(-1).tag(sync=True)
    _twin = traitlets.Unicode().tag(sync=True)
    colour = traitlets.Unicode().tag(sync=True)

    rank = traitlets.Int(None, allow_none=True)

    def __init__(self, what: Any = None, *, ranks_per_host: int | None = None, namespace: Any = None) -> None:
        self._guard = threading.RLock()
        self._since = datetime.datetime.now()
        self._hosts = ranks_per_host
        self._ask = _asking(what, ranks_per_host, namespace)
        self._mesh: MeshLayout = nothing()
        # Whether a change of rank or colour is to be drawn: not while both are brought to another mesh.
        self._drawn = False
        # Whether it is the browser who sets traits, and the last colour that was good.
        self._is_told, self._last_colour = False, ""
        self._found: Mapping[str, MeshLayout] = {}
        super().__init__(_twin=notebook.new_key())
        self.on_msg(_answer)
        self.follow_now()
        notebook.live.add(self)

    @property
    def mesh(self) -> MeshLayout:
        """The :class:`metaviz.MeshLayout` that is shown."""
        return self._mesh

    def close(self) -> None:
        """Take the widget away, in all cells."""
        notebook.live.discard(self)
        if self.comm is not None and self.layout is not None:
            self.layout.close()
        super().close()

    def follow(self) -> None:
        """Look whether the mesh, or the process group, is another one by now."""
        self.follow_now()

    def follow_now(self) -> None:
        """Look now, and show what there is."""
        try:
            found = self._ask()
        except BadMesh as error:
            # Something among the names has a plan that cannot be: the picture says so, and goes on looking.
            found = dataclasses.replace(nothing(), notes=(str(error),))
        self._found = {clean(n): each for n, each in found.found.items()} if isinstance(found, Meshes) else {}
        if self._found:
            chosen = self._chosen if self._chosen in self._found else next(iter(self._found))
            found = self._found[chosen]
        else:
            chosen = ""
        with self._guard, self.hold_sync():
            self._choices, self._chosen = list(self._found), chosen
            self._show(found)

    def _show(self, layout: MeshLayout) -> None:
        if self._drawn and layout == self._mesh:
            return
        if layout.state == "waiting" != self._mesh.state:
            self._since = datetime.datetime.now()
        self._mesh, self._drawn = layout, False
        if self.rank is not None and self.rank not in layout.place_of:
            self.rank = None
        if self.colour and self.colour not in layout.names:
            self.colour = ""
        self._axes = [
            [clean(axis.name), axis.size, svg.hue_of(layout, axis.name), axis.name] for axis in layout.axes
        ]
        self._state, self._title = layout.state, words.title(layout)
        self._step = layout.step or ""
        self._drawn = True
        self._draw()

    def _draw(self) -> None:
        layout, rank = self._mesh, self.rank
        self._svg = svg.svg(layout, rank=rank, colour=self.colour or None, legend=False)
        found = [(clean(head), clean(text, 1000)) for head, text in words.facts(layout, rank)]
        if layout.state == "waiting":
            found.append(("since", f"{self._since:%H:%M:%S}; this looks again after each cell"))
        self._facts = found
        whose = rank if rank is not None else layout.rank
        self._place = layout.place_of.get(whose, -1) if whose is not None else -1

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take what the browser says; ipywidgets calls it."""
        with self._guard:
            self._is_told = True
            try:
                super().set_state(sync_data)
            finally:
                self._is_told = False

    @traitlets.validate("rank")
    def _known_rank(self, proposal: Any) -> int | None:
        if proposal["value"] is not None:
            self._mesh.coordinate_of(proposal["value"])
        return proposal["value"]

    @traitlets.validate("colour")
    def _known_colour(self, proposal: Any) -> str:
        value = proposal["value"]
        if self._is_told and value and value not in self._mesh.names:
            # From a browser that still shows an older mesh. By now the trait itself has it.
            return self._last_colour
        if value:
            self._mesh.axis(value)
        self._last_colour = value
        return value

    @traitlets.observe("rank", "colour")
    def _changed(self, change: Any) -> None:
        if self._drawn:
            with self._guard, self.hold_sync():
                self._draw()

    @traitlets.observe("_place")
    def _place_there(self, change: Any) -> None:
        if 0 <= change["new"] < len(self._mesh.ranks):
            rank = self._mesh.ranks[change["new"]]
            if rank != self.rank and not (self.rank is None and rank == self._mesh.rank):
                self.rank = rank
        elif change["new"] >= 0:
            # From a browser that still shows an older mesh.
            self._draw()

    @traitlets.observe("_chosen")
    def _chosen_there(self, change: Any) -> None:
        if change["new"] in self._found:
            with self._guard, self.hold_sync():
                self._show(self._found[change["new"]])

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return notebook.bundle(super()._repr_mimebundle_(**options), self._mesh)

    def _ipython_display_(self) -> None:
        notebook.put(self, super()._repr_mimebundle_(), self._mesh)

    def __repr__(self) -> str:
        return f"<MeshWidget: {words.title(self._mesh)}>"


def _asking(what: Any, ranks_per_host: int | None, namespace: Any) -> Callable[[], MeshLayout | Meshes]:
    """How to find the mesh of something again, without keeping it alive."""
    if isinstance(what, MeshLayout):
        # A layout is a snapshot; what it was read from may have changed since.
        origin = what.origin() if what.origin is not None else None
        if origin is not None:
            return _asking(
                origin, what.ranks_per_host if ranks_per_host is None else ranks_per_host, namespace
            )
        # One that was found among the names is looked for there again.
        found = namespace is not None and among(namespace(), ranks_per_host) == what
        if what.state == "planned" or (what.ranks and not found):
            return lambda: what
        what = None
    if what is None:
        return lambda: among(namespace() if namespace is not None else {}, ranks_per_host)
    first = mesh_of(what, ranks_per_host)
    if first is None:
        raise BadMesh(f'An object of type {type(what).__name__} has no mesh. Next: metaviz.mesh("dp=2,tp=4")')
    try:
        held = weakref.ref(what)
    except TypeError:
        return lambda: mesh_of(what, ranks_per_host) or first
    last = [first]

    def ask() -> MeshLayout:
        thing = held()
        if thing is not None:
            last[0] = mesh_of(thing, ranks_per_host) or last[0]
        return last[0]

    return ask


def _answer(widget: MeshWidget, message: Any, buffers: Any) -> None:
    """Answer a wish of the browser, once."""
    number, wish = message.get("id"), message.get("do")
    found = {}
    try:
        if wish == "look":
            widget.follow_now()
        elif wish == "svg":
            found["svg"] = svg.svg(widget.mesh, rank=widget.rank, colour=widget.colour or None)
        elif wish != "ping":
            raise MetavizError(f"The front end asks for {wish!r}, which is not known here.")
    except Exception as error:
        widget.send({"id": number, "ok": False, "kind": "error", "text": str(error), "next": ""})
    else:
        widget.send({"id": number, "ok": True, **found})
