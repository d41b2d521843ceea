"""The program of a reset: the init methods that give some tensors their values, run once, on shadows, onto one tape."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from metaviz.core.methods import Call
from metaviz.core.sandbox import run_aside
from metaviz.core.sources import Slot, Sources
from metaviz.core.tape import Tape, Window
from metaviz.core.tryout import Made, Run
from metaviz.core.written import first_unread

#: Seconds that a whole program may take, and how many more for each method.
_SECONDS, _EACH = 30.0, 0.05


class Program:
    """What the init methods did for some tensors.

    Args:
        sources: Of the model.
        wanted: The tensors, each with a place in the model; of all of them reset must be able to give the values.

    Attributes:
        tape: What the methods did.
        calls: The methods, in their order.
        failed: `{id of a tensor: reason}` for those that have no values all the same.
    """

    def __init__(self, sources: Sources, wanted: Iterable[tuple[torch.Tensor, Slot]]) -> None:
        self._sources = sources
        self._wanted = list(wanted)
        self._places: dict[int, Slot] = {}
        self._calls_of: dict[int, list[Call]] = {}
        self.failed: dict[int, str] = {}
        self._made: dict[int, Made] = {}
        self._advance: list[Callable[[], Any]] = []
        self._others: list[Callable[[], Any]] = []
        self.calls = self._ordered()
        self.tape = self._run()

    def _run(self) -> Tape:
        """Call the methods; those that fail are left out, with the tensors that want them."""
        while True:
            names = [
                f"{self._sources.resets.path(call.argument or call.module)}.{call.method}"
                for call in self.calls
            ]
            run = Run(self.calls, self._sources.resets.is_ours, grad=False, names=names)
            seconds = _SECONDS + _EACH * len(self.calls)
            take = functools.partial(self._take, run)
            outcome = run_aside(functools.partial(run.go, take), seconds, run.abandon)
            state, detail = run.state(outcome)
            if state == "ran":
                return run.tape
            broken = self.calls.pop(run.at) if self.calls else None
            if not outcome.finished:
                detail = f"it did not finish within {seconds:.0f} s"
            if broken is None or not outcome.finished or not self._drop(broken, detail or state):
                reason = (
                    f"The init methods, called one after the other, do not get through: {detail or state}"
                )
                self.failed.update((id(tensor), reason) for tensor, _ in self._wanted)
                return run.tape

    def _drop(self, broken: Call, detail: str) -> bool:
        """Give up on the tensors that want a method; False if there are none."""
        path = self._sources.resets.path(broken.module) or "the root"
        reason = f"{type(broken.module).__name__}.{broken.method}() of {path}, called after others: {detail}"
        lost = {id(tensor) for tensor, _ in self._wanted if broken in self._calls_of[id(tensor)]}
        self.failed.update(dict.fromkeys(lost, reason))
        self._wanted = [pair for pair in self._wanted if id(pair[0]) not in lost]
        return bool(lost)

    def window(self, tensor: torch.Tensor) -> Window:
        """Where the values of a wanted tensor are on the tape."""
        return self._made[id(tensor)].window

    def is_in_place(self, tensor: torch.Tensor) -> bool:
        """Whether the methods wrote into the tensor, and did not put another one into its place."""
        return self._made[id(tensor)].same

    def advance(self, rng: str) -> None:
        """Let the random generators be where they would be had these methods been called by hand.

        Args:
            rng: How torch's random ops were drawn: only `"eager"` stands for draws from the CPU's generator.
        """
        for step in (*(self._advance if rng == "eager" else ()), *self._others):
            step()

    def _ordered(self) -> list[Call]:
        """The methods to call: children before parents, models' methods last."""
        resets = self._sources.resets
        calls: dict[tuple[int, str, int], Call] = {}
        tied: list[tuple[list[Call], list[Slot]]] = []
        for tensor, slot in self._wanted:
            place, steps = self._sources.steps(tensor, slot)
            self._places[id(tensor)] = place
            self._calls_of[id(tensor)] = [step.call for step in steps]
            for step in steps:
                for call in (
                    *(resets.before(step.call.module) if step.trial.after_children else ()),
                    step.call,
                ):
                    calls.setdefault((id(call.module), call.method, id(call.argument)), call)
            others = [each for each in self._sources.slots(tensor, slot) if each != place]
            if others:
                tied.append(([step.call for step in steps], others))
        order = sorted(calls.values(), key=resets.order)
        for chosen, others in tied:
            # The method of another place that holds the same tensor would undo what the chosen one writes.
            later = [
                at
                for at, call in enumerate(order)
                if call not in chosen and any(call.module is each.module for each in others)
            ]
            if later and later[-1] > order.index(chosen[-1]):
                order.remove(chosen[-1])
                order.insert(later[-1], chosen[-1])
        return order

    def _take(self, run: Run) -> None:
        """Note where the values of the wanted tensors are, and which have none."""
        for tensor, _ in self._wanted:
            place = self._places[id(tensor)]
            made = run.made(place.module).get(place.name)
            if made is None:
                self.failed[id(tensor)] = "Its init method takes it away."
            elif run.tape.unwritten(made.window) or made.window.size != tuple(tensor.shape):
                self.failed[id(tensor)] = "Its init method does not write all of it."
            elif first_unread(run.tape, made.window):
                self.failed[id(tensor)] = "Its init method computes it from values that nothing has written."
            else:
                self._made[id(tensor)] = made
        self._advance, self._others = _generators(run), _others()


def _generators(run: Run) -> list[Callable[[], Any]]:
    return [
        lambda generator=generator, stream=stream, index=index: generator.set_state(
            stream.state_before(index)
        )
        for generator, (stream, index) in run.reached()
    ]


def _others() -> list[Callable[[], Any]]:
    """For methods that draw from these and not from torch."""
    state = random.getstate()
    steps: list[Callable[[], Any]] = [lambda: random.setstate(state)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        drawn = numpy.random.get_state()
        steps.append(lambda: numpy.random.set_state(drawn))
    return steps
