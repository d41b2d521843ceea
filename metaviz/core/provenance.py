"""Which line of the user's code an op comes from."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import CodeType

import torch
from torch import nn
from torch.nn import init

from metaviz.core.tape import Where

_TORCH = os.path.dirname(torch.__file__) + os.sep
_METAVIZ = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INIT = init.__file__
_LOAD = nn.Module._load_from_state_dict.__code__
# Modules whose functions only pass on to those of torch.nn.init.
_WRAPPERS = ("transformers.initialization",)

# Code objects are few, frames are many: whether one is ours or torch's is worked out once.
_inside: dict[CodeType, bool] = {}


# What a file is called. A shell that runs cells sets it, as the name of a cell's file tells nothing.
called: Callable[[str], str] = str


# One object per line of code, not one per op: a big model has a hundred thousand ops from a few lines.
_where = functools.lru_cache(maxsize=4096)(Where)


def said(place: Where) -> str:
    """A line in words: ``modeling_llama.py:57``. Its folder would tell of the machine in saved notebooks."""
    return f"{os.path.basename(called(place.filename))}:{place.line}"


# Functions of metaviz that call init methods: what is above them is no code that the op comes from.
callers: set[CodeType] = set()


def where() -> Where | None:
    """The innermost line outside of torch and metaviz, and the torch.nn.init function or load_state_dict it called.

    Of a method of torch that metaviz itself has called, it is the line of that method.
    """
    frame = sys._getframe(1)
    name, below = None, frame
    while frame is not None:
        code = frame.f_code
        if code in callers:
            return _where(name, below.f_code.co_filename, below.f_lineno)
        below = frame
        inside = _inside.get(code)
        if inside is None:
            ours = code.co_filename.startswith((_TORCH, _METAVIZ))
            inside = _inside[code] = ours or frame.f_globals.get("__name__") in _WRAPPERS
        if not inside:
            return _where(name, code.co_filename, frame.f_lineno)
        if code.co_filename == _INIT and not code.co_name.startswith("_"):
            name = code.co_name
        elif code is _LOAD:
            name = "load_state_dict"
        frame = frame.f_back
    return None
