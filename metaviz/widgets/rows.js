// @ts-check
// The rows of a tree, as views/payload.py packs them: what is below what, what is shown, in which order.
// A node is a row (its number), or a run of rows that look alike (rows.count + the number of the run).

/**
 * @typedef {[string, string, string, string, number, string, string, string, string, [string, string][]]} Look
 *   kind, cls, amount, size, nbytes, dtype, device, mark, source, notes
 * @typedef {[number, number, string, string, string, string, number]} Run
 *   first row, how many, label, cls, amount, size, nbytes
 * @typedef {{title: string, summary: string[], marks: [string, string][], symbols: Record<string, string>, rows: number,
 *   names: string[], looks: Look[], runs: Run[], links: [number, number][]}} Head
 * @typedef {{nodes: Int32Array, levels: Int32Array, places: Int32Array, sizes: Int32Array, count: number}} Shown
 *   Nodes from top to bottom, how deep each is, the how-manieth of its siblings it is, and of how many.
 */

const KIND = 0, CLS = 1, AMOUNT = 2, SIZE = 3, NBYTES = 4, DTYPE = 5, DEVICE = 6, MARK = 7, SOURCE = 8, NOTES = 9;

/**
 * @param {DataView | ArrayBuffer | Uint8Array} packed
 * @returns {Promise<Rows>}
 */
async function unpack(packed) {
  const bytes = ArrayBuffer.isView(packed)
    ? new Uint8Array(packed.buffer, packed.byteOffset, packed.byteLength)
    : new Uint8Array(packed);
  const inflated = new Blob([/** @type {BlobPart} */ (bytes)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Rows(await new Response(inflated).arrayBuffer());
}

class Rows {
  /** @param {ArrayBuffer} raw */
  constructor(raw) {
    const length = new DataView(raw).getUint32(0, true);
    /** @type {Head} */
    this.head = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, length)));
    const count = (this.count = this.head.rows), start = 4 + length;
    this.looks = new Uint32Array(raw, start, count);
    this.names = new Uint32Array(raw, start + 4 * count, count);
    this.depths = new Uint16Array(raw, start + 8 * count, count);
    /** Rows from here up to `ends[row]` are below a row. */
    this.ends = new Uint32Array(count);
    this.parents = new Int32Array(count).fill(-1);
    /** @type {number[]} */
    const open = [];
    for (let row = 0; row < count; row++) {
      while (open.length > this.depths[row]) this.ends[/** @type {number} */ (open.pop())] = row;
      if (open.length) this.parents[row] = open[open.length - 1];
      open.push(row);
    }
    for (const row of open) this.ends[row] = count;
    /** The run that a row is a member of, or -1. */
    this.runs = new Int32Array(count).fill(-1);
    this.runEnds = new Uint32Array(this.head.runs.length);
    this.head.runs.forEach(([first, many], run) => {
      let row = first;
      for (let member = 0; member < many; member++, row = this.ends[row]) this.runs[row] = run;
      this.runEnds[run] = row;
    });
    /** @type {Map<number, number>} */
    this.links = new Map(this.head.links);
  }

  /** @param {number} node */
  isRun(node) {
    return node >= this.count;
  }

  /** Whether a row is the first of a run. @param {number} row */
  begins(row) {
    return this.runs[row] >= 0 && this.head.runs[this.runs[row]][0] === row;
  }

  /** The row whose words a node shows: of a run its first. @param {number} node */
  row(node) {
    return node < this.count ? node : this.head.runs[node - this.count][0];
  }

  /** @param {number} node @returns {Look} */
  look(node) {
    return this.head.looks[this.looks[this.row(node)]];
  }

  /** @param {number} node */
  label(node) {
    if (node >= this.count) return this.head.runs[node - this.count][2];
    return node ? this.head.names[this.names[node]] : this.head.title;
  }

  /** @param {number} node */
  nbytes(node) {
    return node < this.count ? this.look(node)[NBYTES] : this.head.runs[node - this.count][6];
  }

  /** @param {number} node */
  holds(node) {
    return node >= this.count || this.ends[node] > node + 1;
  }

  /** The members of a run, or the row itself. @param {number} node @returns {number[]} */
  members(node) {
    if (node < this.count) return [node];
    const found = [], end = this.runEnds[node - this.count];
    for (let row = this.row(node); row < end; row = this.ends[row]) found.push(row);
    return found;
  }

  /** The rows right below a row. @param {number} row @returns {number[]} */
  children(row) {
    const found = [];
    for (let child = row + 1; child < this.ends[row]; child = this.ends[child]) found.push(child);
    return found;
  }

  /** The node above a node, or -1. @param {number} node @param {boolean} folded whether runs are nodes */
  above(node, folded) {
    if (node >= this.count) return this.parents[this.row(node)];
    if (folded && this.runs[node] >= 0) return this.count + this.runs[node];
    return this.parents[node];
  }

  /** Dotted path below the root of this tree. @param {number} node */
  path(node) {
    const parts = [];
    for (let row = this.row(node); row > 0; row = this.parents[row]) parts.push(this.head.names[this.names[row]]);
    if (node >= this.count) parts[0] = this.label(node);
    return parts.reverse().join(".");
  }

  /** The row at the path of a row of another tree, or the nearest one above. @param {Rows} other @param {number} node */
  same(other, node) {
    const parts = [];
    for (let row = other.row(node); row > 0; row = other.parents[row]) parts.push(other.head.names[other.names[row]]);
    let row = 0;
    for (const name of parts.reverse()) {
      const next = this.children(row).find((child) => this.head.names[this.names[child]] === name);
      if (next === undefined) break;
      row = next;
    }
    return row;
  }

  /**
   * What is shown where no filter is on.
   * @param {Uint8Array} open whether each row is open
   * @param {Uint8Array} unfolded whether each row stands outside of its run
   * @param {boolean} bySize whether siblings go by size
   * @returns {Shown}
   */
  shown(open, unfolded, bySize) {
    const list = new List(this.count + this.head.runs.length);
    if (bySize) this._bySize(open, unfolded, list);
    else this._inOrder(open, unfolded, list);
    return list.done();
  }

  /** @param {Uint8Array} open @param {Uint8Array} unfolded @param {List} list */
  _inOrder(open, unfolded, list) {
    /** @type {number[]} ends of the unfolded runs that the row is in: each is one level more */
    const within = [];
    let row = 0;
    while (row < this.count) {
      while (within.length && row >= within[within.length - 1]) within.pop();
      const run = this.runs[row];
      if (this.begins(row)) {
        list.add(this.count + run, this.depths[row] + within.length);
        if (!unfolded[row]) {
          row = this.runEnds[run];
          continue;
        }
        within.push(this.runEnds[run]);
      }
      list.add(row, this.depths[row] + within.length);
      row = open[row] ? row + 1 : this.ends[row];
    }
  }

  /** @param {Uint8Array} open @param {Uint8Array} unfolded @param {List} list */
  _bySize(open, unfolded, list) {
    const stack = [{ nodes: [0], at: 0 }];
    while (stack.length) {
      const top = stack[stack.length - 1];
      if (top.at === top.nodes.length) {
        stack.pop();
        continue;
      }
      const node = top.nodes[top.at++];
      list.add(node, stack.length - 1);
      if (node >= this.count ? unfolded[this.row(node)] : open[node]) {
        const nodes = this.below(node);
        nodes.sort((one, other) => this.nbytes(other) - this.nbytes(one));
        stack.push({ nodes, at: 0 });
      }
    }
  }

  /** The nodes right below a node. @param {number} node @returns {number[]} */
  below(node) {
    if (node >= this.count) return this.members(node);
    const found = [];
    for (let child = node + 1; child < this.ends[node]; ) {
      const run = this.runs[child];
      found.push(run >= 0 ? this.count + run : child);
      child = run >= 0 ? this.runEnds[run] : this.ends[child];
    }
    return found;
  }

  /**
   * What is shown while a filter is on: matches, what is above them, and what the user opens below them.
   * @param {Uint8Array} kept 1 for what has a match below, 2 for a match, 3 for both
   * @param {Map<number, boolean>} turned rows that the user has opened or closed since
   * @returns {Shown}
   */
  found(kept, turned) {
    const list = new List(this.count);
    let row = 0, all = 0;
    while (row < this.count) {
      if (row >= all && !kept[row]) {
        row = this.ends[row];
        continue;
      }
      list.add(row, this.depths[row]);
      const above = Boolean(kept[row] & 1);
      if (!(turned.get(row) ?? above)) row = this.ends[row];
      else {
        // Opened though nothing below matches: then all that is below is what the user wants to see.
        if (!above && row >= all) all = this.ends[row];
        row += 1;
      }
    }
    return list.done();
  }
}

/** Nodes that are shown, with what a screen reader tells of their place. */
class List {
  /** @param {number} most */
  constructor(most) {
    this.nodes = new Int32Array(most);
    this.levels = new Int32Array(most);
    this.places = new Int32Array(most);
    this.count = 0;
    /** @type {number[]} */
    this._at = [];
  }

  /** @param {number} node @param {number} level */
  add(node, level) {
    this._at.length = level + 1;
    this.nodes[this.count] = node;
    this.levels[this.count] = level;
    this.places[this.count++] = this._at[level] = (this._at[level] || 0) + 1;
  }

  /** @returns {Shown} */
  done() {
    const sizes = new Int32Array(this.count);
    /** @type {number[]} */
    const last = [];
    for (let at = this.count - 1; at >= 0; at--) {
      const level = this.levels[at];
      last[level] ||= this.places[at];
      sizes[at] = last[level];
      last.length = level + 1;
      if (this.places[at] === 1) last.length = level;
    }
    return { nodes: this.nodes, levels: this.levels, places: this.places, sizes, count: this.count };
  }
}
