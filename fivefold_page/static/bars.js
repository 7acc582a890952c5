// @ts-check
// Bars as SVG of our own: rows, and columns of boxes. Plotly measures every text that it draws, which
// took longer than all else that a slider moves.

import { svg } from "fivefold/dom.js";
import { paint } from "fivefold/chart.js";
import { count } from "fivefold/format.js";

/** @typedef {{width: number, height: number}} Size */
/** @typedef {{name: string, value: number, words: string, said: string, colour: string, pattern: string}} Row */
/** A box stands upon those of its column that come before it.
 * @typedef {{name: string, column: number, size: number, said: string, colour: string, pattern: string}} Box */
/** A line across all columns. @typedef {{size: number, label: string, dashed: boolean, colour: string}} Limit */

const NARROW = 460; // pixels, below which the words of a row stand above its bar
const LETTER = 6.4; // pixels of a letter, on average
const FOOT = 36; // pixels under the bars
const [LEFT, RIGHT, TOP] = [44, 74, 12]; // around columns
/** Light lines over a colour, by the name of the pattern. @type {Record<string, string>} */
const HATCHES = { "/": "M-1 7L7 -1M2 10L10 2M-4 4L4 -4", ".": "M2 3H4", x: "M0 0L6 6M6 0L0 6", "-": "M0 3H6", "+": "M0 3H6M3 0V6" };

/**
 * A row for each: its name, a bar, and its words after the bar; on a phone both words are above it.
 * @param {HTMLElement} node @param {Row[]} rows
 * @param {{unit: string, left: number, height?: number}} how the width of names, and the height unless the rows decide
 * @param {string} label what somebody hears who cannot see it
 */
export function rows(node, rows, { unit, left, height }, label) {
  const most = Math.max(...rows.map(({ value }) => value)) || 1;
  const pitchOf = (/** @type {number} */ width) =>
    width < NARROW ? 38 : height ? Math.min(36, (height - FOOT) / rows.length) : 26;
  const picture = ({ width }) => {
    const [narrow, pitch] = [width < NARROW, pitchOf(width)];
    const from = narrow ? 4 : left;
    const room = width - from - 12;
    const fits = rows.map(({ value, words }) => (room - 6 - LETTER * words.length) / (value || most));
    const scale = narrow ? room / most : Math.min(room / most, ...fits);
    const end = pitch * rows.length;
    node.style.height = `${narrow || !height ? end + FOOT : height}px`;
    const marks = ticks(room / scale, room / 90).map((at) => ({ at, x: fine(from + at * scale) }));
    return svg("svg", { width, height: end + FOOT, role: "presentation" },
      // Where words stand above bars, lines would cross them.
      svg("path", { class: "grid", d: marks.map(({ x }) => `M${x} ${fine(narrow ? end - 3 : 0)}V${fine(end)}`).join("") }),
      ...rows.flatMap((row, place) => rowOf(row, place * pitch, { narrow, pitch, from, scale, width })),
      ...marks.map(({ at, x }) => text(x, end + 14, "middle", short(at))),
      text(from + room / 2, end + 30, "middle", unit));
  };
  paint(node, picture, label, ({ width }, _, down) => rows[Math.floor(down / pitchOf(width))]?.said);
}

/** @param {Row} row @param {number} y @param {any} how */
function rowOf(row, y, { narrow, pitch, from, scale, width }) {
  const [top, thick] = narrow ? [y + 18, 14] : [y + 0.14 * pitch, 0.72 * pitch];
  const [wide, line] = [Math.max(1, row.value * scale), narrow ? y + 13 : y + pitch / 2 + 4];
  return [
    ...filled(`M${from} ${fine(top)}h${fine(wide)}v${fine(thick)}h${fine(-wide)}z`, row),
    narrow ? text(from, line, "start", row.name) : text(from - 6, line, "end", row.name),
    narrow ? text(width - 12, line, "end", row.words) : text(from + wide + 6, line, "start", row.words),
  ];
}

/**
 * Boxes in columns, and lines across all of them.
 * @param {HTMLElement} node @param {Box[]} boxes @param {Limit[]} limits the first has its label above
 * @param {{most: number, columns: number, names: Record<number, string>, unit: string, title: string}} how
 * @param {string} label what somebody hears who cannot see it
 */
export function columns(node, boxes, limits, { most, columns, names, unit, title }, label) {
  const stacked = stack(boxes, columns);
  const wideOf = (/** @type {Size} */ { width }) => (width - LEFT - RIGHT) / columns;
  const tallOf = (/** @type {Size} */ { height }) => height - TOP - FOOT;
  const picture = (/** @type {Size} */ size) => {
    const [wide, high, end] = [wideOf(size), tallOf(size), size.width - RIGHT];
    const y = (/** @type {number} */ value) => TOP + high * (1 - value / most);
    const box = (/** @type {any} */ { column, base, size: own }) =>
      `M${fine(LEFT + wide * (column + 0.06))} ${fine(y(base))}V${fine(y(base + own))}h${fine(wide * 0.88)}V${fine(y(base))}z`;
    const alike = [...new Set(boxes.map(({ name }) => name))].map((name) => stacked.filter((each) => each.name === name));
    const marks = ticks(most, high / 42);
    return svg("svg", { ...size, role: "presentation" },
      svg("path", { class: "grid", d: marks.map((at) => `M${LEFT} ${fine(y(at))}H${end}`).join("") }),
      ...marks.map((at) => text(LEFT - 6, y(at) + 4, "end", short(at))),
      ...alike.flatMap((some) => filled(some.map(box).join(""), some[0])),
      ...limits.flatMap(({ size: at, label: word, dashed, colour }, place) => [
        svg("path", { d: `M${LEFT} ${fine(y(at))}H${end}`, stroke: colour, "stroke-width": 2, "stroke-dasharray": dashed ? "2 3" : null }),
        text(end + 4, y(at) + (place ? 11 : -1), "start", word),
      ]),
      ...apart(Object.entries(names).map(([column, name]) => ({ x: LEFT + wide * (Number(column) + 0.5), name })))
        .map(({ x, name }) => text(x, TOP + high + 14, "middle", name)),
      text(LEFT + (end - LEFT) / 2, size.height - 5, "middle", title),
      svg("text", { transform: `translate(11 ${fine(TOP + high / 2)}) rotate(-90)`, "text-anchor": "middle" }, unit));
  };
  paint(node, picture, label, (size, across, down) => {
    const [column, value] = [Math.floor((across - LEFT) / wideOf(size)), most * (1 - (down - TOP) / tallOf(size))];
    return stacked.find((box) => box.column === column && box.base <= value && value < box.base + box.size)?.said;
  });
}

/** Names in a line that do not touch the one before. @param {{x: number, name: string}[]} names */
function apart(names) {
  let end = -Infinity;
  return names.filter(({ x, name }) => {
    const half = (LETTER * name.length) / 2;
    if (x - half < end) return false;
    end = x + half + 3;
    return true;
  });
}

/** Boxes with the level that each stands on. @param {Box[]} boxes @param {number} columns */
function stack(boxes, columns) {
  /** @type {number[]} */
  const levels = Array(columns).fill(0);
  return boxes.map((box) => {
    const base = levels[box.column];
    levels[box.column] += box.size;
    return { ...box, base };
  });
}

/** A shape in its colour and, over that, its pattern. @param {string} d @param {{colour: string, pattern: string}} look */
function filled(d, { colour, pattern }) {
  const bar = svg("path", { class: "bar", d, fill: colour });
  return pattern ? [bar, svg("path", { d, fill: `url(#${hatch(pattern)})` })] : [bar];
}

/** The name of a pattern, which stands once in the page. @param {string} pattern */
function hatch(pattern) {
  const name = `hatch-${Object.keys(HATCHES).indexOf(pattern)}`;
  if (!document.getElementById(name)) {
    const lines = svg("path", { d: HATCHES[pattern], stroke: "#ffffff", "stroke-width": pattern === "." ? 2 : 1.5 });
    const tile = svg("pattern", { id: name, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, lines);
    document.body.append(svg("svg", { class: "hatches", "aria-hidden": "true" }, tile));
  }
  return name;
}

/** @param {number} x @param {number} y @param {string} anchor @param {string} words */
const text = (x, y, anchor, words) => svg("text", { x: fine(x), y: fine(y), "text-anchor": anchor }, words);

/** Round values from 0 to `most`, about as many as wanted. @param {number} most @param {number} wanted */
function ticks(most, wanted) {
  const rough = most / Math.max(1, wanted);
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * ([1, 2, 5].find((each) => each * ten >= rough) ?? 10);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, place) => place * step);
}

/** @param {number} value */
const short = (value) => (value < 1000 ? String(Number(value.toPrecision(4))) : count(value));

/** @param {number} value */
const fine = (value) => Math.round(value * 10) / 10;
