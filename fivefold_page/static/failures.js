// @ts-check
// A month with failures: where the time goes that does not count, and goodput at other scales.

import { clear, el, svg } from "fivefold/dom.js";
import { rows } from "fivefold/bars.js";
import { paint } from "fivefold/chart.js";
import { colourOf } from "fivefold/colours.js";
import { count, percent } from "fivefold/format.js";

const HEIGHT = 230;
const [LEFT, RIGHT, TOP, FOOT] = [44, 12, 10, 36];
const HUES = [4, 5, 6, 2]; // places in the order of colours
const DASHES = ["2 4", "7 4", "9 3 2 3", ""]; // lines are told apart without their colours too

/** @param {HTMLElement} body @returns {{update: (part: any, view: any) => void}} */
export function create(body) {
  const headline = el("p", { class: "headline" });
  const lost = el("div", { class: "failures-lost" });
  const title = el("p", {}, "Goodput by number of GPUs, for four ways to recover; each replica keeps its batch:");
  const scale = el("div", { class: "failures-scale" });
  const names = el("p", { class: "failures-names" });
  body.append(headline, lost, title, scale, names);
  return {
    update(one) {
      clear(headline, one.headline);
      for (const node of [lost, title, scale, names]) node.hidden = one.missing !== null;
      if (one.missing !== null) return;
      bars(lost, one);
      lines(scale, one);
      clear(names, ...one.designs.map((/** @type {any} */ design, /** @type {number} */ place) => el("span", {}, sample(place), ` ${design.name}`)));
    },
  };
}

/** @param {HTMLElement} node @param {any} one */
function bars(node, one) {
  const all = Object.entries(one.lost).map(([name, share], place) => {
    const words = percent(/** @type {number} */ (share));
    return { name, value: 100 * /** @type {number} */ (share), words, said: `${name} ${words}: ${one.words[name]}`, colour: colourOf(name, place), pattern: "" };
  });
  rows(node, all, { unit: "% of the time", left: 70 }, `${one.headline}. ${all.map(({ said }) => said).join(", ")}`);
}

/** @param {HTMLElement} node @param {any} one */
function lines(node, one) {
  node.style.height = `${HEIGHT}px`;
  const { scales, designs, gpus } = one;
  const span = Math.log(scales[scales.length - 1] / scales[0]);
  const picture = (/** @type {{width: number}} */ { width }) => {
    const x = (/** @type {number} */ number) => LEFT + ((width - LEFT - RIGHT) * Math.log(number / scales[0])) / span;
    const y = (/** @type {number} */ share) => TOP + (HEIGHT - TOP - FOOT) * (1 - share);
    const few = width < 460 ? 2 : 1; // names of scales that fit
    const here = gpus >= scales[0] && gpus <= scales[scales.length - 1];
    return svg("svg", { width, height: HEIGHT, role: "presentation" },
      ...[0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
        svg("path", { class: "grid", d: `M${LEFT} ${y(share)}H${width - RIGHT}` }),
        svg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}%`),
      ]),
      ...scales.map((/** @type {number} */ number, /** @type {number} */ place) =>
        place % few ? null : svg("text", { x: x(number), y: HEIGHT - 20, "text-anchor": place + few > scales.length - 1 ? "end" : place ? "middle" : "start" }, `${number / 1024}k`)),
      svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "GPUs"),
      here ? svg("path", { d: `M${x(gpus)} ${TOP}V${HEIGHT - FOOT}`, stroke: colourOf("here"), "stroke-width": 1.5 }) : null,
      ...designs.map((/** @type {any} */ design, /** @type {number} */ place) =>
        svg("path", { ...look(place), fill: "none", d: `M${design.shares.map((/** @type {number} */ share, /** @type {number} */ i) => `${x(scales[i]).toFixed(1)} ${y(share).toFixed(1)}`).join("L")}` })));
  };
  const told = designs.map((/** @type {any} */ { name, shares }) => `${name}: ${shares.map((/** @type {number} */ share, /** @type {number} */ i) => `${count(scales[i])} GPUs ${percent(share)}`).join(", ")}`);
  paint(node, picture, `Goodput by number of GPUs. ${told.join("; ")}`, ({ width }, across) => {
    const at = Math.round(((across - LEFT) / (width - LEFT - RIGHT)) * (scales.length - 1));
    return scales[at] === undefined ? undefined : `${count(scales[at])} GPUs: ${designs.map((/** @type {any} */ { name, shares }) => `${name} ${percent(shares[at])}`).join(", ")}`;
  });
}

/** @param {number} place */
function look(place) {
  return { stroke: colourOf("way to recover", HUES[place]), "stroke-width": 2.5, "stroke-dasharray": DASHES[place] || null };
}

/** A bit of a line, for its name. @param {number} place */
function sample(place) {
  return svg("svg", { width: 34, height: 10, "aria-hidden": "true" }, svg("path", { ...look(place), d: "M2 5H30" }));
}
