"""Hugging Face models: built with metaviz, given values whole and in part, and compared with an ordinary build."""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Callable, Iterable, Iterator

import huggingface
import pytest
import torch
from huggingface import MIB, Case
from huggingface_exceptions import UNINITIALIZED

# Small enough for every change.
FEW = {
    "text": "bert gpt2 llama gemma3_text deberta-v2 xlnet bloom reformer modernbert",
    "mixture of experts": "mixtral qwen3_moe deepseek_v3 gpt_oss",
    "state space": "mamba mamba2 jamba rwkv recurrent_gemma",
    "encoder and decoder": "t5 bart switch_transformers",
    "vision": "vit swin convnext resnet dinov2 segformer sam",
    "audio": "wav2vec2 whisper encodec mimi audio-spectrogram-transformer",
    "detection": "deformable_detr rt_detr owlvit",
    "several modes, series": "clip llava blip-2 patchtst",
}
FEW_CASES = [Case(name, limit_nbytes=16 * MIB) for names in FEW.values() for name in names.split()]
# Made as from_config(config, dtype=...) makes them: under another default dtype than values are drawn under later.
FEW_CASES += [Case(name, "", 16 * MIB, "bfloat16") for name in ("llama", "mamba2", "tipsv2_dpt")]


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, needs) -> Iterator[Callable[[Case], dict]]:
    """``checked(case)`` is what a process of its own found; those of all chosen tests run two at a time."""
    needs("transformers")
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [given["case"] for given in params if isinstance(given.get("case"), Case)]
    with huggingface.check_all(chosen) as futures:
        yield lambda case: futures[case].result()


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_a_hugging_face_model_is_bit_identical_to_its_ordinary_build(case, checked):
    found = checked(case)
    assert found["outcome"] == "same", found
    assert found["nbytes"] > 0


def _letters(test: Callable) -> Callable:
    return pytest.mark.slow(pytest.mark.parametrize("letter", string.ascii_lowercase)(test))


def _wrong(cases: Iterable[Case]) -> dict[str, dict]:
    """What is not as in an ordinary build; and what an ordinary build leaves uninitialized and is not written down."""
    with huggingface.check_all(cases) as futures:
        found = {case: future.result() for case, future in futures.items()}
    fine = {"same", "not makeable", "no class", "too large"}
    written_down = {case for case in found if str(case._replace(dtype="")) in UNINITIALIZED}
    return {
        str(case): report
        for case, report in found.items()
        if report["outcome"] not in fine or bool(report.get("blocked")) != (case in written_down)
    }


def _types(letter: str) -> list[str]:
    return [name for name in huggingface.model_types() if name.lower().startswith(letter)]


@_letters
def test_every_type_that_this_machine_can_make_is_bit_identical_to_its_ordinary_build(letter, needs):
    needs("transformers")
    assert not _wrong(Case(name) for name in _types(letter))


@_letters
def test_every_type_is_bit_identical_in_bfloat16(letter, needs):
    needs("transformers")
    assert not _wrong(Case(name, "", 16 * MIB, "bfloat16") for name in _types(letter))


@_letters
def test_every_head_that_this_machine_can_make_is_bit_identical_to_its_ordinary_build(letter, needs):
    needs("transformers")
    named = [(name, head) for name in _types(letter) for head in huggingface.heads(name)[1:]]
    assert not _wrong(Case(name, head, 32 * MIB) for name, head in named)


def _numbered_builds() -> Callable[[], torch.nn.Module]:
    """A constructor that an ordinary build and ours cannot agree on: each call gives the next number."""
    calls = itertools.count()

    def make() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        torch.nn.init.constant_(model[0].bias, next(calls))
        return model

    return make


def test_the_comparison_finds_a_constructor_that_gives_other_values_each_time():
    agreeing = functools.partial(torch.nn.Bilinear, 3, 2, 4)
    assert huggingface.compare(agreeing, "agreeing")["outcome"] == "same"
    found = huggingface.compare(_numbered_builds(), "numbered")
    assert found["outcome"] == "different"
    assert found["differences"] == ["alone, 0.bias: other values", "0.bias: other values"]


def test_the_comparison_finds_one_wrong_bit_and_a_lost_tie():
    ordinary, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.load_state_dict(ordinary.state_dict())
    expected, found = huggingface.tensors(ordinary), huggingface.tensors(other)
    assert huggingface.differences_in_shape(expected, found) == []
    assert huggingface.differences_in_values(expected, found) == []
    found["bias"].data.view(torch.int32)[0] ^= 1
    assert huggingface.differences_in_values(expected, found) == ["bias: other values"]
    tied = {"one": expected["bias"], "two": expected["bias"]}
    apart = {"one": expected["bias"], "two": expected["bias"].detach().clone().requires_grad_()}
    assert huggingface.differences_in_shape(tied, apart)
