"""Simulated meshes: torch's own DeviceMesh for thousands of ranks in one process, under the fake backend."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from metaviz.core.devicemesh import read
from metaviz.core.layout import MeshLayout
from metaviz.core.world import simulated
from metaviz.errors import BadMesh


class Simulation:
    """A mesh under the fake backend: `device_mesh` shards real modules, nothing is sent, values are not to be trusted.

    Close it, or use it as a context manager, before a process group of your own: a process has one at most. Another
    simulation ends it, unless it is in a `with` block.

    Args:
        layout: The plan. Its rank is the one that this process plays.

    Attributes:
        device_mesh: The DeviceMesh.
        layout: What it looks like now; `"stale"` once it is closed.

    Raises:
        BadMesh: There is a process group already, or the plan leaves ranks out of order.

    Example:
        >>> with metaviz.mesh("dp=2,tp=4", simulate=True) as world:
        ...     world.device_mesh["tp"].size()
        4
    """

    #: The simulation that was started last, if anybody holds it.
    _last: ClassVar[Callable[[], Simulation | None]] = staticmethod(lambda: None)

    def __init__(self, layout: MeshLayout) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        if layout.device_type not in ("cpu", "cuda"):
            raise BadMesh(f"A mesh is simulated on 'cpu' or 'cuda', not on {layout.device_type!r}.")
        self._hosts = layout.ranks_per_host
        self._stack, self._is_entered = contextlib.ExitStack(), False
        earlier = self._last()
        if earlier is not None and not earlier._is_entered:
            # The cell that made it is run again.
            earlier.close()
        rank = layout.rank if layout.rank is not None else layout.ranks[0]
        self._stack.enter_context(simulated(layout.world or max(layout.ranks) + 1, rank))
        try:
            # No mode of the caller's shall make these numbers meta or fake: torch computes with them.
            with _disable_current_modes(), torch.device("cpu"):
                ranks = torch.tensor(layout.ranks).reshape(layout.shape)
                self.device_mesh: Any = DeviceMesh(layout.device_type, ranks, mesh_dim_names=layout.names)
        except BaseException:
            self._stack.close()
            raise
        # The world lasts as long as its mesh, which tensors hold, and a name of which may be all that is left.
        weakref.finalize(self.device_mesh, self._stack.close)
        Simulation._last = weakref.ref(self)

    @property
    def layout(self) -> MeshLayout:
        """What it looks like now."""
        return read(self.device_mesh, self._hosts)

    def close(self) -> None:
        """End the simulated job. Meshes and tensors that were made in it are stale from then on."""
        self._is_entered = False
        self._stack.close()

    def __enter__(self) -> Simulation:
        self._is_entered = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.layout)

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        return self.layout._repr_html_()

    def _repr_svg_(self) -> str | None:
        return self.layout._repr_svg_()
