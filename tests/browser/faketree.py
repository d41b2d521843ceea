"""The tree widget's front end in a page of its own, with the data of a real widget; no Jupyter and no kernel."""

from __future__ import annotations

from browser.treepage import TreeOnPage
from front import Front, quiet
from torch import nn

import metaviz
from metaviz.core.tree import ModuleTree

# What ipywidgets adds is for its own front end.
FOREIGN = ("_model", "_view", "_dom", "_esm", "_css", "_anywidget", "layout", "tabbable", "tooltip")
# Two frames: in the first one a list that was scrolled is drawn, after the second one it is on the screen.
FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def state_of(model: nn.Module | ModuleTree, *, depth: int | None = None, **traits: object) -> dict:
    """The traits of a tree widget as a browser first gets them; ``traits`` replace some of them."""
    widget = metaviz.TreeWidget(model, depth=depth)
    try:
        return own(widget.get_state()) | traits
    finally:
        widget.close()


def own(state: dict) -> dict:
    """What is the tree widget's own of a state."""
    return {name: value for name, value in state.items() if not name.startswith(FOREIGN)}


def shown(fake, model: nn.Module | ModuleTree, *, depth: int | None = None, **traits: object) -> FakeTree:
    """A page that shows the tree of a model; ``fake`` is the fixture. ``theme`` is none of the traits."""
    theme = traits.pop("theme", "light")
    widget = metaviz.TreeWidget
    return FakeTree(fake(widget._esm, widget._css, state_of(model, depth=depth, **traits), theme=theme))


class FakeTree(TreeOnPage):
    """A view of the tree widget on a page without Jupyter.

    Attributes:
        widget: The :class:`FakeWidget`, whose model the view is of.
    """

    def __init__(self, widget, number: int = 0) -> None:
        self.widget = widget
        super().__init__(widget, number)

    def settle(self) -> None:
        """Wait until what was changed is on the screen."""
        self.page.evaluate(FRAMES)

    def active_row(self) -> dict:
        """What a screen reader is told of the row that the keyboard is at; fails where it is told of none."""
        self.settle()
        return self.tree.evaluate(
            """e => { const row = document.getElementById(e.getAttribute("aria-activedescendant"));
                if (!row || row.hidden || !e.contains(row)) throw new Error("no row is active");
                return { label: row.querySelector(".mv-label").textContent, level: Number(row.ariaLevel),
                    at: Number(row.ariaPosInSet), of: Number(row.ariaSetSize), tick: row.ariaChecked,
                    open: row.ariaExpanded }; }"""
        )

    def seen(self) -> list[tuple[int, str]]:
        """Level and name of each row on the screen."""
        self.settle()
        return [(row["level"], row["label"]) for row in self.rows()]

    def whole(self) -> list[tuple[int, str]]:
        """Level and name of each row of the list, on the screen or not."""
        return [(row["level"], row["label"]) for row in self.all_rows()]

    def type(self, text: str) -> None:
        """Write into the filter box, in the place of what is there."""
        self.box.fill(text)
        self.settle()

    def found(self) -> str:
        """What is said beside the filter box."""
        return self.root.locator(".mv-found").inner_text()

    def wishes(self, kind: str) -> list[dict]:
        """The messages of a kind that were sent so far."""
        return [message for message in self.widget.sent if message["do"] == kind]

    def wait_for_wish(self, kind: str, count: int = 1) -> dict:
        """Wait for the ``count``-th message of a kind, and give it back."""
        self.page.wait_for_function(
            "([kind, n]) => fakeWidget.model.sent.filter(m => m.content.do === kind).length >= n",
            arg=[kind, count],
        )
        return self.wishes(kind)[count - 1]


class Wire:
    """A real widget behind a page: each side hears what the other one says once ``pass_on`` is called.

    Attributes:
        tree: The widget.
        page: The :class:`FakeTree` that shows it.
    """

    def __init__(self, fake, model: nn.Module, **options: object) -> None:
        self.tree = metaviz.TreeWidget(model, **options)
        self._front = Front(self.tree)
        self.page = FakeTree(fake(self.tree._esm, self.tree._css, own(self.tree.get_state())))
        self._sent = self._saved = self._heard = 0

    def pass_on(self) -> None:
        """Take what the page has said to the widget, wait until its threads rest, and bring back its words."""
        saved, sent = self.page.widget.saved, self.page.widget.sent
        for traits in saved[self._saved :]:
            self._front.sets(**traits)
        for wish in sent[self._sent :]:
            self._front.says("custom", content=wish)
        self._saved, self._sent = len(saved), len(sent)
        quiet()
        told = list(self._front.sent)
        for method, content in told[self._heard :]:
            if method == "update":
                self.page.widget.update(**content)
            elif method == "custom":
                self.page.widget.answer(content)
        self._heard = len(told)
        self.page.settle()
