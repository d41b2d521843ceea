"""Asking a tree for verdicts: by path, on modules and on tensors, of the model as it is now."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.asking import tensors_below
from metaviz.errors import UnknownPath


def net():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.LayerNorm(3), nn.ParameterList()))
    model[1][1].append(nn.Parameter(torch.ones(2)))
    model.table = {"a": [torch.zeros(2)]}
    return model


@pytest.fixture
def model():
    return metaviz.build(net)


@pytest.fixture
def tree(model):
    return metaviz.tree(model)


def test_a_module_is_asked_for_all_that_is_below_it(tree):
    whole = tree.verdict("", "reset")
    assert (whole.can, whole.kind) == (False, "no_method")
    assert whole.reason.startswith("2 of 6 tensors cannot be given values by reset")
    layer = tree.verdict("0", "reset")
    assert (layer.can, layer.faithful, layer.source) == (True, True, "reset")
    assert tree.verdict("").source == "replay"


def test_a_part_is_asked_by_its_own_paths_and_by_those_of_the_model(tree):
    part = tree["1"]
    assert part.verdict("0.weight", "reset") == tree.verdict("1.0.weight", "reset")
    assert part.verdict("1.0.weight", "reset") == tree.verdict("1.0.weight", "reset")
    assert part.verdict("", "reset") == tree.verdict("1", "reset")


def test_a_tensor_in_a_list_can_be_asked_for(tree):
    assert tree.verdict("table['a'][0]").source == "replay"
    assert tree.verdict("table['a'][0]", "reset").kind == "no_method"


def test_a_tied_tensor_is_asked_once(model):
    model.again = model[0].weight
    columns = metaviz.tree(model).columns
    found = [id(tensor) for tensor, _ in tensors_below(model, columns, 0)]
    assert len(found) == len(set(found)) == 6


def test_what_holds_values_is_not_counted(model):
    metaviz.materialize(model, "0")
    tree = metaviz.tree(model)
    assert tree.verdict("0").kind == "real"
    assert tree.verdict("").reason.startswith("All 4 tensors")


def test_the_model_is_asked_as_it_is_now(model, tree):
    assert tree.verdict("0.weight", "reset").can
    metaviz.materialize(model)
    assert tree.verdict("0.weight", "reset").kind == "real"
    metaviz.unload(model)
    model[0].reset_parameters = 3
    assert tree.verdict("0.weight", "reset").kind == "not_callable"


def test_an_unknown_path_and_an_unknown_source_are_refused(tree):
    with pytest.raises(UnknownPath, match=r"0\.weights"):
        tree.verdict("0.weights")
    with pytest.raises(ValueError, match="source='checkpoint' needs a checkpoint"):
        tree.verdict("0", "checkpoint")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda model: delattr(model[0], "weight"), "0.weight"),
        (lambda model: setattr(model[0], "weight", None), "0.weight"),
        (lambda model: model._modules.pop("1"), "1.0.weight"),
        (lambda model: delattr(model, "table"), "table['a'][0]"),
    ],
)
def test_what_is_gone_since_says_so(model, tree, change, path):
    change(model)
    with pytest.raises(UnknownPath, match="it was changed since the tree was made") as caught:
        tree.verdict(path)
    assert "Next: tree = metaviz.tree(model)" in str(caught.value)


def test_the_tree_of_a_model_that_is_gone_says_so():
    tree = metaviz.tree(nn.Linear(2, 2))
    with pytest.raises(UnknownPath, match="The model of this tree is gone"):
        tree.verdict()


def test_a_tensor_that_cannot_be_looked_at_has_a_verdict():
    class Odd(torch.Tensor):
        @property
        def device(self):
            raise ValueError("no device")

    model = nn.Module()
    model.register_buffer("odd", torch.ones(2).as_subclass(Odd))
    tree = metaviz.tree(model)
    verdict = tree.verdict("odd")
    assert not verdict.can
    assert verdict.reason


def test_the_verdicts_on_all_tensors_are_those_on_each():
    model = metaviz.build(
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    )
    model[1][0].weight = model[0].weight
    tree = metaviz.tree(model)
    for source in ("auto", "replay", "reset"):
        verdicts = tree.verdicts(source)
        assert list(verdicts) == [row.path for row in tree.tensors]
        assert verdicts == {path: tree.verdict(path, source) for path in verdicts}
    assert list(tree["1"].verdicts()) == ["1.0.weight", "1.0.bias"]
    with pytest.raises(
        ValueError, match="source='chance' is not one of 'auto', 'checkpoint', 'replay', 'reset'"
    ):
        tree.verdicts("chance")
