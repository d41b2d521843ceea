"""A constructor cannot tell that it is recorded: every question gets the answer of an ordinary CPU build."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.torch
import torch
import zoo
from torch import nn
from zoo import holding

import metaviz

T = torch.float64


def both(fn: Callable[[], object]) -> tuple[object, object]:
    """What `fn` returns in an ordinary build, and what it returns while it is recorded."""
    torch.manual_seed(11)
    ordinary = fn()
    torch.manual_seed(11)
    return ordinary, metaviz.build(fn)


questions = {
    "device": lambda t: (t.device, str(t.device), t[0].device.type, t.detach().device, t.data.device),
    "kind of memory": lambda t: (
        t.is_meta,
        t.is_cpu,
        t.is_cuda,
        t.get_device(),
        t.is_pinned(),
        t.is_shared(),
    ),
    "type": lambda t: (t.type(), t.long().type(), str(type(t)), t.layout, t.dtype),
    "layout": lambda t: (
        t.shape,
        t.T.stride(),
        t[1:].storage_offset(),
        t.is_contiguous(),
        t.nbytes,
        t.itemsize,
    ),
    "autograd": lambda t: (t.requires_grad, t.is_leaf, nn.Parameter(t).requires_grad, t.is_inference()),
    "same memory": lambda t: (t.data_ptr() == t.view(-1).data_ptr(), t.data_ptr() == t.clone().data_ptr()),
    "distance in memory": lambda t: t[1].data_ptr() - t.data_ptr(),
    "text": lambda t: (str(t), repr(t[0]), f"{t[0, 0]:.3f}", f"{t.sum()}", format(t[0]), f"{t}"),
    "numbers": lambda t: (t[0, 0].item(), float(t[0, 1]), int(t.sum() * 9), t.tolist(), complex(t[1, 1])),
    "truth": lambda t: (bool(t[0, 0] > 0.5), (t > 0.5).any().item(), torch.is_nonzero(t[0, 0]), 0.5 in t),
    "comparison": lambda t: (torch.equal(t, t.clone()), torch.allclose(t, t + 1), max(t[0]).item()),
    "iteration": lambda t: ([float(x) for x in t[0]], sorted(t[1].tolist()), sum(t[0]).item(), len(t)),
    "index": lambda t: ([10, 20, 30][t.argmax() % 3], list(range(t.argmin())), "x" * (t > 0.5).sum()),
    "numpy": lambda t: (
        t.numpy().sum(),
        np.asarray(t).max(),
        np.array(t, np.float64).tolist(),
        np.sin(t).tolist(),
    ),
    "shapes that depend on data": lambda t: (len(t[t > 0.5]), len(t.nonzero()), t.round().unique().numel()),
    "storage": lambda t: (t.untyped_storage().nbytes(), t.is_set_to(t), t.storage().size(), len(t.storage())),
}


@pytest.mark.filterwarnings("ignore:.*numpy", "ignore:.*NumPy", "ignore:TypedStorage")
@pytest.mark.parametrize("question", questions)
def test_a_question_is_answered_as_on_the_cpu_about(question):
    def ask():
        return questions[question](torch.rand(2, 3))

    ordinary, ours = both(ask)
    assert repr(ours) == repr(ordinary)


def test_defaults_that_libraries_look_at_are_those_of_the_cpu():
    ordinary, ours = both(
        lambda: (torch.get_default_device(), torch.get_default_dtype(), torch.empty(1).device)
    )
    assert ours == ordinary


moves = {
    "module.cuda": (lambda: nn.Linear(3, 3).cuda(), lambda: nn.Linear(3, 3)),
    "module.to": (lambda: nn.Linear(3, 3).to("cuda:0", T), lambda: nn.Linear(3, 3).to(T)),
    "device=": (lambda: nn.Linear(3, 3, device="cuda"), lambda: nn.Linear(3, 3)),
    "tensor.to": (
        lambda: holding(a=torch.rand(3).to("cuda"), b=torch.ones(2).cuda().cpu(), c=torch.eye(2).to(0)),
        lambda: holding(a=torch.rand(3), b=torch.ones(2), c=torch.eye(2)),
    ),
    "torch.tensor": (
        lambda: holding(a=torch.tensor([1.0], device="cuda"), b=torch.arange(3, device=0)),
        lambda: holding(a=torch.tensor([1.0]), b=torch.arange(3)),
    ),
    "type": (
        lambda: holding(a=torch.rand(3).type("torch.cuda.DoubleTensor")),
        lambda: holding(a=torch.rand(3).double()),
    ),
}


def in_context():
    with torch.device("cuda"):
        return holding(a=torch.rand(3), b=nn.Linear(2, 2), c=torch.tensor([1, 2]), d=torch.zeros(3))


def by_default():
    torch.set_default_device("cuda")
    return holding(a=torch.rand(3), b=nn.Linear(2, 2), c=torch.tensor([1, 2]), d=torch.zeros(3))


def on_cpu():
    return holding(a=torch.rand(3), b=nn.Linear(2, 2), c=torch.tensor([1, 2]), d=torch.zeros(3))


moves |= {"torch.device": (in_context, on_cpu), "set_default_device": (by_default, on_cpu)}


@pytest.mark.parametrize("move", moves)
def test_a_constructor_that_moves_itself_needs_no_such_device_with(move):
    moving, staying = moves[move]
    torch.manual_seed(11)
    model = metaviz.build(moving)
    metaviz.materialize(model)
    torch.manual_seed(11)
    assert zoo.differences(staying(), model) == []
    assert not torch.cuda.is_initialized()


ways_to = {
    "dtype": lambda t: t.to(T),
    "device and dtype": lambda t: t.to("cpu", T),
    "device": lambda t: t.to(torch.device("cpu")),
    "another": lambda t: t.to(torch.ones(1, dtype=T)),
    "keywords": lambda t: t.to(device="cpu", dtype=torch.half, non_blocking=True),
    "a copy": lambda t: t.to(torch.float32, copy=True),
    "a copy by place": lambda t: t.to("cpu", torch.float32, False, True),
    "nothing new": lambda t: t.to("cpu"),
    "a layout": lambda t: t[None, :, None].to(memory_format=torch.channels_last),
    "a real one": lambda t: zoo.OUTSIDE.to(t),
    "double": lambda t: t.double().half().cpu(),
    "type": lambda t: t.type(torch.DoubleTensor),
    "a name": lambda t: t.type("torch.HalfTensor"),
    "type_as": lambda t: t.type_as(torch.ones(1, dtype=T)),
}


@pytest.mark.parametrize("way", ways_to)
def test_to_understands(way):
    def build():
        values = torch.rand(3, 4)
        return holding(values=values, moved=ways_to[way](values))

    assert zoo.faults(build) == []


data = {
    "tensor": lambda t: torch.tensor([[1, 2], [3, 4.5]]),
    "tensor of tensors": lambda t: torch.tensor([t[0], 2 * t[1], 1.0]),
    "tensor of tensor": lambda t: torch.tensor(t.tolist()),
    "as_tensor": lambda t: torch.as_tensor(np.arange(3), dtype=T),
    "as_tensor of tensor": lambda t: torch.as_tensor(t),
    "asarray": lambda t: torch.asarray([1, 2, 3]),
    "asarray copied": lambda t: torch.asarray(t, copy=True),
    "from_numpy": lambda t: torch.from_numpy(np.linspace(0, 1, 5)),
    "frombuffer": lambda t: torch.frombuffer(bytearray(range(8)), dtype=torch.int16),
    "numpy and back": lambda t: torch.from_numpy(np.linalg.qr(t.view(2, 3).numpy())[0]),
    "new_tensor": lambda t: t.new_tensor([1, 2, 3]),
    "new": lambda t: t.new([1, 2, 3]),
    "new of sizes": lambda t: t.new(2, 3).fill_(t[0].item()),
    "new_full": lambda t: t.new_full((2, 2), 0.5),
    "new_zeros": lambda t: t.new_zeros(3),
    "legacy": lambda t: torch.Tensor([1.5, 2]),
    "legacy from numpy": lambda t: torch.FloatTensor(np.ones(3, np.float32)),
    "legacy sizes": lambda t: torch.DoubleTensor(2, 3).copy_(t.view(2, 3)),
    "nothing": lambda t: torch.tensor([]),
    "scalar": lambda t: torch.scalar_tensor(3.5) + torch.tensor(True),
    "sparse": lambda t: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)).to_dense(),
    "list in an index": lambda t: t[[0, 2]],
    "lists in an index": lambda t: t.view(2, 3)[[0, 1], [2, 0]],
    "array in an index": lambda t: t[np.array([1, 0])],
    "truth in an index": lambda t: t[[True, False, True, False, True, False]],
    "range in an index": lambda t: t.view(2, 3)[:, range(2)],
    "empty list in an index": lambda t: t[[]],
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:To copy construct")
@pytest.mark.parametrize("bringing", data)
def test_data_of_the_constructor_is_kept_from(bringing):
    def build():
        values = torch.rand(6)
        return holding(values=values, brought=data[bringing](values))

    assert zoo.faults(build) == []


def overwritten(array: np.ndarray, value: float) -> None:
    array[1:] = value


arrays = {
    "numpy": lambda t: overwritten(t.numpy(), 3),
    "a view of it": lambda t: overwritten(t.view(2, 3).T.numpy()[1:], 3),
    "asarray": lambda t: overwritten(np.asarray(t), float("nan")),
    "a copy": lambda t: overwritten(np.array(t), 3),
    "two at a time": lambda t: (overwritten(t[:3].numpy(), 1), overwritten(t[3:].numpy(), 2)),
}


@pytest.mark.filterwarnings("ignore:.*numpy")
@pytest.mark.parametrize("through", arrays)
def test_what_is_written_through_an_array_of_a_tensor_counts_for(through):
    def build():
        values = torch.rand(6)
        before = values + 1
        arrays[through](values)
        after, total = values + 1, values.nansum().item()
        values[0] = 9
        return holding(values=values, before=before, after=after, total=total)

    assert zoo.faults(build) == []


def test_an_array_that_became_a_tensor_can_still_be_filled():
    def build():
        table = np.zeros((3, 4))
        held = holding(table=torch.from_numpy(table), part=torch.as_tensor(table[1]))
        table[:] = np.arange(4)
        held.register_buffer("doubled", held.table * 2)
        overwritten(table, 5)
        return held

    assert zoo.faults(build) == []


def test_lists_in_an_index_can_be_written_through():
    def build():
        weight = torch.rand(4, 5)
        weight[[0, 2]] = 1
        weight[:, [0]] *= 2
        weight[[0, 1], [3, 4]] = torch.rand(2)
        weight[np.array([True, False, False, True])] += 1
        return holding(weight=weight)

    assert zoo.faults(build) == []


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


copies = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("copied", copies)
def test_a_module_can_be_copied_with(copied):
    def build():
        base = torch.randn(4, 4)
        tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        tied[1].weight = tied[0].weight
        views = holding(base=base, rows=base[1:3], turned=base.T)
        pairs = [(module, copies[copied](module)) for module in (tied, views, nn.BatchNorm1d(2))]
        base.mul_(2)
        return nn.ModuleList([module for pair in pairs for module in pair])

    assert zoo.faults(build) == []


def test_copies_of_one_tensor_share_or_part_as_they_do_on_the_cpu():
    def build():
        values, turned = torch.rand(3), torch.randn(3, dtype=torch.cfloat).conj()
        held = holding(values=values, shallow=copy.copy(values), deep=copy.deepcopy(values))
        held.register_buffer("turned", copy.deepcopy(turned))
        held.register_buffer("imaginary", copy.deepcopy(turned.imag))
        values.add_(1)
        return held

    assert zoo.faults(build) == []


@pytest.fixture
def checkpoints(tmp_path):
    torch.manual_seed(3)
    state = nn.Linear(3, 3).state_dict()
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(state, tmp_path / "new.safetensors")
    return tmp_path


loaders = {
    "torch.load": lambda folder: torch.load(folder / "new.pt"),
    "map_location": lambda folder: torch.load(folder / "new.pt", map_location="cpu", weights_only=False),
    "mmap": lambda folder: torch.load(folder / "new.pt", mmap=True),
    "the old format": lambda folder: torch.load(folder / "old.pt", map_location=torch.device("cpu")),
    "safetensors": lambda folder: safetensors.torch.load_file(folder / "new.safetensors"),
}


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("loader", loaders)
def test_weights_loaded_in_the_constructor_are_the_models(loader, assign, checkpoints):
    def build():
        layer, state = nn.Linear(3, 3), loaders[loader](checkpoints)
        layer.load_state_dict(state, assign=assign)
        return holding(layer=layer, twice=2 * state["bias"], head=nn.Linear(3, 2))

    assert zoo.faults(build) == []
    _, model = zoo.pair(build)
    metaviz.materialize(model)
    assert torch.equal(model.layer.weight, torch.load(checkpoints / "new.pt")["weight"])


def test_parts_of_a_safetensors_file_can_be_read(checkpoints):
    def build():
        layer = nn.Linear(3, 3)
        with safetensors.safe_open(checkpoints / "new.safetensors", "pt") as file:
            layer.weight.data.copy_(file.get_tensor("weight"))
            layer.bias.data = file.get_slice("weight")[0]
        return layer

    assert zoo.faults(build) == []


def test_python_functions_for_each_element_are_applied():
    def build():
        values, ones = torch.rand(4), torch.ones(4)
        values.apply_(lambda x: 2 * x)
        return holding(values=values, mapped=ones.map_(values, lambda a, b: a + b))

    assert zoo.faults(build) == []


def test_a_truncated_normal_is_one_op_or_plain_ones_and_bounded():
    _, model = zoo.pair(lambda: holding(weight=nn.init.trunc_normal_(torch.empty(50, 50), a=-0.5, b=0.7)))
    assert metaviz.plan(model).tensors[0].reason.startswith("trunc_normal_ at ")
    metaviz.materialize(model)
    assert -0.5 <= model.weight.min() < -0.49 and 0.69 < model.weight.max() <= 0.7


def test_a_quasi_random_sequence_is_the_same():
    def build():
        engine = torch.quasirandom.SobolEngine(2, scramble=True, seed=3)
        return holding(points=engine.draw(4), after=torch.rand(3))

    assert zoo.faults(build) == []
