// @ts-check
// What rank 0 sends in a step, by axis and kind of collective, with the link that each crosses.

import { clear, el } from "fivefold/dom.js";
import { draw, sizeOf } from "fivefold/chart.js";
import { colourOf } from "fivefold/colours.js";
import { bytes, count } from "fivefold/format.js";
import { patterned } from "fivefold/time.js";

const SHAPES = ["", "/", ".", "x", "-", "+"]; // by link: never colour alone
const ROW = 26;

/** @param {HTMLElement} body @returns {{update: (part: any, view: any) => void}} */
export function create(body) {
  const headline = el("p", { class: "headline" });
  const chart = el("div", { class: "traffic-chart" });
  body.append(headline, chart);
  return {
    update(one) {
      clear(headline, one.refused ?? one.headline);
      chart.hidden = !one.rows.length;
      if (!one.rows.length) return;
      const height = ROW * one.rows.length + 44;
      chart.style.height = `${height}px`;
      const most = Math.max(...one.rows.map((/** @type {any} */ row) => row.sent)) / 2 ** 30;
      const layout = {
        margin: { l: 132, r: 12, t: 4, b: 36 },
        xaxis: { title: { text: "GiB that rank 0 sends" }, range: [0, most * (sizeOf(chart).width < 520 ? 4 : 1.5)], automargin: false },
        yaxis: { autorange: "reversed", automargin: false, showgrid: false },
        showlegend: false,
        height,
      };
      const heard = one.rows.map((/** @type {any} */ row) => `${named(row)} ${said(row)}`);
      draw(chart, [bars(one.rows)], layout, `${one.headline}. ${heard.join("; ")}`);
    },
  };
}

/** @param {any[]} rows */
function bars(rows) {
  const tiers = [...new Set(rows.map((row) => row.tier))];
  const shapes = rows.map((row) => SHAPES[tiers.indexOf(row.tier) % SHAPES.length]);
  const colours = rows.map((row) => colourOf(row.dimension, 4));
  return {
    type: "bar",
    orientation: "h",
    y: rows.map(named),
    x: rows.map((row) => row.sent / 2 ** 30),
    text: rows.map(said),
    textposition: "outside",
    cliponaxis: false,
    customdata: rows.map((row) => `${count(row.group)} ranks, input buffers of ${bytes(row.bytes)} in all`),
    hovertemplate: "%{y}: %{text}<br>%{customdata}<extra></extra>",
    marker: { color: colours, pattern: patterned(shapes, colours) },
  };
}

/** @param {any} row */
const named = (row) => `${row.axis} ${row.kind}`;

/** @param {any} row */
const said = (row) => `${bytes(row.sent)} · ${count(row.calls)} ${row.calls === 1 ? "call" : "calls"} · ${row.tier}`;
