// @ts-check
// Several runs side by side: one chart for each curve, one legend for all, and tables.

import { clear, el, svg } from "fivefold/dom.js";
import { draw, plain, ZOOM } from "fivefold/chart.js";
import { digits } from "fivefold/format.js";

/** A colour, a dash of Plotly's, and the same dash of SVG. @type {[string, string, string][]} */
const LOOKS = [
  ["#0072b2", "solid", ""],
  ["#d55e00", "dash", "7 4"],
  ["#009e73", "dot", "2 3"],
  ["#cc79a7", "dashdot", "7 3 2 3"],
  ["#e69f00", "longdash", "11 4"],
  ["#56b4e9", "longdashdot", "11 3 2 3"],
];

/** @param {number} place */
const look = (place) => LOOKS[place % LOOKS.length];

/** @param {HTMLElement} body @param {(params: Record<string, string>) => void} choose */
export function runs(body, choose) {
  const legend = el("div", { class: "run-legend", role: "group", "aria-label": "runs" });
  const charts = el("div", { class: "run-charts" });
  const tables = el("div", { class: "run-tables" });
  /** @type {Record<string, {root: HTMLElement, chart: HTMLElement}>} */
  const made = {};
  body.append(legend, charts, tables);
  return {
    update(/** @type {any} */ view, /** @type {Record<string, string>} */ params) {
      const names = view.runs.map((/** @type {any} */ one) => one.name);
      const shown = chosen(params, names.length);
      if (!legend.contains(document.activeElement)) legends(legend, view, params, shown, choose);
      for (const [name, curve] of Object.entries(view.curves)) {
        made[name] ??= picture(charts, curve.title);
        paint(made[name], curve, names, shown);
      }
      clear(tables, numbers(view, shown), differences(view, shown));
    },
  };
}

/** The numbers of the runs on show. @param {Record<string, string>} params @param {number} count */
function chosen(params, count) {
  const all = Array.from({ length: count }, (_, place) => place);
  const asked = (params.runs ?? "").split(",").map(Number);
  return params.runs ? all.filter((place) => asked.includes(place)) : all;
}

/** A box to choose each run, with its line, its name and how far it is; and which one is below.
 * @param {HTMLElement} node @param {any} view @param {Record<string, string>} params @param {number[]} shown
 * @param {(params: Record<string, string>) => void} choose */
function legends(node, view, params, shown, choose) {
  const below = Number(params.run ?? 0);
  const rows = view.runs.map((/** @type {any} */ one, /** @type {number} */ place) => {
    const box = /** @type {HTMLInputElement} */ (el("input", { type: "checkbox", checked: shown.includes(place) }));
    box.addEventListener("change", () => {
      const boxes = /** @type {HTMLInputElement[]} */ ([...node.querySelectorAll("input[type=checkbox]")]);
      const wanted = boxes.flatMap((each, number) => (each.checked ? [number] : []));
      const { runs: _, ...rest } = params;
      choose(wanted.length && wanted.length < boxes.length ? { ...rest, runs: wanted.join(",") } : rest);
    });
    const dot = el("input", { type: "radio", name: "run-below", checked: place === below });
    dot.addEventListener("change", () => {
      const { step: _, rank: __, ...rest } = params;
      choose({ ...rest, run: String(place) });
    });
    return el("div", { class: "run-choice" }, el("label", {}, box, swatch(place), el("b", {}, one.name)), el("span", { class: "hint" }, one.state), el("label", {}, dot, "in detail"));
  });
  clear(node, ...rows);
}

/** @param {number} place */
function swatch(place) {
  const [colour, , dashes] = look(place);
  const drawn = svg("svg", { width: 34, height: 12, "aria-hidden": true });
  drawn.append(svg("line", { x1: 1, x2: 33, y1: 6, y2: 6, stroke: colour, "stroke-width": 3, "stroke-dasharray": dashes || null }));
  return drawn;
}

/** @param {HTMLElement} node @param {string} title */
function picture(node, title) {
  const chart = el("div", { class: "run-small" });
  const root = el("div", {}, el("h3", {}, title), chart);
  node.append(root);
  return { root, chart };
}

/** @param {{root: HTMLElement, chart: HTMLElement}} made @param {any} curve @param {string[]} names @param {number[]} shown */
function paint({ root, chart }, curve, names, shown) {
  const lines = curve.lines.filter((/** @type {any} */ one) => shown.includes(names.indexOf(one.run)));
  root.hidden = !lines.length;
  if (!lines.length) return;
  const traces = lines.map((/** @type {any} */ one) => {
    const [color, dash] = look(names.indexOf(one.run));
    const mode = one.x.length > 1 ? "lines" : "markers";
    const hovertemplate = `step %{x}: %{y:.4g}<extra>${plain(one.run)}</extra>`;
    return { type: "scatter", mode, x: one.x, y: one.y, name: plain(one.run), line: { color, dash, width: 2 }, marker: { color }, hovertemplate };
  });
  const newest = lines.map((/** @type {any} */ one) => `${one.run} ${digits(one.y.findLast((/** @type {any} */ y) => y !== null))}`);
  const layout = {
    ...ZOOM,
    uirevision: "runs",
    showlegend: false,
    margin: { l: 52, r: 10, t: 8, b: 40 },
    xaxis: { ...ZOOM.xaxis, tickformat: ",d", title: { text: "step", standoff: 4 } },
    yaxis: { range: curve.range },
  };
  draw(chart, traces, layout, `${curve.title}, newest: ${newest.join(", ")}`);
}

/** @param {any} view @param {number[]} shown */
function numbers(view, shown) {
  const picked = shown.map((place) => view.runs[place]);
  const rows = Object.keys(picked[0].numbers).map((name) => [name, ...picked.map((/** @type {any} */ one) => one.numbers[name])]);
  return table("Numbers", ["", ...picked.map((/** @type {any} */ one) => one.name)], rows, "number");
}

/** @param {any} view @param {number[]} shown */
function differences(view, shown) {
  const rows = view.differs
    .map((/** @type {any} */ one) => [one.key, ...shown.map((place) => one.values[place])])
    .filter((/** @type {string[]} */ [, ...values]) => new Set(values).size > 1);
  const names = shown.map((place) => view.runs[place].name);
  if (!rows.length) return el("p", {}, shown.length > 1 ? "Their recipes do not differ." : "");
  return table("What differs between their recipes", ["key", ...names], rows, "run-value");
}

/** @param {string} caption @param {string[]} heads @param {string[][]} rows @param {string} kind class of the values */
function table(caption, heads, rows, kind) {
  const head = heads.map((text, place) => el("th", { scope: "col", ...(place ? { class: kind } : {}) }, text));
  const body = rows.map(([key, ...values]) =>
    el("tr", {}, el("th", { scope: "row" }, key), ...values.map((text) => el("td", { class: kind }, text))),
  );
  return el("div", {}, el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
}
