"""What hurts around a model: each trouble found, and no cry of wolf on healthy models."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from surroundings import Constructed, hide, kinds, on_meta, only, rotary, run
from torch import nn
from torch.nn.utils import prune

import metaviz
from metaviz.core.around import findings


def test_tensors_in_attributes_lists_and_partials_are_stale_and_the_fix_fills_them():
    model = metaviz.build(Constructed, hide)
    found = only(model)
    assert (found.kind, found.paths) == ("stale", ("freqs", "cache['cos'][0]", "call.args[0]"))
    run(found, model=model)
    assert findings(model) == ()
    assert torch.equal(model.cache["cos"][0], torch.arange(4).float().cos())


def test_what_to_empty_leaves_behind_is_stale():
    model = on_meta(lambda: Constructed(hide)).to_empty(device="cpu")
    found = only(model)
    assert (found.kind, found.paths[0]) == ("stale", "freqs")
    assert found.fix.startswith('self.register_buffer("freqs"')


def capture(module):
    weight = module.layer.weight
    module.layer.register_forward_hook(lambda _, args, out: out + weight.sum())


def test_a_closure_of_a_hook_that_holds_a_parameter_is_stale_until_materialized():
    model = metaviz.build(Constructed, capture)
    found = only(model)
    assert found.kind == "stale"
    assert found.paths == ("layer._forward_hooks[0].__closure__[0].cell_contents",)
    assert "layer.weight" in found.reason
    run(found, model=model)
    metaviz.materialize(model)
    assert findings(model) == ()
    assert not model(torch.ones(1, 4)).is_meta


def test_what_torch_makes_anew_itself_is_not_stale():
    with torch.device("meta"):
        layers = [nn.LSTM(2, 2), nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 3)]
        prune.identity(layers[2], "weight")
    model = nn.Sequential(*layers)
    assert layers[1].weight.is_meta and layers[2].weight.is_meta
    assert findings(model) == ()
    model[2].copied = model[2].weight_orig.sin()
    assert kinds(model) == [("stale", ("2.copied",))]


def test_lazy_tensors_are_found_and_a_forward_resolves_them():
    model = metaviz.build(lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    found = only(model)
    assert (found.kind, found.paths) == ("lazy", ("0.weight", "0.bias"))
    run(found, model=model, example_input=torch.ones(2, 3))
    assert findings(model) == ()
    assert model[0].weight.shape == (4, 3)


def test_a_lazy_model_on_the_cpu_only_wants_a_forward():
    model = nn.LazyLinear(4)
    assert only(model).fix == "model(example_input)"


def test_what_no_constructor_writes_is_uninitialized_wholly_or_in_part():
    def leave(module):
        module.empty = nn.Parameter(torch.empty(3))
        module.register_buffer("table", torch.empty(4, 2))
        module.table[:2] = 1.0

    found = {each.paths: each for each in findings(metaviz.build(Constructed, leave))}
    assert set(found) == {("empty",), ("table",)}
    assert all(each.kind == "uninitialized" for each in found.values())
    assert "anything to 1 tensor" in found["empty",].reason
    assert "all of 1 tensor" in found["table",].reason


def test_what_many_ops_write_together_is_no_finding():
    def rows(module):
        module.table = nn.Parameter(torch.empty(4, 2))
        with torch.no_grad():
            for row in module.table:
                row.fill_(1.0)

    assert findings(metaviz.build(Constructed, rows)) == ()


def from_numpy(module):
    module.register_buffer("table", torch.from_numpy(np.arange(4, dtype=np.float32)))


def legacy(module):
    module.table = nn.Parameter(torch.Tensor(2, 2).zero_())


@pytest.mark.parametrize("change", [from_numpy, legacy])
def test_real_tensors_among_meta_ones_have_escaped(change):
    found = only(on_meta(lambda: Constructed(change)))
    assert (found.kind, found.paths) == ("escaped", ("table",))
    assert findings(metaviz.build(Constructed, change)) == ()


def test_the_fix_leaves_what_escaped_alone():
    kept = torch.ones(3)
    model = metaviz.build(Constructed, lambda module: module.register_buffer("kept", kept))
    run(only(model), model=model)
    assert findings(model) == ()
    assert model.kept is kept


def test_one_layer_on_meta_in_a_real_model_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    found = only(model)
    assert found.paths == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert "on meta: 1.weight, 1.bias" in found.reason


def test_a_model_that_metaviz_has_materialized_in_part_is_well():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    metaviz.materialize(model, "0")
    assert findings(model) == ()


def tie(module):
    module.head = nn.Linear(4, 4, bias=False)
    module.head.weight = module.layer.weight


def test_ties_across_modules_are_one_finding():
    model = metaviz.build(Constructed, tie)
    found = only(model)
    assert (found.kind, found.paths) == ("tied", ("layer.weight",))
    assert "layer.weight = head.weight" in found.reason
    assert 'fully_shard([model.get_submodule("layer"), model.get_submodule("head")])' in found.fix
    run(found, model=model)
    assert model.head.weight is model.layer.weight
    assert findings(model) == ()


def test_one_module_at_two_paths_is_no_tie():
    layer = nn.Linear(2, 2, device="meta")
    model = nn.Sequential(layer, nn.Sequential(layer))
    assert findings(model) == ()
    model.to_empty(device="cpu")
    assert model[0].weight is model[1][0].weight


LAYERS = [
    lambda: nn.Transformer(8, 2, 1, 1, 8),
    lambda: nn.LSTM(2, 2, 2),
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Embedding(3, 2, padding_idx=0)),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
]


@pytest.mark.parametrize("make", LAYERS)
def test_built_in_layers_have_no_finding(make):
    model = metaviz.build(make)
    assert findings(model) == ()
    metaviz.materialize(model)
    assert findings(model) == ()


HUGGING_FACE = [
    *("llama", "bert", "gpt2", "vit", "whisper", "mixtral", "albert", "clip", "mamba", "vit_mae"),
    *("distilbert", "wav2vec2", "roformer"),
]


@pytest.mark.parametrize("model_type", HUGGING_FACE)
def test_hugging_face_models_have_no_finding_but_true_ones(needs, model_type):
    needs("transformers")
    import huggingface

    case = huggingface.Case(model_type)
    cls = huggingface.model_class(case)
    model = metaviz.build(cls, huggingface.small_config(case, cls)[0])
    attributes = {place for place in findings(model) if place.kind != "stale"}
    assert attributes == set()
    assert all("original_inv_freq" in path for found in findings(model) for path in found.paths)


ELSEWHERE = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}


def load(module):
    module.layer.load_state_dict(ELSEWHERE)


def test_the_worst_comes_first():
    def all_of_it(module):
        for change in (tie, rotary, hide, load):
            change(module)
        module.lazy = nn.LazyLinear(2)
        module.empty = nn.Parameter(torch.empty(2))

    model = metaviz.build(Constructed, all_of_it).to(torch.bfloat16)
    model.kept = nn.Parameter(torch.ones(2))
    order = [kind for kind, _ in kinds(model, optimizers=torch.optim.SGD([model.empty]))]
    assert order == [
        *("cast", "optimizer", "escaped", "stale", "loaded", "uninitialized", "cast", "lazy", "tied", "cast")
    ]


def test_looking_changes_nothing_and_holds_on_to_nothing(generators_stay):
    model = metaviz.build(Constructed, lambda module: (hide(module), tie(module), rotary(module)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [(id(t), t._version, t.device) for t in (*model.parameters(), *model.buffers())]
    attributes = {name: id(value) for name, value in vars(model).items()}
    kept = findings(model, optimizers=optimizer, search=True)
    assert kept
    assert before == [(id(t), t._version, t.device) for t in (*model.parameters(), *model.buffers())]
    assert attributes == {name: id(value) for name, value in vars(model).items()}
    gone = [weakref.ref(model), weakref.ref(model.freqs), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_looking_while_recording_sees_meta_as_meta():
    with metaviz.recording() as recording:
        model = Constructed(hide)
        assert kinds(model)[0][0] == "stale"
        ops = len(recording.tape.ops)
        findings(model, search=True)
        assert len(recording.tape.ops) == ops


def test_what_is_no_module_is_refused_with_a_next_step():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module objects"):
        findings("model")
