// @ts-check
// Pieces of a page. Text from a model gets in as text only, never as markup.

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} [facts] properties; names with a dash or `role` are attributes, `class` is the class
 * @param {(Node | string | null | undefined | false)[]} children
 * @returns {HTMLElementTagNameMap[T]}
 */
function make(tag, facts = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (name === "class") element.className = value;
    else if (name === "role" || name.includes("-")) element.setAttribute(name, value);
    else /** @type {any} */ (element)[name] = value;
  }
  // Letters and Space are for what has the focus, not for the notebook around it; the mark has to be on it itself.
  if (["button", "input", "select", "summary"].includes(tag) || "tabIndex" in facts) element.setAttribute("data-lm-suppress-shortcuts", "true");
  for (const child of children) if (child) element.append(child);
  return element;
}

/** Set text only where it changes: a screen reader would else say it again. @param {Element} element @param {string} text */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * A choice with a label in front of it.
 * @param {string} label @param {string} hint @param {[string, string][]} options value and text @param {(value: string) => void} chosen
 */
function picker(label, hint, options, chosen) {
  const select = make("select", { class: "mv-select", "aria-label": label, title: hint });
  fill(select, options);
  select.addEventListener("change", () => chosen(select.value));
  return { element: make("label", { class: "mv-field" }, make("span", { "aria-hidden": "true" }, label), select), select };
}

/** @param {HTMLSelectElement} select @param {[string, string][]} options */
function fill(select, options) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options === wanted) return;
  select.dataset.options = wanted;
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  if (options.some(([value]) => value === before)) select.value = before;
}

/** @param {string} text @param {string} hint @param {() => void} act @param {string} [kind] */
function button(text, hint, act, kind = "") {
  const made = make("button", { class: `mv-button ${kind}`, type: "button", title: hint }, text);
  made.addEventListener("click", act);
  return made;
}

/** A line of code with a button that copies it. @param {string} name what it is, for who cannot see it */
function codeLine(name) {
  const code = make("code", { class: "mv-code", tabIndex: 0, "aria-label": name, role: "group" });
  const copy = button("Copy", `Copy ${name}`, async () => {
    const done = await copied(code.textContent ?? "");
    copy.textContent = done ? "Copied" : "Select it";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, "mv-small");
  copy.setAttribute("aria-label", `Copy ${name}`);
  const element = make("div", { class: "mv-call" }, code, copy);
  return { element, code };
}

/** @param {string} text @returns {Promise<boolean>} */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that are not served over https have no clipboard of their own.
    const area = make("textarea", { value: text, class: "mv-off" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A text with what was searched for marked. @param {string} text @param {string[]} wanted lower case */
function marked(text, wanted) {
  // Some letters are longer when they are small ("İ"); then only what is written alike is found.
  const nodes = [], small = text.toLowerCase(), lower = small.length === text.length ? small : text;
  let at = 0;
  while (wanted.length && at < text.length) {
    let begin = -1, length = 0;
    for (const part of wanted) {
      const found = lower.indexOf(part, at);
      if (found >= 0 && (begin < 0 || found < begin)) [begin, length] = [found, part.length];
    }
    if (begin < 0) break;
    nodes.push(text.slice(at, begin), make("mark", {}, text.slice(begin, begin + length)));
    at = begin + length;
  }
  nodes.push(text.slice(at));
  return nodes;
}

/** The pill of a mark: a symbol, a word and a colour. @param {string} mark @param {Record<string, string>} symbols */
function pill(mark, symbols) {
  return make("span", { class: `mv-pill mv-${mark}` }, `${symbols[mark] ?? ""} ${mark}`);
}

/** Ranges `[first, last + 1]` of what is not 0. @param {Uint8Array} flags */
function ranges(flags) {
  const found = [];
  for (let at = 0; at < flags.length; at++) {
    if (!flags[at]) continue;
    const first = at;
    while (at < flags.length && flags[at]) at++;
    found.push([first, at]);
  }
  return found;
}

/** @param {number[][]} pairs @param {number} count */
function flagged(pairs, count) {
  const flags = new Uint8Array(count);
  for (const [first, end] of pairs ?? []) flags.fill(1, first, end);
  return flags;
}
