// @ts-check
// The mesh widget. The kernel draws; here a rank is picked, by mouse or by keys, and what belongs together is marked.

/** Of the axes, the fastest first; the kernel has the same. */
const SIGNS = "●■▲◆★✚";
/** Key → which axis, from the fastest on, and which way. @type {Record<string, [number, number]>} */
const MOVES = {
  ArrowRight: [1, 1], ArrowLeft: [1, -1], ArrowDown: [2, 1], ArrowUp: [2, -1], PageDown: [3, 1], PageUp: [3, -1], "+": [4, 1], "-": [4, -1],
  "Shift+ArrowRight": [5, 1], "Shift+ArrowLeft": [5, -1], "Shift+ArrowDown": [6, 1], "Shift+ArrowUp": [6, -1],
};
const KEYS = ["← →", "↑ ↓", "Page ↑ ↓", "+ −", "Shift ← →", "Shift ↑ ↓"];

class MeshView {
  /** @param {any} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.el = el;
    this.undo = /** @type {(() => void)[]} */ ([]);
    this.drawn = "";
    /** The place whose groups are marked in the drawing. */
    this.marked = "";
    const act = (/** @type {(...facts: any[]) => any} */ done) => this.guarded(done);
    const id = `mv-mesh-${Math.random().toString(36).slice(2, 8)}`;
    this.title = make("strong", { class: "mv-title" });
    this.note = make("p", { class: "mv-note", role: "status", hidden: true });
    this.which = picker("Mesh", "Which of the meshes that were found", [], act((name) => this.set("_chosen", name)));
    this.colour = picker("Colour by", "The axis whose groups are told apart by colour", [], act((name) => this.set("colour", name)));
    this.save = button("Save as SVG", "Download the drawing", act(() => this.download()), "mv-small");
    this.told = make("p", { class: "mv-told", id: `${id}-told`, role: "status" });
    this.keys = make("p", { class: "mv-keys", id: `${id}-keys` });
    this.below = make("div", { class: "mv-below" }, this.told, this.keys);
    this.stage = make("div", {
      class: "mv-stage", tabIndex: 0, role: "application", "aria-label": "Device mesh", "aria-roledescription": "mesh of ranks",
      "aria-describedby": `${id}-told ${id}-keys`,
    });
    this.facts = make("dl", { class: "mv-facts" });
    this.step = codeLine("the next step");
    this.root = make("div", { class: "mv-mesh-widget" },
      make("div", { class: "mv-top" }, this.title, make("span", { class: "mv-right" }, this.which.element, this.colour.element, this.save)),
      this.note, this.stage, this.below, this.facts, this.step.element);
    this.kernel = new Kernel(model, id, this.root, act((silent) => this.warn(silent)));
    this.stage.addEventListener("click", act((event) => this.clicked(event)));
    this.stage.addEventListener("keydown", act((event) => this.pressed(event)));
    for (const each of this.root.querySelectorAll("select, button, [tabindex]")) each.setAttribute("data-lm-suppress-shortcuts", "true");
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    el.append(this.root);
    for (const name of ["_svg", "_title", "_facts", "_step", "_axes", "_choices", "_chosen", "colour"]) this._listen(`change:${name}`, () => this.draw());
    this._listen("change:_place", () => this.mark());
    this._listen("msg:custom", (answer) => this.kernel.answered(answer));
    this.draw();
    this.kernel.start();
  }

  /** @param {string} name @param {(...facts: any[]) => any} act */
  _listen(name, act) {
    const safe = this.guarded(act);
    this.model.on(name, safe);
    this.undo.push(() => this.model.off(name, safe));
  }

  /** A failure is said in the cell. @param {(...facts: any[]) => any} act */
  guarded(act) {
    return (/** @type {any[]} */ ...facts) => {
      try {
        return act(...facts);
      } catch (error) {
        this.kernel.uncover();
        this.el.prepend(make("p", { class: "mv-error", role: "alert" }, `metaviz front end failed: ${words(error)}. Next: run the cell again.`));
        console.error(error);
      }
    };
  }

  /** @param {string} name @param {any} value */
  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
  }

  /** @returns {[string, number, number, string][]} name to show, size, hue and true name of each axis, the slowest first */
  get axes() {
    return this.model.get("_axes");
  }

  /** Whether there are ranks to go to; of a mesh that is awaited often nothing is known but its size. */
  get alive() {
    return this.axes.length > 0 && this.stage.querySelector(".mv-b[data-p]") !== null;
  }

  draw() {
    const get = (/** @type {string} */ name) => this.model.get(name);
    say(this.title, get("_title"));
    const drawing = get("_svg");
    if (drawing !== this.drawn) {
      this.drawn = drawing;
      // What the kernel draws is escaped there, and read as XML: no script can be in it.
      const parsed = new DOMParser().parseFromString(drawing, "image/svg+xml").documentElement;
      if (parsed.localName !== "svg") throw new Error("the drawing cannot be read");
      parsed.setAttribute("aria-hidden", "true");
      this.stage.replaceChildren(document.importNode(parsed, true));
      this.marked = parsed.dataset.p ?? "";
    }
    fill(this.which.select, get("_choices").map((/** @type {string} */ name) => [name, name]));
    this.which.select.value = get("_chosen");
    this.which.element.hidden = get("_choices").length < 2;
    fill(this.colour.select, [["", "nothing"], ...this.axes.map(([name, , , value]) => /** @type {[string, string]} */ ([value, name]))]);
    this.colour.select.value = get("colour");
    this.colour.element.hidden = this.axes.length < 2 || !this.alive;
    this.save.hidden = this.below.hidden = !this.alive;
    this.facts.replaceChildren(...get("_facts").flatMap((/** @type {[string, string]} */ [head, text]) => this.fact(head, text)));
    say(this.keys, this.alive ? `Keys: ${this.axes.map(([name], at) => [KEYS[this.axes.length - 1 - at], name]).filter(([keys]) => keys).reverse().map((pair) => pair.join(" ")).join(", ")}` : "");
    say(this.step.code, get("_step"));
    this.step.element.hidden = !get("_step");
    this.mark();
    if (this.stage.contains(document.activeElement)) this.reveal();
  }

  /** A line below the drawing; that of an axis has its sign. @param {string} head @param {string} text */
  fact(head, text) {
    const axis = this.axes.find(([name]) => name === head);
    const sign = axis && make("span", { class: `mv-hue mv-hue${axis[2]}`, "aria-hidden": "true" }, `${SIGNS[axis[2]]} `);
    return [make("dt", {}, sign, head), make("dd", {}, text)];
  }

  /** Coordinate of a place. @param {number} place */
  at(place) {
    const found = [];
    for (const [, size] of [...this.axes].reverse()) {
      found.unshift(place % size);
      place = Math.floor(place / size);
    }
    return found;
  }

  /** @param {number[]} coordinate */
  place(coordinate) {
    return coordinate.reduce((place, at, axis) => place * this.axes[axis][1] + at, 0);
  }

  /** Mark the picked rank and its groups, at once; the kernel's own drawing follows. */
  mark() {
    const place = this.model.get("_place"), svg = this.stage.querySelector("svg");
    if (!svg || !this.alive) return say(this.told, "");
    if (place < 0) return say(this.told, "No rank is picked.");
    const here = this.at(place);
    // A folded rank has no box before the kernel has drawn it.
    let said = this.axes.map(([name], axis) => `${name}=${here[axis]}`).join(", ");
    const late = this.marked !== String(place);
    this.marked = String(place);
    for (const box of /** @type {NodeListOf<SVGElement>} */ (svg.querySelectorAll("[data-p]"))) {
      if (Number(box.dataset.p) === place) said = box.querySelector("title")?.textContent ?? said;
      if (late) this._mark(box, here);
    }
    // Lines are drawn by the kernel alone.
    for (const lines of /** @type {NodeListOf<SVGElement>} */ (svg.querySelectorAll(".mv-links"))) lines.style.display = svg.dataset.p === String(place) ? "" : "none";
    say(this.told, said);
  }

  /** @param {SVGElement} box @param {number[]} here */
  _mark(box, here) {
    const there = this.at(Number(box.dataset.p));
    const other = there.map((at, axis) => (at === here[axis] ? -1 : axis)).filter((axis) => axis >= 0);
    const hue = other.length === 1 ? this.axes[other[0]][2] : -1;
    box.classList.toggle("mv-me", other.length === 0);
    for (let each = 0; each < SIGNS.length; each++) box.classList.toggle(`mv-a${each}`, each === hue);
    let sign = box.querySelector(".mv-sign");
    // The sign of a group that colour tells apart comes back once the axis has passed by.
    const before = sign?.textContent ?? "";
    if (before && !SIGNS.includes(before)) box.dataset.sign = before;
    if (hue >= 0) sign ??= box.appendChild(this._sign(box));
    if (sign) sign.textContent = hue >= 0 ? SIGNS[hue] : box.dataset.sign ?? "";
  }

  /** @param {SVGElement} box */
  _sign(box) {
    const sign = document.createElementNS("http://www.w3.org/2000/svg", "text");
    const number = box.querySelector(".mv-n"), small = this.stage.querySelector(".mv-small") !== null;
    sign.setAttribute("class", "mv-sign");
    const room = (number?.textContent ?? "").length * (small ? 3.2 : 3.6) + (small ? 4 : 6);
    sign.setAttribute("x", String(Number(number?.getAttribute("x")) - room));
    sign.setAttribute("y", String(Number(number?.getAttribute("y")) + 3));
    return sign;
  }

  /** Scroll the drawing, not the notebook, to the picked rank. */
  reveal() {
    const box = this.stage.querySelector(".mv-me");
    if (!box) return;
    const inner = box.getBoundingClientRect(), outer = this.stage.getBoundingClientRect(), room = 24;
    if (inner.top < outer.top + room) this.stage.scrollTop += inner.top - outer.top - room;
    else if (inner.bottom > outer.bottom - room) this.stage.scrollTop += inner.bottom - outer.bottom + room;
    if (inner.left < outer.left + room) this.stage.scrollLeft += inner.left - outer.left - room;
    else if (inner.right > outer.right - room) this.stage.scrollLeft += inner.right - outer.right + room;
  }

  /** @param {MouseEvent} event */
  clicked(event) {
    const box = /** @type {HTMLElement | null} */ (/** @type {Element} */ (event.target).closest(".mv-b[data-p]"));
    this.stage.focus({ preventScroll: true });
    if (box) this.pick(Number(box.dataset.p));
  }

  /** @param {number} place */
  pick(place) {
    this.set("_place", place);
    this.mark();
    this.reveal();
  }

  /** @param {KeyboardEvent} event */
  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      this.stage.blur();
      /** @type {HTMLElement | null} */ (this.el.closest(".jp-Notebook, .jp-Cell"))?.focus({ preventScroll: true });
      return event.preventDefault();
    }
    const place = this.model.get("_place"), many = this.axes.length;
    const move = MOVES[event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key];
    if (!this.alive || !(move || ["Home", "End"].includes(event.key))) return;
    event.preventDefault();
    if (event.key === "Home" || (move && place < 0)) this.pick(0);
    else if (event.key === "End") this.pick(this.axes.reduce((size, [, each]) => size * each, 1) - 1);
    else if (move[0] <= many) {
      const coordinate = this.at(place), axis = many - move[0], size = this.axes[axis][1];
      coordinate[axis] = (coordinate[axis] + move[1] + size) % size;
      this.pick(this.place(coordinate));
    }
  }

  /** The drawing with its title and legend, of which the page has no need; without a kernel, as it is here. */
  async download() {
    const answer = this.kernel.silent ? null : await this.kernel.wish("svg");
    const url = URL.createObjectURL(new Blob([answer?.svg ?? this.model.get("_svg")], { type: "image/svg+xml" }));
    const link = make("a", { href: url, download: "mesh.svg" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /** @param {boolean} silent whether the kernel is */
  warn(silent) {
    this.root.classList.toggle("mv-lost", silent);
    say(this.note, silent ? "No kernel answers: it was restarted, has ended, or is busy. Next: run the cell again for a live drawing." : "");
    this.note.hidden = !silent;
  }

  end() {
    for (const undo of this.undo) undo();
    this.kernel.end();
    this.root.remove();
  }
}

/** @param {{model: any, el: HTMLElement}} context */
function render({ model, el }) {
  let view = /** @type {MeshView | null} */ (null);
  try {
    view = new MeshView(model, el);
  } catch (error) {
    el.append(make("p", { class: "mv-error", role: "alert" }, `metaviz front end failed: ${words(error)}. Next: run the cell again.`));
  }
  return () => view?.end();
}

export default { render };
