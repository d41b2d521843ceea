// @ts-check
// The tree widget. Traits are facts that the kernel knows, messages are wishes that it answers.

/** Static trees that are hidden while a live one is there, with how many hide them. @type {Map<string, number>} */
const hiding = new Map();
const BEAT = 3000, PATIENCE = 9000, REST = 600;

class TreeView {
  /** @param {any} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.el = el;
    /** @type {Rows | null} */
    this.rows = null;
    this.number = 0;
    /** @type {Map<number, (answer: any) => void>} */
    this.asked = new Map();
    this.query = parse("");
    /** @type {Uint8Array | null} */
    this.kept = null;
    this.matches = 0;
    /** @type {Map<number, boolean>} */
    this.turned = new Map();
    this.typed = { text: "", at: 0 };
    /** @type {(() => void)[]} */
    this.undo = [];
    this._build();
    for (const [name, act] of /** @type {[string, () => any][]} */ ([
      ["change:_payload", () => this.load()], ["change:_ticked", () => this.refresh()], ["change:_opened", () => this.refresh()],
      ["change:filter", () => this.search()], ["change:sort", () => this.refresh()], ["change:columns", () => this.refresh()],
      ...["_plan", "_progress", "_outcome", "_devices", "_sources", "device", "source", "rng", "dtype", "blocked"]
        .map((trait) => [`change:${trait}`, () => this.bar.draw()]),
      ["change:_gone", () => this.warn()], ["msg:custom", (/** @type {any} */ answer) => this.answered(answer)],
    ])) this.listen(name, act);
  }

  /** @param {string} name @param {(...facts: any[]) => any} act */
  listen(name, act) {
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
    this.show_twin();
    this.el.prepend(make("p", { class: "mv-error", role: "alert" },
      `metaviz front end failed: ${error?.message ?? error}. The tree as text stays: print(widget.tree). Run the cell again for a new widget.`));
    console.error(error);
  }

  _build() {
    const act = (/** @type {(...facts: any[]) => any} */ done) => this.guarded(done);
    this.title = make("strong", { class: "mv-title" });
    this.summary = make("span", { class: "mv-dim" });
    this.marks = make("span", { class: "mv-marks" });
    this.note = make("p", { class: "mv-note", role: "status", hidden: true });
    this.box = make("input", { class: "mv-filter", type: "search", placeholder: "Filter: q_proj  layers.*.mlp  is:blocked  dtype:bf16",
      "aria-label": "Filter the tree", "data-lm-suppress-shortcuts": "true", spellcheck: false, autocomplete: "off",
      title: "Names, classes, dotted paths, globs; is:ready is:blocked is:tied is:stale is:buffer dtype:bf16 device:cuda:0 source:replay class:Linear; -word leaves out" });
    this.box.addEventListener("input", act(() => this.set("filter", this.box.value)));
    this.box.addEventListener("keydown", act((event) => this._boxKey(event)));
    this.found = make("span", { class: "mv-found", role: "status" });
    this.before = button("↑", "Previous match (Shift+Enter)", act(() => this.step(-1)), "mv-small");
    this.next = button("↓", "Next match (Enter)", act(() => this.step(1)), "mv-small");
    this.tickAll = button("Tick matches", "Tick every match, or untick them", act(() => this.tickMatches()), "mv-small");
    const levels = /** @type {[string, string][]} */ ([["", "Expand …"], ["0", "Collapse all"], ["1", "1 level"], ["2", "2 levels"], ["3", "3 levels"], ["4", "4 levels"], ["all", "Expand all"]]);
    this.depth = picker("Expand", "How far to open the tree", levels, act((value) => this.expandTo(value)));
    this.order = button("Largest first", "Order siblings by size", act(() => this.set("sort", this.model.get("sort") === "size" ? "model" : "size")), "mv-small");
    this.menu = make("div", { class: "mv-menu", role: "group", "aria-label": "Columns" });
    const choose = make("details", { class: "mv-choose" }, make("summary", { class: "mv-button mv-small" }, "Columns"), this.menu);
    this.searching = make("span", { class: "mv-searching", hidden: true }, this.found, this.before, this.next, this.tickAll);
    this.list = new RowList({ toggle: act((node) => this.toggle(node)), tick: act((node) => this.tick(node)), choose: act((node) => this.choose(node)),
      key: (event) => Boolean(act(() => this.key(event))()), hover: act((node, box) => this.hover(node, box)), leave: () => {}, jump: act((row) => this.jump(row)) });
    this.side = new Side(act((row) => this.jump(row)), act(() => this.closeSide()));
    this.bar = new Bar(this.model, act((name, value) => this.set(name, value)), act((verb) => this.act(verb)));
    this.main = make("div", { class: "mv-main" }, this.list.element, this.side.element, this.side.card);
    this.root = make("div", { class: "mv-widget" },
      make("div", { class: "mv-top" }, this.title, this.summary, this.marks), this.note,
      make("div", { class: "mv-tools" }, this.box, this.searching, make("span", { class: "mv-right" }, this.depth.select, this.order, choose)),
      this.main, this.bar.element);
    // Selects, buttons and boxes take letters and Space, too.
    for (const each of this.root.querySelectorAll("select, button, input, summary, [tabindex]")) each.setAttribute("data-lm-suppress-shortcuts", "true");
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    this.el.append(this.root);
    const watch = new ResizeObserver(act(() => this.sized()));
    watch.observe(this.root);
    this.undo.push(() => watch.disconnect());
  }

  async start() {
    await this.load();
    this.bar.draw();
    this.warn();
    this.hide_twin();
    this._beat();
  }

  /** Unpack the tree that the kernel has sent. */
  async load() {
    const packed = this.model.get("_payload"), shape = this.model.get("_shape");
    const rows = await unpack(packed);
    // A newer one came while this was unpacked.
    if (packed !== this.model.get("_payload")) return;
    const older = this.rows, node = this.list.node, moved = shape !== this.shape;
    const stays = older && node >= 0 ? (moved ? rows.same(older, node) : older.row(node)) : 0;
    this.rows = rows;
    this.shape = shape;
    say(this.title, rows.head.title);
    say(this.summary, rows.head.summary.join(" · "));
    this.marks.replaceChildren(...rows.head.marks.map(([mark, words]) => make("span", { class: `mv-pill mv-${mark}` }, `${rows.head.symbols[mark]} ${words}`)));
    this.search(false);
    if (older) this._show(stays);
    if (this.side.open) this.ask();
  }

  /** Traits → what is shown. The active row stays. */
  refresh() {
    if (!this.rows) return;
    const { rows, shape } = this, opened = this.model.get("_opened"), ticked = this.model.get("_ticked");
    if (opened.shape === shape) {
      this.opened = flagged(opened.rows, rows.count);
      this.unfolded = flagged(opened.unfolded, rows.count);
    }
    this.opened ??= new Uint8Array(rows.count);
    this.unfolded ??= new Uint8Array(rows.count);
    if (this.opened.length !== rows.count) this.opened = this.unfolded = new Uint8Array(rows.count);
    if (!this.ticks || this.ticks.rows !== rows) this.ticks = new Ticks(rows, []);
    if (ticked.shape === shape) this.ticks.set(ticked.rows);
    this.layout();
  }

  /** Work out which rows are shown, and draw them. */
  layout() {
    const { rows, opened, unfolded, ticks, kept, turned } = this;
    if (!rows || !opened || !unfolded || !ticks) return;
    const bySize = this.model.get("sort") === "size", node = this.list.node;
    const shown = kept ? rows.found(kept, turned) : rows.shown(opened, unfolded, bySize);
    /** @param {number} node */
    const isOpen = (node) => kept ? turned.get(node) ?? Boolean(kept[node] & 1) : Boolean(rows.isRun(node) ? unfolded[rows.row(node)] : opened[node]);
    this.scene = { rows, shown, ticks, wanted: kept ? highlights(this.query) : [], kept, isOpen };
    this.list.scroller.style.height = `${Math.max(5, Math.min(shown.count, 20)) * HEIGHT}px`;
    this.list.show(this.scene, this.model.get("columns"), this.root.clientWidth * (this.side.open && this.wide ? 0.6 : 1));
    if (node >= 0) this._keep(node);
    this.order.setAttribute("aria-pressed", String(bySize));
    this._columns();
  }

  /** Keep a node the active one, or what it was in. @param {number} node */
  _keep(node) {
    const rows = /** @type {Rows} */ (this.rows);
    for (let each = node < rows.count + rows.head.runs.length ? node : 0; each >= 0; each = rows.above(each, !this.kept)) {
      const at = this.list.find(each);
      if (at >= 0) {
        if (at !== this.list.active) this.list.active = at;
        this.list.draw(true);
        return;
      }
    }
    this.list.active = 0;
  }

  _columns() {
    const chosen = this.model.get("columns");
    if (this.menu.dataset.shown === chosen.join()) return;
    this.menu.dataset.shown = chosen.join();
    this.menu.replaceChildren(...["class", ...Object.keys(NAMES)].map((name) => {
      const box = make("input", { type: "checkbox", checked: chosen.includes(name), "data-lm-suppress-shortcuts": "true" });
      box.addEventListener("change", this.guarded(() => {
        const order = ["class", ...Object.keys(NAMES)], now = new Set(this.model.get("columns"));
        if (box.checked) now.add(name);
        else now.delete(name);
        this.set("columns", order.filter((each) => now.has(each)));
      }));
      return make("label", {}, box, NAMES[name] ?? name);
    }));
  }

  sized() {
    this.wide = this.root.clientWidth >= 960;
    this.root.classList.toggle("mv-wide", this.wide);
    this.layout();
  }

  /** @param {string} name @param {any} value */
  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
  }

  /** Filter by what the box says. @param {boolean} [go] whether to go to the first match */
  search(go = true) {
    const text = this.model.get("filter"), { rows } = this;
    if (this.box.value !== text) this.box.value = text;
    if (!rows) return;
    this.query = parse(text);
    this.turned.clear();
    if (this.query.terms.length) {
      const { kept, matches } = matching(rows, this.query);
      this.kept = kept;
      this.matches = matches;
    } else this.kept = null;
    this.searching.hidden = !text.trim();
    this.refresh();
    if (this.kept && go) this.step(1, true);
    this._told();
  }

  _told() {
    const { rows, kept, matches, list } = this;
    if (!rows) return;
    let text = this.query.fault;
    if (!text && kept) {
      const at = list.scene?.shown.nodes.subarray(0, list.active + 1).reduce((sum, node) => sum + Number((kept[node] & 2) > 0), 0) ?? 0;
      text = matches ? (list.node >= 0 && kept[list.node] & 2 && this.turned.size === 0 ? `${at} of ${matches}` : `${matches} found`) : "nothing found";
    }
    this.found.classList.toggle("mv-error", Boolean(this.query.fault));
    say(this.found, text);
    for (const each of [this.before, this.next, this.tickAll]) each.disabled = !matches || !kept;
  }

  /** Go to the next or previous match. @param {number} by @param {boolean} [first] */
  step(by, first = false) {
    const { scene, kept, list } = this;
    if (!scene || !kept) return;
    const { nodes, count } = scene.shown;
    for (let tried = 0, at = first ? -1 : list.active; tried < count; tried++) {
      at = (at + by + count) % count;
      if (kept[nodes[at]] & 2) {
        list.go(at);
        break;
      }
    }
    this._told();
  }

  tickMatches() {
    const { rows, kept, ticks } = this;
    if (!rows || !kept || !ticks) return;
    const nodes = [];
    for (let row = 0; row < rows.count; row++) if (kept[row] & 2) nodes.push(row);
    ticks.toggle(nodes);
    this._saveTicks();
  }

  /** @param {number} node */
  tick(node) {
    if (!this.ticks) return;
    this.ticks.toggle([node]);
    this._saveTicks();
  }

  _saveTicks() {
    this.set("_ticked", { shape: this.shape, rows: this.ticks?.chosen });
    this.list.draw(true);
  }

  /** @param {number} node @param {boolean} [to] */
  toggle(node, to) {
    const { rows, opened, unfolded, kept, scene } = this;
    if (!rows || !opened || !unfolded || !scene || !rows.holds(node)) return;
    const now = to ?? !scene.isOpen(node);
    if (kept) {
      this.turned.set(node, now);
      this.layout();
      return;
    }
    if (rows.isRun(node)) for (const row of rows.members(node)) unfolded[row] = Number(now);
    else opened[node] = Number(now);
    this._saveOpened();
  }

  _saveOpened() {
    const { opened, unfolded } = this;
    if (!opened || !unfolded) return;
    this.set("_opened", { shape: this.shape, rows: ranges(opened), unfolded: ranges(unfolded) });
    this.layout();
  }

  /** @param {string} to how many levels */
  expandTo(to) {
    const { rows, opened, unfolded } = this;
    this.depth.select.value = "";
    if (!rows || !opened || !unfolded || !to) return;
    if (this.kept) this.set("filter", "");
    const deep = to === "all" ? Infinity : Number(to);
    for (let row = 0; row < rows.count; row++) opened[row] = Number(rows.depths[row] < deep);
    unfolded.fill(Number(to === "all"));
    this._saveOpened();
  }

  /** Show a row: open what it is in, and go there. @param {number} row */
  jump(row) {
    this._show(row);
    this.list.scroller.focus();
    if (this.side.open) this.ask();
  }

  /** @param {number} row */
  _show(row) {
    const { rows, opened, unfolded, kept } = this;
    if (!rows || !opened || !unfolded) return;
    if (kept && this.list.find(row) < 0) this.set("filter", "");
    if (!this.kept && this.list.find(row) < 0) {
      for (let each = rows.above(row, true), from = row; each >= 0; from = each, each = rows.above(each, true)) {
        if (rows.isRun(each)) for (const member of rows.members(each)) unfolded[member] = 1;
        else opened[each] = 1;
      }
      this._saveOpened();
    }
    this.list.go(Math.max(0, this.list.find(row)));
  }

  /** Make a row the active one and show what is known of it. @param {number} node */
  choose(node) {
    this.list.go(this.list.find(node));
    this.list.scroller.focus({ preventScroll: true });
    this.openSide();
  }

  openSide() {
    this.hover(-1, null);
    if (!this.side.open) {
      this.side.open = true;
      this.side.element.hidden = false;
      this.layout();
      this.list.go(this.list.active);
    }
    this.ask();
  }

  closeSide() {
    this.side.open = false;
    this.side.element.hidden = true;
    this.layout();
    this.list.scroller.focus();
  }

  /** Ask the kernel about the active row, once the user stays there for a moment. */
  ask() {
    clearTimeout(this.asking);
    const { rows, list } = this;
    if (!rows || list.node < 0) return;
    const row = rows.row(list.node);
    this.side.wait(rows.path(row) || "the root", rows.look(row), rows.head.symbols);
    this.asking = setTimeout(this.guarded(async () => {
      const answer = await this.wish("details", { row, shape: this.shape });
      if (!this.side.open || !this.rows || list.node < 0 || this.rows.row(list.node) !== row) return;
      if (answer.ok) this.side.tell(answer.details, this.rows.head.symbols);
      else this.side.fail(answer.text);
    }), 80);
  }

  /** @param {number} node @param {DOMRect | null} box */
  hover(node, box) {
    if (node === this.hovered && node >= 0) return;
    clearTimeout(this.resting);
    this.hovered = node;
    this.side.card.hidden = true;
    if (node < 0 || !box || this.side.open) return;
    this.resting = setTimeout(this.guarded(async () => {
      const row = /** @type {Rows} */ (this.rows).row(node);
      const answer = await this.wish("details", { row, shape: this.shape });
      if (!answer.ok || this.hovered !== node || this.side.open || !this.rows) return;
      const frame = this.main.getBoundingClientRect(), up = box.top - frame.top > frame.height / 2;
      this.side.hint(answer.details, up ? frame.bottom - box.top + 2 : box.bottom - frame.top + 2, up, this.rows.head.symbols);
    }), REST);
  }

  /** @param {KeyboardEvent} event @returns {boolean} whether the tree has used it */
  key(event) {
    const { list, scene, rows } = this;
    if (!scene || !rows || event.ctrlKey || event.metaKey || event.altKey) return false;
    const { node } = list, page = Math.max(1, Math.floor(list.view / HEIGHT) - 1), last = scene.shown.count - 1;
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowDown: () => list.go(list.active + 1), ArrowUp: () => list.go(list.active - 1), Home: () => list.go(0), End: () => list.go(last),
      PageDown: () => list.go(list.active + page), PageUp: () => list.go(list.active - page),
      ArrowRight: () => this._into(node), ArrowLeft: () => this._out(node), " ": () => this.tick(node), "*": () => this._siblings(),
      Enter: () => this.openSide(), Escape: () => this._leave(), F3: () => this.step(event.shiftKey ? -1 : 1), "/": () => this.box.focus(),
    };
    if (keys[event.key]) keys[event.key]();
    else if (event.key.length === 1) this._type(event.key);
    else return false;
    this.hover(-1, null);
    if (this.side.open && !["Enter", "Escape", " ", "/"].includes(event.key)) this.ask();
    if (this.kept) this._told();
    return true;
  }

  /** @param {number} node */
  _into(node) {
    const { list, scene, rows } = this;
    if (!scene || !rows?.holds(node)) return;
    if (!scene.isOpen(node)) this.toggle(node, true);
    else if (scene.shown.levels[list.active + 1] > scene.shown.levels[list.active]) list.go(list.active + 1);
  }

  /** @param {number} node */
  _out(node) {
    const { list, scene, rows } = this;
    if (!scene || !rows) return;
    if (rows.holds(node) && scene.isOpen(node)) this.toggle(node, false);
    else {
      const level = scene.shown.levels[list.active];
      for (let at = list.active - 1; at >= 0; at--) {
        if (scene.shown.levels[at] < level) return list.go(at);
      }
    }
  }

  /** Open all siblings of the active row. */
  _siblings() {
    const { rows, list, opened, unfolded, kept } = this;
    if (!rows || !opened || !unfolded || list.node < 0) return;
    const above = rows.above(list.node, !kept);
    for (const node of above < 0 ? [0] : kept ? rows.children(above) : rows.below(above)) {
      if (kept) this.turned.set(node, true);
      else if (rows.isRun(node)) for (const row of rows.members(node)) unfolded[row] = 1;
      else opened[node] = 1;
    }
    if (kept) this.layout();
    else this._saveOpened();
  }

  /** Go to the next row that begins with what is typed. @param {string} letter */
  _type(letter) {
    const { scene, rows, list } = this, now = performance.now();
    if (!scene || !rows) return;
    this.typed = { text: (now - this.typed.at < 700 ? this.typed.text : "") + letter.toLowerCase(), at: now };
    const { text } = this.typed, { count, nodes } = scene.shown;
    // One letter goes on to the next one, more of them look again from where we are.
    const start = list.active + (text.length === 1 ? 1 : 0);
    for (let tried = 0; tried < count; tried++) {
      const at = (start + tried) % count;
      if (rows.label(nodes[at]).toLowerCase().startsWith(text)) return list.go(at);
    }
  }

  /** Escape closes the details, then goes back to the notebook. */
  _leave() {
    if (!this.side.card.hidden) this.hover(-1, null);
    else if (this.side.open) this.closeSide();
    else {
      const cell = /** @type {HTMLElement | null} */ (this.el.closest(".jp-Notebook, .jp-Cell, [tabindex='0']"));
      this.list.scroller.blur();
      cell?.focus?.({ preventScroll: true });
    }
  }

  /** @param {KeyboardEvent} event */
  _boxKey(event) {
    if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowDown") this.list.scroller.focus();
    else if (event.key === "Escape" && this.box.value) this.set("filter", "");
    else return;
    event.preventDefault();
  }

  /** @param {string} verb */
  async act(verb) {
    const { model } = this;
    if (verb === "cancel") {
      this.bar.cancel.disabled = true;
      await this.wish("cancel", {});
      return;
    }
    this.bar.materialize.disabled = this.bar.unload.disabled = true;
    const options = Object.fromEntries(["device", "source", "rng", "dtype", "blocked"].map((name) => [name, model.get(name)]));
    const answer = await this.wish(verb, { ...options, shape: this.shape, rows: this.ticks?.chosen ?? [] });
    // What went wrong on the way is told by a trait, so that all views of this widget show it; what never began is not.
    if (!answer.ok) this.bar._outcome({ kind: answer.kind, text: answer.text, next: answer.next });
    this.bar.draw();
  }

  /** Send a wish and wait for its answer. @param {string} what @param {object} facts @returns {Promise<any>} */
  wish(what, facts) {
    const id = `${this.list.id}-${++this.number}`;
    return new Promise((answered) => {
      this.asked.set(/** @type {any} */ (id), answered);
      try {
        this.model.send({ id, do: what, ...facts });
      } catch {
        this.lost(true);
      }
    });
  }

  /** @param {any} answer */
  answered(answer) {
    this.heard = performance.now();
    this.lost(false);
    this.asked.get(answer.id)?.(answer);
    this.asked.delete(answer.id);
  }

  /** Ask now and then whether the kernel is there: a restart is told to nobody. */
  _beat() {
    this.heard = performance.now();
    const timer = setInterval(this.guarded(() => {
      if (document.hidden || !this.root.offsetParent) {
        this.heard = performance.now();
        return;
      }
      if (performance.now() - (this.heard ?? 0) > PATIENCE) this.lost(true);
      void this.wish("ping", {});
    }), BEAT);
    this.undo.push(() => clearInterval(timer));
  }

  /** @param {boolean} silent */
  lost(silent) {
    if (silent === Boolean(this.silent)) return;
    this.silent = silent;
    if (silent) this.asked.clear();
    this.root.classList.toggle("mv-lost", silent);
    this.warn();
  }

  warn() {
    const gone = this.model.get("_gone");
    const text = this.silent
      ? "No kernel answers: it was restarted, has ended, or is busy. The tree can still be read; run the cell again for a live one."
      : gone;
    say(this.note, text);
    this.note.hidden = !text;
  }

  _twins() {
    const id = this.model.get("_twin");
    return id ? [...document.querySelectorAll(`#${CSS.escape(id)}`)].map((twin) => /** @type {HTMLElement} */ (twin.closest(".jp-OutputArea-child") ?? twin)) : [];
  }

  hide_twin() {
    const id = this.model.get("_twin");
    hiding.set(id, (hiding.get(id) ?? 0) + 1);
    this.hides = true;
    for (const twin of this._twins()) twin.style.display = "none";
  }

  show_twin() {
    const id = this.model.get("_twin");
    if (!this.hides) return;
    this.hides = false;
    hiding.set(id, (hiding.get(id) ?? 1) - 1);
    if (!hiding.get(id)) for (const twin of this._twins()) twin.style.display = "";
  }

  end() {
    clearTimeout(this.asking);
    clearTimeout(this.resting);
    for (const undo of this.undo) undo();
    this.asked.clear();
    this.show_twin();
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
    el.append(make("p", { class: "mv-error", role: "alert" }, `metaviz front end failed: ${/** @type {any} */ (error)?.message ?? error}`));
  }
  return () => view?.end();
}

export default { render };
