"""`tree(model)`: what a model is made of, where each tensor lives, and which of them can be given values.

A `ModuleTree` is a snapshot: numbers and names in columns (`walk.py`), no tensor and no module. Rows are made
when they are asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from torch import nn

from metaviz.core import reasons
from metaviz.core.asking import verdict_at
from metaviz.core.columns import Columns
from metaviz.core.lightning import Prediction, predict
from metaviz.core.sources import SOURCES, Slot, Sources
from metaviz.core.verdict import Verdict
from metaviz.core.walk import walk
from metaviz.errors import UnknownPath


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


def tree(model: nn.Module, *, source: str = "auto", answer: Callable[..., Any] | None = None) -> ModuleTree:
    """Look at a model: every module and tensor, where it lives, and whether it can be given values.

    Nothing is moved, no forward runs, no value is read, no generator is drawn from.

    Args:
        model: Any module, on any devices.
        source: Whose marks to show: `"replay"` (the tape of the model's recording), `"reset"` (the modules' own
            init methods, tried on copies), or `"auto"` for the first of them that can.
        answer: `answer(tensor, module, name, kind)` tells for a meta tensor whether it can be filled, in the
            place of a source.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: There is no such source.

    Example:
        >>> metaviz.tree(nn.Linear(2, 3)).totals.numel
        9
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"tree() looks at a torch.nn.Module, and {type(model).__name__} is none. "
            "Pass the model itself: metaviz.tree(model)"
        )
    if source not in SOURCES:
        raise ValueError(f"source={source!r} is not one of {', '.join(map(repr, SOURCES))}.")
    columns = walk(model, answer or _asking(model, source))
    columns.source = source
    return ModuleTree(columns, model=weakref.ref(model))


def _asking(model: nn.Module, source: str) -> Callable[..., Verdict]:
    sources = Sources(model)
    if source == "auto":
        return sources
    return lambda tensor, *place: sources.verdict(tensor, Slot(*place), source)


class ModuleTree:
    """The modules and tensors of a model, or of one of its parts.

    Iterate for rows, index by path for a part: `tree["layers.3"]`, `tree["layers.3"]["mlp"]`. A part keeps
    the paths of the whole model, so that they can be handed to `materialize`.
    """

    #: Draws a tree: `drawn(tree, how, **options)`. Core does not know its views, so `metaviz` sets it.
    drawn: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, columns: Columns, root: int = 0, model: weakref.ref[nn.Module] | None = None):
        self.columns = columns
        self.root = root
        self._model = model
        self._rows: tuple[Row, ...] | None = None

    @property
    def path(self) -> str:
        """Dotted path of the root of this tree; `""` for a whole model."""
        return self.columns.path(self.root)

    @property
    def row(self) -> Row:
        """The root's own row."""
        return _row(self.columns, self.root)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, a module before what is below it."""
        if self._rows is None:
            span = range(self.root, self.columns.ends[self.root])
            self._rows = tuple(_row(self.columns, row) for row in span)
        return self._rows

    @property
    def modules(self) -> tuple[Row, ...]:
        """The rows of modules."""
        return tuple(row for row in self.rows if row.kind == "module")

    @property
    def tensors(self) -> tuple[Row, ...]:
        """The rows of parameters, buffers and attributes."""
        return tuple(row for row in self.rows if row.kind != "module")

    @property
    def totals(self) -> Totals:
        """Sums over this tree."""
        tally, (numel, nbytes) = self.columns.tally(self.root), self.columns.by_path(self.root)
        devices, dtypes = _split(tally.where)
        marks = {mark: getattr(tally, mark) for mark in ("real", "ready", "blocked") if getattr(tally, mark)}
        return Totals(
            tally.numel, numel, tally.frozen, tally.nbytes, nbytes, devices, dtypes, marks, tally.stale
        )

    def __len__(self) -> int:
        return self.columns.ends[self.root] - self.root

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._find(path) is not None

    def __getitem__(self, path: str) -> ModuleTree:
        """The part at a path below this tree's root, or at a path of the whole model.

        Raises:
            TypeError: The path is not a string.
            UnknownPath: There is no such module or tensor.
        """
        if not isinstance(path, str):
            raise TypeError(
                f"A path is a string, and this is of type {type(path).__name__}. Next: tree['layers.0']"
            )
        row = self._find(path)
        if row is None:
            raise UnknownPath(reasons.unknown(self.columns, self.root, path))
        return ModuleTree(self.columns, row, self._model)

    def _find(self, path: str) -> int | None:
        if not path:
            return self.root
        if not self.root:
            return self.columns.find(path)
        row = self.columns.find(f"{self.path}.{path}")
        if row is None:
            row = self.columns.find(path)
            # A path below this part may lead through a shared module, to rows that stand elsewhere.
            inside = row in range(self.root, self.columns.ends[self.root]) or path.startswith(f"{self.path}.")
            return row if inside else None
        return row

    def verdict(self, path: str = "", source: str = "auto") -> Verdict:
        """What a source can do for a tensor, or for all tensors without values below a module.

        The model is asked as it is now. Nothing of it changes: init methods are tried on copies.

        Args:
            path: As for `tree[path]`.
            source: `"replay"`, `"reset"`, or `"auto"` for the first of them that can.

        Raises:
            UnknownPath: There is no such module or tensor, or there is none any more.
            ValueError: There is no such source.

        Example:
            >>> model = nn.Linear(2, 3, device="meta")
            >>> metaviz.tree(model).verdict("weight", "reset").can
            True
        """
        return verdict_at(self.model, self.columns, self[path].root, source)

    @property
    def model(self) -> nn.Module:
        """The model that this tree is of; a tree does not keep it alive.

        Raises:
            UnknownPath: The model is gone.
        """
        model = None if self._model is None else self._model()
        if model is None:
            raise UnknownPath(
                "The model of this tree is gone: a tree does not keep it. Next: model = ...; tree = metaviz.tree(model)"
            )
        return model

    def explain(self, path: str = "") -> str:
        """What one module or tensor is, what each source and Lightning can do for it, and the code to paste.

        Where reset cannot give a tensor its values, the code is a `reset_parameters` for the class that does
        what its constructor did. The text shows itself with its line breaks, and in notebooks as HTML.

        Raises:
            UnknownPath: There is no such module or tensor.

        Example:
            >>> print(metaviz.tree(nn.Linear(2, 3)).explain("bias"))
            bias (Parameter) is a parameter (3,) in float32, 12 B on cpu. It holds values on cpu.
        """
        return self._draw("explanation", path=path)

    def trouble(self, *, search: bool = False) -> Any:
        """What is wrong with this model or part, and nothing else: an entry for each cause, with a fix.

        Tensors that no source can fill, those that would come out with other values, what will hurt around
        the model (see `metaviz.findings`), and what Lightning's strategies would do wrong. Iterate for the
        entries; it is false where nothing is wrong, and it shows itself as text and HTML.

        Args:
            search: Whether to look for optimizers of the model among all objects of the process, some 0.1 s.

        Raises:
            UnknownPath: The model is gone.
        """
        return self._draw("trouble", search=search)

    @property
    def lightning(self) -> Prediction:
        """What Lightning's strategies would do with the model, the whole of it; worked out when first asked for.

        Raises:
            UnknownPath: The model is gone.

        Example:
            >>> metaviz.tree(nn.Linear(2, 3, device="meta")).lightning.fsdp.uninitialized
            ()
        """
        if self.columns.prediction is None:
            self.columns.prediction = predict(self.model)
        return self.columns.prediction

    def text(self, *, depth: int | None = None, unfold: bool = False, rows: int = 60) -> str:
        """The tree as text.

        Args:
            depth: How many levels below the root to open; None opens as many as there is room for.
            unfold: Show each of some repeated blocks, not one for all.
            rows: About how many lines there is room for.
        """
        return self._draw("text", depth=depth, unfold=unfold, rows=rows)

    def html(self, *, depth: int | None = None) -> str:
        """The tree as static HTML without scripts, at most 300 kB.

        Args:
            depth: How many levels below the root there are to open; None for all.
        """
        return self._draw("html", depth=depth)

    def to_frame(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Its `lightning` column takes a dry run of Lightning's rules over the whole model, once: some seconds
        where it has tens of thousands of modules. It is empty where the model is gone.
        """
        return self._draw("frame")

    def __repr__(self) -> str:
        return self.text() if self.drawn else f"<ModuleTree {self.path!r}: {len(self)} rows>"

    def _repr_html_(self) -> str | None:
        return self.html() if self.drawn else None

    def _draw(self, how: str, **options: Any) -> Any:
        if self.drawn is None:
            raise RuntimeError(
                "Nothing draws trees yet: the views are set by the package. Next: import metaviz"
            )
        return type(self).drawn(self, how, **options)


def _row(columns: Columns, row: int) -> Row:
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
        devices, dtypes = _split(tally.where)
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


def _split(where: dict[tuple[str, str], int]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per device and bytes per dtype, most first."""
    devices: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for (device, dtype), nbytes in where.items():
        devices[device] = devices.get(device, 0) + nbytes
        dtypes[dtype] = dtypes.get(dtype, 0) + nbytes
    return _ordered(devices), _ordered(dtypes)


def _ordered(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
