"""Follows the random generators that a constructor draws from, without drawing for it.

A taped random op draws nothing. So that ``manual_seed``, ``fork_rng`` or ``set_state`` in a constructor are noticed and
mean what they mean in an ordinary build, the real generator makes one draw for each taped op: its state is then a token
that names the place in the stream of draws, and a token that comes back leads back to its place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from metaviz.core.replay import plain_torch
from metaviz.core.rng import Stream

Place = tuple[Stream, int]


class _Done:
    """A draw that has been made already: all that is left of it is the state after it."""

    count = None
    after: torch.Tensor

    def run(self, generator: torch.Generator) -> None:
        generator.set_state(self.after)


@dataclasses.dataclass(slots=True)
class _Followed:
    generator: torch.Generator
    before: torch.Tensor
    token: bytes
    stream: Stream
    next: Place
    places: dict[int, Place]


class Generators:
    """The generators of one recording; :meth:`close` puts each back to its state at first use."""

    def __init__(self) -> None:
        self._followed: dict[int, _Followed] = {}
        with plain_torch():
            self._scratch = torch.empty(1)
        self._follow(torch.default_generator)

    def place(self, generator: torch.Generator | None, draw: Any) -> Place:
        """The place of the next random op of ``generator`` (None: the default one): ``(stream, index)``."""
        followed = self._follow(torch.default_generator if generator is None else generator)
        token = _token(followed.generator)
        if token != followed.token:
            start = followed.places.get(hash(token), followed.generator.get_state())
            followed.stream = Stream(start)
            followed.next = (followed.stream, 0)
            followed.places.setdefault(hash(token), followed.next)
        stream = followed.stream
        index = stream.append(draw)
        with torch._C._DisableTorchDispatch():
            self._scratch.random_(generator=followed.generator)
        followed.token = _token(followed.generator)
        here, followed.next = followed.next, (stream, index + 1)
        followed.places[hash(followed.token)] = followed.next
        return here

    def draw_now(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run a random op for real at its place in the stream; the tokens stay as they are."""
        done = _Done()
        generator = kwargs.get("generator") or torch.default_generator
        stream, index = self.place(generator, done)
        token = generator.get_state()
        with plain_torch():
            generator.set_state(stream.state_before(index))
            try:
                return func(*args, **kwargs)
            finally:
                done.after = generator.get_state()
                generator.set_state(token)

    def close(self) -> None:
        """Put every generator back to its state at first use."""
        for followed in self._followed.values():
            followed.generator.set_state(followed.before)

    def _follow(self, generator: torch.Generator) -> _Followed:
        followed = self._followed.get(id(generator))
        if followed is None:
            before, token = generator.get_state(), _token(generator)
            stream = Stream(before)
            first = (stream, 0)
            followed = _Followed(generator, before, token, stream, first, {hash(token): first})
            self._followed[id(generator)] = followed
        return followed


def _token(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()
