// @ts-check
// What the filter box understands: names, classes, dotted paths, globs and key:value, all of which have to hold.

/**
 * @typedef {{negated: boolean, word: string, scope: boolean, test: (rows: Rows) => Uint8Array}} Term
 *   A scope is a path: beside other words it stands for all that is below it, too.
 * @typedef {{terms: Term[], fault: string}} Query
 */

const DTYPES = /** @type {Record<string, string>} */ ({
  bf16: "bfloat16", fp16: "float16", half: "float16", fp32: "float32", float: "float32", fp64: "float64", double: "float64",
});
const MARKS = ["real", "ready", "partial", "blocked", "empty"];
const KINDS = ["module", "parameter", "buffer", "attribute"];
const TRAITS = ["tied", "shared", "stale", "frozen", "leaf"];
const SOURCES = ["checkpoint", "replay", "reset"];
const KEYS = ["is", "dtype", "device", "source", "class", "name", "path"];

/** @param {string} text @returns {Query} */
function parse(text) {
  const terms = [];
  for (const found of text.matchAll(/(-?)(?:([a-z]+):)?(?:"([^"]*)"?|(\S+))/gi)) {
    const [whole, minus, key, quoted, plain] = found;
    const value = quoted ?? plain;
    if (!value) continue;
    const made = key ? keyed(key.toLowerCase(), value) : bare(value);
    if (typeof made === "string") return { terms: [], fault: made };
    const scope = key ? key.toLowerCase() === "path" : /[.*?]/.test(value);
    terms.push({ negated: minus === "-", word: whole, scope, test: made });
  }
  return { terms, fault: "" };
}

/** @param {string} key @param {string} value @returns {string | ((rows: Rows) => Uint8Array)} */
function keyed(key, value) {
  const wanted = value.toLowerCase();
  switch (key) {
    case "is":
      return being(wanted);
    case "dtype":
      return byLook((look) => look[DTYPE].toLowerCase() === (DTYPES[wanted] ?? wanted));
    case "device":
      // "cuda" means each of them, "cuda:0" that one.
      return byLook((look) => look[DEVICE] === wanted || look[DEVICE].startsWith(`${wanted}:`));
    case "source":
      if (!SOURCES.includes(wanted)) return `source:${value} is not known. There are: ${SOURCES.join(", ")}`;
      return byLook((look) => look[SOURCE] === wanted);
    case "class":
      return byLook((look) => look[CLS].toLowerCase().includes(wanted));
    case "name":
      return byName((name) => name.includes(wanted));
    case "path":
      return along(value);
    default:
      return `${key}: is not known. There are: ${KEYS.map((each) => `${each}:`).join(", ")}; a name with a colon goes in quotes`;
  }
}

/** @param {string} word @returns {string | ((rows: Rows) => Uint8Array)} */
function being(word) {
  if (MARKS.includes(word)) return byLook((look) => look[MARK] === word);
  if (KINDS.includes(word)) return byLook((look) => look[KIND] === word || (word === "buffer" && look[KIND] === "transient"));
  if (word === "leaf") return (rows) => rows.ends.reduce((found, end, row) => ((found[row] = +(end === row + 1)), found), new Uint8Array(rows.count));
  const starts = /** @type {Record<string, string[]>} */ ({
    tied: ["= ", "views "], shared: ["shared with ", "leads back to "], stale: ["stale"], frozen: ["frozen"],
  })[word];
  if (!starts) return `is:${word} is not known. There are: ${[...MARKS, ...KINDS, ...TRAITS].join(", ")}`;
  const found = byLook((look) => look[NOTES].some(([, text]) => starts.some((start) => text.startsWith(start))));
  if (word !== "tied" && word !== "shared") return found;
  // Both ends: the row that others are tied to says nothing of it.
  return (/** @type {Rows} */ rows) => {
    const both = found(rows);
    for (const [row, first] of rows.links) if (both[row]) both[first] = 1;
    return both;
  };
}

/** @param {string} word */
function bare(word) {
  if (/[*?]/.test(word) || word.includes(".")) return along(word);
  const wanted = word.toLowerCase();
  return (/** @type {Rows} */ rows) => {
    const found = byName((name) => name.includes(wanted))(rows);
    const classes = rows.head.looks.map((look) => look[CLS].toLowerCase().includes(wanted));
    for (let row = 0; row < rows.count; row++) if (classes[rows.looks[row]]) found[row] = 1;
    return found;
  };
}

/** Each look is tested once, whatever the number of rows. @param {(look: Look) => boolean} test */
function byLook(test) {
  return (/** @type {Rows} */ rows) => {
    const passes = Uint8Array.from(rows.head.looks, (look) => +test(look));
    const found = new Uint8Array(rows.count);
    for (let row = 0; row < rows.count; row++) found[row] = passes[rows.looks[row]];
    return found;
  };
}

/** Each name is tested once. @param {(name: string) => boolean} test lower case comes in */
function byName(test) {
  return (/** @type {Rows} */ rows) => {
    const passes = Uint8Array.from(rows.head.names, (name) => +test(name.toLowerCase()));
    const found = new Uint8Array(rows.count);
    for (let row = 1; row < rows.count; row++) found[row] = passes[rows.names[row]];
    return found;
  };
}

/**
 * A path or glob that may begin anywhere: "layers.*.mlp", "attn.q" (the first part may be the end of a name, the last
 * one the beginning of one). `*` is one part, `**` any number of them.
 * @param {string} text @returns {string | ((rows: Rows) => Uint8Array)}
 */
function along(text) {
  const isGlob = /[*?]/.test(text);
  const parts = text.toLowerCase().split(".");
  // One bit each, see below.
  if (parts.length > 31) return `A path of ${parts.length} parts is too long to look for: 31 is the most`;
  const tests = parts.map((part, at) => {
    if (part === "**") return null;
    if (isGlob) return (/** @type {string} */ name) => globbed(part, name);
    if (at === 0 && parts.length === 1) return (/** @type {string} */ name) => name.includes(part);
    if (at === 0) return (/** @type {string} */ name) => name.endsWith(part);
    return at < parts.length - 1 ? (/** @type {string} */ name) => name === part : (/** @type {string} */ name) => name.startsWith(part);
  });
  return (/** @type {Rows} */ rows) => {
    const passes = tests.map((test) => test && Uint8Array.from(rows.head.names, (name) => +test(name.toLowerCase())));
    const found = new Uint8Array(rows.count);
    // Bit k of a row: the first k parts have been met on the way down to it.
    const met = new Uint32Array(rows.count);
    const last = tests.length;
    met[0] = skipped(1, tests);
    for (let row = 1; row < rows.count; row++) {
      const above = met[rows.parents[row]];
      let here = 0;
      for (let part = 0; part < last; part++) {
        if (!(above & (1 << part))) continue;
        const pass = passes[part];
        if (pass === null) here |= 1 << part;
        else if (pass[rows.names[row]]) here |= 1 << (part + 1);
      }
      here = skipped(here | 1, tests);
      met[row] = here;
      if (here & (1 << last)) found[row] = 1;
    }
    return found;
  };
}

/**
 * Whether a name matches a glob, in one pass with one way back: a RegExp tries stars in all ways, for seconds.
 * @param {string} glob @param {string} name
 */
function globbed(glob, name) {
  let at = 0, star = -1, from = 0;
  for (let letter = 0; letter < name.length; ) {
    if (glob[at] === "*") [star, from] = [at++, letter];
    else if (at < glob.length && (glob[at] === "?" || glob[at] === name[letter])) [at, letter] = [at + 1, letter + 1];
    else if (star >= 0) [at, letter] = [star + 1, ++from];
    else return false;
  }
  while (glob[at] === "*") at++;
  return at === glob.length;
}

/** `**` may also stand for no part at all. @param {number} bits @param {(((name: string) => boolean) | null)[]} tests */
function skipped(bits, tests) {
  for (let part = 0; part < tests.length; part++) if (tests[part] === null && bits & (1 << part)) bits |= 1 << (part + 1);
  return bits;
}

/**
 * The rows that match, and what is above them: 2 for a match, 1 for what has one below, 3 for both.
 * @param {Rows} rows @param {Query} query
 */
function matching(rows, query) {
  const kept = new Uint8Array(rows.count).fill(2);
  const others = query.terms.some((term) => !term.scope && !term.negated);
  for (const term of query.terms) {
    const found = term.test(rows);
    if (term.scope && others) for (let row = 1; row < rows.count; row++) found[row] |= found[rows.parents[row]];
    const wanted = term.negated ? 0 : 1;
    for (let row = 0; row < rows.count; row++) if (found[row] !== wanted) kept[row] = 0;
  }
  let matches = 0;
  for (let row = rows.count - 1; row >= 0; row--) {
    if (kept[row] & 2) matches++;
    if (row && kept[row]) kept[rows.parents[row]] |= 1;
  }
  return { kept, matches };
}

/** What to highlight in a name. @param {Query} query @returns {string[]} lower case */
function highlights(query) {
  return query.terms
    .filter((term) => !term.negated && !/^(is|dtype|device|source):/i.test(term.word))
    .flatMap((term) => term.word.replace(/^(class|name|path):/i, "").replace(/"/g, "").toLowerCase().split(/[.*?]+/))
    .filter((part) => part.length > 0);
}
