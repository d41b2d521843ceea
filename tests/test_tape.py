"""The tape: tensors as windows on storages, and which ops a storage needs."""

from __future__ import annotations

import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import metaviz
from metaviz.core.origin import origin_of
from metaviz.core.tape import (
    Op,
    Tag,
    Tape,
    Window,
    constant,
    map_tensors,
    map_windows,
    tag_of,
    tensors_in,
    window,
    window_of,
)
from metaviz.errors import StalePlan


def tape_of(*ops: tuple[tuple[int, ...], tuple[int, ...]], sizes: int = 6) -> Tape:
    """A tape of ops given as `(storages read, storages written)`; every storage holds ten float32."""
    tape = Tape()
    for _ in range(sizes):
        tape.tag(torch.UntypedStorage(40, device="meta"))
    for reads, writes in ops:
        windows = tuple(Window(s, torch.float32, (10,), (1,), 0) for s in writes)
        tape.append(Op(torch.ops.aten.zero_.default, (), {}, reads, windows, ()))
    return tape


def views(base: torch.Tensor) -> list[torch.Tensor]:
    return [
        base,
        base[1:3],
        base.T,
        base[:, ::2],
        base[0],
        base.expand(2, 4, 6),
        base[2:2],
        base.diagonal(),
        base.flip(0),
    ]


def test_a_window_shows_what_the_view_shows():
    base = torch.arange(24.0).view(4, 6)
    for view in views(base):
        shown = window(0, view).on(view.untyped_storage())
        assert torch.equal(shown, view) and shown.stride() == view.stride()
        assert shown.untyped_storage()._cdata == view.untyped_storage()._cdata


def test_a_window_keeps_what_is_only_a_mark_on_a_view():
    base = torch.randn(3, dtype=torch.cfloat)
    for view in (base.conj(), base.imag, base.conj().imag, base.conj()[1:], -base):
        shown = window(0, view).on(view.untyped_storage())
        assert (shown.is_conj(), shown.is_neg()) == (view.is_conj(), view.is_neg())
        assert torch.equal(shown, view)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3), st.integers(0, 7))
def test_an_extent_is_from_the_first_byte_to_the_last_that_can_be_reached(dims, offset):
    size, stride = tuple(n for n, _ in dims), tuple(step for _, step in dims)
    flat = torch.zeros(200, dtype=torch.float64)
    view = flat.as_strided(size, stride, offset)
    reached = [(offset + sum(i * s for i, s in zip(index, stride, strict=True))) * 8 for index in every(size)]
    expected = (min(reached), max(reached) + 8) if reached else (offset * 8, offset * 8)
    assert window(0, view).extent() == expected


def every(size: tuple[int, ...]) -> list[tuple[int, ...]]:
    indices = [()]
    for n in size:
        indices = [(*index, i) for index in indices for i in range(n)]
    return indices


def test_numel_and_contiguity_are_those_of_torch():
    for view in views(torch.arange(24.0).view(4, 6)):
        assert window(0, view).numel() == view.numel()
        if view.numel():
            assert window(0, view).is_contiguous() == view.is_contiguous()


def test_a_slice_has_what_wrote_a_storage_and_what_that_read_in_program_order():
    tape = tape_of(((), (0,)), ((), (1,)), ((0,), (2,)), ((1, 2), (3,)), ((), (4,)))
    assert tape.slice([3]) == [0, 1, 2, 3]
    assert tape.slice([2]) == [0, 2]
    assert tape.slice([4]) == [4]
    assert tape.slice([4, 2]) == [0, 2, 4]
    assert tape.slice([5]) == []


def test_a_slice_reads_each_storage_as_it_was_at_that_op():
    later_write = tape_of(((), (0,)), ((0,), (1,)), ((0,), (0,)))
    assert later_write.slice([1]) == [0, 1]
    assert later_write.slice([0]) == [0, 2]


def test_a_slice_stops_at_a_write_that_leaves_nothing():
    overwritten = tape_of(((), (0,)), ((0,), (0,)), ((), (0,)), ((0,), (0,)))
    assert overwritten.slice([0]) == [2, 3]
    assert overwritten.slice([0], before=2) == [0, 1]


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 4), max_size=2), st.sets(st.integers(0, 4), min_size=1, max_size=2)),
        max_size=12,
    ),
    st.integers(0, 4),
)
def test_a_slice_is_the_least_that_gives_a_storage_its_content(ops, wanted):
    """Content as a formula: an op makes of what it reads something that names the op."""

    def content(chosen: list[int]) -> object:
        storages: list[object] = ["blank"] * 5
        for k in chosen:
            reads, writes = ops[k]
            made = (k, *(storages[s] for s in sorted(reads)))
            for s in writes:
                storages[s] = made
        return storages[wanted]

    tape = tape_of(*((tuple(reads), tuple(writes)) for reads, writes in ops))
    chosen = tape.slice([wanted])
    assert content(chosen) == content(list(range(len(ops))))
    for k in chosen:
        assert content([other for other in chosen if other != k]) != content(chosen)


def test_what_is_never_written_is_counted_in_bytes():
    tape = tape_of(sizes=2)
    whole = Window(0, torch.float32, (10,), (1,), 0)
    assert tape.unwritten(whole) == 40 and tape.last_write(0) is None
    for part in (Window(0, torch.float32, (4,), (1,), 0), Window(0, torch.float32, (3,), (1,), 2)):
        tape.append(Op(torch.ops.aten.zero_.default, (), {}, (0,), (part,), ()))
    assert tape.unwritten(whole) == 20
    assert tape.unwritten(Window(0, torch.float32, (5,), (1,), 0)) == 0
    assert tape.unwritten(Window(0, torch.float32, (2,), (1,), 4)) == 4
    assert tape.last_write(0) is tape.ops[1]
    assert tape.nbytes_of([0, 1]) == 40


def test_a_tag_lives_as_long_as_the_storage():
    tape = Tape()
    tensor = torch.empty(4, device="meta")
    assert tag_of(tensor) is None and window_of(tensor) is None
    assert tape.tag(tensor.untyped_storage()) == 0
    view = tensor[1:]
    del tensor
    gc.collect()
    assert tag_of(view) == Tag(tape, 0)
    assert window_of(view) == Window(0, torch.float32, (3,), (1,), 1)
    assert window_of(view, Tape()) is None
    gone = weakref.ref(tape)
    del tape, view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("strange", [torch.eye(2).to_sparse(), nn.LazyLinear(2).weight, torch.zeros(2)])
def test_a_tensor_that_no_tape_can_know_has_no_tag(strange):
    assert tag_of(strange) is None


def test_storages_are_told_apart_though_all_addresses_are_zero():
    model = metaviz.build(nn.Linear, 3, 3)
    assert model.weight.data_ptr() == model.bias.data_ptr() == 0
    assert tag_of(model.weight).storage != tag_of(model.bias).storage
    assert tag_of(model.weight) == tag_of(model.weight.data.T)


def test_a_constant_is_a_fresh_copy_and_refuses_what_was_changed_since():
    value = torch.arange(3.0)
    version = value._version
    assert torch.equal(constant(value, version), value)
    assert constant(value, version).data_ptr() != value.data_ptr()
    value.add_(1)
    with pytest.raises(StalePlan, match=r"A \(3,\) tensor"):
        constant(value, version)


def test_nests_are_walked_and_rebuilt_as_they_are():
    a, b = torch.zeros(1), torch.zeros(2)
    nest = ([a, (b, 1)], {"x": a, "y": None})
    assert [t.numel() for t in tensors_in((a, [b, (a, 3)]), {"k": [b], "n": 1})] == [1, 2, 1, 2]
    assert map_tensors(nest, torch.numel) == ([1, (2, 1)], {"x": 1, "y": None})
    shown = Window(0, torch.float32, (2,), (1,), 0)
    assert map_windows(([shown, 3], shown), Window.numel) == ([2, 3], 2)


def test_what_strided_writes_leave_out_of_large_memory_is_never_said_to_be_written():
    def half():
        large = torch.empty(16_385, 16_385)
        large[:, ::2].normal_()
        return large

    large = metaviz.build(half)
    origin = origin_of(large)
    assert origin.tape.unwritten(origin.window) > 0
