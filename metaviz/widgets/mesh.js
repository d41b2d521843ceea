// @ts-check
// The mesh widget. The kernel draws; here a rank is picked, by mouse or by keys, and what belongs together is marked.

class MeshView {
  /** @param {any} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.el = el;
    this.undo = /** @type {(() => void)[]} */ ([]);
    const act = (/** @type {(...facts: any[]) => any} */ done) => this.guarded(done);
    this.title = make("strong", { class: "mv-title" });
    this.note = make("p", { class: "mv-note", role: "status", hidden: true });
    this.which = picker("Mesh", "Which of the meshes that were found", [], act((name) => this.set("_chosen", name)));
    this.colour = picker("Colour by", "The axis whose groups are told apart by colour", [], act((name) => this.set("colour", name)));
    this.save = button("Save as SVG", "Download the drawing", act(() => this.download()), "mv-small");
    this.stage = make("div", {
      class: "mv-stage", tabIndex: 0, role: "application", "aria-label": "Device mesh", "aria-roledescription": "mesh of ranks",
      title: "Arrows go along the two fastest axes, Page keys along the third, + and - along the fourth; a click picks a rank",
    });
    this.told = make("p", { class: "mv-told", role: "status" });
    this.facts = make("dl", { class: "mv-facts" });
    this.step = codeLine("the next step");
    this.root = make("div", { class: "mv-mesh-widget" },
      make("div", { class: "mv-top" }, this.title, make("span", { class: "mv-right" }, this.which.element, this.colour.element, this.save)),
      this.note, this.stage, this.told, this.facts, this.step.element);
    this.kernel = new Kernel(model, `mv-mesh-${Math.random().toString(36).slice(2, 8)}`, this.root, act((silent) => this.warn(silent)));
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

  /** @returns {[string, number, number][]} name, size and hue of each axis, the slowest first */
  get axes() {
    return this.model.get("_axes");
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
    }
    fill(this.which.select, get("_choices").map((/** @type {string} */ name) => [name, name]));
    this.which.select.value = get("_chosen");
    this.which.element.hidden = get("_choices").length < 2;
    fill(this.colour.select, [["", "nothing"], ...this.axes.map(([name]) => /** @type {[string, string]} */ ([name, name]))]);
    this.colour.select.value = get("colour");
    this.colour.element.hidden = this.axes.length < 2;
    this.facts.replaceChildren(...get("_facts").flatMap((/** @type {[string, string]} */ [head, text]) => [make("dt", {}, head), make("dd", {}, text)]));
    say(this.step.code, get("_step"));
    this.step.element.hidden = !get("_step");
    this.mark();
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
    const place = this.model.get("_place");
    if (place < 0 || !this.axes.length) return;
    const here = this.at(place);
    let said = "";
    for (const box of this.stage.querySelectorAll(".mv-b")) {
      const there = this.at(Number(/** @type {SVGElement} */ (box).dataset.p));
      const other = there.map((at, axis) => (at === here[axis] ? -1 : axis)).filter((axis) => axis >= 0);
      box.classList.toggle("mv-me", other.length === 0);
      for (const [axis, [, , hue]] of this.axes.entries()) box.classList.toggle(`mv-a${hue}`, other.length === 1 && other[0] === axis);
      if (other.length === 0) said = box.querySelector("title")?.textContent ?? "";
    }
    say(this.told, said);
  }

  /** @param {MouseEvent} event */
  clicked(event) {
    const box = /** @type {HTMLElement | null} */ (/** @type {Element} */ (event.target).closest("[data-p]"));
    this.stage.focus({ preventScroll: true });
    if (box) this.pick(Number(box.dataset.p));
  }

  /** @param {number} place */
  pick(place) {
    this.set("_place", place);
    this.mark();
  }

  /** @param {KeyboardEvent} event */
  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.axes.length) return;
    const place = this.model.get("_place"), many = this.axes.length;
    /** @type {Record<string, [number, number]>} from the fastest axis on */
    const moves = { ArrowRight: [1, 1], ArrowLeft: [1, -1], ArrowDown: [2, 1], ArrowUp: [2, -1], PageDown: [3, 1], PageUp: [3, -1], "+": [4, 1], "-": [4, -1] };
    const move = moves[event.key];
    if (event.key === "Escape") {
      this.stage.blur();
      /** @type {HTMLElement | null} */ (this.el.closest(".jp-Notebook, .jp-Cell"))?.focus({ preventScroll: true });
    } else if (event.key === "Home" || event.key === "End") {
      this.pick(event.key === "Home" ? 0 : this.axes.reduce((size, [, each]) => size * each, 1) - 1);
    } else if (move && place < 0) this.pick(0);
    else if (move && move[0] <= many) {
      const coordinate = this.at(place), axis = many - move[0], size = this.axes[axis][1];
      coordinate[axis] = (coordinate[axis] + move[1] + size) % size;
      this.pick(this.place(coordinate));
    } else return;
    event.preventDefault();
  }

  download() {
    const url = URL.createObjectURL(new Blob([this.model.get("_svg")], { type: "image/svg+xml" }));
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
