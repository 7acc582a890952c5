// @ts-check
// The row of tokens cut over ranks: the causal triangle, the ring that turns, and everybody's work.

import { clear, el, svg } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { count } from "fivefold/format.js";
import { beside, inkOn, rankColour, table } from "fivefold/learn_ranks.js";

const SIDE = 360; // of the square of queries and keys
const STRIP = 16; // which rank holds what, along two sides
const HEAD = { one: 22, many: 36 }; // room for the title of a square; many are drawn smaller
const HINT = "Circles are ranks, with their queries. Boxes are keys and values, by the rank that they come from.";
const SPEED = "transition: transform 0.7s ease-in-out";

/** @param {HTMLElement} body */
export function create(body) {
  const triangle = el("div", { class: "triangle" });
  const ring = el("div", { class: "ring" });
  const work = el("div", { style: "height:200px" });
  const kinds = el("div", { style: "overflow-x:auto" });
  // The chart is the last, so that nothing moves where a frame has none.
  body.append(beside([[triangle, "420px"], [ring, "260px"]]), beside([[kinds, "420px"], [work, "320px"]]));
  /** @type {SVGElement[][]} paths by frame */
  let steps = [];
  /** @type {(frame: any) => void} */
  let turn = () => undefined;

  return {
    /** @param {any} view */
    update(view) {
      const sheets = view.sheets.map((/** @type {any} */ sheet) => square(view, sheet));
      steps = view.frames.map((/** @type {any} */ _, /** @type {number} */ at) =>
        sheets.flatMap((/** @type {any} */ each) => each.steps[at]),
      );
      clear(triangle, grid(sheets, view));
      turn = ringOf(ring, view);
      clear(kinds, comparison(view));
    },
    /** @param {any} view @param {number} place */
    frame(view, place) {
      steps.forEach((paths, at) => {
        for (const path of paths) {
          const isText = path.tagName === "text";
          path.setAttribute("opacity", at === place ? "1" : at < place ? (isText ? "1" : "0.3") : "0");
          if (isText) path.style.fill = at === place ? path.dataset.ink ?? "" : "var(--ink)";
        }
      });
      turn(view.frames[place]);
      bars(work, view, place);
    },
  };
}

/** All squares in one picture. @param {{root: SVGElement}[]} sheets @param {any} view */
function grid(sheets, view) {
  const columns = sheets.length > 4 ? 4 : sheets.length > 1 ? 2 : 1;
  const size = SIDE + STRIP + headOf(view) + 8;
  const rows = Math.ceil(sheets.length / columns);
  sheets.forEach(({ root }, place) =>
    root.setAttribute("transform", `translate(${(place % columns) * size} ${Math.floor(place / columns) * size})`),
  );
  const label = `${view.tokens} queries, from top to bottom, and the keys that each of them sees, by the rank that computes them`;
  const style = `width:100%;max-width:${columns > 2 ? 720 : 480}px`;
  return svg(
    "svg",
    { viewBox: `0 0 ${columns * size} ${rows * size}`, role: "img", "aria-label": label, style },
    ...sheets.map(({ root }) => root),
  );
}

/** @param {any} view */
const headOf = (view) => (view.sheets.length > 1 ? HEAD.many : HEAD.one);

/** One square of queries and keys. @param {any} view @param {any} sheet */
function square(view, sheet) {
  const cell = SIDE / view.tokens;
  const inside = svg("g", { transform: `translate(${STRIP + 4} ${STRIP + headOf(view)})` });
  inside.append(
    svg("rect", { width: SIDE, height: SIDE, fill: "var(--raised)", stroke: "var(--line)" }),
    svg("path", { d: unseen(view, cell), fill: "var(--line)", opacity: 0.55 }),
  );
  const steps = view.frames.map((/** @type {any} */ frame) =>
    sheet.ranks.flatMap((/** @type {number} */ rank) => done(view, frame.runs[rank], rank, cell)),
  );
  inside.append(...steps.flat(), svg("path", { d: cuts(view, cell), stroke: "var(--paper)", "stroke-width": 1 }));
  for (const { rank, pieces } of view.ranks)
    for (const [start, stop] of pieces) inside.append(...strips(rank, start * cell, (stop - start) * cell));
  const large = view.sheets.length > 1 ? "font-size:24px" : "";
  const words = view.sheets.length > 1 ? sheet.label : `keys →   queries ↓   ${sheet.label}`;
  const title = svg("text", { x: STRIP + 4, y: headOf(view) - 9, style: large }, words);
  return { root: svg("g", {}, title, inside), steps };
}

/** Pairs that no query sees: later tokens, and those outside of a window. @param {any} view @param {number} cell */
function unseen(view, cell) {
  let path = "";
  for (let query = 0; query < view.tokens; query++) {
    path += bar(query, query + 1, view.tokens, cell);
    if (view.window) path += bar(query, 0, Math.max(0, query - view.window + 1), cell);
  }
  return path;
}

/** Keys [start, stop) of one query. @param {number} query @param {number} start @param {number} stop @param {number} cell */
function bar(query, start, stop, cell) {
  return stop > start ? `M${start * cell} ${query * cell}h${(stop - start) * cell}v${cell}h${(start - stop) * cell}z` : "";
}

/**
 * What one rank computes in one step, with its number in every part.
 * @param {any} view @param {number[][]} runs @param {number} rank @param {number} cell
 */
function done(view, runs, rank, cell) {
  if (!runs.length) return [];
  const colour = rankColour(rank);
  const path = svg("path", { d: runs.map(([query, start, stop]) => bar(query, start, stop, cell)).join(""), fill: colour, opacity: 0 });
  /** @type {Map<string, number[][]>} */
  const parts = new Map();
  for (const run of runs) {
    const key = `${pieceOf(view, run[0])} ${pieceOf(view, run[1])}`;
    parts.set(key, [...(parts.get(key) ?? []), run]);
  }
  const letters = [...parts.values()].map((part) => {
    const total = part.reduce((sum, [, start, stop]) => sum + stop - start, 0);
    const x = part.reduce((sum, [, start, stop]) => sum + ((stop - start) * (start + stop)) / 2, 0) / total;
    const y = part.reduce((sum, [query, start, stop]) => sum + (stop - start) * (query + 0.5), 0) / total;
    const style = `fill:${inkOn(colour)};font-size:${view.sheets.length > 1 ? 26 : 13}px`;
    return svg("text", { x: x * cell, y: y * cell, "text-anchor": "middle", "dominant-baseline": "central", style, opacity: 0, "data-ink": inkOn(colour) }, rank);
  });
  return [path, ...letters];
}

/** The piece of the row that a token lies in. @param {any} view @param {number} token */
function pieceOf(view, token) {
  for (const { pieces } of view.ranks)
    for (const [start, stop] of pieces) if (token >= start && token < stop) return start;
  return -1;
}

/** Where the row is cut. @param {any} view @param {number} cell */
function cuts(view, cell) {
  const places = view.ranks.flatMap((/** @type {any} */ each) => each.pieces.map((/** @type {number[]} */ piece) => piece[0] * cell));
  return places.map((/** @type {number} */ at) => `M${at} 0V${SIDE}M0 ${at}H${SIDE}`).join("");
}

/** A piece of the row, along the keys and along the queries. @param {number} rank @param {number} start @param {number} length */
function strips(rank, start, length) {
  const colour = rankColour(rank);
  const middle = { "text-anchor": "middle", "dominant-baseline": "central", style: `fill:${inkOn(colour)}` };
  return [
    svg("rect", { x: start, y: -STRIP - 2, width: length - 1, height: STRIP, fill: colour }),
    svg("rect", { x: -STRIP - 2, y: start, width: STRIP, height: length - 1, fill: colour }),
    svg("text", { x: start + length / 2, y: -STRIP / 2 - 2, ...middle }, rank),
    svg("text", { x: -STRIP / 2 - 2, y: start + length / 2, ...middle }, rank),
  ];
}

/** The ranks in a ring, and the keys and values that go round. @param {HTMLElement} host @param {any} view */
function ringOf(host, view) {
  const total = view.ranks.length;
  const angle = 360 / total;
  const arrows = svg("g");
  const chips = view.ranks.map((/** @type {any} */ each) => chip(each.rank));
  const shares = svg("g");
  const nodes = view.ranks.map((/** @type {any} */ { rank }) => {
    const [x, y] = at(rank * angle, 92);
    const colour = rankColour(rank);
    return svg(
      "g",
      {},
      svg("circle", { cx: x, cy: y, r: 19, fill: colour, stroke: "var(--paper)", "stroke-width": 2 }),
      svg("text", { x, y, "text-anchor": "middle", "dominant-baseline": "central", style: `fill:${inkOn(colour)};font-weight:600` }, rank),
    );
  });
  const boxes = chips.map((/** @type {any} */ each) => each.root);
  const size = { viewBox: "-160 -160 320 320", style: "width:100%;max-width:340px" };
  const picture = svg("svg", { ...size, role: "img" }, arrows, ...nodes, ...boxes, shares);
  clear(host, picture, el("p", { class: "hint" }, HINT));
  /** @param {{holds: number[][], moves: number[][]}} frame */
  return ({ holds, moves }) => {
    const one = holds.every((each) => each.length === 1);
    if (one) holds.forEach(([owner], rank) => chips[owner].move(rank, angle, total));
    for (const each of boxes) each.setAttribute("opacity", one ? "1" : "0");
    clear(shares, ...(one ? [] : holds.flatMap((held, rank) => pile(held, rank * angle))));
    clear(arrows, ...moves.map(([from, to, owner]) => arrow(from * angle, to * angle, owner, total)));
    const told = holds.map((held, rank) => `rank ${rank} has the keys of ${held.join(", ")}`);
    picture.setAttribute("aria-label", told.join("; "));
  };
}

/** A point at an angle, in degrees from the top. @param {number} degrees @param {number} radius */
function at(degrees, radius) {
  const turn = (degrees * Math.PI) / 180;
  return [radius * Math.sin(turn), -radius * Math.cos(turn)];
}

/** Keys and values of one rank, wherever they are now. @param {number} owner */
function chip(owner) {
  const colour = rankColour(owner);
  const quiet = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const upright = svg(
    "g",
    { style: quiet ? "" : SPEED },
    svg("rect", { x: -20, y: -10, width: 40, height: 20, rx: 4, fill: colour, stroke: "var(--ink)" }),
    svg("text", { "text-anchor": "middle", "dominant-baseline": "central", style: `fill:${inkOn(colour)}` }, `KV ${owner}`),
  );
  const root = svg("g", { "data-owner": owner, style: quiet ? "" : SPEED }, svg("g", { transform: "translate(0 -134)" }, upright));
  let turned = 0;
  let place = /** @type {number | null} */ (null);
  return {
    root,
    /** @param {number} rank @param {number} angle @param {number} total */
    move(rank, angle, total) {
      const steps = place === null ? rank : (rank - place + total) % total;
      // Back is the other way round, never all the way.
      turned += angle * (steps > total / 2 ? steps - total : steps);
      place = rank;
      root.style.transform = `rotate(${turned}deg)`;
      upright.style.transform = `rotate(${-turned}deg)`;
    },
  };
}

/** Keys and values of several ranks on one. @param {number[]} held @param {number} degrees */
function pile(held, degrees) {
  const [x, y] = at(degrees, 134);
  const width = 48 / held.length;
  const alike = { y: y - 9, width: width - 0.5, height: 18, stroke: "var(--ink)", "stroke-width": 0.5 };
  return held.map((owner, place) => svg("rect", { ...alike, x: x - 24 + place * width, fill: rankColour(owner) }));
}

/**
 * From one rank to another; along the ring where they are neighbours in it.
 * @param {number} from @param {number} to @param {number} owner @param {number} total
 */
function arrow(from, to, owner, total) {
  const inner = total > 2 ? 64 : 70;
  const [x, y] = at(from + 6, inner);
  const [a, b] = at(to - 6, inner);
  const [tipX, tipY] = [x + (a - x) * 0.94, y + (b - y) * 0.94];
  const turn = Math.atan2(b - y, a - x);
  const wing = (/** @type {number} */ by) => `${a - 8 * Math.cos(turn + by)} ${b - 8 * Math.sin(turn + by)}`;
  const colour = rankColour(owner);
  return svg(
    "g",
    { class: "move" },
    svg("path", { d: `M${x} ${y}L${tipX} ${tipY}`, stroke: colour, "stroke-width": 2.5, fill: "none" }),
    svg("path", { d: `M${a} ${b}L${wing(0.45)}L${wing(-0.45)}z`, fill: colour }),
  );
}

/** Pairs of every rank in this step; no chart of nothing. @param {HTMLElement} node @param {any} view @param {number} place */
function bars(node, view, place) {
  const frame = view.frames[place];
  node.hidden = !frame.computed.some((/** @type {number} */ each) => each > 0);
  if (node.hidden) return;
  const ranks = view.ranks.map((/** @type {any} */ each) => `rank ${each.rank}`);
  const most = Math.max(...view.frames.flatMap((/** @type {any} */ each) => each.computed));
  const colours = view.ranks.map((/** @type {any} */ each) => rankColour(each.rank));
  const hidden = frame.computed.map((/** @type {number} */ each, /** @type {number} */ rank) => each - frame.seen[rank]);
  const text = frame.computed.map(String);
  const traces = [
    { type: "bar", name: "seen", x: ranks, y: frame.seen, marker: { color: colours }, text, textposition: "auto", textangle: 0, insidetextfont: { color: colours.map(inkOn) } },
    { type: "bar", name: "computed and masked", x: ranks, y: hidden, marker: { color: colours, pattern: { shape: "/", fgcolor: "#fff" } } },
  ];
  const yaxis = { range: [0, most * 1.05], title: { text: "pairs in this step" } };
  const layout = { barmode: "stack", showlegend: false, yaxis, margin: { l: 56, r: 8, t: 8, b: 28 } };
  const told = ranks.map((/** @type {string} */ name, /** @type {number} */ rank) => `${name} ${text[rank]}`);
  draw(node, traces, layout, `pairs computed in this step: ${told.join(", ")}`);
}

/** The kinds beside one another. @param {any} view */
function comparison(view) {
  const { model, tokens, bytes } = view.traffic;
  const rows = view.compared.map((/** @type {any} */ each) => [
    each.kind,
    each.most,
    each.least,
    each.lasts,
    `${(100 * each.busy).toFixed(0)}%`,
    (bytes[each.kind] / 1e6).toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 }),
  ]);
  const marked = view.compared.findIndex((/** @type {any} */ each) => each.kind === view.choices.kind);
  const caption =
    "Pairs of the busiest and the least busy rank; how long all steps last, in pairs; MB that a rank " +
    `of ${model} sends in a layer with ${count(tokens)} tokens, in bf16, forward and backward.`;
  return table(caption, ["kind", "most", "least", "lasts", "busy", "MB sent"], rows, marked);
}
