// @ts-check
// Where the wall time went, and how full the experts are.

import { clear, el } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { percent, seconds } from "fivefold/format.js";

/** @type {Record<string, [string, string]>} a colour, and a pattern of Plotly's */
const LOOKS = {
  steps: ["#009e73", ""],
  build: ["#56b4e9", ""],
  load: ["#56b4e9", "/"],
  save: ["#0072b2", ""],
  eval: ["#e69f00", ""],
  skipped: ["#d55e00", "/"],
  lost: ["#d55e00", ""],
  down: ["#5b6270", ""],
  other: ["#9aa2b1", "/"],
};

/** @param {HTMLElement} body */
export function goodput(body) {
  const says = el("p", { class: "run-note" });
  const chart = el("div", { class: "run-bar" });
  body.append(says, chart);
  return {
    update(/** @type {any} */ { goodput: spent }) {
      clear(says, spent.says);
      draw(chart, spent.parts.map(bar), LAYOUT, spent.says);
    },
  };
}

/** @param {any} part */
function bar(part) {
  const [color, shape] = LOOKS[part.name] ?? ["#cc79a7", ""];
  return {
    type: "bar",
    orientation: "h",
    name: part.name,
    x: [part.seconds],
    y: [""],
    hovertemplate: `${part.name}: ${seconds(part.seconds)}, ${percent(part.share)}<extra></extra>`,
    marker: { color, pattern: { shape, fillmode: "overlay", fgcolor: "#ffffff", size: 6, solidity: 0.3 } },
  };
}

const LAYOUT = {
  barmode: "stack",
  showlegend: true,
  margin: { l: 10, r: 10, t: 6, b: 30 },
  xaxis: { title: { text: "seconds" } },
  legend: { orientation: "h", y: 1.05, yanchor: "bottom", traceorder: "normal", itemclick: false, itemdoubleclick: false },
};

/** A heat map, layers by steps. @param {HTMLElement} body */
export function load(body) {
  const note = el("p", { class: "run-note" });
  const chart = el("div");
  body.append(note, chart);
  return {
    update(/** @type {any} */ { load: table }) {
      chart.hidden = !table;
      clear(note, table ? said(table) : "");
      if (!table) return;
      chart.style.height = `${Math.max(180, Math.min(520, 60 + 22 * table.layers.length))}px`;
      draw(chart, [heat(table)], HEAT_LAYOUT, said(table));
    },
  };
}

/** @param {any} table */
function said(table) {
  const newest = table.rows.map((/** @type {number[]} */ row) => row.at(-1) ?? 0);
  const worst = newest.indexOf(Math.max(...newest));
  const columns = table.steps_a_column > 1 ? ` A column has the most of ${table.steps_a_column} steps.` : "";
  return `Newest: at most ${newest[worst].toFixed(2)} times the mean, in layer ${table.layers[worst]}.${columns}`;
}

/** @param {any} table */
const heat = (table) => ({
  type: "heatmap",
  x: table.steps,
  y: table.layers.map((/** @type {number} */ layer) => `layer ${layer}`),
  z: table.rows,
  zmin: 1,
  colorscale: "Cividis",
  colorbar: { thickness: 12, title: { text: "× mean" } },
  hovertemplate: "step %{x}, %{y}: %{z:.2f} times the mean<extra></extra>",
});

const HEAT_LAYOUT = {
  xaxis: { tickformat: ",d", showgrid: false, title: { text: "step", standoff: 4 } },
  yaxis: { autorange: "reversed", showgrid: false },
  margin: { l: 62, r: 6, t: 8, b: 40 },
};
