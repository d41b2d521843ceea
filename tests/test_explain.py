"""What a tree tells about one module or tensor: sources, Lightning, and code that does what it says."""

from __future__ import annotations

import re

import pytest
import torch
import zoo
from torch import nn
from trees import META, Holder, linear, seen

import metaviz
from metaviz.core.tree import tree
from metaviz.errors import UnknownPath


class Norm(nn.Module):
    """No reset_parameters."""

    def __init__(self, width: int = 4, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), scale))
        self.register_buffer("steps", torch.arange(width) / 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Norm()) for _ in range(2))
        nn.init.normal_(self.blocks[0][0].weight, 0, 0.02)


def flat(text: str) -> str:
    return " ".join(text.split())


def code_of(text: str) -> str:
    """The code at the end of an explanation."""
    return re.split(r"for Lightning.*?:\n", text, maxsplit=1, flags=re.DOTALL)[1]


def test_a_tensor_that_reset_cannot_give_says_who_can_and_what_to_paste():
    model = metaviz.build(Net)
    lines = tree(model).explain("blocks.1.1.weight").splitlines()
    line = Norm.__init__.__code__.co_firstlineno + 2
    assert lines[:5] == [
        "blocks.1.1.weight (Parameter) is a parameter (4,) in float32, 16 B on meta.",
        f"replay     yes: fill_ at test_explain.py:{line}",
        "reset      no. Norm has no reset_parameters",
        "Lightning  FSDP stops before it; ModelParallel leaves it uninitialized",
        'Next: metaviz.materialize(model, "blocks.1.1.weight", device="cpu")',
    ]
    assert lines[5:7] == ["", "A reset_parameters for every Norm, for reset and for Lightning:"]


def test_the_code_to_paste_makes_reset_give_the_very_values(needs):
    model = metaviz.build(Net)

    class Patched(Norm):
        pass

    code = code_of(tree(model).explain("blocks.1.1"))
    where = f"from {__name__} import Norm\n"
    assert code.startswith(where)
    exec(code.removeprefix(where), {"torch": torch, "Norm": Patched})
    with META:
        other = Holder(norm=Patched())
    assert tree(other).totals.marks == {"ready": 2}
    metaviz.materialize(other)
    assert torch.equal(other.norm.weight, torch.ones(4))
    assert torch.equal(other.norm.steps, torch.arange(4) / 2)
    with META:
        other = Holder(norm=Patched())
    needs("lightning")
    from lightning.fabric.utilities.init import _materialize_meta_tensors

    _materialize_meta_tensors(other, torch.device("cpu"))
    assert torch.equal(other.norm.weight, torch.ones(4))


def test_a_tensor_that_reset_gives_other_values_says_so():
    model = metaviz.build(Net)
    told = flat(tree(model).explain("blocks.0.0.weight"))
    assert "reset with other values: Linear.reset_parameters(): uniform_(-0.5, 0.5) at linear.py:" in told
    assert "An ordinary build has something else: normal_(0, 0.02) at test_explain.py:" in told
    assert "Lightning both: gives it other values than an ordinary build" in told
    right = flat(tree(model).explain("blocks.1.0.weight"))
    assert "reset yes: Linear.reset_parameters(): uniform_(-0.5, 0.5)" in right
    assert "drawn anew from the distribution of an ordinary build" in right
    assert "def reset_parameters" not in told + right


def test_a_module_says_how_many_and_gives_code_for_each_class_below():
    model = metaviz.build(Net)
    told = tree(model).explain()
    for line in (
        "replay     All 8 tensors can be given values by replay",
        "reset      4 of 8 tensors cannot be given values by reset: Norm has no reset_parameters",
        "A reset_parameters for every Norm, for reset and for Lightning:",
        "Norm.reset_parameters = reset_parameters",
    ):
        assert line in told.splitlines()
    assert told.count("def reset_parameters") == 1


def test_code_that_fits_one_module_of_a_class_only_says_so():
    model = metaviz.build(lambda: Holder(one=Norm(), two=Norm(scale=0.5)))
    told = tree(model).explain("two.weight")
    assert "for reset and for Lightning; as two was built, while others got other values:" in flat(told)
    assert "torch.nn.init.constant_(self.weight, 0.5)" in told


def test_without_a_tape_there_is_no_code_and_doubt_only_where_somebody_elses_constructor_ran():
    with META:
        model = Net()
    told = flat(tree(model).explain("blocks.1.1.weight"))
    assert "replay no. No tape knows this tensor" in told
    assert "def reset_parameters" not in told
    assert told.endswith("Next: model = metaviz.build(type(model), *args)")
    assert "reset perhaps with other values: Linear" in flat(tree(model).explain("blocks.0.0.weight"))
    doubtful = flat(tree(model).explain("blocks.0.0"))
    assert "by reset. Whether they come out as in an ordinary build is not known" in doubtful
    alone = linear()
    assert "reset yes: Linear.reset_parameters()" in flat(tree(alone).explain("weight"))
    assert "not known" not in flat(tree(alone).explain())
    assert "Lightning ok" in flat(tree(alone).explain())


def test_no_code_is_offered_for_a_class_of_torch():
    model = metaviz.build(lambda: Holder(attention=nn.MultiheadAttention(4, 2)))
    told = tree(model).explain("attention.in_proj_weight")
    assert "def reset_parameters" not in told
    assert "Lightning  both: leaves it uninitialized" in told


def test_a_class_that_only_its_model_initializes_gets_code_for_lightning():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()

        def _init_weights(self, module):
            if isinstance(module, Norm):
                module.weight.data.fill_(1.0)
                module.steps.copy_(torch.arange(4) / 2)

    model = metaviz.build(Model)
    told = tree(model).explain("norm.weight")
    assert "reset      yes: Model._init_weights():" in told
    assert "torch.nn.init.ones_(self.weight)" in told


def test_what_holds_values_or_is_no_module_is_told_in_a_sentence_and_has_no_sources():
    model = Holder(a=nn.Linear(2, 3))
    assert tree(model).explain("a.weight") == (
        "a.weight (Parameter) is a parameter (3, 2) in float32, 24 B on cpu. Holds values on cpu."
    )
    model._modules["odd"] = 7
    assert tree(model).explain("odd").splitlines()[0].endswith("This is not a torch.nn.Module.")


def test_a_tree_whose_model_is_gone_still_tells_what_it_knows():
    shown = seen(Holder(a=nn.Linear(2, 3, device=META)))
    assert flat(shown.explain("a.weight")) == (
        "a.weight (Parameter) is a parameter (3, 2) in float32, 24 B on meta. Replay gives its values: "
        'a test says so. Next: metaviz.materialize(model, "a.weight", device="cpu")'
    )
    assert flat(shown.explain("a")) == (
        "a (Linear) is a module of 9 parameters in 2 tensors, 36 B on meta. Its 2 tensors can be replayed. "
        'Next: metaviz.materialize(model, "a", device="cpu")'
    )
    assert shown["a"].explain() == shown.explain("a")


def test_an_unknown_path_is_refused():
    model = linear()
    with pytest.raises(UnknownPath, match="The nearest is 'weight'"):
        tree(model).explain("wieght")


def test_an_explanation_is_a_str_that_shows_its_lines_and_html_with_code_blocks():
    model = metaviz.build(Net)
    told = tree(model).explain("blocks.1.1")
    assert isinstance(told, str)
    assert repr(told) == str(told)
    page = told._repr_html_()
    assert page.count("<pre><code>") == 2
    assert f"<pre><code>from {__name__} import Norm\n\n" in page
    assert "def reset_parameters(self):\n    torch.nn.init.ones_(self.weight)" in page


def test_names_in_an_explanation_are_text_and_never_markup():
    evil = "<img src=x onerror=alert(1)>\n\u202e"
    model = metaviz.build(lambda: Holder(**{evil: type("<b>Cls", (Norm,), {})()}))
    told = tree(model).explain(f"{evil}.weight")
    assert told.replace("\n", "").isprintable()
    assert "<img" not in told._repr_html_()
    assert "<b>" not in told._repr_html_()
    assert "&lt;img src=x onerror=alert(1)&gt;" in told._repr_html_()


def test_explaining_changes_nothing_of_the_model(generators_stay):
    model = metaviz.build(Net)
    before = {
        name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    spaces = [dict(vars(module)) for module in model.modules()]
    shown = tree(model)
    for row in shown:
        shown.explain(row.path)
    after = {name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert after == before
    assert [dict(vars(module)) for module in model.modules()] == spaces


def test_a_tied_tensor_is_told_under_each_of_its_paths():
    def make():
        model = Holder(embed=nn.Embedding(3, 2), head=nn.Linear(2, 3, bias=False))
        model.head.weight = model.embed.weight
        return model

    model = metaviz.build(make)
    shown = tree(model)
    told = {path: shown.explain(path) for path in ("embed.weight", "head.weight")}
    for words in (
        "replay     yes: normal_ at test_explain.py:",
        "reset      yes: ",
        "Lightning  both: unties it",
    ):
        assert words in told["embed.weight"]
        assert words in told["head.weight"]
    assert "the same tensor as embed.weight" in flat(shown.explain("head.weight"))


class Touchy(type):
    """A metaclass that raises on hasattr."""

    def __getattr__(cls, name):
        raise RuntimeError("leave me alone")


def test_a_class_whose_metaclass_raises_on_hasattr_is_explained_all_the_same():
    class Shy(Norm, metaclass=Touchy):
        pass

    model = metaviz.build(lambda: Holder(shy=Shy()))
    with pytest.raises(RuntimeError):
        hasattr(type(model.shy), "reset_parameters")
    told = tree(model).explain("shy.weight")
    assert "reset      no. Shy has no reset_parameters" in told
    assert "torch.nn.init.ones_(self.weight)" in told


@pytest.mark.parametrize("trap", zoo.TRAPS, ids=lambda trap: trap.__name__)
@pytest.mark.parametrize("source", ["auto", "reset"])
def test_every_row_of_every_trap_has_an_explanation_and_the_trap_has_its_trouble(trap, source):
    model = metaviz.build(trap)
    shown = tree(model, source=source)
    for row in shown:
        told = shown.explain(row.path)
        assert told.replace("\n", "").isprintable()
        assert told.startswith(row.path)
    report = shown.trouble()
    blocked = {row.path for row in shown.tensors if row.mark == "blocked" and row.tied_to is None}
    assert blocked <= {path for entry in report for path in entry.paths}
