// @ts-check
// Which rows are ticked: a row stands for all that is below it, so few numbers say it for a whole model.

const OFF = 0, ON = 1, MIXED = 2;

class Ticks {
  /** @param {Rows} rows @param {Iterable<number>} chosen outermost ticked rows */
  constructor(rows, chosen) {
    this.rows = rows;
    this.state = new Uint8Array(rows.count);
    this.set(chosen);
  }

  /** @param {Iterable<number>} chosen */
  set(chosen) {
    this.state.fill(OFF);
    for (const row of chosen) if (row < this.rows.count) this.state.fill(ON, row, this.rows.ends[row]);
    this._climb();
  }

  /** The outermost ticked rows. @returns {number[]} */
  get chosen() {
    const found = [];
    for (let row = 0; row < this.rows.count; row++) {
      if (this.state[row] === ON) {
        found.push(row);
        row = this.rows.ends[row] - 1;
      }
    }
    return found;
  }

  /** @param {number} node */
  of(node) {
    if (!this.rows.isRun(node)) return this.state[node];
    const members = this.rows.members(node);
    const first = this.state[members[0]];
    return members.every((row) => this.state[row] === first) ? first : MIXED;
  }

  /** Tick all of some nodes, or untick them if all are ticked. @param {number[]} nodes */
  toggle(nodes) {
    const members = nodes.flatMap((node) => this.rows.members(node));
    const to = members.every((row) => this.state[row] === ON) ? OFF : ON;
    for (const row of members) this.state.fill(to, row, this.rows.ends[row]);
    this._climb();
  }

  /** A row with others below it is what they are. */
  _climb() {
    const { parents, ends, count } = this.rows;
    const seen = new Uint8Array(count);
    for (let row = count - 1; row > 0; row--) {
      if (ends[row] > row + 1) this.state[row] = told(seen[row], this.state[row]);
      const state = this.state[row];
      seen[parents[row]] |= state === MIXED ? 3 : state === ON ? 1 : 2;
    }
    if (ends[0] > 1) this.state[0] = told(seen[0], this.state[0]);
  }
}

/** @param {number} seen 1 where some below are ticked, 2 where some are not @param {number} own */
function told(seen, own) {
  return seen === 3 ? MIXED : seen === 1 ? ON : seen === 2 ? OFF : own;
}
