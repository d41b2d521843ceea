"""The tree widget in JupyterLab and Chromium: what a tree weighs, when it is seen, and how it feels.

Run by hand: python tests/benchmarks/tree_widget.py [case ...]; without a case, all of them. Other libraries:
tree_widget_peers.py. Needs the extra `test`, and Chromium.

Each case has a server, a kernel and a browser of its own. A cell is run until its rows are painted, then an empty
anywidget in the same page, several times in turn; the tree is walked before and anew for each round, so nothing that
was worked out for an earlier one helps. The goals, for 100,000 rows: 300 ms more than the empty one, 50 ms per key in
the filter box; for any tree 16 bytes a row, 100 elements of rows, 60 MB of heap and no frame with a blank row. Ends
with status 1 where one is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable

import widget_page
from widget_page import EMPTY, EMPTY_IS_THERE, HOOKS, LAST_SPAN, guarded, notebook

# case → how the kernel makes its model
CASES: dict[str, str] = {
    "moe 1k": "trees.mixture(2, 64)",
    "moe 10k": "trees.mixture(11, 128)",
    "moe 100k": "trees.mixture(111, 128)",
    "moe 500k": "trees.mixture(556, 128)",
    "all names differ 100k": "tree_widget.strangers(50_000)",
    "names and shapes differ 100k": "tree_widget.strangers(50_000, shapes=True)",
    "Llama-3.1-70B": "metaviz.build(build.llama)",
    "DeepSeek-V3": "metaviz.build(build.deepseek)",
}
ROUNDS = {"moe 500k": 1}
TYPED = {"strangers": ["m4f2", "w00a"]}
ROWS_ARE_THERE = """() => [...document.querySelectorAll(".mv-widget [role=tree] .mv-row:not([hidden])")]
    .map((row) => row.closest(".mv-widget"))"""

MODEL = """import torch, trees, tree_widget, build
gc.collect()
start = time.perf_counter()
model = {make}
print(json.dumps(time.perf_counter() - start))"""
WALK = """start = time.perf_counter()
seen = metaviz.tree(model)
print(json.dumps(time.perf_counter() - start))"""
SHOW = "widget = metaviz.show(seen)\nwidget"
CLOSE = "widget.close(); del widget, seen; _ = gc.collect(); print(json.dumps(1))"
PARTS = """import zlib
from metaviz.core.watch import fingerprint
from metaviz.views.payload import payload
from metaviz.widgets.places import Places
fresh = metaviz.tree(model)
parts = {}
def timed(name, work):
    start = time.perf_counter()
    made = work()
    parts[name] = (time.perf_counter() - start) * 1000
    return made
timed("fingerprint", lambda: fingerprint(model))
timed("first_look", lambda: Places(fresh.columns, fresh.root).first_look())
packed = timed("payload", lambda: payload(fresh))
timed("repr", lambda: repr(fresh))
timed("_repr_html_", lambda: fresh._repr_html_())
raw = zlib.decompress(packed)
timed("zlib.compress (of payload)", lambda: zlib.compress(raw, 6))
names = zlib.compress(json.dumps(list(dict.fromkeys(fresh.columns.names))).encode(), 6)
print(json.dumps({
    "rows": len(fresh.columns.names),
    "modules": sum(1 for _ in model.modules()),
    "names": len(names),
    "packed": len(packed),
    "raw": len(raw),
    "parts": parts,
}))"""
PROFILE = """import cProfile, pstats
fresh = metaviz.tree(model)
profiler = cProfile.Profile()
profiler.enable(); shown = metaviz.show(fresh); shown._ipython_display_(); profiler.disable()
stats = pstats.Stats(profiler).stats.items()
found = [(spent, each[2], each[0].rpartition("/")[2]) for each, (_, _, _, spent, _) in stats]
shown.close(); get_ipython().display_pub.clear_output()
print(json.dumps(sorted(found, reverse=True)[:40]))"""


def strangers(count: int, shapes: bool = False):
    """A model of modules with a tensor each whose names, or also shapes, are all different."""
    import torch
    from torch import nn

    model = nn.Module()
    group = model
    for number in range(count):
        if number % 500 == 0:
            group = nn.Module()
            model.add_module(f"group{number:05x}", group)
        inner = nn.Module()
        group.add_module(f"m{number * 2654435761 % 2**32:08x}", inner)
        shape = (number + 1, 3) if shapes else (4, 4)
        tensor = nn.Parameter(torch.empty(shape, device="meta"))
        inner.register_parameter(f"w{number * 40503 % 2**24:06x}", tensor)
    return model


# Each key: from the event to a frame in which rows were written anew.
TYPE = """async (text) => {
    const root = document.querySelector(".mv-widget"), box = root.querySelector(".mv-filter");
    const list = root.querySelector("[role=tree]"), times = [];
    let written = 0;
    const watch = new MutationObserver(() => { written++; });
    watch.observe(list, { subtree: true, childList: true, attributes: true });
    const turn = async (value) => {
        await bench.painted();
        written = 0;
        box.value = value;
        const start = performance.now();
        box.dispatchEvent(new Event("input", { bubbles: true }));
        const script = performance.now() - start;
        let end = await bench.painted();
        while (!written && end - start < 5000) end = await bench.painted();
        times.push({ script, drawn: end - start, found: root.querySelector(".mv-found").textContent });
        await new Promise((done) => setTimeout(done, 60));
    };
    for (let length = 1; length <= text.length; length++) await turn(text.slice(0, length));
    await turn("");
    watch.disconnect();
    return times;
}"""

EXPAND = """async (value) => {
    const root = document.querySelector(".mv-widget"), tree = root.querySelector("[role=tree]");
    const select = root.querySelector("select:has(option[value=all])");
    await bench.painted();
    const before = tree.scrollHeight, start = performance.now();
    select.value = value;
    select.dispatchEvent(new Event("change", { bubbles: true }));
    const script = performance.now() - start;
    return { script, drawn: await bench.painted() - start, before, after: tree.scrollHeight };
}"""

# What a frame has shown is looked at once it is out: parts of the list without a row, and rows without a name.
SCROLL = """async ([by, many]) => {
    const tree = document.querySelector(".mv-widget [role=tree]"), frames = [];
    let blank = 0, most = 0, moved = 0;
    tree.scrollTop = 0;
    await bench.painted();
    let then = await new Promise(requestAnimationFrame);
    for (let frame = 0; frame < many; frame++) {
        const top = tree.scrollTop;
        tree.scrollTop += by;
        moved += tree.scrollTop - top;
        await bench.out();
        const box = tree.getBoundingClientRect(), rows = [...tree.querySelectorAll("[role=treeitem]:not([hidden])")];
        const places = rows.map((row) => row.getBoundingClientRect()).sort((one, other) => one.top - other.top);
        let covered = box.top + tree.clientTop;
        const end = covered + tree.clientHeight;
        for (const place of places) if (place.top <= covered + 1) covered = Math.max(covered, place.bottom);
        if (covered < end - 1 || rows.some((row) => !row.querySelector(".mv-label").textContent)) blank++;
        most = Math.max(most, tree.querySelectorAll("[role=treeitem]").length);
        const now = await new Promise(requestAnimationFrame);
        frames.push(now - then);
        then = now;
    }
    return { frames, blank, most, moved };
}"""


def measure(case: str) -> dict:
    """All numbers of one case."""
    cells = [
        HOOKS + EMPTY,
        MODEL.format(make=CASES[case]),
        WALK,
        "Empty()",
        SHOW,
        LAST_SPAN,
        CLOSE,
        PARTS,
        PROFILE,
    ]
    with notebook(cells) as page:
        page.run_cell(0)
        result: dict = {"case": case, "build": page.ask(1, 300)}
        page.run_cell(3)
        result["before"] = page.heap()
        result["rounds"] = [_round(page) for _ in range(ROUNDS.get(case, 5))]
        page.ask(2)
        # The widget stays from here on.
        with page.profile() as functions:
            page.first_paint(4, ROWS_ARE_THERE, 180)
        result["functions"] = {name: spent for name, spent in functions.items() if spent > 1}
        result["fresh"] = page.heap()
        result |= _used(page, case)
        result["after"] = page.heap()
        result["errors"] = page.widget_errors
        result["load"] = os.getloadavg()[1]
        page.ask(6)
        result |= page.ask(7)
        result["python"] = page.ask(8)
    return result


def _round(page: widget_page.WidgetPage) -> dict:
    walk = page.ask(2)
    empty = page.first_paint(3, EMPTY_IS_THERE)
    shown = page.first_paint(4, ROWS_ARE_THERE, 180)
    if empty is None or shown is None:
        raise RuntimeError(
            f"no row is there after 180 s; the cell says {page.output_text(4)!r}, {page.widget_errors}"
        )
    began, ended = (at - shown["origin"] - shown["start"] for at in page.ask(5))
    since = lambda at: at - shown["start"]  # noqa: E731
    biggest = max(shown["frames"], key=lambda frame: frame[1])
    page.ask(6)
    return {
        "walk": walk * 1000,
        "empty": empty["paint"] - empty["start"],
        "shown": since(shown["paint"]),
        "bytes": shown["bytes"],
        "kernel begins": began,
        "kernel ends": ended,
        "payload arrives": since(biggest[0]),
        "inflating": since(shown["inflates"][0]) if shown["inflates"] else None,
        "rows are there": since(shown["rows"]),
    }


def _used(page: widget_page.WidgetPage, case: str) -> dict:
    evaluate = page.page.evaluate
    evaluate("() => document.querySelector('.mv-widget').scrollIntoView()")
    words = (
        TYPED["strangers"]
        if "differ" in case
        else ["down_proj", "layers.1.self" if "-" in case else "7.down"]
    )
    keys = [key for word in words for key in evaluate(TYPE, word)]
    with page.profile() as functions:
        evaluate(TYPE, words[0])
    result = {"keys": keys, "typing": {name: spent for name, spent in functions.items() if spent > 1}}
    result["expand"] = evaluate(EXPAND, "all")
    result["scroll"] = evaluate(SCROLL, [240, 300])
    return result


def middle(result: dict, name: str) -> float:
    """The median of the rounds."""
    return statistics.median(one[name] for one in result["rounds"] if one[name] is not None)


def late(result: dict) -> float:
    """How many ms later than the empty widget in the same round."""
    return statistics.median(one["shown"] - one["empty"] for one in result["rounds"])


def grown(result: dict) -> float:
    """Megabytes of heap that the widget adds after it was used, array buffers included."""
    return (sum(result["after"]) - sum(result["before"])) / 1e6


def spent(result: dict, name: str) -> list[float]:
    """Milliseconds of each key."""
    return sorted(key[name] for key in result["keys"])


def heavy(result: dict) -> float:
    """Bytes per row, without those of the names."""
    return (result["packed"] - result["names"]) / result["rows"]


def frames(result: dict) -> str:
    """How many frames came late."""
    return f"{sum(frame > 25 for frame in result['scroll']['frames'])} of {len(result['scroll']['frames'])}"


COLUMNS: dict[str, dict[str, Callable[[dict], object]]] = {
    "What it weighs": {
        "rows": lambda r: f"{r['rows']:,}",
        "modules": lambda r: f"{r['modules']:,}",
        "payload B": lambda r: f"{r['packed']:,}",
        "B/row": lambda r: f"{r['packed'] / r['rows']:.2f}",
        "less names": lambda r: f"{heavy(r):.2f}",
        "unpacked B": lambda r: f"{r['raw']:,}",
        "B received": lambda r: f"{middle(r, 'bytes'):,.0f}",
        "JS objects MB": lambda r: f"{(r['after'][0] - r['before'][0]) / 1e6:.1f}",
        "buffers MB": lambda r: f"{(r['after'][1] - r['before'][1]) / 1e6:.1f}",
        "row elements": lambda r: r["scroll"]["most"],
    },
    "Cell run to first paint, ms": {
        "load": lambda r: f"{r['load']:.1f}",
        "build": lambda r: f"{r['build'] * 1000:,.0f}",
        "tree()": lambda r: f"{middle(r, 'walk'):,.0f}",
        "shown, first": lambda r: f"{r['rounds'][0]['shown']:,.0f}",
        "shown": lambda r: f"{middle(r, 'shown'):,.0f}",
        "empty": lambda r: f"{middle(r, 'empty'):,.0f}",
        "difference": lambda r: f"{late(r):,.0f}",
    },
    "When, ms after the cell was started": {
        name: lambda r, name=name: f"{middle(r, name):,.0f}"
        for name in (
            "kernel begins",
            "kernel ends",
            "payload arrives",
            "inflating",
            "rows are there",
            "shown",
        )
    },
    "How it feels, ms": {
        "key, script": lambda r: f"{statistics.median(spent(r, 'script')):.0f}",
        "key, drawn": lambda r: f"{statistics.median(spent(r, 'drawn')):.0f}",
        "slowest key": lambda r: f"{spent(r, 'drawn')[-1]:.0f}",
        "expand all": lambda r: f"{r['expand']['drawn']:.0f}",
        "list px then": lambda r: f"{r['expand']['after']:,}",
        "frame": lambda r: f"{statistics.median(r['scroll']['frames']):.1f}",
        "late frames": frames,
        "blank frames": lambda r: r["scroll"]["blank"],
    },
}


def table(title: str, columns: dict[str, Callable[[dict], object]], results: list[dict]) -> None:
    """Print one line per case."""
    widths = [max(len(name), 9) + 2 for name in columns]
    print(f"\n{title:30}" + "".join(name.rjust(width) for name, width in zip(columns, widths, strict=True)))
    for result in results:
        cells = [str(tell(result)).rjust(width) for tell, width in zip(columns.values(), widths, strict=True)]
        print(f"{result['case']:30}" + "".join(cells))


def missed(result: dict) -> list[str]:
    """The goals that a case misses, in words."""
    large = result["rows"] > 150_000
    goals = [
        ("bytes a row", heavy(result), 16),
        ("ms more than an empty widget", 0 if large else late(result), 300),
        ("ms per key", 0 if large else statistics.median(spent(result, "drawn")), 50),
        ("elements of rows", result["scroll"]["most"], 100),
        ("MB of heap", grown(result), 60),
        ("frames with a blank row", result["scroll"]["blank"], 0),
        ("errors in the page", len(result["errors"]), 0),
    ]
    return [
        f"{result['case']}: {found:.0f} {what}, goal {goal}" for what, found, goal in goals if found > goal
    ]


def profile(result: dict) -> None:
    """Print what takes the time of one case."""
    print(f"\n{result['case']}: the functions that take most, ms, with what they call")
    python = [f"{name} {spent * 1000:.0f}" for spent, name, file in result["python"] if file.endswith(".py")]
    print("  kernel:", ", ".join(f"{name} {ms:.0f}" for name, ms in result["parts"].items()))
    print("  kernel, under a profiler:", ", ".join(python[:24]))
    for what, key in (("page, until shown", "functions"), ("page, typing a word", "typing")):
        print(f"  {what}:", ", ".join(f"{name} {ms:.0f}" for name, ms in list(result[key].items())[:16]))


def main() -> None:
    """Measure one case, for a process of its own, or all."""
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    results: list[dict] = []
    failed: list[str] = []
    for case in sys.argv[1:] or CASES:
        found = guarded(["tree_widget.py", "--case", case], 900)
        if isinstance(found, str):
            failed.append(f"{case}: {found}")
        else:
            results.append(found)
    for title, columns in COLUMNS.items():
        table(title, columns, results)
    for result in results:
        profile(result)
    failed += [line for result in results for line in missed(result)]
    print("\n" + "\n".join(failed or ["All goals for trees of these sizes are met."]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
