from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from aside import fresh
from groups import fake, gloo, no_group_stays, nothing_starts  # noqa: F401

import metaviz
from metaviz.core.world import VARIABLES, World, backend_of, simulated, world
from metaviz.errors import BadMesh


@pytest.fixture
def variables(monkeypatch):
    """Sets the variables of a launcher, and takes away those that are not named."""

    def put(**given: str) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    put()
    return put


@pytest.mark.usefixtures("nothing_starts")
def test_a_process_that_was_started_alone_waits_for_a_group_of_one(variables):
    found = world()
    assert found[:4] == ("waiting", None, None, None)
    assert found.reason == (
        "No process group yet: this process was started alone, not by a launcher such as torchrun. "
        "A notebook kernel is one rank at most."
    )


def test_the_next_step_of_a_process_alone_makes_it_ready(variables):
    step = world().step
    hook = sys.excepthook
    try:
        exec(step, {"torch": torch})
        assert world() == World("ready", 0, 1, "gloo", "The process group is there: 1 rank, gloo.", None)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.usefixtures("nothing_starts")
def test_a_launched_process_knows_its_rank_before_the_group_is_there(variables):
    variables(**LAUNCHED)
    assert world() == World(
        "waiting",
        1,
        2,
        None,
        "The launcher has set everything (rank 1 of 2, 127.0.0.1:29500), and init_process_group was not called yet. "
        "It waits until all ranks have called it.",
        "torch.distributed.init_process_group()",
    )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("missing", VARIABLES)
@pytest.mark.parametrize("how", ["unset", "empty"])
def test_what_a_launcher_has_not_set_is_named_as_torch_names_it(variables, missing, how):
    variables(
        **{name: value for name, value in LAUNCHED.items() if name != missing},
        **({missing: ""} if how == "empty" else {}),
    )
    found = world()
    assert found.reason == (
        f"No process group yet, and {missing} is not set, which a launcher such as torchrun does."
    )
    assert found.step == "torchrun --nproc-per-node 4 train.py  # in a terminal"


@pytest.mark.parametrize("missing", VARIABLES)
def test_torch_itself_refuses_a_variable_that_is_empty(variables, missing):
    variables(**(LAUNCHED | {missing: ""}))
    with pytest.raises(ValueError, match=f"environment variable {missing} expected"):
        dist.init_process_group("gloo")


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [
        ("one", "2", "RANK='one' and WORLD_SIZE='2' name no rank"),
        ("x", "-3", "RANK='x' and WORLD_SIZE='-3' name no rank"),
        ("9", "4", "RANK='9' and WORLD_SIZE='4' name no rank"),
        (6000 * "9", "4", "RANK='999999999999999999999999999999999999999 and WORLD_SIZE='4' name no rank"),
    ],
)
def test_a_rank_that_there_cannot_be_is_told_and_not_believed(variables, rank, size, said):
    variables(**(LAUNCHED | {"RANK": rank, "WORLD_SIZE": size}))
    found = world()
    assert (found.state, found.rank, found.size) == ("waiting", None, None)
    assert said in found.reason


def test_a_fake_group_is_simulated_and_says_that_its_values_are_not_to_be_trusted():
    with fake(8192, 4097):
        assert world() == World(
            "simulated",
            4097,
            8192,
            "fake",
            "Its backend is fake: the layout is real, but nothing is sent, and values are not to be trusted.",
            None,
        )


def test_a_group_that_was_started_without_a_backend_has_one_for_each_kind_of_device():
    with gloo():
        assert backend_of() == "gloo"
    with gloo(backend=None):
        assert "cpu:gloo" in backend_of()
        assert world().reason == f"The process group is there: 1 rank, {backend_of()}."


def test_a_group_that_was_destroyed_is_awaited_again(variables):
    with gloo():
        pass
    assert world().state == "waiting"


@pytest.mark.parametrize("rank", [0, 4097, 8191])
def test_a_simulated_world_has_any_size_and_plays_any_rank(rank):
    with simulated(8192, rank):
        assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (8192, rank, "fake")
    assert not dist.is_initialized()


def test_fifty_simulations_leave_the_excepthook_as_it_was():
    hook = sys.excepthook
    for _ in range(50):
        with simulated(4):
            pass
        assert sys.excepthook is hook


def test_an_excepthook_that_somebody_sets_meanwhile_stays_theirs(monkeypatch):
    def theirs(*_):
        pass

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with simulated(4):
        sys.excepthook = theirs
    assert sys.excepthook is theirs
    monkeypatch.undo()


def test_an_error_inside_of_a_simulation_ends_it_all_the_same():
    with pytest.raises(ZeroDivisionError), simulated(4):
        1 / 0  # noqa: B018
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_left_alone():
    with gloo():
        own = dist.group.WORLD
        with pytest.raises(BadMesh) as refused, simulated(8):
            pass
        assert str(refused.value) == (
            "There is a process group already (gloo, 1 ranks), and a process has one at most. It is left alone. "
            "Next: torch.distributed.destroy_process_group()"
        )
        assert dist.group.WORLD is own


def test_a_group_that_was_made_after_the_simulated_one_is_left_alone():
    hook = sys.excepthook
    with simulated(8):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        own = dist.group.WORLD
    assert dist.group.WORLD is own
    dist.destroy_process_group()
    sys.excepthook = hook


def test_a_group_of_ones_own_starts_after_a_simulation():
    with simulated(8):
        pass
    with gloo():
        assert world().state == "ready"


# Torch looks for this in its C library, and finds none of it in a build without torch.distributed.
WITHOUT = """
    import importlib.abc, sys

    class Cut(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "torch.distributed":
                for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                    if hasattr(sys.modules["torch._C"], part):
                        delattr(sys.modules["torch._C"], part)

    sys.meta_path.insert(0, Cut())
    import torch
    assert not torch.distributed.is_available() and not hasattr(torch.distributed, "is_initialized")
    import metaviz
"""


def test_a_build_of_torch_without_distributed_plans_meshes_and_says_that_there_are_no_others():
    said = fresh(
        WITHOUT
        + """
    found = metaviz.mesh()
    print(found.state, found.reason, found.step, sep="|")
    print(metaviz.mesh("dp=2,tp=4").group("tp", 5))
    print("a tree:", "weight" in str(metaviz.tree(torch.nn.Linear(2, 2, device="meta"))))
    try:
        metaviz.mesh("dp=2", simulate=True)
    except metaviz.MetavizError as error:
        print(error)
    """
    )
    assert said.splitlines() == [
        "unavailable|This build of torch has no torch.distributed, so there are no meshes but planned ones.|"
        'metaviz.mesh("dp=2,tp=4")',
        "(4, 5, 6, 7)",
        "a tree: True",
        "This build of torch has no torch.distributed. Next: metaviz.mesh('dp=2,tp=4')",
    ]


def test_a_build_of_torch_without_distributed_loads_the_extension():
    said = fresh(
        WITHOUT
        + """
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "metaviz")
    print("meta_mesh" in shell.magics_manager.magics["line"])
    """
    )
    assert said.splitlines()[-1] == "True"


LOADED = """
    import sys, torch
    before = {{name for name in sys.modules if name.startswith("torch.distributed")}}
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "metaviz")
    {more}
    print(sorted({{name for name in sys.modules if name.startswith("torch.distributed")}} - before))
"""


def test_loading_the_extension_imports_nothing_of_torch_distributed():
    assert fresh(LOADED.format(more="")).splitlines()[-1] == "[]"


def test_neither_does_planning_or_looking_for_a_mesh():
    more = 'import metaviz; metaviz.mesh("dp=2,tp=4"); metaviz.mesh()'
    assert fresh(LOADED.format(more=more)).splitlines()[-1] == "[]"


def test_an_import_of_torch_distributed_would_be_seen():
    more = "import torch.distributed.checkpoint"
    assert "torch.distributed.checkpoint" in fresh(LOADED.format(more=more)).splitlines()[-1]


def test_a_mesh_of_the_fake_backend_reads_values_that_are_not_those_of_its_ranks():
    # Why a simulated mesh is called so in every view.
    with simulated(4):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
        assert metaviz.mesh().state == "waiting"
        assert "values are not to be trusted" in metaviz.mesh().reason
