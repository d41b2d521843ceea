"""Which devices there are and what they can take; the caller's device, modes and thread do not matter."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading

import psutil
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import metaviz
from metaviz.core import devices
from metaviz.errors import NotEnoughMemory, UnknownDevice

SEED = 11
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.free = nn.Parameter(torch.randn(20))
        self.register_buffer("pos", torch.arange(5.0))
        self.register_buffer("order", torch.randperm(7))
        self.plain = torch.ones(2)

    def forward(self, x):
        return self.norm(self.body(x)).sum() + self.free.sum()


def both() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(SEED)
    ordinary = Net()
    torch.manual_seed(SEED)
    return metaviz.build(Net), ordinary


def check_normal_and_equal(model: nn.Module, ordinary: nn.Module, device: torch.device = CPU) -> None:
    pairs = [(mine, ordinary.state_dict()[name]) for name, mine in model.state_dict(keep_vars=True).items()]
    for mine, theirs in [*pairs, (model.plain, ordinary.plain)]:
        assert mine.device == device
        assert type(mine) in (torch.Tensor, nn.Parameter)
        assert mine.dtype is theirs.dtype
        assert not mine.is_inference()
        assert torch.equal(mine.detach().cpu(), theirs)
    model(torch.ones(2, 3, device=device)).backward()
    assert all(p.is_leaf and p.requires_grad and p.grad is not None for p in model.parameters())


@contextlib.contextmanager
def setting(change, value, back):
    change(value)
    try:
        yield
    finally:
        change(back)
        if back is None:
            # torch 2.6 stumbles over the None that it leaves here, and so would every later test.
            del torch._GLOBAL_DEVICE_CONTEXT.device_context


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"metaviz ran {func} under the caller's mode")


CONTEXTS = {
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: setting(torch.set_default_device, "meta", back=None),
    "default device cuda": lambda: setting(torch.set_default_device, "cuda", back=None),
    "default dtype": lambda: setting(torch.set_default_dtype, torch.bfloat16, back=torch.float32),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake": FakeTensorMode,
    "a dispatch mode": Watching,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, back=False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
    "a recording": metaviz.recording,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_under_the_callers_contexts_the_result_is_the_same(context):
    model, ordinary = both()
    with context():
        nbytes = metaviz.plan(model).nbytes
        assert len(metaviz.materialize(model, "body").tensors) == 2
        assert len(metaviz.unload(model, "body").tensors) == 2
        assert len(metaviz.materialize(model).tensors) == 8
    assert nbytes == 4 * (12 + 4 + 8 + 20 + 5 + 2) + 8 * 7
    check_normal_and_equal(model, ordinary)


def test_another_thread_gives_the_same_while_this_one_builds_on_meta():
    model, ordinary = both()
    reports = []
    with torch.device("meta"), metaviz.recording():
        thread = threading.Thread(target=lambda: reports.append(metaviz.materialize(model)), daemon=True)
        thread.start()
        thread.join(timeout=120)
    assert len(reports[0].tensors) == 8
    check_normal_and_equal(model, ordinary)


def test_threads_that_materialize_one_model_at_once_take_turns():
    model, ordinary = both()
    paths, reports, errors = ["body", "norm", "free", "pos", "order", "plain", "", "*"], [], []

    def work(path):
        try:
            reports.append(metaviz.materialize(model, path))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(len(report.tensors) for report in reports) == 8
    check_normal_and_equal(model, ordinary)


def test_a_part_can_be_materialized_while_the_rest_is_still_being_recorded():
    def make():
        first = nn.Linear(4, 4)
        metaviz_is_there and metaviz.materialize(first)
        second = nn.Linear(4, 4)
        with torch.no_grad():
            second.weight.add_(first.weight)
        return nn.Sequential(first, second)

    metaviz_is_there = False
    torch.manual_seed(SEED)
    ordinary = make()
    metaviz_is_there = True
    torch.manual_seed(SEED)
    model = metaviz.build(make)
    assert model[1].weight.is_meta
    metaviz.materialize(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ordinary.parameters(), strict=True))
    metaviz.unload(model)
    metaviz.materialize(model, "1")
    assert torch.equal(model[1].weight, ordinary[1].weight)


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", CPU, torch.device("cpu", 0)])
def test_the_cpu_goes_by_several_names(device):
    assert devices.resolve(device) == CPU
    assert metaviz.plan(metaviz.build(nn.Linear, 2, 2), device=device).device == CPU


WRONG = [
    "gpu",
    "",
    "CPU",
    "cpu:1",
    "cuda:99",
    "cuda:-1",
    "xla:0",
    "mps:7",
    -1,
    99,
    1.5,
    True,
    object(),
    ["cpu"],
]


@pytest.mark.parametrize("device", WRONG, ids=str)
@pytest.mark.parametrize("act", [metaviz.plan, metaviz.materialize])
def test_a_device_that_is_not_there_is_refused_and_those_that_are_get_listed(act, device):
    model = metaviz.build(nn.Linear, 2, 2)
    with pytest.raises(UnknownDevice, match=r"This machine has: cpu"):
        act(model, device=device)
    assert model.weight.is_meta


def test_the_meta_device_is_no_place_to_materialize_on():
    with pytest.raises(UnknownDevice, match="The meta device holds no values"):
        metaviz.materialize(metaviz.build(nn.Linear, 2, 2), device="meta")


def test_the_free_memory_of_the_cpu_is_what_the_system_says_or_less():
    free = devices.free_nbytes(CPU)
    assert 0 < free <= psutil.virtual_memory().total
    assert isinstance(free, int)


def test_a_limit_of_the_container_counts(monkeypatch):
    files = {
        "/sys/fs/cgroup/memory.max": "1000000\n",
        "/sys/fs/cgroup/memory.current": "900000\n",
        "/sys/fs/cgroup/memory.stat": "anon 500000\ninactive_file 300000\nactive_file 100000\n",
    }

    def read(path: str) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(devices, "open", read, raising=False)
    assert devices.free_nbytes(CPU) == 1_000_000 - 900_000 + 300_000
    model = metaviz.build(nn.Linear, 1000, 1000)
    with pytest.raises(NotEnoughMemory, match=r"takes 3\.82 MiB on cpu, and 391 KiB are free"):
        metaviz.materialize(model)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert devices.free_nbytes(CPU) > 1_000_000
    files["/sys/fs/cgroup/memory.max"] = "500000\n"
    assert devices.free_nbytes(CPU) == 0
    files.clear()
    assert devices.free_nbytes(CPU) > 1_000_000


def test_another_device_gets_copies_of_what_is_drawn_on_the_cpu(monkeypatch):
    """`cpu:0` is not `cpu` to torch, and so stands in for an accelerator here."""
    model, ordinary = both()
    monkeypatch.setattr(devices, "resolve", lambda device: torch.device("cpu", 0))
    plan = metaviz.plan(model)
    assert plan.device == torch.device("cpu", 0)
    assert set(plan.peak_nbytes) == {CPU, torch.device("cpu", 0)}
    assert plan.peak_nbytes[plan.device] == plan.nbytes
    assert plan.peak_nbytes[CPU] < plan.nbytes
    metaviz.materialize(model, rng="eager")
    check_normal_and_equal(model, ordinary)
    metaviz.unload(model, force=True)
    metaviz.materialize(model, "body", dtype="bfloat16")
    assert torch.equal(model.body.weight, ordinary.body.weight.bfloat16())


def test_work_on_the_cpu_wakes_no_accelerator():
    code = (
        "import torch, metaviz\n"
        "model = metaviz.build(torch.nn.Linear, 4, 4)\n"
        "print(metaviz.plan(model)); metaviz.materialize(model); metaviz.unload(model)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not torch.cuda._is_in_bad_fork()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("rng", ["eager", "keyed", "device"])
def test_a_gpu_gets_the_numbers_of_the_cpu_or_its_own(rng):
    model, ordinary = both()
    state = torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    report = metaviz.materialize(model, device="cuda", rng=rng)
    assert report.device == torch.device("cuda", 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.device == report.device for tensor in model.state_dict().values())
    if rng == "eager":
        check_normal_and_equal(model, ordinary, report.device)
        optimizer.step()


@pytest.mark.gpu
def test_unload_gives_the_memory_of_a_gpu_back_and_a_failure_keeps_none():
    model = metaviz.build(nn.Linear, 4096, 4096)
    before = torch.cuda.memory_allocated()

    def fail(*_):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop") as caught:
        metaviz.materialize(model, device="cuda", progress=fail)
    assert torch.cuda.memory_allocated() == before
    metaviz.materialize(model, device="cuda")
    assert torch.cuda.memory_allocated() >= before + 4 * 4096**2
    metaviz.unload(model)
    assert torch.cuda.memory_allocated() == before
    assert caught.value is not None


@pytest.mark.gpu
def test_keyed_draws_on_a_gpu_are_the_same_for_any_selection():
    whole, _ = both()
    part, _ = both()
    metaviz.materialize(whole, device="cuda", rng="keyed")
    metaviz.materialize(part, "free", device="cuda", rng="keyed")
    assert torch.equal(whole.free, part.free)


def test_the_cpu_is_listed_last_with_its_name_and_memory():
    *others, cpu = devices.listed()
    assert cpu.device == CPU and cpu.name
    assert 0 < cpu.free_nbytes <= cpu.total_nbytes <= psutil.virtual_memory().total
    assert all(each.device.type == torch.accelerator.current_accelerator().type for each in others)
    assert str(cpu).startswith(f"cpu: {cpu.name}, ") and " free of " in str(cpu)


class StandIn:
    """A device module of torch, as far as it is asked; some kinds cannot tell their memory."""

    def __init__(self, memory: bool):
        if memory:
            self.mem_get_info = lambda device: (3 * 2**30, 8 * 2**30)
            self.get_device_name = lambda device: f"Stand-in {device.index}"


@pytest.mark.parametrize("memory", [True, False])
def test_accelerators_are_listed_first_in_order(monkeypatch, memory):
    monkeypatch.setattr(devices, "names", lambda: ["cpu", "xpu:0", "xpu:1"])
    monkeypatch.setattr(torch, "get_device_module", lambda device: StandIn(memory))
    listed = devices.listed()
    assert [str(each.device) for each in listed] == ["xpu:0", "xpu:1", "cpu"]
    expected = {
        True: "xpu:1: Stand-in 1, 3.00 GiB free of 8.00 GiB in all",
        False: "xpu:1: XPU, memory not known",
    }
    assert str(listed[1]) == expected[memory]


def test_a_device_that_does_not_answer_is_listed_with_what_is_known(monkeypatch):
    class Taken:
        @staticmethod
        def mem_get_info(device):
            raise RuntimeError("all devices are busy or unavailable")

    monkeypatch.setattr(devices, "names", lambda: ["cpu", "xpu:0"])
    monkeypatch.setattr(torch, "get_device_module", lambda device: Taken)
    other, cpu = devices.listed()
    assert str(other) == "xpu:0: XPU, memory not known"
    assert cpu.device == CPU


def test_limits_of_all_control_groups_above_the_process_count(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n4:memory:/old\n")
    stat = "anon 1\ninactive_file 50\n"
    for folder, limit, used in (("", "max", 0), ("outer", "1000", 900), ("outer/inner", "5000", 100)):
        here = tmp_path / folder
        here.mkdir(exist_ok=True)
        (here / "memory.max").write_text(f"{limit}\n")
        (here / "memory.current").write_text(f"{used}\n")
        (here / "memory.stat").write_text(stat)
    old = tmp_path / "memory" / "old"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("700\n")
    (old / "memory.usage_in_bytes").write_text("100\n")
    # v1 has the page cache of the groups below in another line, while their use is in that of this group.
    (old / "memory.stat").write_text("anon 1\ninactive_file 5\ntotal_inactive_file 30\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("5\n")
    (tmp_path / "memory" / "memory.stat").write_text(stat)
    assert sorted(devices._cgroups(str(tmp_path), str(own))) == [(700, 70), (1000, 850), (5000, 50)]
