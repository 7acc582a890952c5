// @ts-check
// Memory by category: the fullest rank against the GPU's limit, and every place of the pipeline.

import { clear, el } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { colourOf, patternOf } from "fivefold/colours.js";
import { gib, percent } from "fivefold/format.js";

const GIB = 2 ** 30;

/** @param {HTMLElement} body @returns {{update: (part: any, view: any) => void}} */
export function create(body) {
  const headline = el("p", { class: "headline" });
  const chart = el("div", { class: "memory-chart" });
  const key = el("ul", { class: "key", "aria-label": "Categories of the fullest rank" });
  body.append(headline, chart, key);
  return {
    update(one) {
      clear(headline, one.headline);
      const names = Object.keys({ ...one.fullest, ...one.parts });
      const traces = names.map((name) => bar(name, one));
      draw(chart, traces, layout(one), `${one.headline}. ${heard(one)}`);
      clear(key, ...Object.entries(one.fullest).map(([each, size]) => row(each, size, one.limit)));
    },
  };
}

/** One category of the fullest rank. @param {string} name @param {number} size @param {number} limit */
function row(name, size, limit) {
  const swatch = el("span", { class: patternOf(name) ? "swatch hatched" : "swatch" });
  swatch.style.backgroundColor = colourOf(name);
  return el("li", {}, swatch, el("span", {}, name), el("span", {}, gib(size)), el("span", {}, percent(size / limit)));
}

/** A category on the fullest rank and, behind a gap, on every place. @param {string} name @param {any} one */
function bar(name, one) {
  const sizes = one.places.length > 1 ? one.parts[name] ?? one.places.map(() => 0) : [];
  return {
    type: "bar",
    name,
    x: ["fullest", ...(sizes.length ? [" ", ...one.places.map((/** @type {any} */ _, /** @type {number} */ i) => String(i))] : [])],
    y: [one.fullest[name] ?? 0, ...(sizes.length ? [0, ...sizes] : [])].map((size) => size / GIB),
    customdata: ["the fullest rank", "", ...one.places.map((/** @type {any} */ each) => `${each.name}, ${each.layers}`)],
    hovertemplate: `${name} %{y:.1f} GiB<br>%{customdata}<extra></extra>`,
    marker: { color: colourOf(name), pattern: { shape: patternOf(name), fillmode: "overlay", fgcolor: "#ffffff", size: 6, solidity: 0.3 } },
  };
}

/** @param {any} one */
const heard = (one) =>
  Object.entries(one.fullest)
    .map(([name, size]) => `${name} ${gib(/** @type {number} */ (size))}`)
    .join(", ");

/** @param {any} one */
function layout(one) {
  const most = Math.max(one.limit, one.total) / GIB;
  return {
    barmode: "stack",
    bargap: 0.12,
    margin: { l: 48, r: 74, t: 8, b: 38 },
    showlegend: false,
    xaxis: { type: "category", title: { text: "place in the pipeline", standoff: 2 }, tickangle: 0, automargin: false, showgrid: false },
    yaxis: { title: { text: "GiB" }, range: [0, most * 1.06], automargin: false },
    shapes: [line(one.limit, "solid"), line(one.usable, "dot")],
    annotations: [label(one.limit, "limit", "bottom"), label(one.usable, "usable", "top")],
  };
}

/** @param {number} size @param {string} dash */
function line(size, dash) {
  const y = size / GIB;
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { dash, width: 2, color: "#d55e00" } };
}

/** @param {number} size @param {string} word @param {string} yanchor */
function label(size, word, yanchor) {
  const text = `${word} ${(size / GIB).toFixed(1)}`;
  return { xref: "paper", x: 1, xanchor: "left", y: size / GIB, yanchor, text, showarrow: false, font: { size: 11 } };
}
