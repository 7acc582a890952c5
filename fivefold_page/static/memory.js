// @ts-check
// Memory by category: the fullest rank against the GPU's limit, and every place of the pipeline.

import { clear, el } from "fivefold/dom.js";
import { columns } from "fivefold/bars.js";
import { colourOf, patternOf } from "fivefold/colours.js";
import { gib, percent } from "fivefold/format.js";

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
      const count = one.places.length;
      const how = {
        most: (Math.max(one.limit, one.total) / GIB) * 1.06,
        columns: count > 1 ? count + 2 : 1,
        names: named(count),
        unit: "GiB",
        title: "stage of the pipeline",
      };
      const limits = [limit(one.limit, "limit", false), limit(one.usable, "usable", true)];
      columns(chart, boxes(names, one), limits, how, `${one.headline}. ${heard(one)}`);
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

/** The fullest rank, a gap, and every place. @param {string[]} names @param {any} one */
function boxes(names, one) {
  const columns = [one.fullest, ...(one.places.length > 1 ? places(names, one) : [])];
  const words = ["the fullest rank", ...one.places.map((/** @type {any} */ each) => `${each.name}, ${each.layers}`)];
  return columns.flatMap((sizes, column) =>
    names.filter((name) => sizes[name] > 0).map((name) => ({
      name,
      column: column ? column + 1 : 0,
      size: sizes[name] / GIB,
      said: `${gib(sizes[name])} of ${name}: ${words[column]}`,
      colour: colourOf(name),
      pattern: patternOf(name),
    })),
  );
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

/** Names of the columns: as many as there is room for. @param {number} count of places */
function named(count) {
  const every = Math.ceil(count / MOST_TICKS);
  const some = count > 1 ? [...Array(count).keys()].filter((place) => place % every === 0) : [];
  return { 0: "fullest", ...Object.fromEntries(some.map((place) => [place + 2, String(place)])) };
}

/** @param {number} size @param {string} word @param {boolean} dashed */
const limit = (size, word, dashed) => ({
  size: size / GIB,
  label: `${word} ${(size / GIB).toFixed(1)}`,
  dashed,
  colour: colourOf("limit"),
});
