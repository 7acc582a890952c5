// @ts-check
// What the drawings of Learn share: a colour for every rank, ink that reads on it, rows that wrap.

import { el } from "fivefold/dom.js";
import { colourOf } from "fivefold/colours.js";

/** The colour of a rank of a small group. @param {number} rank */
export const rankColour = (rank) => colourOf("rank", rank);

const EVEN = 0.179; // the luminance that has the same contrast with black and with white

/** Black or white, whichever has more contrast with a colour. @param {string} colour as #rrggbb */
export function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => linear(parseInt(colour.slice(at, at + 2), 16) / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > EVEN ? "#000" : "#fff";
}

/** @param {number} level of red, green or blue, from 0 to 1 */
const linear = (level) => (level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4);

/**
 * Pictures side by side, below one another where the screen is narrow.
 * @param {[HTMLElement, string][]} parts each with the width that it would like
 */
export function beside(parts) {
  const boxes = parts.map(([part, width]) => {
    part.style.cssText += `flex: 1 1 ${width}; min-width: min(100%, 260px);`;
    return part;
  });
  return el("div", { style: "display:flex;flex-wrap:wrap;gap:0.5rem 1.5rem;align-items:flex-start" }, ...boxes);
}

/**
 * A table of numbers.
 * @param {string} caption
 * @param {string[]} head
 * @param {(string | number | Node)[][]} rows
 * @param {number} [marked] the row that is spoken of
 */
export function table(caption, head, rows, marked = -1) {
  const body = rows.map((row, place) =>
    el(
      "tr",
      place === marked ? { style: "font-weight:600", "aria-current": "true" } : {},
      ...row.map((each, at) => (at ? el("td", {}, each) : el("th", { scope: "row", style: "font-weight:inherit" }, each))),
    ),
  );
  return el(
    "table",
    {},
    el("caption", { style: "text-align:left;color:var(--muted)" }, caption),
    el("thead", {}, el("tr", {}, ...head.map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, ...body),
  );
}
