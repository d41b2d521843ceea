"""The recorders of trials: a method on trial writes to stand-ins only, and decides by nothing that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from metaviz.core.record import VALUE_LIMIT
from metaviz.core.recorder import Recorder
from metaviz.core.tape import Tag, Tape, window_of
from metaviz.core.written import first_unread

# What answers with a number or a list, by which code decides.
_ANSWERS = {"_local_scalar_dense", "tolist", "equal", "allclose", "nonzero", "is_nonzero"}


class OutsideTensor(RuntimeError):
    """A method on trial uses a tensor that has no stand-in."""


class UnreadValue(RuntimeError):
    """A method on trial decides by a value that nothing has written."""


class TrialRecorder(Recorder):
    """A recorder that lets no tensor be written that has no stand-in, and takes none over."""

    def __init__(self, tape: Tape, outside: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(tape, VALUE_LIMIT)
        self._outside = outside
        self.problem: tuple[str, str] | None = None
        # Whether code has asked for a value that it has drawn, and may do something else the next time.
        self.decides = False

    def run(self, func: Any, kind: Any, args: tuple, kwargs: dict) -> Any:
        """Do one aten op, unless it writes to what has no stand-in."""
        if kind.written or kind.outs:
            for target in kind.targets(args, kwargs):
                self.guard(target)
        return super().run(func, kind, args, kwargs)

    def guard(self, tensor: torch.Tensor) -> None:
        """Raise if ``tensor`` has no stand-in."""
        if not self.is_taped(tensor) and (tensor.device.type != "meta" or self._outside(tensor)):
            self._stop("unsupported", "it writes to a tensor outside of its module", OutsideTensor)

    def _take_over(self, tensor: torch.Tensor, tag: Tag) -> None:
        self._stop("unsupported", "it uses a tensor outside of its module that is on meta", OutsideTensor)

    def _stop(self, state: str, detail: str, error: type[RuntimeError]) -> None:
        self.problem = self.problem or (state, detail)
        raise error(detail)


class StrictRecorder(TrialRecorder):
    """Lets no method decide by a value that nothing has written."""

    def value(self, tensor: torch.Tensor, reader: str) -> torch.Tensor:
        """The values of ``tensor``; where they would be garbage and answer a question, the trial stops."""
        if reader in _ANSWERS:
            window = window_of(tensor)
            if self.tape.unwritten(window) or first_unread(self.tape, window):
                self._stop("reads", "a value that nothing has written", UnreadValue)
            ops = (self.tape.ops[k] for k in self.tape.slice([window.storage]))
            self.decides = self.decides or any(op.draw for op in ops)
        return super().value(tensor, reader)
