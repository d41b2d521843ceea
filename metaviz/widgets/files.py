"""The front ends: files of this folder, each widget's as one."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def joined(*names: str) -> str:
    """Some files of this folder as one text: a front end has to be a single module.

    A text, and no path: anywidget keeps widgets alive whose module is a path (anywidget issue 929, seen with 0.11).
    """
    return "\n".join((_HERE / name).read_text("utf-8") for name in names)
