from __future__ import annotations

import gc
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from groups import default_device, fake, gloo, no_group_stays, nothing_starts  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from metaviz.core import devicemesh
from metaviz.core.devicemesh import is_mesh, read

# What torch 2.13 can do: a mesh without groups, axes that are taken apart, and groups that a mesh holds itself.
PLANS = hasattr(DeviceMesh, "_unflatten")
CUBE = ("pp", "dp", "tp")


def cube(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (2, 2, 2), mesh_dim_names=CUBE)


def test_a_mesh_is_read_with_its_ranks_axes_and_groups():
    with fake(8, 5):
        mesh = cube("cuda")
        layout = read(mesh, ranks_per_host=4)
        assert (layout.state, layout.rank, layout.world, layout.device_type) == ("simulated", 5, 8, "cuda")
        assert (layout.names, layout.shape, layout.ranks) == (CUBE, (2, 2, 2), tuple(range(8)))
        assert layout.coordinate == tuple(mesh.get_coordinate()) == (1, 0, 1)
        assert (layout.hosts, layout.host_of(5)) == (2, 1)
        for name in CUBE:
            assert list(layout.group(name)) == dist.get_process_group_ranks(mesh.get_group(name))


def test_looking_at_a_mesh_starts_nothing_and_warns_of_nothing(request):
    with fake(8, 5):
        mesh = cube()
        mesh["pp", "dp"]._flatten("outer")
        parts = [mesh, mesh["tp"], mesh["dp", "tp"]]
        known = dict(dist.distributed_c10d._world.pg_map)
        request.getfixturevalue("nothing_starts")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            states = [read(part).state for part in parts]
        assert states == ["simulated"] * 3
        assert dist.distributed_c10d._world.pg_map == known
        # The fixture has replaced what takes the group down, too.
        request.getfixturevalue("monkeypatch").undo()


def test_a_mesh_of_a_real_group_is_ready_and_says_with_what_it_communicates():
    with gloo():
        layout = read(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
        assert (layout.state, layout.rank, layout.axes[0].backend) == ("ready", 0, "gloo")
        assert layout.reason == "The process group is there: 1 rank, gloo."
        assert layout.step is None


def test_a_submesh_is_the_whole_with_its_axes_in_focus():
    with fake(8, 5):
        mesh = cube()
        whole = read(mesh)
        for names in (("tp",), ("pp",), ("dp", "tp"), ("pp", "tp")):
            part = read(mesh[names])
            assert part.focus == names
            assert (part.ranks, part.names, part.coordinate) == (whole.ranks, whole.names, whole.coordinate)


def test_flattened_axes_are_aliases_with_the_axes_that_they_cover():
    with fake(8, 5):
        mesh = cube()
        flat = mesh["pp", "dp"]._flatten("outer")
        mesh["dp", "tp"]._flatten("inner")
        layout = read(mesh)
        assert layout.aliases == {"outer": ("pp", "dp"), "inner": ("dp", "tp")}
        assert layout.names == CUBE
        assert layout.group("outer") == (1, 3, 5, 7)
        assert list(layout.group("outer")) == flat.mesh.tolist()
        assert read(flat).focus == ("pp", "dp")


def test_axes_of_size_one_are_axes():
    with fake(8, 5):
        layout = read(init_device_mesh("cpu", (1, 2, 1, 4), mesh_dim_names=("pp", "dp", "cp", "tp")))
    assert layout.shape == (1, 2, 1, 4)
    assert layout.coordinate == (0, 1, 0, 1)
    assert layout.group("cp") == (5,)


def test_five_axes_are_read():
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    with fake(64, 45):
        mesh = init_device_mesh("cuda", (2, 2, 4, 2, 2), mesh_dim_names=names)
        mesh["dp_shard", "cp"]._flatten("fsdp")
        layout = read(mesh)
        assert layout.coordinate == tuple(mesh.get_coordinate()) == (1, 0, 3, 0, 1)
        assert layout.aliases == {"fsdp": ("dp_shard", "cp")}
        for name in names:
            assert list(layout.group(name)) == dist.get_process_group_ranks(mesh.get_group(name))


def test_a_flattened_axis_covers_the_axes_of_size_one_that_its_name_tells():
    with fake(8, 5):
        mesh = init_device_mesh("cpu", (2, 1, 4), mesh_dim_names=("dp_shard", "cp", "tp"))
        mesh["dp_shard", "cp"]._flatten()
        assert read(mesh).aliases == {"dp_shard_cp": ("dp_shard", "cp")}


def test_a_mesh_without_axes_has_the_one_rank():
    with fake(8, 5):
        layout = read(DeviceMesh("cpu", torch.tensor(5)))
    assert (layout.axes, layout.ranks) == ((), (5,))


def test_names_that_are_no_strings_and_names_that_would_collide_are_made_good():
    with fake(8, 5):
        assert read(DeviceMesh("cpu", torch.arange(8).reshape(2, 4), mesh_dim_names=(1, 2))).names == (
            "1",
            "2",
        )
        cubed = torch.arange(8).reshape(2, 2, 2)
        names = read(DeviceMesh("cpu", cubed, mesh_dim_names=("a_2", "a", "a"))).names
        assert names == ("a_2", "a", "a_2_2")


def test_axes_without_names_are_numbered():
    with fake(8, 5):
        layout = read(init_device_mesh("cpu", (2, 4)))
    assert layout.names == ("axis_0", "axis_1")
    assert layout.group("axis_1") == (4, 5, 6, 7)
    assert layout.notes == ()


@pytest.mark.parametrize(
    ("ranks", "given", "names"),
    [
        ([0, 1, 2, 3], ("dp"), ("dp",)),
        ([0, 1, 2, 3], "x", ("x",)),
        ([[0, 1], [2, 3]], ("a", "a"), ("a", "a_1")),
        ([[0, 1], [2, 3]], ("a", "b", "c"), ("a", "b")),
    ],
)
def test_names_that_the_constructor_of_torch_takes_and_nobody_means_are_made_good(ranks, given, names):
    with fake(4):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=given)
        layout = read(mesh)
        assert layout.names == names
        told = [f"Torch has the names {tuple(mesh.mesh_dim_names)!r} for its axes; they are {names!r} here."]
        assert list(layout.notes) == (told if tuple(mesh.mesh_dim_names) != names else [])


def test_ranks_in_an_order_of_their_own_have_coordinates_of_the_mesh_and_groups_sorted_by_torch():
    with fake(8, 7):
        mesh = DeviceMesh("cpu", [[7, 4], [1, 5]], mesh_dim_names=("a", "b"))
        layout = read(mesh)
        assert (layout.ranks, layout.coordinate) == ((7, 4, 1, 5), (0, 0))
        assert layout.group("b") == (7, 4)
        assert dist.get_process_group_ranks(mesh.get_group("b")) == [4, 7]
        assert mesh.get_local_rank("b") == 1
        assert layout.notes == (
            "Along a and b, ranks are not in ascending order here, while torch sorts the ranks of a group: "
            "get_local_rank() and the coordinate can differ.",
        )


def test_ranks_that_ascend_in_every_group_are_told_nothing_of():
    with fake(8, 2):
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
        layout = read(mesh)
        assert layout.coordinate == (0, 1)
        assert (mesh.get_local_rank("a"), mesh.get_local_rank("b")) == (0, 1)
        assert layout.notes == ()


def test_a_process_that_is_not_on_the_mesh_reads_it_and_is_told_who_idles():
    with fake(8, 5):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layout = read(mesh)
        assert (layout.state, layout.rank, layout.coordinate) == ("simulated", 5, None)
        assert layout.idle == (4, 5, 6, 7)
        assert layout.notes == ("This process (rank 5) is not on the mesh.",)
        assert [axis.backend for axis in layout.axes] == [None, None]
    assert (read(mesh).state, read(mesh).rank) == ("stale", None)


def test_an_axis_whose_group_is_that_of_the_whole_job_is_marked():
    with fake(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        assert mesh.get_group("ep") is dist.group.WORLD
        assert [axis.is_world for axis in read(mesh).axes] == [True]
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert [axis.is_world for axis in read(square).axes] == [False, False]
        flat = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ep", "edp"))
        marks = [flat.get_group(name) is dist.group.WORLD for name in ("ep", "edp")]
        assert [axis.is_world for axis in read(flat).axes] == marks


def test_two_meshes_over_the_same_ranks_are_each_their_own():
    with fake(8, 5):
        first = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        second = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        assert (read(first).group("tp"), read(second).group("tp")) == ((4, 5, 6, 7), (4, 5))


def test_a_mesh_its_parts_and_its_tensors_are_stale_once_the_group_is_destroyed():
    with fake(8, 5):
        mesh = cube()
        part, flat = mesh["tp"], mesh["pp", "dp"]._flatten("outer")
        whole = torch.empty(4, 4, device="meta")
        tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(0), Shard(1)])
    for thing in (mesh, part, flat, tensor.device_mesh):
        layout = read(thing)
        assert layout.state == "stale"
        assert layout.reason == "Its process group was destroyed: nothing can be sent over it any more."
        assert layout.step == (
            'torch.distributed.init_process_group(); mesh = init_device_mesh("cpu", (2, 2, 2), '
            "mesh_dim_names=('pp', 'dp', 'tp'))"
        )
        assert (layout.ranks, layout.rank, layout.coordinate) == (tuple(range(8)), 5, (1, 0, 1))
        assert layout.group("tp") == (4, 5)
    assert read(part).focus == ("tp",)
    assert read(flat).focus == ("pp", "dp")


def test_the_step_after_a_destroyed_mesh_makes_another_one():
    with gloo():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        assert read(mesh).state == "ready"
    with gloo():
        names = {"init_device_mesh": init_device_mesh}
        layout = read(mesh)
        assert layout.state == "stale"
        exec(layout.step, names)
        assert read(names["mesh"]).state == "ready"


def again(rank: int = 5) -> tuple[list[DeviceMesh], DeviceMesh]:
    """Meshes of a job that is over, and one of the job of now with groups of the same names."""
    with fake(8, rank):
        old = cube()
        outside = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert [read(mesh).state for mesh in (old, outside)] == ["simulated"] * 2
        names = [old.get_group(name).group_name for name in CUBE]
        parts = [old, old["tp"], outside]
    dist.init_process_group("fake", store=_store(), rank=rank, world_size=8)
    new = cube()
    assert [new.get_group(name).group_name for name in CUBE] == names
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return parts, new


def _store():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@pytest.fixture
def recycled():
    hook = sys.excepthook
    yield again
    dist.destroy_process_group()
    sys.excepthook = hook


def test_a_mesh_is_stale_though_a_new_group_has_the_name_of_its_own(recycled):
    old, new = recycled()
    for mesh in old:
        layout = read(mesh)
        assert layout.state == "stale"
        assert layout.reason == (
            "It belongs to a process group that was destroyed; the one there is now is another one."
        )
        assert layout.step.startswith('mesh = init_device_mesh("cpu", (2, 2')
    assert read(new).state == "simulated"


def test_a_stale_mesh_keeps_the_rank_that_it_had_when_the_new_job_has_another(recycled):
    old, _ = recycled()
    assert read(old[0]).rank == 5
    assert read(old[0]).world is None


def test_a_mesh_whose_group_had_other_ranks_is_stale_though_it_was_never_seen():
    with fake(8, 5):
        old = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    with fake(8, 5):
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        assert read(old).state == "stale"


def test_a_mesh_is_stale_when_one_of_its_groups_was_destroyed_alone():
    with fake(8, 5):
        mesh = cube()
        dist.destroy_process_group(mesh.get_group("tp"))
        assert read(mesh).state == "stale"


def test_a_mesh_that_is_gone_is_not_remembered():
    with fake(8, 5):
        mesh = cube()
        read(mesh)
        key = id(mesh)
        assert key in devicemesh._jobs
        del mesh
        gc.collect()
        assert key not in devicemesh._jobs


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake tensors"])
def test_a_mesh_is_read_under_any_mode_of_the_caller(mode):
    with fake(4, 2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh["a", "b"]._flatten("all")
        with mode():
            layouts = [read(mesh), read(mesh["b"])]
        for layout in layouts:
            assert (layout.ranks, layout.coordinate) == ((0, 1, 2, 3), (1, 0))
            assert layout.group("b") == (2, 3)
            assert layout.aliases == {"all": ("a", "b")}
    with mode():
        assert (read(mesh).state, read(mesh).ranks) == ("stale", (0, 1, 2, 3))


def test_a_mesh_is_read_where_the_default_device_is_meta():
    with default_device("meta"), fake(4, 2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert read(mesh["b"]).ranks == (0, 1, 2, 3)


def test_a_mesh_is_told_without_touching_what_it_is_asked_of():
    class Touchy:
        def __getattribute__(self, name):
            raise AssertionError(f"{name} was asked for")

    assert not is_mesh(Touchy())
    assert not is_mesh(DeviceMesh)
    assert not is_mesh(None)
    # A class of that name which is none of torch's.
    assert not is_mesh(type("DeviceMesh", (), {})())
    with fake(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_mesh(init_device_mesh("cpu", (2,)))


def test_131072_ranks_of_a_mesh_are_read():
    with fake(131072, 77777):
        mesh = init_device_mesh("cuda", (16, 8, 128, 8), mesh_dim_names=("pp", "dp", "cp", "tp"))
        layout = read(mesh["tp"])
        assert layout.coordinate == tuple(mesh.get_coordinate()) == (9, 3, 122, 1)
        assert (layout.focus, layout.group("tp")) == (("tp",), tuple(range(77776, 77784)))


if PLANS:

    def test_a_mesh_without_a_group_is_a_plan(request):
        request.getfixturevalue("nothing_starts")
        ranks = torch.arange(8).view(2, 2, 2)
        mesh = DeviceMesh("cuda", ranks, mesh_dim_names=CUBE, _init_backend=False, _rank=5)
        layout = read(mesh)
        assert (layout.state, layout.rank, layout.coordinate) == ("planned", 5, (1, 0, 1))
        assert layout.reason == "It was made without process groups: a plan."
        assert [axis.backend for axis in layout.axes] == [None, None, None]
        # Torch can do none of that with such a mesh.
        assert layout["tp"].focus == ("tp",)
        assert layout.flattened(("pp", "dp"), "outer").group("outer") == (1, 3, 5, 7)

    def test_a_mesh_without_a_group_stays_a_plan_while_another_group_is_there():
        ranks = torch.arange(8).view(2, 4)
        mesh = DeviceMesh("cuda", ranks, mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=5)
        with fake(4, 1):
            assert (read(mesh).state, read(mesh).rank) == ("planned", 5)

    def test_an_axis_that_was_taken_apart_stands_with_its_parts():
        with fake(8, 5):
            mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
            apart = mesh._unflatten(0, (2, 4), ("replicate", "shard"))
            layout = read(apart)
            assert (layout.names, layout.shape, layout.focus) == (("replicate", "shard"), (2, 4), ())
            assert layout.coordinate == (1, 1)
            assert read(mesh).names == ("dp",)

    def test_a_part_of_an_axis_that_was_taken_apart_is_none_of_the_axis_it_was_even_if_it_is_called_so():
        with fake(8, 5):
            mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
            part = mesh._unflatten(0, (2, 4), ("dp", "shard"))["dp"]
            assert part.size() == 2
            layout = read(part)
            # Its copies are there, too: the ranks of the others work as well.
            assert (layout.names, layout.shape, layout.focus) == (("copy", "dp"), (4, 2), ("dp",))
            assert (layout.group("dp"), layout.coordinate, layout.idle) == ((1, 5), (1, 1), ())
            assert layout.notes == (
                "copy: the other axes of these ranks, as torch does not tell their names.",
            )
        # The rank is known from the whole, which has one place for it.
        layout = read(part)
        assert (layout.state, layout.group("dp"), layout.rank, layout.coordinate) == (
            "stale",
            (1, 5),
            5,
            (1, 1),
        )

    def test_an_axis_that_was_flattened_of_a_mesh_that_was_taken_apart_is_one_of_it():
        with fake(8, 5):
            mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
            parts = mesh._unflatten(0, (2, 2, 2), CUBE)
            parts["dp", "tp"]._flatten("fsdp")
            assert read(parts).aliases == {"fsdp": ("dp", "tp")}
            assert read(parts).group("fsdp") == (4, 5, 6, 7)

    def test_a_part_whose_own_group_was_destroyed_is_stale():
        with fake(8, 5):
            mesh = cube()
            flat = mesh["pp", "dp"]._flatten("outer")
            dist.destroy_process_group(flat.get_group())
            assert read(flat).state == "stale"
            assert read(mesh).state == "simulated"

    def test_a_mesh_that_was_never_seen_before_is_stale_all_the_same():
        with fake(8, 5):
            old = cube()
        with fake(8, 5):
            cube()
            assert read(old).state == "stale"
