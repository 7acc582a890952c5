// @ts-check
// One colour for one thing, in every picture. The hues are those of Okabe and Ito, which people
// with any kind of colour vision tell apart; what shares a hue has another pattern.

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
  weights: [HUES.blue, ""],
  gradients: [HUES.sky, ""],
  master: [HUES.blue, "/"],
  optimizer: [HUES.green, ""],
  activations: [HUES.orange, ""],
  logits: [HUES.red, ""],
  buffers: [HUES.pink, ""],
  prefetch: [HUES.sky, "/"],
  driver: [HUES.black, ""],
  margin: [HUES.black, "/"],
  compute: [HUES.blue, ""],
  launch: [HUES.sky, ""],
  bubble: ["#9aa2b1", "/"],
  offload: [HUES.pink, "/"],
  fixed: [HUES.black, "/"],
  tp: [HUES.orange, ""],
  cp: [HUES.green, ""],
  dp: [HUES.sky, ""],
  pp: [HUES.pink, ""],
  ep: [HUES.red, ""],
  etp: [HUES.red, "/"],
  edp: [HUES.sky, "/"],
  fsdp: [HUES.sky, "x"],
  none: [HUES.red, ""],
  selective: [HUES.orange, ""],
  full: [HUES.blue, ""],
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
