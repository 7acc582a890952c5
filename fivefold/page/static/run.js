// @ts-check
// The Run tab: a run's folder, asked again while the training goes on.

import { clear, el } from "fivefold/dom.js";
import { ask, site } from "fivefold/ask.js";
import { panel } from "fivefold/panel.js";
import * as curves from "fivefold/run_curves.js";
import * as spent from "fivefold/run_spent.js";
import { create as createStep } from "fivefold/run_step.js";

const EVERY = 2000; // milliseconds between two questions while a run goes on
const NO_STEP = { step: "none" };

/** A column (0 is over both), a panel, and who fills it.
 * @type {[number, string, string, string, (body: HTMLElement) => {update: (view: any) => void}][]} */
const PANELS = [
  [0, "head", "Run", "", createHead],
  [1, "loss", "Loss", "Every step, faint; smoothed over a fiftieth of the steps, bold; evaluations as diamonds.", curves.loss],
  [2, "rates", "Speed", "Measured beside planned.", curves.rates],
  [2, "memory", "Memory", "Of the fullest rank, measured beside planned.", curves.memory],
  [1, "load", "Experts", "Slots of the fullest expert over the mean, layer by layer.", spent.load],
  [2, "goodput", "Where the time went", "The share of the wall time that went to steps that count is the goodput.", spent.goodput],
];

/** @param {HTMLElement} root @param {(params: Record<string, string>) => void} remember */
export function create(root, remember) {
  const columns = [el("div", { class: "run-wide" }), el("div", { class: "run-column" }), el("div", { class: "run-column" })];
  root.append(...columns);
  const panels = PANELS.map(([column, name, title, hint, make]) => {
    const frame = panel(name, title, hint);
    columns[column].append(frame.root);
    return make(frame.body);
  });
  const frame = panel("step", "One step over its plan", "What each rank of one pipeline did, under what it was to do.");
  root.append(el("div", { class: "run-wide" }, frame.root));
  const tab = new RunTab(panels, frame, remember);
  const step = createStep(frame.body, (params) => tab.choose(params));
  tab.step = step;
  return { show: (/** @type {Record<string, string>} */ params) => void tab.show(params) };
}

class RunTab {
  /** @param {{update: (view: any) => void}[]} panels
   * @param {{root: HTMLElement, say: (text: string) => void}} frame
   * @param {(params: Record<string, string>) => void} remember */
  constructor(panels, frame, remember) {
    this.panels = panels;
    this.frame = frame;
    this.remember = remember;
    this.step = /** @type {{update: (view: any) => void} | null} */ (null);
    this.timer = 0;
    this.live = false;
    this.drawn = false;
    document.addEventListener("visibilitychange", () => this.again());
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    await this.asked(params);
    this.again();
  }

  /** @param {Record<string, string>} params */
  choose(params) {
    this.remember(params);
    return this.asked(params);
  }

  /** @param {Record<string, string>} params */
  async asked(params) {
    try {
      this.draw(await ask("run", params));
      this.frame.say("");
    } catch (error) {
      this.frame.say(/** @type {Error} */ (error).message);
      if (!this.drawn && params.step !== NO_STEP.step) this.draw(await ask("run", NO_STEP));
    }
  }

  /** @param {any} view */
  draw(view) {
    this.live = site.live && view.head.live;
    this.drawn = true;
    for (const { update } of this.panels) update(view);
    this.step?.update(view);
  }

  /** Ask again as long as the run goes on and somebody looks; the step on show stays. */
  again() {
    clearTimeout(this.timer);
    if (!this.live || document.hidden || !this.frame.root.isConnected) return;
    this.timer = window.setTimeout(async () => {
      await this.asked(NO_STEP);
      this.again();
    }, EVERY);
  }
}

/** @param {HTMLElement} body */
function createHead(body) {
  const state = el("p", { class: "run-state", role: "status" });
  const facts = el("dl", { class: "run-facts" });
  const marks = el("ul", { class: "run-marks" });
  body.append(state, facts, marks);
  return {
    update(/** @type {any} */ { head, marks: found }) {
      state.classList.toggle("live", head.live && !head.silent);
      state.classList.toggle("silent", head.silent);
      clear(state, head.state);
      clear(facts, ...rows(head).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
      const said = [...found.restarts, ...found.skipped.slice(-5)].map((each) => el("li", {}, each.says));
      clear(marks, ...(head.no_plan ? [el("li", {}, head.no_plan)] : []), ...said);
      marks.hidden = !marks.firstChild;
    },
  };
}

/** @param {any} head @returns {[string, string][]} */
function rows(head) {
  const how = [head.layout, head.zero === null ? "" : `ZeRO-${head.zero}`, head.schedule ?? ""];
  return [
    ["folder", head.name],
    ["model", head.model],
    ["layout", how.filter(Boolean).join(", ")],
    ["ran on", head.machine],
    ["planned for", head.planned_for ?? "no machine"],
    ["step", head.steps === null ? String(head.step) : `${head.step} of ${head.steps}`],
    ["first start", head.began],
    ["starts", String(head.num_starts)],
  ];
}
