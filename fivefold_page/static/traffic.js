// @ts-check
// What rank 0 sends in a step, by axis and kind of collective, with the link that each crosses.

import { clear, el } from "fivefold/dom.js";
import { rows } from "fivefold/bars.js";
import { colourOf } from "fivefold/colours.js";
import { bytes, count } from "fivefold/format.js";

const PATTERNS = ["", "/", ".", "x", "-", "+"]; // by link: never colour alone

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
      const tiers = [...new Set(one.rows.map((/** @type {any} */ row) => row.tier))];
      const drawn = one.rows.map((/** @type {any} */ row) => ({
        name: named(row),
        value: row.sent / 2 ** 30,
        words: said(row),
        said: `${named(row)}: ${said(row)}, ${count(row.group)} ranks, input buffers of ${bytes(row.bytes)} in all`,
        colour: colourOf(row.dimension, 4),
        pattern: PATTERNS[tiers.indexOf(row.tier) % PATTERNS.length],
      }));
      const heard = one.rows.map((/** @type {any} */ row) => `${named(row)} ${said(row)}`);
      rows(chart, drawn, { unit: "GiB that rank 0 sends", left: 132 }, `${one.headline}. ${heard.join("; ")}`);
    },
  };
}

/** @param {any} row */
const named = (row) => `${row.axis} ${row.kind}`;

/** @param {any} row */
const said = (row) => `${bytes(row.sent)} · ${count(row.calls)} ${row.calls === 1 ? "call" : "calls"} · ${row.tier}`;
