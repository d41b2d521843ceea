"""A tree as a `pandas.DataFrame`; the only place that imports pandas."""

from __future__ import annotations

import pandas as pd

from metaviz.core.tree import ModuleTree

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

    Example:
        >>> table = metaviz.tree(nn.Linear(2, 3)).to_frame()
        >>> table[["path", "numel"]].values.tolist()
        [['', 9], ['weight', 6], ['bias', 3]]
    """
    table = pd.DataFrame.from_records([row[:] for row in tree.rows], columns=tree.row._fields)
    # Where there is nothing to say, a yes-or-no column holds <NA> and not a third kind of object.
    return table[COLUMNS].astype({"persistent": "boolean", "requires_grad": "boolean"})
