// @ts-check
// The rows on the screen. Only those are elements: the list holds as many as there is room for, whatever the model.

const HEIGHT = 24;
// Browsers end elements somewhere between 17 and 33 million pixels; what is longer is scrolled by shares of it.
const TALLEST = 8_000_000;
const NAMES = /** @type {Record<string, string>} */ ({
  amount: "shape / params", size: "size", share: "share", dtype: "dtype", device: "device", mark: "mark",
});
const WIDTHS = /** @type {Record<string, string>} */ ({
  amount: "10em", size: "5.5em", share: "4.5em", dtype: "6.5em", device: "5em", mark: "7.2em",
});
/** From which width on a column is shown, in pixels. */
const ROOM = /** @type {Record<string, number>} */ ({ mark: 0, size: 400, amount: 560, dtype: 700, device: 780, share: 860 });
let lists = 0;

/**
 * @typedef {{rows: Rows, shown: Shown, ticks: Ticks, wanted: string[], kept: Uint8Array | null, isOpen: (node: number) => boolean}} Scene
 * @typedef {{toggle(node: number): void, tick(node: number): void, choose(node: number): void, key(event: KeyboardEvent): boolean,
 *   hover(node: number, box: DOMRect | null): void, jump(row: number): void}} Acts
 */

class RowList {
  /** @param {Acts} acts */
  constructor(acts) {
    this.acts = acts;
    this.id = `mv-${++lists}-${Math.random().toString(36).slice(2, 8)}`;
    this.active = 0;
    /** @type {Scene | null} */
    this.scene = null;
    /** @type {string[]} */
    this.columns = [];
    /** @type {RowElement[]} */
    this.pool = [];
    this.head = make("div", { class: "mv-row mv-header", "aria-hidden": "true" });
    this.pane = make("div", { class: "mv-pane", role: "presentation" });
    this.tall = make("div", { class: "mv-tall", role: "presentation" }, this.pane);
    this.scroller = make("div", {
      class: "mv-scroll", role: "tree", tabIndex: 0, "aria-label": "Module tree",
    }, this.tall);
    this.element = make("div", { class: "mv-list" }, this.head, this.scroller);
    this.top = 0;
    this.scroller.addEventListener("scroll", () => {
      this.top = this.scroller.scrollTop;
      this.draw();
    }, { passive: true });
    this.scroller.addEventListener("keydown", (event) => {
      if (acts.key(event)) event.preventDefault();
      // Notebooks have keys of their own: "x" would cut the cell that the tree is in.
      event.stopPropagation();
    });
    this.scroller.addEventListener("pointerleave", () => acts.hover(-1, null));
  }

  /** Take another state; `draw` shows it. @param {Scene} scene @param {string[]} columns @param {number} width */
  show(scene, columns, width) {
    this.scene = scene;
    const fits = Object.keys(WIDTHS).filter((name) => columns.includes(name) && width >= ROOM[name]);
    if (fits.join() !== this.columns.join() || !this.head.childNodes.length) {
      this.columns = fits;
      this.pool = [];
      this.pane.replaceChildren();
      this.head.replaceChildren(
        make("span", { class: "mv-name" }, "module or tensor"),
        ...fits.map((name) => make("span", { class: `mv-cell mv-c-${name}` }, NAMES[name])),
      );
      this.element.style.setProperty("--mv-columns", `minmax(8em, 1fr) ${fits.map((name) => WIDTHS[name]).join(" ")}`);
    }
    this.classes = columns.includes("class");
    const all = scene.shown.count * HEIGHT;
    this.tall.style.height = `${Math.min(all, TALLEST)}px`;
  }

  get view() {
    return this.scroller.clientHeight;
  }

  /** Pixels of the list per pixel of the scroll bar. */
  get pace() {
    const all = (this.scene?.shown.count ?? 0) * HEIGHT;
    return all > TALLEST ? (all - this.view) / (TALLEST - this.view) : 1;
  }

  /** Draw the rows that are on the screen. @param {boolean} [anew] whether rows may have changed */
  draw(anew = false) {
    const scene = this.scene, view = this.view;
    // Without a height it is hidden, and drawn when it is seen again.
    if (!scene || !view) return;
    const { shown } = scene;
    const top = this.scroller.scrollTop * this.pace;
    const first = Math.max(0, Math.floor(top / HEIGHT));
    const last = Math.min(shown.count, Math.ceil((top + view) / HEIGHT) + 1);
    const size = Math.ceil(view / HEIGHT) + 2;
    while (this.pool.length < size) {
      const row = new RowElement(this);
      this.pool.push(row);
      this.pane.append(row.element);
    }
    this.pane.style.height = `${Math.min(view, shown.count * HEIGHT)}px`;
    const used = new Set();
    for (let at = first; at < last; at++) {
      // A row keeps its element while it moves over the screen.
      const slot = at % this.pool.length;
      used.add(slot);
      this.pool[slot].put(at, at * HEIGHT - top, anew);
    }
    this.pool.forEach((row, slot) => used.has(slot) || row.hide());
    const visible = this.active >= first && this.active < last;
    if (visible) this.scroller.setAttribute("aria-activedescendant", this.idOf(shown.nodes[this.active]));
    else this.scroller.removeAttribute("aria-activedescendant");
  }

  /** @param {number} node */
  idOf(node) {
    return `${this.id}-${node}`;
  }

  /** The active node, or -1. */
  get node() {
    return this.scene && this.active < this.scene.shown.count ? this.scene.shown.nodes[this.active] : -1;
  }

  /** Where a node is shown, or -1. @param {number} node */
  find(node) {
    return this.scene ? this.scene.shown.nodes.subarray(0, this.scene.shown.count).indexOf(node) : -1;
  }

  /** Go back to where the list was: notebooks take what is off the screen out of the page, and with it how far it was scrolled. */
  restore() {
    if (this.view && !this.scroller.scrollTop && this.top) this.scroller.scrollTop = this.top;
  }

  /** Whether the active line is on the screen. */
  get inSight() {
    return this.scroller.hasAttribute("aria-activedescendant");
  }

  /** Make a line the active one, and scroll to it. @param {number} at @param {boolean} [scroll] */
  go(at, scroll = true) {
    if (!this.scene) return;
    this.active = Math.max(0, Math.min(at, this.scene.shown.count - 1));
    if (scroll) this._scroll();
    this.draw(true);
  }

  _scroll() {
    const pace = this.pace, y = this.active * HEIGHT, top = this.scroller.scrollTop * pace;
    if (y < top) this.scroller.scrollTop = y / pace;
    else if (y + HEIGHT > top + this.view) this.scroller.scrollTop = (y + HEIGHT - this.view) / pace;
  }
}

/** One line; it shows another row when the list is scrolled. */
class RowElement {
  /** @param {RowList} list */
  constructor(list) {
    this.list = list;
    this.at = -1;
    this.node = -1;
    this.box = make("span", { class: "mv-box" });
    this.twist = make("span", { class: "mv-twist" });
    this.label = make("span", { class: "mv-label" });
    this.cls = make("span", { class: "mv-cls" });
    this.notes = make("span", { class: "mv-notes" });
    this.name = make("span", { class: "mv-name" }, this.box, this.twist, this.label, this.cls, this.notes);
    this.cells = list.columns.map((column) => make("span", { class: `mv-cell mv-c-${column}` }));
    this.element = make("div", { class: "mv-row", role: "treeitem" }, this.name, ...this.cells);
    this.element.addEventListener("click", (event) => this._clicked(event));
    this.element.addEventListener("dblclick", (event) => {
      if (!this.box.contains(/** @type {Node} */ (event.target))) list.acts.toggle(this.node);
    });
    this.element.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "mouse") return;
      // Who is about to tick wants to see the rows, and not a card over them.
      const ticks = this.box.contains(/** @type {Node} */ (event.target));
      list.acts.hover(ticks ? -1 : this.node, ticks ? null : this.element.getBoundingClientRect());
    });
  }

  /** @param {MouseEvent} event */
  _clicked(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const { acts } = this.list;
    if (this.box.contains(target)) acts.tick(this.node);
    else if (this.twist.contains(target)) acts.toggle(this.node);
    else if (target.dataset.row) acts.jump(Number(target.dataset.row));
    else if (event.detail < 2) acts.choose(this.node);
  }

  hide() {
    this.element.hidden = true;
    this.at = this.node = -1;
  }

  /** @param {number} at @param {number} y @param {boolean} anew */
  put(at, y, anew) {
    const { scene, active } = this.list;
    if (!scene) return;
    this.element.style.transform = `translateY(${y}px)`;
    this.element.classList.toggle("mv-active", at === active);
    const node = scene.shown.nodes[at];
    if (!anew && this.at === at && this.node === node) return;
    this.at = at;
    this.node = node;
    this.element.hidden = false;
    this._write(scene, at, node);
  }

  /** @param {Scene} scene @param {number} at @param {number} node */
  _write({ rows, shown, ticks, wanted, kept, isOpen }, at, node) {
    const look = rows.look(node), run = rows.isRun(node) ? rows.head.runs[node - rows.count] : null;
    const level = shown.levels[at], holds = rows.holds(node), tick = ticks.of(node);
    const label = rows.label(node), cls = run ? run[3] : node ? look[CLS] : "";
    const amount = run ? run[4] : look[AMOUNT], size = run ? run[5] : look[SIZE];
    const { element } = this;
    element.id = this.list.idOf(node);
    element.classList.toggle("mv-hit", kept !== null && Boolean(kept[rows.row(node)] & 2));
    element.classList.toggle("mv-tensor", look[KIND] !== "module");
    element.style.setProperty("--mv-level", String(Math.min(level, 40)));
    element.setAttribute("aria-level", String(level + 1));
    element.setAttribute("aria-posinset", String(shown.places[at]));
    element.setAttribute("aria-setsize", String(shown.sizes[at]));
    element.setAttribute("aria-checked", ["false", "true", "mixed"][tick]);
    if (holds) element.setAttribute("aria-expanded", String(isOpen(node)));
    else element.removeAttribute("aria-expanded");
    const notes = look[NOTES].map(([, text]) => text);
    element.setAttribute("aria-label", [label, cls, amount, size, look[DEVICE], look[MARK], ...notes].filter(Boolean).join(", "));
    this.twist.className = `mv-twist${holds ? (isOpen(node) ? " mv-open" : " mv-closed") : ""}`;
    this.box.className = `mv-box mv-tick-${tick}`;
    this.label.replaceChildren(...marked(label, node ? wanted : []));
    this.cls.replaceChildren(...(this.list.classes ? marked(cls, wanted) : []));
    this.notes.replaceChildren(...look[NOTES].map((note) => badge(note, rows, rows.row(node))));
    this.list.columns.forEach((column, cell) => this._cell(this.cells[cell], column, rows, node, amount, size));
  }

  /** @param {HTMLElement} cell @param {string} column @param {Rows} rows @param {number} node @param {string} amount @param {string} size */
  _cell(cell, column, rows, node, amount, size) {
    const look = rows.look(node);
    if (column === "mark") cell.replaceChildren(pill(look[MARK], rows.head.symbols));
    else if (column === "share") {
      const share = rows.nbytes(node) / (rows.nbytes(0) || 1);
      const filled = make("span");
      filled.style.width = `${Math.min(100 * share, 100)}%`;
      cell.replaceChildren(make("span", { class: "mv-bar" }, filled));
    } else say(cell, { amount, size, dtype: look[DTYPE], device: look[DEVICE] }[column] ?? "");
  }
}

/** @param {[string, string]} note @param {Rows} rows @param {number} row */
function badge([kind, text], rows, row) {
  const made = make("span", { class: `mv-badge mv-b-${kind}`, title: text }, text);
  const first = rows.links.get(row);
  if (kind === "link" && first !== undefined) made.dataset.row = String(first);
  return made;
}
