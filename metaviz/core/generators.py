"""Follows the random generators that a constructor draws from, without drawing for it.

A taped random op draws nothing. So that ``manual_seed``, ``fork_rng`` or ``set_state`` in a constructor are noticed and
mean what they mean in an ordinary build, the real generator gets a state of its own after each taped op: a token that
names the place in the stream of draws. A token that comes back, be it in another generator, leads back to its place.
Threads that record at the same time share the global generator: each takes the other's tokens for no change.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
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
    state: torch.Tensor
    token: bytes
    stream: Stream
    next: Place


_lock = threading.RLock()
# States are real tensors, also where the caller works with fake ones.
_plainly = torch._C._DisableTorchDispatch
_recording: list[Generators] = []


class Generators:
    """The generators of one recording; :meth:`close` puts each back to its state at first use."""

    def __init__(self) -> None:
        self._followed: dict[int, _Followed] = {}
        self._places: dict[int, Place] = {}
        self._maker = torch.Generator()
        with _lock, _plainly():
            _recording.append(self)
            self._maker.manual_seed(zlib.crc32(self._follow(torch.default_generator).token))

    def place(self, generator: torch.Generator | None, draw: Any) -> Place:
        """The place of the next random op of ``generator`` (None: the default one): ``(stream, index)``."""
        with _lock, _plainly():
            if self not in _recording:
                raise RuntimeError("This recording has been given up on: it can draw nothing any more.")
            followed = self._follow(torch.default_generator if generator is None else generator)
            state = followed.generator.get_state()
            token = _token(state)
            if token != followed.token and not self._is_of_another(hash(token)):
                followed.stream = Stream(self._places.get(hash(token), state))
                followed.next = (followed.stream, 0)
                self._places.setdefault(hash(token), followed.next)
            stream = followed.stream
            index = stream.append(draw)
            here, followed.next = followed.next, (stream, index + 1)
            self._set_token(followed, token)
            return here

    def _set_token(self, followed: _Followed, now: bytes) -> None:
        """Put the generator on a new token, which is a good state to draw from: other threads may."""
        self._maker.manual_seed(self._maker.initial_seed() + 1)
        followed.state = self._maker.get_state()
        # The first 8 bytes are what `torch.initial_seed()` answers.
        followed.state.numpy().data[:8] = now[:8]
        followed.generator.set_state(followed.state)
        followed.token = _token(followed.state)
        self._places[hash(followed.token)] = followed.next

    def _is_of_another(self, token: int) -> bool:
        return token not in self._places and any(token in other._places for other in _recording)

    def draw_now(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run a random op for real at its place in the stream; the tokens stay as they are."""
        done = _Done()
        generator = kwargs.get("generator") or torch.default_generator
        with _lock, plain_torch():
            stream, index = self.place(generator, done)
            token = generator.get_state()
            generator.set_state(stream.state_before(index))
            try:
                return func(*args, **kwargs)
            finally:
                done.after = generator.get_state()
                generator.set_state(token)

    def close(self) -> None:
        """Put every generator back to its state at first use; once, also when called again."""
        with _lock, _plainly():
            if self not in _recording:
                return
            _recording.remove(self)
            for key, followed in self._followed.items():
                others = [other._followed[key] for other in _recording if key in other._followed]
                followed.generator.set_state(others[0].state if others else followed.before)

    def reached(self) -> list[tuple[torch.Generator, Place]]:
        """Each generator that was drawn from, and the place that it would be at now in an ordinary run."""
        return [(followed.generator, followed.next) for followed in self._followed.values()]

    def _follow(self, generator: torch.Generator) -> _Followed:
        followed = self._followed.get(id(generator))
        if followed is None:
            state = generator.get_state()
            token = _token(state)
            others = (other._followed.get(id(generator)) for other in _recording)
            # Another thread's recording will put the generator back to where it found it.
            before = next((other.before for other in others if other), state)
            stream = Stream(self._places.get(hash(token), before))
            self._places.setdefault(hash(token), (stream, 0))
            followed = _Followed(generator, before, state, token, stream, (stream, 0))
            self._followed[id(generator)] = followed
        return followed


def _token(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
