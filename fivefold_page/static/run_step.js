// @ts-check
// One step of a run over its plan: choose it, see both timelines on one axis, read what differs.

import { clear, el } from "fivefold/dom.js";
import { bytes, count, percent, seconds } from "fivefold/format.js";
import { drawTimeline } from "fivefold/timeline.js";

/** @param {HTMLElement} body @param {(params: Record<string, string>) => void} choose */
export function step(body, choose) {
  const number = /** @type {HTMLInputElement} */ (el("input", { type: "number", min: 1, "aria-label": "step", style: "width:7rem" }));
  const rank = /** @type {HTMLSelectElement} */ (el("select", { "aria-label": "pipeline of rank" }));
  const newest = el("button", { type: "button", onclick: () => choose({}) }, "newest step");
  const told = el("span", { class: "hint" });
  const says = el("p", { class: "run-verdict", "aria-live": "polite" });
  const basis = el("p", { class: "hint" });
  const host = el("div");
  const tables = el("div", { class: "run-tables" });
  const asked = () => choose({ step: number.value, ...(rank.value ? { rank: rank.value } : {}) });
  number.addEventListener("change", () => (number.value ? choose({ step: number.value }) : undefined));
  rank.addEventListener("change", asked);
  const row = el("div", { class: "choices" }, el("label", {}, "step ", number), el("label", {}, "pipeline of rank ", rank), newest, told);
  body.append(row, says, basis, host, tables);
  return {
    update(/** @type {any} */ { step: one, told: ranges }) {
      if (ranges.length) clear(told, eventsOf(ranges, one));
      if (!one) return; // a run that goes on: the step on show stays
      row.hidden = one.step === null;
      fillIn(number, rank, one);
      const whole = one.problem === null;
      clear(says, whole ? one.says : one.problem);
      clear(basis, whole ? one.basis : "");
      host.hidden = !whole;
      clear(tables, ...(whole ? [one.causes.length ? causes(one) : null, ranks(one), one.calls.length ? calls(one) : null] : []));
      if (whole) drawTimeline(host, one.picture);
    },
  };
}

/** @param {number[][]} ranges @param {any} one */
function eventsOf(ranges, one) {
  const words = ranges.map(([first, last]) => `${count(first)} to ${count(last)}`).join(", ");
  const some = one?.read && one.read[0] < one.read[1] ? `; ${count(one.read[0])} of ${count(one.read[1])} ranks are read` : "";
  return `events of steps ${words}${some}`;
}

/** @param {HTMLInputElement} number @param {HTMLSelectElement} rank @param {any} one */
function fillIn(number, rank, one) {
  if (one.step === null) return;
  number.value = String(one.step);
  const options = (one.choices ?? []).map((/** @type {number} */ each) => el("option", { value: each, selected: each === one.rank }, each));
  clear(rank, ...options);
}

/** @param {any} one */
function causes(one) {
  const rows = one.causes.map((/** @type {any} */ each) =>
    el(
      "tr",
      each.named ? { class: "named" } : {},
      cell(seconds(each.gain_s)),
      cell(percent(each.share)),
      el("td", {}, each.says),
    ),
  );
  return table("Set to the plan one after the other, they would make the step shorter by", ["time", "share of all", "what differs"], rows, 2);
}

/** @param {any} one */
function ranks(one) {
  const rows = one.ranks.map((/** @type {any} */ each) =>
    el("tr", {}, cell(each.rank), ...[each.busy_planned, each.busy, each.idle_planned, each.idle].map((time) => cell(seconds(time)))),
  );
  return table("In the pipeline", ["rank", "busy, planned", "measured", "idle, planned", "measured"], rows);
}

/** @param {any} one */
function calls(one) {
  const rows = one.calls.map((/** @type {any} */ each) =>
    el("tr", {}, el("td", {}, each.axis), cell(count(each.calls)), cell(bytes(each.bytes)), cell(seconds(each.seconds))),
  );
  return table("Collectives of these ranks", ["axis", "calls", "input", "under way"], rows);
}

/** @param {string | number} text */
const cell = (text) => el("td", { class: "number" }, text);

/** @param {string} caption @param {string[]} heads @param {HTMLElement[]} rows @param {number} [numbers] columns of numbers */
function table(caption, heads, rows, numbers = heads.length) {
  const head = heads.map((text, place) => el("th", place < numbers ? { class: "number", scope: "col" } : { scope: "col" }, text));
  return el("div", {}, el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}
