"""Noticing changes: what alters the fingerprint of a model, what does not, and who hears of a change."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from trees import META, Holder, linear, meta, quirks, stack, weight

import metaviz
from metaviz.core import watch


@pytest.fixture(autouse=True)
def nobody_else_listens():
    before = list(watch._listeners)
    watch._listeners.clear()
    yield
    watch._listeners[:] = before


class Ear:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard = 0

    def hear(self) -> None:
        self.heard += 1


def built() -> nn.Module:
    return metaviz.build(lambda: Holder(layers=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))


def replace_a_layer(model):
    model.layers[1] = nn.Linear(4, 4, device=META)


def replace_a_layer_twice(model):
    replace_a_layer(model)
    replace_a_layer(model)


def delete_a_layer(model):
    del model.layers[1]


def rename_a_layer(model):
    model.layers._modules["other"] = model.layers._modules.pop("1")


def swap_two_layers(model):
    modules = model.layers._modules
    modules["0"], modules["1"] = modules["1"], modules["0"]


def replace_a_tensor(model):
    model.layers[0].weight = weight(4, 4)


def delete_a_tensor(model):
    model.layers[0].bias = None


def replace_a_buffer_by_one_that_may_lie_in_the_same_place(model):
    del model.mask
    model.register_buffer("mask", meta(7))


def tie_two_tensors(model):
    model.layers[0].weight = model.layers[1].weight


def freeze(model):
    model.layers[0].weight.requires_grad_(False)


def cast(model):
    model.half()


def cast_in_place_of_the_data(model):
    model.layers[0].weight.data = model.layers[0].weight.data.bfloat16()


def move(model):
    model.to_empty(device="cpu")


def give_values(model):
    metaviz.materialize(model, "layers.0.bias")


def take_values_back(model):
    metaviz.unload(model, "layers.1")


def set_a_state(model):
    model.load_state_dict(
        {
            **{name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()},
        },
        assign=True,
    )


@pytest.mark.parametrize(
    "change",
    [
        replace_a_layer,
        replace_a_layer_twice,
        delete_a_layer,
        rename_a_layer,
        swap_two_layers,
        replace_a_tensor,
        delete_a_tensor,
        replace_a_buffer_by_one_that_may_lie_in_the_same_place,
        tie_two_tensors,
        freeze,
        cast,
        cast_in_place_of_the_data,
        move,
        give_values,
        take_values_back,
        set_a_state,
    ],
    ids=lambda change: change.__name__.replace("_", " "),
)
def test_a_change_gives_another_fingerprint(change):
    model = built()
    metaviz.materialize(model, "layers.1")
    model.register_buffer("mask", meta(3))
    before = watch.fingerprint(model)
    change(model)
    assert watch.fingerprint(model) != before


def test_a_tensor_that_the_tape_knows_is_told_from_a_new_one_in_its_place():
    told = set()
    for _ in range(20):
        model = metaviz.build(lambda: _with_buffer(torch.zeros(3)))
        before = watch.fingerprint(model)
        del model.mask
        model.register_buffer("mask", meta(3))
        told.add(watch.fingerprint(model) == before)
    assert told == {False}


def _with_buffer(tensor):
    module = nn.Module()
    module.register_buffer("mask", tensor)
    return module


def test_looking_and_computing_leave_the_fingerprint_as_it_is():
    model = built()
    metaviz.materialize(model, "layers.0")
    before = watch.fingerprint(model)
    metaviz.tree(model)
    str(metaviz.tree(model).explain("layers.0"))
    metaviz.plan(model)
    model.layers[0](torch.ones(1, 4)).sum().backward()
    model.layers[1](meta(1, 4))
    model.eval()
    model.layers[0].weight.data.fill_(3)
    assert watch.fingerprint(model) == before


def test_an_unfinished_change_leaves_the_fingerprint_as_it_is():
    model = built()
    before = watch.fingerprint(model)

    def stop(*_):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        metaviz.materialize(model, progress=stop)
    assert watch.fingerprint(model) == before


def test_every_kind_of_model_has_a_fingerprint():
    cycle = Holder(inner=Holder())
    cycle.inner._modules["back"] = cycle
    empty = nn.Module()
    del empty._parameters
    block = linear()
    kinds = [quirks(), stack(3), nn.LazyLinear(3), cycle, empty, nn.ReLU(), Holder(one=block, other=block)]
    kinds[0]._modules["nothing"] = None
    found = [watch.fingerprint(model) for model in kinds]
    assert found == [watch.fingerprint(model) for model in kinds]
    assert len(set(found)) == len(kinds)


def test_a_lazy_layer_that_gets_its_shape_gives_another_fingerprint():
    model = nn.LazyLinear(3)
    before = watch.fingerprint(model)
    model(torch.ones(1, 2))
    assert watch.fingerprint(model) != before


def test_who_listens_hears_of_materialize_and_unload():
    model, ear = built(), Ear()
    watch.listen(ear.hear)
    metaviz.materialize(model, "layers.0")
    assert ear.heard == 1
    metaviz.unload(model, "layers.0")
    assert ear.heard == 2
    watch.leave(ear.hear)
    metaviz.materialize(model)
    assert ear.heard == 2
    assert watch._listeners == []


def test_a_change_that_fails_or_was_refused_is_not_told_of():
    model, ear = built(), Ear()
    watch.listen(ear.hear)
    for paths, options in (("lairs", {}), ("", {"device": "warp:7"}), ("", {"progress": lambda *_: 1 / 0})):
        with pytest.raises((metaviz.MetavizError, ZeroDivisionError)):
            metaviz.materialize(model, paths, **options)
    metaviz.materialize(model, "layers.0")
    model.layers[0].weight.data = torch.ones(4, 4)
    heard = ear.heard
    with pytest.raises(metaviz.MetavizError):
        metaviz.unload(model, "layers.0")
    assert heard == ear.heard == 1


def test_who_hears_of_a_change_finds_it_made_and_the_model_free_for_other_threads():
    model = built()

    class Looker:
        found: tuple = ()

        def look(self) -> None:
            if not self.found:
                self.found = (model.layers[0].weight.is_meta,)
                other = threading.Thread(target=metaviz.unload, args=(model, "layers.0"))
                other.start()
                other.join(30)
                self.found += (other.is_alive(), model.layers[0].weight.is_meta)

    looker = Looker()
    watch.listen(looker.look)
    metaviz.materialize(model, "layers.0")
    assert looker.found == (False, False, True)


def test_who_listens_and_fails_disturbs_nobody():
    model, ear = built(), Ear()

    class Broken:
        def hear(self) -> None:
            raise RuntimeError("no ears")

    broken = Broken()
    watch.listen(broken.hear)
    watch.listen(ear.hear)
    report = metaviz.materialize(model)
    assert ear.heard == 1
    assert len(report.tensors) == 4
    assert not model.layers[0].weight.is_meta


def test_who_listens_is_not_kept_alive():
    ear = Ear()
    gone = weakref.ref(ear)
    watch.listen(ear.hear)
    del ear
    gc.collect()
    assert gone() is None
    watch.tell()
    watch.leave(Ear().hear)
    assert watch._listeners == []


def test_leaving_takes_away_the_own_method_and_no_other():
    one, other = Ear(), Ear()
    for ear in (one, other):
        watch.listen(ear.hear)
    watch.leave(one.hear)
    watch.leave(one.hear)
    watch.tell()
    assert (one.heard, other.heard) == (0, 1)
