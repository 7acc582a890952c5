// @ts-check
// What trainers can run: a row for each dimension, a column for each trainer; on a phone a card for
// each row.

import { clear, el } from "fivefold/dom.js";

/** @param {HTMLElement} body */
export function create(body) {
  const table = el("div", { class: "trainers" });
  const sources = el("ul", { class: "hint trainer-sources" });
  body.append(table, el("p", { class: "hint" }, "Read at:"), sources);
  return {
    /** @param {any} view */
    update(view) {
      clear(sources, ...view.trainers.map((/** @type {any} */ one) => el("li", {}, el("b", {}, one.name), ` ${one.date}: ${one.source}`)));
    },
    /** @param {any} view @param {number} place */
    frame(view, place) {
      const names = ["fivefold", ...view.trainers.map((/** @type {any} */ one) => one.name)];
      const rows = view.rows.map((/** @type {any} */ row, /** @type {number} */ at) =>
        el("tr", at === place ? { "aria-current": "true" } : {},
          el("th", { scope: "row", title: row.asks }, row.name),
          ...row.cells.map((/** @type {string} */ cell, /** @type {number} */ i) => el("td", { "data-trainer": names[i] }, cell))),
      );
      const head = el("tr", {}, el("td"), ...names.map((name) => el("th", { scope: "col" }, name)));
      clear(table, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
    },
  };
}
