"""Materialize is all or nothing: whatever fails, and whenever, the model is the very one that it was."""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import metaviz
from metaviz.core import apply

SEED = 7
CORE = str(Path(apply.__file__).parent)


class Marked(nn.Parameter):
    """A subclass, with attributes of its own."""


class Traps(nn.Module):
    """One of each kind of slot, tie, view and holder."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.lstm = nn.LSTM(3, 4)
        self.lazy = nn.LazyLinear(3)
        self.marked = Marked(torch.randn(20), requires_grad=False)
        self.marked.note = ["kept"]
        base = torch.randn(4, 5)
        self.register_buffer("base", base)
        self.register_buffer("row", base[1])
        self.register_buffer("wide", torch.arange(3.0)[:, None].expand(3, 4))
        self.register_buffer("turned", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
        self.register_buffer("count", torch.tensor(3))
        self.cache = {"cos": [torch.ones(2), {"x": torch.rand(3)}], "pair": (torch.zeros(1), base.T)}
        self.shared = self.again = nn.LayerNorm(4)


def built() -> nn.Module:
    torch.manual_seed(SEED)
    model = metaviz.build(Traps)
    model.register_buffer("outside", torch.arange(3.0))
    model.watch = weakref.ref(model.marked)
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            found[f"{path}.{name}"] = tensor
    (cos, deep), (zero, turned) = model.cache["cos"], model.cache["pair"]
    found |= {"cos": cos, "deep": deep["x"], "zero": zero, "turned base": turned}
    found |= {f"flat {i}": tensor for i, tensor in enumerate(model.lstm._flat_weights)}
    return {path: tensor for path, tensor in found.items() if tensor is not None}


class Picture:
    """Everything about every tensor of a model, by identity where there is one. Keeps alive what it names."""

    def __init__(self, model: nn.Module):
        self.tensors = tensors(model)
        # A lazy tensor answers no question otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            self.memories = [tensor.untyped_storage() for tensor in self.tensors.values()]
            self.seen = [self._of(path, tensor) for path, tensor in self.tensors.items()]

    def __eq__(self, other: Picture) -> bool:
        return self.seen == other.seen

    @staticmethod
    def _of(path: str, t: torch.Tensor) -> tuple:
        values = None if t.is_meta else t.detach().resolve_conj().clone().flatten().tolist()
        layout = (t.device, t.dtype, tuple(t.size()), t.stride(), t.storage_offset(), t.is_conj())
        identity = (id(t), t.untyped_storage()._cdata, t._version, type(t), t.requires_grad, id(t.grad))
        hooks = (id(t._backward_hooks), id(t._post_accumulate_grad_hooks))
        return (path, identity, layout, values, hooks, {name: id(value) for name, value in vars(t).items()})


def values_of(model: nn.Module) -> dict[str, list]:
    with torch._C.DisableTorchFunctionSubclass():
        real = {path: t for path, t in tensors(model).items() if not t.is_meta and t.numel()}
        return {path: t.detach().resolve_conj().tolist() for path, t in real.items()}


def real_nbytes() -> int:
    """Bytes of all storages with values that any Python object leads to."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor | torch.UntypedStorage)]
        found = [o for o in found if getattr(o, "layout", torch.strided) is torch.strided]
        memories = [o.untyped_storage() if isinstance(o, torch.Tensor) else o for o in found]
        # States of the generator that were met on the way are kept on purpose.
        known = torch.get_rng_state().nbytes
        real = {m._cdata: m.nbytes() for m in memories if m.device.type == "cpu" and m.nbytes() != known}
        return sum(real.values())


def process() -> tuple:
    return (
        signal.getsignal(signal.SIGINT),
        torch._C._is_torch_function_enabled(),
        torch._C._len_torch_function_stack(),
        _get_current_dispatch_mode_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_rng_state().tolist(),
    )


@pytest.fixture(scope="module")
def ordinary() -> dict[str, list]:
    torch.manual_seed(SEED)
    model = Traps()
    model.register_buffer("outside", torch.arange(3.0))
    return values_of(model)


def test_materialized_values_are_those_of_an_ordinary_build(ordinary):
    model = built()
    assert values_of(model) == {".outside": [0.0, 1.0, 2.0]}
    metaviz.materialize(model)
    assert values_of(model) == ordinary


def check_untouched(model: nn.Module, before: Picture, ordinary: dict[str, list]) -> None:
    assert Picture(model) == before
    metaviz.materialize(model)
    assert values_of(model) == ordinary, "the next call must work"


class Injected(Exception):
    pass


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, KeyboardInterrupt, Injected])
def test_an_error_in_progress_at_any_tensor_changes_nothing_and_keeps_no_memory(error, ordinary):
    calls = []
    metaviz.materialize(built(), progress=lambda *call: calls.append(call))
    assert len(calls) == 15
    for n in range(0, len(calls), 2):
        model, count = built(), itertools.count()
        before, state = Picture(model), process()
        memory = real_nbytes() if n in (0, 6, 14) else None

        def fail(*_, n=n, count=count):
            if next(count) == n:
                raise error("stop")

        with pytest.raises(error, match="stop") as caught:
            metaviz.materialize(model, progress=fail)
        assert process() == state
        # A notebook keeps the last traceback, as `caught` does here.
        assert memory is None or real_nbytes() <= memory
        assert caught.value.__traceback__ is not None
        check_untouched(model, before, ordinary)
        del model, before, caught


class Fault:
    """Calls ``act()`` at the n-th event that is ``wanted`` in a frame of metaviz."""

    def __init__(self, event: str, wanted: Callable, act: Callable[[], object], n: int):
        self.event, self.wanted, self.act, self.n = event, wanted, act, n
        self.count = 0
        self.reached = False

    def during(self, action: Callable, model: nn.Module) -> BaseException | None:
        (sys.settrace if self.event == "line" else sys.setprofile)(self._watch)
        try:
            action(model)
        except BaseException as error:
            return error
        finally:
            sys.settrace(None)
            sys.setprofile(None)
        return None

    def _watch(self, frame, event, arg):
        if event == "line" and not can_be_interrupted(frame):
            return self._watch
        if event == self.event and frame.f_code.co_filename.startswith(CORE) and self.wanted(frame, arg):
            self.count += 1
            if self.count == self.n + 1:
                self.reached = True
                self.act()
        return self._watch


def can_be_interrupted(frame) -> bool:
    """Whether a real Ctrl-C can come before the line: never between a `with` statement's body and its exit."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return not line.lstrip().startswith("with ") and frame.f_code.co_name != "_alone"


def within(frame, function: str) -> bool:
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def out_of_memory() -> None:
    raise MemoryError("injected")


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_no_memory_at_any_call_into_c_changes_nothing(step, ordinary):
    def wanted(frame, function):
        # Putting the handler of Ctrl-C back and releasing a lock ask for no memory.
        frees = function is signal.signal or function.__name__ in ("__exit__", "release")
        return not frees and within(frame, "_carry_out")

    for n in itertools.count(step=step):
        model = built()
        before, state = Picture(model), process()
        fault = Fault("c_call", wanted, out_of_memory, n)
        error = fault.during(metaviz.materialize, model)
        assert process() == state
        if not fault.reached:
            break
        assert isinstance(error, MemoryError), f"call {n} was lost"
        check_untouched(model, before, ordinary)
    assert n > 500
    assert values_of(model) == ordinary


LINES = [("apply.py", 17), ("rng.py", 5), ("", 137)]
ALL_LINES = [
    pytest.param(file, step, marks=pytest.mark.slow)
    for file, step in (("apply.py", 1), ("rng.py", 1), ("", 8))
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "step"), LINES + ALL_LINES)
def test_ctrl_c_at_any_line_is_all_or_nothing(file, step, ordinary):
    """A real SIGINT at each line that runs: it stops all, or it comes when all is done."""
    late = 0
    for n in itertools.count(step=step):
        model = built()
        before, state = Picture(model), process()
        fault = Fault("line", lambda f, _: f.f_code.co_filename.endswith(file), interrupt, n)
        error = fault.during(metaviz.materialize, model)
        assert process() == state
        if not fault.reached:
            break
        assert isinstance(error, KeyboardInterrupt), f"Ctrl-C at line {n} was lost"
        if Picture(model) != before:
            late += 1
            assert values_of(model) == ordinary
        else:
            check_untouched(model, before, ordinary)
    assert n > 300
    assert late < n / step / 10, "only the few lines that write the report come after the change"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 23])
def test_ctrl_c_at_any_line_of_unload_is_all_or_nothing(step, ordinary):
    late = 0
    for n in itertools.count(step=step):
        model = built()
        del model.outside
        metaviz.materialize(model)
        before = Picture(model)
        fault = Fault(
            "line",
            lambda f, _: f.f_code.co_filename.endswith(("apply.py", "swap.py")),
            interrupt,
            n,
        )
        error = fault.during(metaviz.unload, model)
        if not fault.reached:
            break
        assert isinstance(error, KeyboardInterrupt), f"Ctrl-C at line {n} was lost"
        if Picture(model) != before:
            late += 1
            assert values_of(model) == {}
        metaviz.materialize(model)
        assert values_of(model) == {path: v for path, v in ordinary.items() if path != ".outside"}
    assert n > 500
    assert late < n / step / 10


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
@pytest.mark.parametrize("holder", [torch, torch.utils], ids=["UntypedStorage", "swap_tensors"])
def test_a_failing_allocation_or_swap_changes_nothing(holder, error, ordinary, monkeypatch):
    name = "UntypedStorage" if holder is torch else "swap_tensors"
    plain = getattr(holder, name)
    for n in itertools.count():
        model, calls = built(), itertools.count()
        before = Picture(model)

        def failing(*args, n=n, calls=calls, **kwargs):
            if next(calls) == n:
                raise error("injected")
            return plain(*args, **kwargs)

        raised = None
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, failing)
            try:
                report = metaviz.materialize(model)
            except error as caught:
                raised = caught
        if next(calls) <= n:
            break
        if name == "swap_tensors" and error is RuntimeError:
            # Torch refuses a swap in this way, and then the slots get new objects, those in a tuple excepted.
            names = {"cache['pair'][0]": "zero", "cache['pair'][1]": "turned base"}
            stranded = [names[path] for path in report.stranded]
            assert raised is None
            assert report.repointed or report.stranded
            assert values_of(model) == {p: v for p, v in ordinary.items() if p not in stranded}
        else:
            assert raised is not None
            check_untouched(model, before, ordinary)
    assert n >= 10


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(100, 100) for _ in range(60))


@pytest.mark.parametrize("delay", [0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.013, 0.016, 0.02])
def test_ctrl_c_from_outside_at_any_time_is_all_or_nothing(delay):
    model = metaviz.build(Layers)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        for _ in range(3000):
            metaviz.materialize(model)
            metaviz.unload(model)
    timer.join()
    assert len({parameter.device for parameter in model.parameters()}) == 1
    report = metaviz.materialize(model)
    assert len(report.tensors) + len(report.kept) == 120


def test_a_failed_materialize_gives_its_memory_back_while_the_traceback_is_kept():
    model = metaviz.build(nn.Linear, 6000, 6000)
    before = psutil.Process().memory_info().rss

    def fail(*_):
        grown.append(psutil.Process().memory_info().rss - before)
        raise Injected

    grown: list[int] = []
    with pytest.raises(Injected) as caught:
        metaviz.materialize(model, progress=fail)
    assert grown[0] > 130 * 2**20
    assert psutil.Process().memory_info().rss - before < 32 * 2**20
    assert caught.value is not None


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "of the user"])
def test_the_users_own_answer_to_ctrl_c_stays(handler, ordinary):
    """A handler that does not raise stops nothing, at no line."""
    seen = []
    mine = (lambda *_: seen.append(1)) if callable(handler) else handler
    before = signal.signal(signal.SIGINT, mine)
    try:
        for n in range(0, 4000, 61):
            model = built()
            fault = Fault(
                "line",
                lambda f, _: f.f_code.co_filename.endswith(("apply.py", "swap.py")),
                interrupt,
                n,
            )
            assert fault.during(metaviz.materialize, model) is None
            assert signal.getsignal(signal.SIGINT) is mine
            assert values_of(model) == ordinary
            assert len(seen) == (fault.reached and callable(handler))
            seen.clear()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_change_from_within_a_change_is_refused_and_changes_nothing(ordinary):
    model = built()
    before = Picture(model)
    with pytest.raises(metaviz.errors.CannotMaterialize, match="after the first call has returned"):
        metaviz.materialize(model, progress=lambda *_: metaviz.unload(model))
    check_untouched(model, before, ordinary)
