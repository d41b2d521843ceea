"""Kinds: what the recorder must know of an aten op, read from its schema once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from metaviz.core.tape import tensors_in

aten = torch.ops.aten

# In-place ops that leave nothing of what was there before.
_OVERWRITES = {"zero_", "fill_", "copy_", "uniform_", "normal_", "random_", "bernoulli_"}
_OVERWRITES |= {"exponential_", "cauchy_", "log_normal_", "geometric_"}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# Ops that on meta check no values, or give other strides: where it is cheap they are run for real.
_DIFFER_ON_META = {"_linalg_check_errors", "_linalg_svd", "linalg_eig"}
# Arguments that an op writes though its schema does not say so: the running statistics.
_UNDECLARED_WRITES = {"native_batch_norm": (3, 4)}
# Factories as the in-place op that fills what they allocate. ATen implements the random ones in just this way, so the
# draws are the same, and the in-place ops take a generator.
_FILLS = {
    "zeros": (aten.zero_.default, ()),
    "ones": (aten.fill_.Scalar, (1,)),
    "full": (aten.fill_.Scalar, None),
    "rand": (aten.uniform_.default, ()),
    "randn": (aten.normal_.default, ()),
}


def _can_draw(tensor: torch.Tensor, low: float = 0.0, high: float = 1.0) -> bool:
    return low <= high and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


# Fills whose meta kernel has nothing to do, and takes up to half a millisecond to do it: it is skipped where these
# say that an ordinary build would not raise.
_SKIPPABLE = {
    aten.zero_.default: lambda tensor: True,
    aten.fill_.Scalar: lambda tensor, value: True,
    aten.uniform_.default: _can_draw,
    aten.normal_.default: lambda tensor, mean=0.0, std=1.0: _can_draw(tensor, 0.0, std),
}


class Kind:
    """What the recorder must know of an aten op, worked out once per op."""

    __slots__ = (
        *("differs", "empty", "factory", "fill", "has_device", "name", "outs", "overwrites", "random"),
        *("reader", "skippable", "window", "written"),
    )

    def __init__(self, func: Any) -> None:
        schema, tags = func._schema, func.tags
        self.name = name = func.overloadpacket.__name__
        aliases = [r.alias_info for r in schema.returns]
        # resize_ may enlarge the storage, and these two may bring real memory in: they are looked at.
        self.window = name not in ("resize_", "lift_fresh", "set_") and (
            torch.Tag.inplace_view in tags
            or (bool(aliases) and all(a is not None and not a.is_write for a in aliases))
        )
        self.random = torch.Tag.nondeterministic_seeded in tags
        # A boolean mask makes the shape of these two depend on data, plain indices do not: meta tells.
        self.reader = (
            torch.Tag.data_dependent_output in tags
            or name.startswith("quantize_per")
            or (torch.Tag.dynamic_output_shape in tags and name not in ("index", "index_put", "index_put_"))
        )
        self.differs = name in _DIFFER_ON_META
        self.has_device = any(a.name == "device" for a in schema.arguments)
        base = name.removeprefix("new_").removesuffix("_like")
        takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
        self.factory = self.has_device and (base != name or not takes_tensors)
        self.empty = self.factory and base in ("empty", "empty_strided", "empty_permuted")
        self.fill = _FILLS.get(base) if self.factory else None
        mutable = [
            (i, a)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.written = tuple(i for i, a in mutable if not a.kwarg_only)
        self.written += _UNDECLARED_WRITES.get(name, ())
        self.outs = tuple(a.name for _, a in mutable if a.kwarg_only)
        self.overwrites = name in _OVERWRITES or bool(self.outs)
        self.skippable = _SKIPPABLE.get(func)

    def targets(self, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
        """The tensors among the arguments that the op writes."""
        yield from tensors_in(
            [args[i] for i in self.written if i < len(args)], {n: kwargs.get(n) for n in self.outs}
        )


kind_of = functools.cache(Kind)


def is_plain(out: Any) -> bool:
    """Whether a result of an op on meta can stand for the real one: sparse and quantized ones cannot."""
    return not isinstance(out, torch.Tensor) or (out.layout is torch.strided and out.dtype not in _QUANTIZED)
