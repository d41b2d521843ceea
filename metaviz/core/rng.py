"""The random numbers of an ordinary CPU build, for one op at a time.

An op's numbers depend on the generator's state just before it, and that state on everything drawn earlier. A
`Stream` finds the state without drawing the rest again: it counts, and jumps. How many raw draws an op takes
differs between torch versions and processors, so `count_draws` measures it on this one. Imports torch and
core.mt19937 only, and never touches torch's global generator. Call it outside of recording modes: it makes
small tensors of its own.
"""

from __future__ import annotations

import functools
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from metaviz.core.mt19937 import (
    RAW_PER_PAIR,
    DrawCount,
    advance,
    after_one_normal,
    generator_at,
    jump,
    raw_values,
    without_waiting_normal,
)

__all__ = ["Draw", "DrawCount", "Stream", "count_draws", "jump"]

_Fill = Callable[[torch.Tensor, tuple[int, ...], torch.Generator], object]

# Op names, with an overload where overloads differ, and how to take what they take. A functional op or a
# factory comes down to the in-place op. Integer bounds change the count, other parameters do not; the tests
# hold torch to that. Left out, since their draws depend on values: multinomial, poisson, binomial, rrelu; and
# native_dropout, which knows only the global generator and so cannot be measured.
_FILLS: dict[str, _Fill] = {
    "uniform_ uniform rand rand_like": lambda t, _, g: t.uniform_(generator=g),
    "normal_ normal normal_functional randn randn_like": lambda t, _, g: t.normal_(generator=g),
    "bernoulli_.float bernoulli.p": lambda t, _, g: t.bernoulli_(0.5, generator=g),
    "bernoulli.default": lambda t, _, g: t.zero_().bernoulli(generator=g),
    "random_ randint randint_like": lambda t, bounds, g: t.random_(*bounds, generator=g),
    "exponential_ exponential": lambda t, _, g: t.exponential_(generator=g),
    "cauchy_ cauchy": lambda t, _, g: t.cauchy_(generator=g),
    "log_normal_ log_normal": lambda t, _, g: t.log_normal_(generator=g),
    "geometric_ geometric": lambda t, _, g: t.geometric_(0.5, generator=g),
    "randperm": lambda t, _, g: torch.randperm(len(t), generator=g, device="cpu"),
}
_FILL_BY_NAME = {f"aten.{name}": fill for names, fill in _FILLS.items() for name in names.split()}
_BOUNDS = {"from", "to", "low", "high"}

# Vectorized normals are made 16 at a time, so counts grow evenly only between sizes that are 16 apart.
_PERIOD = 16
_SMALL = 64
_LARGE = 1 << 20
# torch.randperm turns to 64-bit draws above 2**32 / 20 values: nothing that large is trusted.
_PERMUTATION_LIMIT = 1 << 27


def count_draws(
    func: torch._ops.OpOverload, args: Sequence, numel: int, dtype: torch.dtype, contiguous: bool = True
) -> DrawCount | None:
    """What a random op takes from the CPU generator, measured on this machine.

    The first call for an op, dtype and layout runs the op on scratch tensors; later ones look the law up.
    Sizes below 64 are each measured. Above, the law found on small sizes must also predict the generator's
    bytes at larger ones, up to a million values if so many are asked for.

    Args:
        func: The op as a dispatch mode sees it, for example `torch.ops.aten.uniform_.default`.
        args: Its positional arguments. Only integer bounds are read: any stand-in will do for the rest.
        numel: Elements of the tensor that it fills.
        dtype: Dtype of that tensor.
        contiguous: Whether that tensor is contiguous. Where it is not, normals are drawn in another way.

    Returns:
        The count, or None: an unknown op, or one whose draws depend on values. It has to be run in scratch.

    Example:
        >>> count_draws(torch.ops.aten.uniform_.default, (), 1000, torch.float64)
        DrawCount(raw=2000, normals=0)
    """
    found = _fill_and_bounds(func)
    if found is None:
        return None
    fill, places = found
    bounds = tuple(args[place] for place in places if place < len(args))
    if len(bounds) < len(places) or not all(type(bound) is int for bound in bounds):
        return None
    if dtype.is_floating_point and any(abs(bound) * torch.finfo(dtype).eps > 2 for bound in bounds):
        # Such a dtype skips integers of that size, and torch warns whenever the op runs.
        return None
    if func.overloadpacket is torch.ops.aten.randperm and numel > _PERMUTATION_LIMIT:
        return None
    sample = _Sample(fill, bounds, dtype, contiguous)
    if numel < _SMALL:
        return _measured(sample, numel)
    law = _law(sample, numel % _PERIOD, numel > _LARGE // 16)
    return law and law.at(numel)


@functools.cache
def _fill_and_bounds(func: torch._ops.OpOverload) -> tuple[_Fill, tuple[int, ...]] | None:
    """How to take what `func` takes, and at which of its arguments the bounds of the values are."""
    fill = _FILL_BY_NAME.get(str(func)) or _FILL_BY_NAME.get(str(func.overloadpacket))
    if fill is None:
        return None
    arguments = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    # uniform_ calls its bounds so too, but as floats.
    return fill, tuple(at for at, (name, kind) in enumerate(arguments) if name in _BOUNDS and kind != "float")


class _Sample(NamedTuple):
    """All that may change how much an op draws, besides the number of elements."""

    fill: _Fill
    bounds: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool

    def run(self, numel: int, state: torch.Tensor) -> torch.Tensor:
        """State after really filling `numel` elements."""
        stride = 1 if self.contiguous else 2
        generator = generator_at(state)
        scratch = torch.empty(numel * stride, dtype=self.dtype, device="cpu")[::stride]
        self.fill(scratch, self.bounds, generator)
        return generator.get_state()

    def takes(self, numel: int, count: DrawCount) -> bool:
        """Whether filling `numel` elements takes `count`, with and without a normal that waits."""
        return all(torch.equal(advance(start, count), self.run(numel, start)) for start in _starts())


@functools.cache
def _starts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two states to measure from: in the second, a normal waits."""
    state = jump(torch.Generator(device="cpu").manual_seed(0).get_state(), 100)
    return state, after_one_normal(state)


@functools.cache
def _measured(sample: _Sample, numel: int) -> DrawCount | None:
    """What `sample` takes for a small `numel`, or None where no `DrawCount` describes it."""
    start, _ = _starts()
    try:
        after = sample.run(numel, start)
    except (RuntimeError, TypeError, ValueError, Warning):
        return None
    # Look for the raw draws that come next among all that come after the start.
    windows = raw_values(start, 16 * numel + 64).unfold(0, 8, 1)
    found = (windows == raw_values(after, 8)).all(dim=1).nonzero()
    if not len(found):
        return None
    raw = int(found[0])
    _, waits = without_waiting_normal(after)
    guesses = DrawCount(raw), DrawCount(normals=2 * raw // RAW_PER_PAIR - waits)
    return next((guess for guess in guesses if sample.takes(numel, guess)), None)


class _Law(NamedTuple):
    """Counts at sizes `_PERIOD` apart: `base` at `numel` elements, and `step` more for each period."""

    numel: int
    base: DrawCount
    step: DrawCount

    def at(self, numel: int) -> DrawCount:
        n = (numel - self.numel) // _PERIOD
        return DrawCount(self.base.raw + n * self.step.raw, self.base.normals + n * self.step.normals)


@functools.cache
def _law(sample: _Sample, residue: int, large: bool) -> _Law | None:
    """The law for sizes that leave `residue`, or None where none holds."""
    first = 2 * _PERIOD + residue
    base, following = _measured(sample, first), _measured(sample, first + _PERIOD)
    if base is None or following is None:
        return None
    law = _Law(first, base, DrawCount(following.raw - base.raw, following.normals - base.normals))
    checks = [first + periods * _PERIOD for periods in (2, 39, 333, _LARGE // _PERIOD)]
    holds = all(sample.takes(numel, law.at(numel)) for numel in checks[: 4 if large else 3])
    return law if holds else None


@dataclass(slots=True)
class Draw:
    """One random op of a `Stream`.

    Attributes:
        run: Runs the op in scratch, drawing from the generator it is given. An op that takes no generator has
            to borrow the global one: keep its state, set it to ``generator.get_state()``, run the op, hand
            the global state to ``generator.set_state``, and set back what was kept.
        count: What the op takes, or None if only running tells; or a function that answers so, called once,
            when a state behind the op is first wanted. A plain int counts raw draws.
    """

    run: Callable[[torch.Generator], object]
    count: DrawCount | int | Callable[[], DrawCount | int | None] | None = None


class _Before(NamedTuple):
    """What the ops before one op took, and the last that took single normals, or could not be counted."""

    raw: int = 0
    normals: int = 0
    last_normals: int = -1
    last_uncounted: int = -1


# A state is kept for good once this much work lies between it and the last one kept: 1 MB per second of work.
_KEEP_SECONDS = 0.005
_RECENT = 256
# One for all streams, since running an op of one may ask another; reentrant, since it may ask the same one.
_LOCK = threading.RLock()


class Stream:
    """The states that one sequence of random ops meets in an ordinary CPU build.

    Ops are appended in program order, at about the cost of a list append. A state is found when asked for,
    from the nearest earlier one that is known: what can be counted is jumped over, the rest is run in
    scratch, and what cost time is kept. Threads may share a stream.

    Args:
        start: State before the first op, uint8 (5056,) as `torch.Generator.get_state` gives it; or another
            stream and an index, if the first op starts where that op of the other stream does.

    Attributes:
        seed: The seed of the generator that the ops draw from.

    Example:
        >>> stream = Stream(torch.Generator().manual_seed(0).get_state())
        >>> stream.append(Draw(lambda generator: torch.empty(4096).uniform_(generator=generator), count=4096))
        0
        >>> torch.equal(stream.state_before(1), jump(stream.state_before(0), 4096))
        True
    """

    def __init__(self, start: torch.Tensor | tuple[Stream, int]) -> None:
        own = isinstance(start, torch.Tensor)
        self._start = start.clone() if own else start
        self.seed: int = generator_at(start).initial_seed() if own else start[0].seed
        self._draws: list[Draw] = []
        self._before = [_Before()]
        # What is known: op -> (state before it, seconds of work since the last state that is kept for good).
        self._states: dict[int, tuple[torch.Tensor, float]] = {}
        self._known: list[int] = []
        self._recent: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._draws)

    def append(self, draw: Draw) -> int:
        """Add the next op; returns its index. Nothing is counted or run yet."""
        self._draws.append(draw)
        return len(self._draws) - 1

    def state_before(self, index: int) -> torch.Tensor:
        """State that an ordinary build has just before op `index`.

        Args:
            index: 0 to ``len(stream)``; the latter asks for the state after the last op.

        Returns:
            A new uint8 (5056,) tensor for `torch.Generator.set_state`.

        Raises:
            IndexError: No such op.
        """
        if not 0 <= index <= len(self):
            raise IndexError(f"No random op {index}: this stream has {len(self)}. Use 0 to {len(self)}.")
        with _LOCK:
            self._count_to(index)
            here = self._nearest(index)
            state, work = self._states[here]
            for at in self._uncounted_between(here, index):
                began = time.perf_counter()
                generator = generator_at(self._skipped(state, here, at))
                self._draws[at].run(generator)
                here, state = at + 1, generator.get_state()
                work = self._store(here, state, work + time.perf_counter() - began)
            if here < index:
                began = time.perf_counter()
                state = self._skipped(state, here, index)
                self._store(index, state, work + time.perf_counter() - began)
            return state.clone()

    def remember(self, index: int, state: torch.Tensor, seconds: float = 0.0) -> None:
        """Take in the state before op `index`, met when the op before it was really run.

        Saves running an op that cannot be counted once more in scratch, or a jump over one that can.

        Args:
            index: 0 to ``len(stream)``.
            state: uint8 (5056,), as `torch.Generator.get_state` gives it.
            seconds: How long the op before took: what was dear is kept for good, the rest for a while.
        """
        with _LOCK:
            _, work = self._states[self._nearest(index)]
            self._store(index, state.clone(), work + seconds)

    def _count_to(self, index: int) -> None:
        """Count the ops before `index` that have not been counted yet."""
        for at in range(len(self._before) - 1, index):
            count = self._draws[at].count
            if callable(count):
                count = count()
            raw, normals, last_normals, last_uncounted = self._before[at]
            if count is None:
                last_uncounted = at
            elif isinstance(count, DrawCount):
                raw, normals = raw + count.raw, normals + count.normals
                last_normals = at if count.normals else last_normals
            else:
                raw += count
            self._before.append(_Before(raw, normals, last_normals, last_uncounted))

    def _uncounted_between(self, here: int, index: int) -> list[int]:
        found = []
        at = self._before[index].last_uncounted
        while at >= here:
            found.append(at)
            at = self._before[at].last_uncounted
        return found[::-1]

    def _skipped(self, state: torch.Tensor, here: int, index: int) -> torch.Tensor:
        """State before op `index`, from `state` before op `here`, with only counted ops between."""
        first, last = self._before[here], self._before[index]
        if first.normals == last.normals:
            return jump(state, last.raw - first.raw)
        # The normal that may wait was left by the last op that took single ones: stop right behind that op.
        middle = self._before[last.last_normals + 1]
        state = advance(state, DrawCount(middle.raw - first.raw, last.normals - first.normals))
        return jump(state, last.raw - middle.raw)

    def _nearest(self, index: int) -> int:
        """The last op not behind `index` whose state is known."""
        if not self._known:
            start = self._start
            state = start if isinstance(start, torch.Tensor) else start[0].state_before(start[1])
            self._store(0, state, _KEEP_SECONDS)
        return self._known[bisect_right(self._known, index) - 1]

    def _store(self, index: int, state: torch.Tensor, work: float) -> float:
        """Keep a state, for good or for a while; returns the work since the last one kept for good."""
        at = bisect_left(self._known, index)
        if self._known[at : at + 1] == [index]:
            return self._states[index][1]
        for_good = work >= _KEEP_SECONDS
        work = 0.0 if for_good else work
        # In this order Ctrl-C between the two leaves a state that nobody looks up, and no index without its state.
        self._states[index] = state, work
        self._known.insert(at, index)
        if not for_good:
            self._recent.append(index)
        if len(self._recent) > _RECENT:
            oldest = self._recent.popleft()
            del self._known[bisect_left(self._known, oldest)], self._states[oldest]
        return work
