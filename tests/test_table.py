"""The tree as a DataFrame."""

from __future__ import annotations

import gc

import pytest
from trees import Holder, linear, meta, quirks, seen, weight

from metaviz.core.tree import ModuleTree, tree


@pytest.fixture
def frame(needs):
    needs("pandas")
    from metaviz.views.table import frame

    return frame


def test_columns_are_those_that_were_agreed_on(frame):
    assert list(frame(seen(linear())).columns) == [
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


def test_rows_are_those_of_the_tree(frame):
    shown = seen(quirks())
    table = frame(shown)
    assert table["path"].tolist() == [row.path for row in shown]
    assert table["nbytes"].tolist() == [row.nbytes for row in shown]
    assert table.loc[0, "numel"] == 2752
    assert table["shape"].tolist() == [row.shape for row in shown]


def test_untied_tensors_add_up_to_the_total(frame):
    shown = seen(quirks())
    table = frame(shown)
    tensors = table[(table["kind"] != "module") & table["tied_to"].isna()]
    assert tensors["nbytes"].sum() == shown.totals.nbytes
    assert tensors.groupby("device")["nbytes"].sum().to_dict() == shown.totals.devices


def test_yes_or_no_columns_know_not_applicable(frame):
    model = Holder(kept=meta(1))
    model.register_buffer("cache", meta(1), persistent=False)
    table = frame(seen(model)).set_index("path")
    assert str(table["persistent"].dtype) == "boolean"
    assert table["persistent"].isna().tolist() == [True, False, False]
    assert table.index[table["persistent"].eq(False).fillna(False)].tolist() == ["cache"]


def test_a_part_and_an_empty_model_have_a_table(frame):
    from torch import nn

    assert frame(seen(quirks())["own"])["path"].tolist() == ["own", "own.gain"]
    assert frame(tree(nn.Module()))["mark"].tolist() == ["empty"]


def test_a_tree_asks_its_drawer_for_each_picture(monkeypatch):
    asked = []

    def drawer(shown, how, **options):
        asked.append((how, options))
        return "drawn"

    monkeypatch.setattr(ModuleTree, "drawn", drawer)
    shown = seen(linear())
    assert (repr(shown), shown._repr_html_(), shown.to_frame()) == ("drawn", "drawn", "drawn")
    assert shown.text(depth=2) == "drawn"
    assert [how for how, _ in asked] == ["text", "html", "frame", "text"]
    assert asked[-1][1] == {"depth": 2, "unfold": False, "rows": 60}


def test_the_table_tells_what_lightning_would_do(frame):
    model = Holder(fc=linear(), own=weight(2))
    table = frame(tree(model)).set_index("path")
    assert table.loc["own", "lightning"] == "both: leaves it uninitialized"
    assert table.loc["fc.weight", "lightning"] == "FSDP stops before it; ModelParallel ok"
    assert table.loc["", "lightning"].startswith("FSDP stops here: Holder has no reset_parameters; ")
    assert table["source"].dropna().to_dict() == {"fc.weight": "reset", "fc.bias": "reset"}
    healthy = linear()
    assert list(frame(tree(healthy))["lightning"]) == ["ok"] * 3


def test_a_table_of_a_model_that_is_gone_says_nothing_of_lightning(frame):
    shown = tree(Holder(own=weight(2)))
    gc.collect()
    assert frame(shown)["lightning"].isna().all()


def test_lightning_is_predicted_once_for_a_whole_table(frame, monkeypatch):
    from metaviz.core import tree as trees

    asked = []
    predict = trees.predict
    monkeypatch.setattr(trees, "predict", lambda model: asked.append(model) or predict(model))
    model = Holder(**{f"m{n}": linear() for n in range(20)})
    shown = tree(model)
    assert len(frame(shown)) == len(frame(shown)) == 61
    assert asked == [model]
