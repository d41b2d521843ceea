// @ts-check
// The upper part: what the model is in a line, the filter box, and how the tree is shown.

const LEVELS = /** @type {[string, string][]} */ ([
  ["", "Expand …"], ["0", "Collapse all"], ["1", "1 level"], ["2", "2 levels"], ["3", "3 levels"], ["4", "4 levels"], ["all", "Expand all"],
]);
const EXAMPLES = "Filter: q_proj  layers.*.mlp  is:blocked  dtype:bf16";
const HELP = "Names, classes, dotted paths and globs; is:ready is:blocked is:tied is:stale is:buffer … dtype:bf16 device:cuda:0 "
  + "source:replay class:Linear name:weight; -word leaves out";

/**
 * @typedef {{set(name: string, value: any): void, get(name: string): any, step(by: number): void, tickMatches(): void,
 *   expand(to: string): void, toTree(): void}} ToolActs
 */

class Tools {
  /** @param {ToolActs} acts */
  constructor(acts) {
    this.acts = acts;
    this.title = make("strong", { class: "mv-title" });
    this.summary = make("span", { class: "mv-dim" });
    this.marks = make("span", { class: "mv-marks" });
    this.note = make("p", { class: "mv-note", role: "status", hidden: true });
    this.box = make("input", { class: "mv-filter", type: "search", placeholder: EXAMPLES, title: HELP, "aria-label": "Filter the tree", spellcheck: false, autocomplete: "off" });
    this.box.addEventListener("input", () => acts.set("filter", this.box.value));
    this.box.addEventListener("keydown", (event) => this._key(event));
    this.found = make("span", { class: "mv-found", role: "status" });
    this.before = button("↑", "Previous match (Shift+Enter)", () => acts.step(-1), "mv-small");
    this.next = button("↓", "Next match (Enter)", () => acts.step(1), "mv-small");
    this.tickAll = button("Tick matches", "Tick every match, or untick them", acts.tickMatches, "mv-small");
    this.searching = make("span", { class: "mv-searching", hidden: true }, this.found, this.before, this.next, this.tickAll);
    this.depth = picker("Expand", "How far to open the tree", LEVELS, (value) => {
      this.depth.select.value = "";
      if (value) acts.expand(value);
    });
    this.order = button("Largest first", "Order siblings by size", () => acts.set("sort", acts.get("sort") === "size" ? "model" : "size"), "mv-small");
    this.menu = make("div", { class: "mv-menu", role: "group", "aria-label": "Columns" });
    this.choose = make("details", { class: "mv-choose" }, make("summary", { class: "mv-button mv-small" }, "Columns"), this.menu);
    this.choose.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.choose.open = false;
    });
    this.elements = [
      make("div", { class: "mv-top" }, this.title, this.summary, this.marks), this.note,
      make("div", { class: "mv-tools" }, this.box, this.searching, make("span", { class: "mv-right" }, this.depth.select, this.order, this.choose)),
    ];
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    if (event.key === "Enter") this.acts.step(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowDown") this.acts.toTree();
    else if (event.key === "Escape" && this.box.value) this.acts.set("filter", "");
    else return;
    event.preventDefault();
  }

  /** @param {Head} head */
  head(head) {
    say(this.title, head.title);
    say(this.summary, head.summary.join(" · "));
    this.marks.replaceChildren(...head.marks.map(([mark, text]) => make("span", { class: `mv-pill mv-${mark}` }, `${head.symbols[mark]} ${text}`)));
  }

  /** @param {string} text what the kernel says of the model; nothing if empty */
  warn(text) {
    say(this.note, text);
    this.note.hidden = !text;
  }

  /** @param {string} text what the filter is @param {string} fault @param {string} found "3 of 12" @param {number} matches */
  search(text, fault, found, matches) {
    if (this.box.value !== text) this.box.value = text;
    this.searching.hidden = !text.trim();
    this.found.classList.toggle("mv-error", Boolean(fault));
    this.box.setAttribute("aria-invalid", String(Boolean(fault)));
    say(this.found, fault || found);
    for (const each of [this.before, this.next, this.tickAll]) each.disabled = !matches;
  }

  /** Show which order and columns are chosen. */
  choices() {
    const chosen = this.acts.get("columns"), names = ["class", ...Object.keys(NAMES)];
    this.order.setAttribute("aria-pressed", String(this.acts.get("sort") === "size"));
    if (this.menu.dataset.shown === chosen.join()) return;
    this.menu.dataset.shown = chosen.join();
    this.menu.replaceChildren(...names.map((name) => {
      const box = make("input", { type: "checkbox", checked: chosen.includes(name) });
      box.addEventListener("change", () => {
        const now = new Set(this.acts.get("columns"));
        if (box.checked) now.add(name);
        else now.delete(name);
        this.acts.set("columns", names.filter((each) => now.has(each)));
      });
      return make("label", {}, box, NAMES[name] ?? name);
    }));
  }
}
