// @ts-check
// Tokens on their way to experts and back: who chose whom, who sends how much, who waits for whom.

import { clear, el, svg } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { bytes } from "fivefold/format.js";
import { beside, inkOn, rankColour, table } from "fivefold/learn_ranks.js";

const WIDE = 760; // the map of choices
const LEFT = 118;
const HIGH = 18; // of an expert in it
const FLOW = { width: 460, height: 300, box: 96 };
const CANVAS = { viewBox: `0 0 ${FLOW.width} ${FLOW.height}`, role: "img", style: "width:100%;max-width:640px" };
const MIDDLE = { "text-anchor": "middle", "dominant-baseline": "central" };

/** @param {HTMLElement} body */
export function create(body) {
  const map = el("div", { style: "overflow-x:auto" });
  const flow = el("div");
  const waits = el("div", { style: "height:300px" });
  const load = el("div", { style: "height:300px" });
  const matrix = el("div", { style: "overflow-x:auto" });
  body.append(map, beside([[flow, "420px"], [load, "340px"]]), matrix);
  return {
    /** @param {any} view */
    update(view) {
      clear(map, choices(view, view.frames[0]));
    },
    /** @param {any} view @param {number} place */
    frame(view, place) {
      const frame = view.frames[place];
      clear(map, choices(view, frame));
      const computes = frame.phase === "compute";
      clear(flow, computes ? waits : frame.phase === "sum" ? sum(view, frame) : flows(view, frame.phase));
      if (computes) waiting(waits, view);
      bars(load, view, frame.phase);
      clear(matrix, sent(view, frame.phase));
    },
  };
}

/** Which token chose which expert: experts from top to bottom, tokens from left to right. @param {any} view @param {any} frame */
function choices(view, frame) {
  const width = (WIDE - LEFT) / (view.ranks * view.tokens);
  const height = 20 + view.experts * HIGH;
  const x = (/** @type {number} */ rank, /** @type {number} */ token) => LEFT + (rank * view.tokens + token) * width;
  const counted = frame.phase !== "scores";
  const parts = [...lanes(view)];
  if (!counted) parts.push(...heat(view, x, width));
  for (let rank = 0; rank < view.ranks; rank++) parts.push(...chosen(view, rank, x, width, counted));
  for (let rank = 0; rank < view.ranks; rank++) {
    const words = view.ranks > 4 ? `rank ${rank}` : `tokens of rank ${rank}`;
    parts.push(
      svg("text", { x: x(rank, view.tokens / 2), y: 12, "text-anchor": "middle" }, words),
      svg("path", { d: `M${x(rank, 0)} 0V${height}`, stroke: "var(--muted)" }),
    );
  }
  if (frame.token) {
    const [rank, token] = frame.token;
    const size = { x: x(rank, token) - 1, y: 18, width: width + 1, height: height - 19 };
    parts.push(svg("rect", { ...size, fill: "none", stroke: "var(--ink)", "stroke-width": 2 }));
  }
  const label = `Every token's experts. Slots by expert: ${view.asked.join(", ")}; dropped: ${view.numbers.dropped}`;
  const style = "width:100%;min-width:520px;max-width:1000px";
  const size = { class: "choices-map", viewBox: `0 0 ${WIDE} ${height}`, style };
  return svg("svg", { ...size, role: "img", "aria-label": label }, ...parts);
}

/** The experts' lanes, coloured at their rank. @param {any} view */
function* lanes(view) {
  for (let expert = 0; expert < view.experts; expert++) {
    const y = 20 + expert * HIGH;
    const rank = Math.floor(expert / view.on_rank);
    yield svg("rect", { x: LEFT, y, width: WIDE - LEFT, height: HIGH - 2, fill: "var(--raised)" });
    yield svg("rect", { x: 0, y, width: 6, height: HIGH - 2, fill: rankColour(rank) });
    yield svg("text", { x: 10, y: y + HIGH / 2, "dominant-baseline": "central" }, `expert ${expert} · rank ${rank}`);
  }
}

/** Scores as shades. @param {any} view @param {(rank: number, token: number) => number} x @param {number} width */
function heat(view, x, width) {
  /** @type {string[]} ten shades, a path each */
  const shades = Array(10).fill("");
  view.scores.forEach((/** @type {number[][]} */ row, /** @type {number} */ rank) =>
    row.forEach((scores, token) =>
      scores.forEach((score, expert) => {
        shades[Math.min(9, Math.floor(score * 10))] += cell(x(rank, token), expert, width);
      }),
    ),
  );
  return shades.map((d, shade) => svg("path", { d, fill: "var(--accent)", opacity: 0.04 + 0.05 * shade }));
}

/** @param {number} x @param {number} expert @param {number} width */
const cell = (x, expert, width) => `M${x + 0.5} ${20.5 + expert * HIGH}h${width - 1}v${HIGH - 3}h${1 - width}z`;

/**
 * What the tokens of a rank have chosen; dropped slots are crossed out.
 * @param {any} view @param {number} rank @param {(rank: number, token: number) => number} x
 * @param {number} width @param {boolean} counted
 */
function chosen(view, rank, x, width, counted) {
  let kept = "";
  let gone = "";
  for (const [owner, token, expert, , , keeps] of view.slots) {
    if (owner !== rank) continue;
    const left = x(rank, token);
    const y = 20.5 + expert * HIGH;
    if (keeps || !counted) kept += cell(left, expert, width);
    else gone += `M${left + 1} ${y + 4}L${left + width - 1} ${y + HIGH - 7}M${left + width - 1} ${y + 4}L${left + 1} ${y + HIGH - 7}`;
  }
  return [
    svg("path", { class: "kept", d: kept, fill: rankColour(rank) }),
    svg("path", { class: "dropped", d: gone, stroke: "var(--bad)", "stroke-width": 1.5, fill: "none" }),
  ];
}

/** Ribbons from rank to rank, as wide as there are rows. @param {any} view @param {string} phase */
function flows(view, phase) {
  const matrix = matrixOf(view, phase);
  const moving = /near|far/.test(phase);
  const back = phase.endsWith("-back");
  const total = added(matrix.flat());
  const gap = 6;
  const unit = (FLOW.height - 24 - gap * view.ranks) / Math.max(1, total);
  const columns = matrix.map((_, to) => matrix.map((row) => row[to]));
  const [lefts, rights] = [matrix, columns].map((each) => stack(each.map(added), unit, gap));
  const [fromY, toY] = [lefts.map((each) => each.y), rights.map((each) => each.y)];
  const ribbons = matrix.flatMap((row, from) =>
    row.map((rows, to) => {
      const high = rows * unit;
      const path = ribbon(fromY[from], toY[to], high);
      fromY[from] += high;
      toY[to] += high;
      const opacity = moving ? (from === to ? 0.25 : 0.75) : 0.12;
      const title = `rank ${from} → rank ${to}: ${rows} rows, ${bytes(rows * view.row_bytes)}`;
      return svg("path", { d: path, fill: rankColour(from), opacity }, svg("title", {}, title));
    }),
  );
  const boxes = [
    ...lefts.map((each, rank) => box(0, each, rank, `rank ${rank}: ${each.rows}`)),
    ...rights.map((each, rank) => box(FLOW.width - FLOW.box, each, rank, `${expertsOf(view, rank, phase)}: ${each.rows}`)),
  ];
  const way = moving ? (back ? "⟵ rows" : "rows ⟶") : "rows to come and go";
  const heads = [
    svg("text", { x: FLOW.box / 2, y: 12, "text-anchor": "middle" }, "tokens"),
    svg("text", { x: FLOW.width / 2, y: 12, "text-anchor": "middle", style: "font-size:14px" }, way),
    svg("text", { x: FLOW.width - FLOW.box / 2, y: 12, "text-anchor": "middle" }, phase.startsWith("far") ? "nodes" : "experts"),
  ];
  const told = matrix.map((row, rank) => `rank ${rank}: ${row.join(", ")}`);
  const label = `Rows sent ${back ? "back to" : "from"} each rank: ${told.join("; ")}`;
  return svg("svg", { ...CANVAS, class: "flows", "aria-label": label }, ...heads, ...ribbons, ...boxes.flat());
}

/** @param {number[]} numbers */
const added = (numbers) => numbers.reduce((sum, each) => sum + each, 0);

/** The all-to-all of a phase. @param {any} view @param {string} phase @returns {number[][]} */
const matrixOf = (view, phase) => (phase.startsWith("far") ? view.moves.far : view.moves.near);

/** Boxes below one another. @param {number[]} rows @param {number} unit @param {number} gap */
function stack(rows, unit, gap) {
  let y = 20;
  return rows.map((each) => {
    const found = { y, high: each * unit, rows: each };
    y += each * unit + gap;
    return found;
  });
}

/** @param {number} y @param {number} to @param {number} high */
function ribbon(y, to, high) {
  const [left, right] = [FLOW.box, FLOW.width - FLOW.box];
  const half = (left + right) / 2;
  return `M${left} ${y}C${half} ${y} ${half} ${to} ${right} ${to}v${high}C${half} ${to + high} ${half} ${y + high} ${left} ${y + high}z`;
}

/** @param {number} x @param {{y: number, high: number}} place @param {number} rank @param {string} words */
function box(x, { y, high }, rank, words) {
  const colour = rankColour(rank);
  const inside = high >= 12;
  return [
    svg("rect", { x, y, width: FLOW.box, height: Math.max(1, high), fill: colour, rx: 3 }),
    svg("text", { x: x + FLOW.box / 2, y: y + high / 2, ...MIDDLE, style: `fill:${inside ? inkOn(colour) : "var(--ink)"}` }, words),
  ];
}

/** @param {any} view @param {number} rank @param {string} phase */
function expertsOf(view, rank, phase) {
  if (phase.startsWith("far")) return `via rank ${rank}`;
  const first = rank * view.on_rank;
  return view.on_rank === 1 ? `expert ${first}` : `experts ${first}–${first + view.on_rank - 1}`;
}

/** One token at home: its results, weighed and added. @param {any} view @param {any} frame */
function sum(view, frame) {
  const [rank, token] = frame.token;
  const mine = view.slots.filter((/** @type {number[]} */ [owner, place]) => owner === rank && place === token);
  const parts = mine.flatMap((/** @type {number[]} */ [, , expert, , weight, kept], /** @type {number} */ at) => {
    const y = 70 + at * 110;
    const colour = rankColour(Math.floor(expert / view.on_rank));
    const line = kept
      ? { stroke: colour, "stroke-width": 2 + 14 * weight }
      : { stroke: "var(--muted)", "stroke-width": 1.5, "stroke-dasharray": "4 4" };
    return [
      svg("path", { d: `M130 ${y}C230 ${y} 230 140 320 140`, fill: "none", opacity: 0.8, ...line }),
      svg("rect", { x: 20, y: y - 24, width: 110, height: 48, rx: 6, fill: kept ? colour : "var(--raised)", stroke: "var(--muted)" }),
      svg("text", { x: 75, y, ...MIDDLE, style: `fill:${kept ? inkOn(colour) : "var(--muted)"}` }, `expert ${expert}`),
      svg("text", { x: 200, y: y + (at ? 18 : -12), "text-anchor": "middle" }, kept ? `× ${weight.toFixed(2)}` : "no room"),
    ];
  });
  const home = rankColour(rank);
  const token_ = [
    svg("circle", { cx: 370, cy: 140, r: 50, fill: home }),
    svg("text", { x: 370, y: 132, ...MIDDLE, style: `fill:${inkOn(home)}` }, `token ${token}`),
    svg("text", { x: 370, y: 150, ...MIDDLE, style: `fill:${inkOn(home)}` }, `of rank ${rank}`),
  ];
  return svg("svg", { ...CANVAS, "aria-label": frame.says }, ...parts, ...token_);
}

/**
 * Slots of every expert, and the mean; what was dropped stands hatched on top.
 * @param {HTMLElement} node @param {any} view @param {string} phase
 */
function bars(node, view, phase) {
  const experts = view.load.map((/** @type {any} */ _, /** @type {number} */ expert) => `E${expert}`);
  const colours = view.load.map((/** @type {any} */ _, /** @type {number} */ expert) => rankColour(Math.floor(expert / view.on_rank)));
  const gone = view.asked.map((/** @type {number} */ asked, /** @type {number} */ expert) => asked - view.load[expert]);
  const { mean, imbalance, fullest } = view.numbers;
  const faint = phase === "scores" ? 0.25 : 1;
  const dropped = { type: "bar", name: "dropped", x: experts, y: gone, marker: hatched("x", "#b3261e") };
  const marker = { color: colours, opacity: faint };
  const text = faint < 1 ? [] : view.load.map(String); // not known before tokens are counted
  const insidetextfont = { color: colours.map(inkOn) };
  const traces = [
    { type: "bar", name: "slots", x: experts, y: view.load, marker, text, textposition: "auto", textangle: 0, insidetextfont },
    ...(view.numbers.dropped ? [dropped] : []),
    { type: "scatter", mode: "lines", name: `mean ${mean}`, x: experts, y: experts.map(() => mean), line: { dash: "dash", color: "#888" } },
  ];
  const layout = { barmode: "stack", showlegend: true, yaxis: { title: { text: "slots" } }, margin: { l: 48, r: 8, t: 8, b: 48 } };
  const words = `the fullest has ${fullest}, ${imbalance.toFixed(2)} times the mean`;
  draw(node, traces, layout, `Slots of each expert: ${view.load.join(", ")}; ${words}`);
}

/** An empty bar with a pattern: what is not there. @param {string} shape @param {string} fgcolor */
const hatched = (shape, fgcolor) => ({ color: "rgba(0,0,0,0)", line: { color: "#888", width: 1 }, pattern: { shape, fgcolor } });

/** How long every rank computes, and waits for the fullest. @param {HTMLElement} node @param {any} view */
function waiting(node, view) {
  const { by_rank: rows, fullest_rank: fullest } = view.numbers;
  const ranks = rows.map((/** @type {any} */ _, /** @type {number} */ rank) => `rank ${rank}`);
  const colours = rows.map((/** @type {any} */ _, /** @type {number} */ rank) => rankColour(rank));
  const idle = rows.map((/** @type {number} */ each) => fullest - each);
  const flat = { type: "bar", orientation: "h", y: ranks, textposition: "auto" };
  const traces = [
    { ...flat, name: "computes", x: rows, text: rows.map(String), marker: { color: colours }, insidetextfont: { color: colours.map(inkOn) } },
    { ...flat, name: "waits", x: idle, marker: hatched("/", "#888") },
  ];
  const axes = { xaxis: { title: { text: "time, in rows of an expert" } }, yaxis: { autorange: "reversed" } };
  const layout = { ...axes, barmode: "stack", showlegend: true, legend: { orientation: "h", y: 1.12 } };
  draw(node, traces, layout, `Rows computed by each rank: ${rows.join(", ")}; all wait for ${fullest}`);
}

/** Who sends how many rows to whom. @param {any} view @param {string} phase */
function sent(view, phase) {
  const matrix = matrixOf(view, phase);
  const head = ["from \\ to", ...matrix.map((_, rank) => `rank ${rank}`), "bytes"];
  const rows = matrix.map((row, rank) => [`rank ${rank}`, ...row, bytes(added(row) * view.row_bytes)]);
  const { local, crossing } = view.numbers.bytes;
  const where = phase.startsWith("far") ? "Rows to each node, sent once" : "Rows, one for each slot";
  return table(`${where}. One dispatch: ${bytes(crossing)} cross, ${bytes(local)} stay.`, head, rows);
}
