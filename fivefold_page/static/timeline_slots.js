// @ts-check
// The steps of a timeline as values: when each runs, what it is called, what is at a time.

import { el } from "fivefold/dom.js";

/**
 * @typedef {{kind: string, stage: number, microbatch: number, chunk: number, start: number,
 *   end: number, pair?: number[], wait?: string, many?: any}} Slot
 * @typedef {{row: number, slot: Slot, idle: boolean, from: number, to: number}} Picked
 */

/** The steps of a row with their first and last tick. @param {any} row @returns {Slot[]} */
export function slotsOf(row) {
  let now = 0;
  return row.lengths.map((/** @type {number} */ length, /** @type {number} */ place) => {
    const start = now + row.gaps[place];
    now = start + length;
    const stage = row.stages.length > 1 ? row.stages[place] : row.stages[0];
    return {
      kind: row.kinds[place],
      stage,
      microbatch: row.microbatches[place],
      chunk: row.chunks[stage],
      start,
      end: now,
      pair: row.pairs[place],
      wait: row.waits[place],
      many: row.merged[place],
    };
  });
}

/** What a row does at a tick: a step, a gap before one, or nothing any more.
 * @param {Slot[]} slots @param {number} row @param {number} tick @param {number} end @returns {Picked} */
export function at(slots, row, tick, end) {
  let [low, high] = [0, slots.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (slots[middle].end > tick) high = middle;
    else low = middle + 1;
  }
  const slot = slots[low];
  const free = low ? slots[low - 1].end : 0;
  if (!slot) return { row, slot, idle: true, from: free, to: end };
  if (tick < slot.start) return { row, slot, idle: true, from: free, to: slot.start };
  return { row, slot, idle: false, from: slot.start, to: slot.end };
}

/** A step as every verb writes it. @param {Slot} slot */
export function named(slot) {
  const [first, second] = texts(slot);
  return second ? `(${first};${second})OVERLAP_F_B` : first;
}

/** The actions of a step. @param {Slot} slot */
export function texts(slot) {
  if (slot.pair) return [`${slot.stage}F${slot.microbatch}`, `${slot.pair[0]}B${slot.pair[1]}`];
  return [`${slot.stage}${slot.many ? slot.many.kind : slot.kind}${slot.microbatch}`];
}

/** 1, 2 or 5 times a power of ten, no smaller than what is given. @param {number} least */
export function interval(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * /** @type {number} */ ([1, 2, 5, 10].find((each) => each * power >= least * 0.999));
}

/** @param {number} left @param {number} top @param {number} right @param {number} thick */
export function box(left, top, right, thick) {
  return `M${left.toFixed(1)} ${top.toFixed(1)}H${right.toFixed(1)}v${thick.toFixed(1)}H${left.toFixed(1)}z`;
}

/** What the colours mean. @param {any} view */
export function legend(view) {
  const items = Object.entries(view.marks).map(([letter, mark]) =>
    item(mark.colours[0], `${letter} ${mark.name}`),
  );
  items.push(item("var(--idle)", "idle"));
  if (view.later) items.push(el("span", {}, `lighter: ${view.later}`));
  const style = "display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.8rem;color:var(--muted)";
  return el("div", { class: "timeline-legend", style }, ...items);
}

/** @param {string} colour @param {string} words */
function item(colour, words) {
  const style = `display:inline-block;width:.8em;height:.8em;margin-right:.35em;background:${colour}`;
  return el("span", {}, el("span", { style }), words);
}
