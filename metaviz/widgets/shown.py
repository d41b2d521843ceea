"""`show`: a model as what the place it is shown in can show."""

from __future__ import annotations

from typing import Any

from torch import nn

from metaviz.core.tree import ModuleTree, tree
from metaviz.widgets import notebook
from metaviz.widgets.tree import TreeWidget


def show(
    model: nn.Module | ModuleTree,
    path: str = "",
    *,
    source: str = "auto",
    checkpoint: Any = None,
    depth: int | None = None,
    static: bool = False,
) -> TreeWidget | ModuleTree:
    """A model to look at and act on: a widget in a notebook, text in a terminal.

    Without a kernel, with ``static=True``, or with ``METAVIZ_STATIC=1`` in the environment it is the
    :class:`metaviz.ModuleTree`, which shows itself as text or as HTML without scripts.

    Args:
        model: A model, or a tree of one.
        path: The module or tensor to start from.
        source: Whose marks to show, as for :func:`metaviz.tree`.
        checkpoint: Where values can be read from, as for :func:`metaviz.materialize`.
        depth: How many levels to open; as many as there is room for if None.
        static: Whether to show a picture instead of a widget.

    Raises:
        TypeError: ``model`` is neither.
        UnknownPath: There is no such module or tensor.
        BadCheckpoint: The checkpoint cannot be read.
        CheckpointMismatch: Nothing in the checkpoint fits the model.

    Example:
        >>> widget = metaviz.show(torch.nn.Linear(2, 3, device="meta"))
    """
    seen = model if isinstance(model, ModuleTree) else tree(model, source=source, checkpoint=checkpoint)
    if not isinstance(model, ModuleTree):
        seen.columns.called = notebook.called(model) or "model"
    if path:
        seen = seen[path]
    if static or not notebook.has_front_end():
        return seen
    return TreeWidget(seen, depth=depth, called=seen.columns.called)
