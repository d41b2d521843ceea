from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import metaviz
from metaviz.core.checks import nearest


def notes(spec, **options) -> list[str]:
    return list(metaviz.mesh(spec, **options).notes)


def test_a_plan_that_nothing_is_wrong_with_has_no_notes():
    assert notes("pp=4,dp=8,tp=8", ranks_per_host=8, world=256, device_type="cpu") == []


def test_a_mesh_that_leaves_ranks_out_is_told_with_the_sizes_that_do_not():
    assert notes("dp=2,tp=3", world=8) == [
        "2 of 8 ranks are not on the mesh, and would idle. tp=4 would use all of 8."
    ]
    assert notes("dp=1,tp=4", world=8) == [
        "4 of 8 ranks are not on the mesh, and would idle. dp=2 or tp=8 would use all of 8."
    ]


@pytest.mark.parametrize(
    ("sizes", "world", "told"),
    [
        ({"dp": 4, "tp": 4}, 8, " dp=2 or tp=2 would use all of 8."),
        ({"dp": 2, "tp": 2}, 7, " dp=1 × tp=7 would use all of 7."),
        ({"pp": 3, "dp": 10, "tp": 7}, 256, " pp=4 × dp=8 × tp=8 would use all of 256."),
        ({"dp": 5}, 8192, " dp=8192 would use all of 8,192."),
    ],
)
def test_the_nearest_sizes_that_multiply_to_the_world_are_named(sizes, world, told):
    assert nearest(sizes, world) == told


@pytest.mark.parametrize("world", [12, 30, 36, 64])
@pytest.mark.parametrize("sizes", [(7, 11), (7, 9, 5), (7, 11, 13)])
def test_no_other_sizes_that_multiply_to_the_world_are_nearer(world, sizes):
    names = "abc"[: len(sizes)]
    told = nearest(dict(zip(names, sizes, strict=True)), world)
    choice = [int(part.split("=")[1]) for part in told.split(" would")[0].strip().split(" × ")]

    def distance(each):
        return sum(abs(math.log(size / wanted)) for size, wanted in zip(each, sizes, strict=True))

    every = [
        each for each in itertools.product(range(1, world + 1), repeat=len(sizes)) if math.prod(each) == world
    ]
    assert math.prod(choice) == world
    assert distance(choice) == pytest.approx(min(map(distance, every)))


def test_the_nearest_sizes_are_found_at_once_where_a_world_has_many_divisors():
    # 240 of them, and five axes: a search one by one would not end.
    sizes = {"a": 7919, "b": 13, "c": 17, "d": 19, "e": 23}
    words = nearest(sizes, 720720).removesuffix(" would use all of 720,720.")
    assert math.prod(int(part.split("=")[1]) for part in words.split(" × ")) == 720720


WHY = "tensor parallelism talks in every layer, and wants one host"


@pytest.mark.parametrize(
    ("spec", "hosts", "told"),
    [
        ("dp=4,tp=8", 8, []),
        (
            "dp=2,tp=16",
            8,
            [f"tp=16 is more than the 8 ranks of a host, so 2 of 2 groups cross hosts: {WHY}."],
        ),
        ("tp=4,dp=8", 8, [f"tp=4 crosses hosts of 8 ranks in 8 of 8 groups: {WHY}. Make it the last axis."]),
        (
            "dp=8,tp=3",
            8,
            [f"tp=3 crosses hosts of 8 ranks in 2 of 8 groups: {WHY}. Make it 2 or 4."],
        ),
        ("dp=2,model=4,cp=1", 8, []),
        (
            "tensor_parallel=2,dp=8",
            8,
            [
                f"tensor_parallel=2 crosses hosts of 8 ranks in 8 of 8 groups: {WHY}. Make it the last axis.",
            ],
        ),
        # Pipelines are meant to cross hosts, and so is data parallelism.
        ("pp=2,dp=8", 8, []),
        ("dp=12", 8, ["12 ranks do not fill hosts of 8: the last one has 4."]),
    ],
)
def test_tensor_parallelism_across_hosts_is_a_warning_in_words(spec, hosts, told):
    assert notes(spec, ranks_per_host=hosts, device_type="cpu") == told


def test_ranks_in_an_order_that_tears_hosts_apart_are_to_be_ordered():
    found = notes("dp=2,tp=2", ranks=[0, 2, 1, 3], ranks_per_host=2, world=4)
    assert found == [f"tp=2 crosses hosts of 2 ranks in 2 of 2 groups: {WHY}. Order the ranks host by host."]


def test_a_mesh_that_is_smaller_than_its_world_fills_the_hosts_of_the_world():
    (idle,) = notes("dp=2,tp=2", world=8, ranks_per_host=8)
    assert "would idle" in idle


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


class Configured(nn.Module):
    def __init__(self, **values):
        super().__init__()
        self.config = Config(**values)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 11008}, []),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 11008},
            [
                "12 attention heads cannot be divided among tp=8: tp can be 1, 2, 3, 4, 6, 12.",
                "4 key-value heads cannot be divided among tp=8: tp can be 1, 2, 4.",
            ],
        ),
        (
            {"n_head": 12, "n_inner": None},
            ["12 attention heads cannot be divided among tp=8: tp can be 1, 2, 3, 4, 6, 12."],
        ),
        (
            {"num_heads": 8, "d_ff": 1025},
            ["1,025 hidden features of the MLP cannot be divided among tp=8: tp can be 1, 5."],
        ),
    ],
)
def test_heads_that_tensor_parallelism_cannot_divide_are_told_with_the_sizes_that_can(config, told):
    assert notes("dp=2,tp=8", model=Configured(**config)) == told


def test_the_heads_of_torchs_own_attention_are_counted_whichever_layer_has_them():
    model = nn.ModuleList(nn.MultiheadAttention(24, heads, device="meta") for heads in (8, 12, 12))
    assert notes("tp=8", model=model) == [
        "12 attention heads cannot be divided among tp=8: tp can be 1, 2, 3, 4, 6, 12."
    ]


def test_a_mesh_without_tensor_parallelism_divides_no_heads():
    model = Configured(num_attention_heads=7)
    assert notes("dp=8", model=model) == []
    assert notes("dp=8,tp=1", model=model) == []


def test_a_real_configuration_is_understood(needs):
    transformers = needs("transformers")
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=250,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=32,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert notes("dp=2,tp=4", model=model) == [
        "6 attention heads cannot be divided among tp=4: tp can be 1, 2, 3, 6.",
        "2 key-value heads cannot be divided among tp=4: tp can be 1, 2.",
        "250 hidden features of the MLP cannot be divided among tp=4: tp can be 1, 2, 5.",
    ]


@pytest.mark.gpu
def test_more_ranks_than_devices_are_told_with_the_machines_that_it_takes():
    count = torch.cuda.device_count()
    (told,) = notes({"dp": 3 * count}, device_type="cuda")
    assert told == f"{3 * count:,} ranks, and {count} cuda devices here: it takes 3 machines like this one."


class Nested:
    def __init__(self, **kept):
        self.__dict__.update(kept)

    @property
    def num_attention_heads(self):
        raise RuntimeError("not known yet")


def test_a_configuration_that_cannot_be_read_says_nothing_and_a_nested_one_is_read():
    model = nn.Linear(2, 2)
    model.config = Nested()
    assert notes("tp=4", model=model, device_type="cpu") == []
    model.config = Nested(text_config=Nested(num_key_value_heads=2))
    assert notes("tp=4", model=model, device_type="cpu") == [
        "2 key-value heads cannot be divided among tp=4: tp can be 1, 2."
    ]


def test_heads_that_modules_count_are_told():
    model = nn.Linear(2, 2)
    model.n_heads, model.n_kv_heads = 6, -8
    assert notes("tp=4", model=model, device_type="cpu") == [
        "6 attention heads cannot be divided among tp=4: tp can be 1, 2, 3, 6."
    ]


def test_a_size_that_no_host_can_hold_is_made_one_that_divides_hosts_and_ranks():
    assert notes("tp=3,dp=8", ranks_per_host=8, device_type="cpu") == [
        f"tp=3 crosses hosts of 8 ranks in 8 of 8 groups: {WHY}. Make it the last axis and make it 2 or 4."
    ]
