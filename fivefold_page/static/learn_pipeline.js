// @ts-check
// The race of the pipeline schedules: one below another on one axis of time, with a moving cursor.

import { clear, el } from "fivefold/dom.js";
import { draw, sizeOf } from "fivefold/chart.js";
import { digits, percent } from "fivefold/format.js";
import { beside, table } from "fivefold/learn_ranks.js";
import { drawTimeline, legend } from "fivefold/timeline.js";
import { colourOf } from "fivefold/colours.js";

const LETTER = { width: 6.6, height: 15 }; // of a label, in pixels
const POINT = 6; // half the width of a point
const MARGIN = { l: 52, r: 24, t: 14, b: 44 };
/** Which way from its point a label may stand, the best first. */
const WAYS = [[0, -1], [0, 1], [1, 0], [-1, 0], [-1, 1], [1, -1], [1, 1], [-1, -1]];
const NEAR = 2; // pixels between a point and its label; one that stands further off has a line
const FAR = [14, 28, 42, 56];

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
 * What time costs in memory: a point for each racer, those that share a place share a label.
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
  const { width, height } = sizeOf(node);
  const [wide, high] = [width - MARGIN.l - MARGIN.r, height - MARGIN.t - MARGIN.b];
  const places = points.map(([{ peak, makespan }]) => [(peak / right) * wide, ((top - makespan) / (top - bottom)) * high]);
  const trace = {
    type: "scatter",
    mode: "markers",
    x: points.map(([first]) => first.peak),
    y: points.map(([first]) => first.makespan),
    text: words,
    cliponaxis: false,
    hovertemplate: "%{text}<br>%{x} microbatches held<br>time %{y}<extra></extra>",
    marker: { size: 2 * POINT - 1, color: colourOf("compute"), symbol: points.map(([first]) => (first.copies > 1 ? "diamond-open" : "circle")) },
  };
  const layout = {
    xaxis: { title: { text: "activations held (microbatches)" }, range: [0, right] },
    yaxis: { title: { text: "time" }, range: [bottom, top] },
    margin: MARGIN,
    showlegend: false,
    annotations: apart(places, words, wide, high).map(({ ax, ay, far }, place) => {
      const [{ peak: x, makespan: y }] = points[place];
      const line = { arrowhead: 0, arrowwidth: 1, arrowcolor: far ? colourOf("bubble") : "rgba(0,0,0,0)", standoff: POINT };
      return { x, y, ax, ay, text: words[place], borderpad: 0, ...line };
    }),
  };
  const told = racers.map((each) => `${each.name} ${digits(each.makespan)} with ${digits(each.peak)} microbatches`);
  draw(node, [trace], layout, `Time against memory: ${told.join(", ")}`);
}

/**
 * The middle of every label from its point, in pixels, so that none lies on another or on a point.
 * @param {number[][]} places @param {string[]} words @param {number} wide @param {number} high of the picture
 */
function apart(places, words, wide, high) {
  /** @type {number[][]} left, top, right, bottom of what is taken: the points first */
  const taken = places.map(([x, y]) => [x - POINT, y - POINT, x + POINT, y + POINT]);
  return places.map(([x, y], place) => {
    const half = [(words[place].length * LETTER.width) / 2, LETTER.height / 2];
    const spots = [NEAR, ...FAR].flatMap((gap) =>
      WAYS.map(([across, down]) => {
        const [ax, ay] = [across * (half[0] + POINT + gap), down * (half[1] + POINT + gap)];
        const box = [x + ax - half[0], y + ay - half[1], x + ax + half[0], y + ay + half[1]];
        return { ax, ay, far: gap > NEAR, box };
      }),
    );
    const inside = spots.filter(({ box }) => box[0] >= 0 && box[1] >= -MARGIN.t && box[2] <= wide + MARGIN.r && box[3] <= high);
    const spot = inside.find(({ box }) => !taken.some((other) => meet(box, other))) ?? inside[0] ?? spots[0];
    taken.push(spot.box);
    return spot;
  });
}

/** Whether two boxes have a part in common. @param {number[]} one @param {number[]} other */
const meet = (one, other) => one[0] < other[2] && one[2] > other[0] && one[1] < other[3] && one[3] > other[1];
