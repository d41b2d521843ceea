"""torch's CPU generator, any number of draws later, without drawing.

The generator is MT19937: 624 words of 32 bits, all rebuilt at once whenever they are used up. Each new word
is a sum over GF(2), where addition is XOR, of earlier ones. So the word ``n`` places on is a sum as well: of
those among the next 19937 words that the polynomial ``x**n`` names, reduced modulo the generator's
characteristic polynomial. Polynomials are Python ints here, bit ``i`` for ``x**i``. Imports torch, and numpy
where it leaps.

Source: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998), for the recurrence and its
polynomial; Haramoto et al., "Efficient jump ahead for F2-linear random number generators", INFORMS J.
Computing 20 (2008), for the method; torch 2.13, aten/src/ATen/CPUGeneratorImpl.cpp, for where the words lie
in a state.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

_SIZE, _MIDDLE = 624, 397
_UPPER, _LOWER, _TWIST = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_DEGREE = 19937

# In a state: the seed, how many words are left, the next word's place, then each word as a uint64, and last
# the normals that wait for their turn.
_LEFT = slice(8, 12)
_WORDS = slice(24, 24 + 8 * _SIZE)

# A leap takes 5 to 15 ms however far it goes, a draw some 2.5 ns.
_LEAP_FROM = 1 << 21
_CHUNK = 1 << 16


def jump(state: torch.Tensor, draws: int) -> torch.Tensor:
    """State of a CPU generator after `draws` more raw 32-bit draws.

    Byte for byte what torch has after really drawing; a normal that waits in the state keeps waiting. Takes
    about 10 ms at most, however many draws there are. Should this torch keep its state in another way than
    the one known here, the draws are really made (2 to 3 s for 10**9).

    Args:
        state: uint8 (5056,), as `torch.Generator.get_state` gives it. Not changed.
        draws: How many raw draws to skip, 0 or more. A float32 `uniform_` takes one for each value.

    Returns:
        A new uint8 (5056,) tensor for `torch.Generator.set_state`.

    Raises:
        ValueError: `draws` is negative.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> _ = generator.set_state(jump(generator.get_state(), 70 * 10**9))
        >>> torch.rand(2, generator=generator)
        tensor([0.0594, 0.8416])
    """
    if draws < 0:
        raise ValueError(
            f"Cannot jump {draws} draws: a generator only goes forward. Jump from an earlier state."
        )
    if draws < _LEAP_FROM or not leaps_are_exact():
        return _stepped(state, draws)
    return _leapt(state, draws)


class DrawCount(NamedTuple):
    """What an op takes from a CPU generator: `raw` draws of 32 bits, then `normals` taken one at a time.

    Single normals are made in pairs, four raw draws a pair; the second of a pair waits in the generator for
    the next op that wants one.
    """

    raw: int = 0
    normals: int = 0


RAW_PER_PAIR = 4


def advance(state: torch.Tensor, count: DrawCount) -> torch.Tensor:
    """State of a CPU generator, a new uint8 (5056,) tensor, once an op that takes `count` has run."""
    if not count.normals:
        return jump(state, count.raw)
    state, waits = without_waiting_normal(state)
    pairs, leftover = divmod(count.normals - waits, 2)
    state = jump(state, count.raw + RAW_PER_PAIR * pairs)
    return after_one_normal(state) if leftover else state


def without_waiting_normal(state: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """`state` with no normal that waits, and whether one did."""
    after = after_one_normal(state)
    if torch.equal(raw_values(after, 4), raw_values(state, 4)):
        return after, True
    return state, False


def after_one_normal(state: torch.Tensor) -> torch.Tensor:
    """State of a CPU generator once a single normal has been taken."""
    # What waits is a double of mean 0 and deviation 1, whatever the dtype and parameters of the op that
    # left it. So this op stands in for any other.
    generator = generator_at(state)
    torch.empty(1, dtype=torch.float64, device="cpu").normal_(generator=generator)
    return generator.get_state()


def raw_values(state: torch.Tensor, number: int) -> torch.Tensor:
    """The next raw draws, int32 (number,): a few of them tell one place in the sequence from another."""
    return torch.empty(number, dtype=torch.int32, device="cpu").random_(generator=generator_at(state))


def generator_at(state: torch.Tensor) -> torch.Generator:
    """A new CPU generator in the given state."""
    generator = torch.Generator(device="cpu")
    generator.set_state(state)
    return generator


@functools.cache
def leaps_are_exact() -> bool:
    """Whether a leap and as many real draws end in the same bytes on this torch; tried once per process."""
    try:
        start = torch.Generator(device="cpu").manual_seed(0).get_state()
        draws = 40 * _SIZE + 5
        return torch.equal(_leapt(start, draws), _stepped(start, draws))
    except (ImportError, RuntimeError, TypeError, ValueError):
        return False


def characteristic_polynomial() -> int:
    """The polynomial that every sequence of words obeys: degree 19937, 135 terms.

    Source: Matsumoto and Nishimura (1998), appendix A, in Horner form:
    ``B * (A**31 + a0 * A**30 + ... + a30) + a31`` with ``A = x**623 + x**396``, ``B = x**624 + x**397`` and
    ``a0`` the lowest bit of the twist constant.
    """
    inner = 1
    for bit in range(31):
        inner = inner << (_SIZE - 1) ^ inner << (_MIDDLE - 1) ^ (_TWIST >> bit & 1)
    return inner << _SIZE ^ inner << _MIDDLE ^ (_TWIST >> 31)


@functools.cache
def _lower_terms() -> tuple[int, ...]:
    """Exponents of the characteristic polynomial below its degree, highest first."""
    polynomial = characteristic_polynomial()
    return tuple(exponent for exponent in reversed(range(_DEGREE)) if polynomial >> exponent & 1)


def _reduced(polynomial: int) -> int:
    """`polynomial`, of degree below ``2 * _DEGREE``, modulo the characteristic polynomial.

    The divisor is ``x**_DEGREE * (1 + e)`` with a sparse `e` in powers of ``1/x``, and over GF(2)
    ``1 / (1 + e) = (1 + e) * (1 + e**2) * (1 + e**4) * ...``, where squaring just doubles exponents. So the
    quotient takes a few hundred shifts instead of one for every bit.
    """
    gaps = [_DEGREE - exponent for exponent in _lower_terms()]
    quotient = polynomial >> _DEGREE
    while gaps:
        factor = quotient
        for gap in gaps:
            quotient ^= factor >> gap
        gaps = [2 * gap for gap in gaps if 2 * gap < _DEGREE]
    for exponent in _lower_terms():
        polynomial ^= quotient << exponent
    return polynomial & ((1 << _DEGREE) - 1)


def power_of_x(exponent: int) -> int:
    """``x**exponent`` modulo the characteristic polynomial, by repeated squaring."""
    # The top bits alone give a power that needs no reduction yet: 2**14 < _DEGREE.
    low = max(0, exponent.bit_length() - 14)
    power = 1 << (exponent >> low)
    for bit in reversed(range(low)):
        # Squaring over GF(2) puts a zero between any two bits: the same digits, read in base 4.
        power = _reduced(int(f"{power:b}", 4) << (exponent >> bit & 1))
    return power


def _leapt(state: torch.Tensor, draws: int) -> torch.Tensor:
    """`jump` by arithmetic; `draws` is at least 624."""
    # Really draw until the words have just been rebuilt: of the first word that seeding made, 31 bits are no
    # part of the sequence.
    left = int(state[_LEFT].clone().view(torch.int32))
    state = _stepped(state, left)
    blocks, rest = divmod(draws - left, _SIZE)
    words = state[_WORDS].view(torch.int64)
    words.copy_(_rebuilt(words, blocks))
    return _stepped(state, rest)


def _rebuilt(words: torch.Tensor, blocks: int) -> torch.Tensor:
    """The generator's words, int64 (624,), once `words` have been rebuilt `blocks` times."""
    import numpy as np

    power = power_of_x(_SIZE * blocks).to_bytes(_DEGREE // 8 + 1, "little")
    named = np.flatnonzero(np.unpackbits(np.frombuffer(power, np.uint8), bitorder="little"))
    windows = np.lib.stride_tricks.sliding_window_view(_sequence(words.numpy().astype(np.uint32)), _SIZE)
    total = np.zeros(_SIZE, np.uint32)
    # A few windows at a time, so that what is gathered stays in the processor's cache.
    for some in np.array_split(named, 256):
        total ^= np.bitwise_xor.reduce(windows[some], axis=0)
    return torch.from_numpy(total.astype(np.int64))


def _sequence(words):
    """`words`, uint32 numpy (624,), and the 19936 that come after them: as far as the last window reaches."""
    import numpy as np

    sequence = np.empty(_SIZE + _DEGREE - 1, np.uint32)
    sequence[:_SIZE] = words
    # A word depends on none of the 226 just before it, so 227 can be made at a time.
    for at in range(0, _DEGREE - 1, _SIZE - _MIDDLE):
        end = min(at + _SIZE - _MIDDLE, _DEGREE - 1)
        mixed = (sequence[at:end] & np.uint32(_UPPER)) | (sequence[at + 1 : end + 1] & np.uint32(_LOWER))
        twisted = (mixed >> np.uint32(1)) ^ (mixed & np.uint32(1)) * np.uint32(_TWIST)
        sequence[at + _SIZE : end + _SIZE] = sequence[at + _MIDDLE : end + _MIDDLE] ^ twisted
    return sequence


def _stepped(state: torch.Tensor, draws: int) -> torch.Tensor:
    """`jump` by really drawing."""
    generator = generator_at(state)
    scratch = torch.empty(min(draws, _CHUNK), dtype=torch.uint8, device="cpu")
    while draws > 0:
        draws -= scratch[:draws].random_(generator=generator).numel()
    return generator.get_state()
