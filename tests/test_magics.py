"""The magics, in a real shell: what they answer, what stays, and how they fail."""

from __future__ import annotations

import builtins
import signal
import warnings

import pytest
import torch
from shell import new_shell
from torch import nn
from traitlets import TraitError

import metaviz
from metaviz.core.tree import ModuleTree

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    # A doctest that ran before leaves it there, and then IPython keeps its own from the user.
    monkeypatch.delattr(builtins, "_", raising=False)
    with new_shell(tmp_path) as shell:
        shell("%load_ext metaviz")
        shell(NET)
        yield shell


@pytest.fixture
def built(shell):
    shell("%%meta_build --quiet\ntorch.manual_seed(0)\nmodel = Net()")
    return shell


def reference() -> nn.Module:
    """What `built` has, by an ordinary build."""
    space: dict = {}
    exec(NET, space)
    torch.manual_seed(0)
    return space["Net"]()


def test_a_cell_is_built_on_meta_and_replays_the_ordinary_values(shell):
    ran = shell("%%meta_build\ntorch.manual_seed(0)\nmodel = Net()")
    assert ran.error is None
    model = shell.names()["model"]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert ran.out.startswith("model: Net, 70 parameters, 280 B on meta, built in ")
    assert "resident memory " in ran.out
    assert len(ran.shown) == 1
    metaviz.materialize(model)
    expected = reference()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_all_names_of_the_cell_survive_and_its_last_expression_is_the_output(shell):
    ran = shell(
        "%%meta_build\nwidth = 3\nmodel = Net(width)\ndef double(x):\n    return 2 * x\ndouble(width)"
    )
    names = shell.names()
    assert (names["width"], names["double"](4), names["model"].head.in_features) == (3, 8, 3)
    assert "Out[3]: 6" in ran.out
    assert (names["_"], names["Out"][3]) == (6, 6)


def test_names_bound_before_an_error_survive_and_those_after_do_not(shell):
    ran = shell("%%meta_build\nfirst = Net()\nraise LookupError('no such config')\nsecond = Net()")
    assert isinstance(ran.error, LookupError)
    assert shell.names()["first"].head.weight.is_meta
    assert "second" not in shell.names()
    assert not nn.Linear(1, 1).weight.is_meta


BROKEN = """%%meta_build

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.mixed = nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))

net = Broken()
"""


def test_the_traceback_of_a_failing_constructor_shows_its_own_lines_only(shell):
    ran = shell(BROKEN)
    assert isinstance(ran.error, RuntimeError)
    assert "line 9" in ran.out and "net = Broken()" in ran.out
    assert "line 7, in Broken.__init__(self)" in ran.out
    assert ran.out.rstrip().endswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 5x4)")
    for foreign in ("metaviz/", "interactiveshell", "run_cell_magic", "_ops.py", "During handling"):
        assert foreign not in ran.out
    assert "line 7, in Broken.__init__(self)" in shell("%tb").out


def test_the_cause_of_an_error_shows_the_lines_of_the_cell_only(shell):
    failing = "torch.ones(2, 3) @ torch.ones(4, 5)"
    ran = shell(
        f"%%meta_build\ntry:\n    {failing}\nexcept RuntimeError as e:\n    raise ValueError('odd') from e"
    )
    assert "line 3" in ran.out and "line 5" in ran.out and "ValueError: odd" in ran.out
    assert "File" not in ran.out


def test_the_traceback_is_the_one_of_the_same_cell_without_the_magic(shell):
    magic = shell(f"%%meta_build\n{BOTH}").out
    plain = shell(f"# %%meta_build\n{BOTH}").out
    assert magic.count("Cell In[3], line") == 2
    assert magic.replace("Cell In[3], line", "Cell In[4], line") == plain


BOTH = "try:\n    {}['inner']\nexcept KeyError as error:\n    raise KeyError('outer') from error"


def test_an_error_that_is_raised_once_more_shows_both_places(shell):
    shell("%%meta_build\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n    kept = error\n    raise")
    ran = shell("a = 1\nraise kept")
    assert "Cell In[4], line 2" in ran.out
    assert "1 / 0" in ran.out
    assert "run_cell_magic" not in ran.out


def test_an_exception_that_takes_no_attributes_is_shown_all_the_same(shell):
    shell("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Closed(Exception):\n    why: str")
    ran = shell("%%meta_build\nraise Closed('shut')")
    assert type(ran.error).__name__ == "Closed"
    assert "line 2" in ran.out and "Closed: shut" in ran.out


def test_a_cell_that_does_not_compile_runs_nothing_and_shows_where(shell):
    ran = shell("%%meta_build\nran = True\n\nx = = 3")
    assert "line 4" in ran.out and "SyntaxError" in ran.out
    assert ran.err == "UsageError: Nothing was run: the cell does not compile, see above.\n"
    assert "ran" not in shell.names()


def test_a_cell_that_awaits_says_where_to_do_that(shell):
    ran = shell("%%meta_build\nmodel = Net()\nconfig = await load()")
    assert ran.err.endswith("Move this to a cell before it: config = await load()\n")
    assert "model" not in shell.names()


def test_an_interrupt_leaves_nothing_behind(shell):
    shell.names()["interrupt"] = lambda: signal.raise_signal(signal.SIGINT)
    ran = shell("%%meta_build\nbefore = nn.Linear(2, 2)\ninterrupt()\nafter = 1")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert "line 3" in ran.out and "run_cell_magic" not in ran.out
    assert "after" not in shell.names()
    assert shell.names()["before"].weight.is_meta
    assert not torch.empty(1).is_meta
    assert shell("%%meta_build --quiet\nagain = Net()").error is None


def test_magics_shell_commands_and_a_quiet_last_line_work_in_the_cell(shell):
    ran = shell("%%meta_build\n%time model = Net()\nfiles = !echo one\n!echo two\nmodel;")
    assert ran.error is None
    assert shell.names()["model"].head.weight.is_meta
    assert list(shell.names()["files"]) == ["one"]
    assert "Wall time" in ran.out
    assert "Out[" not in ran.out


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("all", ["1", "2", "3"]),
        ("last_expr", ["3"]),
        ("last", ["3"]),
        ("last_expr_or_assign", ["3"]),
        ("none", []),
    ],
)
def test_the_choice_of_what_a_cell_displays_holds_here_too(shell, choice, shown):
    shell.ip.ast_node_interactivity = choice
    ran = shell("%%meta_build --quiet\n1\n2\n3")
    assert [line.partition("]: ")[2] for line in ran.out.splitlines() if line] == shown


def test_an_assignment_is_displayed_where_that_was_chosen(shell):
    shell.ip.ast_node_interactivity = "last_expr_or_assign"
    assert "Out[3]: 7" in shell("%%meta_build --quiet\nx = 7").out


def test_a_tensor_in_the_last_line_is_displayed_after_the_recording(shell):
    assert "device='meta'" in shell("%%meta_build\ntorch.rand(2)").out


def test_a_transformer_of_the_shell_sees_the_cell(shell):
    import ast

    class Sevens(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.copy_location(ast.Constant(7), node) if node.value == 3 else node

    shell.ip.ast_transformers.append(Sevens())
    shell("%%meta_build --quiet\nx = 3")
    assert shell.names()["x"] == 7


def test_a_cell_that_imports_from_the_future_is_compiled_so(shell):
    ran = shell("%%meta_build --quiet\nfrom __future__ import annotations\ndef f(x: undefined): pass")
    assert ran.error is None


def test_only_whole_and_new_models_are_reported(shell):
    shell("old = Net()")
    lines = "old = old\nagain = old.head\npart = nn.Linear(2, 2)\nwhole = nn.Sequential(part)\nsame = whole"
    ran = shell(f"%%meta_build\n{lines}")
    lines = ran.out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["whole: Sequential"]


def test_several_models_get_a_line_each_and_the_cost_once(shell):
    ran = shell("%%meta_build\na = Net()\nb = Net(8)")
    lines = ran.out.splitlines()
    assert lines[:2] == ["a: Net, 70 parameters, 280 B on meta", "b: Net, 234 parameters, 936 B on meta"]
    assert lines[2].startswith("2 models, built in ")
    assert len(ran.shown) == 2


def test_many_models_are_not_all_drawn(shell):
    ran = shell("%%meta_build\nfor i in range(25):\n    globals()[f'net{i}'] = nn.Linear(1, 1)")
    assert ran.shown == []
    assert ran.out.splitlines()[20] == "… and 5 more. See them: %metaviz"


def test_a_cell_without_a_model_says_what_to_do(shell):
    ran = shell("%%meta_build\nx = 1")
    assert ran.out.startswith("Recorded in ")
    assert ran.out.endswith("No name holds a new model: bind it in the cell, as in model = Net()\n")


def test_a_quiet_cell_shows_nothing(shell):
    ran = shell("%%meta_build --quiet\nmodel = Net()")
    assert (ran.out, ran.err, ran.shown) == ("", "", [])


def test_trees_can_be_switched_off(shell):
    shell("%config MetavizMagics.show_trees = False")
    ran = shell("%%meta_build\nmodel = Net()")
    assert ran.shown == []
    assert ran.out.startswith("model: Net")


def test_the_value_limit_is_a_size(shell):
    read = "\nn = int(torch.zeros(300).sum().item())"
    refused = shell(f"%%meta_build --value-limit 1KiB{read}")
    assert type(refused.error).__name__ == "ValueRead"
    assert "line 2" in refused.out
    assert shell(f"%%meta_build --value-limit '2 KiB'{read}").error is None
    assert shell.names()["n"] == 0


def test_a_recording_inside_a_cell_is_refused_with_the_line(shell):
    import metaviz

    shell.names()["metaviz"] = metaviz
    ran = shell("%%meta_build\nmodel = metaviz.build(Net)")
    assert isinstance(ran.error, metaviz.MetavizError)
    assert "line 2" in ran.out and "Leave out the inner metaviz.build" in ran.out


def test_a_tree_can_be_bound_and_is_the_answer_of_the_cell(built):
    tree = built("%meta_tree model").value
    assert isinstance(tree, ModuleTree)
    assert (tree.row.cls, tree.totals.numel) == ("Net", 70)
    assert built("t = %meta_tree model layers.1").value is None
    assert built.names()["t"].path == "layers.1"


def test_where_values_come_from_is_told_by_the_number_of_the_cell(shell):
    shell("%%meta_build --quiet\n\nmodel = Net()\nnn.init.ones_(model.head.bias)")
    tree = shell("%meta_tree model head.bias").value
    assert "ones_ at Cell In[3]:4" in tree.row.reason
    refused = shell("%%meta_build --value-limit 8\ntorch.rand(99).sum().item()")
    assert "at Cell In[5]:2) that take" in str(refused.error)


def test_the_depth_of_a_tree_counts_levels(built):
    built("t = %meta_tree model --depth 1")
    tree = built.names()["t"]
    assert isinstance(tree, ModuleTree)
    assert "head" in repr(tree) and "layers" in repr(tree)
    assert "weight" not in repr(tree)
    assert "layers" in tree._repr_html_()
    assert "<code>head</code>" in tree._repr_html_()
    assert "<code>weight</code>" not in tree._repr_html_()
    assert "weight" in repr(built("%meta_tree model").value)


def test_parts_are_materialized_with_the_ordinary_values(built):
    report = built("%meta_materialize model layers.1 head.bias --device cpu").value
    assert isinstance(report, metaviz.Report)
    assert [t.path for t in report.tensors] == ["layers.1.weight", "layers.1.bias", "head.bias"]
    model, expected = built.names()["model"], reference()
    real = [name for name, p in model.named_parameters() if not p.is_meta]
    assert real == ["layers.1.weight", "layers.1.bias", "head.bias"]
    assert torch.equal(model.layers[1].weight, expected.layers[1].weight)


def test_options_may_stand_before_between_and_after_paths_and_quotes_are_taken_off(built):
    line = "%meta_materialize --dtype bfloat16 model --device 'cpu' 'layers.*.bias' --rng=\"keyed\" head"
    report = built(line).value
    assert [t.path for t in report.tensors] == [
        "layers.0.bias",
        "layers.1.bias",
        "layers.2.bias",
        "head.weight",
        "head.bias",
    ]
    assert {t.dtype for t in report.tensors} == {torch.bfloat16}


def test_the_whole_model_is_taken_without_a_path(built):
    assert built("%meta_materialize model").value.nbytes == 280
    assert not any(p.is_meta for p in built.names()["model"].parameters())


def test_a_dry_run_answers_the_plan_and_changes_nothing(built):
    plan = built("%meta_materialize model head --dry-run --rng keyed").value
    assert isinstance(plan, metaviz.Plan)
    assert (plan.nbytes, plan.rng) == (40, "keyed")
    assert all(p.is_meta for p in built.names()["model"].parameters())


def test_blocked_tensors_are_an_error_in_one_line_unless_they_are_skipped(built):
    built("model.extra = nn.Parameter(torch.empty(2, device='meta'))")
    ran = built("%meta_materialize model")
    assert ran.err.startswith("UsageError: Cannot materialize 1 of 9 chosen tensors: extra. ")
    assert ran.err.count("\n") == 1
    assert all(p.is_meta for p in built.names()["model"].parameters())
    report = built("%meta_materialize model --skip-blocked").value
    assert set(report.skipped) == {"extra"}


def test_a_source_can_be_chosen(built):
    plan = built("%meta_materialize model head --source reset --dry-run").value
    assert {tensor.source for tensor in plan.tensors} == {"reset"}
    report = built("%meta_materialize model head --source reset").value
    assert {tensor.source for tensor in report.tensors} == {"reset"}
    ran = built("%meta_materialize model head --source magic")
    assert ran.err.startswith("UsageError: argument --source: invalid choice: 'magic'")


def test_only_trouble_is_listed_where_that_is_asked_for(built):
    built("model.extra = nn.Parameter(torch.empty(2, device='meta'))")
    ran = built("%meta_tree model --blocked")
    assert next(entry.kind for entry in ran.value) == "blocked"
    assert ran.out == f"Out[{built.ip.execution_count - 1}]: \n{ran.value}\n"
    assert "✗ Net has no reset_parameters, and no tape knows the tensor\n  1 tensor: extra\n" in ran.out
    assert built("%meta_tree model layers.1 --blocked").out.endswith(
        "each of its 2 tensors can be given values.\n"
    )


def test_trouble_with_an_optimizer_is_found_on_request(built):
    built("optimizer = torch.optim.SGD(model.parameters(), 0.1)")
    kinds = {
        option: [entry.kind for entry in built(f"%meta_tree model {option}").value]
        for option in ("--blocked", "--search")
    }
    assert ("optimizer" in kinds["--blocked"], "optimizer" in kinds["--search"]) == (False, True)


def test_a_tree_shows_the_marks_of_a_source(built):
    built("model.own = nn.Parameter(torch.empty(2, device='meta'))")
    assert built("%meta_tree model --source replay").value.totals.marks == {"ready": 8, "blocked": 1}
    assert 'source="reset"' in built("%meta_tree model layers --source reset").out


def test_unloaded_parts_come_back_with_the_same_values(built):
    built("%meta_materialize model head")
    before = built.names()["model"].head.weight.detach().clone()
    assert built("%meta_unload model head").value.action == "unloaded"
    assert built.names()["model"].head.weight.is_meta
    built("%meta_materialize model head")
    assert torch.equal(built.names()["model"].head.weight, before)


def test_changed_values_are_only_lost_by_force(built):
    built("%meta_materialize model head")
    built("with torch.no_grad():\n    model.head.bias.add_(1)")
    ran = built("%meta_unload model head")
    assert ran.err.startswith("UsageError: Unloading would lose values of 1 of 2 chosen tensors: head.bias.")
    assert not built.names()["model"].head.bias.is_meta
    assert built("%meta_unload model head --force").error is None
    assert built.names()["model"].head.bias.is_meta


REFUSED = [
    ("%meta_tree modl", "There is no 'modl' here. Names that hold models: model. See them: %metaviz"),
    ("%meta_tree model.layers[0]", "'model.layers[0]' is an expression, and a magic takes a name. "
     "Bind it first: part = model.layers[0]"),
    ("%meta_tree Net()", "'Net()' is an expression, and a magic takes a name. Bind it first: part = Net()"),
    ("%meta_tree {model}", "'{model}' is an expression, and a magic takes a name. "
     "Bind it first: part = {model}"),
    ("%meta_tree torch", "'torch' is of type module, not a torch.nn.Module. Names that hold models: model. "
     "See them: %metaviz"),
    ("%meta_tree model.lairs", "'model' has no 'lairs'. The nearest is 'model.layers'."),
    ("%meta_tree model.half", "'model.half' is a property or a method, and a magic runs no code. "
     "Bind it first: part = model.half"),
    ("%meta_tree", "the following arguments are required: model. What can be given: %meta_tree?"),
    ("%meta_tree model layers head", "unrecognized arguments: head. What can be given: %meta_tree?"),
    ("%meta_tree model --depth x", "argument --depth: 'x' is not a number of levels such as 2. "
     "What can be given: %meta_tree?"),
    ("%meta_tree 'model", "The arguments cannot be read: no closing quotation. What they are: %meta_tree?"),
    ("%meta_materialize model --dtype int8", "argument --dtype: 'int8' is not a floating-point dtype such as "
     "bfloat16. What can be given: %meta_materialize?"),
    ("%meta_materialize model --rng", "argument --rng: expected one argument. "
     "What can be given: %meta_materialize?"),
    ("%meta_unload model -h", "unrecognized arguments: -h. What can be given: %meta_unload?"),
    ("%%meta_build --value-limit much\nx = 1", "argument --value-limit: 'much' is not a size such as 256MiB. "
     "What can be given: %meta_build?"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line.split("\n")[0] for line, _ in REFUSED])
def test_what_cannot_be_done_is_said_in_one_line_with_the_next_step(built, line, message):
    ran = built(line)
    assert ran.err == f"UsageError: {message}\n"
    assert ran.out == ""
    assert all(p.is_meta for p in built.names()["model"].parameters())
    assert "x" not in built.names()


@pytest.mark.parametrize(
    "line",
    [
        "%meta_tree model lairs",
        "%meta_materialize model lairs",
        "%meta_unload model lairs",
        "%meta_materialize model --device gpu",
    ],
)
def test_a_refusal_of_metaviz_is_one_line_without_a_traceback(built, line):
    ran = built(line)
    assert ran.error.__suppress_context__
    assert ran.err.startswith("UsageError: ") and ran.err.count("\n") == 1
    assert ran.out == ""


def test_a_value_in_place_of_a_name_is_cut_short(built):
    ran = built("%meta_tree " + "x" * 5000)
    assert ran.err == (
        "UsageError: An argument has 5,000 characters: xxxxxxxxxxxxxxxxxxxx… "
        "Pass the name of the model, not its value: %meta_tree model\n"
    )


HOLDERS = """
class Trainer:
    def __init__(self, model):
        self.model = model
    @property
    def strategy(self):
        raise SystemExit("a property ran")

class Slotted:
    __slots__ = ("model", "empty")

trainer = Trainer(model)
slotted = Slotted()
slotted.model = model
"""


def test_a_model_is_found_through_plain_attributes_and_submodules(built):
    built(HOLDERS)
    for name in ("trainer.model", "slotted.model", "trainer.model.layers"):
        assert built(f"%meta_tree {name}").error is None
    assert built("%meta_tree model.layers.2").value.totals.numel == 20
    assert built("%meta_tree slotted.empty").err.startswith(
        "UsageError: 'slotted.empty' is a property or a method"
    )


def test_no_property_runs_to_find_a_model(built):
    built(HOLDERS)
    ran = built("%meta_tree trainer.strategy.model")
    assert ran.err == (
        "UsageError: 'trainer.strategy' is a property or a method, and a magic runs no code. "
        "Bind it first: part = trainer.strategy\n"
    )


def test_a_child_named_like_a_method_is_found(built):
    built("model._modules['half'] = nn.Linear(3, 3)")
    assert built("%meta_tree model.half").value.totals.numel == 12


def test_each_magic_has_a_help_page(built):
    for name in ("meta_build", "meta_tree", "meta_materialize", "meta_unload", "metaviz"):
        page = built(f"%{name}?").out
        assert f"%{name}" in page or f"%%{name}" in page
    assert "--skip-blocked" in built("%meta_materialize?").out


def registered(shell) -> dict[str, object]:
    """All that a shell holds of ours, by where it is."""
    ip = shell.ip

    def ours(thing: object) -> bool:
        return "metaviz" in type(thing).__module__ + str(getattr(thing, "__module__", ""))

    return {
        "magics": [n for table in ip.magics_manager.magics.values() for n, f in table.items() if ours(f)],
        "registry": [n for n in ip.magics_manager.registry if "etaviz" in n],
        "configurables": [c for c in ip.configurables if ours(c)],
        "matchers": [m for m in ip.Completer.custom_matchers if ours(m)],
        "events": [f for fs in ip.events.callbacks.values() for f in fs if ours(f)],
        "loaded": [n for n in ip.extension_manager.loaded if "metaviz" in n],
    }


def test_unload_leaves_nothing_behind(shell):
    loaded = registered(shell)
    assert sorted(loaded["magics"]) == [
        "meta_build",
        "meta_checkpoint",
        "meta_materialize",
        "meta_mesh",
        "meta_tree",
        "meta_unload",
        "metaviz",
    ]
    assert [len(loaded[k]) for k in ("registry", "configurables", "matchers", "loaded")] == [1, 1, 1, 1]
    shell("%unload_ext metaviz")
    assert not any(registered(shell).values())
    assert "Cell magic `%%meta_build` not found" in shell("%%meta_build\nx = 1").err


def test_a_second_load_is_quiet_and_a_reload_works(shell):
    before = registered(shell)
    ran = shell("import metaviz\nmetaviz.load_ipython_extension(get_ipython())")
    assert (ran.out, ran.err) == ("", "")
    assert registered(shell) == before
    assert shell("%reload_ext metaviz").error is None
    assert [len(value) for value in registered(shell).values()] == [len(value) for value in before.values()]
    assert shell("%metaviz").error is None


def test_unload_without_load_is_quiet(tmp_path):
    with new_shell(tmp_path) as shell:
        metaviz.unload_ipython_extension(shell.ip)
        assert not any(registered(shell).values())


def test_a_magic_that_the_user_put_in_place_of_ours_survives_unload(shell):
    shell.ip.register_magic_function(lambda line: "mine", "line", "metaviz")
    shell("%unload_ext metaviz")
    assert shell("%metaviz").value == "mine"


def test_a_bad_setting_does_not_keep_the_magics_away(shell):
    shell("%config MetavizMagics.progress_after = 'soon'")
    shell("%unload_ext metaviz")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran = shell("%load_ext metaviz")
    assert ran.error is None
    assert (
        "settings of MetavizMagics are back to their defaults"
        in str([str(w.message) for w in caught]) + ran.err
    )
    assert [len(registered(shell)[k]) for k in ("registry", "configurables")] == [1, 1]
    assert shell.ip.magics_manager.registry["MetavizMagics"].progress_after == 1.0


def test_a_good_setting_is_there_after_a_reload(shell):
    shell("%config MetavizMagics.progress_after = 2.5")
    shell("%reload_ext metaviz")
    assert shell.ip.magics_manager.registry["MetavizMagics"].progress_after == 2.5


def test_a_setting_out_of_range_is_refused(shell):
    magics = shell.ip.magics_manager.registry["MetavizMagics"]
    with pytest.raises(TraitError):
        magics.progress_after = -1.0


@pytest.fixture
def stored(built, tmp_path, monkeypatch):
    """`built` in a folder with its checkpoint, under a name with a blank and nested in a dict, too."""
    monkeypatch.chdir(tmp_path)
    state = {name: torch.full_like(value, 7) for name, value in reference().state_dict().items()}
    torch.save(state, "net.pt")
    torch.save(
        {"ema": {f"student.{name}": value for name, value in state.items()}, "model": state}, "two words.pt"
    )
    built(f"state = torch.load({str(tmp_path / 'net.pt')!r})")
    return built


@pytest.mark.parametrize("where", ["net.pt", "state", '"two words.pt"'])
def test_a_checkpoint_is_a_path_or_a_name(stored, where):
    ran = stored(f"%meta_checkpoint {where}")
    assert isinstance(ran.value, metaviz.Checkpoint) and len(ran.value) == 8
    stored("net = model")
    match = stored(f"%meta_checkpoint {where} net").value
    assert isinstance(match, metaviz.Match) and "\nNext: metaviz.materialize(net, " in str(match)
    report = stored(f"%meta_materialize model layers.1 --checkpoint {where}").value
    assert {each.source for each in report.tensors} == {"checkpoint"}
    model = stored.names()["model"]
    assert (model.layers[1].weight == 7).all() and model.layers[0].weight.is_meta


def test_a_name_goes_before_a_file_that_is_called_so_and_what_is_no_checkpoint_is_no_name(stored):
    torch.save({"file": torch.ones(1)}, "state")
    assert len(stored("%meta_checkpoint state").value) == 8
    assert list(stored("%meta_checkpoint ./state").value) == ["file"]
    torch.save({"file": torch.ones(1)}, "model")
    assert list(stored("%meta_checkpoint model").value) == ["file"]
    stored("where = 'net.pt'")
    assert len(stored("%meta_checkpoint where").value) == 8


def test_an_entry_and_a_key_map_can_be_given(stored):
    line = '--checkpoint "two words.pt" --inside ema --key-map student='
    plan = stored(f"%meta_materialize model {line} --dry-run").value
    assert {each.source for each in plan.tensors} == {"checkpoint"}
    assert "checkpoint=" in stored(f"%meta_tree model layers.0 {line}").value.text()
    assert (
        len(stored("%meta_checkpoint 'two words.pt' model --inside ema --key-map=student=").value.found) == 8
    )
    assert "--key-map takes OLD=NEW" in stored("%meta_checkpoint net.pt --key-map student").err
    assert "under 'emma'" in stored("%meta_checkpoint 'two words.pt' --inside emma").err


def test_a_dry_run_can_tell_the_memory_of_training(stored):
    ran = stored("%meta_materialize model --dry-run --gradients --optimizer adamw")
    assert ran.out.splitlines()[0].split() == [
        "device",
        "dtype",
        "values",
        "gradients",
        "optimizer",
        "sum",
        "free",
    ]
    assert ran.value.nbytes == 280
    assert "torch.optim has no 'adm'" in str(
        stored("%meta_materialize model --dry-run --optimizer adm").error
    )


def test_what_is_wrong_with_a_checkpoint_is_said_in_one_line(stored):
    assert stored("%meta_checkpoint nowhere.pt").err.startswith(
        "UsageError: 'nowhere.pt' cannot be read: No such file"
    )
    stored("other = {'a.b': torch.ones(3)}")
    ran = stored("%meta_materialize model --checkpoint other")
    assert ran.err.startswith("UsageError: Nothing of the state dict fits the model")
    assert all(each.is_meta for each in stored.names()["model"].parameters())


def test_the_stored_dtype_can_be_asked_for(stored):
    stored("half = {name: value.half() for name, value in state.items()}")
    stored("%meta_materialize model head --checkpoint half --dtype checkpoint")
    assert stored.names()["model"].head.weight.dtype == torch.float16


@pytest.mark.parametrize("said", ["dp=2,tp=4", "dp=2, tp=4", "dp=2 tp=4"])
def test_a_plan_is_written_with_or_without_spaces(shell, said):
    ran = shell(f"plan = %meta_mesh {said} --static")
    assert (ran.error, shell.ip.user_ns["plan"].shape_words) == (None, "dp=2 × tp=4")
