"""Chains of ops as Python code: what a tape did to get the values of one tensor, written the way people write it.

Only what is understood is written: views become indexing, ops become operators and calls of :mod:`torch`. All is worked
out on the CPU, as in an ordinary build, and then copied.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from metaviz.core.fills import Fill, base_name, fill_of
from metaviz.core.reading import covers, ops_of, settled
from metaviz.core.tape import Op, Tape, Window, constant

aten = torch.ops.aten

MAX_VALUES = 8
_MAX_OPS = 16
_MAX_STATEMENTS = 8
_LINE = 100

_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}
_FACTORIES = frozenset(("arange", "linspace", "logspace", "eye"))
_CALLS = frozenset(
    (
        *(
            "abs",
            "ceil",
            "cos",
            "erfinv",
            "exp",
            "expm1",
            "floor",
            "log",
            "log1p",
            "log2",
            "neg",
            "reciprocal",
        ),
        *("round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tan", "tanh", "trunc", "rsub"),
        *("add", "sub", "mul", "div", "pow", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
        *("cat", "stack", "cumsum", "cumprod", "flip", "tril", "triu", "mean", "sum", "outer", "remainder"),
        *("floor_divide", "eq", "ne", "lt", "le", "gt", "ge", "where", "roll", "repeat_interleave", "mm"),
    )
)
# How a temporary stands in unfinished code: no text of a model can hold it.
_NAMED = re.compile("\0(\\d+)\0")


class NotUnderstood(Exception):
    """The chain has an op or a view that no plain code is known for."""


def chain_code(tape: Tape, window: Window, target: str, names: Iterator[str]) -> list[str]:
    """Statements that give ``target`` the values that ``window`` of ``tape`` has.

    Args:
        tape: The tape.
        window: The window, of the shape of the target.
        target: The expression of the tensor to be filled.
        names: An iterator of names for temporaries.

    Raises:
        NotUnderstood: There is no short plain code for it.
    """
    number, storage = settled(tape, window.storage)
    ops = [] if number is None else ops_of(tape, storage, number + 1)
    window = window._replace(storage=storage)
    if not 0 < len(ops) <= _MAX_OPS:
        raise NotUnderstood
    chain = _Chain(tape)
    if covers(tape, window) and window.is_contiguous() and all(_fills(op, window) for op in ops):
        chain.variables[window.storage] = (target, window)
    for op in ops:
        chain.write(op)
    if chain.variables.get(window.storage, ("",))[0] != target:
        chain.statements.append((None, f"{target}.copy_({chain.view(window)})"))
    return _named(_inlined(chain.statements), names)


def literal(value: Any, dtype: torch.dtype | None = None) -> str:
    """A number as code, with no more digits than ``dtype`` tells apart."""
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return f'float("{value}")'
    if dtype is not None and dtype.is_floating_point:
        for digits in range(1, 17):
            short = float(f"{value:.{digits}g}")
            if _rounded(short, dtype) == _rounded(value, dtype):
                return repr(short)
    return repr(value)


def written_out(values: torch.Tensor) -> str:
    """A small CPU tensor as code."""

    def nested(item: Any) -> str:
        if isinstance(item, list):
            return f"[{', '.join(map(nested, item))}]"
        return literal(item, values.dtype)

    return f'torch.tensor({nested(values.tolist())}, dtype={values.dtype}, device="cpu")'


def fill_code(fill: Fill, target: str, dtype: torch.dtype) -> str:
    """The statement that fills ``target``: ``torch.nn.init.normal_(self.weight, 0.0, 0.02)``."""
    if fill.name == "constant_":
        name = str(fill)
        if name in ("zeros_", "ones_"):
            return f"torch.nn.init.{name}({target})"
        return f"torch.nn.init.constant_({target}, {literal(fill.numbers[0], dtype)})"
    numbers = fill.numbers
    if fill.name == "trunc_normal_":
        mean, std, *bounds = numbers
        # Eight deviations away there is nothing left to be cut off.
        far = (x if math.isfinite(x) else mean + math.copysign(8, x) * std for x in bounds)
        numbers = (mean, std, *far)
    if fill.name in ("uniform_", "normal_", "trunc_normal_"):
        return f"torch.nn.init.{fill.name}({target}, {', '.join(map(literal, map(float, numbers)))})"
    return f"{target}.{fill.name}({', '.join(map(literal, numbers))})"


def index_of(whole: Window, part: Window) -> str | None:
    """The index that gives ``part`` of ``whole``: ``""``, ``"[0]"``, ``"[:, 0::2]"``; None if there is none."""
    if part.dtype != whole.dtype or part.lazy or whole.lazy:
        return None
    if part[2:5] == whole[2:5]:
        return ""
    if not whole.size or not whole.is_contiguous() or 0 in whole.size or 0 in part.size:
        return None
    one = len(part.size) == len(whole.size) - 1
    sizes, strides = ((1, *part.size), (1, *part.stride)) if one else (part.size, part.stride)
    if len(sizes) != len(whole.size):
        return None
    rest, index = part.offset - whole.offset, []
    for there, step, n, stride in zip(whole.size, whole.stride, sizes, strides, strict=True):
        start, rest = divmod(rest, step)
        every, odd = divmod(stride, step) if n > 1 else (1, 0)
        if odd or every < 1 or not 0 <= start <= start + (n - 1) * every < there:
            return None
        stop = "" if start + n * every >= there else f"{start + (n - 1) * every + 1}"
        whole_dim = n == there and every == 1
        index.append(":" if whole_dim else f"{start}:{stop}" + (f":{every}" if every > 1 else ""))
        if one and len(index) == 1:
            index = [str(start)]
    while index[-1] == ":":
        index.pop()
    return f"[{', '.join(index)}]" if not rest else None


class _Chain:
    """Statements as ``(number of the temporary, expression)``; the number is None where nothing new is named."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.statements: list[tuple[int | None, str]] = []
        self.variables: dict[int, tuple[str, Window]] = {}
        self._count = 0

    def write(self, op: Op) -> None:
        """Add the statement of one op."""
        target = op.writes[0]
        if len(op.writes) != 1 or target.lazy:
            raise NotUnderstood
        fill = fill_of(op)
        name = op.func.overloadpacket.__name__ if hasattr(op.func, "_schema") else ""
        if op.func is constant:
            value = op.args[0]
            if value.numel() > MAX_VALUES or value.dim() > 2 or not covers(self.tape, target):
                raise NotUnderstood
            self._name(target, written_out(value))
        elif fill is not None:
            self._fill(target, fill)
        elif op.func is aten.copy_.default and isinstance(op.args[1], Window):
            source = self.view(op.args[1])
            if target.storage not in self.variables:
                self._blank(target)
            self.statements.append((None, f"{self.view(target)}.copy_({source})"))
        elif op.outputs and op.outputs[0] is not None:
            self._name(target, self._call(op, name))
        elif name.rstrip("_") in _CALLS and isinstance(op.args[0], Window) and op.args[0] == target:
            arguments = ", ".join(self._arguments(op, op.args[1:]))
            self.statements.append((None, f"{self.view(target)}.{name}({arguments})"))
        else:
            raise NotUnderstood

    def view(self, window: Window) -> str:
        """The expression of ``window``."""
        if window.storage not in self.variables:
            raise NotUnderstood
        name, whole = self.variables[window.storage]
        index = index_of(whole, window)
        if index is not None:
            return name + index
        if window.dtype != whole.dtype or window.lazy:
            raise NotUnderstood
        size, stride = tuple(window.size), tuple(window.stride)
        flat = window.is_contiguous() and whole.is_contiguous() and window.offset == whole.offset
        if flat and window.numel() == whole.numel():
            return f"{name}.view({size})"
        if not name.startswith("\0") or (whole.offset and not whole.is_contiguous()):
            raise NotUnderstood
        return f"{name}.as_strided({size}, {stride}, {window.offset})"

    def _fill(self, target: Window, fill: Fill) -> None:
        if target.storage in self.variables or not (
            covers(self.tape, target) and target.is_contiguous() and fill.name != "trunc_normal_"
        ):
            if target.storage not in self.variables:
                self._blank(target)
            self.statements.append((None, fill_code(fill, self.view(target), target.dtype)))
            return
        size = tuple(target.size)
        if fill.draws:
            numbers = ", ".join(map(literal, fill.numbers))
            code = f'torch.empty({size}, dtype={target.dtype}, device="cpu").{fill.name}({numbers})'
        else:
            value = literal(fill.numbers[0], target.dtype)
            code = f'torch.full({size}, {value}, dtype={target.dtype}, device="cpu")'
        self._name(target, code)

    def _blank(self, target: Window) -> None:
        n = self.tape.storages[target.storage].nbytes // target.dtype.itemsize
        whole = target if covers(self.tape, target) and target.is_contiguous() else None
        whole = whole or Window(target.storage, target.dtype, (n,), (1,), 0)
        self._name(whole, f'torch.empty({tuple(whole.size)}, dtype={target.dtype}, device="cpu")')

    def _name(self, window: Window, code: str) -> None:
        self._count += 1
        self.variables[window.storage] = (f"\0{self._count}\0", window)
        self.statements.append((self._count, code))

    def _call(self, op: Op, name: str) -> str:
        if name == "clone" or (name == "_to_copy" and set(op.kwargs) <= {"dtype", "device", "non_blocking"}):
            source = self.view(op.args[0])
            return f"{source}.clone()" if name == "clone" else f"{source}.to({op.outputs[0].dtype})"
        if name in _FACTORIES:
            arguments = ", ".join(self._arguments(op, op.args))
            return f'torch.{name}({arguments}, dtype={op.outputs[0].dtype}, device="cpu")'
        if name not in _CALLS:
            raise NotUnderstood
        arguments = self._arguments(op, op.args)
        if name == "mul" and len(arguments) == 2 and isinstance(op.args[1], int | float):
            number, code = self.statements[-1]
            divisor = re.fullmatch("torch\\.reciprocal\\((.*)\\)", code)
            # Dividing a number by a tensor is these two ops.
            if divisor and arguments[0] == f"\0{number}\0":
                return f"{arguments[1]} / {divisor[1]}"
        if name in _OPERATORS and len(arguments) == 2 and not op.kwargs:
            return f"{arguments[0]} {_OPERATORS[name]} {arguments[1]}"
        return f"torch.{name}({', '.join(arguments)})"

    def _arguments(self, op: Op, args: tuple) -> list[str]:
        named = {
            name: value
            for name, value in op.kwargs.items()
            if value is not None and name not in ("device", "pin_memory", "layout", "generator")
        }
        if base_name(op) in _FACTORIES:
            named.pop("dtype", None)
        return [
            *map(self._argument, args),
            *(f"{name}={self._argument(value)}" for name, value in named.items()),
        ]

    def _argument(self, value: Any) -> str:
        if isinstance(value, Window):
            return self.view(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._argument, value))}]"
        if value is None or isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, bool | int | float):
            return literal(value)
        if isinstance(value, str):
            return ascii(value)
        raise NotUnderstood


def _fills(op: Op, window: Window) -> bool:
    """Whether ``op`` can work right on the tensor to be filled, or has nothing to do with it."""
    if not any(each.storage == window.storage for each in op.writes):
        return True
    fill = fill_of(op)
    return (
        (op.func is aten.copy_.default or fill is not None)
        and not op.outputs
        and index_of(window, op.writes[0]) is not None
    )


def _inlined(statements: list[tuple[int | None, str]]) -> list[tuple[int | None, str]]:
    """``statements`` with each temporary that only the next one uses put into it, where the line stays short."""
    used = Counter(mark for _, code in statements for mark in _NAMED.findall(code))
    done: list[tuple[int | None, str]] = []
    for number, code in statements:
        if number is not None and not used[str(number)]:
            continue
        while done and done[-1][0] is not None:
            last, inner = done[-1]
            mark = f"\0{last}\0"
            if used[str(last)] != 1 or mark not in code or len(code) + len(inner) > _LINE:
                break
            code = code.replace(mark, inner if _is_apart(code, mark, inner) else f"({inner})")
            done.pop()
        done.append((number, code))
    return done


def _is_apart(code: str, mark: str, inner: str) -> bool:
    """Whether ``inner`` may stand for ``mark`` in ``code`` as it is."""
    before, after = code.split(mark)
    if before[-1:] in "([" and after[:1] in ")],":
        return True
    depth = 0
    for letter in inner:
        depth += (letter in "([") - (letter in ")]")
        if letter == " " and not depth:
            return False
    return True


def _named(statements: list[tuple[int | None, str]], names: Iterator[str]) -> list[str]:
    if len(statements) > _MAX_STATEMENTS:
        raise NotUnderstood
    known: dict[str, str] = {}

    def name(match: re.Match) -> str:
        if match[1] not in known:
            known[match[1]] = next(names)
        return known[match[1]]

    return [
        _NAMED.sub(name, code if number is None else f"\0{number}\0 = {code}") for number, code in statements
    ]


@functools.lru_cache(maxsize=4096)
def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype, device="cpu").item()
