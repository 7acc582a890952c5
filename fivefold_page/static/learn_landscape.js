// @ts-check
// The landscape: the activations as a block, the layers as a stack, and the bytes of rank 0; each
// dimension cuts something off, in its colour.

import { clear, el, svg } from "fivefold/dom.js";
import { bytes, count } from "fivefold/format.js";
import { colourOf } from "fivefold/colours.js";
import { box, boxes, letters } from "fivefold/learn_layer_canvas.js";

const SHEET = { wide: 300, high: 230 };
const BLOCK = { x: 34, y: 66, wide: 150, high: 136, deep: [86, 44] };
const STACK = { x: 12, y: 28, wide: 96, high: 176 };
const EXPERTS = { x: 142, y: 34, wide: 144, high: 150 };
const BARS = ["weights", "gradients", "optimizer"];

/** @param {HTMLElement} body */
export function create(body) {
  const pictures = el("div");
  Object.assign(pictures.style, { display: "flex", flexWrap: "wrap", gap: "0.5rem 1.5rem" });
  const moves = el("div");
  moves.style.minHeight = "6em";
  const table = el("div");
  table.style.overflowX = "auto";
  body.append(pictures, moves, table);
  return {
    update() {},
    /** @param {any} view @param {number} place */
    frame(view, place) {
      const now = view.frames[place];
      const colour = now.axis ? colourOf(dimension(now.axis)) : "var(--muted)";
      clear(pictures, activations(now, colour), layers(view, now, colour), held(view, now, colour));
      clear(moves, ...moved(now));
      clear(table, matrix(view, place));
    },
  };
}

/** ZeRO slices over data ranks, and has their colour. @param {string} axis */
const dimension = (axis) => (axis === "zero" ? "dp" : axis);

/** @param {string} title @param {string} label @param {SVGElement[]} parts */
function sheet(title, label, parts) {
  const { wide, high } = SHEET;
  return svg(
    "svg",
    { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": label },
    letters(0, 13, title, { size: 12, bold: true }),
    ...parts,
  );
}

/** A point of the block: across, down, and back into the batch, as shares.
 * @param {number} x @param {number} y @param {number} z */
const point = (x, y, z) => `${BLOCK.x + x * BLOCK.wide + z * BLOCK.deep[0]} ${BLOCK.y + y * BLOCK.high - z * BLOCK.deep[1]}`;

/** @param {number[][]} corners */
const face = (corners) => `M${corners.map(([x, y, z]) => point(x, y, z)).join("L")}Z`;

/** Front, top and right of a part. @param {number} x @param {number} y0 @param {number} y1 @param {number} z */
function solid(x, y0, y1, z) {
  const front = face([[0, y0, 0], [x, y0, 0], [x, y1, 0], [0, y1, 0]]);
  const top = face([[0, y0, 0], [0, y0, z], [x, y0, z], [x, y0, 0]]);
  const right = face([[x, y0, 0], [x, y0, z], [x, y1, z], [x, y1, 0]]);
  return [front, top, right];
}

/** @param {any} frame @param {string} colour */
function activations(frame, colour) {
  const { batch, sequence, width, tokens } = frame.cuts;
  const parts = solid(1, 0, 1, 1).map((d, side) => svg("path", { d, fill: "var(--ink)", "fill-opacity": [0.03, 0.06, 0.09][side], stroke: "var(--line)" }));
  parts.push(svg("path", { d: grid(width, sequence, batch), fill: "none", stroke: "var(--muted)", "stroke-width": 0.7 }));
  for (const [from, to] of tokens)
    solid(1 / width, from, to, 1 / batch).forEach((d, side) =>
      parts.push(svg("path", { d, fill: colour, "fill-opacity": [0.75, 0.55, 0.9][side], stroke: "var(--paper)", "stroke-width": 0.8 })),
    );
  const { x, y, wide, high, deep } = BLOCK;
  parts.push(
    letters(x + wide / 2, y + high + 15, `width, heads ÷ ${width}`, { anchor: "middle" }),
    svg("g", { transform: `translate(${x - 8} ${y + high / 2}) rotate(-90)` }, letters(0, 0, `sequence ÷ ${sequence}`, { anchor: "middle" })),
    letters(x + deep[0] / 2 - 12, y - deep[1] / 2 - 6, `batch ÷ ${batch}`, { anchor: "end" }),
  );
  const label = `Activations of a step: batch cut in ${batch}, sequence in ${sequence}, width in ${width}; rank 0's part is filled`;
  return sheet("activations, in attention", label, parts);
}

/** Where the block is cut. @param {number} width @param {number} sequence @param {number} batch */
function grid(width, sequence, batch) {
  const inner = (/** @type {number} */ parts) => Array.from({ length: parts - 1 }, (_, i) => (i + 1) / parts);
  const across = inner(width).map((x) => `M${point(x, 1, 0)}L${point(x, 0, 0)}L${point(x, 0, 1)}`);
  const down = inner(sequence).map((y) => `M${point(0, y, 0)}L${point(1, y, 0)}L${point(1, y, 1)}`);
  const back = inner(batch).map((z) => `M${point(0, 0, z)}L${point(1, 0, z)}L${point(1, 1, z)}`);
  return [...across, ...down, ...back].join("");
}

/** @param {any} view @param {any} frame @param {string} colour */
function layers(view, frame, colour) {
  const { stages, stage, experts } = frame.cuts;
  const gap = 5;
  const each = (STACK.high - gap * (stages.length - 1)) / view.layers;
  /** @type {number[][]} */
  const others = [];
  /** @type {number[][]} */
  const mine = [];
  stages.forEach(([first, stop], /** @type {number} */ number) => {
    for (let layer = first; layer < stop; layer++)
      (first === stage[0] ? mine : others).push([STACK.x, STACK.y + layer * each + number * gap, STACK.wide, Math.max(1, each - 1)]);
  });
  const total = frame.holds.experts * experts;
  const shown = cells(total, frame.holds.experts, colour);
  const parts = [
    svg("path", { d: boxes(others), fill: "var(--line)" }),
    svg("path", { d: boxes(mine), fill: colour, opacity: 0.85 }),
    letters(STACK.x, STACK.y + STACK.high + 16, `${frame.holds.layers} of ${view.layers} layers`),
    ...shown.parts,
    letters(EXPERTS.x, STACK.y + STACK.high + 16, `${frame.holds.experts} of ${total} experts of each`),
    link(mine[Math.floor(mine.length / 2)], shown.high),
  ];
  const label = `Layers: rank 0 has ${frame.holds.layers} of ${view.layers}; of the experts of a layer ${frame.holds.experts} of ${total}`;
  return sheet("layers, and the experts of one", label, parts);
}

/** From one layer to its experts. @param {number[]} layer @param {number} down */
function link([x, y, wide, high], down) {
  const [left, right] = [x + wide, EXPERTS.x - 6];
  const d = `M${left} ${y}L${right} ${EXPERTS.y}V${EXPERTS.y + down}L${left} ${y + high}`;
  return svg("path", { d, fill: "var(--ink)", "fill-opacity": 0.05, stroke: "var(--line)" });
}

/** @param {number} total @param {number} mine @param {string} colour */
function cells(total, mine, colour) {
  const across = total > 64 ? 16 : total > 16 ? 8 : 4;
  const down = Math.ceil(total / across);
  const size = Math.min(EXPERTS.wide / across, EXPERTS.high / down);
  const at = (/** @type {number} */ place) => [EXPERTS.x + (place % across) * size, EXPERTS.y + Math.floor(place / across) * size, size - 1.5, size - 1.5];
  const all = Array.from({ length: total }, (_, place) => at(place));
  const parts = [
    svg("path", { d: boxes(all.slice(mine)), fill: "var(--line)" }),
    svg("path", { d: boxes(all.slice(0, mine)), fill: colour, opacity: 0.85 }),
  ];
  return { parts, high: down * size };
}

/** @param {any} view @param {any} frame @param {string} colour */
function held(view, frame, colour) {
  const first = view.frames[0].holds;
  const whole = Math.max(...BARS.map((name) => first[name]));
  const parts = BARS.flatMap((name, place) => {
    const y = 42 + place * 62;
    const wide = (/** @type {number} */ size) => Math.max(1.5, (SHEET.wide - 4) * (size / whole));
    return [
      letters(0, y, `${name}: ${bytes(frame.holds[name])}`),
      letters(SHEET.wide - 2, y, `of ${bytes(first[name])}`, { anchor: "end", fill: "var(--muted)" }),
      box(0, y + 6, wide(first[name]), 24, { fill: "var(--line)", rx: 2 }),
      box(0, y + 6, wide(frame.holds[name]), 24, { fill: colour, opacity: 0.85, rx: 2 }),
    ];
  });
  const label = `Bytes of rank 0: ${BARS.map((name) => `${name} ${bytes(frame.holds[name])} of ${bytes(first[name])}`).join(", ")}`;
  return sheet("what rank 0 keeps", label, parts);
}

/** @param {any} frame */
function moved(frame) {
  if (!frame.moves.length) return [];
  const rows = frame.moves.map((/** @type {any} */ move) =>
    el("li", {}, `${count(move.count)} × ${move.kind.replaceAll("_", "-")} among ${move.group} ${move.who} over ${move.tier}: ${bytes(move.bytes)} a step`),
  );
  const list = el("ul", {}, ...rows);
  list.style.margin = "0.2rem 0";
  return [`Moves ${frame.when}:`, list];
}

/** Rows by dimensions: what each leaves of a row. @param {any} view @param {number} place */
function matrix(view, place) {
  const [first, now] = [view.frames[0].holds, view.frames[place].holds];
  const head = ["", "one device", ...view.axes.map((/** @type {string} */ axis) => (axis === "zero" ? "ZeRO" : axis)), "rank 0 now"];
  const rows = view.rows.map((/** @type {any} */ row) => {
    const amount = (/** @type {number} */ size) => (row.bytes ? bytes(size) : count(size));
    const cells = view.factors[row.name].map((/** @type {number} */ factor, /** @type {number} */ axis) =>
      factorCell(factor, view.axes[axis], axis + 1 === place, axis + 1 <= place),
    );
    return el("tr", {}, el("th", { scope: "row" }, row.what), el("td", {}, amount(first[row.name])), ...cells, el("td", {}, el("strong", {}, amount(now[row.name]))));
  });
  return el(
    "table",
    { "aria-label": "What each dimension leaves of what a rank has" },
    el("thead", {}, el("tr", {}, ...head.map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, ...rows),
  );
}

/** @param {number} factor @param {string} axis @param {boolean} focused @param {boolean} done */
function factorCell(factor, axis, focused, done) {
  const cell = el("td", {}, factor === 1 ? "·" : `× ${Number(factor.toPrecision(3))}`);
  if (factor !== 1 && done) cell.style.borderLeft = `4px solid ${colourOf(dimension(axis))}`;
  Object.assign(cell.style, { paddingLeft: "0.4rem", whiteSpace: "nowrap" });
  if (focused) cell.style.background = "var(--idle)";
  if (!done) cell.style.color = "var(--muted)";
  return cell;
}
