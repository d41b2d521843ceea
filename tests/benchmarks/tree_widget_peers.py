"""The tree widget next to other libraries that show a module tree in a notebook, for a model of 41,284 modules.

Run by hand: python tests/benchmarks/tree_widget_peers.py [layers experts]. The others are no dependency of the tests;
they are installed with

    pip install wigglystuff treescope ipytree

and what is missing is left out, and said to be. Each library has a server, a kernel and a browser of its own, and is
given the model itself, so walking it is part of the time. What is not back after 120 s is ended, and what needs more
than 8 GB of memory, all processes together, too.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys

from widget_page import EMPTY, EMPTY_IS_THERE, HOOKS, LAST_SPAN, guarded, notebook

SECONDS, STARTING, MEMORY = 120, 60, 8e9

# library → what is imported before, the cell, and what is there once a first row can be read
PEERS: dict[str, tuple[str, str, str]] = {
    "torch-metaviz": (
        "",
        "metaviz.show(model)",
        "() => [...document.querySelectorAll('.mv-widget [role=tree] .mv-row:not([hidden])')]",
    ),
    "wigglystuff": (
        "from wigglystuff import ModuleTreeWidget",
        "ModuleTreeWidget(model)",
        "() => [...document.querySelectorAll('.module-tree-root .mt-name')].slice(0, 1)",
    ),
    "treescope": (
        "import treescope; from IPython.display import HTML",
        "HTML(treescope.render_to_html(model))",
        "() => [...document.querySelectorAll('treescope-container')]"
        ".filter((each) => each.shadowRoot?.querySelector('.foldable_node'))",
    ),
    "ipytree": (
        """from ipytree import Node, Tree
def node(name, module):
    below = [node(*each) for each in module.named_children()]
    return Node(f"{name}: {type(module).__name__}", nodes=below, opened=False)""",
        'Tree(nodes=[node("model", model)])',
        "() => [...document.querySelectorAll('.jstree-anchor')].slice(0, 1)",
    ),
}


def version(library: str) -> str | None:
    """The version that is installed; None if none is."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "this checkout" if library == "torch-metaviz" else None


def measure(library: str, layers: int, experts: int) -> dict:
    """The times and sizes of one library."""
    before, cell, there = PEERS[library]
    make = f"import trees\nmodel = trees.mixture({layers}, {experts})\nprint(sum(1 for _ in model.modules()))"
    with notebook([HOOKS + EMPTY + before, make, "Empty()", cell, LAST_SPAN]) as page:
        page.run_cell(0)
        page.run_cell(1, 120)
        # Twice: the first one loads what all widgets need.
        page.first_paint(2, EMPTY_IS_THERE)
        empty = page.first_paint(2, EMPTY_IS_THERE)
        elements, heap = page.elements(), page.heap()
        shown = page.first_paint(3, there, SECONDS)
        if shown is None:
            return {"why": f"not back after {SECONDS} s", "said": page.output_text(3)[-300:]}
        began, ended = page.ask(4)
        return {
            "modules": int(page.output_text(1)),
            "shown": shown["paint"] - shown["start"],
            "empty": empty["paint"] - empty["start"],
            "kernel": ended - began,
            "bytes": shown["bytes"],
            "elements": page.elements() - elements,
            "heap": sum(page.heap()) - sum(heap),
        }


def line(*cells: str) -> None:
    """Print one line of the table."""
    widths = (28, 12, 12, 12, 14, 12, 12)
    print(
        "".join(
            f"{cell:>{width}}" if at else f"{cell:{width}}"
            for at, (cell, width) in enumerate(zip(cells, widths, strict=False))
        )
    )


def main() -> None:
    """Measure one library, for a process of its own, or compare all."""
    if sys.argv[1:2] == ["--peer"]:
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:5]))))
        return
    size = sys.argv[1:3] or ["80", "128"]
    line("", "shown ms", "empty ms", "kernel ms", "B received", "elements", "heap MB")
    for library in PEERS:
        known = version(library)
        if known is None:
            line(library, f"left out: it is not installed. Next: pip install {library}")
            continue
        found = guarded(["tree_widget_peers.py", "--peer", library, *size], SECONDS + STARTING, MEMORY)
        if isinstance(found, str) or "why" in found:
            line(
                f"{library} {known}",
                "  " + (found if isinstance(found, str) else f"{found['why']} {found['said']}"),
            )
            continue
        numbers = (found[name] for name in ("shown", "empty", "kernel", "bytes", "elements"))
        line(f"{library} {known}", *(f"{number:,.0f}" for number in numbers), f"{found['heap'] / 1e6:.1f}")


if __name__ == "__main__":
    main()
