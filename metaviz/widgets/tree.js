// @ts-check
// The tree widget. Traits are facts that the kernel knows, messages are wishes that it answers.

const REST = 600, PAUSE = 80;
const OPTIONS = ["device", "source", "rng", "dtype", "blocked"];
const FACTS = ["_plan", "_progress", "_outcome", "_devices", "_sources", ...OPTIONS];

class TreeView {
  /** @param {any} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.el = el;
    this.rows = /** @type {Rows | null} */ (null);
    this.ticks = /** @type {Ticks | null} */ (null);
    this.shape = 0;
    this.opened = new Uint8Array(0);
    this.unfolded = new Uint8Array(0);
    this.query = parse("");
    this.kept = /** @type {Uint8Array | null} */ (null);
    this.matches = 0;
    this.turned = /** @type {Map<number, boolean>} */ (new Map());
    this.wide = false;
    this.width = -1;
    this.hovered = -1;
    this.asking = 0;
    this.ended = false;
    this.resting = 0;
    this.undo = /** @type {(() => void)[]} */ ([]);
    const act = (/** @type {(...facts: any[]) => any} */ done) => this.guarded(done);
    const get = (/** @type {string} */ name) => model.get(name), set = act((name, value) => this.set(name, value));
    this.keys = new Keys(this);
    this.tools = new Tools({
      get, set, step: act((by) => this.step(by)), tickMatches: act(() => this.tickMatches()), expand: act((to) => this.expand(to)),
      toTree: () => this.list.scroller.focus(),
    });
    this.list = new RowList({
      toggle: act((node) => this.toggle(node)), tick: act((node) => this.tick(node)), choose: act((node) => this.choose(node)),
      key: (event) => Boolean(act(() => this.keys.press(event))()), hover: act((node, box) => this.hover(node, box)), jump: act((row) => this.jump(row)),
    });
    this.side = new Side(act((row) => this.jump(row)), act(() => this.closeSide()));
    this.bar = new Bar(model, set, act((verb) => this.act(verb)));
    this.main = make("div", { class: "mv-main" }, this.list.element, this.side.element, this.side.card);
    this.root = make("div", { class: "mv-widget" }, ...this.tools.elements, this.main, this.bar.element);
    this.kernel = new Kernel(model, this.list.id, this.root, act((silent) => this.warn(silent)));
    this._attach();
  }

  _attach() {
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    this.el.append(this.root);
    const sizes = new ResizeObserver(this.guarded(() => this.sized()));
    sizes.observe(this.root);
    this.undo.push(() => sizes.disconnect());
    this._listen("change:_payload", () => this.load());
    this._listen("change:filter", () => this.search());
    this._listen("change:_gone", () => this.warn(this.kernel.silent));
    this._listen("msg:custom", (answer) => this.kernel.answered(answer));
    for (const name of ["_ticked", "_opened", "sort", "columns"]) this._listen(`change:${name}`, () => this.refresh());
    for (const name of FACTS) this._listen(`change:${name}`, () => this.bar.draw());
  }

  /** @param {string} name @param {(...facts: any[]) => any} act */
  _listen(name, act) {
    const safe = this.guarded(act);
    this.model.on(name, safe);
    this.undo.push(() => this.model.off(name, safe));
  }

  /** A failure is said in the cell, and not in a console that nobody opens. @param {(...facts: any[]) => any} act */
  guarded(act) {
    return (/** @type {any[]} */ ...facts) => {
      try {
        const done = act(...facts);
        if (done instanceof Promise) done.catch((error) => this.broken(error));
        return done;
      } catch (error) {
        this.broken(error);
      }
    };
  }

  /** @param {any} error */
  broken(error) {
    this.kernel.uncover();
    if (!this.el.querySelector(".mv-broken")) {
      const text = `metaviz front end failed: ${words(error)}. Next: run the cell again, or print(widget.tree) for the tree as text.`;
      this.el.prepend(make("p", { class: "mv-error mv-broken", role: "alert" }, text));
    }
    console.error(error);
  }

  async start() {
    await this.load();
    if (this.ended) return;
    this.bar.draw();
    this.warn(false);
    this.kernel.start();
  }

  /** Unpack the tree that the kernel has sent. */
  async load() {
    const packed = this.model.get("_payload"), shape = this.model.get("_shape");
    const rows = await unpack(packed);
    // A newer one came while this was unpacked, or the cell has gone.
    if (this.ended || packed !== this.model.get("_payload")) return;
    const older = this.rows, { node, inSight } = this.list;
    const row = !older || node < 0 ? 0 : shape === this.shape ? older.row(node) : rows.same(older, node);
    const stays = older?.isRun(node) && rows.begins(row) ? rows.count + rows.runs[row] : row;
    this.rows = rows;
    this.shape = shape;
    this.tools.head(rows.head);
    this.search(false);
    if (older) this.list.go(Math.max(0, this._near(stays)), inSight);
    if (this.side.open) this.ask();
  }

  /** What traits say → what is shown. */
  refresh() {
    const { rows, shape } = this, opened = this.model.get("_opened"), ticked = this.model.get("_ticked");
    if (!rows) return;
    if (opened.shape === shape || this.opened.length !== rows.count) {
      const known = opened.shape === shape;
      this.opened = flagged(known ? opened.rows : [], rows.count);
      this.unfolded = flagged(known ? opened.unfolded : [], rows.count);
    }
    if (this.ticks?.rows !== rows) this.ticks = new Ticks(rows, []);
    if (ticked.shape === shape) this.ticks.set(ticked.rows);
    this.tools.choices();
    this.layout();
  }

  /** Work out which rows are shown, and draw them; the active one stays, or what it was in. */
  layout() {
    const { rows, opened, unfolded, ticks, kept, turned } = this;
    if (!rows || !ticks) return;
    const before = this.list.node;
    const shown = kept ? rows.found(kept, turned) : rows.shown(opened, unfolded, this.model.get("sort") === "size");
    const isOpen = (/** @type {number} */ node) =>
      kept ? turned.get(node) ?? Boolean(kept[node] & 1) : Boolean(rows.isRun(node) ? unfolded[rows.row(node)] : opened[node]);
    this.list.scroller.style.height = `${Math.max(5, Math.min(shown.count, 20)) * HEIGHT}px`;
    const beside = this.side.open && this.wide ? 0.6 : 1;
    this.list.show({ rows, shown, ticks, wanted: kept ? highlights(this.query) : [], kept, isOpen }, this.model.get("columns"), this.root.clientWidth * beside);
    this.list.active = before < 0 ? 0 : Math.max(0, this._near(before));
    this.list.draw(true);
  }

  /** Where a node is shown, or what it is in. @param {number} node */
  _near(node) {
    const { rows } = this;
    if (!rows || node >= rows.count + rows.head.runs.length) return -1;
    let each = this.kept ? rows.row(node) : node;
    while (each >= 0 && this.list.find(each) < 0) each = rows.above(each, !this.kept);
    return each < 0 ? -1 : this.list.find(each);
  }

  sized() {
    // Its height changes with what is said in it, and that is no reason to draw anew.
    if (this.root.clientWidth === this.width) return;
    this.width = this.root.clientWidth;
    this.wide = this.root.clientWidth >= 960;
    this.root.classList.toggle("mv-wide", this.wide);
    this.layout();
    this.list.restore();
  }

  /** @param {string} name @param {any} value */
  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
  }

  /** Filter by what the box says. @param {boolean} [go] whether to go to the first match */
  search(go = true) {
    const { rows } = this;
    if (!rows) return;
    this.query = parse(this.model.get("filter"));
    this.turned.clear();
    this.kept = null;
    this.matches = 0;
    if (this.query.terms.length) ({ kept: this.kept, matches: this.matches } = matching(rows, this.query));
    this.refresh();
    if (go && this.kept) this.step(1, true);
    // Without a filter there are more rows above.
    else if (go) this.list.go(this.list.active);
    this._count();
  }

  /** Say how many rows match, and the how-manieth of them is the active one. */
  _count() {
    const { kept, matches, list } = this;
    let text = matches ? `${matches} found` : kept ? "nothing found" : "";
    if (kept && matches && list.scene && list.node >= 0 && kept[list.node] & 2 && !this.turned.size) {
      let at = 0;
      for (const node of list.scene.shown.nodes.subarray(0, list.active + 1)) at += (kept[node] & 2) >> 1;
      // Matches below a closed row are counted and not shown.
      text = `${at} of ${matches}`;
    }
    this.tools.search(this.model.get("filter"), this.query.fault, text, matches);
  }

  /** Go to the next or previous match. @param {number} by @param {boolean} [first] */
  step(by, first = false) {
    const { kept, list } = this;
    if (!list.scene || !kept) return;
    const { nodes, count } = list.scene.shown;
    for (let tried = 0, at = first ? -1 : list.active; tried < count; tried++) {
      at = (at + by + count) % count;
      if (kept[nodes[at]] & 2) {
        list.go(at);
        break;
      }
    }
    this.moved();
  }

  tickMatches() {
    const { rows, kept, ticks } = this;
    if (!rows || !kept || !ticks) return;
    const matches = [];
    for (let row = 0; row < rows.count; row++) if (kept[row] & 2) matches.push(row);
    ticks.toggle(matches);
    this._saveTicks(ticks);
  }

  /** @param {number} node */
  tick(node) {
    if (!this.ticks || node < 0) return;
    this.ticks.toggle([node]);
    this._saveTicks(this.ticks);
  }

  /** @param {Ticks} ticks */
  _saveTicks(ticks) {
    this.set("_ticked", { shape: this.shape, rows: ticks.chosen });
    this.list.draw(true);
  }

  /** Open or close a node. @param {number} node @param {boolean} [to] */
  toggle(node, to) {
    const { rows, list } = this;
    if (!rows || !list.scene || !rows.holds(node)) return;
    const now = to ?? !list.scene.isOpen(node);
    if (this.kept) {
      this.turned.set(node, now);
      this.layout();
    } else {
      this._open(rows, node, now);
      this._saveOpened();
    }
  }

  /** @param {Rows} rows @param {number} node @param {boolean} now */
  _open(rows, node, now) {
    if (rows.isRun(node)) for (const row of rows.members(node)) this.unfolded[row] = Number(now);
    else this.opened[node] = Number(now);
  }

  /** Open what is beside a node, too. @param {number} node */
  openSiblings(node) {
    const { rows, kept } = this;
    if (!rows || node < 0) return;
    const above = rows.above(node, !kept);
    for (const each of above < 0 ? [0] : kept ? rows.children(above) : rows.below(above)) {
      if (kept) this.turned.set(each, true);
      else this._open(rows, each, true);
    }
    if (kept) this.layout();
    else this._saveOpened();
  }

  _saveOpened() {
    this.set("_opened", { shape: this.shape, rows: ranges(this.opened), unfolded: ranges(this.unfolded) });
    this.layout();
  }

  /** @param {string} to how many levels to open, or "all" */
  expand(to) {
    const { rows } = this;
    if (!rows) return;
    if (this.kept) this.set("filter", "");
    const deep = to === "all" ? Infinity : Number(to);
    for (let row = 0; row < rows.count; row++) this.opened[row] = Number(rows.depths[row] < deep);
    this.unfolded.fill(Number(to === "all"));
    this._saveOpened();
  }

  /** Go to a row, and open what it is in. @param {number} row */
  jump(row) {
    const { rows } = this;
    if (!rows || row < 0 || row >= rows.count) return;
    if (this.kept && this.list.find(row) < 0) this.set("filter", "");
    if (this.list.find(row) < 0) {
      for (let each = rows.above(row, true); each >= 0; each = rows.above(each, true)) this._open(rows, each, true);
      this._saveOpened();
    }
    this.list.go(Math.max(0, this._near(row)));
    this.list.scroller.focus({ preventScroll: true });
    this.moved();
  }

  /** The active row is another one. */
  moved() {
    this.hover(-1, null);
    if (this.side.open) this.ask();
    if (this.kept) this._count();
  }

  /** Make a node the active one and show what is known of it. @param {number} node */
  choose(node) {
    this.list.go(this.list.find(node));
    this.list.scroller.focus({ preventScroll: true });
    this.openSide();
  }

  openSide() {
    this.hover(-1, null);
    this._turnSide(true);
    this.ask();
  }

  closeSide() {
    this._turnSide(false);
    this.list.scroller.focus({ preventScroll: true });
  }

  /** @param {boolean} open */
  _turnSide(open) {
    if (this.side.open === open) return;
    this.side.open = open;
    this.side.element.hidden = !open;
    this.layout();
    this.list.go(this.list.active);
  }

  /** Ask the kernel about the active row, once the user stays there for a moment. */
  ask() {
    clearTimeout(this.asking);
    const { rows, list } = this;
    if (!rows || list.node < 0) return;
    const row = rows.row(list.node);
    this.side.wait(rows.path(row) || "the root", rows.look(row), rows.head.symbols);
    this.asking = window.setTimeout(this.guarded(async () => {
      const answer = await this.kernel.wish("details", { row, shape: this.shape });
      const here = this.rows && list.node >= 0 ? this.rows.row(list.node) : -1;
      if (!this.side.open || here !== row) return;
      if (answer.ok) this.side.tell(answer.details, rows.head.symbols);
      else this.side.fail(answer.text);
    }), PAUSE);
  }

  /** The mouse rests on a node. @param {number} node @param {DOMRect | null} box where that is */
  hover(node, box) {
    if (node === this.hovered && node >= 0) return;
    clearTimeout(this.resting);
    this.hovered = node;
    this.side.card.hidden = true;
    const { rows } = this;
    if (node < 0 || !box || !rows || this.side.open) return;
    this.resting = window.setTimeout(this.guarded(async () => {
      const answer = await this.kernel.wish("details", { row: rows.row(node), shape: this.shape });
      if (!answer.ok || this.hovered !== node || this.side.open) return;
      const frame = this.main.getBoundingClientRect(), up = box.top - frame.top > frame.height / 2;
      this.side.hint(answer.details, up ? frame.bottom - box.top + 2 : box.bottom - frame.top + 2, up, rows.head.symbols);
    }), REST);
  }

  /** Escape takes away what is on top, then goes back to the notebook. */
  leave() {
    if (!this.side.card.hidden) this.hover(-1, null);
    else if (this.side.open) this.closeSide();
    else {
      this.list.scroller.blur();
      /** @type {HTMLElement | null} */ (this.el.closest(".jp-Notebook, .jp-Cell"))?.focus({ preventScroll: true });
    }
  }

  /** @param {string} verb */
  async act(verb) {
    if (verb === "cancel") {
      this.bar.cancel.disabled = true;
      await this.kernel.wish("cancel");
      return;
    }
    this.bar.materialize.disabled = this.bar.unload.disabled = true;
    this.bar.outcomeIs({});
    // What is chosen comes along: ipywidgets may still hold back the last change of a trait.
    const options = Object.fromEntries(OPTIONS.map((name) => [name, this.model.get(name)]));
    const answer = await this.kernel.wish(verb, { ...options, shape: this.shape, rows: this.ticks?.chosen ?? [] });
    this.bar.draw();
    // What fails on the way is told by a trait, in all views; what never began is told to who asked.
    if (!answer.ok && this.model.get("_outcome").text !== answer.text) this.bar.outcomeIs(answer);
  }

  /** @param {boolean} silent whether the kernel is */
  warn(silent) {
    this.root.classList.toggle("mv-lost", silent);
    this.tools.warn(silent
      ? "No kernel answers: it was restarted, has ended, or is busy. The tree can still be read. Next: run the cell again for a live one."
      : this.model.get("_gone"));
  }

  end() {
    this.ended = true;
    clearTimeout(this.asking);
    clearTimeout(this.resting);
    for (const undo of this.undo) undo();
    this.kernel.end();
    this.root.remove();
  }
}

/** @param {{model: any, el: HTMLElement}} context */
function render({ model, el }) {
  let view = /** @type {TreeView | null} */ (null);
  try {
    view = new TreeView(model, el);
    view.start().catch((error) => view?.broken(error));
  } catch (error) {
    el.append(make("p", { class: "mv-error", role: "alert" }, `metaviz front end failed: ${words(error)}. Next: run the cell again.`));
  }
  return () => view?.end();
}

export default { render };
