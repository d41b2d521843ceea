// @ts-check
// What is known of one row: a card while the mouse rests on it, a pane beside the tree once it is chosen.

/**
 * @typedef {{path: string, copy: string, title: string, mark: string, about: string, answers: [string, string][],
 *   tensors: {row: number, name: string, cells: string[], note: string, mark: string, reason: string}[],
 *   links: [number, string, string][], code: [string, string][]}} Details
 */

class Side {
  /** @param {(row: number) => void} jump @param {() => void} closed */
  constructor(jump, closed) {
    this.jump = jump;
    this.closed = closed;
    this.body = make("div", { class: "mv-side-body" });
    this.close = button("×", "Close the details (Escape)", () => this.closed(), "mv-small mv-x");
    this.close.setAttribute("aria-label", "Close the details");
    this.element = make("section", { class: "mv-side", hidden: true, "aria-label": "Details" }, this.close, this.body);
    this.card = make("div", { class: "mv-card", hidden: true, role: "tooltip" });
    this.open = false;
  }

  /** @param {string} label @param {Look} look @param {Record<string, string>} symbols */
  wait(label, look, symbols) {
    this.body.replaceChildren(...this._title(label, look[CLS], look[MARK], symbols), make("p", { class: "mv-dim" }, "asking the model …"));
  }

  /** @param {string} text */
  fail(text) {
    this.body.append(make("p", { class: "mv-error", role: "alert" }, text));
    this.body.querySelector(".mv-dim")?.remove();
  }

  /** @param {string} label @param {string} cls @param {string} mark @param {Record<string, string>} symbols */
  _title(label, cls, mark, symbols) {
    return [make("h3", { class: "mv-h" }, make("code", {}, label), make("span", { class: "mv-cls" }, cls)), make("p", {}, pill(mark, symbols))];
  }

  /** @param {Details} found @param {Record<string, string>} symbols */
  tell(found, symbols) {
    this.body.replaceChildren(
      ...this._title(found.path || "the root", found.title, found.mark, symbols),
      make("p", {}, found.about),
      ...this._answers(found),
      ...this._links(found),
      ...this._tensors(found, symbols),
      ...found.code.flatMap(([caption, lines]) => {
        const { element, code } = codeLine(caption);
        code.textContent = lines;
        element.classList.add("mv-block");
        return [make("p", { class: "mv-caption" }, caption), element];
      }),
    );
  }

  /** @param {Details} found */
  _answers({ answers }) {
    if (!answers.length) return [];
    return [make("dl", { class: "mv-answers" }, ...answers.flatMap(([head, text]) => [make("dt", {}, head), make("dd", {}, text)]))];
  }

  /** @param {Details} found */
  _links({ links }) {
    return links.map(([row, path, words]) => {
      const link = button(path, `Go to ${path}`, () => this.jump(row), "mv-link");
      return make("p", {}, `${words}: `, link);
    });
  }

  /** @param {Details} found @param {Record<string, string>} symbols */
  _tensors({ tensors, links }, symbols) {
    if (tensors.length < 2 && (links.length || tensors.length === 0)) return [];
    const lines = tensors.map(({ row, name, cells, note, mark, reason }) => {
      const first = row < 0 ? make("span", {}, name) : button(name, reason, () => this.jump(row), "mv-link");
      return make("tr", {}, make("td", {}, first, note ? make("span", { class: "mv-badge" }, note) : null),
        ...cells.map((cell) => make("td", {}, cell)), make("td", {}, mark ? pill(mark, symbols) : null));
    });
    return [make("div", { class: "mv-scrolls", tabIndex: 0, role: "group", "aria-label": "Tensors" }, make("table", {}, make("tbody", {}, ...lines)))];
  }

  /** Show a card by a row. @param {Details} found @param {number} y @param {boolean} up whether above that height */
  hint(found, y, up, symbols = /** @type {Record<string, string>} */ ({})) {
    this.card.replaceChildren(
      make("p", {}, make("code", {}, found.path || "the root"), " ", pill(found.mark, symbols)),
      make("p", {}, found.about),
      ...found.answers.slice(0, 3).map(([head, text]) => make("p", {}, make("b", {}, head), ` ${text}`)),
      make("p", { class: "mv-dim" }, "Enter or a click shows all of it."),
    );
    this.card.style.top = up ? "" : `${y}px`;
    this.card.style.bottom = up ? `${y}px` : "";
    this.card.hidden = false;
  }
}
