// @ts-check
// Column, then row: the numbers that every rank has in its hands, and the sizes of a real model.

import { clear, el, svg } from "fivefold/dom.js";
import { bytes, count, seconds } from "fivefold/format.js";
import { rankColour, table } from "fivefold/learn_ranks.js";

const ROW = 17;
const CARD =
  "border:1px solid var(--line);border-radius:6px;padding:0.35rem 0.6rem;display:grid;gap:0.5rem;align-content:start";
const BESIDE = "justify-content:space-around;font-size:0.7rem;line-height:1;color:var(--muted)";
const FLOW = "display:flex;flex-wrap:wrap;gap:0.35rem 0.6rem;align-items:center";

/** @param {HTMLElement} body */
export function create(body) {
  const whole = el("div", { class: "overview", style: `${FLOW};padding:0.4rem 0` });
  const moves = el("p", { class: "moves", style: "min-height:1.5em;margin:0.3rem 0;font-weight:600" });
  const ranks = el("div", { class: "ranks", style: "display:grid;gap:0.7rem" });
  const truth = el("div", { class: "truth", style: `${FLOW};margin:0.6rem 0` });
  const real = el("div", { style: "display:flex;flex-wrap:wrap;gap:0.6rem 2rem;overflow-x:auto;margin-top:0.8rem" });
  const hint = el("p", { class: "hint", style: "margin:0.4rem 0 0" });
  body.append(hint, whole, moves, ranks, legend(), truth, real);

  return {
    /** @param {any} view */
    update(view) {
      const narrowest = view.ranks > 4 ? 235 : 400; // so that rows of cards are full
      ranks.style.gridTemplateColumns = `repeat(auto-fit, minmax(min(100%, ${narrowest}px), 1fr))`;
      const cut = view.ranks > 1 ? `, and how ${view.ranks} ranks cut it: each has a colour and its number` : "";
      clear(hint, `The whole computation on one device${cut}`);
    },
    /** @param {any} view @param {number} place */
    frame(view, place) {
      const frame = view.frames[place];
      const named = names(frame);
      const part = (/** @type {any} */ one) => (typeof one === "string" ? sign(one) : overview(one, view.ranks, named));
      clear(whole, ...view.overview.map(part));
      clear(moves, ...frame.moves.map((/** @type {any} */ each) => moved(each, view)));
      const hand = (/** @type {any[]} */ one, /** @type {number} */ rank) => card(one, rank, frame);
      clear(ranks, ...frame.ranks.map(hand));
      clear(truth, ...compared(frame));
      clear(real, ...sizes(view, frame));
    },
  };
}

/** The matrices that a frame speaks of. @param {any} frame @returns {Set<string>} */
function names(frame) {
  const items = frame.ranks.flat(2).filter((/** @type {any} */ one) => typeof one !== "string");
  return new Set(items.map((/** @type {any} */ one) => one.name.replace("part of ", "")));
}

/** @param {any} move @param {any} view */
function moved(move, view) {
  const { tier, link } = view.real;
  const sizes = `${bytes(move.bytes)} of each rank, which sends ${bytes(move.sent)} over ${tier} (${link})`;
  return `⇄ ${move.word} over tp=${move.group} · in ${view.choices.model}: ${sizes}`;
}

/** @param {any[]} equations @param {number} rank @param {any} frame */
function card(equations, rank, frame) {
  const label = frame.moves.length ? frame.moves[0].word : "";
  const lines = equations.map((equation) => {
    const parts = equation.map((/** @type {any} */ one, /** @type {number} */ at) => {
      if (typeof one === "string") return sign(one, label);
      // What is the same on every rank is drawn once, unless it is what comes out.
      const again = rank > 0 && one.kind === "whole" && at < equation.length - 1;
      return again ? sign(one.name) : matrix(one, rankColour(rank));
    });
    return el("div", { style: FLOW }, ...parts);
  });
  const style = `${CARD};border-left:5px solid ${rankColour(rank)}`;
  return el("div", { style, role: "group", "aria-label": `rank ${rank}` }, el("strong", {}, `rank ${rank}`), ...lines);
}

/** @param {string} mark @param {string} [label] what happens on the way */
function sign(mark, label = "") {
  const text = mark === "→" && label ? `${label} →` : mark;
  return el("span", { style: "font-size:1rem;color:var(--muted)" }, text);
}

const SAME = { fill: "var(--raised)", stroke: "var(--line)" };

/** @param {string} colour @param {boolean} partial */
function ofRank(colour, partial) {
  const look = { fill: colour, "fill-opacity": 0.22, stroke: colour, "stroke-width": 2 };
  return partial ? { ...look, "stroke-dasharray": "4 3" } : look;
}

/** A number as it is printed. @param {number} value */
const shown = (value) => String(value).replace("-", "−");

/** "columns 2–3" as an index. @param {string} part */
const short = (part) => part.replace(/^columns? (\d.*)$/, "[:, $1]").replace(/^(row|token)s? (\d.*)$/, "[$2, :]");

/** @param {number[][]} values */
const cellWidth = (values) => 8 + 7 * Math.max(...values.flat().map((value) => shown(value).length));

/**
 * A matrix of one rank: tinted where it is the rank's own, dashed where it is a summand.
 * @param {{name: string, kind: string, part: string, values: number[][]}} one
 * @param {string} colour
 */
function matrix(one, colour) {
  const own = one.kind !== "whole";
  return grid(one, () => null, own ? ofRank(colour, one.kind === "partial") : SAME);
}

/**
 * A whole matrix, its blocks in the colours and with the numbers of their ranks.
 * @param {{name: string, kind: string, part: string, cut: string, values: number[][]}} one
 * @param {number} ranks
 * @param {Set<string>} named what is spoken of now
 */
function overview(one, ranks, named) {
  const [rows, columns] = [one.values.length, one.values[0].length];
  const owner = (/** @type {number} */ i, /** @type {number} */ j) => {
    if (!one.cut) return null;
    return Math.floor(one.cut === "rows" ? (i * ranks) / rows : (j * ranks) / columns);
  };
  const now = named.has(one.name) || named.has(`d${one.name}`);
  const look = { fill: "none", stroke: now ? "var(--ink)" : "var(--line)", "stroke-width": now ? 2 : 1 };
  const numbers = one.cut ? Array.from({ length: ranks }, (_, rank) => rank) : [];
  const picture = grid({ ...one, part: one.cut && `by ${one.cut}` }, owner, look);
  const along = one.cut === "rows" ? "column" : "row";
  const list = el(
    "div",
    { style: `display:flex;flex-direction:${along};${BESIDE}`, "aria-hidden": "true" },
    ...numbers.map((rank) => el("span", {}, rank)),
  );
  const caption = /** @type {HTMLElement} */ (picture.firstChild);
  const sheet = /** @type {SVGElement} */ (picture.lastChild);
  const row = one.cut === "rows" ? "display:flex;gap:2px" : "display:inline-block";
  return clear(picture, caption, el("div", { style: row }, sheet, list));
}

/**
 * @param {{name: string, kind: string, part: string, values: number[][]}} one
 * @param {(row: number, column: number) => number | null} owner the rank whose colour a cell has
 * @param {Record<string, any>} look of the frame
 */
function grid(one, owner, look) {
  const wide = cellWidth(one.values);
  const [rows, columns] = [one.values.length, one.values[0].length];
  const cells = one.values.flatMap((row, i) => row.map((value, j) => cell(value, i, j, wide, owner(i, j))));
  const [width, height] = [columns * wide, rows * ROW];
  const viewBox = `-2 -2 ${width + 4} ${height + 4}`;
  const numbers = one.values.map((row) => row.join(" ")).join("; ");
  const label = `${one.name}${one.part ? `, ${one.part}` : ""}, ${rows} by ${columns}: ${numbers}`;
  const picture = svg(
    "svg",
    { width: width + 4, height: height + 4, viewBox, role: "img", "aria-label": label },
    svg("rect", { width, height, rx: 3, ...look }),
    ...cells.flat(),
  );
  const part = one.part ? el("span", { style: "color:var(--muted);font-size:0.75rem" }, ` ${short(one.part)}`) : null;
  const caption = el("figcaption", { style: "font-size:0.85rem;line-height:1.2" }, one.name, part);
  return el("figure", { style: "margin:0", class: one.kind }, caption, picture);
}

/** @param {number} value @param {number} row @param {number} column @param {number} wide @param {number | null} rank */
function cell(value, row, column, wide, rank) {
  const [x, y] = [column * wide, row * ROW];
  const box = { x, y, width: wide, height: ROW, "fill-opacity": 0.3 };
  const back = rank === null ? [] : [svg("rect", { ...box, fill: rankColour(rank) })];
  const style = "font-variant-numeric:tabular-nums";
  return [...back, svg("text", { x: x + wide - 4, y: y + 12.5, "text-anchor": "end", style }, shown(value))];
}

/** What one device has, beside what came of the ranks. @param {any} frame */
function compared(frame) {
  if (!frame.one_device) return [];
  const one = { ...frame.one_device, name: `${frame.one_device.name} on one device` };
  return [...(frame.sum ? [matrix(frame.sum, ""), sign("≠")] : []), matrix(one, "")];
}

function legend() {
  /** @type {[string, Record<string, any>][]} */
  const looks = [
    ["the same on every rank", SAME],
    ["the rank's own part", ofRank(rankColour(0), false)],
    ["one summand of the whole", ofRank(rankColour(0), true)],
  ];
  const size = { width: 26, height: 16, "aria-hidden": "true", style: "vertical-align:-3px" };
  const keys = looks.map(([says, look]) => {
    const picture = svg("svg", size, svg("rect", { x: 2, y: 2, width: 22, height: 12, rx: 3, ...look }));
    return el("span", { style: "white-space:nowrap" }, picture, ` ${says}`);
  });
  const style = "display:flex;flex-wrap:wrap;gap:0.2rem 1rem;margin:0.5rem 0";
  return el("p", { class: "hint", style }, ...keys);
}

/** The real model: its collectives, the one of this frame in bold, and the pieces of its weights.
 * @param {any} view @param {any} frame */
function sizes(view, frame) {
  const { calls, pieces, tier, link, tokens, width } = view.real;
  const list = /** @type {any[]} */ (Object.values(calls));
  const rows = list.map((each) => [
    each.word,
    bytes(each.bytes),
    bytes(each.sent),
    seconds(each.seconds),
  ]);
  const marked = list.findIndex((each) => frame.moves.some((/** @type {any} */ move) => move.kind === each.kind));
  const { model, machine } = view.choices;
  const where = `${model}, ${count(tokens)} tokens of width ${count(width)}, over ${tier} (${link}) of ${machine}`;
  const by = (/** @type {number[]} */ shape) => shape.map(count).join(" × ");
  const held = pieces.map((/** @type {any} */ one) => [one.name, one.cut, by(one.whole), by(one.local)]);
  const head = ["collective", "of each rank", "a rank sends", "at full speed"];
  return [
    ...(rows.length ? [el("div", {}, table(where, head, rows, marked))] : []),
    el("div", {}, table("Its weights: all, and of one rank", ["weight", "cut by", "whole", "a rank's"], held)),
  ];
}
