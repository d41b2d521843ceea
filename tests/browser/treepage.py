"""The tree widget as its user sees it: rows with what they say, ticks, the plan, buttons and the keyboard."""

from __future__ import annotations

# Rows on the screen from top to bottom: level, label, mark, tick, whether it is open.
ROWS = """root => [...root.querySelectorAll("[role=treeitem]")].filter(row => !row.hidden)
    .map(row => ({ level: Number(row.ariaLevel), label: row.querySelector(".mv-label").textContent,
        at: Number(row.ariaPosInSet), of: Number(row.ariaSetSize), y: row.getBoundingClientRect().top,
        mark: (row.querySelector(".mv-pill")?.textContent ?? "").split(" ").at(-1), tick: row.ariaChecked,
        open: row.ariaExpanded })).sort((a, b) => a.y - b.y)"""
RUN = " … "


class TreeOnPage:
    """One view of a tree widget.

    Attributes:
        root: Its element, as a locator.
        tree: The element that has the focus while keys walk over rows.
        box: The filter box.
    """

    def __init__(self, notebook, number: int = 0) -> None:
        self.page = notebook.page
        self.root = notebook.page.locator(".mv-widget").nth(number)
        self.tree = self.root.get_by_role("tree")
        self.box = self.root.get_by_role("searchbox")
        self.page.set_default_timeout(20_000)
        self.root.get_by_role("treeitem").first.wait_for()

    def rows(self) -> list[dict]:
        """What the rows on the screen say, from top to bottom."""
        return self.root.evaluate(ROWS)

    def labels(self) -> list[str]:
        """The names of the rows on the screen."""
        return [row["label"] for row in self.rows()]

    def all_rows(self) -> list[dict]:
        """What all rows of the list say; it is scrolled from its top to its end."""
        found: dict[int, dict] = {}
        height = self.tree.evaluate("e => (e.scrollTop = 0, e.scrollHeight)")
        for top in range(0, height, 240):
            self.tree.evaluate(
                "(e, top) => new Promise(done => { e.scrollTop = top; requestAnimationFrame(() => "
                "requestAnimationFrame(done)); })",
                top,
            )
            start = self.tree.evaluate("e => e.scrollTop - e.getBoundingClientRect().top")
            found |= {round(row.pop("y") + start): row for row in self.rows()}
        self.tree.evaluate("e => { e.scrollTop = 0; }")
        return [found[y] for y in sorted(found)]

    def marks(self) -> dict[str, str]:
        """Path → mark of every row that stands for one thing; runs of repeated blocks are left out."""
        found, above = {}, {0: ()}
        for row in self.all_rows():
            outer = above[row["level"] - 1]
            own = () if row["level"] == 1 or RUN in row["label"] else (row["label"],)
            above[row["level"]] = outer + own
            if RUN not in row["label"]:
                found[".".join(outer + own)] = row["mark"]
        return found

    def row(self, label: str):
        """The row with this name, which is on the screen."""
        exact = self.page.locator(".mv-label").get_by_text(label, exact=True)
        return self.root.locator("[role=treeitem]:not([hidden])").filter(has=exact).first

    def active(self) -> str:
        """The name of the row that the keyboard is at, as a screen reader is told."""
        return self.tree.evaluate(
            "e => document.getElementById(e.getAttribute('aria-activedescendant'))"
            "?.querySelector('.mv-label').textContent ?? ''"
        )

    def open(self, levels: str) -> None:
        """Choose from the list of levels: ``"Expand all"``."""
        self.root.get_by_label("Expand", exact=True).select_option(label=levels)

    def tick(self, label: str) -> None:
        """Click the box of a row."""
        self.row(label).locator(".mv-box").click()

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, with the tree focused."""
        self.tree.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def button(self, name: str):
        """A button by its name."""
        return self.root.get_by_role("button", name=name, exact=True)

    def plans(self, expected: str) -> None:
        """Wait until the line of the plan says this; it is made anew, beside everything else, at each tick."""
        from playwright.sync_api import expect  # a test that gets here has a browser

        expect(self.root.locator(".mv-plan-ready")).to_have_text(expected, timeout=20_000)

    def outcome(self, kind: str = "done", seconds: float = 30) -> str:
        """What was done, or why not, once it is told; ``kind`` is "done", "error" or "cancelled"."""
        told = self.root.locator(f".mv-outcome .mv-{kind}")
        told.wait_for(timeout=seconds * 1000)
        return told.inner_text()

    def shows(self, label: str, mark: str) -> None:
        """Wait until a row has a mark."""
        self.row(label).locator(f".mv-pill.mv-{mark}").wait_for()
