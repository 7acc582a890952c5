// @ts-check
// The time line of a run: its starts as bars, what happened as marks, and what the model wrote.

import { clear, el } from "fivefold/dom.js";
import { draw, ZOOM } from "fivefold/chart.js";
import { seconds } from "fivefold/format.js";

/** By how a start ended: a colour, and a pattern of Plotly's. @type {Record<string, [string, string]>} */
const STARTS = {
  done: ["#009e73", ""],
  running: ["#56b4e9", ""],
  stopped: ["#9aa2b1", ""],
  died: ["#d55e00", "/"],
};
/** A colour and a mark for each lane. @type {Record<string, [string, string]>} */
const LANES = {
  failure: ["#d55e00", "x"],
  resume: ["#0072b2", "triangle-right"],
  skipped: ["#cc79a7", "line-ns-open"],
  again: ["#e69f00", "diamond-open"],
  slow: ["#56b4e9", "triangle-right"],
  eval: ["#e69f00", "diamond"],
  sample: ["#009e73", "square"],
};
const LOUD = ["failure", "resume", "skipped", "again", "slow"]; // listed at once; the rest on demand
const MOST = 100; // listed
/** @type {[number, string][]} */
const UNITS = [[172_800, "days"], [7_200, "hours"], [300, "minutes"], [0, "seconds"]];
/** @type {Record<string, number>} */
const LENGTHS = { days: 86_400, hours: 3_600, minutes: 60, seconds: 1 };
const SHOWN = 3; // samples

/** @param {HTMLElement} body */
export function history(body) {
  const chart = el("div");
  const loud = el("ul", { class: "run-events" });
  const rest = el("ul", { class: "run-events" });
  const summary = el("summary");
  const quiet = el("details", {}, summary, rest);
  body.append(chart, loud, quiet);
  return {
    update(/** @type {any} */ { history: one, head }) {
      const lanes = Object.keys(one.lanes);
      chart.style.height = `${76 + 26 * (lanes.length + 1)}px`;
      const said = one.starts.map((/** @type {any} */ each) => each.says).join("; ");
      draw(chart, [...one.starts.map(startBar(one)), ...lanes.map(lane(one))], layout(one, head), said);
      const kinds = (/** @type {boolean} */ wanted) =>
        one.events.filter((/** @type {any} */ each) => LOUD.includes(each.kind) === wanted).slice(-MOST).map(item);
      clear(loud, ...kinds(true));
      loud.hidden = !loud.firstChild;
      const others = kinds(false);
      clear(summary, `${others.length} evaluations and samples`);
      clear(rest, ...others);
      quiet.hidden = !others.length;
    },
  };
}

/** @param {any} event */
const item = (event) => el("li", { class: `run-event-${event.kind}` }, el("span", { class: "run-when" }, seconds(event.at)), event.says);

/** The unit of the axis. @param {any} one @returns {[string, number]} */
function unit(one) {
  const name = (UNITS.find(([least]) => one.wall_s >= least) ?? [0, "seconds"])[1];
  return [name, LENGTHS[name]];
}

/** @param {any} one */
const startBar = (one) => (/** @type {any} */ each) => {
  const [, length] = unit(one);
  const [color, shape] = STARTS[each.how] ?? STARTS.stopped;
  return {
    type: "bar",
    orientation: "h",
    base: [each.from / length],
    x: [Math.max((each.to - each.from) / length, (0.002 * one.wall_s) / length)],
    y: ["starts"],
    width: 0.6,
    hovertemplate: `start ${each.number}: ${seconds(each.from)} to ${seconds(each.to)}<extra></extra>`,
    marker: { color, pattern: { shape, fillmode: "overlay", fgcolor: "#ffffff", size: 6, solidity: 0.3 } },
  };
};

/** @param {any} one */
const lane = (one) => (/** @type {string} */ kind) => {
  const [, length] = unit(one);
  const [color, symbol] = LANES[kind];
  const found = one.events.filter((/** @type {any} */ each) => each.kind === kind);
  return {
    type: "scatter",
    mode: "markers",
    x: found.map((/** @type {any} */ each) => each.at / length),
    y: found.map(() => one.lanes[kind]),
    text: found.map((/** @type {any} */ each) => (each.step === null ? "before the first step" : `step ${each.step}`)),
    hovertemplate: `%{text}, %{x:.4g} ${unit(one)[0]}<extra>${one.lanes[kind]}</extra>`,
    marker: { color, symbol, size: 10, line: { width: 2, color } },
  };
};

/** @param {any} one @param {any} head */
function layout(one, head) {
  const order = ["starts", ...Object.values(one.lanes)];
  return {
    ...ZOOM,
    uirevision: head.name,
    barmode: "overlay",
    showlegend: false,
    hovermode: "closest",
    margin: { l: 92, r: 14, t: 6, b: 40 },
    xaxis: { ...ZOOM.xaxis, title: { text: `${unit(one)[0]} since the first start`, standoff: 4 }, rangemode: "tozero" },
    yaxis: { categoryorder: "array", categoryarray: order, autorange: "reversed", showgrid: false, type: "category" },
  };
}

/** @param {HTMLElement} body */
export function samples(body) {
  const newest = el("div", { class: "run-samples" });
  const older = el("div", { class: "run-samples" });
  const summary = el("summary");
  const rest = el("details", {}, summary, older);
  body.append(newest, rest);
  return {
    update(/** @type {any} */ { history: { samples: found } }) {
      const drawn = found.map(sample).reverse();
      clear(newest, ...drawn.slice(0, SHOWN));
      clear(older, ...drawn.slice(SHOWN));
      clear(summary, `${Math.max(0, drawn.length - SHOWN)} older`);
      rest.hidden = drawn.length <= SHOWN;
    },
  };
}

/** @param {any} one */
const sample = (one) =>
  el("figure", {}, el("figcaption", {}, `after step ${one.step}`), el("blockquote", {}, el("span", { class: "run-prompt" }, one.prompt), one.text));
