"""Seeds, states and forks in a constructor mean what they mean in an ordinary build."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn
from zoo import holding

import metaviz


def reseeds():
    torch.manual_seed(5)
    a = torch.randn(40)
    torch.manual_seed(5)
    return holding(a=a, b=torch.randn(40), seed=torch.initial_seed())


def forks():
    first = torch.rand(2)
    with torch.random.fork_rng(devices=[]):
        inner = torch.rand(3)
        torch.manual_seed(1)
        seeded = torch.rand(3)
    return holding(first=first, inner=inner, seeded=seeded, last=torch.rand(3))


def goes_back():
    a, state, b = torch.rand(2), torch.get_rng_state(), torch.randn(17)
    torch.set_rng_state(state)
    c = torch.randn(17)
    moved = not torch.equal(state, torch.get_rng_state())
    return holding(a=a, b=b, c=c, d=torch.rand(3), moved=moved)


def goes_back_twice():
    """After one op each, two histories of one seed: their states must not be taken for one another."""
    torch.manual_seed(5)
    a, state = torch.randn(40), torch.get_rng_state()
    torch.manual_seed(5)
    b, other = torch.rand(100), torch.get_rng_state()
    torch.set_rng_state(state)
    c = torch.rand(3)
    torch.set_rng_state(other)
    return holding(a=a, b=b, c=c, d=torch.rand(3))


def own():
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(4, generator=generator), torch.rand(3)]
    drawn += [torch.empty(20).normal_(generator=generator), torch.randperm(7, generator=generator)]
    drawn += [nn.init.trunc_normal_(torch.empty(9), generator=generator), torch.rand(3)]
    return holding(**{f"t{i}": tensor for i, tensor in enumerate(drawn)})


def own_copied():
    generator, copied = torch.Generator().manual_seed(3), torch.Generator()
    a = torch.randn(4, generator=generator)
    copied.set_state(generator.get_state())
    b, c = torch.randn(4, generator=generator), torch.randn(4, generator=copied)
    return holding(a=a, b=b, c=c, d=torch.rand(2, generator=copied), e=torch.rand(2, generator=generator))


def default_by_name():
    default = torch.default_generator
    return holding(a=torch.rand(3, generator=default), b=torch.rand(3), seed=default.initial_seed())


def seeds_from_draws():
    seed = int(torch.randint(0, 10_000, (1,)))
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    a, b = torch.rand(3, generator=generator), torch.rand(2)
    torch.manual_seed(seed)
    return holding(a=a, b=b, c=torch.rand(3), seed=seed)


def reads_between():
    a, b = torch.randn(3), torch.rand(5)
    chosen = torch.multinomial(b, 2)
    kept = b[b > 0.5]
    c = torch.randn(3)
    return holding(
        a=a, b=b, c=c, d=torch.randn(len(kept) + 1), chosen=chosen, mean=c.mean().item(), e=torch.rand(2)
    )


def single_normals():
    held = nn.Module()
    for i in range(10):
        held.register_buffer(f"single{i}", torch.randn(i % 5 + 1))
        held.register_buffer(f"double{i}", torch.randn(3, dtype=torch.double))
        held.register_buffer(f"uniform{i}", torch.rand(2))
    return held


def big_seeds():
    torch.manual_seed(2**63 - 1)
    a = torch.rand(2)
    torch.manual_seed(-5)
    return holding(a=a, b=torch.rand(2))


def unused_draws():
    for _ in range(3):
        torch.randn(1000)
        nn.init.trunc_normal_(torch.empty(100))
    return holding(last=torch.rand(4))


KINDS = [reseeds, forks, goes_back, goes_back_twice, own, own_copied, default_by_name, seeds_from_draws]
KINDS += [reads_between, single_normals, big_seeds, unused_draws]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_constructor_draws_what_it_draws_in_an_ordinary_build_when_it(kind):
    torch.manual_seed(11)
    kind()
    state = torch.get_rng_state()
    torch.manual_seed(11)
    kind()
    assert torch.equal(torch.get_rng_state(), state), "the case itself has to be repeatable"
    assert zoo.faults(kind) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_last_tensor_alone_is_right_when_the_constructor(kind):
    ordinary, model = zoo.pair(kind)
    *_, (name, _) = model.named_buffers()
    metaviz.materialize(model, name)
    assert zoo.differences(ordinary, model, name) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_global_generator_is_where_it_was_after_a_build_that(kind):
    torch.manual_seed(11)
    torch.randn(3)
    state = torch.get_rng_state()
    metaviz.materialize(metaviz.build(kind))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.initial_seed() == 11


def test_a_generator_from_outside_is_left_where_it_was():
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)
    state = generator.get_state()
    model = metaviz.build(lambda: holding(a=torch.rand(3, generator=generator), b=torch.rand(3)))
    assert torch.equal(generator.get_state(), state)
    metaviz.materialize(model)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(model.a, torch.rand(3, generator=generator))


def test_builds_one_after_the_other_without_a_seed_between_are_equal_as_nothing_was_drawn():
    torch.manual_seed(11)
    first, second = metaviz.build(nn.Linear, 3, 3), metaviz.build(nn.Linear, 3, 3)
    metaviz.materialize(first)
    metaviz.materialize(second)
    assert zoo.differences(first, second) == []


def test_the_seed_at_the_build_counts_not_the_one_at_materialize():
    torch.manual_seed(11)
    ordinary = nn.Linear(3, 3)
    torch.manual_seed(11)
    model = metaviz.build(nn.Linear, 3, 3)
    torch.manual_seed(12)
    metaviz.materialize(model)
    assert zoo.differences(ordinary, model) == []


def test_a_state_in_the_middle_of_small_normals_is_a_start_like_others():
    """One normal of a pair waits in the generator's state: the first draw of the build takes it."""
    torch.manual_seed(11)
    torch.randn(1)
    state = torch.get_rng_state()
    ordinary = single_normals()
    torch.set_rng_state(state)
    model = metaviz.build(single_normals)
    metaviz.materialize(model)
    assert zoo.differences(ordinary, model) == []
