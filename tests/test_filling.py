"""Filling from each source, with a fault at any step: all or nothing, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_apply import Fault, interrupt, out_of_memory, within
from torch import nn

import metaviz

# Cleaning up and putting back are not interrupted by what they answer to.
CLEANING = {
    "__exit__",
    "undo",
    "_interrupts_wait",
    "let_through",
    "_alone",
    "shutdown",
    "set",
    "clear_frames",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("pos", torch.arange(4.0), persistent=False)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    return {name: value.clone() for name, value in Net().state_dict().items() if name != "head.weight"}


def written(kind: str, folder: Path):
    """A checkpoint: its floats in float64 in a file of torch, so that they are cast."""
    if kind == "dict":
        return state()
    if kind == "torch":
        wide = {
            name: value.double() if value.is_floating_point() else value for name, value in state().items()
        }
        torch.save({"model": wide}, folder / "a.pt")
    else:
        save_file(state(), folder / "a.safetensors")
    return folder


SOURCES = {
    "safetensors": {"kind": "safetensors"},
    "torch": {"kind": "torch"},
    "dict": {"kind": "dict"},
    "replay": {"source": "replay"},
    "reset": {"source": "reset", "paths": ["emb", "norm"]},
}


def options(name: str, folder: Path) -> dict:
    chosen = dict(SOURCES[name])
    kind = chosen.pop("kind", None)
    return chosen if kind is None else {"checkpoint": written(kind, folder)}


def built() -> nn.Module:
    torch.manual_seed(3)
    return metaviz.build(Net)


def picture(model: nn.Module) -> list[tuple]:
    found = []
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                values = None if tensor.is_meta else tensor.detach().clone().flatten().tolist()
                found.append((name, id(tensor), tensor.dtype, tensor.device, tensor.requires_grad, values))
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def raise_error() -> None:
    raise LookupError("injected")


FAULTS = {
    "error": (raise_error, LookupError),
    "memory": (out_of_memory, MemoryError),
    "ctrl-c": (interrupt, KeyboardInterrupt),
}


# A generator that is closed is called once more, and what is raised there goes nowhere.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 41])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_fault_at_any_call_is_all_or_nothing_for_each_source(source, fault, step, tmp_path):
    """A call into each function of plan, allocate, check, fill and swap fails, one after the other."""
    given = options(source, tmp_path)
    whole = built()
    metaviz.materialize(whole, **given)
    expected = [each[-1] for each in picture(whole)]
    act, kind = FAULTS[fault]

    def wanted(frame, _):
        return frame.f_code.co_name not in CLEANING and within(frame, "materialize")

    files, threads, late = open_files(), threading.active_count(), 0
    for n in itertools.count(step=step):
        model = built()
        before = picture(model)
        failing = Fault("call", wanted, act, n)
        error = failing.during(lambda m: metaviz.materialize(m, **given), model)
        if not failing.reached:
            break
        if picture(model) != before:
            late += 1
            assert [each[-1] for each in picture(model)] == expected
        else:
            # Some code catches all that is raised, to say of a tensor why it cannot be looked at.
            if isinstance(error, kind):
                metaviz.materialize(model, **given)
            if picture(model) != before:
                assert [each[-1] for each in picture(model)] == expected
    assert n > 150
    assert late <= max(4, n / step / 5)
    gc.collect()
    assert open_files() == files
    assert threading.active_count() <= threads + 1


def test_a_progress_callback_that_raises_stops_all(tmp_path):
    save_file(state(), tmp_path / "a.safetensors")
    for stop in range(6):
        model, calls = built(), itertools.count()

        def cancel(*_, calls=calls, stop=stop):
            if next(calls) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            metaviz.materialize(model, checkpoint=tmp_path, progress=cancel)
        assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.03])
def test_ctrl_c_while_large_tensors_are_read_leaves_no_thread_and_nothing_changed(tmp_path, delay):
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2000, 1500) for _ in range(12)))

    save_file(make().state_dict(), tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = make()
    before = threading.active_count()
    checkpoint = metaviz.checkpoint(tmp_path)
    timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
    done = False
    try:
        timer.start()
        metaviz.materialize(model, checkpoint=checkpoint)
        done = True
        timer.join()
        time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    timer.join()
    assert len({each.is_meta for each in model.parameters()}) == 1
    assert done != next(model.parameters()).is_meta
    # Ctrl-C while a thread starts leaves it to itself, and it soon ends.
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_progress_is_told_in_bytes_after_each_tensor(tmp_path):
    save_file(state(), tmp_path / "a.safetensors")
    told: list[tuple] = []
    report = metaviz.materialize(built(), checkpoint=tmp_path, progress=lambda *each: told.append(each))
    assert [each[0] for each in told] == sorted(each[0] for each in told)
    assert told[-1][:2] == (report.nbytes, report.nbytes)
    assert {each[2] for each in told} == {each.path for each in report.tensors}
