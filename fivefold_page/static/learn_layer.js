// @ts-check
// One layer, five dimensions: a line of stations, each with what a rank holds behind it and what it
// moves, forward and in backward.

import { clear, el, svg } from "fivefold/dom.js";
import { bytes, count } from "fivefold/format.js";
import { colourOf } from "fivefold/colours.js";
import { arrow, box, boxes, canvas, letters } from "fivefold/learn_layer_canvas.js";
import { card, legend, wireText } from "fivefold/learn_layer_words.js";

const TWO_COLUMNS = 840;
const NARROW = 410;
const LINE = 15;
const SPINE = 14;
const TILE = { wide: 44, high: 28 };

/** @param {HTMLElement} body */
export function create(body) {
  /** @type {any} */
  let view = null;
  let place = 0;
  const about = el("div", { "aria-live": "off" });
  about.style.minHeight = "5.4em";
  const sheet = el("div");
  const key = el("p", { class: "hint" });
  body.append(about, sheet, key);
  const again = canvas(sheet, (width) => (view ? paint(view, view.frames[place], width) : { height: 1, label: "", parts: [] }));
  return {
    /** @param {any} now */
    update(now) {
      view = now;
      place = 0;
      clear(key, legend(view));
    },
    /** @param {any} now @param {number} frame */
    frame(now, frame) {
      view = now;
      place = frame;
      clear(about, ...card(view, view.frames[frame]));
      again();
    },
  };
}

/** @param {any} view @param {any} frame @param {number} width */
function paint(view, frame, width) {
  const half = view.stations.findIndex((/** @type {any} */ each) => each.name === "norm 2");
  const columns = width >= TWO_COLUMNS ? [view.stations.slice(0, half), view.stations.slice(half)] : [view.stations];
  const wide = width / columns.length - (columns.length - 1) * 8;
  const parts = [];
  let height = 0;
  columns.forEach((stations, number) => {
    const left = number * (wide + 16);
    const drawn = column(view, stations, frame, left, wide);
    parts.push(...drawn.parts);
    height = Math.max(height, drawn.height);
  });
  const label = `The stations of layer ${view.layer} on rank 0 of ${view.world}. ${frame.says}`;
  return { height: height + 6, label, parts };
}

/** @param {any} view @param {any[]} stations @param {any} frame @param {number} left @param {number} wide */
function column(view, stations, frame, left, wide) {
  const parts = [];
  let y = 6;
  /** @type {number[]} */
  const dots = [];
  for (const station of stations) {
    const number = view.stations.indexOf(station);
    const focused = frame.station === number;
    const high = heightOf(station, wide);
    const at = { x: left + SPINE + 10, y, wide: wide - SPINE - 12, high };
    if (focused) parts.push(box(at.x - 5, y - 3, at.wide + 5, high + 2, { rx: 6, fill: "var(--idle)" }));
    parts.push(svg("g", { "data-station": station.name }, ...row(station, at, frame, focused)));
    dots.push(y + 12);
    y += high + 7;
  }
  parts.unshift(...spine(dots, left + SPINE / 2 + 1, frame, stations.map((each) => view.stations.indexOf(each))));
  return { parts, height: y };
}

/** @param {number[]} dots @param {number} x @param {any} frame @param {number[]} numbers */
function spine(dots, x, frame, numbers) {
  const here = numbers.indexOf(frame.station);
  const [first, last] = [dots[0], dots[dots.length - 1]];
  const parts = [svg("path", { d: `M${x} ${first}V${last}`, stroke: "var(--line)", "stroke-width": 3 })];
  parts.push(svg("path", { d: dots.map((y) => `M${x - 3} ${y}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0`).join(""), fill: "var(--muted)" }));
  if (here < 0) return parts;
  const [from, to] = frame.back ? [dots[here] + 14, dots[here] - 10] : [dots[here] - 12, dots[here] + 12];
  parts.push(svg("circle", { cx: x, cy: dots[here], r: 6, fill: "var(--accent)" }), arrow([x, from], [x, to], "var(--accent)"));
  return parts;
}

/** @param {any} station @param {"forward" | "backward"} way */
const shown = (station, way) => station[way].filter((/** @type {any} */ wire) => wire.kind !== "recv");

/** Lines of text beside a station. @param {any} station */
function linesOf(station) {
  return (station.held ? 2 : 0) + ["forward", "backward"].filter((way) => shown(station, /** @type {any} */ (way)).length).length;
}

/** @param {any} station @param {number} wide */
function heightOf(station, wide) {
  const lines = linesOf(station);
  if (wide >= NARROW) return Math.max(TILE.high + 2, lines * LINE + 2);
  return TILE.high + 3 + Math.max(0, lines - (station.held ? 2 : 0)) * LINE;
}

/** @param {any} station @param {any} at @param {any} frame @param {boolean} focused */
function row(station, at, frame, focused) {
  const small = at.wide < NARROW - 26;
  const name = small ? 96 : 132;
  const parts = [plate(station, at.x, at.y, name, focused)];
  const beside = at.x + name + 8;
  const text = beside + (station.held ? TILE.wide + 8 : 0);
  let y = at.y + 11;
  if (station.held) {
    parts.push(tile(station, beside, at.y));
    parts.push(letters(text, y, `[${station.held.symbols.join(", ")}]${station.held.partial ? ", to sum" : ""}`, { bold: true }));
    parts.push(letters(text, y + LINE, `${station.held.sizes.map(count).join(small ? "×" : " × ")} · ${bytes(station.held.bytes)}`, { fill: "var(--muted)" }));
    y += 2 * LINE;
  }
  const x = small ? at.x + 2 : text;
  if (small) y = at.y + TILE.high + 13;
  for (const way of /** @type {("forward" | "backward")[]} */ (["forward", "backward"])) {
    const wires = shown(station, way);
    if (!wires.length) continue;
    const active = focused && frame.back === (way === "backward");
    parts.push(letters(x, y, wireText(wires, way), active ? { bold: true } : { fill: "var(--muted)" }));
    y += LINE;
  }
  return parts;
}

/** @param {any} station @param {number} x @param {number} y @param {number} wide @param {boolean} focused */
function plate(station, x, y, wide, focused) {
  const colour = station.axis ? colourOf(station.axis) : "var(--muted)";
  const parts = [
    box(x, y, wide, 26, { rx: station.beside ? 2 : 7, fill: colour, "fill-opacity": station.axis ? 0.2 : 0.06 }),
    box(x, y, wide, 26, {
      rx: station.beside ? 2 : 7,
      fill: "none",
      stroke: focused ? "var(--ink)" : colour,
      "stroke-width": focused ? 2 : 1.2,
      "stroke-dasharray": station.beside ? "5 3" : null,
    }),
    named(station, x + 7, y + 17, wide - (station.axis ? 34 : 12)),
  ];
  if (station.axis) parts.push(letters(x + wide - 6, y + 17, station.axis, { anchor: "end", bold: true }));
  return svg("g", {}, ...parts);
}

/** The title, or where it is too long the name, in letters that fit.
 * @param {any} station @param {number} x @param {number} y @param {number} wide */
function named(station, x, y, wide) {
  const most = wide / 6.8;
  const name = station.title.length <= most ? station.title : station.name;
  return letters(x, y, name, { size: 12 * Math.min(1, most / name.length) });
}

/** Tokens down, width across: the whole in outline, what this rank has filled.
 * @param {any} station @param {number} x @param {number} y */
function tile(station, x, y) {
  const { rows, columns, partial } = station.held;
  const colour = station.axis ? colourOf(station.axis) : "var(--muted)";
  const filled = rows.length
    ? rows.map((/** @type {number[]} */ [from, to]) => [x, y + from * TILE.high, columns * TILE.wide, (to - from) * TILE.high])
    : slots(x, y, columns);
  return svg(
    "g",
    {},
    svg("path", { d: boxes(filled), fill: colour, opacity: partial ? 0.35 : 0.85 }),
    box(x, y, TILE.wide, TILE.high, { fill: "none", stroke: "var(--muted)", "stroke-width": 0.8 }),
  );
}

/** Tokens of many rows, mixed: scattered lines. @param {number} x @param {number} y @param {number} columns */
function slots(x, y, columns) {
  const lines = 7;
  const step = TILE.high / lines;
  return Array.from({ length: lines }, (_, line) => [x + 2, y + line * step + 1, columns * (TILE.wide - 4), step - 2]);
}
