// @ts-check
// A pipeline timeline: a row for each rank, time from left to right. A few paths whatever the
// number of steps; what lies under the pointer is found by arithmetic.

import { clear, el, svg } from "fivefold/dom.js";
import { count, digits, percent, seconds } from "fivefold/format.js";
import { at, box, interval, legend, named, slotsOf, texts } from "fivefold/timeline_slots.js";

const LETTER = 6.1; // pixels of a row's name, on average
const FOOT = 22;
const DIGIT = 5.8;
const LEAST_WIDTH = 260;
const CLOSEST = 400;
const HINT = "Point at a step or an idle slot, or use the arrow keys, and it says what it is.";

/**
 * @typedef {import("fivefold/timeline_slots.js").Slot} Slot
 * @typedef {import("fivefold/timeline_slots.js").Picked} Picked
 * @typedef {{scale?: number, label?: string, compact?: boolean, cursor?: number | null}} Options
 */

/** @type {WeakMap<Element, Picture>} */
const pictures = new WeakMap();

/**
 * Draw a timeline into `host`, or draw it anew there.
 * @param {HTMLElement} host
 * @param {any} view what timeline.py makes
 * @param {Options} [options] `scale`: the time that the whole width stands for, so that several
 *   share one axis; `label`: a title; `compact`: low rows, no legend, no buttons; `cursor`: a time
 * @returns {{cursor: (time: number | null) => void}}
 */
export function drawTimeline(host, view, options = {}) {
  const found = pictures.get(host) ?? new Picture(host);
  pictures.set(host, found);
  found.show(view, options);
  return { cursor: (time) => found.moveCursor(time) };
}

export { legend };

/** The panel of Explore. @param {HTMLElement} body */
export function create(body) {
  const host = el("div");
  body.append(host);
  return { update: (/** @type {any} */ view) => void drawTimeline(host, view) };
}

class Picture {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.view = /** @type {any} */ (null);
    this.options = /** @type {Options} */ ({});
    this.rows = /** @type {Slot[][]} */ ([]);
    this.range = [0, 1]; // what is seen, as shares of the whole width
    this.picked = /** @type {Picked | null} */ (null);
    this.title = el("p", { style: "margin:0 0 .2rem;font-weight:600" });
    this.legend = el("div");
    this.words = el("p", { class: "timeline-words", "aria-live": "polite" });
    this.box = el("div", { class: "timeline", tabindex: "0", role: "group", style: "outline-offset:-2px" });
    this.tools = el("div", { style: "display:flex;flex-wrap:wrap;gap:.3rem .9rem;align-items:center;margin-bottom:.3rem" });
    clear(host, this.title, this.tools, this.box, this.words);
    clear(this.tools, this.legend, this.buttons());
    this.width = Math.max(LEAST_WIDTH, host.clientWidth || 640);
    new ResizeObserver(([entry]) => this.resize(entry.contentRect.width)).observe(host);
    this.listen();
  }

  buttons() {
    /** @param {string} sign @param {string} label @param {() => void} onclick */
    const button = (sign, label, onclick) => el("button", { type: "button", "aria-label": label, onclick }, sign);
    return el(
      "span",
      { style: "margin-left:auto;display:flex;gap:.25rem" },
      button("+", "zoom in", () => this.zoom(0.5)),
      button("−", "zoom out", () => this.zoom(2)),
      button("whole", "show the whole step", () => this.look(0, 1)),
    );
  }

  listen() {
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerdown", (event) => this.point(event));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  /** @param {any} view @param {Options} options */
  show(view, options) {
    this.view = view;
    this.options = options;
    this.rows = view.rows.map(slotsOf);
    this.picked = null;
    const compact = Boolean(options.compact);
    const title = options.label ?? (compact ? "" : view.headline);
    clear(this.title, title).hidden = !title;
    this.box.setAttribute("aria-label", `${title ? `${title}. ` : ""}${view.headline}. Arrow keys go from step to step.`);
    this.tools.hidden = compact;
    this.tools.style.display = compact ? "none" : "flex";
    if (!compact) clear(this.legend, legend(view));
    clear(this.words, view.merged ?? (compact ? "" : HINT));
    this.words.setAttribute("style", `margin:.2rem 0 0;font-size:.85rem;min-height:${compact ? 0 : 1.4}em`);
    this.render();
  }

  /** @param {number} width */
  resize(width) {
    if (Math.abs(width - this.width) < 1 || width < 1) return;
    this.width = Math.max(LEAST_WIDTH, width);
    if (this.view) this.render();
  }

  /** @param {number} time in the unit of the view */
  x(time) {
    return this.gutter + ((time / this.whole - this.range[0]) / (this.range[1] - this.range[0])) * this.plot;
  }

  /** Measures that follow from the view, the options and the width. */
  measure() {
    const most = this.options.compact ? 15 : 22;
    this.whole = this.options.scale ?? this.view.makespan;
    this.gutter = 14 + LETTER * Math.max(...this.view.rows.map((/** @type {any} */ row) => row.name.length));
    this.plot = this.width - this.gutter - 8;
    this.high = Math.max(5, Math.min(most, Math.floor(440 / this.rows.length)));
    this.tick = this.view.makespan / this.view.ticks;
    this.bottom = 2 + this.high * this.rows.length;
  }

  render() {
    this.measure();
    this.over = svg("g", { "pointer-events": "none" });
    this.line = svg("path", { stroke: "var(--ink)", "stroke-width": 1.5, "pointer-events": "none" });
    const height = this.bottom + FOOT;
    const size = { width: this.width, height, viewBox: `0 0 ${this.width} ${height}` };
    const clip = svg("clipPath", { id: `clip-${(Picture.number += 1)}` });
    clip.append(svg("rect", { x: this.gutter, y: 0, width: this.plot, height }));
    const inside = svg("g", { "clip-path": `url(#${clip.id})` }, this.background(), ...this.fills(), ...this.numbers());
    inside.append(this.over, this.line);
    const style = "display:block;max-width:100%;touch-action:pan-y";
    clear(this.box, svg("svg", { ...size, role: "presentation", style }, clip, ...this.axis(), ...this.names(), inside));
    this.moveCursor(this.options.cursor ?? null);
    this.mark();
  }

  background() {
    const right = this.x(this.view.makespan);
    const d = this.rows.map((_, row) => box(this.x(0), this.top(row), right, this.thick()));
    return svg("path", { d: d.join(""), fill: "var(--idle)" });
  }

  /** @param {number} row */
  top(row) {
    return 2 + row * this.high;
  }

  thick() {
    return this.high - (this.high > 8 ? 3 : 1);
  }

  /** One path for each kind and chunk. */
  fills() {
    /** @type {Record<string, string[]>} */
    const paths = {};
    const limits = [this.range[0] * this.whole, this.range[1] * this.whole];
    this.rows.forEach((slots, row) => {
      for (const slot of slots) {
        const [start, end] = [slot.start * this.tick, slot.end * this.tick];
        if (end < limits[0] || start > limits[1]) continue;
        const [left, wide] = [this.x(start), this.x(end)];
        const right = wide - left > 3 ? wide - 0.7 : wide;
        const one = [slot.kind, this.top(row), this.thick()];
        const bands = /** @type {[string, number, number][]} */ (slot.many ? this.bands(slot, row) : [one]);
        for (const [kind, top, thick] of bands) {
          (paths[this.view.marks[kind].colours[slot.many ? 0 : slot.chunk]] ??= []).push(box(left, top, right, thick));
        }
      }
    });
    return Object.entries(paths).map(([fill, d]) => svg("path", { d: d.join(""), fill }));
  }

  /** Merged steps: a band for each kind, as high as its share of the time. @param {Slot} slot @param {number} row */
  bands(slot, row) {
    let top = this.top(row);
    return Object.entries(slot.many.shares).map(([kind, share]) => {
      const thick = share * this.thick();
      top += thick;
      return [kind, top - thick, thick];
    });
  }

  /** Microbatches where there is room: one text for each row, with a place for every digit. */
  numbers() {
    if (this.thick() < 10) return [];
    const style = "fill:#000;font-size:10px;font-variant-numeric:tabular-nums;pointer-events:none";
    return this.rows.map((slots, row) => {
      const places = [];
      let letters = "";
      for (const slot of slots) {
        const [left, right] = [this.x(slot.start * this.tick), this.x(slot.end * this.tick)];
        const label = slot.pair ? `${slot.microbatch}/${slot.pair[1]}` : String(slot.microbatch);
        const room = DIGIT * label.length;
        if (slot.many || right - left < room + 3 || right < this.gutter || left > this.width) continue;
        for (let i = 0; i < label.length; i += 1) places.push(((left + right - room) / 2 + i * DIGIT).toFixed(1));
        letters += label;
      }
      const y = this.top(row) + this.thick() / 2 + 3.6;
      return svg("text", { x: places.join(" "), y, style }, letters);
    });
  }

  names() {
    const every = Math.ceil(11 / this.high);
    return this.view.rows.flatMap((/** @type {any} */ row, /** @type {number} */ place) =>
      place % every
        ? []
        : [svg("text", { x: this.gutter - 6, y: this.top(place) + this.thick() / 2 + 4, "text-anchor": "end" }, row.name)],
    );
  }

  axis() {
    const span = (this.range[1] - this.range[0]) * this.whole;
    const between = interval(span / Math.max(2, Math.floor(this.plot / 90)));
    const parts = [];
    for (let i = Math.ceil((this.range[0] * this.whole) / between); ; i += 1) {
      const x = this.x(i * between);
      if (x > this.gutter + this.plot + 0.5) return parts;
      parts.push(svg("path", { d: `M${x} 0V${this.bottom + 4}`, stroke: "var(--line)" }));
      const anchor = x > this.width - 30 ? "end" : "middle";
      const style = "fill:var(--muted)";
      parts.push(svg("text", { x, y: this.bottom + 16, "text-anchor": anchor, style }, this.written(i * between)));
    }
  }

  /** @param {number} time */
  written(time) {
    return this.view.unit === "s" ? seconds(time) : digits(time);
  }

  /** A line at one time, in the unit of the view. @param {number | null} time */
  moveCursor(time) {
    this.options.cursor = time;
    this.line.setAttribute("d", time === null ? "" : `M${this.x(time)} 0V${this.bottom}`);
  }

  /** @param {PointerEvent} event */
  point(event) {
    const place = /** @type {Element} */ (this.box.firstChild).getBoundingClientRect();
    const row = Math.floor((event.clientY - place.top - 2) / this.high);
    const share = (event.clientX - place.left - this.gutter) / this.plot;
    if (row < 0 || row >= this.rows.length || share < 0 || share > 1) return;
    const time = (this.range[0] + share * (this.range[1] - this.range[0])) * this.whole;
    this.pick(at(this.rows[row], row, time / this.tick, this.view.ticks));
  }

  /** @param {Picked | null} picked */
  pick(picked) {
    const same = picked && this.picked && picked.row === this.picked.row && picked.from === this.picked.from;
    if (!picked || same) return;
    this.picked = picked;
    clear(this.words, this.tell(picked));
    this.mark();
  }

  /** What is picked, in words. @param {Picked} picked */
  tell({ row, slot, idle, from, to }) {
    const name = this.view.rows[row].name;
    const when = ` · ${this.written((to - from) * this.tick)}, from ${this.written(from * this.tick)} to ${this.written(to * this.tick)}`;
    if (idle && !slot) return `${name} has finished${when}`;
    if (idle) return (slot.wait ? `${name} waits at ${named(slot)} for ${slot.wait}` : `${name} idles before ${named(slot)}`) + when;
    if (slot.many) {
      const shares = Object.entries(slot.many.shares).map(([kind, share]) => `${this.view.marks[kind].name} ${percent(share)}`);
      const numbers = `microbatches ${slot.many.first}–${slot.many.last}`;
      return `${name}: ${count(slot.many.count)} steps of ${numbers}, ${shares.join(", ")} of the time${when}`;
    }
    const behind = slot.pair ? ` with the backward of stage ${slot.pair[0]}, microbatch ${slot.pair[1]}` : "";
    const mark = slot.pair ? "forward" : this.view.marks[slot.kind].name;
    return `${name}: ${named(slot)}, ${mark} of stage ${slot.stage}, microbatch ${slot.microbatch}${behind}${when}`;
  }

  /** Outline what is picked, and what an idle slot waits for. */
  mark() {
    if (!this.over || !this.picked) return;
    const { row, slot, idle, from, to } = this.picked;
    const outline = { fill: "none", stroke: "var(--ink)", "stroke-width": 2 };
    clear(this.over, svg("path", { d: this.frame(row, from, to), ...outline, "stroke-dasharray": idle ? "4 2" : null }));
    const cause = idle && slot?.wait ? this.find(slot.wait) : null;
    if (!cause) return;
    const [x, y] = [this.x(cause.slot.end * this.tick), this.top(cause.row) + this.thick() / 2];
    const [toX, toY] = [this.x(to * this.tick), this.top(row) + this.thick() / 2];
    this.over.append(
      svg("path", { d: this.frame(cause.row, cause.slot.start, cause.slot.end), ...outline, stroke: "var(--accent)" }),
      svg("path", { d: `M${x} ${y}L${toX} ${toY}`, ...outline, stroke: "var(--accent)" }),
      svg("circle", { cx: toX, cy: toY, r: 3.5, fill: "var(--accent)" }),
    );
  }

  /** @param {number} row @param {number} from @param {number} to */
  frame(row, from, to) {
    return box(this.x(from * this.tick), this.top(row), this.x(to * this.tick), this.thick());
  }

  /** Where an action is. @param {string} text */
  find(text) {
    for (let row = 0; row < this.rows.length; row += 1) {
      const slot = this.rows[row].find((each) => texts(each).includes(text));
      if (slot) return { row, slot };
    }
    return null;
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const { key } = event;
    const here = this.picked ?? at(this.rows[0], 0, this.rows[0][0]?.start ?? 0, this.view.ticks);
    const middle = (here.from + here.to) / 2;
    const moves = /** @type {Record<string, () => void>} */ ({
      ArrowRight: () => this.walk(here.row, this.picked ? here.to : here.from),
      ArrowLeft: () => this.walk(here.row, here.from - 1),
      ArrowDown: () => this.walk(Math.min(this.rows.length - 1, here.row + 1), middle),
      ArrowUp: () => this.walk(Math.max(0, here.row - 1), middle),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.look(0, 1),
    });
    if (event.ctrlKey || event.metaKey || !moves[key]) return;
    event.preventDefault();
    event.stopPropagation();
    moves[key]();
  }

  /** Pick what a row does at a tick, and see to it that it is seen. @param {number} row @param {number} tick */
  walk(row, tick) {
    const inside = Math.max(0, Math.min(this.view.ticks - 1, tick));
    const found = at(this.rows[row], row, inside, this.view.ticks);
    this.pick(found);
    const middle = (((found.from + found.to) / 2) * this.tick) / this.whole;
    const half = (this.range[1] - this.range[0]) / 2;
    if (middle < this.range[0] || middle > this.range[1]) this.look(middle - half, middle + half);
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const place = this.box.getBoundingClientRect();
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - place.left - this.gutter) / this.plot);
  }

  /** @param {number} factor @param {number} [share] of the width, where time stands still */
  zoom(factor, share) {
    const [from, to] = this.range;
    const picked = this.picked && (((this.picked.from + this.picked.to) / 2) * this.tick) / this.whole;
    const seen = picked !== null && picked >= from && picked <= to;
    const fixed = share === undefined ? (seen ? picked : (from + to) / 2) : from + share * (to - from);
    const wide = Math.max(1 / CLOSEST, Math.min(1, (to - from) * factor));
    const left = fixed - ((fixed - from) / (to - from)) * wide;
    this.look(left, left + wide);
  }

  /** @param {number} from @param {number} to */
  look(from, to) {
    const wide = Math.min(1, to - from);
    const left = Math.max(0, Math.min(1 - wide, from));
    this.range = [left, left + wide];
    this.render();
  }
}
Picture.number = 0;
