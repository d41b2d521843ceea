"""Trees of small traps, of random graphs against plain definitions, and of a real model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from trees import META, Holder, build, meta, no, only, plans, quirks, row, seen, tiny_llama, weight, yes

import metaviz
from metaviz.core.fold import runs
from metaviz.core.tree import tree
from metaviz.errors import UnknownPath


def test_a_linear_has_a_row_for_itself_its_weight_and_its_bias():
    rows = seen(nn.Linear(2, 3, device=META)).rows
    assert [r.path for r in rows] == ["", "weight", "bias"]
    assert [r.kind for r in rows] == ["module", "parameter", "parameter"]
    assert [r.cls for r in rows] == ["Linear", "Parameter", "Parameter"]
    assert [r.shape for r in rows] == [None, (3, 2), (3,)]
    assert [r.numel for r in rows] == [9, 6, 3]
    assert [r.nbytes for r in rows] == [36, 24, 12]
    assert {r.dtype for r in rows} == {"float32"}
    assert {r.device for r in rows} == {"meta"}
    assert {r.mark for r in rows} == {"ready"}
    assert [r.source for r in rows] == [None, "replay", "replay"]


def test_a_tied_head_counts_once_and_names_its_partner():
    embed = nn.Embedding(10, 4, device=META)
    head = nn.Linear(4, 10, bias=False, device=META)
    head.weight = embed.weight
    shown = seen(Holder(embed=embed, head=head))
    assert shown["head.weight"].row.tied_to == "embed.weight"
    assert shown["embed.weight"].row.tied_to is None
    assert shown.totals[:2] == (40, 80)
    assert (shown.totals.nbytes, shown.totals.nbytes_by_path) == (160, 320)
    assert shown["head"].row.numel == 40
    assert shown.totals.marks == {"ready": 1}


def test_a_shared_module_stands_at_each_path_and_counts_once():
    block = nn.Linear(3, 3, device=META)
    shown = seen(Holder(a=block, wrap=Holder(b=block)))
    second = shown["wrap.b"].row
    assert second.tied_to == "a"
    assert second.reason == 'shared with a. Next: tree["a"]'
    assert (second.numel, second.nbytes, second.mark) == (12, 48, "ready")
    assert shown["wrap"].row.numel == 12
    assert (shown.row.numel, shown.row.numel_by_path) == (12, 24)
    assert (shown.row.nbytes, shown.row.nbytes_by_path) == (48, 96)
    assert shown["wrap.b.weight"].path == "a.weight"
    assert len(shown) == 6


def test_a_module_inside_itself_ends_the_walk():
    model = Holder(scale=weight(3))
    model._modules["inner"] = Holder(back=model)
    shown = seen(model)
    assert [r.path for r in shown] == ["", "scale", "inner", "inner.back"]
    assert shown["inner.back"].row.reason == 'leads back to the root, which it is a part of. Next: tree[""]'
    assert shown["inner.back.inner.back.scale"].path == "scale"
    assert (shown.row.numel, shown.row.numel_by_path) == (3, 3)


def test_nested_sharing_takes_no_exponential_time():
    block = Holder(w=weight(1))
    for _ in range(60):
        block = Holder(a=block, b=block)
    shown = seen(block)
    assert len(shown) == 122
    assert shown.row.numel == 1
    assert shown.row.numel_by_path == 2**60


def test_a_buffer_says_whether_a_state_dict_holds_it():
    model = Holder(kept=meta(2))
    model.register_buffer("cache", meta(3), persistent=False)
    shown = seen(model)
    assert [r.persistent for r in shown] == [None, True, False]
    assert [r.requires_grad for r in shown] == [None, False, False]


def test_views_of_one_storage_count_its_bytes_once():
    fused = meta(6, 4)
    model = Holder(
        q=nn.Parameter(fused[:2]), rest=Holder(k=nn.Parameter(fused[2:4]), fused=nn.Parameter(fused))
    )
    shown = seen(model)
    assert [shown[path].row.aliases for path in ("q", "rest.k", "rest.fused")] == [None, "q", "q"]
    assert shown["q"].row.nbytes == 32
    assert (shown["rest"].row.numel, shown["rest"].row.nbytes) == (24, 96)
    assert (shown.row.numel, shown.row.nbytes) == (24, 96)
    assert (shown.row.numel_by_path, shown.row.nbytes_by_path) == (40, 160)


def test_an_expanded_buffer_counts_what_its_storage_holds():
    mask = row(Holder(mask=meta(1, 1).expand(100, 100)), "mask")
    assert (mask.shape, mask.numel, mask.nbytes) == ((100, 100), 10_000, 4)


def test_a_child_named_like_a_method_is_seen():
    assert row(Holder(half=nn.Linear(2, 2, device=META)), "half.weight").shape == (2, 2)


def test_a_property_that_raises_is_never_called():
    class Loud(nn.Linear):
        @property
        def cost(self):
            raise AssertionError("called")

        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

    assert len(seen(Loud.__new__(Loud))) == 1
    model = nn.Linear(2, 2, device=META)
    model.__class__ = Loud
    assert [r.path for r in seen(model)] == ["", "weight", "bias"]


def test_an_empty_model_is_empty():
    shown = seen(nn.Module())
    assert shown.row[3:9] == ("Module", None, None, 0, 0, None)
    assert (shown.row.mark, shown.row.reason) == ("empty", "no tensors below")
    assert len(shown) == 1


def test_scalars_complex_and_small_floats_have_their_bytes():
    model = Holder(
        scalar=weight(),
        spin=meta(3, dtype=torch.complex64),
        fp8=meta(5, dtype=torch.float8_e4m3fn),
        steps=meta(1, dtype=torch.int64),
    )
    shown = seen(model)
    assert [(r.shape, r.dtype, r.nbytes) for r in shown.tensors] == [
        ((), "float32", 4),
        ((3,), "complex64", 24),
        ((5,), "float8_e4m3fn", 5),
        ((1,), "int64", 8),
    ]
    assert shown.row.dtype == "complex64, int64, float8_e4m3fn, float32"
    assert shown.totals.dtypes == {"complex64": 24, "int64": 8, "float8_e4m3fn": 5, "float32": 4}


def test_frozen_parameters_are_told_from_trained_ones():
    model = Holder(a=Holder(w=weight(2, requires_grad=False)), b=Holder(w=weight(3)))
    shown = seen(model)
    assert [shown[path].row.requires_grad for path in ("", "a", "a.w", "b")] == [None, False, False, True]
    assert shown.totals.frozen == 2


def test_a_mixed_model_says_what_is_where():
    shown = seen(Holder(a=nn.Linear(2, 2, device=META), b=nn.Linear(2, 2)))
    assert [shown[path].row.mark for path in ("", "a", "b")] == ["ready", "ready", "real"]
    assert shown.row.device == "meta, cpu"
    assert shown.totals.devices == {"meta": 24, "cpu": 24}
    assert shown.totals.marks == {"real": 2, "ready": 2}
    assert shown["b.weight"].row.reason == "holds values on cpu"


def test_a_lazy_parameter_is_blocked_with_the_next_step():
    lazy = row(nn.LazyLinear(3, device=META), "weight")
    assert (lazy.mark, lazy.shape, lazy.numel, lazy.nbytes) == ("blocked", None, 0, 0)
    assert lazy.reason == (
        "lazy: its shape is unknown until the first forward. "
        "Next: metaviz.materialize(model); model(example_input)"
    )
    assert row(nn.LazyLinear(3), "weight").mark == "blocked"


def test_marks_roll_up():
    parts = {"w": weight(2), "v": weight(2)}
    assert row(Holder(**parts), "", yes).mark == "ready"
    assert row(Holder(**parts), "", no).mark == "blocked"
    assert row(Holder(**parts), "", only("w")).mark == "partial"
    assert row(Holder(real=torch.zeros(1), **parts), "", no).mark == "partial"
    assert row(Holder(real=torch.zeros(1), **parts), "", yes).mark == "ready"
    assert row(Holder(real=torch.zeros(1)), "").mark == "real"


def test_reasons_count_and_name_with_the_next_step():
    parts = {f"w{index}": weight(2) for index in range(5)}
    assert row(Holder(**parts), "", yes).reason == (
        'its 5 tensors can be replayed. Next: metaviz.materialize(model, device="cpu")'
    )
    assert row(Holder(**parts), "", no).reason == (
        "none of its 5 tensors can be given values: A test says no. Next: fix(it)"
    )
    assert row(Holder(**parts), "", only("w0")).reason == (
        '1 of its 5 tensors can be replayed; blocked: w1, w2, w3, …. Next: metaviz.tree(model).explain("w1")'
    )
    assert row(Holder(a=Holder(**parts), real=torch.zeros(1)), "", only("w0", "w1", "w2", "w3")).reason == (
        "1 of its 6 tensors holds values; 4 of the other 5 can be replayed; blocked: a.w4. "
        'Next: metaviz.tree(model).explain("a.w4")'
    )
    assert row(Holder(a=Holder(w=weight(1))), "a", yes).reason == (
        'its tensor can be replayed. Next: metaviz.materialize(model, "a", device="cpu")'
    )


def test_tied_tensors_are_one_tensor_in_marks_and_reasons():
    shared = weight(2)
    shown = seen(Holder(a=Holder(w=shared), b=Holder(w=shared)), no)
    assert shown.totals.marks == {"blocked": 1}
    assert shown.row.reason == "its tensor cannot be given values: A test says no. Next: fix(it)"
    some = Holder(a=Holder(w=shared), b=Holder(w=shared), c=Holder(w=weight(1), v=weight(1)))
    assert "1 of its 3 tensors can be replayed; blocked: a.w, c.w. " in row(some, "", only("v")).reason


def test_totals_are_those_of_torch_where_torch_counts_right():
    model = quirks()
    totals = seen(model).totals
    assert totals.numel == sum(p.numel() for p in model.parameters()) == 2752
    every_slot = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
    assert totals.numel_by_path == every_slot == 4624
    unique = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    assert totals.nbytes == sum(t.nbytes for t in unique.values())


def test_an_unknown_path_names_the_nearest():
    model = Holder(layers=nn.ModuleList(nn.Linear(1, 1, device=META) for _ in range(3)), norm=weight(1))
    shown = seen(model)
    for wrong, nearest in [
        ("layer.2.weight", "layers.2.weight"),
        ("layers.7", "layers"),
        ("2.bias", "layers.2.bias"),
    ]:
        with pytest.raises(
            UnknownPath, match=f"'{wrong}' in the model. The nearest is '{nearest}'. Next: tree"
        ):
            shown[wrong]
    with pytest.raises(UnknownPath, match=r"'zzz' in the model\. It has: norm, layers"):
        shown["zzz"]
    with pytest.raises(KeyError):
        shown["layers"]["bias"]
    with pytest.raises(TypeError, match="A path is a string"):
        shown[0]


def test_a_part_keeps_the_paths_of_the_model():
    shown = seen(Holder(a=Holder(b=Holder(w=weight(2))), c=Holder(w=weight(3))))
    part = shown["a"]
    assert [r.path for r in part] == ["a", "a.b", "a.b.w"]
    assert part[""].path == "a"
    assert part["b"].path == part["a.b"].path == "a.b"
    assert "b.w" in part
    assert "c" not in part
    assert part.totals.numel == 2
    assert len(part) == 3
    assert [r.path for r in shown.modules] == ["", "a", "a.b", "c"]
    assert [r.path for r in shown.tensors] == ["a.b.w", "c.w"]


def test_a_tree_of_what_is_no_module_says_so():
    with pytest.raises(TypeError, match=r"tree\(\) looks at a torch.nn.Module, and dict is none"):
        tree({"weight": 1})


class Broken(nn.Module):
    def __init__(self):
        pass


def test_a_module_that_cannot_be_looked_at_costs_one_row():
    model = Holder(good=nn.Linear(2, 2, device=META), bad=Broken.__new__(Broken))
    model._modules["odd"] = 7
    shown = seen(model)
    assert [r.path for r in shown] == ["", "good", "good.weight", "good.bias", "bad", "odd"]
    assert (shown["bad"].row.mark, shown["odd"].row.mark) == ("blocked", "blocked")
    assert shown["bad"].row.reason == "its __init__ never called super().__init__()"
    assert shown["odd"].row.reason == "this is not a torch.nn.Module"
    assert shown.row.mark == "partial"
    assert shown.row.reason.startswith("2 of its 4 tensors can be replayed; blocked: bad, odd.")


def test_a_module_that_can_be_looked_at_in_part_is_blocked_and_shows_that_part():
    class Raises(dict):
        def items(self):
            raise OSError

    model = Holder(w=weight(2))
    model.__dict__["_buffers"] = Raises(b=meta(1))
    shown = seen(Holder(part=model))
    assert [r.path for r in shown] == ["", "part", "part.w"]
    assert (shown["part"].row.mark, shown["part.w"].row.mark, shown.row.mark) == (
        "blocked",
        "ready",
        "partial",
    )
    assert shown["part"].row.reason == "it raised OSError when looked at"


def test_of_two_rows_with_one_path_the_first_is_meant():
    model = Holder(a=Holder(b=weight(3)))
    model._modules["a.b"] = nn.ReLU()
    assert seen(model)["a.b"].row.shape == (3,)


def test_an_answer_that_raises_costs_one_row():
    def angry(tensor, module, name, kind):
        if name == "v":
            raise ValueError("no luck")
        return yes(tensor, module, name, kind)

    shown = seen(Holder(w=weight(1), v=weight(1)), angry)
    assert shown["w"].row.mark == "ready"
    assert shown["v"].row.reason == "asking for its source raised ValueError: no luck"


def test_tensors_in_plain_attributes_have_rows_and_those_on_meta_are_stale():
    model = Holder(fc=nn.Linear(2, 2, device=META))
    model.freqs = meta(4, dtype=torch.complex64)
    model.cache = {"cos": [meta(3), torch.zeros(3)]}
    model.links = [model.fc, model.fc.weight]
    model.hidden = [nn.Linear(1, 1, bias=False, device=META)]
    shown = seen(model)
    paths = ["freqs", "cache['cos'][0]", "cache['cos'][1]", "hidden[0].weight"]
    assert [r.path for r in shown.tensors if r.kind == "attribute"] == paths
    assert [shown[path].row.mark for path in paths] == ["ready", "ready", "real", "ready"]
    assert shown.totals.stale == 3
    assert shown.totals.numel == 6
    assert "it is stale: Module.to and to_empty never see it" in " ".join(shown.explain("freqs").split())


def test_an_attribute_that_raises_when_looked_at_costs_one_row():
    class Hostile:
        @property
        def __dict__(self):
            raise RuntimeError

    model = Holder(w=weight(1))
    model.things = [Hostile()]
    bad = row(model, "things[0]")
    assert (bad.kind, bad.cls, bad.mark) == ("attribute", "Hostile", "blocked")
    assert bad.reason == "it raised RuntimeError when looked at"
    assert row(model, "").mark == "ready"


def test_the_parameters_that_an_lstm_lists_again_are_no_attributes():
    shown = seen(nn.LSTM(2, 3, device=META))
    assert {r.kind for r in shown.tensors} == {"parameter"}
    assert len(shown) == 5


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=torch.bfloat16, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner
        self.mesh = "what a DTensor lists beside its local part"

    def __tensor_flatten__(self):
        return ["inner", "mesh"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


def test_unusual_tensors_are_shown_for_what_they_are():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    model = Holder(
        loud=torch.zeros(3).as_subclass(Loud),
        packed=Wrapper(torch.zeros(4, 4, dtype=torch.int8)),
        unpacked=Wrapper(torch.zeros(4, 4, dtype=torch.float64)),
        sparse=torch.eye(4).to_sparse(),
        fake=fake,
    )
    shown = seen(model)
    assert [(r.cls, r.shape, r.nbytes, r.mark) for r in shown.tensors] == [
        ("Loud", (3,), 12, "real"),
        ("Wrapper", (4, 4), 16, "real"),
        ("Wrapper", (4, 4), 128, "real"),
        ("Tensor", (4, 4), 16, "real"),
        ("FakeTensor", (3,), 12, "blocked"),
    ]
    assert shown["fake"].row.reason.startswith("fake: it was made under a FakeTensorMode")


def test_a_sharded_model_is_shown_and_its_blocks_fold(monkeypatch):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.ModuleList(nn.Linear(4, 2, bias=False, device=META) for _ in range(3))
        for block in model:
            block.weight = nn.Parameter(distribute_tensor(block.weight, mesh, [Shard(0)]))
        shown = seen(model)
        assert [(r.cls, r.shape, r.nbytes, r.device) for r in shown.tensors] == [
            ("DTensor", (2, 4), 32, "meta")
        ] * 3
        assert [(each.label, each.count) for each in runs(shown.columns, 0)] == [("0 … 2", 3)]
    finally:
        distributed.destroy_process_group()


def test_looking_changes_nothing_and_keeps_nothing_alive(generators_stay):
    with torch.random.fork_rng(devices=[]):
        model = quirks()
    before = {name: (tensor, tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    shown = seen(model)
    shown.rows, shown.explain("embed")
    after = model.state_dict(keep_vars=True)
    assert all(
        after[name] is tensor and tensor._version == version for name, (tensor, version) in before.items()
    )
    assert not any(weakref.getweakrefcount(tensor) for tensor in after.values())
    assert not torch.cuda.is_initialized()
    ghosts = [weakref.ref(module) for module in model.modules()]
    del model, before, after
    gc.collect()
    assert not any(ghost() for ghost in ghosts)
    assert shown["embed.weight"].row.numel == 1600


def test_parameters_can_be_swapped_after_a_look():
    model = nn.Linear(2, 2, device=META)
    shown = seen(model)
    real = nn.Parameter(torch.ones(2, 2))
    torch.utils.swap_tensors(model.weight, real)
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    assert shown["weight"].row.device == "meta"


def test_a_recorded_model_is_ready_and_says_where_its_values_come_from():
    model = metaviz.build(nn.Sequential, nn.Linear(2, 2), nn.LayerNorm(2))
    assert {r.mark for r in tree(model)} == {"real"}
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    shown = tree(model)
    assert {r.mark for r in shown} == {"ready"}
    assert shown["1.weight"].row.reason.startswith("ones_ at ")
    metaviz.materialize(model, "1", device="cpu")
    assert [r.mark for r in tree(model)] == ["ready", "ready", "ready", "ready", "real", "real", "real"]


def test_a_model_that_was_not_recorded_is_ready_by_reset_or_blocked_with_the_way_out():
    shown = tree(Holder(fc=nn.Linear(2, 2, device=META), own=weight(2)))
    assert [r.mark for r in shown] == ["partial", "blocked", "ready", "ready", "ready"]
    assert [r.source for r in shown.tensors] == [None, "reset", "reset"]
    assert shown.row.reason.startswith("2 of its 3 tensors can be reset; blocked: own. ")
    assert shown["fc"].row.reason == (
        'its 2 tensors can be reset. Next: metaviz.materialize(model, "fc", device="cpu")'
    )
    assert shown["own"].row.reason == (
        "Holder has no reset_parameters, and no tape knows the tensor. "
        "Next: model = metaviz.build(type(model), *args)"
    )


def test_a_module_with_two_sources_names_both():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(2, 2)))
    model.append(nn.Linear(2, 2, device=META))
    assert tree(model).row.reason.startswith("its 4 tensors can be replayed or reset. ")


def test_a_tree_shows_the_marks_of_the_source_that_is_asked_for():
    model = metaviz.build(lambda: Holder(fc=nn.Linear(2, 2), own=nn.Parameter(torch.ones(2))))
    marks = {source: tree(model, source=source).totals.marks for source in ("auto", "replay", "reset")}
    assert marks == {"auto": {"ready": 3}, "replay": {"ready": 3}, "reset": {"ready": 2, "blocked": 1}}
    seen_by_reset = tree(model, source="reset")
    assert seen_by_reset["fc"].row.reason.endswith(
        'Next: metaviz.materialize(model, "fc", device="cpu", source="reset")'
    )
    assert seen_by_reset["own"].row.reason.endswith(
        'Next: metaviz.materialize(model, "own", source="replay")'
    )
    with pytest.raises(
        ValueError, match="source='magic' is not one of 'auto', 'checkpoint', 'replay', 'reset'"
    ):
        tree(model, source="magic")


def test_a_real_model_counts_as_torch_does(needs):
    model = tiny_llama(needs("transformers"), layers=3)
    shown = seen(model)
    assert shown.totals.numel == sum(p.numel() for p in model.parameters()) == 34_144
    assert shown["lm_head.weight"].row.tied_to == "model.embed_tokens.weight"
    assert {r.path for r in shown.modules} == {name for name, _ in model.named_modules()}
    assert shown["model.rotary_emb.inv_freq"].row.persistent is False
    for name, module in model.named_modules():
        assert shown[name].row.numel == sum(p.numel() for p in module.parameters())


def by_definition(module: nn.Module) -> tuple[int, int, int]:
    """Parameters, bytes and tensors below a module, each storage counted once, in the plainest way."""
    storages: dict[int, list[torch.Tensor]] = {}
    for part in module.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values()]:
            group = storages.setdefault(tensor.untyped_storage()._cdata, [])
            if not any(tensor is other for other in group):
                group.append(tensor)
    numel = nbytes = 0
    for group in storages.values():
        held = group[0].untyped_storage().nbytes()
        numel += min(sum(t.numel() for t in group if isinstance(t, nn.Parameter)), held // 4)
        nbytes += min(sum(min(t.nbytes, held) for t in group), held)
    return numel, nbytes, sum(map(len, storages.values()))


def every_slot(module: nn.Module) -> int:
    own = [min(p.numel(), p.untyped_storage().nbytes() // 4) for p in module._parameters.values()]
    return sum(own) + sum(map(every_slot, module._modules.values()))


@settings(max_examples=150)
@given(plans())
def test_sums_of_random_graphs_are_those_of_the_definition(plan):
    model = build(plan)
    shown = seen(model)
    for part in shown.modules:
        module = model.get_submodule(part.path)
        tensors = shown.columns.tally(shown.columns.index[part.path]).tensors
        assert (part.numel, part.nbytes, tensors) == by_definition(module)
        assert part.numel_by_path == every_slot(module)
        assert sum(shown[part.path].totals.devices.values()) == part.nbytes
