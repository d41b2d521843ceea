// @ts-check
// Talking with the kernel: wishes that are answered once, a heartbeat, and the static picture that stands in for it.

/** Static trees that are hidden while a live one is there, with how many hide them. @type {Map<string, number>} */
const hiding = new Map();
const BEAT = 3000, PATIENCE = 9000;

/** @param {any} error */
function words(error) {
  return String(error?.message ?? error);
}

class Kernel {
  /** @param {any} model @param {string} id @param {HTMLElement} root @param {(silent: boolean) => void} told */
  constructor(model, id, root, told) {
    this.model = model;
    this.id = id;
    this.root = root;
    this.told = told;
    this.number = 0;
    /** @type {Map<string, (answer: any) => void>} */
    this.asked = new Map();
    this.silent = false;
    this.heard = performance.now();
    this.hides = false;
    this.timer = 0;
  }

  /** Send a wish and wait for its answer. @param {string} what @param {object} [facts] @returns {Promise<any>} */
  wish(what, facts = {}) {
    const id = `${this.id}-${++this.number}`;
    return new Promise((answered) => {
      this.asked.set(id, answered);
      try {
        this.model.send({ id, do: what, ...facts });
      } catch {
        this._turn(true);
      }
    });
  }

  /** @param {any} answer */
  answered(answer) {
    this.heard = performance.now();
    this._turn(false);
    this.asked.get(answer.id)?.(answer);
    this.asked.delete(answer.id);
  }

  /** Ask now and then whether the kernel is there: nobody tells a widget of a restart. */
  start() {
    this.timer = window.setInterval(() => {
      // Who is not looked at asks nothing, and the time does not count.
      if (document.hidden || !this.root.offsetParent) this.heard = performance.now();
      else {
        if (performance.now() - this.heard > PATIENCE) this._turn(true);
        void this.wish("ping");
      }
    }, BEAT);
    this._hide();
  }

  /** @param {boolean} silent */
  _turn(silent) {
    if (silent) for (const [id, answered] of this.asked) this._giveUp(id, answered);
    if (silent === this.silent) return;
    this.silent = silent;
    this.told(silent);
  }

  /** Nobody waits for ever. @param {string} id @param {(answer: any) => void} answered */
  _giveUp(id, answered) {
    this.asked.delete(id);
    answered({ id, ok: false, kind: "error", text: "No kernel answers. If it is only busy, it does this as soon as it is free.", next: "" });
  }

  _twins() {
    const id = this.model.get("_twin");
    const found = id ? [...document.querySelectorAll(`#${CSS.escape(id)}`)] : [];
    return found.map((twin) => /** @type {HTMLElement} */ (twin.closest(".jp-OutputArea-child") ?? twin));
  }

  _hide() {
    const id = this.model.get("_twin");
    hiding.set(id, (hiding.get(id) ?? 0) + 1);
    this.hides = true;
    for (const twin of this._twins()) twin.style.display = "none";
  }

  /** Show the static picture again, unless another view is alive. */
  uncover() {
    if (!this.hides) return;
    this.hides = false;
    const id = this.model.get("_twin"), others = (hiding.get(id) ?? 1) - 1;
    hiding.set(id, others);
    if (!others) for (const twin of this._twins()) twin.style.display = "";
  }

  end() {
    clearInterval(this.timer);
    this.asked.clear();
    this.uncover();
  }
}
