// @ts-check
// Memory over the length of sequences: the layout that is looked at, and one for each strategy.
// Dashes tell the kind of recomputation, marks and colours the strategy.

import { clear, el } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { colourOf } from "fivefold/colours.js";
import { gib } from "fivefold/format.js";
import { slow } from "fivefold/slow.js";

const GIB = 2 ** 30;
const FAR = 10; // times the limit
const ROUND = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
/** @type {Record<string, string>} */
const DASHES = { none: "solid", selective: "dash", full: "dot" };
/** @type {Record<string, [string, string]>} */
const LOOKS = {
  data: [colourOf("dp"), "circle"],
  "data+tensor": [colourOf("tp"), "square"],
  "data+pipeline": [colourOf("pp"), "triangle-up"],
  "data+context": [colourOf("cp"), "diamond"],
  all: [colourOf("compute"), "cross"],
};

/**
 * @param {HTMLElement} body
 * @returns {{update: (part: any, view: any) => void, leave: () => void}}
 */
export function create(body) {
  const own = picture("This layout");
  const others = picture("One layout for each strategy");
  const asker = slow("curves", "A layout is chosen for each strategy", (found) => {
    others.root.hidden = !found;
    if (found) strategies(others, found);
  });
  body.append(asker.root, el("div", { class: "curves" }, own.root, others.root));
  others.root.hidden = true;
  return {
    update(part, view) {
      own.root.hidden = !part;
      if (part) layoutItself(own, part);
      asker.want(view.state);
    },
    leave: () => asker.drop(),
  };
}

/** @param {string} title */
function picture(title) {
  const chart = el("div", { class: "curve-chart" });
  const words = el("ul", { class: "hint" });
  return { root: el("figure", {}, el("figcaption", {}, title), chart, words), chart, words };
}

/** @param {{chart: HTMLElement, words: HTMLElement}} where @param {any} one */
function layoutItself({ chart, words }, one) {
  const traces = Object.keys(one.bytes).map((kind) => ({
    ...line(one.lengths, one.bytes[kind], `recompute ${kind}`, kind),
    line: { dash: DASHES[kind], color: colourOf("here"), width: kind === one.recompute ? 3.5 : 1.8 },
    marker: { color: colourOf("here"), size: 5 },
  }));
  const mark = { symbol: "star", size: 15, color: colourOf("here"), line: { width: 1, color: "#1d2129" } };
  traces.push({ ...line([one.seq], [one.now], "now", one.recompute), mode: "markers", marker: mark });
  clear(words, el("li", {}, one.words));
  draw(chart, traces, layout(one, traces), `Memory over sequence length of ${one.words}`);
}

/** @param {{chart: HTMLElement, words: HTMLElement}} where @param {any} found */
function strategies({ chart, words }, found) {
  const drawn = found.strategies.filter((/** @type {any} */ one) => !one.refused);
  const traces = drawn.flatMap((/** @type {any} */ one) =>
    Object.keys(one.bytes).map((kind) => {
      const [color, symbol] = LOOKS[one.strategy];
      return {
        ...line(found.lengths, one.bytes[kind], one.strategy, kind),
        legendgroup: one.strategy,
        showlegend: kind === "none",
        line: { dash: DASHES[kind], color, width: 2 },
        marker: { color, symbol, size: 7 },
      };
    }),
  );
  for (const [kind, dash] of Object.entries(DASHES))
    traces.push({ type: "scatter", mode: "lines", x: [null], y: [null], name: `recompute ${kind}`, line: { dash, color: "#7a8290", width: 2 } });
  const said = found.strategies.map((/** @type {any} */ one) => `${one.strategy}: ${one.words}`);
  clear(words, ...said.map((/** @type {string} */ each) => el("li", {}, each)));
  draw(chart, traces, layout(found, traces), `Memory over sequence length by strategy. ${said.join(". ")}`);
}

/** @param {number[]} lengths @param {(number | null)[]} sizes @param {string} name @param {string} kind
 * @returns {any} */
function line(lengths, sizes, name, kind) {
  return {
    type: "scatter",
    mode: "lines+markers",
    name,
    x: lengths,
    y: sizes.map((size) => (size === null ? null : size / GIB)),
    text: sizes.map((size) => (size === null ? "" : gib(size))),
    hovertemplate: `${name}, recompute ${kind}<br>%{x:,} tokens: %{text}<extra></extra>`,
  };
}

/** Both axes are logarithmic; what lies far above the limit is cut off.
 * @param {any} one what has lengths and limits @param {any[]} traces */
function layout(one, traces) {
  const ticks = one.lengths.filter((/** @type {number} */ length) => length % 1024 === 0);
  const top = FAR * (one.limit / GIB);
  const least = Math.min(top / FAR, ...traces.flatMap((each) => each.y).filter((size) => size !== null));
  return {
    margin: { l: 56, r: 12, t: 8, b: 40 },
    xaxis: { type: "log", title: { text: "tokens of a sequence", standoff: 4 }, tickvals: ticks, ticktext: ticks.map(short) },
    yaxis: { type: "log", title: { text: "GiB of the fullest rank" }, range: [Math.log10(0.8 * least), Math.log10(top)], tickvals: ROUND },
    hovermode: "closest",
    shapes: [limit(one.limit, "solid"), limit(one.usable, "dot")],
    annotations: [{
      xref: "paper", x: 0.99, xanchor: "right", y: Math.log10(one.limit / GIB), yanchor: "bottom",
      text: `limit ${gib(one.limit)}`, showarrow: false, font: { size: 11 },
    }],
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
  };
}

/** 8192 → "8k". @param {number} length */
const short = (length) => `${length / 1024}k`;

/** @param {number} size @param {string} dash */
function limit(size, dash) {
  const y = size / GIB;
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { dash, width: 2, color: colourOf("limit") } };
}
