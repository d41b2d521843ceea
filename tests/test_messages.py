"""The wording of every error: what, where, why, and a next step that really runs."""

from __future__ import annotations

import contextlib
import io
import re
import weakref

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core import attributes, devices
from metaviz.errors import (
    CannotMaterialize,
    NestedRecording,
    NotEnoughMemory,
    StalePlan,
    UnknownDevice,
    UnknownPath,
    ValueRead,
    WouldLoseValues,
)


class Net(nn.Module):
    def __init__(self, width: int = 2):
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))


class Unwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.fine = nn.Parameter(torch.ones(2))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.rand(1000)]


def message(error: type[BaseException], act) -> str:
    """What is raised, as one line."""
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    text = str(caught.value)
    assert "\n" not in text
    assert "  " not in text.replace("  #", " #")
    return text


def run(text: str, code: str, arguments: str = "", **names) -> dict:
    """Run ``code``, which must be part of the message, as a user who copies it would."""
    assert code in text
    names = {"metaviz": metaviz, "torch": torch, **names}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code.replace("...", arguments).replace("*args", arguments), names)
    return names


def test_an_unknown_path_with_a_near_one():
    model = metaviz.build(Net)
    text = message(UnknownPath, lambda: metaviz.materialize(model, "layer.1"))
    assert text == (
        "The model has no module or tensor 'layer.1'. The nearest is 'layers.1'. Next: "
        "metaviz.plan(model, 'layers.1')"
    )
    run(text, "metaviz.plan(model, 'layers.1')", model=model)


def test_an_unknown_path_with_no_near_one():
    model = metaviz.build(Net)
    text = message(UnknownPath, lambda: metaviz.unload(model, "xyz"))
    assert text == (
        "The model has no module or tensor 'xyz'. It has encoder, layers. Next: print(metaviz.tree(model))"
    )
    run(text, "print(metaviz.tree(model))", model=model)


def test_a_path_that_is_no_string():
    model = metaviz.build(Net)
    text = message(TypeError, lambda: metaviz.materialize(model, [model.layers[1]]))
    assert text == (
        "A path is a string such as 'layers.1', and this is of type Linear. Next: metaviz.plan(model, "
        "'layers.1')"
    )
    run(text, "metaviz.plan(model, 'layers.1')", model=model)


def test_a_model_that_is_no_module():
    text = message(TypeError, lambda: metaviz.materialize({"weight": torch.ones(2)}))
    assert text == (
        "metaviz looks at torch.nn.Module objects, and this is a dict. Next: model = "
        "metaviz.build(YourModule, ...)"
    )
    assert run(text, "model = metaviz.build(YourModule, ...)", "3", YourModule=Net)[
        "model"
    ].encoder.weight.is_meta


class Scales(nn.Module):
    """One parameter, and no reset_parameters."""

    def __init__(self, width=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))


def test_a_model_that_metaviz_did_not_build():
    with torch.device("meta"):
        model = Scales()
    text = message(CannotMaterialize, lambda: metaviz.materialize(model))
    assert text == (
        "Cannot materialize 1 of 1 chosen tensors: scale. scale: Scales has no reset_parameters, and no "
        "tape knows the tensor. Next: model = metaviz.build(type(model), *args)"
    )
    model = run(text, "model = metaviz.build(type(model), *args)", "2", model=model)["model"]
    assert len(metaviz.materialize(model).tensors) == 1


def test_a_model_that_metaviz_did_not_build_and_replay_is_asked_for():
    model = nn.Linear(2, 2, device="meta")
    text = message(CannotMaterialize, lambda: metaviz.materialize(model, source="replay"))
    assert text == (
        "Cannot materialize 2 of 2 chosen tensors: weight, bias. weight: No tape knows this tensor: it "
        "was put on meta "
        "outside of metaviz.build, or replaced after the build. Next: model = metaviz.build(type(model), *args)"
    )


def test_reset_is_asked_for_where_there_is_no_method():
    model = metaviz.build(Scales)
    text = message(CannotMaterialize, lambda: metaviz.materialize(model, source="reset"))
    assert text == (
        "Cannot materialize 1 of 1 chosen tensors: scale. scale: Scales has no reset_parameters. "
        'Next: metaviz.materialize(model, "scale", source="replay")'
    )
    run(text, 'metaviz.materialize(model, "scale", source="replay")', model=model)
    assert torch.equal(model.scale, torch.ones(2))


def test_a_tensor_that_is_never_written():
    model = metaviz.build(Unwritten)
    text = message(CannotMaterialize, lambda: metaviz.materialize(model))
    assert text == (
        "Cannot materialize 1 of 2 chosen tensors: scale. To fill only the rest: "
        "metaviz.materialize(model, paths, blocked='skip'). scale: Uninitialized even in an ordinary "
        "build: no op of the "
        "constructor ever writes it. Next: torch.nn.init.zeros_(self.scale)  # in the constructor"
    )
    run(text, "metaviz.materialize(model, paths, blocked='skip')", model=model, paths="")
    assert torch.equal(model.fine, torch.ones(2))

    class Cured(Unwritten):
        def __init__(self):
            super().__init__()
            run(text, "torch.nn.init.zeros_(self.scale)", self=self)

    assert len(metaviz.materialize(metaviz.build(Cured)).tensors) == 2


def test_many_blocked_tensors_are_counted():
    with torch.device("meta"):
        model = nn.Sequential(*(Scales() for _ in range(100)))
    text = message(CannotMaterialize, lambda: metaviz.materialize(model))
    assert text.startswith(
        "Cannot materialize 100 of 100 chosen tensors: 0.scale, 1.scale, 2.scale, 3.scale, 4.scale and "
        "95 more. "
    )
    assert len(text) < 400


def test_too_little_memory(monkeypatch):
    model = metaviz.build(lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))))
    monkeypatch.setattr(devices, "free_nbytes", lambda device: 3_500_000)
    text = message(NotEnoughMemory, lambda: metaviz.materialize(model))
    assert text == (
        "This takes 4.00 MiB on cpu, and 3.34 MiB are free. Nothing was changed. There is room for 0–2. "
        "Choose a smaller part, or take it in fewer bits: metaviz.materialize(model, paths, dtype='bfloat16')"
    )
    run(text, "metaviz.materialize(model, paths, dtype='bfloat16')", model=model, paths="")


@pytest.mark.parametrize("cast", [nn.Module.float, nn.Module.half])
def test_too_little_memory_where_a_cast_would_not_help(cast, monkeypatch):
    model = cast(metaviz.build(Net, 1024))
    monkeypatch.setattr(devices, "free_nbytes", lambda device: 2_000_000)
    text = message(NotEnoughMemory, lambda: metaviz.materialize(model))
    assert text.endswith("Choose a smaller part, for which see: print(metaviz.tree(model))")
    run(text, "print(metaviz.tree(model))", model=model)


def test_a_device_that_is_not_there():
    model = metaviz.build(Net)
    text = message(UnknownDevice, lambda: metaviz.plan(model, device="cuda:77"))
    known = ", ".join(devices.names())
    last = devices.names()[-1]
    assert text == (
        f"There is no device 'cuda:77' here. This machine has: {known}. "
        f"Next: metaviz.materialize(model, paths, device={last!r})"
    )
    run(text, f"metaviz.materialize(model, paths, device={last!r})", model=model, paths="layers.0")
    text = message(UnknownDevice, lambda: metaviz.plan(model, device="gpu"))
    assert text.startswith(f"'gpu' is not a device. This machine has: {known}. Next: metaviz.materialize(")
    text = message(UnknownDevice, lambda: metaviz.plan(model, device="meta"))
    assert text.startswith(
        "The meta device holds no values, so nothing can be materialized there. This machine has: "
    )


def test_unloading_values_that_metaviz_did_not_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    text = message(WouldLoseValues, lambda: metaviz.unload(model))
    assert text == (
        "Unloading would lose values of 2 of 2 chosen tensors: weight, bias. weight: metaviz did not "
        "give it its values, or they were cast or moved since. "
        "Nothing was changed. Choose other parts, or save them first: torch.save(model.state_dict(), "
        "'kept.pt')."
    )
    run(text, "torch.save(model.state_dict(), 'kept.pt')", model=model)


def test_unloading_values_that_were_changed():
    model = metaviz.build(Net)
    metaviz.materialize(model)
    with torch.no_grad():
        model.encoder.bias.add_(1)
    text = message(WouldLoseValues, lambda: metaviz.unload(model))
    assert text == (
        "Unloading would lose values of 1 of 5 chosen tensors: encoder.bias. encoder.bias: it was "
        "changed since it was "
        "materialized. Nothing was changed. Choose other parts, or save them first: "
        "torch.save(model.state_dict(), "
        "'kept.pt'). Or lose them: metaviz.unload(model, paths, force=True)"
    )
    run(text, "metaviz.unload(model, paths, force=True)", model=model, paths="")
    assert model.encoder.bias.is_meta


def test_unloading_a_tensor_with_a_gradient():
    model = metaviz.build(nn.Linear, 2, 2)
    metaviz.materialize(model)
    model(torch.ones(1, 2)).sum().backward()
    text = message(WouldLoseValues, lambda: metaviz.unload(model, "bias"))
    assert text.startswith(
        "Unloading would lose values of 1 of 1 chosen tensors: bias. bias: it has a gradient. Nothing"
    )


ARGUMENTS = {
    "source": ("rest", "source='rest' is not one of 'auto', 'checkpoint', 'replay', 'reset'."),
    "rng": ("fast", "rng='fast' is not one of 'eager', 'keyed', 'device'."),
    "dtype": ("int8", "dtype='int8' is not a floating-point dtype such as 'bfloat16' or torch.float16."),
    "blocked": ("ignore", "blocked='ignore' is not one of 'error', 'skip'."),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_with_a_wrong_value(name):
    wrong, wanted = ARGUMENTS[name]
    model = metaviz.build(Net)
    assert message(ValueError, lambda: metaviz.materialize(model, **{name: wrong})) == wanted
    assert model.encoder.weight.is_meta


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "nn", "float", 32, bool])
def test_a_dtype_that_is_none_for_weights(dtype):
    model = metaviz.build(Net)
    if dtype == "float":
        assert metaviz.plan(model, dtype=dtype).tensors[0].dtype is torch.float32
    else:
        assert message(ValueError, lambda: metaviz.plan(model, dtype=dtype)).startswith(
            f"dtype={dtype!r} is not a "
        )


def test_progress_that_cannot_be_called():
    model = metaviz.build(Net)
    text = message(TypeError, lambda: metaviz.materialize(model, progress=True))
    assert text == "progress=True cannot be called. Next: metaviz.materialize(model, paths, progress=print)"
    run(text, "metaviz.materialize(model, paths, progress=print)", model=model, paths="")


def test_a_misspelled_keyword_is_a_type_error():
    for act in (metaviz.plan, metaviz.materialize, metaviz.unload):
        assert "unexpected keyword argument" in message(
            TypeError, lambda act=act: act(metaviz.build(Net), devise="cpu")
        )


def test_a_recording_within_a_recording():
    with metaviz.recording():
        text = message(NestedRecording, lambda: metaviz.build(Net))
    assert text == (
        "A recording is running in this thread already, and its tape takes in everything that is built here. "
        "Leave out the inner metaviz.build(...) or metaviz.recording(): call the constructor itself."
    )


def test_a_value_read_above_the_limit():
    def act():
        with metaviz.recording(value_limit=100):
            Reader()

    text = message(ValueRead, act)
    line = Reader.__init__.__code__.co_firstlineno + 2
    found = re.fullmatch(
        rf"The constructor reads values \(item at (.+):{line}\) that take 3\.91 KiB to compute, above "
        rf"the limit of 100 B\. "
        r"Allow it: (with metaviz\.recording\(value_limit=\d+\): model = \.\.\.)",
        text,
    )
    assert found
    assert __file__.endswith(found[1].rpartition("/")[2])
    names = run(text, found[2], "Reader()", Reader=Reader)
    assert len(names["model"].rates) == 1000


def test_a_value_that_the_constructor_read_and_that_was_changed_since():
    table = torch.rand(17 * 2**20)

    def make():
        model = nn.Module()
        model.table = nn.Parameter(torch.zeros(2) + table[:2])
        return model

    model = metaviz.build(make)
    table[0] = 9
    text = message(StalePlan, lambda: metaviz.materialize(model))
    assert text == (
        "A (2,) tensor that the constructor read has been changed since the build, so its values then "
        "are gone. "
        "Build the model again: model = metaviz.build(...)"
    )
    assert model.table.is_meta
    model = run(text, "model = metaviz.build(...)", "make", make=make)["model"]
    metaviz.materialize(model)
    assert torch.equal(model.table, table[:2])


def test_a_slot_that_cannot_be_set():
    module = nn.Module()
    module.pair = (torch.ones(2),)
    (slot,) = attributes.slots(module)
    text = message(TypeError, lambda: slot.set(torch.zeros(2)))
    assert text == (
        "Cannot set 'pair[0]': a tuple, a frozenset or a frozen dataclass holds it. "
        "Keep the tensor in a list or a dict, or register it: module.register_buffer(name, tensor)."
    )
    run(text, "module.register_buffer(name, tensor)", module=module, name="new", tensor=torch.ones(1))


def test_notes_of_a_report():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.pair = (torch.ones(3),)

    model = metaviz.build(Tied)
    watches = [weakref.ref(model.weight), weakref.ref(model.pair[0])]
    lines = str(metaviz.materialize(model)).splitlines()
    assert re.fullmatch(r"materialized 2 tensors, 20 B, on cpu in [\d.]+ \S+", lines[0])
    assert lines[1:] == [
        "new objects (make optimizers that hold the old ones again): weight",
        "still the old tensor (held by a tuple or a frozen object): pair[0]",
    ]
    assert len(watches) == 2
