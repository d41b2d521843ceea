// @ts-check
// The lower half: where to, from which source, what it would take, and the buttons that do it.

const DTYPE_CHOICES = /** @type {[string, string][]} */ ([
  ["", "as it is"], ["bfloat16", "bfloat16"], ["float16", "float16"], ["float32", "float32"], ["float64", "float64"], ["checkpoint", "as stored"],
]);
const RNG_CHOICES = /** @type {[string, string][]} */ ([
  ["eager", "eager: as in a build"], ["keyed", "keyed: per op"], ["device", "device: its own"],
]);
const SOURCE_WORDS = /** @type {Record<string, string>} */ ({
  auto: "auto", checkpoint: "checkpoint", replay: "replay: the tape", reset: "reset: init methods",
});

class Bar {
  /** @param {any} model @param {(name: string, value: string) => void} set @param {(verb: string) => void} act */
  constructor(model, set, act) {
    this.model = model;
    this.told = "";
    /** @param {string} name */
    const changed = (name) => (/** @type {string} */ value) => set(name, value);
    this.device = picker("Device", "Where the values shall be", [], changed("device"));
    this.source = picker("Source", "Where the values come from. auto: the first that can of checkpoint, replay and reset", [], changed("source"));
    this.rng = picker("Random", "How random numbers are drawn. eager: the very ones of an ordinary build; keyed: each op has its own seed, the same for any choice; device: the device's generator", RNG_CHOICES, changed("rng"));
    this.dtype = picker("dtype", "Floating-point dtype to cast to", [], changed("dtype"));
    this.skip = make("input", { type: "checkbox" });
    this.skip.addEventListener("change", () => set("blocked", this.skip.checked ? "skip" : "error"));
    this.skipField = make("label", { class: "mv-field", title: "Leave on meta what no source can fill" }, this.skip, "leave out what is blocked");
    this.line = make("div", { class: "mv-plan-line", role: "status" });
    this.blocked = make("ul", { class: "mv-blocked", "aria-label": "Blocked" });
    this.call = codeLine("the call that this equals");
    this.materialize = button("Materialize", "Give the ticked parts their values", () => act("materialize"), "mv-primary");
    this.unload = button("Unload", "Take the ticked parts back to meta", () => act("unload"));
    this.cancel = button("Cancel", "Stop: the model stays as it was", () => act("cancel"));
    this.meter = make("progress", { max: 1, "aria-label": "Progress" });
    this.pace = make("span", { class: "mv-pace" });
    this.running = make("div", { class: "mv-running", hidden: true }, this.meter, this.pace, this.cancel);
    this.outcome = make("div", { class: "mv-outcome" });
    this.element = make("div", { class: "mv-acts" },
      make("div", { class: "mv-fields" }, this.device.element, this.source.element, this.rng.element, this.dtype.element, this.skipField),
      make("div", { class: "mv-do" }, make("div", { class: "mv-plan" }, this.line, this.blocked), make("div", { class: "mv-buttons" }, this.unload, this.materialize)),
      this.call.element, this.running, this.outcome);
  }

  /** Show what the kernel says. */
  draw() {
    const get = (/** @type {string} */ name) => this.model.get(name);
    fill(this.device.select, get("_devices").map((/** @type {any} */ each) => [each.name, each.text]));
    fill(this.source.select, get("_sources").map((/** @type {string} */ name) => [name, SOURCE_WORDS[name] ?? name]));
    const stored = get("_sources").includes("checkpoint");
    const dtypes = DTYPE_CHOICES.filter(([value]) => stored || value !== "checkpoint");
    if (!dtypes.some(([value]) => value === get("dtype"))) dtypes.push([get("dtype"), get("dtype")]);
    fill(this.dtype.select, dtypes);
    for (const name of /** @type {const} */ (["device", "source", "rng", "dtype"])) this[name].select.value = get(name);
    this.skip.checked = get("blocked") === "skip";
    this._plan(get("_plan"), get("_progress").state === "running");
    this._progress(get("_progress"));
    const told = JSON.stringify(get("_outcome"));
    // What is told to this view alone stays until something is done: plans come and go.
    if (told !== this.told) this.outcomeIs(get("_outcome"));
    this.told = told;
  }

  /** @param {any} plan @param {boolean} running */
  _plan(plan, running) {
    const state = plan.state ?? "none", ready = state === "ready";
    const lines = /** @type {Record<string, string>} */ ({
      none: "Tick modules or tensors to see what giving them values would take.", thinking: plan.line ? `${plan.line} …` : "planning …", ready: plan.line, failed: plan.text, after: plan.line,
    });
    say(this.line, lines[state] ?? "");
    this.line.className = `mv-plan-line mv-plan-${state}${ready && !plan.fits ? " mv-short" : ""}`;
    const blocked = ready ? plan.blocked : state === "failed" && plan.next ? [["Next", "", plan.next]] : [];
    this.blocked.replaceChildren(...blocked.map((/** @type {string[]} */ [path, reason, step]) => make("li", {},
      make("code", {}, path), reason ? ` ${reason}` : "", step ? make("code", { class: "mv-step" }, step) : null)));
    this.blocked.hidden = !blocked.length;
    const alone = ready && plan.loads && !plan.can;
    this.call.element.hidden = !ready;
    say(this.call.code, ready ? (alone ? plan.unload : plan.call) : "");
    this.materialize.disabled = running || !ready || !plan.can;
    this.unload.disabled = running || !ready || !plan.loads;
    this.skipField.hidden = !(ready && blocked.length) && !this.skip.checked;
  }

  /** @param {any} progress */
  _progress(progress) {
    const running = progress.state === "running";
    this.running.hidden = !running;
    if (!running) {
      this.cancel.disabled = false;
      return;
    }
    if (progress.part) this.meter.value = progress.part;
    else this.meter.removeAttribute("value");
    say(this.pace, progress.text ?? "");
  }

  /** Tell what was done, or what went wrong. @param {any} outcome */
  outcomeIs(outcome) {
    const wanted = JSON.stringify(outcome);
    if (this.outcome.dataset.shown === wanted) return;
    this.outcome.dataset.shown = wanted;
    if (!outcome.kind) {
      this.outcome.replaceChildren();
      return;
    }
    const symbol = { done: "✓", error: "✗", cancelled: "■" }[/** @type {"done"} */ (outcome.kind)] ?? "";
    const parts = [make("p", { class: `mv-${outcome.kind}`, role: outcome.kind === "error" ? "alert" : "status" }, `${symbol} ${outcome.text}`)];
    for (const line of outcome.more ?? []) parts.push(make("p", { class: "mv-dim" }, line));
    for (const [name, text] of [["the next step", outcome.next], ["the call that this was", outcome.call]]) {
      if (!text) continue;
      const { element, code } = codeLine(name);
      code.textContent = text;
      parts.push(element);
    }
    this.outcome.replaceChildren(...parts);
  }
}
