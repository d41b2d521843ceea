from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from metaviz.core.mt19937 import advance
from metaviz.core.rng import Draw, DrawCount, Stream, count_draws, jump

aten = torch.ops.aten
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 623, 624, 625, 1000, 4101, 70_001]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
OTHERS = [
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]

# Each op with two choices of its arguments, of which neither is what the counts are measured with.
CALLS = [
    ("uniform_.default", (-0.1, 0.2)),
    ("uniform_.default", (3.0, 3.0)),
    ("normal_.default", (1.0, 0.02)),
    ("normal_.default", (0.0, 0.0)),
    ("bernoulli_.float", (0.0,)),
    ("bernoulli_.float", (1.0,)),
    ("random_.default", ()),
    ("random_.to", (2,)),
    ("random_.to", (100,)),
    ("random_.from", (-3, 5)),
    ("random_.from", (0, 2**27)),
    ("random_.from", (1, 2**28 + 1)),
    ("random_.from", (0, 2**32)),
    ("random_.from", (-(2**40), 2**40)),
    ("exponential_.default", (3.0,)),
    ("cauchy_.default", (1.0, 2.0)),
    ("log_normal_.default", (0.5, 0.25)),
    ("geometric_.default", (0.9,)),
]


def seeded(seed: int = 0, normal_waits: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    torch.empty(300 + seed).uniform_(generator=generator)
    if normal_waits:
        torch.empty(1).normal_(generator=generator)
    return generator.get_state()


def at(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def op(name: str) -> torch._ops.OpOverload:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


LAYOUTS = {
    "contiguous": lambda n, dtype: torch.empty(n, dtype=dtype),
    "strided": lambda n, dtype: torch.empty(n, 3, dtype=dtype)[:, 1],
    "transposed": lambda n, dtype: torch.empty(-(-n // 4), 4, dtype=dtype).t(),
    "channels last": lambda n, dtype: torch.empty(
        -(-n // 12), 3, 2, 2, dtype=dtype, memory_format=torch.channels_last
    ),
    "row of many": lambda n, dtype: torch.empty(2, n, dtype=dtype)[1:],
}


def really(func, tensor: torch.Tensor, args: tuple, state: torch.Tensor) -> torch.Tensor | None:
    """State after really running an op, or None where torch has no such op."""
    generator = at(state)
    try:
        func(tensor, *args, generator=generator)
    except (RuntimeError, TypeError):
        return None
    return generator.get_state()


def torch_warns(name: str, args: tuple, dtype: torch.dtype) -> bool:
    """Whether a dtype is too coarse for the integers that the op is to draw."""
    coarse = name.startswith("random_") and dtype.is_floating_point
    return coarse and any(abs(bound) > 2 / torch.finfo(dtype).eps for bound in args)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, args", CALLS, ids=[f"{name}{args}" for name, args in CALLS])
def test_the_count_of_an_op_leads_to_the_state_after_it(name, args, layout, generators_stay):
    func = op(name)
    ran = 0
    dtypes = [*FLOATS, *INTEGERS, *OTHERS] if layout == "contiguous" else [*FLOATS, torch.int64, torch.bool]
    for dtype in dtypes:
        for size in SIZES:
            tensor = LAYOUTS[layout](size, dtype)
            state = seeded(size % 7, normal_waits=size % 3 == 0)
            after = None if torch_warns(name, args, dtype) else really(func, tensor, args, state)
            count = count_draws(func, (tensor, *args), tensor.numel(), dtype, tensor.is_contiguous())
            if after is None:
                assert count in (None, DrawCount()), (dtype, size)
            else:
                assert count is not None, (dtype, size)
                assert torch.equal(advance(state, count), after), (dtype, size, count)
                ran += 1
    assert ran >= len(SIZES)


@pytest.mark.parametrize("name, args", CALLS[::2], ids=[f"{name}{args}" for name, args in CALLS[::2]])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_law_of_small_sizes_holds_for_millions(name, args, dtype):
    state, size = seeded(1, normal_waits=True), 2**22 + 7
    tensor = torch.empty(size, dtype=dtype)
    after = None if torch_warns(name, args, dtype) else really(op(name), tensor, args, state)
    count = count_draws(op(name), (tensor, *args), size, dtype)
    if after is None:
        assert count is None
    else:
        assert torch.equal(advance(state, count), after)


FACTORIES = [
    ("rand.generator", lambda n: ([n],)),
    ("randn.generator", lambda n: ([n],)),
    ("normal.float_float", lambda n: (1.0, 2.0, [n])),
    ("normal.float_Tensor", lambda n: (1.0, torch.full((n,), 2.0))),
    ("normal.Tensor_float", lambda n: (torch.zeros(n, 2)[:, 0], 2.0)),
    ("normal.Tensor_Tensor", lambda n: (torch.zeros(n), torch.ones(n))),
    ("normal_functional.default", lambda n: (torch.zeros(n), 0.0, 2.0)),
    ("uniform.default", lambda n: (torch.zeros(n), 0.0, 2.0)),
    ("bernoulli.default", lambda n: (torch.full((n,), 0.3),)),
    ("bernoulli.default", lambda n: (torch.full((n,), 0.3, dtype=torch.float64),)),
    ("bernoulli.p", lambda n: (torch.zeros(n), 0.3)),
    ("randint.generator", lambda n: (10, [n])),
    ("randint.generator", lambda n: (2**40, [n])),
    ("randint.low_generator", lambda n: (-7, 2**30, [n])),
    ("exponential.default", lambda n: (torch.zeros(n), 2.0)),
    ("geometric.default", lambda n: (torch.zeros(n), 0.3)),
    ("cauchy.default", lambda n: (torch.zeros(n),)),
    ("log_normal.default", lambda n: (torch.zeros(n),)),
    ("randperm.generator", lambda n: (n,)),
]


@pytest.mark.parametrize("name, args", FACTORIES, ids=[name for name, _ in FACTORIES])
@pytest.mark.parametrize("normal_waits", [False, True], ids=["no normal waits", "a normal waits"])
def test_the_count_of_a_factory_leads_to_the_state_after_it(name, args, normal_waits, generators_stay):
    for size in SIZES:
        state = seeded(2, normal_waits)
        generator = at(state)
        made = op(name)(*args(size), generator=generator)
        count = count_draws(op(name), args(size), size, made.dtype, made.is_contiguous())
        assert count is not None, size
        assert torch.equal(advance(state, count), generator.get_state()), (size, count)


@pytest.mark.parametrize("name", ["rand.default", "randn.default", "rand_like.default", "randn_like.default"])
def test_a_factory_without_a_generator_counts_like_its_twin_with_one(name):
    state = torch.get_rng_state()
    like = torch.empty(5, 7, 11)
    made = op(name)(like if "like" in name else like.shape)
    count = count_draws(op(name), (), made.numel(), made.dtype)
    assert torch.equal(advance(state, count), torch.get_rng_state())


UNCOUNTABLE = [
    (aten.multinomial.default, (torch.ones(100), 5)),
    (aten.poisson.default, (torch.ones(100),)),
    (aten.bernoulli_.Tensor, (torch.ones(100), torch.ones(100))),
    (aten.native_dropout.default, (torch.ones(100), 0.5, True)),
    (getattr(aten.random_, "from"), (torch.ones(100), 5, None)),
    (aten.add.Tensor, (torch.ones(100), torch.ones(100))),
]


@pytest.mark.parametrize("func, args", UNCOUNTABLE, ids=[str(func) for func, _ in UNCOUNTABLE])
def test_what_cannot_be_counted_has_no_count(func, args):
    assert count_draws(func, args, 100, torch.float32) is None


def test_a_permutation_too_large_to_trust_has_no_count():
    assert count_draws(aten.randperm.default, (2**27,), 2**27, torch.int64) == DrawCount(2**27 - 1)
    assert count_draws(aten.randperm.default, (2**28,), 2**28, torch.int64) is None


class CountEachOp(TorchDispatchMode):
    """Really runs each op, and holds its count against what it did to the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[str] = []
        self.uncounted: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        after = torch.get_rng_state()
        if torch.equal(before, after):
            return result
        count = count_draws(func, args, result.numel(), result.dtype, result.is_contiguous())
        if count is None:
            self.uncounted.append(str(func))
        else:
            assert torch.equal(advance(before, count), after), (func, result.shape, result.dtype, count)
            self.counted.append(str(func))
        return result


INITS = [
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    lambda tensor: nn.init.sparse_(tensor.flatten(1), 0.5),
    lambda tensor: nn.init.constant_(tensor, 3.0),
    nn.init.ones_,
    nn.init.zeros_,
    lambda tensor: nn.init.eye_(tensor.flatten(1)),
    lambda tensor: nn.init.dirac_(tensor[:, :, None] if tensor.dim() == 2 else tensor),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 4), (8, 2, 3), (26, 24), (25, 25), (33, 31, 1, 2)])
def test_every_draw_of_torch_nn_init_is_counted(dtype, shape):
    with CountEachOp() as mode:
        for init in INITS:
            if dtype in (torch.bfloat16, torch.float16) and init is nn.init.orthogonal_:
                continue  # torch has no QR in these dtypes.
            init(torch.empty(shape, dtype=dtype))
            if init is not nn.init.orthogonal_:  # It wants a tensor that can be viewed as a matrix.
                init(torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))))
    assert not mode.uncounted
    assert set(mode.counted) >= {"aten.uniform_.default", "aten.normal_.default"}


MODULES = {
    "Linear": lambda: nn.Linear(7, 13),
    "Bilinear": lambda: nn.Bilinear(3, 4, 5),
    "Conv2d": lambda: nn.Conv2d(3, 16, 3),
    "Conv2d channels last": lambda: nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(4, 6, 5),
    "Embedding": lambda: nn.Embedding(11, 6),
    "LSTM": lambda: nn.LSTM(5, 7, num_layers=2, bidirectional=True),
    "GRUCell": lambda: nn.GRUCell(3, 4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(16, 4),
    "Transformer": lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
    "PReLU": lambda: nn.PReLU(5),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 9)),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_draw_of_a_module_of_torch_is_counted(name):
    with CountEachOp() as mode:
        MODULES[name]()
    assert not mode.uncounted
    assert mode.counted or name == "PReLU"


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="this is the run of the test below")
def test_the_counts_hold_without_vector_instructions_too():
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    # Of all kernels, those of normals are the ones that are made several at a time.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "normal_.default or nn_init",
    ]
    ran = subprocess.run([*command, __file__], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def fill(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options) -> Draw:
    """A random op as a draw that counts itself."""

    def empty() -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, **options)

    tensor = empty()
    count = count_draws(op(f"{name}.default"), (), tensor.numel(), dtype, tensor.is_contiguous())
    assert count is not None
    return Draw(lambda generator: getattr(empty(), name)(generator=generator), lambda: count)


CHANNELS_LAST = {"memory_format": torch.channels_last}
DRAWS = {
    "nothing": Draw(lambda generator: None, 0),
    "a plain number": Draw(lambda generator: torch.empty(10).uniform_(generator=generator), 10),
    "uniform": fill("uniform_", (123,)),
    "uniform float64": fill("uniform_", (700,), torch.float64),
    "large uniform": fill("uniform_", (3000, 1000)),
    "normal": fill("normal_", (40, 3)),
    "one normal": fill("normal_", (1,)),
    "two normals": fill("normal_", (2,), torch.bfloat16),
    "five normals": fill("normal_", (5,), torch.float64),
    "normals apart": fill("normal_", (3, 5, 3, 3), **CHANNELS_LAST),
    "log normal": fill("log_normal_", (21,)),
    "uncounted": Draw(lambda generator: torch.poisson(torch.full((9,), 5.0), generator=generator)),
    "uncounted normals": Draw(lambda generator: torch.empty(3).normal_(generator=generator)),
}


def states_of(names: list[str], start: torch.Tensor) -> list[torch.Tensor]:
    """The states that really running the ops one after the other goes through."""
    generator, states = at(start), [start]
    for name in names:
        DRAWS[name].run(generator)
        states.append(generator.get_state())
    return states


def stream_of(names: list[str], start) -> Stream:
    stream = Stream(start)
    assert [stream.append(DRAWS[name]) for name in names] == list(range(len(names)))
    return stream


ops_of_a_stream = st.lists(st.sampled_from(list(DRAWS)), min_size=1, max_size=12)


@settings(max_examples=150)
@given(ops_of_a_stream, st.booleans(), st.data())
def test_states_in_any_order_equal_those_of_really_running_all(names, normal_waits, data):
    start = seeded(3, normal_waits)
    expected, stream = states_of(names, start), stream_of(names, start)
    for index in data.draw(st.lists(st.integers(0, len(names)), max_size=6)):
        assert torch.equal(stream.state_before(index), expected[index]), index


@settings(max_examples=60)
@given(ops_of_a_stream, ops_of_a_stream, ops_of_a_stream, st.data())
def test_streams_may_start_within_one_another(first, second, third, data):
    start = seeded(4)
    one = stream_of(first, start)
    split = data.draw(st.integers(0, len(first)))
    two = stream_of(second, (one, split))
    three = stream_of(third, (two, len(second)))
    states = states_of(first[:split] + second + third, start)
    assert torch.equal(three.state_before(len(third)), states[-1])
    assert torch.equal(two.state_before(0), states[split])
    assert torch.equal(one.state_before(len(one)), states_of(first, start)[-1])
    assert one.seed == two.seed == three.seed == 4


def test_a_stream_grows_while_it_is_asked():
    start, names = seeded(5), list(DRAWS)
    expected, stream = states_of(names, start), Stream(start)
    for index, name in enumerate(names):
        assert torch.equal(stream.state_before(index), expected[index])
        assert stream.append(DRAWS[name]) == index
        assert len(stream) == index + 1


def test_a_start_that_is_changed_later_does_not_change_the_stream():
    start = seeded(6)
    stream, before = Stream(start), start.clone()
    start.zero_()
    stream.state_before(0).zero_()
    assert torch.equal(stream.state_before(0), before)


class Dear:
    """A draw that cannot be counted and takes a while; it notes how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    def draw(self) -> Draw:
        return Draw(self.run)

    def run(self, generator: torch.Generator) -> None:
        self.runs += 1
        time.sleep(0.006)
        torch.empty(1000).uniform_(generator=generator)


def test_what_was_dear_to_run_is_paid_once():
    stream, dear = Stream(seeded(7)), Dear()
    stream.append(dear.draw())
    cheap = [stream.append(DRAWS["uncounted"]) for _ in range(2000)]
    for index in [*cheap, *reversed(cheap), len(stream)]:
        stream.state_before(index)
    assert dear.runs == 1


def test_a_state_that_was_remembered_saves_running_the_op():
    start, dear = seeded(8), Dear()
    stream = Stream(start)
    stream.append(dear.draw())
    stream.append(DRAWS["uniform"])
    generator = at(stream.state_before(0))
    dear.run(generator)
    stream.remember(1, generator.get_state(), seconds=0.006)
    DRAWS["uniform"].run(generator)
    assert torch.equal(stream.state_before(2), generator.get_state())
    assert dear.runs == 1


def test_the_states_kept_of_many_cheap_ops_are_few():
    stream, uniform = Stream(seeded(9)), DRAWS["uniform"]
    for index in range(20_000):
        stream.append(uniform)
        stream.remember(index + 1, stream.state_before(0))
    assert len(stream._states) == len(stream._known) < 300


def test_an_op_that_fails_leaves_the_stream_as_it_was():
    start = seeded(10)
    outcomes = [RuntimeError("out of memory"), None]

    def run(generator: torch.Generator) -> None:
        torch.empty(7).uniform_(generator=generator)
        outcome = outcomes.pop(0)
        if outcome:
            raise outcome

    stream = Stream(start)
    stream.append(Draw(run))
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.state_before(1)
    assert torch.equal(stream.state_before(1), jump(start, 7))


def test_running_an_op_may_ask_the_stream_for_earlier_states():
    start = seeded(11)
    stream = Stream(start)
    seen = []

    def run(generator: torch.Generator) -> None:
        seen.append(stream.state_before(1))
        torch.empty(7).uniform_(generator=generator)

    stream.append(DRAWS["uniform"])
    stream.append(Draw(run))
    assert torch.equal(stream.state_before(2), jump(start, 130))
    assert torch.equal(seen[0], jump(start, 123))


def test_two_threads_get_the_same_states_and_run_each_op_once():
    start, dears = seeded(12), [Dear() for _ in range(8)]
    stream = Stream(start)
    for dear in dears:
        stream.append(dear.draw())
        stream.append(DRAWS["five normals"])
    results: dict[str, list[torch.Tensor]] = {}

    def ask(name: str, order: list[int]) -> None:
        results[name] = [stream.state_before(index) for index in order]

    order = list(range(len(stream) + 1))
    threads = [
        threading.Thread(target=ask, args=("up", order)),
        threading.Thread(target=ask, args=("down", order[::-1])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(results["up"], results["down"][::-1], strict=True))
    assert torch.equal(results["up"][2], advance(jump(start, 1000), DrawCount(normals=5)))
    assert [dear.runs for dear in dears] == [1] * len(dears)


def test_each_op_is_counted_once_and_only_when_a_state_behind_it_is_wanted():
    stream, counted = Stream(seeded(13)), []
    for index in range(5):
        stream.append(Draw(lambda generator: None, lambda index=index: counted.append(index) or 10))
    stream.state_before(0)
    assert counted == []
    stream.state_before(3)
    stream.state_before(2)
    assert counted == [0, 1, 2]


@pytest.mark.parametrize("index", [-1, 2])
def test_an_op_that_is_not_there_is_refused(index):
    stream = stream_of(["uniform"], seeded(14))
    with pytest.raises(IndexError, match=rf"No random op {index}: this stream has 1. Use 0 to 1."):
        stream.state_before(index)


def test_a_stream_leaves_the_global_generator_alone(generators_stay):
    names = list(DRAWS)
    stream_of(names, seeded(15)).state_before(len(names))
