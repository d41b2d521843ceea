"""What kinds of checkpoints there are, and what is seen of each before a value is read."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import metaviz
from metaviz.errors import BadCheckpoint, UnknownPath

STATE = {"fc.weight": torch.arange(12.0).view(4, 3), "fc.bias": torch.ones(4, dtype=torch.float16)}


def shards(folder: Path, suffix: str = ".safetensors") -> Path:
    """Two shards and their index."""
    names = [f"model-0000{k}-of-00002{suffix}" for k in (1, 2)]
    for name, (key, value) in zip(names, STATE.items(), strict=True):
        (save_file if suffix == ".safetensors" else torch.save)({key: value}, folder / name)
    index = "model.safetensors.index.json" if suffix == ".safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"weight_map": dict(zip(STATE, names, strict=True))}))
    return folder / index


def check(source, count: int = 2) -> metaviz.Checkpoint:
    checkpoint = metaviz.checkpoint(source)
    assert len(checkpoint) == count
    for name, value in STATE.items():
        stored = checkpoint[name]
        assert (stored.shape, stored.dtype, stored.nbytes) == (tuple(value.shape), value.dtype, value.nbytes)
        assert torch.equal(stored.load(), value)
    return checkpoint


def test_a_safetensors_file_a_torch_file_and_a_state_dict(tmp_path):
    save_file(STATE, tmp_path / "a.safetensors")
    torch.save(STATE, tmp_path / "a.pt")
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert check(tmp_path / "a.safetensors").format == "safetensors"
    assert check(str(tmp_path / "a.pt")).summary == "a.pt: 2 tensors, 56 B (torch)"
    assert "only be read as a whole" in check(tmp_path / "old.bin").notes[0]
    assert check(STATE).summary == "the state dict: 2 tensors, 56 B (state dict)"
    assert check(check(STATE)).path is None


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_with_an_index_are_one_checkpoint_by_folder_and_by_index(tmp_path, suffix):
    index = shards(tmp_path, suffix)
    for path in (index, tmp_path):
        assert len(check(path).files) == 2
    index.unlink()
    assert "There is no index" in check(tmp_path).notes[0]


def test_a_missing_shard_takes_only_its_own_tensors_away(tmp_path):
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    checkpoint = metaviz.checkpoint(tmp_path)
    assert checkpoint.notes == ("1 file of its 2 missing: model-00002-of-00002.safetensors.",)
    assert checkpoint["fc.bias"].trouble == "its file 'model-00002-of-00002.safetensors' is missing"
    assert checkpoint.nbytes == sum(each.nbytes for each in checkpoint.values() if each.shape is not None)
    model = metaviz.build(lambda: nn.ModuleDict({"fc": nn.Linear(3, 4)}))
    metaviz.materialize(model, "fc.weight", checkpoint=checkpoint)
    assert torch.equal(model["fc"].weight, STATE["fc.weight"])
    with pytest.raises(
        metaviz.MetavizError, match=r"its file 'model-00002-of-00002\.safetensors' is missing"
    ):
        metaviz.materialize(model, "fc.bias", checkpoint=checkpoint)
    assert model["fc"].bias.is_meta


def test_names_without_a_suffix_and_links_are_followed_as_caches_have_them(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file(STATE, tmp_path / "blobs" / "1f3a")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "1f3a")
    check(tmp_path / "blobs" / "1f3a")
    check(tmp_path / "snapshot")


def test_what_trainers_put_beside_the_weights_is_no_second_checkpoint(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "scaler.pt"):
        torch.save({"x": torch.ones(1)}, tmp_path / name)
    check(tmp_path)


@pytest.mark.parametrize("key", ["state_dict", "model", "module", "whatever"])
def test_a_nested_state_dict_is_found(tmp_path, key):
    content = {"epoch": 3, key: {**STATE, "version": 2}, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}
    torch.save(content, tmp_path / "a.ckpt")
    notes = check(tmp_path / "a.ckpt").notes
    assert notes == (
        f"Its tensors are those under {key!r}.",
        "It has entries that are no tensors, too: version.",
    )


def test_of_several_state_dicts_the_usual_one_is_taken_and_any_can_be_chosen(tmp_path):
    other = {name: value + 1 for name, value in STATE.items()}
    torch.save({"ema": other, "model": STATE}, tmp_path / "a.pt")
    check(tmp_path / "a.pt")
    assert torch.equal(
        metaviz.checkpoint(tmp_path / "a.pt", inside="ema")["fc.bias"].load(), STATE["fc.bias"] + 1
    )
    with pytest.raises(BadCheckpoint, match=r"under 'emma', but under 'ema', 'model'\. Next: .*inside='ema'"):
        metaviz.checkpoint(tmp_path / "a.pt", inside="emma")
    torch.save({"generator": STATE, "critic": STATE}, tmp_path / "gan.pt")
    with pytest.raises(BadCheckpoint, match=r"under 'generator', 'critic': which are meant\? Next: "):
        metaviz.checkpoint(tmp_path / "gan.pt")


def test_a_checkpoint_of_lightning(tmp_path, needs):
    lightning = needs("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, width: int):
            super().__init__()
            self.save_hyperparameters()
            self.fc = nn.Linear(width, 4)

        def training_step(self, batch, _):
            return self.fc(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = Module(3)
    options = {"max_steps": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False, **options
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 3)))
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    model = metaviz.build(Module, 3)
    report = metaviz.materialize(model, checkpoint=tmp_path / "last.ckpt")
    assert report.match.unexpected == () and report.match.missing == ()
    assert torch.equal(model.fc.weight, module.fc.weight)


def test_a_folder_without_a_checkpoint_says_what_was_looked_for_and_where_one_is(tmp_path):
    with pytest.raises(
        BadCheckpoint, match=r"no checkpoint in .*looked for \*\.safetensors, .*It is empty\."
    ):
        metaviz.checkpoint(tmp_path)
    (tmp_path / "step-9").mkdir()
    save_file(STATE, tmp_path / "step-9" / "model.safetensors")
    step = os.path.join(str(tmp_path), "step-9")
    with pytest.raises(BadCheckpoint) as caught:
        metaviz.checkpoint(tmp_path)
    assert str(caught.value).endswith(f"Next: metaviz.checkpoint({step!r})")


def test_two_checkpoints_in_one_folder_are_asked_about(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors")
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        BadCheckpoint, match=r"2 checkpoints in .*: model\.safetensors, pytorch_model\.bin\. Which"
    ):
        metaviz.checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["../x.safetensors", "/etc/passwd", "..\\x", "C:\\x", "a/../../x", "", 3])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path, place):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": place}}))
    with pytest.raises(BadCheckpoint, match=r"outside of its folder: nothing was read\. Next: "):
        metaviz.checkpoint(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "{", "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadCheckpoint, match="is no index"):
        metaviz.checkpoint(tmp_path)


def test_an_index_and_shards_that_do_not_belong_together_are_refused(tmp_path):
    save_file({"other": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": "a.safetensors"}})
    )
    with pytest.raises(BadCheckpoint, match="they do not belong together"):
        metaviz.checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello, this is no checkpoint")
    with pytest.raises(BadCheckpoint, match=r"begins with b'hello, t': that is neither"):
        metaviz.checkpoint(tmp_path / "a.txt")
    with pytest.raises(BadCheckpoint, match=r"No such file or directory\. Next: import os; os\.listdir"):
        metaviz.checkpoint(tmp_path / "nowhere.pt")
    with pytest.raises(TypeError, match="A checkpoint is a path or a state dict, and this is of type int"):
        metaviz.checkpoint(3)
    with pytest.raises(BadCheckpoint, match="The state dict holds no tensors by name"):
        metaviz.checkpoint({})


def test_a_name_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(UnknownPath, match=r"no tensor 'fc\.wait'\. The nearest is 'fc\.weight'"):
        metaviz.checkpoint(STATE)["fc.wait"]
    assert "fc.wait" not in metaviz.checkpoint(STATE)


def test_entries_on_meta_hold_no_values_and_say_so():
    state = nn.Linear(2, 2, device="meta").state_dict()
    checkpoint = metaviz.checkpoint(state)
    assert {each.trouble for each in checkpoint.values()} == {"it is on meta, so there are no values in it"}
    assert checkpoint.nbytes == 0
    real = nn.Linear(2, 2)
    before = real.weight.detach().clone()
    report = metaviz.materialize(real, checkpoint=state)
    assert report.kept == ("weight", "bias") and torch.equal(real.weight, before)


@pytest.mark.parametrize("form", ["safetensors", "shards", "state dict"])
def test_inside_is_refused_where_there_is_nothing_to_choose_from(tmp_path, form):
    shards(tmp_path)
    save_file(STATE, tmp_path / "one.safetensors")
    source = {
        "safetensors": tmp_path / "one.safetensors",
        "shards": tmp_path / "model.safetensors.index.json",
    }
    with pytest.raises(
        BadCheckpoint, match=r"so inside='fc' means nothing\. Next: .*key_map=\[\('fc', ''\)\]"
    ):
        metaviz.checkpoint(source.get(form) or metaviz.checkpoint(STATE), inside="fc")


def test_each_layer_of_nested_dicts_can_be_chosen(tmp_path):
    torch.save({"model": {"encoder": STATE, "decoder": {"w": torch.ones(2)}}, "step": 3}, tmp_path / "a.pt")
    check(metaviz.checkpoint(tmp_path / "a.pt", inside="model.encoder"))
    assert list(metaviz.checkpoint(tmp_path / "a.pt", inside="model.decoder")) == ["w"]
    with pytest.raises(BadCheckpoint, match=r"under 'model\.encoder', 'model\.decoder': which are meant"):
        metaviz.checkpoint(tmp_path / "a.pt")


def test_dicts_within_dicts_without_end_are_no_trouble():
    ring: dict = dict(STATE)
    ring["self"] = ring
    assert len(metaviz.checkpoint(ring)) == 2
    deep: dict = dict(STATE)
    for _ in range(10_000):
        deep = {"deeper": deep}
    with pytest.raises(BadCheckpoint, match="holds no tensors by name"):
        metaviz.checkpoint(deep)


@pytest.mark.parametrize(
    ("make", "trouble"),
    [
        (lambda: torch.eye(2).to_sparse(), "it is sparse or quantized"),
        (lambda: torch.eye(2).to_sparse_csr(), "it is sparse or quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "it is lazy or nested"),
        (lambda: nn.LazyLinear(2).weight, "it is lazy or nested, and has no shape"),
        (
            lambda: torch.eye(2).as_subclass(type("Mine", (torch.Tensor,), {})),
            "it is a Mine, which has no plain",
        ),
    ],
    ids=["sparse", "csr", "nested", "lazy", "subclass"],
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|Lazy)")
def test_a_tensor_without_plain_bytes_takes_only_itself_away(make, trouble):
    checkpoint = metaviz.checkpoint({"odd": make(), **STATE})
    assert checkpoint["odd"].trouble.startswith(trouble)
    model = metaviz.build(lambda: nn.ModuleDict({"fc": nn.Linear(3, 4)}))
    report = metaviz.materialize(model, checkpoint=checkpoint)
    assert report.match.unexpected == ("odd",)
    assert torch.equal(model["fc"].weight, STATE["fc.weight"])


def test_state_dicts_of_any_mapping_and_with_parameters_are_taken():
    fc = nn.Linear(3, 4)
    fc(torch.ones(1, 3)).sum().backward()
    for state in (dict(fc.named_parameters()), types.MappingProxyType(fc.state_dict())):
        model = metaviz.build(nn.Linear, 3, 4)
        metaviz.materialize(model, checkpoint=state)
        assert torch.equal(model.weight, fc.weight)
        assert model.weight.is_leaf and model.weight.grad is None
        assert model.weight.data_ptr() != fc.weight.data_ptr()


def test_a_stored_tensor_is_read_to_the_cpu_whatever_the_default_device_is(tmp_path):
    save_file(STATE, tmp_path / "a.safetensors")
    torch.save(STATE, tmp_path / "a.pt")
    for source in (tmp_path / "a.safetensors", tmp_path / "a.pt", STATE):
        with torch.device("meta"):
            value = metaviz.checkpoint(source)["fc.weight"].load()
        assert torch.equal(value, STATE["fc.weight"])
