"""Turns what core knows into text, HTML and tables."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def draw(tree: Any, how: str, **options: Any) -> Any:
    """A :class:`metaviz.core.tree.ModuleTree` as ``"text"``, ``"html"`` or ``"frame"``.

    Each view is loaded when it is first asked for: a table needs pandas, and not everybody needs a table.
    """
    module = import_module(f"metaviz.views.{'table' if how == 'frame' else how}")
    return getattr(module, how)(tree, **options)
