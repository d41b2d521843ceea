"""Footprint: the memory that some tensors take, and would take in training, by device and dtype."""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from metaviz.core.units import format_bytes
from metaviz.errors import MetavizError

CPU = torch.device("cpu")
_KINDS = ("values", "gradients", "optimizer")


class Item(NamedTuple):
    """A tensor whose memory counts.

    Attributes:
        path: Where the model has it.
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether it is trained.
        device: Where it is, or would be.
        nbytes: Bytes of its values; 0 for what shares the memory of another.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by device and dtype.

    Attributes:
        values: ``{(device, dtype): bytes}`` of the tensors.
        gradients: The same for their gradients.
        optimizer: The same for what an optimizer keeps for them, after its first step.
        free_nbytes: ``{device: bytes}`` that are free now.
    """

    values: Mapping[tuple[torch.device, torch.dtype], int]
    gradients: Mapping[tuple[torch.device, torch.dtype], int]
    optimizer: Mapping[tuple[torch.device, torch.dtype], int]
    free_nbytes: Mapping[torch.device, int]

    @property
    def nbytes(self) -> dict[torch.device, int]:
        """Bytes by device, all in all."""
        found: Counter[torch.device] = Counter()
        for kind in _KINDS:
            for (device, _), nbytes in getattr(self, kind).items():
                found[device] += nbytes
        return dict(found)

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it. Activations are not counted."""
        return all(nbytes <= self.free_nbytes.get(device, 0) for device, nbytes in self.nbytes.items())

    def __str__(self) -> str:
        kinds = [kind for kind in _KINDS if getattr(self, kind)] or ["values"]
        rows = [["device", "dtype", *kinds, "sum", "free"]]
        keys = dict.fromkeys(key for kind in kinds for key in getattr(self, kind))
        for device, total in self.nbytes.items():
            mine = [key for key in keys if key[0] == device]
            for number, key in enumerate(mine):
                cells = [getattr(self, kind).get(key, 0) for kind in kinds]
                last = [format_bytes(sum(cells)), ""]
                if len(mine) == 1:
                    last[1] = self._room(device, total)
                label = str(device) if not number else ""
                rows.append([label, _word(key[1]), *map(_cell, cells), *last])
            if len(mine) > 1:
                sums = [sum(getattr(self, kind).get(key, 0) for key in mine) for kind in kinds]
                rows.append(["", "all", *map(_cell, sums), format_bytes(total), self._room(device, total)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    __repr__ = __str__

    def _room(self, device: torch.device, nbytes: int) -> str:
        free = self.free_nbytes.get(device)
        if free is None:
            return "not known"
        return f"{format_bytes(free)}{'' if nbytes <= free else ', does NOT fit'}"


def footprint(
    items: Iterable[Item],
    free_nbytes: Mapping[torch.device, int],
    *,
    gradients: bool = False,
    optimizer: Any = None,
) -> Footprint:
    """Add up what tensors take, and what training them takes besides.

    Args:
        items: The tensors.
        free_nbytes: Bytes that are free on their devices.
        gradients: Whether to count gradients of those that are trained, each in the dtype of its tensor.
        optimizer: A class of torch.optim or its name, or a function from parameters to an optimizer. It does one step
            on the meta device with parameters of these shapes, and what it keeps then is counted.

    Raises:
        ValueError: There is no such optimizer.
        MetavizError: The optimizer cannot do a step on meta.
    """
    items = list(items)
    values: Counter = Counter()
    grads: Counter = Counter()
    for item in items:
        values[item.device, item.dtype] += item.nbytes
    trained = [item for item in items if item.requires_grad]
    for item in trained if gradients else ():
        grads[item.device, item.dtype] += math.prod(item.shape) * item.dtype.itemsize
    state = Counter() if optimizer is None else _state(trained, _maker(optimizer))
    return Footprint(dict(values), dict(grads), dict(state), dict(free_nbytes))


def _maker(optimizer: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    if isinstance(optimizer, str):
        known = {
            name.lower(): cls
            for name, cls in vars(torch.optim).items()
            if isinstance(cls, type)
            and issubclass(cls, torch.optim.Optimizer)
            and cls is not torch.optim.Optimizer
        }
        if optimizer.lower() not in known:
            near = difflib.get_close_matches(optimizer.lower(), known, n=1) or ["adamw"]
            raise ValueError(
                f"torch.optim has no {optimizer!r}. The nearest is {known[near[0]].__name__!r}. "
                f"Next: plan.memory(optimizer={known[near[0]].__name__!r})"
            )
        return known[optimizer.lower()]
    if not callable(optimizer):
        shown = (
            type(optimizer).__name__ + "(...)"
            if isinstance(optimizer, torch.optim.Optimizer)
            else repr(optimizer)
        )
        raise ValueError(
            f"optimizer={shown} is neither a class nor a function. Next: plan.memory(optimizer='AdamW')"
        )
    return optimizer


def _state(
    items: list[Item], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> Counter[tuple[torch.device, torch.dtype]]:
    """Bytes of an optimizer's state, of which each shape and dtype is tried once."""
    alike = Counter((item.shape, item.dtype, item.device) for item in items)
    twins = {key: nn.Parameter(torch.empty(key[0], dtype=key[1], device="meta")) for key in alike}
    found: Counter[tuple[torch.device, torch.dtype]] = Counter()
    if not twins:
        return found
    for twin in twins.values():
        twin.grad = torch.empty_like(twin)
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        made = None
        try:
            made = make(list(twins.values()))
            _step(made)
        except Exception as error:
            # Some decide by values in a step; what they keep they have made before.
            if not _has_state_for_all(made):
                raise _refused(make, str(error).partition("\n")[0] or type(error).__name__) from None
    for key, twin in twins.items():
        for tensor in _tensors(made.state.get(twin)):
            where = key[2] if tensor.device.type == "meta" else tensor.device
            found[where, tensor.dtype] += tensor.nbytes * alike[key]
    return found


def _step(optimizer: torch.optim.Optimizer) -> None:
    """One step without the hooks that the user has set for the steps of all optimizers: this one is not theirs."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def _has_state_for_all(optimizer: Any) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    held = [parameter for group in groups for parameter in group["params"]]
    return bool(held) and all(next(_tensors(optimizer.state.get(each)), None) is not None for each in held)


def _tensors(kept: Any) -> Iterator[torch.Tensor]:
    """The tensors in what an optimizer keeps for a parameter; some keep lists of them."""
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, Mapping | list | tuple):
        for each in kept.values() if isinstance(kept, Mapping) else kept:
            yield from _tensors(each)


def _refused(make: Any, why: str) -> MetavizError:
    name = getattr(make, "__name__", type(make).__name__)
    return MetavizError(
        f"What {name} keeps cannot be found out on meta: {why}. Next: plan.memory(optimizer='AdamW'), or a function "
        "that makes it: plan.memory(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))"
    )


def _cell(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "—"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
