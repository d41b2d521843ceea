"""What hurts around a model: each trouble found, and no cry of wolf on healthy models."""

from __future__ import annotations

import copy
import functools
import gc
import io
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.around import Finding, findings, loaded, offloaded
from metaviz.core.origin import origin_of

GIVEN = {"weight": torch.full((4, 4), 0.5), "bias": torch.full((4,), 0.25)}


def kinds(model: nn.Module, **options) -> list[tuple[str, tuple[str, ...]]]:
    return [(found.kind, found.paths) for found in findings(model, **options)]


def only(model: nn.Module, **options) -> Finding:
    (found,) = findings(model, **options)
    return found


def on_meta(fn) -> nn.Module:
    with torch.device("meta"):
        return fn()


def run(finding: Finding, **names) -> dict:
    """Do what the fix says."""
    names = {"metaviz": metaviz, "torch": torch, **names}
    exec(finding.fix, names)
    return names


class Constructed(nn.Module):
    """A linear layer, then whatever `change` does to the module in its constructor."""

    def __init__(self, change=lambda module: None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        change(self)

    def forward(self, x):
        return self.layer(x)


# --- optimizers ---


def test_an_optimizer_of_a_model_on_meta_is_found_and_materialize_makes_it_train():
    model = metaviz.build(nn.Linear, 2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = only(model, optimizers=optimizer)
    assert (found.kind, found.paths) == ("optimizer", ("weight", "bias"))
    assert "step() runs without an error" in found.reason
    run(found, model=model)
    assert findings(model, optimizers=optimizer) == ()
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_an_optimizer_whose_parameters_to_empty_replaced_is_found():
    model = on_meta(lambda: nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    found = only(model, optimizers=[optimizer])
    assert (found.kind, found.paths) == ("optimizer", ("weight", "bias"))
    assert "replace Parameters" in found.reason
    assert findings(model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)) == ()


def test_one_replaced_layer_is_told_apart_from_the_others():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(2, 2)
    assert kinds(model, optimizers=[optimizer]) == [("optimizer", ("1.weight", "1.bias"))]


def test_optimizers_that_train_a_part_each_are_no_finding():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    first = torch.optim.SGD([*model[0].parameters(), *other.parameters()], lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    assert findings(model, optimizers=[first, second]) == ()


def test_an_optimizer_of_another_model_is_found_if_it_was_passed_in_only():
    model, other = nn.Linear(2, 1), nn.Linear(9, 9)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert "none of the model's tensors" in only(model, optimizers=optimizer).reason
    assert findings(model, search=True) == ()


def test_a_search_finds_what_was_not_passed_in():
    model = metaviz.build(nn.Linear, 3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert findings(model) == ()
    assert kinds(model, search=True) == [("optimizer", ("weight", "bias"))]
    assert kinds(model, search=True, optimizers=optimizer) == [("optimizer", ("weight", "bias"))]


def test_a_search_finds_an_optimizer_left_on_meta_by_to_empty():
    model = on_meta(lambda: nn.Linear(31, 17))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    assert kinds(model, search=True) == [("optimizer", ("weight", "bias"))]
    assert optimizer.param_groups[0]["params"][0].is_meta


def test_state_that_was_left_on_meta_is_found_and_cleared():
    model = on_meta(lambda: nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device="meta")).sum().backward()
    optimizer.step()
    for name, parameter in list(model.named_parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(parameter.shape)))
        assert not model.get_parameter(name).is_meta
    found = only(model, optimizers=optimizer)
    assert found.paths == ("weight", "bias")
    assert "made a step" in found.reason
    run(found, optimizer=optimizer)
    assert findings(model, optimizers=optimizer) == ()


class Broken(torch.optim.SGD):
    """Its groups cannot be read."""

    param_groups = property(lambda self: 1 / 0, lambda self, value: None)


class HoldsNames(torch.optim.SGD):
    """Its groups hold names instead of tensors."""

    param_groups = property(lambda self: [{"params": ["weight"]}], lambda self, value: None)


@pytest.mark.parametrize("optimizer", [object(), None, 3, "adam"[:1]], ids=repr)
def test_what_is_no_optimizer_is_a_finding_and_no_traceback(optimizer):
    found = only(nn.Linear(2, 1), optimizers=[optimizer])
    assert (found.kind, found.paths) == ("optimizer", ())
    assert "cannot be read (AttributeError)" in found.reason


def test_a_broken_optimizer_is_a_finding_and_no_traceback():
    model = nn.Linear(2, 1)
    broken = object.__new__(Broken)
    assert "cannot be read (ZeroDivisionError)" in only(model, optimizers=broken).reason
    assert "holds a str" in only(model, optimizers=object.__new__(HoldsNames)).reason
    assert findings(model, search=True) == ()


def test_wrappers_and_schedulers_stand_for_their_optimizer(needs):
    accelerate, lightning = needs("accelerate"), needs("lightning")
    accelerate.Accelerator(cpu=True)
    model = metaviz.build(nn.Linear, 2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrappers = [
        torch.optim.lr_scheduler.StepLR(plain, 1),
        accelerate.optimizer.AcceleratedOptimizer(plain),
        lightning.pytorch.core.optimizer.LightningOptimizer(plain),
        types.SimpleNamespace(optimizer=plain),
    ]
    for wrapper in wrappers:
        assert kinds(model, optimizers=wrapper) == [("optimizer", ("weight", "bias"))]
    assert kinds(model, optimizers=[plain, *wrappers]) == [("optimizer", ("weight", "bias"))]


# --- stale ---


def hide(module):
    table = torch.arange(4).float()
    module.freqs = torch.polar(torch.ones(4), table)
    module.cache = {"cos": [table.cos()]}
    module.call = functools.partial(torch.add, table.sin())


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
    layers = [
        nn.utils.spectral_norm(nn.Linear(3, 3)),
        nn.utils.prune.l1_unstructured(nn.Linear(3, 3), "weight", 2),
        nn.LSTM(2, 2),
    ]
    with torch.device("meta"):
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.LSTM(2, 2))
    assert findings(model) == ()
    assert findings(nn.Sequential(*layers)) == ()


# --- lazy, uninitialized ---


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


# --- escaped ---


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


# --- casts ---


def rotary(module):
    module.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 4, 2) / 4), persistent=False)
    module.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
    module.norm = nn.BatchNorm1d(4)


def test_casts_are_sorted_by_what_they_lose():
    model = metaviz.build(Constructed, rotary).to(torch.bfloat16)
    lost, rounded, plain = findings(model)
    assert {found.kind for found in (lost, rounded, plain)} == {"cast"}
    assert lost.paths == ("angles",)
    assert "imaginary part" in lost.reason
    assert rounded.paths == ("inv_freq",)
    assert "4 parameters and 2 other tensors that lose nothing" in plain.reason
    assert plain.fix is None


def test_the_fix_of_a_cast_keeps_the_buffers_as_the_constructor_made_them():
    make = functools.partial(Constructed, rotary)
    model = metaviz.build(make).to(torch.bfloat16)
    fix = findings(model)[0].fix.replace("type(model), ...", "make")
    model = run(Finding("cast", (), "", fix), model=model, make=make)["model"]
    assert [found.fix for found in findings(model)] == [None]
    metaviz.materialize(model)
    assert (model.layer.weight.dtype, model.inv_freq.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(model.angles, make().angles)


def test_a_cast_is_still_found_after_the_model_got_its_values():
    model = metaviz.build(Constructed, rotary).half()
    before = findings(model)
    metaviz.materialize(model)
    assert [found.paths for found in findings(model)] == [found.paths for found in before]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_cast_that_rounds_nothing_is_only_a_note(dtype):
    def table(module):
        module.register_buffer("table", torch.arange(4.0).sin())

    found = findings(metaviz.build(Constructed, table).to(dtype))
    assert [each.fix for each in found] == ([None] if dtype is torch.float64 else [])


# --- loaded ---


def saved() -> io.BytesIO:
    file = io.BytesIO()
    torch.save(GIVEN, file)
    file.seek(0)
    return file


def from_elsewhere(module):
    module.layer.load_state_dict(GIVEN)


def copied_before(module):
    module.layer.load_state_dict({name: value.clone() for name, value in GIVEN.items()})


def in_half(module):
    module.layer.load_state_dict({name: value.half() for name, value in GIVEN.items()})


def from_a_file(module):
    module.layer.load_state_dict(torch.load(saved()))


def assigned(module):
    module.layer.load_state_dict(torch.load(saved()), assign=True)


def from_a_safetensors_file(module):
    from safetensors.torch import load, save

    module.layer.load_state_dict(load(save(GIVEN)))


def of_a_copy(module):
    module.other = copy.deepcopy(module.layer)
    module.other.load_state_dict(GIVEN)
    module.layer.load_state_dict(module.other.state_dict())
    del module.other


LOADS = [from_elsewhere, copied_before, in_half, from_a_file, assigned, from_a_safetensors_file, of_a_copy]


@pytest.mark.parametrize("change", LOADS)
def test_values_that_the_constructor_loads_are_found_and_replay_has_them(change):
    model = metaviz.build(Constructed, change)
    found = only(model)
    assert (found.kind, found.paths) == ("loaded", ("layer.weight", "layer.bias"))
    run(found, model=model)
    assert torch.equal(model.layer.weight, GIVEN["weight"])


def literal(module):
    module.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
    module.register_buffer("mean", torch.tensor(0.07))
    module.register_buffer("bytes", torch.tensor([1, 2], dtype=torch.uint8))


def numpy_tables(module):
    from_numpy(module)
    module.register_buffer("cast", torch.from_numpy(np.arange(4.0)).float())
    module.layer.weight.data.copy_(torch.from_numpy(np.eye(4)).float())


def rows_of_a_table(module):
    sines = torch.from_numpy(np.ones((4, 2), dtype=np.float32))
    with torch.no_grad():
        module.layer.weight[:, 0::2] = sines
        module.layer.weight[:, 1::2] = sines


def a_table_made_before_it_is_copied(module):
    table = torch.tensor([[1.0] * 4] * 4)
    module.layer.weight.data.copy_(table)


def from_a_sibling(module):
    module.target = nn.Linear(4, 4)
    module.target.load_state_dict(module.layer.state_dict())


def written_after_a_load(module):
    module.layer.load_state_dict(GIVEN)
    nn.init.zeros_(module.layer.weight)
    nn.init.zeros_(module.layer.bias)


NOT_LOADED = [
    *(literal, numpy_tables, rows_of_a_table, a_table_made_before_it_is_copied),
    *(from_a_sibling, written_after_a_load),
]


@pytest.mark.parametrize("change", NOT_LOADED)
def test_literals_tables_and_copies_are_not_loaded(change):
    assert findings(metaviz.build(Constructed, change)) == ()


def test_loaded_answers_for_one_window():
    model = metaviz.build(Constructed, lambda module: module.layer.weight.data.copy_(GIVEN["weight"]))
    answers = [loaded(*origin_of(tensor)[:2]) for tensor in (model.layer.weight, model.layer.bias)]
    assert answers == [True, False]


# --- offloaded ---


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


# --- tied, healthy models, purity ---


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
    assert findings(model, search=True) == ()
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


def test_the_worst_comes_first():
    def all_of_it(module):
        for change in (tie, rotary, hide, from_elsewhere):
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
