"""Offloaded models look empty, and are not."""

from __future__ import annotations

import copy
import functools
import types

import torch
from surroundings import kinds, on_meta, only, run
from torch import nn

from metaviz.core.around import findings, offloaded


class Mixed(nn.Module):
    """Has a parameter beside its children, so that accelerate hooks it twice."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(x)) * self.scale


ALL = ("scale", "layer.weight", "layer.bias", "norm.weight", "norm.bias")


def test_offloaded_tensors_are_recoverable_and_the_fix_brings_them_back(needs, tmp_path):
    accelerate = needs("accelerate")
    offloads = [accelerate.cpu_offload, functools.partial(accelerate.disk_offload, offload_dir=tmp_path)]
    for offload in offloads:
        model = Mixed()
        expected = copy.deepcopy(model.state_dict())
        offload(model, execution_device=torch.device("cpu"))
        found = only(model)
        assert (found.kind, set(found.paths)) == ("offloaded", set(ALL))
        assert offloaded(model.layer, "weight")
        assert not offloaded(model.layer, "scale")
        run(found, model=model, accelerate=accelerate)
        assert findings(model) == ()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_hook_for_a_whole_subtree_is_understood(needs):
    hooks = needs("accelerate").hooks
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    hook = hooks.AlignDevicesHook("cpu", offload=True, place_submodules=True)
    hooks.add_hook_to_module(model[0], hooks.SequentialHook(hooks.ModelHook(), hook))
    assert kinds(model) == [("offloaded", ("0.0.weight", "0.0.bias"))]


def test_what_was_on_meta_before_it_was_dispatched_is_set_one_by_one(needs, tmp_path):
    accelerate = needs("accelerate")
    expected = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    torch.save(expected.state_dict(), tmp_path / "model.bin")
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2)))
    places = {"0": "disk", "1": "cpu"}
    accelerate.load_checkpoint_and_dispatch(
        model, f"{tmp_path}/model.bin", device_map=places, offload_folder=f"{tmp_path}/off"
    )
    found = only(model)
    assert (found.kind, found.paths) == ("offloaded", ("0.weight",))
    run(found, model=model, accelerate=accelerate)
    assert findings(model) == ()
    assert torch.equal(model[0].weight, expected[0].weight)


def test_a_hook_of_another_kind_is_left_alone():
    model = nn.Linear(2, 2, device="meta")
    for hook in (object(), types.SimpleNamespace(offload=True, weights_map=None), "hook"):
        model._hf_hook = hook
        assert findings(model) == ()
        assert not offloaded(model, "weight")
