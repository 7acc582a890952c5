// @ts-check
// Curves over the steps of a run. Restarts and skipped steps are marked on every axis, and steps
// that a restart repeated are faint.

import { clear, el } from "fivefold/dom.js";
import { draw, plain, ZOOM } from "fivefold/chart.js";
import { digits } from "fivefold/format.js";

const BLUE = "#0072b2";
const SKY = "#56b4e9";
const ORANGE = "#e69f00";
const RED = "#d55e00";
const GREY = "#8a919e";
const MOST_MARKS = 200;
/** A colour, a mark and a dash for each evaluation set. @type {[string, string, string][]} */
const SETS = [
  [ORANGE, "diamond", "dot"],
  ["#009e73", "square", "dash"],
  ["#cc79a7", "triangle-up", "dashdot"],
  ["#d55e00", "circle", "longdash"],
];

/** @typedef {{name: string, title: string, height: string, format?: string}} Wanted */

/** The loss with its norm and learning rate. @param {HTMLElement} body */
export function loss(body) {
  const big = el("div");
  const rest = charts(body, [
    { name: "norm", title: "gradient norm", height: "run-small" },
    { name: "lr", title: "learning rate", height: "run-small", format: ".1e" },
  ]);
  body.prepend(big);
  return {
    update(/** @type {any} */ view) {
      const one = view.curves.loss;
      if (one) draw(big, lossTraces(one), layout(view, "loss", true, one.axis), heard("loss", one));
      rest.update(view);
    },
  };
}

/** @param {any} one */
function lossTraces(one) {
  const traces = [
    line(one.measured, "every step", { color: SKY, width: 1 }, 0.6),
    line(one.smoothed, "smoothed", { color: BLUE, width: 2.5 }),
    ...repeated(one),
  ];
  const sets = Object.entries(one.sets);
  for (const [place, [name, curve]] of (sets.length ? sets : [["", one.eval]]).entries()) {
    if (!curve.x.length) continue;
    const [color, symbol, dash] = SETS[place % SETS.length];
    const marker = { symbol, size: 9, color, line: { width: 1, color: "#5b6270" } };
    traces.push({ ...line(curve, plain(`evaluation ${name}`), { color, dash, width: 1 }), mode: "lines+markers", marker });
  }
  return traces;
}

/** Step time, tokens and MFU. @param {HTMLElement} body */
export function rates(body) {
  return charts(body, [
    { name: "tokens_per_s", title: "tokens/s", height: "run-small" },
    { name: "mfu", title: "MFU", height: "run-small", format: ".0%" },
    { name: "step_s", title: "seconds", height: "run-small" },
  ]);
}

/** @param {HTMLElement} body */
export function memory(body) {
  return charts(body, [{ name: "memory_gib", title: "GiB", height: "run-small" }]);
}

/** Charts one under the other, each with what it says of the plan.
 * @param {HTMLElement} body @param {Wanted[]} wanted */
function charts(body, wanted) {
  const parts = wanted.map((each) => {
    const note = el("p", { class: "run-note" });
    const chart = el("div", { class: each.height });
    body.append(note, chart);
    return { each, note, chart };
  });
  return {
    update(/** @type {any} */ view) {
      for (const { each, note, chart } of parts) {
        const one = view.curves[each.name];
        chart.hidden = !one;
        clear(note, one ? [one.says ? `${one.says}.` : "", ...one.axis.says].filter(Boolean).join(" ") : `${each.title} needs a plan with a machine: --machine`);
        if (!one) continue;
        const lines = traces(one);
        draw(chart, lines, layout(view, each.title, lines.length > 1, one.axis, each.format), heard(each.title, one));
      }
    },
  };
}

/** @param {any} one */
function traces(one) {
  const found = [line(one.measured, "measured", { color: BLUE, width: 1.5 }), ...repeated(one)];
  if (one.planned) found.push(line(one.planned, "planned", { color: ORANGE, width: 2.5, dash: "dash" }));
  return found;
}

/** @param {any} one */
const repeated = (one) =>
  one.lost.map((/** @type {any} */ each, /** @type {number} */ place) => ({
    ...line(each, "lost to a restart", { color: GREY, width: 1.5, dash: "dot" }, 0.6),
    showlegend: place === 0,
  }));

/** @param {{x: number[], y: (number | null)[]}} curve @param {string} name @param {any} look @param {number} [opacity]
 * @returns {any} */
function line(curve, name, look, opacity = 1) {
  const mode = curve.x.length > 1 ? "lines" : "markers";
  const hovertemplate = `step %{x}: %{y}<extra>${name}</extra>`;
  return { type: "scatter", mode, name, x: curve.x, y: curve.y, line: look, marker: { color: look.color }, opacity, hovertemplate };
}

/** The band round a plan lies under the lines. The zoom of a reader outlives new points of the run.
 * @param {any} view @param {string} title @param {boolean} several lines @param {any} axis @param {string} [format] */
function layout(view, title, several, axis, format) {
  const { restarts, skipped } = view.marks;
  const [low, high] = axis.band ?? [0, 0];
  const shapes = [
    ...(axis.band ? [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: high, fillcolor: ORANGE, opacity: 0.15, line: { width: 0 }, layer: "below" }] : []),
    ...restarts.slice(-MOST_MARKS).map((/** @type {any} */ each) => mark(each.step, GREY, "dash", 0)),
    ...skipped.slice(-MOST_MARKS).map((/** @type {any} */ each) => mark(each.step, RED, "solid", 0.9)),
  ];
  return {
    ...ZOOM,
    uirevision: view.head.name,
    shapes,
    showlegend: several,
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, itemclick: false, itemdoubleclick: false },
    margin: { l: 52, r: 10, t: several ? 24 : 8, b: 40 },
    xaxis: { ...ZOOM.xaxis, tickformat: ",d", title: { text: "step", standoff: 4 } },
    yaxis: { title: { text: title }, range: axis.range, ...(format ? { tickformat: format } : {}) },
  };
}

/** A restart is a line over the whole height, a skipped step a short one at the top.
 * @param {number} step @param {string} color @param {string} dash @param {number} from */
const mark = (step, color, dash, from) => ({
  type: "line",
  x0: step,
  x1: step,
  yref: "paper",
  y0: from,
  y1: 1,
  line: { color, width: from ? 3 : 1.5, dash },
});

/** @param {string} title @param {any} one */
function heard(title, one) {
  const { x, y } = one.measured;
  const last = y.at(-1);
  return `${title} of ${x.length} points up to step ${x.at(-1)}, the newest ${last === null ? "not finite" : digits(last)}. ${one.says ?? ""}`;
}
