"""What ``%metaviz`` answers: versions, devices, models of this session, and what each magic is for."""

from __future__ import annotations

import html
import platform
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import IPython
import torch
from torch.utils._device import DeviceContext

import metaviz
from metaviz.core import devices
from metaviz.core.tree import tree
from metaviz.core.verdict import Verdict
from metaviz.magics.built import describe
from metaviz.magics.names import models

_MODELS = 20
_UNASKED = Verdict(False, None, "")


class Line(NamedTuple):
    """One line of a page.

    Attributes:
        head: What it is about.
        text: What is to be said.
        code: The next step, one or more lines.
        warning: Whether it asks for attention.
    """

    head: str
    text: str
    code: str = ""
    warning: bool = False


MAGICS = (
    Line("%%meta_build", "Build models on the meta device, with a tape.", "%%meta_build\nmodel = Net()"),
    Line("%meta_tree", "See what is where; tick parts and give them values.", "%meta_tree model layers.1"),
    Line("", "Only what is wrong with a model, why, and what to do.", "%meta_tree model --blocked"),
    Line(
        "%meta_checkpoint",
        "See what is in a checkpoint, and how it fits a model. Only headers are read.",
        "%meta_checkpoint model.safetensors model",
    ),
    Line(
        "%meta_materialize",
        "Give parts the values of an ordinary build. --dry-run only says what would be done.",
        "%meta_materialize model layers.1 --device cpu",
    ),
    Line(
        "",
        "Or those of a checkpoint, of which only these parts are read.",
        "%meta_materialize model layers.1 --checkpoint model.safetensors",
    ),
    Line("%meta_unload", "Take parts back to meta and free their memory.", "%meta_unload model layers.1"),
    Line(
        "%meta_mesh",
        "See a device mesh: one that is there, one that is awaited, or a plan.",
        "%meta_mesh dp=2,tp=4",
    ),
    Line("%metaviz", "See versions, devices, and the models of this session.", "%metaviz"),
    Line("", "A question mark lists what a magic takes.", "%meta_materialize?"),
)


class Page:
    """Lines with heads, as text and as HTML, shown where it is the last expression of a cell."""

    def __init__(self, lines: Iterator[Line] | tuple[Line, ...]) -> None:
        self.lines = tuple(lines)

    def __repr__(self) -> str:
        width = max(len(line.head) for line in self.lines)
        return "\n".join(text for line in self.lines for text in _texts(line, width))

    def _repr_html_(self) -> str:
        rows = "".join(map(_row, self.lines))
        return f'<table style="margin: 0"><tbody>{rows}</tbody></table>'


def status(namespace: Mapping[str, Any]) -> Page:
    """Versions, devices with free memory, and the models in ``namespace``. No device context is created."""
    return Page(_status(namespace))


def manual() -> Page:
    """Each magic with what it is for and an example."""
    return Page(MAGICS)


def _status(namespace: Mapping[str, Any]) -> Iterator[Line]:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, IPython {IPython.__version__}"
    yield Line("metaviz", f"{metaviz.__version__}, {versions}")
    for name in devices.names():
        yield Line(name, free(torch.device(name)))
    found = models(namespace)
    for name in list(found)[:_MODELS]:
        # Where the values could come from is not shown here, and asking takes most of the time.
        yield Line(name, describe(tree(found[name], answer=lambda *_: _UNASKED)))
    if len(found) > _MODELS:
        yield Line("…", f"and {len(found) - _MODELS} more models")
    if not found:
        yield Line("models", "No name holds one yet.", "%%meta_build\nmodel = Net()")
    if _default_device() == "meta":
        text = "meta: what torch makes outside of metaviz has no values, and no tape to get them from."
        yield Line("default device", text, "torch.set_default_device(None)", warning=True)
    yield Line("help", "What the magics are for, with examples.", "%metaviz help")


def _default_device() -> str | None:
    """Type of the device on which factories make tensors, None if nobody has chosen one."""
    # Not torch.get_default_device: that makes a tensor to find the number of a CUDA device.
    modes = torch.overrides._get_current_function_mode_stack()
    chosen = [mode.device.type for mode in modes if isinstance(mode, DeviceContext)]
    return chosen[-1] if chosen else None


def free(device: torch.device) -> str:
    """How much memory of ``device`` is free, in words; one that was not used yet is left alone."""
    started = device.type == "cpu" or getattr(torch.get_device_module(device), "is_initialized", bool)()
    if not started:
        return f"free memory not asked, that would start {device.type.upper()}"
    known = devices.described(device)
    return str(known).removeprefix(f"{device}: ")


def _texts(line: Line, width: int) -> Iterator[str]:
    yield f"{line.head:<{width}}  {line.text}"
    for code in line.code.splitlines():
        yield f"{'':<{width}}      {code}"


def _row(line: Line) -> str:
    text = html.escape(line.text)
    if line.warning:
        text = f"<b>{text}</b>"
    if line.code:
        text += f'<pre style="margin: 2px 0; background: none">{html.escape(line.code)}</pre>'
    cell = "text-align: left; vertical-align: top"
    code = f"{cell}; white-space: pre; font-family: var(--jp-code-font-family, monospace)"
    return f'<tr><th style="{code}">{html.escape(line.head)}</th><td style="{cell}">{text}</td></tr>'
