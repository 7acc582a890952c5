// @ts-check
// An answer in time, the memory of a GPU as its cache fills, and a row for each layout.

import { clear, el, svg } from "fivefold/dom.js";
import { bytes, count, gib, seconds } from "fivefold/format.js";
import { colourOf } from "fivefold/colours.js";

const HEAD = ["layout", "first token", "each token", "tokens/s", "room for answers"];
const BAR = { high: 26, axis: 18 };
const LOOK = { prefill: colourOf("compute"), decode: colourOf("tp"), weights: colourOf("weights"), engine: colourOf("driver"), cache: colourOf("gradients") };

/** @param {HTMLElement} body */
export function create(body) {
  const time = el("figure", { class: "served" });
  const memory = el("figure", { class: "served" });
  const rows = el("div", { class: "compared" });
  body.append(time, memory, rows);
  /** @type {any} */
  let view = null;
  let place = 0;
  const again = () => {
    if (!view) return;
    const width = Math.max(240, time.clientWidth || 600);
    const frame = view.frames[place].row === null ? view.frames[place] : view.frames[view.frames.findIndex((/** @type {any} */ each) => each.row === 0) - 1];
    clear(time, ...answer(view, frame, width));
    clear(memory, ...cache(view, frame, width));
  };
  new ResizeObserver(again).observe(time);
  return {
    /** @param {any} now */
    update(now) {
      view = now;
    },
    /** @param {any} now @param {number} at */
    frame(now, at) {
      view = now;
      place = at;
      again();
      clear(rows, table(view, view.frames[at].row));
    },
  };
}

/** A bar of parts over an axis. @param {{ share: number, colour: string }[]} parts @param {number} width @param {string} end of the axis @param {string} label */
function bar(parts, width, end, label) {
  let x = 0;
  const drawn = parts.map(({ share, colour }) => {
    const wide = Math.max(0, share * width);
    const one = svg("rect", { x, y: 0, width: wide, height: BAR.high, fill: colour });
    x += wide;
    return one;
  });
  const frame = svg("rect", { x: 0.5, y: 0.5, width: width - 1, height: BAR.high - 1, fill: "none", stroke: "var(--muted)" });
  const high = BAR.high + BAR.axis;
  const words = { y: high - 4, fill: "var(--muted)", "font-size": 12 };
  const axis = [svg("text", { ...words, x: 0 }, "0"), svg("text", { ...words, x: width, "text-anchor": "end" }, end)];
  return svg("svg", { width, height: high, viewBox: `0 0 ${width} ${high}`, role: "img", "aria-label": label }, ...drawn, frame, ...axis);
}

/** @param {any} view @param {any} frame @param {number} width */
function answer(view, frame, width) {
  const whole = view.prefill + (view.output - 1) * view.step;
  const decoded = Math.max(0, frame.until - view.prefill);
  const parts = [
    { share: view.prefill / whole, colour: LOOK.prefill },
    { share: decoded / whole, colour: LOOK.decode },
  ];
  const label = `one answer in ${view.shown}: the prompt takes ${seconds(view.prefill)}, ${view.output} tokens ${seconds(whole)} in all`;
  return [
    el("figcaption", {}, `One answer alone in ${view.shown}, ${seconds(whole)}`),
    bar(parts, width, seconds(whole), label),
    key([[LOOK.prefill, `prefill: ${count(view.prompt)} tokens at once, ${seconds(view.prefill)}`], [LOOK.decode, `decode: ${seconds(view.step)} for each token`]]),
  ];
}

/** @param {any} view @param {any} frame @param {number} width */
function cache(view, frame, width) {
  const { weights, engine, token } = view.memory;
  const used = Math.min(view.memory.cache, frame.tokens * frame.sequences * token);
  const parts = [
    { share: weights / view.limit, colour: LOOK.weights },
    { share: engine / view.limit, colour: LOOK.engine },
    { share: used / view.limit, colour: LOOK.cache },
  ];
  const label = `memory of a GPU: weights ${gib(weights)}, engine ${gib(engine)}, cache ${gib(used)} of ${gib(view.memory.cache)}`;
  const answers = frame.sequences === 1 ? "1 answer" : `${count(frame.sequences)} answers`;
  return [
    el("figcaption", {}, `One GPU of ${gib(view.limit)}, with ${answers}`),
    bar(parts, width, gib(view.limit), label),
    key([[LOOK.weights, `weights ${gib(weights)}`], [LOOK.engine, `engine ${gib(engine)}`], [LOOK.cache, `KV cache ${bytes(used)} of ${gib(view.memory.cache)}`]]),
  ];
}

/** @param {string[][]} entries */
function key(entries) {
  const items = entries.map(([colour, words]) => el("li", {}, el("span", { class: "swatch", style: `background-color:${colour}` }), words));
  return el("ul", { class: "key served-key" }, ...items);
}

/** @param {any} view @param {number | null} place */
function table(view, place) {
  const fit = view.rows.filter((/** @type {any} */ row) => !row.problem);
  const slowest = Math.max(...fit.map((/** @type {any} */ row) => row.tpot));
  const most = Math.max(...fit.map((/** @type {any} */ row) => row.tokens_per_s));
  const body = view.rows.map((/** @type {any} */ row, /** @type {number} */ at) => el("tr", at === place ? { "aria-current": "true" } : {}, ...cells(row, slowest, most)));
  const caption = `${view.choices.model} on ${view.gpus} GPUs of ${view.machine}, ${view.choices.answers} answers at a time`;
  return el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...HEAD.map((each) => el("th", { scope: "col" }, each)))), el("tbody", {}, ...body));
}

/** @param {any} row @param {number} slowest @param {number} most */
function cells(row, slowest, most) {
  if (row.problem) return [el("th", { scope: "row" }, row.title), el("td", { colspan: 4 }, row.problem)];
  return [
    el("th", { scope: "row" }, row.title, el("small", {}, row.layout)),
    el("td", { "data-says": HEAD[1] }, row.ttft_text),
    el("td", { "data-says": HEAD[2] }, row.tpot_text, share(row.tpot / slowest, LOOK.decode)),
    el("td", { "data-says": HEAD[3] }, count(row.tokens_per_s), share(row.tokens_per_s / most, "var(--good)")),
    el("td", { "data-says": HEAD[4] }, count(row.room)),
  ];
}

/** @param {number} part @param {string} colour */
function share(part, colour) {
  return el("span", { class: "bar", "aria-hidden": "true" }, el("span", { style: `width:${100 * part}%;background-color:${colour}` }));
}
