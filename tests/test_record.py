"""Recording: the model is on meta, the process is as before, and errors are the constructor's own."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import warnings

import pytest
import torch
import zoo
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import metaviz
from metaviz.errors import NestedRecording, ValueRead

TORCH = os.path.dirname(torch.__file__)


class Ends(nn.Module):
    """Draws, changes all that a constructor can change, and ends in the way that `end` says."""

    def __init__(self, end) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.used = self.body.weight.sum().item()
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cpu")
        torch.set_grad_enabled(False)
        self.rest = nn.Linear(3, 3)
        end()


def fails():
    raise ValueError("the constructor's own")


def is_interrupted():
    raise KeyboardInterrupt


def reads_too_much():
    torch.randn(8192, 8192)[0, 0].item()


def nests():
    metaviz.build(nn.Linear, 2, 2)


def has_no_cuda_context():
    nn.Linear(2, 2, device="cuda").cuda()


endings = {
    "success": (lambda: None, None),
    "an error": (fails, ValueError),
    "an interrupt": (is_interrupted, KeyboardInterrupt),
    "a value above the limit": (reads_too_much, ValueRead),
    "a build within": (nests, NestedRecording),
    "a move to cuda": (has_no_cuda_context, None),
}


def process() -> dict[str, object]:
    """All of the process that a build could touch."""
    return {
        "default device": torch.get_default_device(),
        "device context": getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "torch generator": torch.get_rng_state().tolist(),
        "initial seed": torch.initial_seed(),
        "cuda": torch.cuda.is_initialized(),
        "module": dict(vars(nn.Module)),
        "linear": dict(vars(nn.Linear)),
        "init": dict(vars(nn.init)),
        "tensor": dict(vars(torch.Tensor)),
        "torch": {name: value for name, value in vars(torch).items() if callable(value)},
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "threads": threading.active_count(),
    }


@pytest.mark.parametrize("ending", endings)
def test_the_process_is_as_before_after(ending):
    end, error = endings[ending]
    torch.manual_seed(4)
    torch.rand(3)
    before = process()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if error is None:
            metaviz.materialize(metaviz.build(Ends, end), blocked="skip")
        else:
            with pytest.raises(error):
                metaviz.build(Ends, end)
    after = process()
    assert [name for name in before if before[name] != after[name]] == []


@pytest.mark.parametrize("ending", endings)
def test_the_next_build_is_right_after(ending):
    end, error = endings[ending]
    if error is not None:
        with pytest.raises(error):
            metaviz.build(Ends, end)
    torch.manual_seed(4)
    model = metaviz.build(zoo.Seeds)
    metaviz.materialize(model)
    torch.manual_seed(4)
    assert zoo.differences(zoo.Seeds(), model) == []


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_set_by_the_user_is_respected_and_stays(device):
    torch.set_default_device(device)
    try:
        model = metaviz.build(zoo.Inits)
        assert torch.get_default_device().type == device
    finally:
        torch.set_default_device(None)
        del torch._GLOBAL_DEVICE_CONTEXT.device_context
    metaviz.materialize(model)
    assert torch.allclose(model.orthogonal.T @ model.orthogonal, torch.eye(4), atol=1e-5)


def test_a_build_within_a_device_context_leaves_the_context_on():
    with torch.device("meta"):
        model = metaviz.build(zoo.Literals)
        assert torch.empty(1).is_meta
    metaviz.materialize(model)
    assert model.temperature.item() == pytest.approx(0.07)


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.float16)]
)
def test_a_model_built_in_another_mode_has_the_values_of_an_ordinary_build(mode):
    with mode():
        outside = torch.ones(3)

    def build():
        with mode():
            layer = nn.Linear(3, 3)
            layer.weight.data.add_(outside)
            layer.mean = layer.weight.mean().item()
            return layer

    ordinary, model = zoo.pair(build)
    metaviz.materialize(model)
    assert torch.equal(ordinary.weight, model.weight) and ordinary.mean == model.mean


def test_recording_takes_in_all_that_is_built_inside():
    torch.manual_seed(4)
    with metaviz.recording():
        first = nn.Linear(4, 4)
        second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).half()
    for model in (second, first):
        metaviz.materialize(model)
    torch.manual_seed(4)
    assert zoo.differences(nn.Linear(4, 4), first) == []
    assert zoo.differences(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).half(), second) == []


def test_build_passes_arguments_and_returns_what_the_function_returns():
    models = metaviz.build(lambda n, *, scale: {"a": [nn.Linear(n, n)], "scale": scale}, 3, scale=2)
    assert models["scale"] == 2
    assert models["a"][0].weight.shape == (3, 3) and models["a"][0].weight.is_meta


def test_modules_in_what_build_returns_are_known_again_after_a_cast():
    torch.manual_seed(4)
    model, _ = metaviz.build(lambda: (nn.Linear(3, 3), 0))
    metaviz.materialize(model.half())
    torch.manual_seed(4)
    assert zoo.differences(nn.Linear(3, 3).half(), model) == []


def test_a_build_within_a_build_is_refused_and_the_outer_one_goes_on():
    def outer():
        layer = nn.Linear(3, 3)
        with pytest.raises(NestedRecording, match="call the constructor itself"):
            metaviz.build(nn.Linear, 2, 2)
        with pytest.raises(NestedRecording), metaviz.recording():
            pass
        return nn.Sequential(layer, nn.Linear(3, 3))

    torch.manual_seed(4)
    model = metaviz.build(outer)
    metaviz.materialize(model)
    torch.manual_seed(4)
    assert zoo.differences(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), model) == []


def test_a_value_above_the_limit_names_the_line_the_sizes_and_the_way_out():
    with pytest.raises(ValueRead) as caught:
        metaviz.build(reads_too_much)
    line = reads_too_much.__code__.co_firstlineno + 1
    assert f"{os.path.basename(__file__)}:{line}" in str(caught.value)
    assert "256 MiB" in str(caught.value) and "64.0 MiB" in str(caught.value)
    assert "metaviz.recording(value_limit=268435456)" in str(caught.value)


def test_the_limit_counts_all_that_has_to_be_computed_and_can_be_raised():
    def chain():
        return ((torch.rand(1000) * 2).sum() > 5).item()

    with pytest.raises(ValueRead), metaviz.recording(value_limit=4000):
        chain()
    with metaviz.recording(value_limit=10_000):
        assert chain() is True


@pytest.mark.parametrize(
    "body",
    [
        fails,
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: torch.zeros(3).to("nonsense"),
        lambda: torch.tensor("x"),
        lambda: torch.linalg.cholesky(-torch.eye(3)),
        lambda: torch.zeros(3, device="meta").tolist(),
        lambda: nn.Linear(2, 2).load_state_dict({}),
        lambda: nn.Linear(2, 2).weight.add_(1),
        lambda: nn.Linear(2, 2).weight.numpy(),
        lambda: nn.Parameter(torch.tensor(1)),
        lambda: torch.nn.init.normal_(torch.empty(2), std=-1.0),
        lambda: torch.ones(3)[5],
        lambda: nn.Linear(2, 2)(torch.ones(3)),
    ],
)
def test_an_error_of_the_constructor_is_the_one_of_the_ordinary_build(body):
    def frames(error):
        seen = traceback.extract_tb(error.__traceback__)[1:]
        return [(frame.filename, frame.lineno) for frame in seen if not frame.filename.startswith(TORCH)]

    with pytest.raises(Exception) as ordinary:
        body()
    with pytest.raises(Exception) as ours:
        metaviz.build(body)
    assert type(ours.value) is type(ordinary.value)
    assert str(ours.value) == str(ordinary.value)
    assert frames(ours.value) == frames(ordinary.value)


def test_a_model_of_another_thread_stays_real():
    inside, done = threading.Event(), threading.Event()
    built = []

    def other():
        inside.wait(10)
        built.append(nn.Linear(3, 3))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def outer():
        inside.set()
        done.wait(10)
        return nn.Linear(3, 3)

    assert metaviz.build(outer).weight.is_meta
    thread.join()
    assert built[0].weight.device.type == "cpu"
    assert built[0].weight.isfinite().all() and built[0].weight.abs().max() > 0


@pytest.mark.parametrize("read", [False, True], ids=["drawing", "reading values as well"])
def test_two_threads_that_record_at_once_each_get_their_ordinary_build(read):
    def in_turns(turn):
        layers = []
        for n in range(2, 8):
            turn.wait(10)
            layers.append(nn.Linear(n, n))
            if read:
                layers[-1].mean = layers[-1].weight.mean().item()
                layers[-1].bias.data.normal_()
        return nn.ModuleList(layers)

    torch.manual_seed(4)
    before = process()
    turn, models = threading.Barrier(2), []
    threads = [
        threading.Thread(target=lambda: models.append(metaviz.build(in_turns, turn))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name in before if before[name] != process()[name]] == []
    ordinary = in_turns(threading.Barrier(1))
    for model in models:
        metaviz.materialize(model)
        assert zoo.differences(ordinary, model) == []
        assert not read or all(a.mean == b.mean for a, b in zip(ordinary, model, strict=True))


def test_a_recording_that_begins_and_ends_within_another_threads_one_disturbs_nothing():
    start, middle, end = (threading.Event() for _ in range(3))
    models = {}

    def long():
        first = nn.Linear(3, 3)
        start.set()
        middle.wait(10)
        return nn.Sequential(first, nn.Linear(3, 3))

    def short():
        start.wait(10)
        models["short"] = metaviz.build(nn.Linear, 4, 4)
        middle.set()
        end.set()

    torch.manual_seed(4)
    state = torch.get_rng_state()
    thread = threading.Thread(target=short)
    thread.start()
    models["long"] = metaviz.build(long)
    thread.join()
    assert end.is_set() and torch.equal(torch.get_rng_state(), state)
    for name, ordinary in {"short": lambda: nn.Linear(4, 4), "long": long}.items():
        torch.set_rng_state(state)
        metaviz.materialize(models[name])
        assert zoo.differences(ordinary(), models[name]) == []


def test_a_tape_dies_with_its_model():
    import weakref

    model = metaviz.build(zoo.MixesRealTensors)
    tape = weakref.ref(model.body.weight.untyped_storage()._metaviz.tape)
    metaviz.materialize(model)
    gc.collect()
    assert tape() is not None, "unload needs it"
    del model
    gc.collect()
    assert tape() is None
