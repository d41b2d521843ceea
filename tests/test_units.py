"""Numbers as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaviz.core import units

KIB, MIB, GIB = 1024, 1024**2, 1024**3


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (64, "64 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * KIB - 1, "10.0 KiB"),
        (100 * KIB, "100 KiB"),
        (MIB - 1, "1.00 MiB"),
        (GIB * 3 // 2, "1.50 GiB"),
        (141_107_412_992, "131 GiB"),
        (2048 * 1024**6, "2,048 EiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_bytes_are_exact_when_few_and_three_digits_when_many(nbytes, text):
    assert units.format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (2752, "2,752"),
        (9999, "9,999"),
        (10_000, "10.0 K"),
        (999_499, "999 K"),
        (999_999, "1.00 M"),
        (70_553_706_496, "70.6 B"),
        (-70_553_706_496, "-70.6 B"),
    ],
)
def test_counts_are_exact_when_small_and_three_digits_when_large(number, text):
    assert units.format_count(number) == text


def test_exact_counts_have_every_digit():
    assert units.format_exact(70_553_706_496) == "70,553,706,496"


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0, "0 s"),
        (4.2e-4, "420 µs"),
        (0.0032, "3.20 ms"),
        (0.99951, "1.00 s"),
        (1.5, "1.50 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3599.6, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (-1.5, "-1.50 s"),
    ],
)
def test_times_are_in_the_unit_that_a_person_would_choose(duration, text):
    assert units.format_seconds(duration) == text


@pytest.mark.parametrize(
    ("shape", "text"),
    [((8192, 1024), "(8192, 1024)"), ((3,), "(3,)"), ((), "()"), (None, "?"), ((2, "s0"), "(2, s0)")],
)
def test_shapes_are_written_as_python_writes_them(shape, text):
    assert units.format_shape(shape) == text


def test_nouns_agree_with_their_numbers():
    assert [units.plural(number, "tensor") for number in (0, 1, 41_284)] == [
        "0 tensors",
        "1 tensor",
        "41,284 tensors",
    ]


@given(st.integers(0, 10**30))
def test_sizes_are_within_half_a_percent_and_short(nbytes):
    value, unit = units.format_bytes(nbytes).split()
    power = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
    assert abs(float(value.replace(",", "")) * 1024**power - nbytes) <= nbytes / 200
    assert nbytes >= 1000 * 1024**6 or len(value) <= 5
