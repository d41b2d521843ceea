"""What the front end makes of the data of a tree: rows, what is shown of them, matches, ticks; against Python."""

from __future__ import annotations

import base64
import random

import pytest
import torch
from front import unpack
from torch import nn
from trees import Holder, jumble, linear, meta, mixture, only, quirks, seen, stack, tiny_llama

import metaviz
from metaviz.core.columns import Columns
from metaviz.core.fold import runs
from metaviz.views.payload import payload
from metaviz.widgets.places import Places

PARTS = "{ unpack, parse, matching, highlights, marked, ranges, flagged, Ticks, Rows }"


@pytest.fixture(scope="module")
def models(needs):
    """Models by name, each small enough to be worked out by hand or anew in Python."""
    return {
        "quirks": quirks(),
        "stack": stack(24),
        "mixture": mixture(3, 4),
        "jumble": jumble(8),
        "llama": tiny_llama(needs("transformers"), 6),
        "alone": linear(),
        "empty": Holder(),
    }


@pytest.fixture
def inside(fake, needs):
    """``inside(tree, code, *facts)`` runs code in the page, with the rows of a tree as ``rows``."""
    needs("anywidget")
    esm = f"{metaviz.TreeWidget._esm}\nwindow.inside = {PARTS};"
    page = None

    def run(tree, code: str, *facts: object):
        nonlocal page
        if page is None:
            page = fake(esm.replace("export default { render }", "export default {}"))
        page.set("data", payload(tree))
        return page.page.evaluate(
            f"""async (facts) => {{
                const {PARTS} = inside, rows = await unpack(fakeWidget.model.state.data);
                const listed = (s) => Array.from(s.nodes.subarray(0, s.count), (node, at) =>
                    [s.levels[at], rows.label(node), s.places[at], s.sizes[at]]);
                {code} }}""",
            list(facts),
        )

    return run


def siblings(columns: Columns, row: int, folded: bool) -> list[tuple[int, str, int, int]]:
    """(first row, label, how many, bytes) of what stands right below a row."""
    return [
        (each.row, each.label, each.count, each.count * nbytes(columns, each.row))
        for each in runs(columns, row, unfold=not folded)
    ]


def nbytes(columns: Columns, row: int) -> int:
    facts = columns.forms[row].facts
    return facts.nbytes if facts else columns.tally(row).nbytes


def outline(columns: Columns, is_open: set[int], unfolded: set[int], by_size: bool) -> list[list]:
    """[level, label, place, of how many] of each line, worked out from the model."""
    lines: list[list] = []

    def put(parts: list[tuple[int, str, int, int]], level: int) -> None:
        if by_size:
            parts = sorted(parts, key=lambda part: -part[3])
        for place, (row, label, count, _) in enumerate(parts, 1):
            lines.append([level, label, place, len(parts)])
            if count > 1:
                members = [row]
                while len(members) < count:
                    members.append(columns.ends[members[-1]])
                if row in unfolded:
                    put([(m, columns.names[m], 1, nbytes(columns, m)) for m in members], level + 1)
            elif row in is_open:
                put(siblings(columns, row, True), level + 1)

    put([(0, columns.forms[0].cls, 1, 0)], 0)
    return lines


NAMES = ["quirks", "stack", "mixture", "jumble", "llama", "alone", "empty"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_paths_looks_and_kin_that_the_model_has(models, inside, name):
    tree = seen(models[name])
    columns, packed = tree.columns, unpack(payload(tree))
    found = inside(
        tree,
        """const all = [...Array(rows.count).keys()];
        return { paths: all.map(row => rows.path(row)), looks: all.map(row => rows.look(row)),
            depths: [...rows.depths], ends: [...rows.ends], parents: [...rows.parents],
            labels: all.map(row => rows.label(row)), holds: all.map(row => rows.holds(row)),
            children: all.map(row => rows.children(row)), links: [...rows.links] };""",
    )
    stop = len(columns.names)
    assert found["paths"] == packed.paths
    assert found["labels"] == [packed.head["title"], *packed.names[1:]]
    assert found["looks"] == packed.looks
    assert found["depths"] == packed.depths
    assert found["ends"] == list(columns.ends)
    assert found["parents"] == list(columns.parents)
    assert found["children"] == [list(columns.children(row)) for row in range(stop)]
    assert found["holds"] == [columns.ends[row] > row + 1 for row in range(stop)]
    assert found["links"] == [[row, first] for row, (_, first) in columns.links.items()]


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_lines_are_those_of_the_model_whatever_is_open_or_unfolded(models, inside, name, by_size):
    tree = seen(models[name])
    columns, draw = tree.columns, random.Random(7)
    count = len(columns.names)
    first = [r for row in range(count) for r, _, many, _ in siblings(columns, row, True) if many > 1]
    cases = [(set(), set()), (set(range(count)), set()), (set(range(count)), set(first))]
    cases += [
        ({row for row in range(count) if draw.random() < 0.7}, {row for row in first if draw.random() < 0.5})
        for _ in range(20)
    ]
    shown = inside(
        tree,
        """return facts[0].map(([opened, unfolded]) => {
            const flags = [opened, unfolded].map((some) => new Uint8Array(rows.count));
            for (const row of opened) flags[0][row] = 1;
            const run = (row) => rows.count + rows.runs[row];
            for (const row of unfolded) for (const each of rows.members(run(row))) flags[1][each] = 1;
            return listed(rows.shown(flags[0], flags[1], facts[1]));
        });""",
        [[sorted(is_open), sorted(unfolded)] for is_open, unfolded in cases],
        by_size,
    )
    assert shown == [outline(columns, is_open, unfolded, by_size) for is_open, unfolded in cases]


def test_repeated_blocks_are_one_line_until_they_are_unfolded_or_one_of_them_differs(inside):
    model = stack(24)
    code = """const ones = () => new Uint8Array(rows.count).fill(1), none = new Uint8Array(rows.count);
        const top = new Uint8Array(rows.count); top[0] = top[1] = 1;
        return [listed(rows.shown(top, none, false)), listed(rows.shown(top, ones(), false)).length,
            rows.head.runs.map(([first, many, label, cls, amount, size, nbytes]) => [many, label, cls, nbytes])];"""
    lines, unfolded, found = inside(seen(model), code)
    assert lines == [[0, "Holder", 1, 1], [1, "layers", 1, 2], [2, "0 … 23", 1, 1], [1, "head", 2, 2]]
    assert unfolded == len(lines) + 24
    # Each block: 4 × 4 weight, bias of 4, norm of 4 + 4, float32.
    assert found == [[24, "0 … 23", "24 × Block", 24 * 4 * (16 + 4 + 8)]]
    metaviz.materialize(model, "layers.11", device="cpu", source="reset")
    lines, _, found = inside(metaviz.tree(model), code)
    assert [line[1] for line in lines[2:-1]] == ["0 … 10", "11", "12 … 23"]
    assert [many for many, *_ in found] == [11, 12]


# What is typed, and the paths that match: of `quirks`, unless it says otherwise.
FOUND = [
    ("embed", ["embed"]),
    ("EMBED", ["embed"]),
    ("embed weight", []),
    ("batchnorm", ["norm"]),
    ("class:embedding", ["embed"]),
    ("name:run", ["norm.running_mean", "norm.running_var"]),
    ("name:running -name:var", ["norm.running_mean"]),
    ('"running_mean"', ["norm.running_mean"]),
    ("path:norm.weight", ["norm.weight"]),
    ("norm.running", ["norm.running_mean", "norm.running_var"]),
    ("orm.weight", ["norm.weight"]),
    ("*.running_*", ["norm.running_mean", "norm.running_var"]),
    ("*.gain", ["own.gain"]),
    ("**.gain", ["own.gain"]),
    ("own.*", ["own.gain"]),
    ("normed.**.original?", [f"normed.parametrizations.weight.original{k}" for k in (0, 1)]),
    ("normed.*.original?", []),
    ("dtype:bf16", ["frozen", "frozen.weight", "frozen.bias"]),
    ("dtype:bfloat16 is:parameter", ["frozen.weight", "frozen.bias"]),
    ("dtype:int64", ["norm.num_batches_tracked"]),
    ("is:frozen is:parameter", ["frozen.weight", "frozen.bias"]),
    ("is:real", ["real", "real.weight", "real.bias"]),
    ("device:cpu", ["real", "real.weight", "real.bias"]),
    ("device:cuda", []),
    (
        "is:buffer",
        ["inv_freq", *(f"norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked"))],
    ),
    ("is:module is:leaf", ["again", "normed.parametrizations.weight.0"]),
    ("is:parameter name:bias -is:real -dtype:bf16", ["first.bias", "norm.bias", "normed.bias"]),
    ("is:tied", ["embed.weight", "head.weight"]),  # both ends
    ("is:shared", ["first", "again"]),
    ('"no:such"', []),
    ("*a*a*a*a*a*a*a*a*a*a*b", []),  # at once
    ("]", []),
    ("(", []),
    ("*(", []),
    ("-", []),
]


def test_a_filter_finds_what_it_says_and_keeps_what_is_above(models, inside):
    found = inside(
        seen(models["quirks"]),
        """return facts[0].map(typed => {
            const query = parse(typed), { kept, matches } = matching(rows, query);
            const paths = (bit) => [...kept.keys()].filter(row => kept[row] & bit).map(row => rows.path(row));
            return [query.fault, paths(2).sort(), paths(1), matches]; });""",
        [typed for typed, _ in FOUND],
    )
    told = {typed: (fault, paths) for (typed, _), (fault, paths, _, _) in zip(FOUND, found, strict=True)}
    assert told == {typed: ("", sorted(paths)) for typed, paths in FOUND}
    for (_, paths), (_, _, above, count) in zip(FOUND, found, strict=True):
        assert count == len(paths)
        outer = {path.rsplit(".", at)[0] for path in paths for at in range(1, path.count(".") + 1)}
        assert sorted(above) == sorted(outer | ({""} if paths else set()))


def test_a_filter_finds_sources_marks_stale_attributes_and_views(inside):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.real = meta(2), torch.zeros(2)

    base = meta(8)
    model = Holder(part=base[:4], whole=base, hidden=Hidden(), lin=linear())
    cases = {
        "source:replay is:parameter": ["lin.weight"],
        "is:blocked -is:module": ["part", "whole", "hidden.kept", "lin.bias"],
        "is:partial": ["", "hidden", "lin"],
        "is:tied": ["part", "whole"],
        "is:attribute": ["hidden.kept", "hidden.real"],
        "is:stale": ["hidden.kept"],
    }
    found = inside(
        seen(model, only("weight")),
        """return facts[0].map(text => { const { kept } = matching(rows, parse(text));
            return [...kept.keys()].filter(row => kept[row] & 2).map(row => rows.path(row)); });""",
        list(cases),
    )
    assert dict(zip(cases, found, strict=True)) == cases


def test_what_a_filter_cannot_mean_is_said(models, inside):
    long = ".".join("a" * 40)
    code = "return facts[0].map(typed => { const { fault, terms } = parse(typed); return [fault, terms.length]; });"
    marks = "real, ready, partial, blocked, empty, module, parameter, buffer, attribute"
    typed = ["is:purple", f"weight {long}", f"path:{long}", " ", "source:thin-air", "no:such"]
    keys = "is:, dtype:, device:, source:, class:, name:, path:"
    assert inside(seen(models["alone"]), code, typed) == [
        [f"is:purple is not known. There are: {marks}, tied, shared, stale, frozen, leaf", 0],
        ["A path of 40 parts is too long to look for: 31 is the most", 0],
        ["A path of 40 parts is too long to look for: 31 is the most", 0],
        ["", 0],
        ["source:thin-air is not known. There are: checkpoint, replay, reset", 0],
        [f"no: is not known. There are: {keys}; a name with a colon goes in quotes", 0],
    ]


def test_a_deep_path_is_found_by_all_of_its_parts(inside):
    model = linear()
    for _ in range(40):
        model = Holder(a=model)
    code = """const { kept } = matching(rows, parse(facts[0]));
        return [...kept.keys()].filter(row => kept[row] & 2).map(row => rows.depths[row]);"""
    assert inside(seen(model), code, ".".join("a" * 31)) == list(range(31, 41))
    assert inside(seen(model), code, ".".join("a" * 30 + "w")) == [41]


def test_only_what_was_searched_for_is_marked_in_a_name_and_the_name_stays_whole(inside, models):
    code = """return facts[0].map(([text, typed]) => {
        const nodes = marked(text, highlights(parse(typed)));
        const whole = document.createElement("p"); whole.append(...nodes);
        return [whole.textContent, [...whole.querySelectorAll("mark")].map(m => m.textContent)];
    });"""
    cases = {
        ("q_proj", "PROJ"): ["proj"],
        ("q_proj.q", "q"): ["q", "q"],
        ("self_attn", "self_attn.*.weight is:real -attn"): ["self_attn"],
        ("Linear", 'class:"lin"'): ["Lin"],
        ("aaa", "aa a"): ["aa", "a"],
        ("<b>x</b>", "<b>"): ["<b>"],
        ("İİx", "x"): ["x"],  # whose small letters are longer
        ("ẞab", "a"): ["a"],
        ("😀ab", "a"): ["a"],
    }
    found = inside(seen(models["alone"]), code, [list(case) for case in cases])
    assert found == [[text, marks] for (text, _), marks in cases.items()]


def test_a_match_can_be_looked_into_and_what_leads_to_matches_can_be_closed(models, inside):
    code = """const { kept } = matching(rows, parse(facts[0]));
        const at = (path) => [...kept.keys()].find(row => rows.path(row) === path);
        return facts[1].map(turned => listed(rows.found(kept, new Map(turned.map(([p, to]) => [at(p), to])))));"""
    tree = seen(models["quirks"])
    plain, into = inside(tree, code, "name:parametriz", [[], [["normed.parametrizations", True]]])
    assert plain == [[0, "Holder", 1, 1], [1, "normed", 1, 1], [2, "parametrizations", 1, 1]]
    # All that is in it, though none of it matches, and that closed.
    assert into == [*plain, [3, "weight", 1, 1]]
    plain, closed = inside(tree, code, "own.gain", [[], [["own", False]]])
    assert plain == [[0, "Holder", 1, 1], [1, "own", 1, 1], [2, "gain", 1, 1]]
    assert closed == plain[:2]


@pytest.mark.parametrize("name", NAMES)
def test_ticks_are_what_a_set_of_leaves_says_after_any_clicks(models, inside, name):
    tree = seen(models[name])
    columns, places = tree.columns, Places(tree.columns, 0)
    count, draw = len(columns.names), random.Random(5)
    clicks = [[draw.randrange(count) for _ in range(draw.choice([1, 1, 1, 3]))] for _ in range(60)]
    told = inside(
        tree,
        """const ticks = new Ticks(rows, []);
        return facts[0].map(nodes => { ticks.toggle(nodes);
            const state = Array.from(ticks.state), chosen = ticks.chosen;
            if ([...new Ticks(rows, chosen).state].join() !== state.join()) throw new Error("other when set");
            return [state, chosen]; });""",
        clicks,
    )
    leaves = {
        row: [r for r in range(row, columns.ends[row]) if columns.ends[r] == r + 1] for row in range(count)
    }
    ticked: set[int] = set()
    for nodes, (state, chosen) in zip(clicks, told, strict=True):
        touched = {leaf for node in nodes for leaf in leaves[node]}
        ticked = ticked - touched if touched <= ticked else ticked | touched
        many = [len(ticked & set(leaves[row])) for row in range(count)]
        assert state == [
            0 if not many[row] else 1 if many[row] == len(leaves[row]) else 2 for row in range(count)
        ]
        assert chosen == places.outermost(row for row in range(count) if state[row] == 1)


def test_the_tick_of_a_run_is_that_of_all_its_members(inside):
    tree = seen(stack(4))
    states = inside(
        tree,
        """const ticks = new Ticks(rows, []), run = rows.count, members = rows.members(run), said = [];
        const note = () => said.push([ticks.of(run), ticks.chosen.map(row => rows.path(row))]);
        ticks.toggle([run]); note();
        ticks.toggle([members[1] + 1]); note();
        ticks.toggle([run]); note();
        ticks.toggle([run]); note();
        return said;""",
    )
    assert states == [
        [1, ["layers"]],
        [2, ["layers.0", "layers.1.mlp", "layers.2", "layers.3"]],
        [1, ["layers"]],
        [0, []],
    ]


def test_a_row_is_found_again_in_another_tree_by_its_path_or_by_what_it_was_in(inside):
    before, after = stack(3), stack(3)
    after.layers[1].mlp = Holder(inner=linear())
    after.extra, after.head = after.head, nn.Identity()
    found = inside(
        seen(before),
        """const older = rows; const newer = await unpack(fakeWidget.unpack(facts[0]));
        return [...Array(older.count).keys()].map(row => [older.path(row), newer.path(newer.same(older, row))]);""",
        {"$bytes": base64.b64encode(payload(seen(after))).decode()},
    )
    there = set(unpack(payload(seen(after))).paths)
    for path, now in found:
        nearest = path
        while nearest not in there:
            nearest = nearest.rpartition(".")[0]
        assert now == nearest
