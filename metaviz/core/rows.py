"""What a tree tells of one module or tensor, and its sums."""

from __future__ import annotations

from typing import NamedTuple

from metaviz.core import reasons
from metaviz.core.columns import Columns


class Row(NamedTuple):
    """One module or tensor.

    Attributes:
        path: Dotted path; `""` is the root.
        name: Its last part.
        kind: `"module"`, `"parameter"`, `"buffer"`, or `"attribute"`: a tensor that torch does not know of.
        cls: Class name.
        shape: Of a tensor; None where it is not known yet.
        dtype: Such as `"bfloat16"`; of a module all that are below, most bytes first: `"bfloat16, int64"`.
        numel: Elements; of a module those of its parameters, each storage counted once.
        nbytes: Bytes, of a module those of all tensors below, each storage counted once.
        device: Such as `"meta"` or `"cuda:0"`; of a module all that are below.
        persistent: Whether a state dict holds the buffer; None if it is no buffer.
        requires_grad: Whether it is trained; of a module None where some parameters are and some are not.
        tied_to: Path of the earlier slot that holds the very same tensor or module.
        aliases: Path of the earlier tensor that views the same storage.
        mark: `"real"`, `"ready"`, `"partial"`, `"blocked"` or `"empty"`.
        source: Where the values can come from, None where they are there or cannot be had.
        reason: Why the mark is what it is, with the next step as code.
        lightning: What Lightning would do with it, where that was asked.
        numel_by_path: As `numel`, with every slot counted.
        nbytes_by_path: As `nbytes`, with every slot counted.
    """

    path: str
    name: str
    kind: str
    cls: str
    shape: tuple[int | str, ...] | None
    dtype: str | None
    numel: int
    nbytes: int
    device: str | None
    persistent: bool | None
    requires_grad: bool | None
    tied_to: str | None
    aliases: str | None
    mark: str
    source: str | None
    reason: str
    lightning: str | None
    numel_by_path: int
    nbytes_by_path: int


class Totals(NamedTuple):
    """Sums over a tree: parameters are elements, sizes are bytes, `by_path` counts every slot.

    Attributes:
        numel: Elements of the parameters, each storage counted once.
        numel_by_path: The same with every slot counted.
        frozen: Elements of those parameters that do not require grad.
        nbytes: Bytes of all tensors, each storage counted once.
        nbytes_by_path: The same with every slot counted.
        devices: Device → bytes, most first.
        dtypes: dtype → bytes, most first.
        marks: Mark → how many tensors, ties counted once.
        stale: How many tensors without values are in plain attributes.
    """

    numel: int
    numel_by_path: int
    frozen: int
    nbytes: int
    nbytes_by_path: int
    devices: dict[str, int]
    dtypes: dict[str, int]
    marks: dict[str, int]
    stale: int


def row_of(columns: Columns, row: int) -> Row:
    """A row with everything that is known about it."""
    form, path = columns.forms[row], columns.path(row)
    link, first = columns.links.get(row, ("", -1))
    tally, (numel, nbytes) = columns.tally(row), columns.by_path(row)
    facts = form.facts
    if facts is not None:
        shape, dtype, device, grad = facts.shape, facts.dtype, facts.device, facts.requires_grad
        size = facts.numel, facts.nbytes
        numel, nbytes = size
    else:
        shape, size = None, (tally.numel, tally.nbytes)
        devices, dtypes = split(tally.where)
        dtype, device = ", ".join(dtypes) or None, ", ".join(devices) or None
        # None also stands for "some of them".
        grad = {0: True, tally.numel: False}.get(tally.frozen) if tally.numel else None
    return Row(
        path=path,
        name=columns.names[row],
        kind=form.kind,
        cls=form.cls,
        shape=shape,
        dtype=dtype,
        numel=size[0],
        nbytes=size[1],
        device=device,
        persistent=form.persistent,
        requires_grad=grad,
        tied_to=columns.path(first) if link in ("tie", "shared", "cycle") else None,
        aliases=columns.path(first) if link == "alias" else None,
        mark=columns.mark(row),
        source=form.source,
        reason=reasons.reason(columns, row),
        lightning=None,
        numel_by_path=numel,
        nbytes_by_path=nbytes,
    )


def split(where: dict[tuple[str, str], int]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per device and bytes per dtype, most first."""
    devices: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for (device, dtype), nbytes in where.items():
        devices[device] = devices.get(device, 0) + nbytes
        dtypes[dtype] = dtypes.get(dtype, 0) + nbytes
    return _ordered(devices), _ordered(dtypes)


def _ordered(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
