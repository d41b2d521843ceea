"""Folding: what becomes one line, what stands out, and what room there is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from torch import nn
from trees import META, Holder, build, linear, meta, mixture, no, plans, seen, stack, weight, yes

from metaviz.core.fold import INLINE_RUNS, Branch, hidden, outline, runs


def labels(model: nn.Module, answer=yes, **options) -> list[str]:
    """Each line as its label, indented by its level, with how many rows it stands for if it is a run."""
    shown = seen(model, answer)
    top = outline(shown.columns, 0, **{"lines": 200, **options})
    return [f"{'  ' * level}{each.label}" + f" ×{each.count}" * (each.count > 1) for level, each in walk(top)]


def walk(branch: Branch, level: int = 0):
    yield level, branch
    for each in branch.branches or []:
        yield from walk(each, level + 1)


def test_repeated_blocks_are_one_line_with_the_structure_of_the_first():
    assert labels(stack(80)) == [
        "",
        "  layers.0 … 79 ×80",
        "    norm",
        "      weight",
        "      bias",
        "    mlp",
        "      weight",
        "      bias",
        "  head",
        "    weight",
        "    bias",
    ]


def test_a_materialized_block_stands_out_of_its_run():
    model = stack(80)
    model.layers[3].to_empty(device="cpu")
    lines = labels(model, depth=1)
    assert lines == ["", "  layers.0 … 2 ×3", "  layers.3", "  layers.4 … 79 ×76", "  head"]


def test_a_block_with_another_shape_mark_or_dtype_stands_out():
    for change in (
        lambda block: block.mlp.register_parameter("bias", weight(5)),
        lambda block: block.half(),
        lambda block: block.mlp.requires_grad_(False),
        lambda block: block.register_module("extra", nn.ReLU()),
    ):
        model = stack(5)
        change(model.layers[2])
        assert labels(model, depth=1)[1:4] == ["  layers.0 … 1 ×2", "  layers.2", "  layers.3 … 4 ×2"]
    model = stack(5)
    odd = model.layers[2].mlp.weight
    answers = lambda tensor, *rest: (no if tensor is odd else yes)(tensor, *rest)  # noqa: E731
    assert labels(model, answers, depth=1)[1:4] == ["  layers.0 … 1 ×2", "  layers.2", "  layers.3 … 4 ×2"]


def test_only_neighbours_that_are_numbered_on_fold():
    parts = {name: linear() for name in ("q", "k", "block1", "block2", "block3", "block5", "other6")}
    assert labels(Holder(**parts), depth=1) == ["", "  q", "  k", "  block1 … 3 ×3", "  block5", "  other6"]
    assert labels(nn.Sequential(linear(), nn.ReLU(), linear()), depth=1) == ["", "  0", "  1", "  2"]
    assert labels(Holder(**{"00": linear(), "01": linear()}), depth=1) == ["", "  00", "  01"]
    assert labels(Holder(**{"9" * 5000: linear(), "x": linear()}), depth=1) == ["", f"  {'9' * 5000}", "  x"]


def test_parameters_and_attributes_fold_too():
    model = Holder(scales=nn.ParameterList(weight(3) for _ in range(50)))
    model.cache = {"cos": [meta(2) for _ in range(9)]}
    assert labels(model) == ["", "  cache['cos'][0 … 8] ×9", "  scales", "    0 … 49 ×50"]


def test_blocks_with_a_tie_inside_fold_and_those_tied_to_different_places_do_not():
    def tied():
        fc = linear()
        return Holder(a=fc, b=Holder(w=fc.weight))

    assert labels(nn.ModuleList(tied() for _ in range(4)), depth=1) == ["", "  0 … 3 ×4"]
    one, two = weight(2, 2), weight(2, 2)
    model = Holder(one=one, two=two, layers=nn.ModuleList(Holder(w=w) for w in (one, one, two, two)))
    assert labels(model) == ["", "  one", "  two", "  layers.0 … 1 ×2", "    w", "  layers.2 … 3 ×2", "    w"]
    model.layers = nn.ModuleList(Holder(x=Holder(y=Holder(w=w))) for w in (one, one, two, two))
    assert labels(model, depth=1)[3:] == ["  layers.0 … 1 ×2", "  layers.2 … 3 ×2"]


def test_a_block_with_a_tie_inside_stands_out_among_those_without():
    def pair(tied):
        w = weight(3)
        return Holder(a=Holder(w=w), b=Holder(w=w if tied else weight(3)))

    assert labels(nn.ModuleList(map(pair, (0, 0, 1, 1, 0))), depth=1) == [
        "",
        "  0 … 1 ×2",
        "  2 … 3 ×2",
        "  4",
    ]


def test_one_module_in_many_slots_folds_after_its_first():
    block = linear()
    assert labels(nn.ModuleList([block] * 12), depth=1) == ["", "  0", "  1 … 11 ×11"]


def test_what_could_not_be_looked_at_keeps_a_line_of_its_own():
    class Hostile:
        @property
        def __dict__(self):
            raise RuntimeError

    model = nn.Module()
    model.things = [Hostile(), Hostile()]
    assert labels(model) == ["", "  things[0]", "  things[1]"]


def test_a_module_with_one_tensor_shares_its_line():
    model = Holder(q=linear(bias=False), scale=Holder(gamma=weight(1)), cls=nn.Linear(1, 1, device=META))
    assert labels(model) == ["", "  q", "  scale.gamma", "  cls", "    weight", "    bias"]


def test_a_list_of_many_different_blocks_keeps_its_line():
    few = nn.ModuleList([*(linear() for _ in range(3)), linear(1, 1)])
    many = nn.ModuleList(linear(1 + index // 2, 1) for index in range(2 * INLINE_RUNS + 2))
    lines = labels(Holder(few=few, many=many), depth=1)
    assert lines == ["", "  few.0 … 2 ×3", "  few.3", "  many"]


def test_a_twin_of_another_state_is_left_closed_unless_its_state_is_mixed():
    model = stack(4)
    model.layers[1].to_empty(device="cpu")
    model.layers[3].mlp.to_empty(device="cpu")
    shown = seen(model)
    top = outline(shown.columns, 0, lines=100, brief=True)
    opened = {each.label: each.branches is not None for each in top.branches}
    assert opened == {"layers.0": True, "layers.1": False, "layers.2": False, "layers.3": True, "head": False}
    assert [hidden(shown.columns, each) for each in top.branches] == [False, True, True, False, False]


def test_a_weight_and_its_bias_are_one_line_unless_they_differ():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.weight = weight(2), weight(2)

    model = Holder(fc=linear(), norm=nn.LayerNorm(2, device=META), own=Own(), mixed=linear(), frozen=linear())
    model.mixed.bias = nn.Parameter(torch.zeros(2))
    model.frozen.bias.requires_grad_(False)
    model.tied = linear()
    model.tied.bias = model.fc.bias
    top = outline(seen(model).columns, 0, lines=99, brief=True)
    assert [each.label for each in top.branches if each.pair] == ["fc", "norm"]
    assert [each.label for each in top.branches if each.branches] == ["own", "mixed", "frozen", "tied"]
    assert all(each.branches for each in outline(seen(model).columns, 0, lines=99).branches)


def test_levels_open_while_there_is_room():
    model = stack(80)
    assert labels(model, lines=3) == ["", "  layers.0 … 79 ×80", "  head"]
    assert labels(model, lines=5)[1:] == ["  layers.0 … 79 ×80", "    norm", "    mlp", "  head"]
    assert labels(model, depth=0) == [""]
    assert labels(model, lines=100, unfold=True, depth=2)[1:4] == ["  layers", "    0", "    1"]


def test_what_is_left_out_is_counted():
    model = Holder(**{f"n{index}x": linear(index + 1, 1) for index in range(100)}, tail=linear())
    columns = seen(model).columns
    top = outline(columns, 0, lines=50, width=20)
    assert (len(top.branches), top.missing) == (20, 81)
    few = Holder(**{f"n{index}x": linear(index + 1, 1) for index in range(21)})
    just = outline(seen(few).columns, 0, lines=50, width=20)
    assert (len(just.branches), just.missing) == (21, 0)


def test_ten_thousand_experts_are_three_lines():
    model = mixture(3, 128)
    assert labels(model)[3:7] == ["    norm", "    gate", "    experts.0 … 127 ×128", "      gate_proj"]


def appearance(columns, start: int) -> list[tuple]:
    """All that a block looks like, spelled out row by row."""
    found = []
    for row in range(start, columns.ends[start]):
        form, (what, first) = columns.forms[row], columns.links.get(row, ("", start))
        target = (what, first - start if first >= start else ("outside", first))
        place = (columns.names[row], columns.parents[row] - start) if row > start else None
        found.append((place, form.kind, form.cls, target, columns.mark(row), form.source, form.persistent))
        facts = form.facts
        found.append(facts and (facts.shape, facts.dtype, facts.device, facts.requires_grad))
    return found


@settings(max_examples=150)
@given(plans())
def test_what_folds_in_a_random_graph_looks_alike_row_by_row(plan):
    columns = seen(build(plan)).columns
    for parent in range(len(columns.names)):
        members = list(columns.children(parent))
        lines = runs(columns, parent)
        assert sum(each.count for each in lines) == len(members)
        for each in lines:
            first = members.index(each.row)
            block = members[first : first + each.count]
            assert block[-1] == each.last
            assert all(appearance(columns, row) == appearance(columns, each.row) for row in block)


def test_a_chain_deeper_than_pythons_stack_is_no_trouble():
    model = linear()
    for _ in range(3000):
        model = nn.Sequential(model)
    columns = seen(model).columns
    assert len(columns.names) == 3003
    assert outline(columns, 0, lines=10).branches is not None
    assert columns.tally(0).numel == 6


def test_folding_a_real_tensor_run_needs_no_values():
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    with torch.no_grad():
        model[1].weight.fill_(7)
    assert labels(model, depth=1) == ["", "  0 … 2 ×3"]
