// @ts-check
// Techniques beside one another: a row for each, with bars for memory and for the time of a step.

import { clear, el } from "fivefold/dom.js";
import { gib, percent } from "fivefold/format.js";
import { colourOf, patternOf } from "fivefold/colours.js";
import { written } from "fivefold/address.js";

const NAMES = { compute: "arithmetic", bubble: "waiting in the pipeline", tp: "tensor traffic", cp: "context traffic", pp: "pipeline traffic", dp: "data traffic", optimizer: "optimizer", launch: "launching kernels" };

/** @param {HTMLElement} body */
export function create(body) {
  const rows = el("div", { class: "compared" });
  const key = el("p", { class: "hint compared-key" });
  body.append(rows, key);
  return {
    update() {},
    /** @param {any} view @param {number} place */
    frame(view, place) {
      const used = Object.keys(NAMES).filter((name) => view.rows.some((/** @type {any} */ row) => !row.problem && row.parts[name]));
      const longest = Math.max(...view.rows.map((/** @type {any} */ row) => row.step ?? 0));
      clear(rows, table(view, place, longest));
      clear(key, "Time of a step: ", ...used.map((name) => el("span", {}, swatch(name), ` ${NAMES[/** @type {keyof typeof NAMES} */ (name)]}`)));
    },
  };
}

/** @param {any} view @param {number} place @param {number} longest */
function table(view, place, longest) {
  const head = ["technique", "memory of a GPU", "", "time of a step", "MFU"];
  const body = view.rows.map((/** @type {any} */ row, /** @type {number} */ at) =>
    el("tr", at === place ? { "aria-current": "true" } : {}, ...cells(row, view.limit, longest)),
  );
  const caption = `${view.choices.model} on ${view.choices.gpus} GPUs of ${view.machine}, ${view.batch} sequences a step`;
  return el(
    "table",
    {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...head.map((each) => (each ? el("th", { scope: "col" }, each) : el("td"))))),
    el("tbody", {}, ...body),
  );
}

/** @param {any} row @param {number} limit @param {number} longest */
function cells(row, limit, longest) {
  if (row.problem) return [el("th", { scope: "row" }, row.title), el("td", { colspan: 4 }, row.problem)];
  const title = el("a", { href: `#${written("explore", row.address)}`, title: "Open it in Explore" }, row.title);
  const verdict = el("span", { class: "verdict", "data-verdict": row.verdict }, row.verdict);
  return [
    el("th", { scope: "row" }, title, el("small", {}, row.layout)),
    el("td", {}, gib(row.memory), memory(row.memory / limit)),
    el("td", {}, verdict),
    el("td", {}, row.step_text, time(row, longest)),
    el("td", {}, percent(row.mfu)),
  ];
}

/** Half of the bar is what a GPU has. @param {number} share */
function memory(share) {
  const bar = el("span", { style: `width:${Math.min(100, 50 * share)}%;background-color:${share > 1 ? "var(--bad)" : "var(--good)"}` });
  return el("span", { class: "bar limited", "aria-hidden": "true" }, bar);
}

/** @param {any} row @param {number} longest */
function time(row, longest) {
  const parts = Object.entries(row.parts).map(([name, part]) =>
    el("span", { class: patternOf(name) ? "hatched" : null, style: `width:${(100 * part) / longest}%;background-color:${colourOf(name)}` }),
  );
  return el("span", { class: "bar", "aria-hidden": "true" }, ...parts);
}

/** @param {string} name */
function swatch(name) {
  const look = patternOf(name) ? "swatch hatched" : "swatch";
  return el("span", { class: look, style: `display:inline-block;background-color:${colourOf(name)}` });
}
