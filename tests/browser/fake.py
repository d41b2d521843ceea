"""A widget's front end without Jupyter: its module in an empty page, on a model that keeps to Jupyter's rules.

The rules are those of ipywidgets 8 and anywidget 0.11. Two are left out, because only a kernel makes them
felt: a front end that saves while an earlier save is unanswered is held back, and an error in a callback of
a change that came from Python is written to the console there. Here it is raised, so that a test fails.
"""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path

# Only served to the browser, from here: on this address, unlike on about:blank, pages have a clipboard.
ADDRESS = "http://127.0.0.1/metaviz-fake-widget"
PAGE = "<!doctype html><html lang='en'><title>One widget</title><body><main></main></body></html>"
# JupyterLab paints these behind and into an output; the variables are the theme's own.
OUTPUT_STYLE = """
    body { margin: 8px; background: var(--jp-layout-color0, white); color: var(--jp-content-font-color1, black);
           font: var(--jp-content-font-size1, 14px) var(--jp-content-font-family, sans-serif); }
"""

FAKE = """
const toBytes = (packed) => {
  const text = atob(packed);
  // Not at the start of its buffer, as it may be in other front ends: who forgets byteOffset reads 8 zeros.
  const bytes = new Uint8Array(text.length + 8);
  for (let i = 0; i < text.length; i++) bytes[i + 8] = text.charCodeAt(i);
  return new DataView(bytes.buffer, 8);
};
const isBytes = (value) => ArrayBuffer.isView(value) || value instanceof ArrayBuffer;
const asArray = (value) => ArrayBuffer.isView(value)
  ? new Uint8Array(value.buffer, value.byteOffset, value.byteLength) : new Uint8Array(value);
const mapped = (value, change) => {
  const changed = change(value);
  if (changed !== undefined) return changed;
  if (Array.isArray(value)) return value.map((item) => mapped(item, change));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, mapped(item, change)]));
};
const unpack = (value) => mapped(value, (v) => typeof v?.$bytes === "string" ? toBytes(v.$bytes) : undefined);
const pack = (value) => mapped(value, (v) => isBytes(v)
  ? { $bytes: btoa(Array.from(asArray(v), (byte) => String.fromCharCode(byte)).join("")) } : undefined);

// By value, as Backbone in ipywidgets compares: a list changed in place is no change.
const same = (a, b) => {
  if (Object.is(a, b)) return true;
  if (!(a instanceof Object && b instanceof Object)) return false;
  if (isBytes(a) || isBytes(b)) {
    if (!isBytes(a) || !isBytes(b)) return false;
    [a, b] = [asArray(a), asArray(b)];
  }
  const keys = Object.keys(a);
  return Array.isArray(a) === Array.isArray(b) && keys.length === Object.keys(b).length
    && keys.every((key) => Object.hasOwn(b, key) && same(a[key], b[key]));
};

class Model {
  constructor(state) {
    Object.assign(this, { state: unpack(state), listeners: [], unsaved: {}, sent: [], saved: [] });
  }
  trigger(name, ...args) {
    // A copy: who is added by a callback waits for the next time.
    for (const one of this.listeners.filter((l) => l.name === name)) one.callback(...args);
  }
  assign(state, fromPython) {
    const changed = Object.keys(state).filter((name) => !same(this.state[name], state[name]));
    Object.assign(this.state, state);
    if (!fromPython) for (const name of changed) this.unsaved[name] = state[name];
    for (const name of changed) this.trigger(`change:${name}`, this, this.state[name]);
    if (changed.length) this.trigger("change", this);
  }
  // What render() gets. Each view has its own, so that its listeners go with it.
  facade(owner) {
    const matches = (l, name, callback) => l.owner === owner && (!name || l.name === name)
      && (!callback || l.callback === callback);
    return {
      get: (name) => this.state[name],
      set: (name, value) => this.assign(typeof name === "object" ? name : { [name]: value }, false),
      save_changes: () => {
        if (Object.keys(this.unsaved).length) this.saved.push(structuredClone(this.unsaved));
        this.unsaved = {};
      },
      on: (names, callback) => {
        for (const name of names.split(/\\s+/)) this.listeners.push({ name, callback, owner });
      },
      off: (names, callback) => {
        for (const name of names?.split(/\\s+/) ?? [null])
          this.listeners = this.listeners.filter((l) => !matches(l, name, callback));
      },
      send: (content, callbacks, buffers) => {
        this.sent.push({ content: JSON.parse(JSON.stringify(content)), buffers: [...buffers ?? []] });
      },
    };
  }
}

window.fakeWidget = {
  views: [],
  async start(esm, state) {
    this.model = new Model(state);
    const address = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
    const made = (await import(address)).default;
    this.widget = typeof made === "function" ? await made() : made;
    await this.widget.initialize?.({ model: this.model.facade("initialize"),
                                     signal: new AbortController().signal });
  },
  async view() {
    const el = document.createElement("div");
    el.className = "fake-view";
    el.dataset.number = this.views.length;
    document.querySelector("main").append(el);
    const view = { el, controller: new AbortController() };
    this.views.push(view);
    view.cleanup = await this.widget.render?.({ model: this.model.facade(view), el,
                                                signal: view.controller.signal });
  },
  async remove(index) {
    const view = this.views[index];
    if (view.controller.signal.aborted) return;
    view.controller.abort();
    this.model.facade(view).off(null);
    if (typeof view.cleanup === "function") await view.cleanup();
    view.el.remove();
  },
  unpack, pack,
};
"""


class FakeWidget:
    """One widget in one page, with a view of it.

    Attributes:
        page: Playwright's page, for the keyboard, the mouse and locators.
        errors: Uncaught errors of the page, with their stacks.
        outside_requests: All that the page asked for besides itself; a widget's front end asks for nothing.
    """

    def __init__(
        self, page, esm: str, css: str = "", state: dict | None = None, theme: str | None = "light"
    ) -> None:
        """Load the module and show a first view of it.

        Args:
            page: A fresh page of Playwright's.
            esm: The module's source, with ``export default``.
            css: Its style sheet.
            state: The traits and their values; bytes reach the module as a ``DataView``.
            theme: ``"light"`` or ``"dark"`` for JupyterLab's colours; None for a page without them.
        """
        self.page = page
        self.errors: list[str] = []
        self.outside_requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(getattr(error, "stack", None) or str(error)))
        page.on("request", self._note_request)
        page.route(ADDRESS, lambda route: route.fulfill(body=PAGE, content_type="text/html"))
        page.goto(ADDRESS)
        self.theme(theme)
        page.add_style_tag(content=OUTPUT_STYLE + css)
        # In a scope of its own: the module must not meet the fake's names.
        page.evaluate(f"() => {{ {FAKE} }}")
        page.evaluate("([esm, state]) => fakeWidget.start(esm, state)", [esm, _pack(state or {})])
        self._views = 0
        self.view()

    def _note_request(self, request) -> None:
        if not request.url.startswith((ADDRESS, "blob:", "data:")):
            self.outside_requests.append(request.url)

    def view(self):
        """Show the model once more, below the other views; returns the new view's host element."""
        self.page.evaluate("() => fakeWidget.view()")
        self._views += 1
        return self.root(self._views - 1)

    def root(self, n: int = 0):
        """The host element of the n-th view, as a locator; views that were closed count too."""
        return self.page.locator(f".fake-view[data-number='{n}']")

    def remove(self, n: int = 0) -> None:
        """Close the n-th view as Jupyter does when its output goes: end the signal, run the cleanup."""
        self.page.evaluate("(n) => fakeWidget.remove(n)", n)

    def get(self, name: str) -> object:
        """A trait's value as the front end has it; bytes for a ``DataView``."""
        return _unpack(self.page.evaluate("(name) => fakeWidget.pack(fakeWidget.model.state[name])", name))

    def set(self, name: str, value: object) -> None:
        """Change a trait as Python does: whoever listens hears of it, nothing is saved back."""
        self.update(**{name: value})

    def update(self, **state: object) -> None:
        """Change several traits in one message, as ``hold_sync`` does: all are there before any event."""
        self.page.evaluate("(s) => fakeWidget.model.assign(fakeWidget.unpack(s), true)", _pack(state))

    def answer(self, content: dict, buffers: list[bytes] | tuple = ()) -> None:
        """Send a custom message, as ``widget.send`` does."""
        self.page.evaluate(
            "([c, b]) => fakeWidget.model.trigger('msg:custom', c, fakeWidget.unpack(b))",
            [content, _pack(list(buffers))],
        )

    @property
    def sent(self) -> list[dict]:
        """The contents of the custom messages that the front end has sent, oldest first."""
        return self.page.evaluate("() => fakeWidget.model.sent.map(message => message.content)")

    @property
    def sent_buffers(self) -> list[list[bytes]]:
        """The buffers that went with each message of ``sent``."""
        return _unpack(self.page.evaluate("() => fakeWidget.pack(fakeWidget.model.sent.map(m => m.buffers))"))

    @property
    def saved(self) -> list[dict]:
        """The traits of each ``save_changes()`` that had something to save, oldest first."""
        return _unpack(self.page.evaluate("() => fakeWidget.pack(fakeWidget.model.saved)"))

    def wait_for_sent(self, count: int) -> list[dict]:
        """Wait until the front end has sent so many messages in all; returns ``sent``."""
        self.page.wait_for_function("(n) => fakeWidget.model.sent.length >= n", arg=count)
        return self.sent

    def wait_for_saved(self, count: int) -> list[dict]:
        """Wait until the front end has saved so many times in all; returns ``saved``."""
        self.page.wait_for_function("(n) => fakeWidget.model.saved.length >= n", arg=count)
        return self.saved

    def theme(self, name: str | None) -> None:
        """Show JupyterLab's ``"light"`` or ``"dark"`` colours, or with None none of them."""
        self.page.evaluate(
            """([name, css]) => {
                document.getElementById("fake-theme")?.remove();
                const style = Object.assign(document.createElement("style"), { id: "fake-theme" });
                style.textContent = css;
                document.head.prepend(style);
                if (name === null) delete document.body.dataset.jpThemeLight;
                else document.body.dataset.jpThemeLight = String(name === "light");
            }""",
            [name, "" if name is None else _theme_css(name)],
        )


def _theme_css(name: str) -> str:
    """The variables of a theme as the installed JupyterLab ships it."""
    found = importlib.util.find_spec("jupyterlab")
    if found is None:
        raise ModuleNotFoundError("themes come from jupyterlab: install it, or give theme=None")
    folder = Path(found.origin).parent / "themes/@jupyterlab" / f"theme-{name}-extension"
    return "\n".join(re.findall(r":root\s*\{[^}]*\}", (folder / "index.css").read_text(encoding="utf-8")))


def _pack(value: object) -> object:
    """Replace bytes, which JSON cannot hold, as ``pack`` in the page does."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    return [_pack(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unpack(value: object) -> object:
    if isinstance(value, dict):
        packed = value.get("$bytes")
        return base64.b64decode(packed) if packed is not None else {k: _unpack(v) for k, v in value.items()}
    return [_unpack(item) for item in value] if isinstance(value, list) else value
