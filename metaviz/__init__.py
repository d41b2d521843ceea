"""See which parts of a model on the meta device can be given values, and give them to just the parts you want."""

from metaviz.core.apply import Report, materialize, unload
from metaviz.core.around import findings
from metaviz.core.checkpoint import Checkpoint, checkpoint
from metaviz.core.finding import Finding
from metaviz.core.layout import MeshLayout
from metaviz.core.match import Match, match
from metaviz.core.meshes import mesh
from metaviz.core.placed import sharding
from metaviz.core.plan import Plan, plan
from metaviz.core.record import build, recording
from metaviz.core.sharding import Sharding
from metaviz.core.simulation import Simulation
from metaviz.core.tree import ModuleTree, tree
from metaviz.core.verdict import Verdict
from metaviz.errors import MetavizError

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "Finding",
    "Match",
    "MeshLayout",
    "MeshWidget",
    "MetavizError",
    "ModuleTree",
    "Plan",
    "Report",
    "Sharding",
    "Simulation",
    "TreeWidget",
    "Verdict",
    "build",
    "checkpoint",
    "findings",
    "match",
    "materialize",
    "mesh",
    "plan",
    "recording",
    "sharding",
    "show",
    "tree",
    "unload",
]


def _draw(tree, how, **options):
    from metaviz.views import draw

    return draw(tree, how, **options)


def _draw_checkpoint(checkpoint, how):
    from metaviz.views import checkpoint as view

    return getattr(view, how)(checkpoint)


def _draw_match(match, how):
    from metaviz.views import match as view

    return getattr(view, how)(match)


def __getattr__(name):
    # Widgets bring half of Jupyter along, and not every program that plans wants that.
    if name == "show":
        from metaviz.widgets.shown import show

        return show
    if name == "TreeWidget":
        from metaviz.widgets.tree import TreeWidget

        return TreeWidget
    if name == "MeshWidget":
        from metaviz.widgets.mesh import MeshWidget

        return MeshWidget
    raise AttributeError(f"module 'metaviz' has no attribute {name!r}")


def _draw_mesh(thing, how, **options):
    from metaviz.views import mesh as view

    return view.draw(thing, how, **options)


# Core does not know its views.
MeshLayout.drawn = staticmethod(_draw_mesh)
Sharding.drawn = staticmethod(_draw_mesh)
ModuleTree.drawn = staticmethod(_draw)
Checkpoint.drawn = staticmethod(_draw_checkpoint)
Match.drawn = staticmethod(_draw_match)


def load_ipython_extension(ipython):
    """Register the magics; `%load_ext metaviz` calls this."""
    from metaviz import magics

    magics.load(ipython)


def unload_ipython_extension(ipython):
    """Take the magics away again; `%unload_ext metaviz` calls this."""
    from metaviz import magics

    magics.unload(ipython)
