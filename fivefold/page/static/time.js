// @ts-check
// What a step is spent on.

import { clear, el } from "fivefold/dom.js";
import { draw, sizeOf } from "fivefold/chart.js";
import { colourOf, patternOf } from "fivefold/colours.js";
import { percent, seconds } from "fivefold/format.js";

/** @param {HTMLElement} body @returns {{update: (part: any, view: any) => void}} */
export function create(body) {
  const headline = el("p", { class: "headline" });
  const chart = el("div", { class: "time-chart" });
  body.append(headline, chart);
  return {
    update(one) {
      clear(headline, one.headline);
      const names = Object.keys(one.parts).reverse();
      const words = names.map((name) => `${seconds(one.parts[name])} · ${percent(one.parts[name] / one.step)}`);
      const colours = names.map((name) => colourOf(name));
      const longest = Math.max(...Object.values(one.parts));
      const trace = {
        type: "bar",
        orientation: "h",
        y: names,
        x: names.map((name) => one.parts[name]),
        text: words,
        textposition: "outside",
        cliponaxis: false,
        customdata: names.map((name) => one.words[name]),
        hovertemplate: "%{y} %{text}<br>%{customdata}<extra></extra>",
        marker: { color: colours, pattern: patterned(names.map(patternOf), colours) },
      };
      const axis = { title: { text: "seconds of a step" }, range: [0, longest * (sizeOf(chart).width < 420 ? 1.75 : 1.45)], automargin: false };
      const heard = names.map((name, i) => `${name} ${words[i]}`).reverse();
      draw(chart, [trace], { margin: { l: 70, r: 12, t: 4, b: 36 }, xaxis: axis, yaxis: { automargin: false, showgrid: false }, showlegend: false },
        `${one.headline}. ${heard.join(", ")}`);
    },
  };
}

/** How Plotly hatches bars: light lines over their colours. @param {string[]} shape @param {string[]} colours */
export const patterned = (shape, colours) => ({
  shape,
  bgcolor: colours,
  fgcolor: colours.map(() => "#ffffff"),
  size: 6,
  solidity: 0.3,
});
