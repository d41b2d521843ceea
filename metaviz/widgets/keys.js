// @ts-check
// The keys of a tree, as the WAI-ARIA authoring practices have them, and a few more.

class Keys {
  /** @param {TreeView} view */
  constructor(view) {
    this.view = view;
    this.typed = { text: "", at: 0 };
  }

  /** @param {KeyboardEvent} event @returns {boolean} whether the tree has used it */
  press(event) {
    const { view } = this, { list } = view, scene = list.scene;
    if (!scene || event.ctrlKey || event.metaKey || event.altKey) return false;
    const { node } = list, page = Math.max(1, Math.floor(list.view / HEIGHT) - 1);
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowDown: () => list.go(list.active + 1), ArrowUp: () => list.go(list.active - 1),
      Home: () => list.go(0), End: () => list.go(scene.shown.count - 1),
      PageDown: () => list.go(list.active + page), PageUp: () => list.go(list.active - page),
      ArrowRight: () => this._into(node, scene), ArrowLeft: () => this._out(node, scene),
      " ": () => view.tick(node), "*": () => view.openSiblings(node), Enter: () => view.openSide(), Escape: () => view.leave(),
      F3: () => view.step(event.shiftKey ? -1 : 1), "/": () => view.tools.box.focus(),
    };
    if (keys[event.key]) {
      // Who has gone somewhere else begins a new word.
      this.typed.text = "";
      keys[event.key]();
    } else if (event.key.length === 1) this._type(event.key, scene);
    else return false;
    if (!["Enter", "Escape", " ", "/"].includes(event.key)) view.moved();
    return true;
  }

  /** @param {number} node @param {Scene} scene */
  _into(node, scene) {
    const { list } = this.view, { levels } = scene.shown;
    if (!scene.rows.holds(node)) return;
    if (!scene.isOpen(node)) this.view.toggle(node, true);
    else if (levels[list.active + 1] > levels[list.active]) list.go(list.active + 1);
  }

  /** @param {number} node @param {Scene} scene */
  _out(node, scene) {
    const { list } = this.view, { levels } = scene.shown;
    if (scene.rows.holds(node) && scene.isOpen(node)) {
      this.view.toggle(node, false);
      return;
    }
    let at = list.active - 1;
    while (at >= 0 && levels[at] >= levels[list.active]) at--;
    if (at >= 0) list.go(at);
  }

  /** Go to the next row that begins with what is typed. @param {string} letter @param {Scene} scene */
  _type(letter, scene) {
    const now = performance.now(), { list } = this.view;
    this.typed = { text: (now - this.typed.at < 700 ? this.typed.text : "") + letter.toLowerCase(), at: now };
    const { text } = this.typed, first = text[0];
    // One letter goes on to the next one; more of them look again from where we are.
    const start = list.active + (text.length === 1 ? 1 : 0);
    const found = this._begins(text, start, scene);
    // A letter that is typed again and again goes on, too, unless there is such a name.
    const again = found < 0 && text === first.repeat(text.length) ? this._begins(first, list.active + 1, scene) : found;
    if (again >= 0) list.go(again);
  }

  /** Where the next row is whose name begins with a text, or -1. @param {string} text @param {number} start @param {Scene} scene */
  _begins(text, start, { rows, shown: { count, nodes } }) {
    for (let tried = 0; tried < count; tried++) {
      const at = (start + tried) % count;
      if (rows.label(nodes[at]).toLowerCase().startsWith(text)) return at;
    }
    return -1;
  }
}
