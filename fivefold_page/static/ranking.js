// @ts-check
// The planner's best layouts as a table, and memory against time as points; each can be chosen.

import { clear, el } from "fivefold/dom.js";
import { draw } from "fivefold/chart.js";
import { colourOf } from "fivefold/colours.js";
import { count, gib, percent, seconds } from "fivefold/format.js";
import { slow } from "fivefold/slow.js";

/** @typedef {Record<string, string>} Params */
const GIB = 2 ** 30;
const HEADS = ["", "layout", "step", "MFU", "memory", "ZeRO", "recompute", "schedule", "microbatches", "bubble", "tokens/s/GPU", "against the first"];
const NUMBERS = new Set(["memory", "step", "tokens/s/GPU", "MFU", "bubble"]);
const NEAR_GIB = 5; // points that are nearer than this would write over one another

/**
 * @param {HTMLElement} body
 * @param {{onChoose: (set: Params) => void}} how
 * @returns {{update: (part: any, view: any) => void, leave: () => void}}
 */
export function create(body, { onChoose }) {
  return new Ranking(body, onChoose);
}

class Ranking {
  /** @param {HTMLElement} body @param {(set: Params) => void} onChoose */
  constructor(body, onChoose) {
    this.onChoose = onChoose;
    /** What the planner said last, and what Explore shows. @type {any} */
    this.found = null;
    /** @type {any} */
    this.view = null;
    this.asker = slow("ranking", "The planner searches", (answer) => this.answered(answer));
    this.says = el("p", { class: "hint" });
    this.rows = el("tbody");
    this.table = el("table", { class: "ranking", hidden: true },
      el("thead", {}, el("tr", {}, ...HEADS.map((name) => el("th", { scope: "col", class: kind(name) }, name)))),
      this.rows);
    this.chart = el("div", { class: "front-chart", hidden: true });
    this.why = el("details", { class: "because", hidden: true });
    body.append(this.asker.root, this.says, el("div", { class: "wide" }, this.table), this.chart, this.why);
  }

  /** @param {any} _ no part: the planner is asked @param {any} view */
  update(_, view) {
    this.view = view;
    this.asker.want(view.state);
    this.mark();
  }

  /** What is shown belongs to a job that is left. */
  leave() {
    this.asker.drop();
  }

  /** @param {any} found null: nothing is known of this job */
  answered(found) {
    this.found = found;
    const empty = !found?.layouts.length;
    for (const each of [this.table, this.chart, this.why]) each.hidden = empty;
    if (empty) {
      clear(this.says, found?.refused ?? "");
      clear(this.rows);
      return;
    }
    const weighed = `${count(found.candidates)} layouts weighed, ${count(found.passed_over)} passed over`;
    clear(this.says, [weighed, ...found.notes].join("; "));
    clear(this.rows, ...found.layouts.map((/** @type {any} */ one, /** @type {number} */ i) => this.row(one, i)));
    const reasons = found.because.map((/** @type {string} */ each) => el("li", {}, each));
    clear(this.why, el("summary", {}, "Why the first is the first"), el("ul", {}, ...reasons));
    this.mark();
  }

  /** @param {any} one @param {number} place */
  row(one, place) {
    const choose = () => this.onChoose(one.set);
    const button = el("button", { type: "button", class: "choose" }, one.layout);
    const cells = [
      seconds(one.step), percent(one.mfu), gib(one.total), one.zero, one.recompute, one.schedule, one.batch,
      percent(one.bubble), count(one.tokens_per_s_per_gpu), one.loses || "the first choice",
    ];
    return el("tr", { onclick: choose },
      el("td", {}, place + 1),
      el("th", { scope: "row" }, button),
      ...cells.map((text, i) => el("td", { class: kind(HEADS[i + 2]) }, text)));
  }

  /** Show which of them Explore shows. */
  mark() {
    const { found, view } = this;
    if (!found?.layouts.length || !view.numbers) return;
    found.layouts.forEach((/** @type {any} */ one, /** @type {number} */ i) => {
      const here = isHere(one, view.state);
      this.rows.children[i].toggleAttribute("data-here", here);
      const button = this.rows.children[i].querySelector("button");
      here ? button?.setAttribute("aria-current", "true") : button?.removeAttribute("aria-current");
    });
    const best = found.layouts[0];
    const label = `Memory against step time. The first choice: ${best.layout}, ${gib(best.total)}, ${seconds(best.step)}. `
      + `This layout: ${gib(view.numbers.total)}, ${seconds(view.numbers.step)}. The same numbers stand in the table.`;
    draw(this.chart, traces(found, view.numbers), layout(found, view.numbers), label);
    this.listen();
  }

  /** Points can be chosen, once Plotly has made the picture. */
  listen() {
    const chart = /** @type {any} */ (this.chart);
    if (chart.dataset.listens) return;
    chart.dataset.listens = "yes";
    chart.on("plotly_click", (/** @type {any} */ event) => {
      const { set } = event.points[0].customdata ?? {};
      if (set) this.onChoose(set);
    });
  }
}

/** @param {string} head */
const kind = (head) => (NUMBERS.has(head) ? "number" : head === "against the first" ? "loses" : null);

/** Whether a state has this layout; a key that is not there is empty. @param {any} one @param {Params} state */
const isHere = (one, state) => Object.entries(one.set).every(([key, text]) => (state[key] ?? "") === text);

/** @param {any} found @param {any} numbers of the layout that Explore shows */
function traces(found, numbers) {
  const front = [...found.front].sort((one, other) => one.total - other.total);
  return [
    points("front: less time only for more memory", front, {
      mode: "lines+markers",
      line: { shape: "hv", color: colourOf("front"), dash: "dot", width: 2 },
      marker: { symbol: "diamond", size: 11, color: colourOf("front") },
    }),
    points("the ten best", found.layouts, {
      mode: "markers+text",
      text: labels(found.layouts),
      textposition: "top center",
      textfont: { size: 11 },
      cliponaxis: false,
      marker: { symbol: "circle-open", size: 10, color: colourOf("best"), line: { width: 2 } },
    }),
    {
      type: "scatter",
      name: "this layout",
      mode: "markers",
      x: [numbers.total / GIB],
      y: [numbers.step],
      hovertemplate: `this layout: ${numbers.layout}<br>${gib(numbers.total)}, ${seconds(numbers.step)}<extra></extra>`,
      marker: { symbol: "star", size: 16, color: colourOf("here"), line: { width: 1, color: "#1d2129" } },
    },
  ];
}

/** Places in the table; layouts that need the same memory share one label, at the fastest of them.
 * @param {any[]} layouts */
function labels(layouts) {
  /** @type {Map<number, number[]>} */
  const alike = new Map();
  layouts.forEach((one, i) => {
    const key = Math.round(one.total / GIB / NEAR_GIB);
    alike.set(key, [...(alike.get(key) ?? []), i]);
  });
  const shared = [...alike.values()];
  return layouts.map((_, i) => shared.find(([last]) => last === i)?.map((place) => place + 1).join(" ") ?? "");
}

/** @param {string} name @param {any[]} entries @param {any} look */
function points(name, entries, look) {
  return {
    type: "scatter",
    name,
    x: entries.map((one) => one.total / GIB),
    y: entries.map((one) => one.step),
    customdata: entries.map((one) => ({ set: one.set })),
    hovertext: entries.map((one) => `${one.layout}, ZeRO-${one.zero}<br>${one.schedule}, recompute ${one.recompute}<br>${gib(one.total)}, ${seconds(one.step)}, MFU ${percent(one.mfu)}`),
    hoverinfo: "text",
    ...look,
  };
}

/** @param {any} found @param {any} numbers */
function layout(found, numbers) {
  const all = [...found.front, ...found.layouts, numbers];
  const most = Math.max(found.limit, ...all.map((one) => one.total)) / GIB;
  const steps = all.map((one) => one.step);
  const [fastest, slowest] = [Math.min(...steps), Math.max(...steps)];
  const room = 0.12 * (slowest - fastest) || 0.1 * slowest;
  const limits = [["limit", found.limit, "solid"], ["usable", found.usable, "dot"]];
  return {
    margin: { l: 56, r: 16, t: 22, b: 40 },
    xaxis: { title: { text: "GiB of the fullest rank", standoff: 4 }, range: [0, most * 1.05] },
    yaxis: { title: { text: "seconds of a step" }, range: [fastest - room, slowest + 2 * room] },
    hovermode: "closest",
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
    shapes: limits.map(([, size, dash]) => bound(Number(size) / GIB, String(dash))),
    annotations: limits.map(([word, size], i) => ({
      yref: "paper", y: 1, yanchor: "bottom", x: Number(size) / GIB, xanchor: i ? "right" : "left",
      text: String(word), showarrow: false, font: { size: 11 },
    })),
  };
}

/** @param {number} x @param {string} dash */
const bound = (x, dash) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { dash, width: 2, color: colourOf("limit") } });
