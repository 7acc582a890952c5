// @ts-check
// The six collectives: a column for each rank, a block for each piece, an arrow for each message.

import { clear, el, svg } from "fivefold/dom.js";
import { bytes } from "fivefold/format.js";
import { colourOf } from "fivefold/colours.js";
import { arrow, box, canvas, letters } from "fivefold/learn_layer_canvas.js";

const ROW = 30;
const NAMES = 24; // room for the ranks' names
const ARCS = 40; // and above them for messages that pass over columns
const EDGE = 22;

/** @param {HTMLElement} body */
export function create(body) {
  /** @type {any} */
  let view = null;
  let place = 0;
  const sheet = el("div");
  const sent = el("p", { class: "hint" });
  const uses = el("div");
  body.append(sheet, sent, uses);
  const again = canvas(sheet, (width) => (view ? paint(view, place, width) : { height: 1, label: "", parts: [] }));
  return {
    /** @param {any} now */
    update(now) {
      view = now;
      clear(sent, told(view));
      clear(uses, ...usedBy(view));
    },
    /** @param {any} now @param {number} frame */
    frame(now, frame) {
      view = now;
      place = frame;
      again();
    },
  };
}

/** @param {any} view */
function told(view) {
  const each = view.sent.map((/** @type {number} */ size, /** @type {number} */ rank) => `${view.letters[rank]} ${bytes(size)}`);
  return `A shard is ${bytes(view.piece_bytes)}. Sent in all: ${each.join(", ")}.`;
}

/** @param {any} view */
function usedBy(view) {
  if (!view.uses.length) return [];
  const rows = view.uses.map((/** @type {any} */ use) => el("tr", {}, el("th", { scope: "row" }, use.who), el("td", {}, use.what)));
  return [el("h3", {}, "Where a training step uses it"), el("table", {}, el("tbody", {}, ...rows))];
}

/** @param {any} view @param {number} place @param {number} width */
function paint(view, place, width) {
  const n = view.letters.length;
  const frame = view.frames[place];
  const head = NAMES + (view.frames.some(passesOver) ? ARCS : 0);
  const gap = n > 4 ? 12 : 34;
  const wide = Math.min(110, (width - 2 * EDGE - (n - 1) * gap) / n);
  const left = (width - n * wide - (n - 1) * gap) / 2;
  const at = { x: (/** @type {number} */ rank) => left + rank * (wide + gap), y: (/** @type {number} */ slot) => head + slot * ROW, wide, gap, n, head };
  const arrived = new Set(frame.moves.map((/** @type {any} */ move) => `${move.target}/${move.into}`));
  const parts = [];
  for (let rank = 0; rank < n; rank++) {
    parts.push(...heading(view, rank, at));
    frame.state[rank].forEach((/** @type {any} */ block, /** @type {number} */ slot) =>
      parts.push(...cell(view, block, at.x(rank), at.y(slot), wide, arrived.has(`${rank}/${slot}`))),
    );
  }
  parts.push(...frame.moves.flatMap((/** @type {any} */ move) => message(move, at)));
  return { height: head + view.num_slots * ROW + 8, label: `${view.title} on ${n} ranks. ${frame.says}`, parts };
}

/** Whether a frame has messages to other columns than the next. @param {any} frame */
function passesOver(frame) {
  const n = frame.state.length;
  return frame.moves.some((/** @type {any} */ move) => move.target !== (move.source + 1) % n);
}

/** @param {any} view @param {number} rank @param {any} at */
function heading(view, rank, at) {
  const x = at.x(rank) + at.wide / 2;
  const name = at.wide > 60 ? `rank ${rank}: ${view.letters[rank]}` : `${rank}: ${view.letters[rank]}`;
  return [letters(x, at.head - 8, name, { anchor: "middle", bold: true, size: 12 })];
}

/** A slot: stripes by rank where numbers are summed, whole where they only move.
 * @param {any} view @param {any} block @param {number} x @param {number} y @param {number} wide @param {boolean} isNew */
function cell(view, block, x, y, wide, isNew) {
  const high = ROW - 5;
  const frame = box(x, y, wide, high, {
    rx: 3,
    fill: "none",
    stroke: isNew ? "var(--ink)" : "var(--line)",
    "stroke-width": isNew ? 2.2 : 1,
    "stroke-dasharray": block ? null : "3 3",
  });
  if (!block) return [frame];
  const n = view.letters.length;
  const stripe = view.adds ? wide / n : wide;
  const fills = block.parts.map((/** @type {number} */ part) =>
    box(view.adds ? x + part * stripe : x, y, stripe, high, { fill: colourOf("", part), opacity: 0.4 }),
  );
  const short = block.label.length * 6.5 > wide ? `${block.parts.length}/${n}` : block.label;
  return [...fills, frame, letters(x + wide / 2, y + high / 2 + 4, short, { anchor: "middle", size: 12 })];
}

/** @param {any} move @param {any} at */
function message(move, at) {
  const middle = (/** @type {number} */ slot) => at.y(slot) + (ROW - 5) / 2;
  const ink = "var(--accent)";
  const [leaves, arrives] = [middle(move.slot), middle(move.into)];
  const [right, left] = [at.x(move.source) + at.wide, at.x(move.target)];
  if (move.target === move.source + 1) return [arrow([right + 1, leaves], [left - 2, arrives], ink)];
  if (move.target === 0 && move.source === at.n - 1)
    return [arrow([right + 1, leaves], [right + EDGE - 4, leaves], ink), arrow([left - EDGE + 4, arrives], [left - 2, arrives], ink)];
  return crossing(move, at, ink);
}

/** To another column than the next: over the heads, one arc a message.
 * @param {any} move @param {any} at @param {string} ink */
function crossing(move, at, ink) {
  const aside = Math.min(8, at.wide / 5);
  const from = at.x(move.source) + at.wide / 2;
  const to = at.x(move.target) + at.wide / 2;
  const side = to > from ? aside : -aside;
  const top = at.head - 22;
  const bend = Math.min(22, 8 + Math.abs(to - from) / 16);
  return [svg("g", { opacity: 0.85 }, arrow([from + side, top], [to - side, top], ink, bend))];
}
