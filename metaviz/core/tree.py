"""`tree(model)`: what a model is made of, where each tensor lives, and which of them can be given values.

A `ModuleTree` is a snapshot: numbers and names in columns (`walk.py`), no tensor and no module. Rows are made
when they are asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import nn

from metaviz.core import reasons
from metaviz.core.asking import verdict_at, verdicts_below
from metaviz.core.checkpoint import checkpoint as opened
from metaviz.core.columns import Columns
from metaviz.core.lightning import Prediction, predict
from metaviz.core.loading import Loading
from metaviz.core.match import matching
from metaviz.core.paths import Model
from metaviz.core.rows import Row, Totals, row_of, split
from metaviz.core.sources import Slot, Sources, check_source
from metaviz.core.verdict import Verdict
from metaviz.core.walk import walk
from metaviz.errors import UnknownPath


def tree(
    model: nn.Module,
    *,
    source: str = "auto",
    checkpoint: Any = None,
    answer: Callable[..., Any] | None = None,
) -> ModuleTree:
    """Look at a model: every module and tensor, where it lives, and whether it can be given values.

    Nothing is moved, no forward runs, no value is read, no generator is drawn from.

    Args:
        model: Any module, on any devices.
        source: Whose marks to show: `"checkpoint"`, `"replay"` (the tape of the model's recording), `"reset"` (the
            modules' own init methods, tried on copies), or `"auto"` for the first of them that can.
        checkpoint: A checkpoint to look into, as for `metaviz.materialize`; only its headers are read.
        answer: `answer(tensor, module, name, kind)` tells for a meta tensor whether it can be filled, in the
            place of a source.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: There is no such source.
        BadCheckpoint: The checkpoint cannot be read.
        CheckpointMismatch: Nothing in the checkpoint fits the model.

    Example:
        >>> metaviz.tree(nn.Linear(2, 3)).totals.numel
        9
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"tree() looks at a torch.nn.Module, and {type(model).__name__} is none. "
            "Pass the model itself: metaviz.tree(model)"
        )
    check_source(source, checkpoint)
    loading = None
    if checkpoint is not None:
        loading = Loading(model, opened(checkpoint))
        matching(Model(model), loading)
    columns = walk(model, answer or _asking(Sources(model, loading), source))
    columns.source = source
    columns.checkpoint = None if loading is None else loading.checkpoint
    return ModuleTree(columns, model=weakref.ref(model))


def _asking(sources: Sources, source: str) -> Callable[..., Verdict]:
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
        return row_of(self.columns, self.root)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, a module before what is below it."""
        if self._rows is None:
            span = range(self.root, self.columns.ends[self.root])
            self._rows = tuple(row_of(self.columns, row) for row in span)
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
        devices, dtypes = split(tally.where)
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
            source: `"checkpoint"`, `"replay"`, `"reset"`, or `"auto"` for the first of them that can.

        Raises:
            UnknownPath: There is no such module or tensor, or there is none any more.
            ValueError: There is no such source.

        Example:
            >>> model = nn.Linear(2, 3, device="meta")
            >>> metaviz.tree(model).verdict("weight", "reset").can
            True
        """
        return verdict_at(self.model, self.columns, self[path].root, source)

    def verdicts(self, source: str = "auto") -> dict[str, Verdict]:
        """The verdicts on all tensors of this tree by path: one look at the model for all of them.

        Args:
            source: As for `verdict`.

        Raises:
            UnknownPath: A tensor of the tree is not there any more.
            ValueError: There is no such source.

        Example:
            >>> model = nn.Linear(2, 3, device="meta")
            >>> [verdict.kind for verdict in metaviz.tree(model).verdicts("reset").values()]
            ['reset', 'reset']
        """
        return verdicts_below(self.model, self.columns, self.root, source)

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
