// @ts-check
// ZeRO, unit by unit. In a rank's picture area is memory: a unit is as wide as it has weights, and
// a row as high as it has bytes for each of them.

import { clear, el, svg } from "fivefold/dom.js";
import { bytes } from "fivefold/format.js";
import { colourOf } from "fivefold/colours.js";
import { draw } from "fivefold/chart.js";
import { table } from "fivefold/learn_ranks.js";

const ROWS = ["weights", "gradients", "optimizer"];
const WIDTH = 340;
const LEFT = 62;
const TOP = 34;
const GAP = 4;
const BYTE = 5; // pixels of height for a byte of each weight
const NARROW = 5; // percent of the width that the smallest unit has
const TURN = "rotate(45)";
const CARD = "width:100%;height:auto;border:1px solid var(--line);border-radius:6px;padding:6px";
/** What is shown, and how; in the order in which it is drawn. */
const LOOKS = {
  held: "held",
  arriving: "arriving from the other ranks",
  filling: "gradients being filled",
  summing: "being summed with the other ranks",
};

/** @param {HTMLElement} body */
export function create(body) {
  const moves = el("p", { class: "moves", style: "min-height:2.9em;margin:0.3rem 0;font-weight:600" });
  const ranks = el("div", { style: "display:grid;gap:0.7rem" });
  const chart = el("div", { class: "chart", style: "height:230px" });
  const stages = el("div", { style: "overflow-x:auto" });
  const title = el("p", { class: "hint", style: "margin:0.8rem 0 0" }, "Rank 0 over the step, frame by frame");
  body.append(moves, ranks, legend(), title, chart, stages);
  /** @type {Card[]} */
  let cards = [];

  return {
    /** @param {any} view */
    update(view) {
      const narrowest = view.ranks > 4 ? 235 : 400; // so that rows of cards are full
      ranks.style.gridTemplateColumns = `repeat(auto-fit, minmax(min(100%, ${narrowest}px), 1fr))`;
      cards = Array.from({ length: view.ranks }, (_, rank) => new Card(view, rank));
      clear(ranks, ...cards.map((card) => card.root));
      clear(stages, compared(view));
    },
    /** @param {any} view @param {number} place */
    frame(view, place) {
      const frame = view.frames[place];
      for (const card of cards) card.show(frame);
      const line = (/** @type {any} */ each) => el("span", { style: "display:block" }, moved(view, each));
      clear(moves, ...frame.moves.map(line));
      trace(chart, view, place);
    },
  };
}

/** @param {any} view @param {any} move */
function moved(view, move) {
  const what = move.unit === null ? "numbers of the step" : view.units[move.unit].name;
  const sizes = `${bytes(move.bytes)} of each of ${move.group} ranks · a rank sends ${bytes(move.sent)}`;
  return `⇄ ${move.word} · ${what} · ${sizes}`;
}

/** What one rank holds. */
class Card {
  /** @param {any} view @param {number} rank */
  constructor(view, rank) {
    this.view = view;
    this.rank = rank;
    this.columns = placed(view.units);
    this.tops = rowTops(view.bytes);
    const bottom = this.tops.end;
    this.now = svg("text", { x: WIDTH - 2, y: 12, "text-anchor": "end", style: "font-weight:600" });
    this.most = svg("text", { x: WIDTH - 2, y: bottom + 40, "text-anchor": "end" });
    this.bar = svg("rect", { x: LEFT, y: bottom + 20, height: 8, fill: "var(--accent)" });
    this.peak = svg("rect", { y: bottom + 17, width: 2, height: 14, fill: "var(--bad)" });
    const border = { fill: "none", stroke: "var(--ink)", "stroke-width": 2 };
    this.focus = svg("rect", { y: TOP - 5, height: bottom - TOP + 8, rx: 3, ...border });
    this.parts = Object.fromEntries(ROWS.map((row) => [row, looks(row, rank)]));
    this.root = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${bottom + 46}`, role: "img", style: CARD },
      svg("defs", {}, ...ROWS.slice(0, 2).map((row) => hatch(row, rank))),
      svg("text", { x: 0, y: 12, style: "font-weight:600" }, `rank ${rank}`),
      this.now,
      ...this.frames(),
      ...ROWS.flatMap((row) => Object.values(this.parts[row])),
      this.focus,
      svg("text", { x: 0, y: bottom + 28 }, "memory"),
      svg("rect", { x: LEFT, y: bottom + 20, width: WIDTH - LEFT, height: 8, fill: "var(--idle)" }),
      this.bar,
      this.peak,
      this.most,
    );
    this.parts.optimizer.held.setAttribute("d", this.boxes("optimizer", () => view.optimizer.state === "slice"));
  }

  /** Outlines and names, which stay. */
  frames() {
    const { view, columns, tops } = this;
    const names = view.units.map((/** @type {any} */ unit, /** @type {number} */ place) => {
      const [x, width] = columns[place];
      const at = { x: x + width / 2, y: TOP - 9, "text-anchor": "middle" };
      return svg("text", { ...at, style: "font-size:10px" }, short(unit.name));
    });
    const rows = ROWS.map((row) =>
      svg("text", { x: 0, y: tops[row] + 4 + (view.bytes[row] * BYTE) / 2 }, row),
    );
    const outline = ROWS.map((row) => this.boxes(row, () => false)).join("");
    return [...names, ...rows, svg("path", { d: outline, fill: "var(--raised)", stroke: "var(--line)" })];
  }

  /**
   * The boxes of a row, as one path.
   * @param {string} row
   * @param {(place: number) => boolean | null} sliced true for the rank's slice alone, null for none
   */
  boxes(row, sliced) {
    const { view, columns, tops, rank } = this;
    const height = view.bytes[row] * BYTE;
    return columns
      .map(([x, width], place) => {
        const slice = sliced(place);
        if (slice === null) return "";
        const part = slice ? width / view.ranks : width;
        return `M${x + (slice ? rank * part : 0)} ${tops[row]}h${part}v${height}h${-part}z`;
      })
      .join("");
  }

  /** @param {any} frame */
  show(frame) {
    const { weights, gradients } = this.parts;
    const is = (/** @type {string} */ word) => (/** @type {number} */ place) => frame.weights[place] === word;
    const has = (/** @type {string} */ word) => (/** @type {number} */ place) => frame.gradients[place].includes(word);
    /** @type {(test: (place: number) => boolean) => (place: number) => false | null} */
    const only = (test) => (place) => (test(place) ? false : null);
    // Whoever gathers a unit has its own slice already.
    weights.held.setAttribute("d", this.boxes("weights", (place) => !is("whole")(place)));
    weights.arriving.setAttribute("d", this.boxes("weights", only(is("arriving"))));
    gradients.filling.setAttribute("d", this.boxes("gradients", only(has("filling"))));
    gradients.summing.setAttribute("d", this.boxes("gradients", only(has("summing"))));
    gradients.held.setAttribute(
      "d",
      this.boxes("gradients", (place) => (has("whole")(place) ? false : has("slice")(place) ? true : null)),
    );
    this.measure(frame);
  }

  /** @param {any} frame */
  measure(frame) {
    const { view, rank } = this;
    const most = Math.max(...view.stages.map((/** @type {any} */ one) => one.peak));
    const [live, peak] = [frame.live[rank], frame.peak[rank]];
    const along = (/** @type {number} */ size) => ((WIDTH - LEFT) * size) / most;
    this.bar.setAttribute("width", String(along(live)));
    this.peak.setAttribute("x", String(Math.min(WIDTH - 2, LEFT + along(peak))));
    clear(this.now, `${bytes(live)} now`);
    clear(this.most, `peak so far ${bytes(peak)}; the scale ends at ${bytes(most)}`);
    const at = frame.computes === null ? null : this.columns[frame.computes];
    this.focus.setAttribute("visibility", at ? "visible" : "hidden");
    if (at) {
      this.focus.setAttribute("x", String(at[0] - 2));
      this.focus.setAttribute("width", String(at[1] + 4));
    }
    this.root.setAttribute("aria-label", spoken(view, rank, frame));
  }
}

/** What the picture of a rank shows, in words. @param {any} view @param {number} rank @param {any} frame */
function spoken(view, rank, frame) {
  /** @param {(place: number) => boolean} test */
  const named = (test) => {
    const found = view.units.filter((/** @type {any} */ _, /** @type {number} */ place) => test(place));
    return found.map((/** @type {any} */ unit) => unit.name).join(", ") || "none";
  };
  const whole = named((place) => frame.weights[place] === "whole");
  const arriving = named((place) => frame.weights[place] === "arriving");
  const summing = named((place) => frame.gradients[place].includes("summing"));
  const held = `Rank ${rank} holds ${bytes(frame.live[rank])}. Whole weights: ${whole}.`;
  return `${held} Arriving: ${arriving}. Gradients being summed: ${summing}.`;
}

/** Left end and width of every unit. @param {{elements: number}[]} units @returns {[number, number][]} */
function placed(units) {
  const room = WIDTH - LEFT - GAP * (units.length - 1);
  const total = units.reduce((sum, unit) => sum + unit.elements, 0);
  const wide = units.map((unit) => Math.max(NARROW / 100, unit.elements / total));
  const scale = room / wide.reduce((sum, each) => sum + each, 0);
  let x = LEFT;
  return wide.map((each) => {
    const start = x;
    x += each * scale + GAP;
    return [start, each * scale];
  });
}

/** @param {Record<string, number>} sizes @returns {Record<string, number>} */
function rowTops(sizes) {
  /** @type {Record<string, number>} */
  const tops = {};
  let y = TOP;
  for (const row of ROWS) {
    tops[row] = y;
    y += sizes[row] * BYTE + GAP;
  }
  return { ...tops, end: y - GAP };
}

/** The paths of a row, one for each look. @param {string} row @param {number | string} rank */
function looks(row, rank) {
  const colour = colourOf(row);
  const striped = `url(#zero-${row}-${rank})`;
  return {
    filling: svg("path", { fill: colour, "fill-opacity": 0.35, stroke: colour, "stroke-dasharray": "3 2" }),
    summing: svg("path", { fill: striped, stroke: colour }),
    arriving: svg("path", { fill: striped, stroke: colour }),
    held: svg("path", { fill: colour }),
  };
}

/** @param {string} row @param {number | string} rank */
function hatch(row, rank) {
  return svg(
    "pattern",
    { id: `zero-${row}-${rank}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: TURN },
    svg("rect", { width: 6, height: 6, fill: "var(--paper)" }),
    svg("rect", { width: 3, height: 6, fill: colourOf(row) }),
  );
}

function legend() {
  const keys = Object.entries(LOOKS).map(([look, says]) => {
    const row = look === "arriving" ? "weights" : look === "held" ? "optimizer" : "gradients";
    const path = looks(row, "legend")[/** @type {keyof typeof LOOKS} */ (look)];
    path.setAttribute("d", "M1 1h22v12h-22z");
    const size = { width: 24, height: 14, "aria-hidden": "true", style: "vertical-align:-2px" };
    const picture = svg("svg", size, svg("defs", {}, hatch(row, "legend")), path);
    return el("span", { style: "white-space:nowrap" }, picture, ` ${says}`);
  });
  const note = el("span", {}, "area is memory; framed: what is computed now");
  const style = "display:flex;flex-wrap:wrap;gap:0.2rem 1rem;margin:0.5rem 0";
  return el("p", { class: "hint", style }, ...keys, note);
}

/** @param {string} name */
const short = (name) => name.replace("block ", "").replace("embed", "emb");

/** Memory over the frames, with a line where we are.
 * @param {HTMLElement} node @param {any} view @param {number} place */
function trace(node, view, place) {
  const x = view.frames.map((/** @type {any} */ _, /** @type {number} */ at) => at + 1);
  const sizes = {
    optimizer: x.map(() => view.optimizer.bytes[0]),
    weights: view.frames.map((/** @type {any} */ each) => each.held.weights),
    gradients: view.frames.map((/** @type {any} */ each) => each.held.gradients),
  };
  const [unit, scale] = view.frames[0].live[0] > 2 ** 28 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  const traces = Object.entries(sizes).map(([name, y]) => ({
    x,
    y: y.map((/** @type {number} */ size) => size / scale),
    name,
    stackgroup: "held",
    mode: "lines",
    line: { shape: "hvh", width: 1, color: colourOf(name) },
    fillcolor: colourOf(name),
    hovertemplate: `%{y:.2f} ${unit}`,
  }));
  const mark = { type: "line", line: { color: colourOf("logits"), width: 3 } };
  const here = { ...mark, x0: place + 1, x1: place + 1, y0: 0, y1: 1, yref: "paper" };
  const layout = {
    shapes: [here],
    hovermode: "x unified",
    xaxis: { title: { text: "frame" }, dtick: x.length > 30 ? 10 : 5 },
    yaxis: { title: { text: unit }, rangemode: "tozero" },
    legend: { orientation: "h", y: 1.16 },
    margin: { l: 48, r: 12, t: 26, b: 36 },
  };
  draw(node, traces, layout, `Memory of rank 0 over ${x.length} frames; now ${bytes(view.frames[place].live[0])}`);
}

/** @param {any} view */
function compared(view) {
  const rows = view.stages.map((/** @type {any} */ one) => [
    `ZeRO-${one.zero}`,
    one.per_parameter.toFixed(2),
    bytes(one.accumulating),
    bytes(one.standing),
    bytes(one.peak),
    bytes(one.sent),
  ]);
  const head = ["stage", "bytes a parameter", "while gradients add up", "before the optimizer", "peak", "a rank sends"];
  const [shown, layers] = view.layers;
  const caption = `The four stages on ${view.ranks} ranks, ${shown} of ${layers} layers`;
  return table(caption, head, rows, Number(view.choices.zero));
}
