"""Names of a checkpoint: what they mean in a model, and what is found out without being told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.naming import Places, mapped, suggestion, without_prefix
from metaviz.errors import CheckpointMismatch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)


NAMES = list(Net().state_dict())


def check_loads(model: nn.Module, state: dict[str, torch.Tensor], **options) -> metaviz.Report:
    """Load values that tell which name they are of."""
    values = {name: torch.full_like(value, k) for k, (name, value) in enumerate(state.items())}
    report = metaviz.materialize(model, checkpoint=metaviz.checkpoint(values, **options))
    for k, tensor in enumerate(each for _, each in unwrapped(model).state_dict().items()):
        assert (tensor == k).all()
    return report


def unwrapped(model: nn.Module) -> nn.Module:
    for name in ("_orig_mod", "module", "model"):
        model = model._modules.get(name, model)
    return model


@pytest.mark.parametrize(
    "prefix",
    [
        "model.",
        "module.",
        "_orig_mod.",
        "_fsdp_wrapped_module.",
        "module.model.",
        "model._orig_mod.",
        "model.module.",
    ],
)
def test_usual_beginnings_are_taken_off_and_it_is_said(prefix):
    report = check_loads(
        metaviz.build(Net), {prefix + name: value for name, value in Net().state_dict().items()}
    )
    assert report.match.unexpected == () and report.match.missing == ()
    passed_over = [part for part in prefix.split(".") if part.startswith("_")]
    for part in passed_over:
        assert f"{part} in its names was passed over".lower() in str(report).lower()
    assert passed_over or f"{prefix!r} was taken off its names." in str(report)


@pytest.mark.parametrize("inner", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_within_names_do_not_matter(inner):
    state = {
        name.replace("encoder.", f"encoder.{inner}."): value for name, value in Net().state_dict().items()
    }
    check_loads(metaviz.build(Net), state)


class Wrapper(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.add_module(name, Net())


@pytest.mark.parametrize("name", ["module", "_orig_mod", "model"])
def test_a_wrapped_model_takes_names_without_the_wrapper(name):
    report = check_loads(metaviz.build(Wrapper, name), Net().state_dict())
    assert report.match.unexpected == ()


def test_a_compiled_model_takes_the_names_of_the_model():
    model = metaviz.build(Net)
    check_loads(torch.compile(model), Net().state_dict())
    assert not model.head.weight.is_meta


@pytest.mark.parametrize(
    "key_map",
    [
        [("net.", "")],
        [("net", "")],
        {"net": ""},
        {"net.encoder": "encoder", "net.head.weight": "head.weight", "net.head.bias": "head.bias"},
        lambda name: name.removeprefix("net."),
    ],
)
def test_a_key_map_is_pairs_a_dict_or_a_function(key_map):
    state = {f"net.{name}": value for name, value in Net().state_dict().items()}
    check_loads(metaviz.build(Net), state, key_map=key_map)


def test_beginnings_end_where_a_part_of_a_name_ends():
    assert mapped(["a.b", "ab.c", "a"], [("a", "x")]) == {"a.b": "x.b", "ab.c": "ab.c", "a": "x"}
    assert mapped(["b.c"], [("", "a")]) == {"b.c": "a.b.c"}
    assert mapped(["a.b.c"], {"a": "x", "a.b": "y"}) == {"a.b.c": "y.c"}
    assert mapped(["a.b.c"], [("a", "x"), ("a.b", "y")]) == {"a.b.c": "x.b.c"}


def test_a_function_that_gives_none_leaves_a_tensor_out_and_other_things_are_refused():
    state = Net().state_dict()
    chosen = metaviz.checkpoint(state, key_map=lambda name: None if name.startswith("head") else name)
    match = metaviz.match(metaviz.build(Net), chosen)
    assert match.missing == ("head.weight", "head.bias")
    assert "key_map leaves 2 of its tensors out." in match.notes
    with pytest.raises(TypeError, match=r"key_map\('encoder\.0\.weight'\) gives an object of type int"):
        metaviz.match(metaviz.build(Net), metaviz.checkpoint(state, key_map=len))


def test_names_that_fit_as_they_are_are_left_alone():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.head = Net(), nn.Linear(3, 2)

    assert without_prefix({name: tuple(v.shape) for name, v in Deep().state_dict().items()}, Deep())[1] == ""


def test_a_name_goes_before_one_that_only_becomes_it():
    state = {name: torch.zeros_like(value) for name, value in Net().state_dict().items()}
    both = {f"model.{name}": value + 1 for name, value in state.items()} | {"head.bias": state["head.bias"]}
    model = metaviz.build(Net)
    metaviz.materialize(model, checkpoint=both)
    assert (model.head.bias == 0).all() and (model.head.weight == 1).all()


def test_a_shared_module_is_found_by_any_way_to_it():
    model = nn.Module()
    model.first = nn.Sequential(nn.Linear(2, 2))
    model.second = model.first
    places = Places(model)
    assert places.find("second.0.weight")[2] is model.first[0].weight
    assert places.find("second.0.wait") is None and places.find("third.0.weight") is None


def test_nothing_of_a_module_is_asked_for_by_attribute():
    class Trap(nn.Module):
        @property
        def weight(self):
            raise AssertionError("a property ran")

        half = None

    model = nn.Module()
    model._modules["half"] = Trap()
    model._modules["half"]._parameters["w"] = nn.Parameter(torch.ones(1))
    assert Places(model).find("half.w") is not None
    assert Places(model).find("half.weight") is None


def test_the_beginning_that_differs_is_suggested():
    assert suggestion([f"net.{name}" for name in NAMES], NAMES) == ("net", "")
    assert suggestion(NAMES, [f"a.b.{name}" for name in NAMES]) == ("", "a.b")
    assert suggestion(["x"], ["y"]) is None


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a'b", 'a"b', "ü", "a" * 10_000])
def test_names_of_any_kind_go_through(name):
    def make():
        model = nn.Module()
        model._modules[name] = nn.Linear(2, 2)
        return model

    model = metaviz.build(make)
    state = {f"{name}.weight": torch.ones(2, 2), f"{name}.bias": torch.ones(2)}
    metaviz.materialize(model, checkpoint=state)
    assert (model._modules[name].weight == 1).all()
    with pytest.raises(CheckpointMismatch, match="Nothing of the state dict fits the model"):
        metaviz.materialize(metaviz.build(Net), checkpoint=state)


def test_a_model_that_saves_nothing_and_an_empty_choice():
    with pytest.raises(CheckpointMismatch, match="has nothing for a model that saves no tensors"):
        metaviz.match(nn.Identity(), {"a": torch.ones(1)})
    report = metaviz.materialize(metaviz.build(Net), [], checkpoint=Net().state_dict())
    assert report.tensors == ()


@pytest.mark.parametrize(
    "key_map", [{"head": None}, [("head", None)], {"head.weight": None, "head.bias": None}]
)
def test_what_becomes_none_is_left_out(key_map):
    match = metaviz.match(metaviz.build(Net), metaviz.checkpoint(Net().state_dict(), key_map=key_map))
    assert match.missing == ("head.weight", "head.bias")
    assert match.notes == ("key_map leaves 2 of its tensors out.",)


@pytest.mark.parametrize("key_map", ["model.", ["model.", "x."], [("a", "b", "c")], 3, [3]])
def test_a_key_map_that_is_none_is_refused(key_map):
    with pytest.raises(TypeError, match=r"has to be pairs of beginnings, a dict, or a function\. Next: "):
        metaviz.match(metaviz.build(Net), metaviz.checkpoint(Net().state_dict(), key_map=key_map))


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_that_the_user_gives_goes_before_one_that_was_there(order):
    state = {"head.bias": torch.zeros(2), "new.bias": torch.ones(2)}
    checkpoint = metaviz.checkpoint(dict(list(state.items())[::order]), key_map={"new": "head"})
    model = metaviz.build(Net)
    report = metaviz.materialize(model, "head.bias", checkpoint=checkpoint)
    assert (model.head.bias == 1).all()
    assert report.match.unexpected == ("head.bias",)
    assert report.match.notes == ("key_map gives head.bias a name that another has, which goes before.",)


def test_a_part_that_is_called_module_is_no_wrapper():
    def make() -> nn.Module:
        return nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})

    state = make().state_dict()
    match = metaviz.match(metaviz.build(make), state | {"weight": torch.zeros(2, 2)})
    assert match.unexpected == ("weight",)
    assert match.found["module.weight"] == ("module.weight",)


def test_both_the_model_and_the_checkpoint_can_be_wrapped():
    def make() -> nn.Module:
        return Wrapper("module")

    state = {f"_orig_mod.module.{name}": value for name, value in Net().state_dict().items()}
    check_loads(metaviz.build(make), state)
    state = {f"_forward_module._orig_mod.{name}": value for name, value in Net().state_dict().items()}
    check_loads(metaviz.build(make), state)


def test_a_checkpoint_of_a_part_goes_into_the_whole_model_by_a_key_map_only():
    model = metaviz.build(lambda: nn.ModuleDict({"left": Net(), "right": Net()}))
    with pytest.raises(CheckpointMismatch) as caught:
        metaviz.match(model, Net().state_dict())
    step = str(caught.value).partition("Next: ")[2]
    chosen = eval(step, {"metaviz": metaviz, "state": Net().state_dict()})
    assert len(metaviz.match(model, chosen).found) == 6


@pytest.mark.parametrize(
    "name", ["a." * 100_000 + "w", "model." * 20_000 + "w", "_orig_mod." * 20_000, "..", ""]
)
def test_names_of_many_parts_end_where_the_model_does(name):
    match = metaviz.match(metaviz.build(Net), {**Net().state_dict(), name: torch.ones(1)})
    assert match.unexpected == (name,)
    assert len(match.found) == 6
