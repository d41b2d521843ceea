"""Shadows: whatever a method does when it is tried, the module and the process stay as they were."""

from __future__ import annotations

import copy
import gc
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import init

import metaviz
from metaviz.core.shadow import Shadows, is_plain
from metaviz.core.tape import Tape

OUTSIDE = torch.zeros(3)
PLAIN = (bool, int, float, str, type(None), bytes, complex)


def picture(value: object, seen: dict[int, object]) -> object:
    """All that an object holds, by identity, down to numbers; a tensor with its version, values and hooks."""
    if isinstance(value, PLAIN):
        return value
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        values = None if value.is_meta else value.tolist()
        hooks = repr(value._backward_hooks)
        held = picture(list(vars(value).items()), seen)[1]
        return id(value), value._version, value.requires_grad, values, value.grad, hooks, held
    if isinstance(value, dict):
        return id(value), [(picture(k, seen), picture(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | deque):
        identity = None if type(value) is tuple else id(value)
        return identity, [picture(item, seen) for item in value]
    if isinstance(value, type | types.FunctionType | types.ModuleType | types.MethodType):
        return id(value)
    return id(value), picture(getattr(value, "__dict__", None), seen)


def process() -> tuple:
    states = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    default = torch.get_default_device(), torch.get_default_dtype(), torch.is_grad_enabled()
    return *states, *default, sys.getrecursionlimit(), torch.are_deterministic_algorithms_enabled()


class Config:
    def __init__(self):
        self.std, self.names, self.deep = 0.02, ["a"], {"more": types.SimpleNamespace(count=0)}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.child = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.config, self.options = Config(), {"list": [1, [2]], "tensor": [torch.zeros(2)]}
        self.child.config = self.config
        self.kinds = OrderedDict(a=1), defaultdict(list), deque([1]), {1, 2}
        self.plain = torch.ones(2)
        self.weight.mark = "kept"
        init.ones_(self.weight)


class Writes(Base):
    def reset_parameters(self):
        for tensor in (self.weight, self.steps, self.plain, self.options["tensor"][0], self.child[0].weight):
            tensor.data.normal_()
        self.child[1].reset_parameters()
        self.child[1].num_batches_tracked += 1


class Mutates(Base):
    def reset_parameters(self):
        self.options["list"][1].append(3)
        self.options["new"] = self
        self.kinds[1]["x"].append(1)
        self.kinds[2].append(2)
        self.kinds[3].add(9)
        self.extra, self.training, self.weight.mark = 1, False, "changed"
        self.weight.requires_grad_(False)
        self.register_forward_hook(print)
        self.weight.register_hook(print)
        self.register_buffer("late", torch.ones(1))
        self.add_module("grown", nn.Linear(2, 2))
        self.child[0].eval()
        del self.child[1]
        del self._buffers["steps"]


class ChangesConfig(Base):
    def reset_parameters(self):
        self.config.std = 3
        self.config.names.append("b")
        self.config.deep["more"].count += 1
        self.config.deep["less"] = 1
        self.child.config.added = True


class Rebinds(Base):
    def reset_parameters(self):
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.weight.data = torch.zeros(3, 3)
        self.child = nn.Linear(4, 4)


class Deletes(Base):
    def reset_parameters(self):
        del self.weight, self.child, self.config, self.options


class Raises(Base):
    def reset_parameters(self):
        self.weight.data.zero_()
        self.options.clear()
        raise ValueError("no")


class Prints(Base):
    def reset_parameters(self):
        print("loud")
        sys.stderr.write("louder")
        init.zeros_(self.weight)


class Opens(Base):
    def reset_parameters(self):
        with open("should_not_be_there.txt", "w") as file:
            file.write("x")


class MovesProcess(Base):
    def reset_parameters(self):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        sys.setrecursionlimit(500)
        init.normal_(self.weight)


class Recurses(Base):
    def reset_parameters(self):
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.apply(lambda module: module.requires_grad_(False))
        self.half()
        init.normal_(self.weight)


class Forever(Base):
    def reset_parameters(self):
        self.options.clear()
        self.reset_parameters()


class Backward(Base):
    def reset_parameters(self):
        self.weight.sum().backward()
        self.weight.grad.zero_()


class WritesOutside(Base):
    def reset_parameters(self):
        OUTSIDE.fill_(7)


class Counts(Base):
    made, known = 0, []

    def reset_parameters(self):
        Counts.made += 1
        Counts.late = True
        self.known.append(self)
        init.zeros_(self.weight)


class WritesByClosure(Base):
    def __init__(self):
        super().__init__()
        weight = self.weight
        self.write = lambda: init.zeros_(weight)

    def reset_parameters(self):
        self.write()


CLASSES = [
    *(Writes, Mutates, ChangesConfig, Rebinds, Deletes, Raises, Prints, Opens, MovesProcess, Recurses),
    *(Forever, Backward, WritesOutside, WritesByClosure, Counts),
]


def on_meta(cls):
    with torch.device("meta"):
        return cls()


@pytest.mark.parametrize(
    "make", [metaviz.build, on_meta, lambda cls: cls()], ids=["built", "on meta", "real"]
)
@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_is_different_after_a_look(cls, make, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(make(cls), nn.Linear(2, 2, device="meta"))
    # Its own weight is on meta in any case, so that its method is of interest.
    model[0].wanted = nn.Parameter(torch.empty(2, device="meta"))
    keep: dict[int, object] = {}
    before, state, classes = picture(model, keep), process(), picture(list(vars(cls).items()), keep)[1]
    tree = metaviz.tree(model)
    assert tree.verdict("0.wanted", "reset").reason
    assert tree.verdict("0").reason
    assert picture(model, {}) == before
    assert process() == state
    assert picture(list(vars(cls).items()), {})[1] == classes
    assert OUTSIDE.tolist() == [0, 0, 0]
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cls", CLASSES)
def test_no_shadow_outlives_the_look(cls):
    model = metaviz.build(cls)

    def living() -> int:
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) is cls)

    assert living() == 1
    tree = metaviz.tree(model)
    tree.verdict("weight", "reset")
    assert living() == 1


def test_a_shadow_has_the_class_and_its_own_attributes():
    module = on_meta(Base)
    shadows = Shadows(Tape())
    shadow = shadows.of(module)
    assert type(shadow) is Base
    assert shadow is not module
    assert shadow.weight is not module.weight
    assert (shadow.weight.shape, shadow.weight.mark, shadow.weight.is_meta) == ((3, 3), "kept", True)
    assert shadow.options == {**module.options, "tensor": shadow.options["tensor"]}
    assert shadow.options["tensor"][0] is not module.options["tensor"][0]
    assert shadow.config is module.config
    assert shadows.of(module) is shadow


def test_children_become_shadows_when_they_are_asked_for():
    module = on_meta(Base)
    shadows = Shadows(Tape())
    shadow = shadows.of(module)
    assert len(shadows.made) == 1
    assert shadow.child is shadow.child
    assert shadow.child is not module.child
    assert len(shadows.made) == 2
    assert [type(each).__name__ for each in shadow.modules()] == [
        "Base",
        "Sequential",
        "Linear",
        "BatchNorm1d",
    ]
    assert dict(shadow.named_parameters()).keys() == dict(module.named_parameters()).keys()


def test_one_tensor_has_one_stand_in_and_views_share_their_memory():
    module = nn.Module()
    base = torch.empty(4, 3, device="meta")
    module.register_buffer("base", base)
    module.register_buffer("rows", base[1:3])
    module.again, module.listed = base, [base]
    shadow = Shadows(Tape()).of(module)
    assert shadow.again is shadow.base is shadow.listed[0]
    assert shadow.rows.storage_offset() == 3
    assert shadow.rows.untyped_storage()._cdata == shadow.base.untyped_storage()._cdata


def test_a_list_of_tensors_and_numbers_is_copied_whole():
    module = nn.Module()
    tensors = [torch.empty(2, device="meta") for _ in range(3)]
    module.mixed = [1, *tensors, "x"]
    module.single = [tensors[0]]
    shadow = Shadows(Tape()).of(module)
    assert [type(item) for item in shadow.mixed] == [int, *[torch.Tensor] * 3, str]
    assert all(ours is not theirs for ours, theirs in zip(shadow.mixed[1:4], tensors, strict=True))
    assert shadow.single[0] is shadow.mixed[1]


def test_bound_methods_and_partials_belong_to_the_shadow():
    import functools

    module = on_meta(Base)
    module.bound = module.forward
    module.part = functools.partial(torch.add, module.plain)
    shadow = Shadows(Tape()).of(module)
    assert shadow.bound.__self__ is shadow
    assert shadow.part.args[0] is shadow.plain


def test_what_has_no_plain_memory_stands_for_itself():
    sparse = torch.zeros(3, 3).to_sparse()
    module = nn.Module()
    module.register_buffer("sparse", sparse)
    assert not is_plain(sparse)
    assert Shadows(Tape()).of(module).sparse is sparse


class Helper:
    def __init__(self, module):
        self.module = module

    def init(self):
        self.module.weight = nn.Parameter(torch.zeros(2))


def by_an_object(module):
    module.helper = Helper(module)
    return lambda: module.helper.init()


def by_a_closure(module):
    def init():
        module.weight = nn.Parameter(torch.zeros(2))

    return init


def by_a_weak_reference(module):
    module.me = weakref.ref(module)
    return lambda: setattr(module.me(), "scale", 3.0)


@pytest.mark.parametrize("way", [by_an_object, by_a_closure, by_a_weak_reference])
def test_a_method_that_knows_its_module_by_another_name_changes_nothing_and_is_not_trusted(way):
    class Roundabout(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))
            self.init = way(self)

        def reset_parameters(self):
            nn.init.ones_(self.weight)
            self.init()

    model = Roundabout()
    weight, before = model.weight, dict(vars(model))
    verdict = metaviz.tree(model).verdict("weight", "reset")
    assert (verdict.can, verdict.kind) == (False, "unsupported")
    assert "knows by another name than self" in verdict.reason
    assert model.weight is weight
    assert vars(model) == before


def test_a_method_may_make_deep_copies_of_its_module():
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.zeros(2)), nn.Linear(2, 2)

        def reset_parameters(self):
            self.spare = copy.deepcopy(self), copy.copy(self.inner)
            nn.init.ones_(self.weight)

    model = metaviz.build(Copies)
    metaviz.materialize(model, source="reset")
    assert torch.equal(model.weight, torch.ones(2))
    assert not hasattr(model, "spare")
