// @ts-check
// The race of the pipeline schedules: one below another on one axis of time, with a moving cursor.

import { clear, el } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { digits, percent } from "fivefold/format.js";
import { beside, table } from "fivefold/learn_ranks.js";
import { drawTimeline, legend } from "fivefold/timeline.js";
import { colourOf } from "fivefold/colours.js";

const LETTER = { width: 6.6, height: 15 }; // of a label, in pixels
/** @type {[string, number, number][]} where a label may stand, and its middle from the point, in labels */
const POSITIONS = [
  ["top center", 0, -1],
  ["bottom center", 0, 1],
  ["middle right", 0.5, 0],
  ["middle left", -0.5, 0],
  ["bottom left", -0.5, 0.9],
  ["top right", 0.5, -0.9],
];

/**
 * @typedef {{name: string, place: number, makespan: number, bubble: number, peak: number,
 *   copies: number, chunks: number, timeline: any}} Racer
 */
/** @typedef {{badge: HTMLElement, now: HTMLElement, cursor: (time: number | null) => void}} Lane */

/** @param {HTMLElement} body */
export function create(body) {
  const marks = el("div");
  const track = el("div", { class: "track" });
  const finish = el("div", { style: "overflow-x:auto" });
  const prices = el("div", { style: "height:280px" });
  body.append(marks, track, beside([[finish, "430px"], [prices, "340px"]]));
  /** @type {Lane[]} */
  let lanes = [];
  return {
    /** @param {any} view */
    update(view) {
      clear(track);
      lanes = view.racers.map((/** @type {Racer} */ racer) => lane(track, racer, view.end));
      clear(marks, legend(allMarks(view.racers)));
      clear(finish, ranking(view.racers));
      trade(prices, view.racers);
    },
    /** @param {any} view @param {number} place */
    frame(view, place) {
      const { time, now, finished } = view.frames[place];
      lanes.forEach(({ badge, now: words, cursor }, at) => {
        const racer = view.racers[at];
        const home = finished.includes(racer.name);
        cursor(Math.min(time, racer.makespan));
        clear(badge, home ? `finished ${ordinal(racer.place)} at ${digits(racer.makespan)}` : "");
        clear(words, home ? "" : now[at].join(" "));
      });
    },
  };
}

/**
 * One schedule: its name, what its ranks do now, and its picture.
 * @param {HTMLElement} track @param {Racer} racer @param {number} end @returns {Lane}
 */
function lane(track, racer, end) {
  const badge = el("span", { class: "badge", style: "color:var(--good);font-weight:600" });
  const now = el("span", { class: "now", style: "font-family:ui-monospace,monospace;font-size:.85rem;white-space:pre-wrap" });
  const host = el("div");
  const facts = `bubble ${percent(racer.bubble)} · holds ${digits(racer.peak)} microbatches${racer.copies > 1 ? " · weights twice" : ""}`;
  const head = el(
    "div",
    { style: "display:flex;flex-wrap:wrap;gap:0 .9rem;align-items:baseline;margin-top:.5rem" },
    el("strong", {}, racer.name),
    el("span", { style: "color:var(--muted);font-size:.85rem" }, facts),
    badge,
    now,
  );
  track.append(el("div", { class: "racer", "data-racer": racer.name }, head, host));
  const { cursor } = drawTimeline(host, racer.timeline, { scale: end, compact: true });
  return { badge, now, cursor };
}

/** The kinds of all racers together, for one legend. @param {Racer[]} racers */
function allMarks(racers) {
  const views = racers.map(({ timeline }) => timeline);
  const later = [...new Set(views.map((each) => each.later).filter(Boolean))].join(", or ");
  const marks = Object.assign({}, ...views.map((each) => each.marks));
  for (const { marks: own } of views)
    for (const [letter, mark] of Object.entries(own))
      if (mark.colours.length > marks[letter].colours.length) marks[letter] = mark;
  return { ...views[0], marks, later: later || null };
}

/** @param {number} place */
const ordinal = (place) => `${place}${{ 1: "st", 2: "nd", 3: "rd" }[place] ?? "th"}`;

/** The finish, the first above. @param {Racer[]} racers */
function ranking(racers) {
  const order = [...racers].sort((one, other) => one.place - other.place);
  const rows = order.map((each) => [
    each.name,
    each.place,
    digits(each.makespan),
    percent(each.bubble),
    digits(each.peak),
    `${each.copies}×`,
    each.chunks,
  ]);
  const caption = "The finish. Activations are microbatches of a full stage, on the fullest rank.";
  return table(caption, ["schedule", "place", "time", "bubble", "activations", "weights", "chunks"], rows);
}

/**
 * What time costs in memory: a point for each racer, two that share a place share a label.
 * @param {HTMLElement} node @param {Racer[]} racers
 */
function trade(node, racers) {
  /** @type {Map<string, Racer[]>} */
  const spots = new Map();
  for (const each of racers) {
    const key = `${each.peak} ${each.makespan.toFixed(6)}`;
    spots.set(key, [...(spots.get(key) ?? []), each]);
  }
  const points = [...spots.values()];
  const words = points.map((shared) => shared.map(({ name }) => name).join(", "));
  const most = Math.max(...racers.map(({ peak }) => peak));
  const times = racers.map(({ makespan }) => makespan);
  const spare = 0.18 * (Math.max(...times) - Math.min(...times) || 1);
  const [right, bottom, top] = [most * 1.25, Math.min(...times) - spare, Math.max(...times) + 1.6 * spare];
  const [wide, high] = [(node.clientWidth || 480) - 76, (node.clientHeight || 280) - 58];
  const places = points.map(([{ peak, makespan }]) => [(peak / right) * wide, ((top - makespan) / (top - bottom)) * high]);
  const trace = {
    type: "scatter",
    mode: "markers+text",
    x: points.map(([first]) => first.peak),
    y: points.map(([first]) => first.makespan),
    text: words,
    textposition: apart(places, words),
    cliponaxis: false,
    hovertemplate: "%{text}<br>%{x} microbatches held<br>time %{y}<extra></extra>",
    marker: { size: 11, color: colourOf("compute"), symbol: points.map(([first]) => (first.copies > 1 ? "diamond-open" : "circle")) },
  };
  const layout = {
    xaxis: { title: { text: "activations held (microbatches)" }, range: [0, right] },
    yaxis: { title: { text: "time" }, range: [bottom, top] },
    margin: { l: 52, r: 24, t: 14, b: 44 },
    showlegend: false,
  };
  const told = racers.map((each) => `${each.name} ${digits(each.makespan)} with ${digits(each.peak)} microbatches`);
  draw(node, [trace], layout, `Time against memory: ${told.join(", ")}`);
}

/** Where labels stand so that none lies on another, if that can be. @param {number[][]} places @param {string[]} words */
function apart(places, words) {
  /** @type {number[][]} left, top, right, bottom of what is taken: the points first */
  const taken = places.map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
  return places.map(([x, y], place) => {
    const width = words[place].length * LETTER.width;
    const boxes = POSITIONS.map(([, across, down]) => {
      const [left, top] = [x + across * (width + 16) - width / 2, y + down * LETTER.height - LETTER.height / 2];
      return [left, top, left + width, top + LETTER.height];
    });
    const free = boxes.findIndex(([left, top, right, bottom]) =>
      taken.every((other) => right <= other[0] || left >= other[2] || bottom <= other[1] || top >= other[3]),
    );
    taken.push(boxes[Math.max(0, free)]);
    return POSITIONS[Math.max(0, free)][0];
  });
}
