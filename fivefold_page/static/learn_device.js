// @ts-check
// What training keeps, in GPUs: every box is the memory of one GPU, filled part after part.

import { clear, el, svg } from "fivefold/dom.js";
import { gib } from "fivefold/format.js";
import { colourOf } from "fivefold/colours.js";

const BOX = { wide: 52, high: 34, gap: 6 };
const HATCHED = "master"; // it has the hue of the weights, of which it is a copy

/** @param {HTMLElement} body */
export function create(body) {
  const sheet = el("div");
  const key = el("ul", { class: "key device-key" });
  body.append(sheet, key);
  /** @type {any} */
  let view = null;
  let place = 0;
  const again = () => void (view && clear(sheet, boxes(view, place, sheet.clientWidth || 600)));
  new ResizeObserver(again).observe(sheet);
  return {
    /** @param {any} now */
    update(now) {
      view = now;
    },
    /** @param {any} now @param {number} frame */
    frame(now, frame) {
      view = now;
      place = frame;
      again();
      clear(key, ...view.parts.slice(0, view.frames[place].shown).map((/** @type {any} */ part) => row(part, view.limit)));
    },
  };
}

/** @param {any} part @param {number} limit */
function row(part, limit) {
  const style = `background-color:${colourOf(part.name)}`;
  const swatch = el("span", { class: part.name === HATCHED ? "swatch hatched" : "swatch", style });
  return el("li", {}, swatch, part.name === HATCHED ? "float32 copy" : part.name, el("span", {}, gib(part.bytes)), el("span", {}, `${(part.bytes / limit).toFixed(1)} GPUs`));
}

/** @param {any} view @param {number} place @param {number} width */
function boxes(view, place, width) {
  const parts = view.parts.slice(0, view.frames[place].shown);
  const most = Math.ceil(view.frames[view.frames.length - 1].bytes / view.limit);
  const step = BOX.wide + BOX.gap;
  const across = Math.max(1, Math.min(most, Math.floor((width + BOX.gap) / step)));
  const down = Math.ceil(most / across);
  const at = (/** @type {number} */ gpu) => [(gpu % across) * step + 1, Math.floor(gpu / across) * (BOX.high + BOX.gap) + 1];
  const drawn = [hatch()];
  for (let gpu = 0; gpu < most; gpu++) {
    const [x, y] = at(gpu);
    drawn.push(svg("rect", { x, y, width: BOX.wide, height: BOX.high, rx: 3, fill: "var(--raised)", stroke: "var(--muted)" }));
  }
  let start = 0; // in GPUs
  for (const part of parts) {
    const end = start + part.bytes / view.limit;
    for (let gpu = Math.floor(start); gpu < end; gpu++) drawn.push(...filled(part, at(gpu), Math.max(start, gpu) - gpu, Math.min(end, gpu + 1) - gpu));
    start = end;
  }
  const high = down * (BOX.high + BOX.gap);
  const label = `${view.choices.model} fills ${start.toFixed(1)} GPUs of ${gib(view.limit)}: ${parts.map((/** @type {any} */ each) => `${each.name} ${gib(each.bytes)}`).join(", ")}`;
  return svg("svg", { width: across * step, height: high, viewBox: `0 0 ${across * step} ${high}`, role: "img", "aria-label": label }, ...drawn);
}

/** @param {any} part @param {number[]} corner @param {number} from @param {number} to */
function filled(part, [x, y], from, to) {
  const place = { x: x + from * BOX.wide, y, width: Math.max(0, (to - from) * BOX.wide), height: BOX.high };
  const colour = svg("rect", { ...place, fill: colourOf(part.name) });
  return part.name === HATCHED ? [colour, svg("rect", { ...place, fill: "url(#device-hatch)" })] : [colour];
}

function hatch() {
  const line = { d: "M-2 2l4 -4M0 8l8 -8M6 10l4 -4", stroke: "#ffffffb0", "stroke-width": 2 };
  return svg("defs", {}, svg("pattern", { id: "device-hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse" }, svg("path", line)));
}
