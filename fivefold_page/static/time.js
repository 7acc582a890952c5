// @ts-check
// What a step is spent on.

import { clear, el } from "fivefold/dom.js";
import { rows } from "fivefold/bars.js";
import { colourOf, patternOf } from "fivefold/colours.js";
import { percent, seconds } from "fivefold/format.js";

const HEIGHT = 330;

/** @param {HTMLElement} body @returns {{update: (part: any, view: any) => void}} */
export function create(body) {
  const headline = el("p", { class: "headline" });
  const chart = el("div", { class: "time-chart" });
  body.append(headline, chart);
  return {
    update(one) {
      clear(headline, one.headline);
      const rest = Object.entries(one.parts).map(([name, time]) => {
        const words = `${seconds(/** @type {number} */ (time))} · ${percent(/** @type {number} */ (time) / one.step)}`;
        const said = `${name} ${words}: ${one.words[name]}`;
        return { name, value: /** @type {number} */ (time), words, said, colour: colourOf(name), pattern: patternOf(name) };
      });
      const heard = rest.map(({ name, words }) => `${name} ${words}`);
      rows(chart, rest, { unit: "seconds of a step", left: 70, height: HEIGHT }, `${one.headline}. ${heard.join(", ")}`);
    },
  };
}
