"""Fills: tensors that hold one number everywhere, or independent draws of one distribution, and sums about them.

``torch.randn(4) * 0.02`` and ``torch.empty(4).normal_(0, 0.02)`` are other ops and the same distribution. Constants,
normal, uniform and truncated normal values stay what they are when they are scaled and shifted, so chains of such ops
come down to one fill.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from metaviz.core.tape import Op, Window, constant, version_of

aten = torch.ops.aten

# A normal value this many deviations from the mean comes once in 500 million: no bound out there is felt.
_FAR = 6.0
_CLOSED = ("constant_", "normal_", "uniform_", "trunc_normal_")
_STANDARD = statistics.NormalDist()

# Ops that leave in their whole window one number or independent draws, with the defaults of their numbers.
_FILLS: dict[Any, tuple[str, tuple]] = {
    aten.fill_.Scalar: ("constant_", ()),
    aten.uniform_.default: ("uniform_", (0.0, 1.0)),
    aten.normal_.default: ("normal_", (0.0, 1.0)),
    aten.bernoulli_.float: ("bernoulli_", (0.5,)),
    aten.exponential_.default: ("exponential_", (1.0,)),
    aten.cauchy_.default: ("cauchy_", (0.0, 1.0)),
    aten.log_normal_.default: ("log_normal_", (1.0, 2.0)),
    aten.geometric_.default: ("geometric_", ()),
    aten.random_.default: ("random_", ()),
    aten.random_.to: ("random_", ()),
    getattr(aten.random_, "from"): ("random_", ()),
}


class Fill(NamedTuple):
    """What every element of a tensor holds: a number (``constant_``), or a draw of its own.

    ``name`` is the in-place op's or that of :mod:`torch.nn.init`; ``numbers`` are all of its arguments.
    """

    name: str
    numbers: tuple

    def __str__(self) -> str:
        if self.name == "constant_" and self.numbers[0] in (0, 1) and type(self.numbers[0]) is not bool:
            return "ones_" if self.numbers[0] else "zeros_"
        return f"{self.name}({', '.join(map(_short, self.numbers))})"

    @property
    def draws(self) -> bool:
        """Whether the numbers are of a distribution and not the values themselves."""
        return self.name != "constant_"

    def affine(self, scale: float, shift: float) -> Fill | None:
        """The fill after ``scale * x + shift``, or None if that is no fill with a name."""
        if self.name not in _CLOSED or isinstance(scale, complex) or isinstance(shift, complex):
            return None
        if self.draws and not (scale and math.isfinite(scale) and math.isfinite(shift)):
            return None
        if self.name == "normal_":
            mean, std = self.numbers
            return Fill("normal_", (scale * mean + shift, abs(scale) * std))
        moved = tuple(scale * x + shift for x in self.numbers)
        if self.name == "constant_":
            return Fill("constant_", moved)
        low, high = sorted(moved[-2:])
        if self.name == "uniform_":
            return Fill("uniform_", (low, high))
        return Fill("trunc_normal_", (moved[0], abs(scale) * self.numbers[1], low, high))

    def clamped(self, low: float | None, high: float | None) -> Fill | None:
        """The fill after a clamp that as good as never finds anything to do, else None."""
        low = -math.inf if low is None else low
        high = math.inf if high is None else high
        if self.name == "normal_":
            return Fill("trunc_normal_", (*self.numbers, -math.inf, math.inf)).clamped(low, high)
        if self.name != "trunc_normal_":
            return None
        mean, std, a, b = self.numbers
        slack = 1e-6 * std
        below = low <= a + slack or mean - low >= _FAR * std
        above = high >= b - slack or high - mean >= _FAR * std
        return Fill("trunc_normal_", (mean, std, max(a, low), min(b, high))) if below and above else None

    def erfinv(self) -> Fill | None:
        """The fill after ``erfinv``, which makes a truncated normal of a uniform one."""
        if self.name != "uniform_" or not all(-1 <= x <= 1 for x in self.numbers):
            return None
        low, high = (_quantile((1 + x) / 2) / math.sqrt(2) for x in self.numbers)
        return Fill("trunc_normal_", (0.0, 1 / math.sqrt(2), low, high))

    def canonical(self) -> Fill:
        """The same distribution under one name: bounds out of reach are none."""
        if self.name != "trunc_normal_":
            return self
        mean, std, a, b = self.numbers
        a = a if mean - a < _FAR * std else -math.inf
        b = b if b - mean < _FAR * std else math.inf
        both_far = math.isinf(a) and math.isinf(b)
        return Fill("normal_", (mean, std)) if both_far else Fill("trunc_normal_", (mean, std, a, b))


def fill_of(op: Op) -> Fill | None:
    """The fill that ``op`` alone leaves in the window it writes, None if it does something else."""
    known = _FILLS.get(op.func)
    if known is not None:
        if any(value is not None for value in op.kwargs.values()):
            return None
        name, defaults = known
        given = op.args[1:]
        numbers = (*given, *defaults[len(given) :])
        if name == "constant_":
            numbers = (_held(numbers[0], op.writes[0].dtype),)
        return Fill(name, numbers)
    if op.func is aten.zero_.default:
        return Fill("constant_", (_held(0.0, op.writes[0].dtype),))
    if op.func is constant and op.args[0].numel() == 1 and version_of(op.args[0]) == op.args[1]:
        return Fill("constant_", (op.args[0].item(),))
    if op.func is aten.normal.float_float:
        return Fill("normal_", op.args[:2])
    if op.draw and not hasattr(op.func, "_schema") and op.func.__name__.startswith("_no_grad_"):
        numbers = tuple(op.kwargs.values())
        if all(isinstance(x, int | float) for x in numbers):
            return Fill(op.func.__name__.removeprefix("_no_grad_"), numbers)
    return None


# Each as (scale, shift) of the drawn operand, first for a drawn left and then for a drawn right one.
_MAPS = {
    "mul": (lambda y, alpha: (y, 0), lambda x, alpha: (x, 0)),
    "div": (lambda y, alpha: (1 / y, 0), None),
    "add": (lambda y, alpha: (1, alpha * y), lambda x, alpha: (alpha, x)),
    "sub": (lambda y, alpha: (1, -alpha * y), lambda x, alpha: (-alpha, x)),
    "rsub": (lambda y, alpha: (-alpha, y), lambda x, alpha: (1, -alpha * x)),
}
COPIES = frozenset(("clone", "copy", "_to_copy", "detach_copy", "lift_fresh_copy"))


def folded(op: Op, target: Window, operands: Sequence[tuple[Window, Fill | None]]) -> Fill | None:
    """The fill that ``op`` makes of its operands', or None if that is no fill.

    Args:
        op: The op.
        target: What it writes.
        operands: The windows it reads, in order, and what each of them is filled with.
    """
    name = base_name(op)
    fills = [fill for _, fill in operands]
    if not target.dtype.is_floating_point or "out" in op.kwargs or not fills or None in fills:
        return None
    if any(fill.draws and window.size != target.size for window, fill in operands):
        return None
    if name in COPIES:
        return fills[-1] if operands[-1][0].dtype.is_floating_point or not fills[-1].draws else None
    if name == "neg":
        return fills[0].affine(-1, 0)
    if name == "erfinv":
        return fills[0].erfinv()
    if name == "clamp" and len(fills) == 1:
        low, high = (*op.args[1:], *[op.kwargs.get(bound) for bound in ("min", "max")][len(op.args) - 1 :])
        return fills[0].clamped(low, high)
    return _mapped(op, name, iter(fills))


def _mapped(op: Op, name: str, fills: Any) -> Fill | None:
    maps = _MAPS.get(name)
    if maps is None or len(op.args) < 2 or op.kwargs.get("rounding_mode") is not None:
        return None
    alpha = op.args[2] if len(op.args) > 2 else op.kwargs.get("alpha", 1)
    left, right = (next(fills) if isinstance(arg, Window) else _number(arg) for arg in op.args[:2])
    if left is None or right is None or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return None
    for mine, other, law in ((left, right, maps[0]), (right, left, maps[1])):
        if not other.draws and (mine.draws or other is right) and law is not None:
            (number,) = other.numbers
            if isinstance(number, complex) or (name == "div" and not number):
                return None
            return mine.affine(*law(number, alpha))
    return None


def agree(one: Fill, other: Fill, tolerance: float = 1e-6) -> bool:
    """Whether two fills are of one kind, with numbers that differ by no more than ``tolerance`` of the largest."""
    if one.name != other.name or len(one.numbers) != len(other.numbers):
        return False
    size = max((abs(x) for x in (*one.numbers, *other.numbers) if _is_finite(x)), default=0)
    return all(
        is_close(x, y, tolerance, tolerance * size) for x, y in zip(one.numbers, other.numbers, strict=True)
    )


def is_close(one: Any, other: Any, relative: float = 1e-6, absolute: float = 0.0) -> bool:
    """Whether two numbers of arguments mean the same."""
    if one == other or (one != one and other != other):
        return True
    if not (_is_finite(one) and _is_finite(other)):
        return False
    return abs(one - other) <= max(relative * max(abs(one), abs(other)), absolute)


def base_name(op: Op) -> str:
    """The op without its overload, and without the mark of working in place: ``mul`` for ``mul_.Tensor``."""
    packet = getattr(op.func, "overloadpacket", None)
    return (packet.__name__ if packet else op.func.__name__).rstrip("_")


def _is_finite(x: Any) -> bool:
    return math.isfinite(abs(x))


def _held(value: Any, dtype: torch.dtype) -> Any:
    """``value`` as a tensor of ``dtype`` holds it, but for the rounding of floats."""
    if dtype.is_floating_point:
        return float(value)
    if dtype.is_complex:
        return complex(value)
    return bool(value) if dtype is torch.bool else int(value)


def _number(arg: Any) -> Fill | None:
    return Fill("constant_", (arg,)) if isinstance(arg, int | float | complex) else None


def _quantile(p: float) -> float:
    if not 0 < p < 1:
        return -math.inf if p <= 0 else math.inf
    return _STANDARD.inv_cdf(p)


def _short(x: Any) -> str:
    if not isinstance(x, float):
        return str(x)
    return text if len(text := f"{x:g}") <= 6 else f"{x:.3g}"
