"""Spreading a model over devices: in order, whole blocks, never over what is free."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import metaviz
from metaviz.core import devices
from metaviz.core.devices import Device
from metaviz.core.spread import blocks_of, joined, spread
from metaviz.errors import NotEnoughMemory, UnknownPath

CPU = torch.device("cpu")
# To torch it is another device than `cpu`, so that it can stand in for an accelerator.
OTHER = torch.device("cpu", 0)


def device(name: str, free: int | None) -> Device:
    return Device(torch.device(name), "stand-in", free, free)


SIZES = {
    "embed.weight": 10,
    **{f"layers.{k}.{name}": 10 for k in range(4) for name in ("a", "b")},
    "head.weight": 10,
}
BLOCKS = {f"layers.{k}" for k in range(4)}


def test_devices_are_filled_one_after_the_other_with_whole_blocks():
    found = spread(
        SIZES, BLOCKS, [device("cuda:0", 45), device("cuda:1", 30), device("cpu", 1000)], reserve=0
    )
    assert [(path, str(where)) for path, where, _ in found.parts] == [
        ("embed", "cuda:0"),
        ("layers.0", "cuda:0"),
        ("layers.1", "cuda:1"),
        ("layers.2", "cpu"),
        ("layers.3", "cpu"),
        ("head", "cpu"),
    ]
    assert str(found.placement["layers.1.b"]) == "cuda:1"
    assert found.left == ()
    assert str(found).splitlines() == [
        "embed, layers.0 → cuda:0, 30 B of 45 B free",
        "layers.1 → cuda:1, 20 B of 30 B free",
        "layers.2–3, head → cpu, 50 B of 1,000 B free".replace("1,000 B", "1000 B"),
    ]


def test_a_module_that_fits_stays_whole_and_room_is_left_for_activations():
    found = spread(SIZES, BLOCKS, [device("cuda:0", 112), device("cpu", 1000)])
    assert [path for path, where, _ in found.parts if str(where) == "cuda:0"] == ["embed", "layers", "head"]
    found = spread(SIZES, BLOCKS, [device("cuda:0", 110), device("cpu", 1000)])
    assert [path for path, where, _ in found.parts if str(where) == "cpu"] == ["head"]


def test_a_block_is_split_only_where_no_device_could_hold_it():
    found = spread(SIZES, BLOCKS, [device("cuda:0", 15), device("cpu", 19)], reserve=0)
    assert [(path, str(where)) for path, where, _ in found.parts] == [
        ("embed", "cuda:0"),
        ("layers.0.a", "cpu"),
    ]
    assert found.left[0] == "layers.0.b"


def test_a_block_that_only_a_full_device_could_have_held_is_split_over_what_is_left():
    sizes = {"layers.0.a": 60, "layers.1.a": 40, "layers.1.b": 40}
    there = [device("cuda:0", 100), device("cuda:1", 50), device("cpu", 50)]
    found = spread(sizes, {"layers.0", "layers.1"}, there, reserve=0)
    assert {path: str(where) for path, where in found.placement.items()} == {
        "layers.0.a": "cuda:0",
        "layers.1.a": "cuda:0",
        "layers.1.b": "cuda:1",
    }


def test_a_module_with_tensors_of_its_own_is_split_where_it_holds_the_blocks_and_stays_whole_where_not():
    sizes = {"encoder.positions": 1, **{f"encoder.layers.{k}.w": 10 for k in range(8)}}
    sizes |= {"head.weight": 10, "head.bias": 2}
    there = [device("cuda:0", 45), device("cuda:1", 51), device("cpu", 1000)]
    found = spread(sizes, {f"encoder.layers.{k}" for k in range(8)}, there, reserve=0)
    assert str(found).splitlines() == [
        "encoder.positions, encoder.layers.0–3 → cuda:0, 41 B of 45 B free",
        "encoder.layers.4–7 → cuda:1, 40 B of 51 B free",
        "head → cpu, 12 B of 1000 B free",
    ]


def test_nothing_at_all_and_nothing_that_fits_can_be_told():
    assert str(spread({}, (), [device("cpu", 10)])) == ""
    assert str(spread({"a.weight": 20, "b.weight": 1}, (), [device("cpu", 10)])) == "no room for a, b"


def test_modules_that_are_nested_very_deeply_are_split():
    path = ".".join(["0"] * 3000)
    found = spread(
        {f"{path}.weight": 6, f"{path}.bias": 6}, {"0"}, [device("cuda:0", 9), device("cpu", 9)], 0
    )
    assert [str(where) for where in found.placement.values()] == ["cuda:0", "cpu"]


def test_what_comes_after_the_first_part_without_room_has_none_either():
    found = spread(SIZES, BLOCKS, [device("cpu", 35)], reserve=0)
    assert [path for path, _, _ in found.parts] == ["embed", "layers.0"]
    assert found.left == ("layers.1", "layers.2", "layers.3", "head")
    assert str(found).splitlines()[-1] == "no room for layers.1–3, head"


def test_a_device_that_does_not_say_what_is_free_takes_nothing_unless_it_is_alone():
    found = spread(SIZES, BLOCKS, [device("mps", None), device("cpu", 1000)])
    assert {str(where) for where in found.placement.values()} == {"cpu"}
    found = spread(SIZES, BLOCKS, [device("mps", None)])
    assert {str(where) for where in found.placement.values()} == {"mps"}
    assert str(found) == "embed, layers, head → mps, 100 B"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 30)), max_size=20),
    st.lists(st.integers(0, 120), min_size=1, max_size=3),
)
def test_every_tensor_has_one_place_in_order_and_no_device_more_than_it_has(tensors, free):
    sizes = {f"layers.{a}.{b}.w{k}": nbytes for k, (a, b, nbytes) in enumerate(sorted(tensors))}
    there = [device(f"cuda:{k}", nbytes) for k, nbytes in enumerate(free)]
    found = spread(sizes, {f"layers.{a}" for a in range(4)}, there, reserve=0)
    left = {path for path in sizes for part in found.left if path == part or path.startswith(f"{part}.")}
    assert set(found.placement) | left == set(sizes)
    assert not set(found.placement) & left
    order = [found.placement[path].index for path in sizes if path in found.placement]
    assert order == sorted(order)
    for each in there:
        taken = sum(sizes[path] for path, where in found.placement.items() if where == each.device)
        assert taken <= each.free_nbytes
        assert taken == sum(nbytes for _, where, nbytes in found.parts if where == each.device)
    for block in {path.rsplit(".", 2)[0] for path in sizes}:
        mine = [path for path in sizes if path.startswith(f"{block}.")]
        on = [found.placement[path].index for path in mine if path in found.placement]
        if len(set(on)) + (len(on) < len(mine)) > 1:
            need = sum(sizes[path] for path in mine)
            before = list(sizes)[: list(sizes).index(mine[0])]
            taken = sum(sizes[path] for path in before if found.placement[path].index == on[0])
            assert need > free[on[0]] - taken
            assert all(need > nbytes for nbytes in free[on[0] + 1 :])


def test_blocks_are_what_the_outermost_containers_hold():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(2))
    model.heads = nn.ModuleDict({"a": nn.Linear(1, 1)})
    model.norm = nn.LayerNorm(1)
    assert blocks_of(model) == {"layers.0", "layers.1", "heads.a"}
    assert blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) == {"0", "1"}
    assert blocks_of(nn.Linear(1, 1)) == set()


def test_a_model_in_a_container_is_no_block_but_holds_some():
    body = nn.Module()
    body.layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(2))
    assert blocks_of(nn.Sequential(body, nn.Linear(1, 1))) == {"0.layers.0", "0.layers.1", "1"}
    assert blocks_of(nn.ModuleDict({"student": body})) == {"student.layers.0", "student.layers.1"}


def test_consecutive_numbers_of_one_parent_are_joined():
    assert joined(["a.0", "a.1", "b.2", "b.3", "b.5", "c", "7", "8"]) == ["a.0–1", "b.2–3", "b.5", "c", "7–8"]


@pytest.mark.parametrize(
    "names", [["00", "01"], ["٠", "١"], ["9" * 5000, "b"]], ids=["zeros", "digits", "long"]
)
def test_names_that_only_look_like_numbers_stay_as_they_are(names):
    assert joined(names) == names


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(4))
        self.head = nn.Linear(10, 2)


def test_auto_gives_each_part_its_device_and_the_values_are_the_same(monkeypatch):
    monkeypatch.setattr(
        devices, "listed", lambda: (Device(OTHER, "GPU", 1000, 1000), Device(CPU, "CPU", 9999, 9999))
    )
    torch.manual_seed(3)
    ordinary = Net()
    torch.manual_seed(3)
    model = metaviz.build(Net)
    plan = metaviz.plan(model, device="auto")
    assert str(plan.spread).splitlines()[0] == "layers.0–1 → cpu:0, 800 B of 1000 B free"
    assert plan.devices == {OTHER: 800, CPU: 888}
    report = metaviz.materialize(model, device="auto")
    assert report.devices == {OTHER: 800, CPU: 888}
    assert "on cpu:0 (800 B), cpu (888 B) in" in str(report)
    assert [tensor.device for tensor in report.tensors] == [OTHER, OTHER, CPU, CPU, CPU, CPU]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), ordinary.state_dict()[name])


def test_a_plan_with_nothing_left_to_do_says_so():
    model = metaviz.build(Net)
    metaviz.materialize(model)
    assert str(metaviz.plan(model, device="auto")).startswith("0 tensors, 0 B → ")


def test_what_fits_on_no_device_is_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(devices, "listed", lambda: (Device(CPU, "CPU", 1000, 1000),))
    monkeypatch.setattr(devices, "free_nbytes", lambda _: 1000)
    model = metaviz.build(Net)
    with pytest.raises(
        NotEnoughMemory, match=r"takes 1\.65 KiB on cpu, and 1000 B are free.* room for layers\.0–1\."
    ):
        metaviz.materialize(model, device="auto")
    assert all(tensor.is_meta for tensor in model.parameters())


def test_devices_can_be_given_by_path(monkeypatch):
    names = {"gpu": OTHER}
    monkeypatch.setattr(devices, "resolve", lambda name: names.get(name, CPU))
    model = metaviz.build(Net)
    report = metaviz.materialize(model, device={"layers": "gpu", "layers.1": "cpu", "head.bias": "gpu"})
    assert [tensor.device for tensor in report.tensors] == [OTHER, CPU, OTHER, OTHER, CPU, OTHER]
    with pytest.raises(UnknownPath, match="layer"):
        metaviz.plan(model, device={"layer.0": "cpu"})
