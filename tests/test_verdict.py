"""Verdicts: for every tensor who can give it values, and whether these are the values of an ordinary build."""

from __future__ import annotations

import cases_contract  # noqa: F401
import cases_values  # noqa: F401
import pytest
import torch
from cases import CASES
from torch import nn

import metaviz
from metaviz.core.verdict import Verdict, together

BUILT = ["built", "on meta"]


def model_of(case, how):
    if how == "built":
        return metaviz.build(case.make)
    if case.on_meta is None:
        with torch.device("meta"), pytest.raises((RuntimeError, NotImplementedError)):
            case.make()
        return None
    with torch.device("meta"):
        return case.make()


def word(verdict: Verdict, known: bool) -> str:
    """The expectation that a verdict of reset meets; without a tape, faithful or not cannot be known."""
    if verdict.kind in ("real", "lazy"):
        return verdict.kind
    if not verdict.can:
        assert verdict.faithful is None
        return f"no {verdict.kind}"
    if known:
        return verdict.kind + {True: "", False: "!"}[verdict.faithful]
    assert verdict.faithful is None or verdict.reason == "no elements"
    return verdict.kind


@pytest.mark.parametrize("how", BUILT)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_every_tensor_gets_the_right_verdict(case, how):
    model = model_of(case, how)
    if model is None:
        return
    draws = torch.get_rng_state()
    known, tree = how == "built", metaviz.tree(model)
    expected = dict(case.expected) if known else {**case.expected, **case.on_meta}
    by_path = {row.path: row for row in tree.tensors}
    found = {path: tree.verdict(path, "reset") for path in by_path}
    right = expected if known else {path: what.removesuffix("!") for path, what in expected.items()}
    assert {path: word(verdict, known) for path, verdict in found.items()} == right
    for path, what in right.items():
        row, reset = by_path[path], found[path]
        replay, auto = tree.verdict(path, "replay"), tree.verdict(path)
        if what in ("real", "lazy"):
            assert (row.mark, row.source) == ("real" if what == "real" else "blocked", None)
        elif known:
            assert (replay.can, replay.faithful, replay.kind) == (True, True, "replay")
            assert (row.mark, row.source, auto) == ("ready", "replay", replay)
        else:
            assert (replay.can, replay.kind) == (False, "unknown")
            assert (row.mark, row.source) == (("ready", "reset") if reset.can else ("blocked", None))
            assert auto.can == reset.can
        assert row.reason
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_who_cannot_says_why_and_what_to_do(case):
    model = metaviz.build(case.make)
    tree = metaviz.tree(model)
    for path, what in case.expected.items():
        verdict = tree.verdict(path, "reset")
        assert "\n" not in verdict.reason
        if what.startswith("no ") or what.endswith("!"):
            assert verdict.fix == f'metaviz.materialize(model, "{path}", source="replay")'


def test_offloaded_values_are_not_replaced(needs):
    accelerate = needs("accelerate")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    accelerate.cpu_offload(model, torch.device("cpu"))
    tree = metaviz.tree(model)
    for path in ("0.weight", "1.bias"):
        for source in ("auto", "reset", "replay"):
            verdict = tree.verdict(path, source)
            assert (verdict.can, verdict.kind) == (False, "offloaded")
            assert verdict.fix
    assert {row.mark for row in tree.tensors if "_hf_hook" not in row.path} == {"blocked"}


def test_the_copy_that_a_load_on_meta_loses_is_known_to_a_recording_only():
    (case,) = (case for case in CASES if str(case) == "a_checkpoint_in_the_constructor")
    model = metaviz.build(case.make)
    verdict = metaviz.tree(model).verdict("backbone.weight", "reset")
    assert "The constructor loaded other values" in verdict.reason


def test_a_reset_that_draws_never_claims_to_be_identical():
    model = metaviz.build(lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    verdict = metaviz.tree(model).verdict("0.weight", "reset")
    assert verdict.faithful is True
    assert verdict.reason.endswith("drawn anew from the distribution of an ordinary build")
    fixed = metaviz.tree(model).verdict("1.weight", "reset")
    assert fixed.reason.endswith("as in an ordinary build")


def test_the_marks_can_be_those_of_one_source():
    model = metaviz.build(lambda: nn.ParameterDict({"w": nn.Parameter(torch.ones(2))}))
    assert metaviz.tree(model, source="replay").row.mark == "ready"
    assert metaviz.tree(model, source="reset").row.mark == "blocked"
    with pytest.raises(
        ValueError, match="source='eager' is not one of 'auto', 'checkpoint', 'replay', 'reset'"
    ):
        metaviz.tree(model, source="eager")


def test_a_value_that_is_edited_after_the_build_is_not_reset_unasked():
    model = metaviz.build(nn.Linear, 3, 3)
    with torch.no_grad():
        model.weight.zero_()
    tree = metaviz.tree(model)
    assert (tree.verdict("weight").can, tree.verdict("weight").kind) == (False, "edited")
    assert tree.verdict("weight", "reset").can


def verdict(can=True, faithful=True, source="reset", reason="why", kind="reset", fix=None):
    return Verdict(can, faithful, reason, fix, source if can else None, kind)


def test_a_module_can_if_all_of_it_can():
    whole = together([verdict(), verdict(source="replay")], "auto")
    assert (whole.can, whole.faithful, whole.source) == (True, True, "reset, replay")
    assert whole.reason == "All 2 tensors can be given values by reset, replay."


def test_a_module_is_as_faithful_as_the_worst_of_it():
    assert together([verdict(), verdict(faithful=None)], "reset").faithful is None
    wrong = together(
        [verdict(faithful=None), verdict(faithful=False, reason="It differs", fix="f()")], "reset"
    )
    assert (wrong.faithful, wrong.fix) == (False, "f()")
    assert "1 of them come out otherwise than in an ordinary build: It differs" in wrong.reason


def test_a_module_that_cannot_counts_and_names_the_commonest_reason():
    rare = verdict(False, None, reason="rare", kind="rare")
    often = verdict(False, None, reason="often", kind="often")
    found = together([verdict(), rare, often, often], "reset")
    assert (found.can, found.source) == (False, None)
    assert found.reason == "3 of 4 tensors cannot be given values by reset: often (2 of them)"


def test_a_module_without_tensors_to_fill_has_nothing_to_be_given():
    found = together([], "reset")
    assert (found.can, found.kind) == (False, "real")
