"""What Lightning would do with a model on meta, as predicted, against what the real one does."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import zoo
from contracts import CONTRACTS, OUTSIDE, Kept, NoMethod, Norm, Recurrent, Sleeps, Tied, Trained, Transformer
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

import metaviz
from metaviz.core.lightning import predict
from metaviz.core.paths import Model, Place

CPU = torch.device("cpu")
RECIPES = ("fsdp", "model_parallel", "torch_fsdp")
FIELDS = ("error", "message", "at", "moved", "uninitialized", "overwritten", "untied", "left", "warns")
# In which local variable each frame on the way has the module that it works on.
FRAMES = {
    "_materialize": "module",
    "_materialize_distributed_module": "submodule",
    "_materialize_meta_module": "module",
}
_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}


class Poison(TorchFunctionMode):
    """Fills all memory that is handed out uninitialized. What differs from run to run was never written.

    Torch's own filling knows one value per dtype only, which for bool could be the right one.
    """

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.second = second

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY and not out.is_meta:
            with torch.no_grad():
                # Not all elements alike: norms of those are alike, too.
                count = torch.arange(out.numel()) % 5 + 1
                out.copy_(
                    (
                        count % 2 == self.second
                        if out.dtype is torch.bool
                        else count * (3 if self.second else 2) + self.second
                    ).view_as(out)
                )
        return out


def recipe(name: str) -> Callable[[nn.Module], None]:
    """The real thing."""
    if name == "torch_fsdp":
        from torch.distributed.fsdp import _init_utils

        def wrap(model: nn.Module) -> None:
            if any(_init_utils._need_to_materialize_module(model, set(), set())):
                _init_utils._materialize_meta_module(model, CPU, set(), None)

        return wrap
    from lightning.fabric.utilities import init

    real = {"fsdp": "_materialize_meta_tensors", "model_parallel": "_materialize_distributed_module"}[name]
    return lambda model: getattr(init, real)(model, CPU)


def places(model: nn.Module) -> Iterator[Place]:
    """The slots of a model, those of a shared module at its first path."""
    first: dict[int, str] = {}
    for place in Model(model).places:
        if first.setdefault(id(place.module), place.module_path) == place.module_path:
            yield place


def contents(tensor: torch.Tensor) -> list:
    """All elements in a form that can be compared."""
    return [] if is_lazy(tensor) else [repr(item) for item in tensor.detach().flatten().tolist()]


def stopped_at(model: nn.Module, error: BaseException) -> str:
    """The path of the module that the recipe was working on: what it had in hand, or what `to_empty` was at."""
    module, trace = None, error.__traceback__
    while trace is not None:
        name, found = trace.tb_frame.f_code.co_name, trace.tb_frame.f_locals
        if FRAMES.get(name) in found:
            module = found[FRAMES[name]]
            if name != "_materialize_distributed_module":
                break
        elif name == "_apply" and "submodule" not in found:
            module = found["self"]
        elif name not in ("_run", "wrap", "<lambda>", "_materialize_meta_tensors", "to_empty", *FRAMES):
            break
        trace = trace.tb_next
    return next(path for path, each in model.named_modules() if each is module)


def happens(build: Callable[[], nn.Module], name: str) -> dict[str, object]:
    """What the real recipe does, from two runs with different garbage in memory."""
    runs = []
    for second in (False, True):
        torch.manual_seed(0)
        runs.append(_run(build(), name, second))
    found, other = runs
    assert {key: found[key] for key in found if key != "values"} == {
        key: other[key] for key in other if key != "values"
    }
    values = found.pop("values"), other.pop("values")
    found["uninitialized"] = tuple(path for path in values[0] if values[0][path] != values[1][path])
    return found


def _run(model: nn.Module, name: str, second: bool) -> dict[str, object]:
    was = {place.path: place.slot for place in places(model)}
    tensors = {path: slot.tensor for path, slot in was.items()}
    # Asked before: a swapped tensor is the same object.
    real = {path: tensor for path, tensor in tensors.items() if not tensor.is_meta}
    with torch.no_grad():
        for tensor in real.values():
            tensor.fill_(37)
    error = None
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught, Poison(second):
        warnings.simplefilter("always")
        try:
            recipe(name)(model)
        except Exception as raised:
            error = raised
    now = {place.path: place.slot for place in places(model)}
    ours = {id(slot.tensor) for slot in now.values() if slot.kind != "attribute"}
    groups: dict[int, list[str]] = {}
    for path, slot in was.items():
        if slot.kind != "attribute":
            groups.setdefault(id(tensors[path]), []).append(path)
    ends = {path: slot.tensor for path, slot in now.items()}
    said = [
        str(each.message) for each in caught if "Parameter initialization incomplete" in str(each.message)
    ]
    return {
        "error": type(error).__name__ if error else None,
        "message": str(error) if error else None,
        "at": stopped_at(model, error) if error else None,
        "moved": tuple(
            path
            for path in now
            if path in was and path not in real and not ends[path].is_meta and not was[path].reference
        ),
        "overwritten": tuple(
            path
            for path in now
            if path in real
            and set(contents(ends[path])) - set(contents(torch.full((), 37, dtype=ends[path].dtype)))
        ),
        "untied": tuple(
            tuple(group) for group in groups.values() if len({id(ends.get(path)) for path in group}) > 1
        ),
        "left": tuple(
            path
            for path, slot in now.items()
            if slot.kind == "attribute" and slot.tensor.is_meta and id(slot.tensor) not in ours
        ),
        "warns": tuple(sorted(said[0].partition("re-initialization: ")[2].split(", "))) if said else (),
        "values": {path: contents(tensor) for path, tensor in ends.items() if not tensor.is_meta},
    }


def on_meta(fn: Callable[[], nn.Module]) -> nn.Module:
    """A plain meta build."""
    with torch.device("meta"):
        return fn()


def disagreements(build: Callable[[], nn.Module]) -> list[str]:
    """In what the predictions for a model are wrong."""
    torch.manual_seed(0)
    prediction = predict(build())
    found = []
    for name in RECIPES:
        outcome, real = getattr(prediction, name), happens(build, name)
        if outcome.unknown:
            found.append(f"{name}.unknown: {', '.join(outcome.unknown) or 'the root'}")
            continue
        found += [
            f"{name}.{field}: predicted {getattr(outcome, field)!r}, is {real[field]!r}"
            for field in FIELDS
            if getattr(outcome, field) != real[field]
        ]
    return found


BUILDS = {"plain": on_meta, "recorded": metaviz.build}
TOLD = [cls for cls in CONTRACTS if cls not in OUTSIDE]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("cls", TOLD, ids=lambda cls: cls.__name__)
def test_a_model_ends_as_predicted(cls, build, needs):
    needs("lightning")
    assert disagreements(lambda: BUILDS[build](cls)) == []


@pytest.mark.parametrize("cls", zoo.TRAPS, ids=lambda cls: cls.__name__)
def test_a_trap_ends_as_predicted(cls, needs):
    needs("lightning")
    assert disagreements(lambda: metaviz.build(cls)) == []


LAYERS = {
    "Linear": lambda: nn.Linear(3, 4),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "Embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "EmbeddingBag": lambda: nn.EmbeddingBag(5, 3),
    "Conv2d": lambda: nn.Conv2d(2, 4, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(2, 4, 3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm(3),
    "RMSNorm": lambda: nn.RMSNorm(3),
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "LSTMCell": lambda: nn.LSTMCell(3, 4),
    "PReLU": lambda: nn.PReLU(3),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 8, [2, 5]),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_torch_ends_as_predicted_and_as_in_an_ordinary_build(layer, needs):
    needs("lightning")
    assert disagreements(lambda: metaviz.build(LAYERS[layer])) == []
    prediction = predict(metaviz.build(LAYERS[layer]))
    assert prediction.words() == "ok"
    assert prediction.fsdp.right and prediction.model_parallel.right and prediction.torch_fsdp.right


def _config(transformers, name):
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"vocab_size": 16, "num_key_value_heads": 1, "head_dim": 4, "pad_token_id": 0}
    special = {
        "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16},
        "t5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16},
        "bart": {
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 8,
            "decoder_ffn_dim": 8,
            "vocab_size": 16,
            "max_position_embeddings": 8,
        },
        "mamba": {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "state_size": 2},
        "vit": {"image_size": 8, "patch_size": 4},
    }
    kind = transformers.AutoConfig.for_model(name)
    wanted = special.get(name) or small
    if name == "vit":
        wanted = wanted | {key: small[key] for key in list(small)[:4]}
    for key, value in wanted.items():
        if hasattr(kind, key):
            setattr(kind, key, value)
    return type(kind)(**{key: value for key, value in wanted.items() if hasattr(kind, key)})


ARCHITECTURES = (
    "llama",
    "gpt2",
    "bert",
    "t5",
    "bart",
    "mamba",
    "vit",
    "qwen2",
    "mistral",
    "gemma",
    "gpt_neox",
    "roberta",
)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_hugging_face_model_ends_as_predicted(name, build, needs):
    needs("lightning")
    transformers = needs("transformers")
    config = _config(transformers, name)
    assert disagreements(lambda: BUILDS[build](lambda: transformers.AutoModel.from_config(config))) == []


def _half_real() -> nn.Module:
    """A tie, a layer and an attribute that hold values, between tensors on meta."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Norm(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1] = nn.Linear(3, 3)
    model[4].weight = model[1].weight
    model[3].running_var = torch.ones(3)
    model[0].table = torch.ones(3)
    return model


MIXED = {
    "half of it": _half_real,
    "all of it": lambda: nn.Sequential(nn.Linear(3, 3), Norm()),
    "only a buffer on meta": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).to("meta")),
}


@pytest.mark.parametrize("kind", MIXED)
def test_values_that_are_there_are_lost_as_predicted(kind, needs):
    needs("lightning")
    assert disagreements(MIXED[kind]) == []
    assert bool(predict(MIXED[kind]()).model_parallel.overwritten) == (kind != "all of it")


@pytest.mark.parametrize("flag", ["swap", "overwrite"])
@pytest.mark.parametrize("cls", [NoMethod, Tied, Recurrent, Transformer], ids=lambda cls: cls.__name__)
def test_the_ways_in_which_torch_converts_modules_are_known(cls, flag, needs):
    needs("lightning")
    future = torch.__future__
    choose = getattr(future, f"set_{flag}_module_params_on_conversion")
    was = getattr(future, f"get_{flag}_module_params_on_conversion")()
    choose(True)
    try:
        assert disagreements(lambda: on_meta(cls)) == []
        assert disagreements(_half_real) == []
    finally:
        choose(was)


def test_a_parameter_that_is_watched_by_a_weak_reference_cannot_be_swapped(needs):
    needs("lightning")
    watched = []

    def build() -> nn.Module:
        model = on_meta(Kept)
        watched.append(weakref.ref(model.out.weight))
        return model

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert predict(build()).fsdp.at == "out"
        assert disagreements(build) == []
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("cls", OUTSIDE, ids=lambda cls: cls.__name__)
def test_what_cannot_be_told_is_never_called_right(cls):
    prediction = predict(on_meta(cls))
    assert prediction.model_parallel.unknown == ("",)
    assert not prediction.model_parallel.right
    assert "calls it with an outcome that cannot be told" in prediction.words()


def test_values_other_than_those_of_the_build_are_told():
    prediction = predict(metaviz.build(Trained))
    assert prediction.fsdp.otherwise == ("stack.0.weight", "stack.1.weight")
    assert prediction.words("stack.0.weight") == "both: gives it other values than an ordinary build"
    assert prediction.words("stack.0.bias") == "ok"
    assert predict(on_meta(Trained)).fsdp.otherwise == ()


def test_words_say_in_one_line_what_both_strategies_do():
    prediction = predict(on_meta(NoMethod))
    assert prediction.words("first") == "ok"
    assert prediction.words("norm").startswith(
        "FSDP stops here: Norm has no reset_parameters; ModelParallel "
    )
    assert prediction.words("last") == "FSDP stops before 2 tensors; ModelParallel ok"
    assert prediction.words().startswith("FSDP stops at norm: Norm has no reset_parameters; ")
    assert "uninitialized memory: norm.weight" in str(prediction)


def test_nothing_of_the_model_changes_and_nothing_of_it_is_kept(generators_stay):
    model = metaviz.build(Transformer)
    before = {
        name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    prediction = predict(model)
    after = {name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert after == before
    gone = weakref.ref(model.body)
    del model
    gc.collect()
    assert gone() is None and prediction.fsdp.at == "body.encoder.layers.0.self_attn"


def test_modules_alike_are_tried_once():
    calls = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def reset_parameters(self) -> None:
            calls.append(self)
            nn.init.ones_(self.weight)

    with torch.device("meta"):
        model = nn.Sequential(*(Counted() for _ in range(50)))
    assert predict(model).words() == "ok"
    # Once with gradients, once without.
    assert len(calls) == 2


def test_methods_that_never_end_cost_a_bounded_time(monkeypatch):
    monkeypatch.setattr("metaviz.core.recipes.PATIENCE", 1.0)
    model = on_meta(lambda: nn.ModuleList(_Sleeper(n) for n in range(2, 40)))
    told = predict(model).fsdp.unknown
    assert len(told) == 38


class _Sleeper(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    reset_parameters = Sleeps.reset_parameters


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"looks at a torch.nn.Module, and list is none"):
        predict([])


def test_fabric_does_as_predicted_with_model_parallel(needs, monkeypatch):
    fabric_module = needs("lightning.fabric")
    # Where a test before this one has made a shell, Lightning takes this process for a notebook and refuses.
    monkeypatch.setattr("lightning.fabric.connector._IS_INTERACTIVE", False)
    strategies = needs("lightning.fabric.strategies")
    strategy = strategies.ModelParallelStrategy(parallelize_fn=lambda module, mesh: module)
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    prediction = predict(on_meta(NoMethod)).model_parallel
    # Lightning leaves a rank and an address there, from which accelerate would make a process group.
    environ = dict(os.environ)
    try:
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = NoMethod()
        with pytest.warns(UserWarning, match="Parameter initialization incomplete") as caught:
            fabric.setup(model)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environ)
    said = next(str(each.message) for each in caught if "incomplete" in str(each.message))
    assert tuple(sorted(said.partition("re-initialization: ")[2].split(", "))) == prediction.warns
    assert tuple(name for name, tensor in model.named_parameters() if not tensor.is_meta) == prediction.moved
