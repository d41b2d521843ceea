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
SIZES = [*range(34), 47, 48, 63, 64, 65, 79, 623, 624, 625, 1000, 4096, 4096 + 5, 70_001]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
OTHERS = [torch.complex64, torch.complex128, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]

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
    for dtype in FLOATS + INTEGERS + OTHERS:
        for size in SIZES:
            tensor = LAYOUTS[layout](size, dtype)
            state = seeded(size % 7, normal_waits=size % 3 == 0)
            after = really(func, tensor, args, state)
            count = count_draws(func, (tensor, *args), tensor.numel(), dtype, tensor.is_contiguous())
            if after is None or torch_warns(name, args, dtype):
                assert count in (None, DrawCount()), (dtype, size)
            else:
                assert count is not None, (dtype, size)
                assert torch.equal(advance(state, count), after), (dtype, size, count)
                ran += 1
    assert ran > 100


@pytest.mark.parametrize("name, args", CALLS[::2], ids=[f"{name}{args}" for name, args in CALLS[::2]])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_law_of_small_sizes_holds_for_millions(name, args, dtype):
    state, size = seeded(1, normal_waits=True), 2**22 + 7
    tensor = torch.empty(size, dtype=dtype)
    after = really(op(name), tensor, args, state)
    count = count_draws(op(name), (tensor, *args), size, dtype)
    if after is None or torch_warns(name, args, dtype):
        assert count is None
    else:
        assert torch.equal(advance(state, count), after)
