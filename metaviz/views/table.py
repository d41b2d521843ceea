"""A tree as a `pandas.DataFrame`; the only place that imports pandas."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from metaviz.core.tree import ModuleTree
from metaviz.errors import UnknownPath

COLUMNS = [
    "path",
    "name",
    "kind",
    "cls",
    "shape",
    "dtype",
    "numel",
    "nbytes",
    "device",
    "persistent",
    "requires_grad",
    "tied_to",
    "mark",
    "source",
    "reason",
    "lightning",
]


def frame(tree: ModuleTree) -> pd.DataFrame:
    """The rows of a tree, one per module and tensor; sum `nbytes` over tensors and ties count twice.

    What Lightning would do is predicted for the whole model, once: that costs a walk, and a dry run of each kind
    of init method. The column is empty where the model is gone or has nothing on meta.

    Example:
        >>> table = metaviz.tree(nn.Linear(2, 3)).to_frame()
        >>> table[["path", "numel"]].values.tolist()
        [['', 9], ['weight', 6], ['bias', 3]]
    """
    words = _lightning(tree)
    rows = [row._replace(lightning=words(row.tied_to or row.path)) for row in tree.rows]
    table = pd.DataFrame.from_records([row[:] for row in rows], columns=tree.row._fields)
    # Where there is nothing to say, a yes-or-no column holds <NA> and not a third kind of object.
    return table[COLUMNS].astype({"persistent": "boolean", "requires_grad": "boolean"})


def _lightning(tree: ModuleTree) -> Callable[[str], str | None]:
    """What to say of Lightning about a path."""
    if "meta" not in tree.totals.devices:
        return lambda path: None
    try:
        return tree.lightning.words
    except UnknownPath:
        return lambda path: None
