"""How many groups of a mesh have ranks on several hosts, also of a million ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metaviz.core.layout import MeshLayout


def count_crossing(layout: MeshLayout, name: str) -> int:
    """How many groups along an axis, or a flattened one, cross hosts; 0 where hosts are not known."""
    each, ranks = layout.ranks_per_host, layout.ranks
    if each is None or not ranks:
        return 0
    counted = not layout.is_disordered and ranks[-1] - ranks[0] == layout.size - 1
    if name not in layout.names or not counted:
        return sum(min(group) // each != max(group) // each for group in layout.groups(name))
    # Of ranks that are counted one by one, arithmetic tells how many begin too near to the end of their host.
    axis = layout.axis(name)
    stride, block = layout.strides[axis], layout.strides[axis] * layout.shape[axis]
    span = block - stride
    if span >= each:
        return layout.size // layout.shape[axis]

    def near(end: int) -> int:
        return end // each * span + max(0, end % each - each + span)

    starts = range(ranks[0], ranks[0] + layout.size, block)
    return sum(near(start + stride) - near(start) for start in starts)
