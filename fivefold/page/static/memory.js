// @ts-check
// Memory by category: the fullest rank against the GPU's limit, and every place of the pipeline.

import { clear, el } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { colourOf, patternOf } from "fivefold/colours.js";
import { gib, percent } from "fivefold/format.js";
import { patterned } from "fivefold/time.js";

const GIB = 2 ** 30;
const MOST_TICKS = 16;

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
      draw(chart, [boxes(names, one)], layout(one), `${one.headline}. ${heard(one)}`);
      const others = names.filter((name) => !(name in one.fullest)).map((name) => row(`${name}, elsewhere`, Math.max(...one.parts[name]), one.limit, name));
      clear(key, ...Object.entries(one.fullest).map(([each, size]) => row(each, size, one.limit)), ...others);
    },
  };
}

/** One category of the fullest rank, or the most that another has.
 * @param {string} words @param {number} size @param {number} limit @param {string} [name] */
function row(words, size, limit, name = words) {
  const swatch = el("span", { class: patternOf(name) ? "swatch hatched" : "swatch" });
  swatch.style.backgroundColor = colourOf(name);
  return el("li", {}, swatch, el("span", {}, words), el("span", {}, gib(size)), el("span", {}, percent(size / limit)));
}

/** All boxes as one trace, each upon the one below it: Plotly takes half as long as for one trace a
 * category. @param {string[]} names @param {any} one */
function boxes(names, one) {
  const columns = [one.fullest, ...(one.places.length > 1 ? places(names, one) : [])];
  const words = ["the fullest rank", ...one.places.map((/** @type {any} */ each) => `${each.name}, ${each.layers}`)];
  const found = columns.flatMap((sizes, column) => {
    let below = 0;
    return names.filter((name) => sizes[name] > 0).map((name) => {
      const box = { name, x: column ? column + 1 : 0, base: below, y: sizes[name] / GIB, said: `${name}<br>${words[column]}` };
      below += box.y;
      return box;
    });
  });
  const colours = found.map(({ name }) => colourOf(name));
  return {
    type: "bar",
    x: found.map(({ x }) => x),
    y: found.map(({ y }) => y),
    base: found.map(({ base }) => base),
    customdata: found.map(({ y, said }) => `${y.toFixed(1)} GiB of ${said}`),
    hovertemplate: "%{customdata}<extra></extra>",
    marker: { color: colours, pattern: patterned(found.map(({ name }) => patternOf(name)), colours) },
  };
}

/** Bytes by category of every place. @param {string[]} names @param {any} one */
const places = (names, one) =>
  one.places.map((/** @type {any} */ _, /** @type {number} */ i) =>
    Object.fromEntries(names.map((name) => [name, one.parts[name]?.[i] ?? 0])),
  );

/** @param {any} one */
const heard = (one) =>
  Object.entries(one.fullest)
    .map(([name, size]) => `${name} ${gib(/** @type {number} */ (size))}`)
    .join(", ");

/** @param {any} one */
function layout(one) {
  const most = Math.max(one.limit, one.total) / GIB;
  return {
    barmode: "overlay",
    bargap: 0.12,
    margin: { l: 48, r: 74, t: 8, b: 38 },
    showlegend: false,
    xaxis: { title: { text: "stage of the pipeline", standoff: 2 }, ...ticks(one.places.length), tickangle: 0, automargin: false, showgrid: false, zeroline: false },
    yaxis: { title: { text: "GiB" }, range: [0, most * 1.06], automargin: false },
    shapes: [line(one.limit, "solid"), line(one.usable, "dot")],
    annotations: [label(one.limit, "limit", "bottom"), label(one.usable, "usable", "top")],
  };
}

/** Names of the columns: as many as there is room for. @param {number} count of places */
function ticks(count) {
  const every = Math.ceil(count / MOST_TICKS);
  const named = count > 1 ? [...Array(count).keys()].filter((place) => place % every === 0) : [];
  return { tickvals: [0, ...named.map((place) => place + 2)], ticktext: ["fullest", ...named.map(String)] };
}

/** @param {number} size @param {string} dash */
function line(size, dash) {
  const y = size / GIB;
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { dash, width: 2, color: colourOf("limit") } };
}

/** @param {number} size @param {string} word @param {string} yanchor */
function label(size, word, yanchor) {
  const text = `${word} ${(size / GIB).toFixed(1)}`;
  return { xref: "paper", x: 1, xanchor: "left", y: size / GIB, yanchor, text, showarrow: false, font: { size: 11 } };
}
