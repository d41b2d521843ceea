from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaviz.core.mt19937 import characteristic_polynomial, jump, leaps_are_exact, power_of_x

ROOT = Path(__file__).parents[1]


def fresh(seed: int = 0) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def stepped(state: torch.Tensor, draws: int) -> torch.Tensor:
    """State after really drawing, 32 bits at a time."""
    generator = torch.Generator()
    generator.set_state(state)
    for done in range(0, draws, 1 << 20):
        torch.empty(min(1 << 20, draws - done), dtype=torch.int32).random_(generator=generator)
    return generator.get_state()


def with_waiting_double(state: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty(3).normal_(generator=generator)
    return generator.get_state()


def with_waiting_float(state: torch.Tensor) -> torch.Tensor:
    """No CPU op leaves a float32 normal behind, but torch keeps one that it is given."""
    state = state.clone()
    state[5048:5052].view(torch.float32).fill_(0.25)
    state[5052] = 1
    generator = torch.Generator()
    generator.set_state(state)
    return generator.get_state()


def out_of_step(state: torch.Tensor) -> torch.Tensor:
    """Valid to torch, though no drawing leads there: the words end before they are used up."""
    state = state.clone()
    state[8:12].view(torch.int32).fill_(7)
    return state


STARTS = {
    "fresh": fresh(),
    "first word of a block used": stepped(fresh(1), 1),
    "middle of a block": stepped(fresh(2**63), 1000),
    "one word of a block left": stepped(fresh(3), 623),
    "end of a block": stepped(fresh(4), 624),
    "a double normal waits": with_waiting_double(fresh(5)),
    "a float normal waits": with_waiting_float(stepped(fresh(6), 700)),
    "out of step": out_of_step(stepped(fresh(7), 100)),
}
starts = pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)


def test_this_torch_keeps_its_state_where_leaps_need_it():
    assert leaps_are_exact()


@starts
@pytest.mark.parametrize("draws", [0, 1, 622, 623, 624, 625, 5_000, 2**21 - 1, 2**21, 2**21 + 1, 30_000_000])
def test_a_jump_equals_stepping_one_by_one(start, draws):
    before = start.clone()
    assert torch.equal(jump(start, draws), stepped(start, draws))
    assert torch.equal(start, before)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**64 - 1), used=st.integers(0, 1500), draws=st.integers(2**21, 10**8))
@example(seed=0, used=0, draws=10**8)
def test_a_long_jump_equals_stepping_from_any_place(seed, used, draws):
    start = stepped(fresh(seed - 2**63), used)
    assert torch.equal(jump(start, draws), stepped(start, draws))


@settings(max_examples=25)
@given(st.sampled_from(list(STARTS)), st.integers(0, 10**15), st.integers(0, 10**15))
@example("fresh", 7 * 10**10, 10**13)
def test_two_jumps_equal_one_of_their_sum(name, first, second):
    start = STARTS[name]
    assert torch.equal(jump(jump(start, first), second), jump(start, first + second))


def test_a_jump_agrees_with_the_generator_of_numpy(needs):
    numpy = needs("numpy")
    start = stepped(fresh(8), 624)
    words = start[24 : 24 + 624 * 8].view(torch.int64).numpy().astype("u4")
    reference = numpy.random.MT19937()
    reference.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    reference.random_raw(3 * 10**8, output=False)
    generator = torch.Generator()
    generator.set_state(jump(start, 3 * 10**8))
    # int32 keeps the low 31 bits of a draw.
    expected = torch.from_numpy((reference.random_raw(2000) & 0x7FFFFFFF).astype("i4"))
    assert torch.equal(expected, torch.empty(2000, dtype=torch.int32).random_(generator=generator))


def test_the_characteristic_polynomial_is_a_recurrence_of_the_draws():
    polynomial = characteristic_polynomial()
    exponents = [exponent for exponent in range(polynomial.bit_length()) if polynomial >> exponent & 1]
    assert (exponents[-1], len(exponents)) == (19937, 135)

    generator = torch.Generator()
    generator.set_state(stepped(fresh(9), 1))
    draws = torch.empty(19937 + 1000, dtype=torch.int32).random_(generator=generator)
    terms = [draws[exponent : exponent + 1000] for exponent in exponents]
    total = torch.zeros(1000, dtype=torch.int32)
    for term in terms:
        total ^= term
    assert not total.any()
    assert (total ^ terms[5]).any()


@pytest.mark.slow
def test_the_powers_of_x_come_round_after_the_period_of_the_generator():
    assert power_of_x(2**19937 - 1) == 1


def test_a_jump_keeps_the_normals_that_wait():
    for name in ("a double normal waits", "a float normal waits"):
        start = STARTS[name]
        assert not torch.equal(start[5016:], fresh()[5016:])
        assert torch.equal(jump(start, 10**10)[5016:], start[5016:])


def test_a_jump_leaves_the_global_generator_alone(generators_stay):
    jump(fresh(), 1000)
    jump(fresh(), 10**12)


def test_a_jump_backwards_is_refused():
    with pytest.raises(ValueError, match="Cannot jump -1 draws: a generator only goes forward"):
        jump(fresh(), -1)


WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
import torch
from metaviz.core.mt19937 import jump, leaps_are_exact
generator = torch.Generator().manual_seed(0)
start = generator.get_state()
torch.empty(3_000_000).uniform_(generator=generator)
assert not leaps_are_exact()
assert torch.equal(jump(start, 3_000_000), generator.get_state())
"""


def test_a_jump_without_numpy_really_draws():
    subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], check=True, cwd=ROOT)
