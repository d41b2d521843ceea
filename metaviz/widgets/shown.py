"""`show`: a model or a mesh as what the place it is shown in can show."""

from __future__ import annotations

from typing import Any

from torch import nn

from metaviz.core.layout import MeshLayout
from metaviz.core.meshes import mesh
from metaviz.core.tree import ModuleTree, tree
from metaviz.widgets import notebook
from metaviz.widgets.mesh import MeshWidget
from metaviz.widgets.tree import TreeWidget


def show(
    thing: nn.Module | ModuleTree | Any,
    path: str = "",
    *,
    source: str = "auto",
    checkpoint: Any = None,
    depth: int | None = None,
    static: bool = False,
) -> TreeWidget | ModuleTree | MeshWidget | MeshLayout:
    """A model or a mesh to look at and act on: a widget in a notebook, text in a terminal.

    Without a kernel, with ``static=True``, or with ``METAVIZ_STATIC=1`` in the environment it is the
    :class:`metaviz.ModuleTree` or :class:`metaviz.MeshLayout`, which shows itself as text or as HTML without scripts.

    Args:
        thing: A model, or a tree of one; or a mesh, and whatever :func:`metaviz.mesh` finds one in.
        path: Of a model: the module or tensor to start from.
        source: Of a model: whose marks to show, as for :func:`metaviz.tree`.
        checkpoint: Of a model: where values can be read from, as for :func:`metaviz.materialize`.
        depth: Of a model: how many levels to open; as many as there is room for if None.
        static: Whether to show a picture instead of a widget.

    Raises:
        UnknownPath: There is no such module or tensor.
        BadCheckpoint: The checkpoint cannot be read.
        CheckpointMismatch: Nothing in the checkpoint fits the model.
        BadMesh: It is no model and has no mesh.

    Example:
        >>> widget = metaviz.show(torch.nn.Linear(2, 3, device="meta"))
    """
    drawn = not static and notebook.has_front_end()
    if not isinstance(thing, ModuleTree) and not issubclass(type(thing), nn.Module):
        layout = thing if isinstance(thing, MeshLayout) else mesh(thing, namespace=notebook.names())
        if not drawn:
            return layout
        return MeshWidget(layout if isinstance(layout, MeshLayout) else None, namespace=notebook.names)
    seen = thing if isinstance(thing, ModuleTree) else tree(thing, source=source, checkpoint=checkpoint)
    if not isinstance(thing, ModuleTree):
        seen.columns.called = notebook.called(thing) or "model"
    if path:
        seen = seen[path]
    return (
        TreeWidget(seen, depth=depth, called=None if seen.columns.called == "model" else seen.columns.called)
        if drawn
        else seen
    )
