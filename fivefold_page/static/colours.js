// @ts-check
// One colour for one thing, in every picture of Explore; the actions of a pipeline have colours of
// their own, which are none of these. Where colours meet, patterns, marks or words tell the same.

/** For the n-th of many alike, the hues of Okabe and Ito, which people with any kind of colour vision
 * tell apart. */
const HUES = {
  black: "#5b6270",
  orange: "#e69f00",
  sky: "#56b4e9",
  green: "#009e73",
  yellow: "#d9c700",
  blue: "#0072b2",
  red: "#d55e00",
  pink: "#cc79a7",
};

/** @type {Record<string, [string, string]>} a colour, and a pattern of Plotly's */
const LOOKS = {
  tp: ["#e69f00", ""],
  cp: ["#6aa121", ""],
  dp: ["#2f6bff", ""],
  pp: ["#bb22a4", ""],
  ep: ["#a0623a", ""],
  weights: ["#0072b2", ""],
  master: ["#3c4f8f", "/"],
  gradients: ["#4dc4c4", ""],
  optimizer: ["#6b6a12", ""],
  activations: ["#f09a7d", ""],
  logits: ["#8f2d3f", ""],
  buffers: ["#9a7cf0", ""],
  prefetch: ["#bdb2f5", "/"],
  driver: ["#5b6270", ""],
  margin: ["#9aa2b1", "/"],
  compute: ["#1c6e7d", ""],
  rounding: ["#b5d16a", ""],
  launch: ["#c9a45c", ""],
  bubble: ["#c3c9d4", "/"],
  offload: ["#7d4fb8", "/"],
  fixed: ["#8a7466", "/"],
  here: ["#ff2e93", ""],
  limit: ["#d81e2c", ""],
  front: ["#2ecc4f", ""],
  best: ["#7d3cff", ""],
};
const ORDER = Object.values(HUES);

/** The colour of a category, axis, part of a step or kind of recomputation; of others, by place.
 * @param {string} name @param {number} [place] */
export function colourOf(name, place = 0) {
  return LOOKS[name]?.[0] ?? ORDER[(place + 1) % ORDER.length];
}

/** Its pattern, as Plotly names it. @param {string} name */
export function patternOf(name) {
  return LOOKS[name]?.[1] ?? "";
}

/** A colour for the n-th of many alike, such as pipeline stages. @param {number} place @param {number} total */
export function shadeOf(place, total) {
  const share = total > 1 ? place / (total - 1) : 0;
  return `hsl(${Math.round(205 + 150 * share)} 55% ${Math.round(62 - 14 * Math.sin(Math.PI * share))}%)`;
}
