"""Slots: where tensors are held, registered or not, and how they are pointed at others."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, UserDict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from trees import Holder, linear, meta, weight

from metaviz.core import attributes
from metaviz.core.attributes import Scanner, Trouble, registered_ids, slots, suspects


def module(**values) -> nn.Module:
    """A module with these plain attributes."""
    made = nn.Module()
    made.__dict__.update(values)
    return made


def names(target: nn.Module, **options) -> list[str]:
    return [slot.name for slot in slots(target, **options)]


def troubles(target: nn.Module) -> list[Trouble]:
    space = vars(target)
    found = Scanner(lambda: registered_ids(target)).scan(space, suspects(space))
    return [each for each in found if isinstance(each, Trouble)]


@dataclasses.dataclass
class Loose:
    cos: Any
    deeper: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    cos: Any


class Pair(NamedTuple):
    cos: Any
    sin: Any


class Slotted:
    __slots__ = ("cos", "unset")


class Grandchild(Slotted):
    __slots__ = ("sin",)


class Plain:
    def __init__(self, cos):
        self.cos = cos

    @property
    def loud(self):
        raise AssertionError("a property ran")

    def __getattr__(self, name):
        raise AssertionError("__getattr__ ran")

    def __eq__(self, other):
        raise AssertionError("__eq__ ran")

    def __bool__(self):
        raise AssertionError("__bool__ ran")


class Hostile(dict):
    def __iter__(self):
        raise AssertionError("__iter__ ran")

    items = keys = values = __len__ = __getitem__ = __iter__


def test_registered_slots_come_first_with_kind_and_persistence():
    model = Holder(w=weight(2), kept=meta(3))
    model.register_buffer("cache", meta(4), persistent=False)
    model.register_parameter("absent", None)
    found = [(slot.name, slot.kind, tuple(slot.tensor.shape), slot.persistent) for slot in slots(model)]
    assert found == [
        ("w", "parameter", (2,), None),
        ("kept", "buffer", (3,), True),
        ("cache", "buffer", (4,), False),
    ]


def test_children_are_not_entered():
    assert names(Holder(w=weight(1), child=linear())) == ["w"]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (lambda t: t(), {"x": True}),
        (lambda t: [t(), [t()]], {"x[0]": True, "x[1][0]": True}),
        (lambda t: (t(),), {"x[0]": False}),
        (lambda t: Pair(t(), 1), {"x[0]": False}),
        (lambda t: {"a b": t(), 3: t()}, {"x['a b']": True, "x[3]": True}),
        (lambda t: {(1, "k"): t()}, {"x[(1, 'k')]": True}),
        (lambda t: OrderedDict(z=[t()]), {"x['z'][0]": True}),
        (lambda t: UserDict(z=t()), {}),
        (lambda t: {t()}, {"x{0}": True}),
        (lambda t: frozenset([t()]), {"x{0}": False}),
        (lambda t: deque([1, t()]), {"x[1]": True}),
        (lambda t: Loose(t(), deeper={"k": t()}), {"x.cos": True, "x.deeper['k']": True}),
        (lambda t: Frozen(t()), {"x.cos": False}),
        (lambda t: Frozen([t()]), {"x.cos[0]": True}),
        (lambda t: types.SimpleNamespace(q=t()), {"x.q": True}),
        (lambda t: functools.partial(len, t(), k=t()), {"x.args[0]": False, "x.keywords['k']": True}),
        (lambda t: functools.partial(functools.partial(len, k=t())), {"x.keywords['k']": True}),
        (lambda t: Plain(t()), {"x.cos": True}),
        (lambda t: Hostile(k=t()), {"x['k']": True}),
        (lambda t: {"k": {Pair: t(), Loose: t()}}, {"x['k'][<type 0>]": True, "x['k'][<type 1>]": True}),
        (lambda t: torch.distributions.Normal(t(), t(), False), {"x.loc": True, "x.scale": True}),
    ],
)
def test_a_tensor_is_found_wherever_a_plain_attribute_holds_it(held, expected):
    model = module(x=held(lambda: meta(2)))
    assert {slot.name: slot.settable for slot in slots(model)} == expected
    assert {slot.kind for slot in slots(model)} <= {"attribute"}


@pytest.mark.parametrize(
    "held",
    [
        lambda t: t(),
        lambda t: [0, {"k": [t(), t()]}],
        lambda t: Loose(t(), deeper=deque([t()])),
        lambda t: types.SimpleNamespace(q=functools.partial(len, k=t())),
        lambda t: [linear()],
        lambda t: Hostile(k=t()),
        lambda t: {t(), t()},
    ],
)
def test_a_settable_slot_can_be_pointed_at_another_tensor(held):
    model = module(x=held(lambda: meta(2)))
    before = list(slots(model))
    assert before
    for slot in before:
        slot.set(torch.ones(2))
        assert slot.tensor.tolist() == [1, 1]
    after = list(slots(model))
    assert len(after) == len(before)
    assert all(slot.tensor.device.type == "cpu" for slot in after)


def test_slots_of_inherited_classes_are_set_through_their_descriptors():
    thing = Grandchild()
    thing.cos, thing.sin = meta(1), meta(1)
    found = {slot.name: slot for slot in slots(module(x=thing))}
    assert set(found) == {"x.cos", "x.sin"}
    new = torch.zeros(1)
    found["x.sin"].set(new)
    assert thing.sin is new


def test_a_parameter_in_a_plain_attribute_stays_there():
    model = module(x=meta(2))
    new = nn.Parameter(torch.ones(2))
    next(slots(model)).set(new)
    assert model.__dict__["x"] is new
    assert not model._parameters


def test_a_slot_that_cannot_change_says_what_holds_it():
    slot = next(slots(module(x=(meta(1),))))
    with pytest.raises(
        TypeError, match=r"Cannot set 'x\[0\]': a tuple, .* Keep the tensor in a list or a dict"
    ):
        slot.set(torch.zeros(1))
    assert slot.tensor.is_meta


def test_registered_tensors_held_again_are_references():
    lstm = nn.LSTM(2, 3, device="meta")
    found = list(slots(lstm))
    assert [slot.kind for slot in found] == ["parameter"] * 4 + ["attribute"] * 4
    assert [slot.reference for slot in found] == [False] * 4 + [True] * 4
    assert found[4].name == "_flat_weights[0]"
    assert found[4].tensor is lstm.weight_ih_l0


def test_a_module_hidden_in_a_list_is_entered_and_a_registered_one_is_not():
    child = linear()
    hidden = nn.Sequential(linear(bias=False), Holder(b=meta(1)))
    model = Holder(child=child)
    model.everything = [child, hidden]
    assert names(model) == ["everything[1].0.weight", "everything[1].1.b"]


def test_a_link_to_a_parent_is_seen_for_what_it_is_when_the_whole_model_is_known():
    parent = Holder(w=weight(1), child=nn.Module())
    parent.child.up = [parent]
    assert names(parent.child) == ["up[0].w"]
    assert names(parent.child, registered=registered_ids(parent)) == []


def test_what_is_no_container_is_left_alone():
    def generator():
        raise AssertionError("iterated")
        yield

    quiet = {
        "a": generator(),
        "b": iter([meta(1)]),
        "c": Plain,
        "d": lambda: meta(1),
        "e": types,
        "f": "text",
        "g": meta(1).size(),
        "h": map(len, []),
    }
    assert names(module(x=quiet)) == []
    assert troubles(module(x=quiet)) == []


def test_containers_that_hold_themselves_end():
    loop: list = [meta(1)]
    loop.append(loop)
    thing = Plain(loop)
    thing.again = thing
    assert names(module(x=thing)) == ["x.cos[0]"]


def test_a_chain_is_followed_to_a_limit_which_is_told():
    chain: Any = meta(1)
    for _ in range(attributes.MAX_DEPTH):
        chain = [chain]
    assert len(names(module(x=chain))) == 1
    assert troubles(module(x=chain)) == []
    (trouble,) = troubles(module(x=[chain]))
    assert (
        trouble.reason
        == f"only the first {attributes.MAX_DEPTH} levels of this attribute were looked through"
    )


def test_wide_containers_are_looked_through_to_a_limit_which_is_told(monkeypatch):
    monkeypatch.setattr(attributes, "MAX_ENTRIES", 10)
    assert troubles(module(x=list(range(1000)))) == []
    (trouble,) = troubles(module(x=[meta(1)] * 11))
    assert trouble == Trouble("x", "list", "it has more than 10 entries")
    monkeypatch.setattr(attributes, "MAX_VISITS", 5)
    (trouble,) = troubles(module(x=[[] for _ in range(9)]))
    assert trouble.reason == "only the first 5 objects of this attribute were looked through"


def test_what_raises_when_looked_at_is_told_and_the_rest_is_found():
    class NoDict:
        @property
        def __dict__(self):
            raise ZeroDivisionError

    model = module(x=[NoDict(), meta(1)])
    assert troubles(model) == [Trouble("x[0]", "NoDict", "it raised ZeroDivisionError when looked at")]
    assert names(model) == ["x[1]"]


def test_objects_of_the_standard_library_and_of_trainers_are_not_entered():
    import logging

    logger = logging.getLogger("metaviz-test")
    logger.secret = meta(1)
    assert names(module(x=logger)) == []
