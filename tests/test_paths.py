"""Which tensors a path or a glob means, and what is said about one that means nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.paths import Model, modules
from metaviz.errors import MetavizError, UnknownPath


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.half = nn.Linear(1, 1)
        self.cache = {"cos": [torch.ones(2), torch.zeros(2)], "a.b": torch.ones(3)}


def selected(paths, model: nn.Module | None = None) -> list[str]:
    return [place.path for place in Model(model or Net()).select(paths)]


def below(module: str) -> list[str]:
    return [f"{module}.{name}" for name, _ in Block().named_parameters()]


def test_the_root_path_takes_every_tensor_once_per_slot():
    model = Net()
    registered = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    attributes = ["cache['cos'][0]", "cache['cos'][1]", "cache['a.b']"]
    assert sorted(selected("", model)) == sorted(registered + attributes)


def test_a_module_path_takes_its_subtree_and_no_neighbour_whose_name_starts_alike():
    assert selected("layers.1") == below("layers.1")
    assert {path.split(".")[1] for path in selected("layers")} == {str(i) for i in range(12)}


def test_a_tensor_path_takes_just_that_tensor():
    assert selected("layers.3.mlp.bias") == ["layers.3.mlp.bias"]
    assert selected("scale") == ["scale"]


@pytest.mark.parametrize("path", ["cache['cos'][0]", "cache['a.b']"])
def test_the_path_of_an_attribute_is_not_taken_for_a_glob(path):
    assert selected(path) == [path]


def test_a_child_that_a_method_of_module_shadows_is_found():
    assert selected("half") == ["half.weight", "half.bias"]
    assert selected("half.bias") == ["half.bias"]


def test_a_parameter_whose_name_holds_a_dot_is_found_by_its_path():
    model = nn.Module()
    # register_parameter refuses such a name, a state dict loaded by hand does not.
    model._parameters["a.b"] = nn.Parameter(torch.ones(1))
    model.add_module("a", nn.Linear(1, 1))
    assert selected("a.b", model) == ["a.b"]
    assert selected("a", model) == ["a.weight", "a.bias"]


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("*.weight", ["embed.weight", "head.weight", "half.weight"]),
        ("layers.*.mlp.bias", [f"layers.{i}.mlp.bias" for i in range(12)]),
        ("layers.1?.mlp.bias", ["layers.10.mlp.bias", "layers.11.mlp.bias"]),
        ("layers.[01].mlp.bias", ["layers.0.mlp.bias", "layers.1.mlp.bias"]),
        ("layers.[!1-9]*.mlp.bias", ["layers.0.mlp.bias"]),
        ("**.mlp.bias", [f"layers.{i}.mlp.bias" for i in range(12)]),
        ("layers.2.**", below("layers.2")),
        ("**.2.**.bias", ["layers.2.mlp.bias", "layers.2.norm.bias"]),
        ("lay*.2", below("layers.2")),
        ("*.2.mlp", ["layers.2.mlp.weight", "layers.2.mlp.bias"]),
        ("cache*", ["cache['cos'][0]", "cache['cos'][1]"]),
    ],
)
def test_a_glob_matches_part_by_part(glob, paths):
    assert sorted(selected(glob)) == sorted(paths)


@pytest.mark.parametrize("glob", ["**", "*", ["*", "**"], "**.**"])
def test_a_glob_for_everything_is_everything(glob):
    assert selected(glob) == selected("")


def test_a_star_stands_for_one_part_only():
    with pytest.raises(UnknownPath):
        selected("*.mlp")


def test_duplicates_and_overlaps_count_once_and_the_order_is_the_models():
    wanted = ["layers.1.mlp.bias", "layers.1", "layers.1", "layers.0.*", "layers.1.mlp.bias"]
    assert selected(wanted) == below("layers.0") + below("layers.1")


@pytest.mark.parametrize("kind", [list, tuple, set, iter, lambda paths: dict.fromkeys(paths)])
def test_any_collection_of_paths_will_do(kind):
    assert selected(kind(["scale", "layers.1"])) == ["scale", *below("layers.1")]


def test_no_path_at_all_is_no_tensor_and_no_error():
    model = metaviz.build(nn.Linear, 2, 2)
    assert metaviz.plan(model, []).tensors == ()
    assert metaviz.materialize(model, []).tensors == ()
    assert metaviz.unload(model, []).tensors == ()
    assert model.weight.is_meta


def test_a_tied_tensor_is_found_by_any_of_its_paths():
    for path in ("embed", "head", "head.weight"):
        plan = metaviz.plan(metaviz.build(Net), path)
        assert [(t.path, t.also) for t in plan.tensors] == [("embed.weight", ("head.weight",))]


def test_a_shared_module_is_found_by_any_of_its_paths_and_filled_once():
    shared = metaviz.build(lambda: (lambda block: nn.ModuleDict({"a": block, "b": block}))(Block()))
    assert selected("b", shared) == selected("a", shared) == below("a")
    assert selected("b.mlp", shared) == selected("a.mlp", shared)
    assert metaviz.plan(shared, "b").nbytes == metaviz.plan(shared).nbytes == 4 * (6 + 3 + 2 + 2)


def test_shared_modules_within_shared_ones_are_walked_once_each():
    nest = nn.Linear(1, 1)
    for _ in range(40):
        nest = nn.Sequential(nest, nest)
    assert len(list(modules(nest))) == 1 + 2 * 40
    assert selected("1." * 39 + "1", nest) == ["0." * 40 + "weight", "0." * 40 + "bias"]


def test_a_module_that_holds_itself_is_walked_once():
    model = nn.Linear(1, 1)
    model.add_module("me", model)
    assert [path for path, _ in modules(model)] == [""]
    assert selected("", model) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("layer.1", "layers.1"),
        ("layers.1.mlp.wieght", "layers.1.mlp.weight"),
        ("layers.12", "layers.2"),
        ("layers.1.attention", "layers.1"),
        ("mlp.weight", "layers.0.mlp.weight"),
        ("3.norm", "layers.3.norm"),
        ("layers.1.", "layers.1"),
        (" head", "head"),
        ("Head", "head"),
        ("haed.weight", "head.weight"),
        ("cache['cos'][2]", "cache['cos'][1]"),
        ("layer.*.mlp", "layers"),
    ],
)
def test_the_nearest_path_is_named(wrong, nearest):
    with pytest.raises(UnknownPath) as caught:
        selected(wrong)
    assert str(caught.value).startswith(
        f"The model has no module or tensor {wrong!r}. The nearest is {nearest!r}."
    )


def test_where_nothing_is_near_the_message_says_what_there_is():
    with pytest.raises(UnknownPath, match=r"no module or tensor 'zzz'\. It has embed, layers, head, "):
        selected("zzz")
    with pytest.raises(UnknownPath, match=r"no module or tensor 'zzz'\. It has none at all\."):
        selected("zzz", nn.Identity())


def test_one_unknown_path_among_good_ones_stops_all_and_changes_nothing():
    model = metaviz.build(Net)
    for act in (metaviz.plan, metaviz.materialize, metaviz.unload):
        with pytest.raises(UnknownPath, match=r"'layers\.99'"):
            act(model, ["layers.0", "layers.99"])
    assert all(tensor.is_meta for tensor in model.parameters())


@pytest.mark.parametrize(
    "wrong", [None, 3, 1.5, b"head", [None], ["head", 0], object(), torch.ones(2), torch.ones(())]
)
def test_a_path_that_is_no_string_is_a_type_error(wrong):
    with pytest.raises(
        TypeError, match=r"^A path is a string such as '.+', and this is of type \w+\. Next: metaviz\.plan"
    ):
        selected(wrong)


def test_who_passes_a_module_or_a_tensor_is_told_its_path():
    model = Net()
    with pytest.raises(TypeError, match=r"such as 'layers\.1', .* of type Block"):
        selected(model.layers[1], model)
    with pytest.raises(TypeError, match=r"such as 'layers', .* of type ModuleList"):
        selected(model.layers, model)
    with pytest.raises(TypeError, match=r"such as 'layers\.1\.mlp\.bias', .* of type Parameter"):
        selected([model.layers[1].mlp.bias], model)


@pytest.mark.parametrize("thing", [None, 3, "model", [nn.Linear(1, 1)], nn.Linear, {"a": 1}, torch.ones(2)])
@pytest.mark.parametrize("act", [metaviz.plan, metaviz.materialize, metaviz.unload])
def test_what_is_no_module_is_a_type_error(act, thing):
    with pytest.raises(TypeError, match=r"looks at torch\.nn\.Module objects, and this is"):
        act(thing)


def test_a_torch_generator_of_paths_is_used_once():
    model = metaviz.build(Net)
    report = metaviz.materialize(model, (f"layers.{i}" for i in range(2)))
    assert len(report.tensors) == 8


class Leaf(nn.Module):
    pass


@pytest.fixture(scope="module")
def huge() -> nn.Module:
    """50,061 modules, 20 tensors."""
    model = nn.Module()
    model.layers = nn.ModuleList()
    for _ in range(20):
        layer = nn.Module()
        layer.experts = nn.ModuleList(Leaf() for _ in range(2500))
        layer.router = nn.Linear(1, 1, bias=False)
        model.layers.append(layer)
    return model


def test_fifty_thousand_modules_are_no_trouble(huge):
    assert len(list(huge.modules())) == 2 + 20 * (3 + 2500)
    assert selected("layers.*.router", huge) == [f"layers.{i}.router.weight" for i in range(20)]
    assert selected("layers.19", huge) == ["layers.19.router.weight"]
    with pytest.raises(UnknownPath, match=r"The nearest is 'layers\.19\.experts\.2499'"):
        selected("layers.19.expert.2499", huge)


def test_fifty_thousand_paths_at_once_are_no_trouble(huge):
    """A set of all paths made anew for each path took a minute here."""
    assert len(selected([path for path, _ in modules(huge)][1:], huge)) == 20


def test_errors_about_paths_are_caught_as_key_errors_too():
    with pytest.raises(KeyError) as caught:
        selected("nope")
    assert isinstance(caught.value, MetavizError)
