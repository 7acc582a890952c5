// @ts-check
// The Run tab: a run's folder, asked again while the training goes on.

import { clear, el } from "fivefold/dom.js";
import { ask, site } from "fivefold/ask.js";
import { panel } from "fivefold/panel.js";

/** A panel of `run_view.PANELS`; the module `drawing` exports a function of the panel's name.
 * @typedef {{name: string, title: string, hint: string, column: number, drawing: string}} Frame */
/** @typedef {(body: HTMLElement, choose: (params: Record<string, string>) => void) => {update: (view: any) => void}} Make */

const EVERY = 2000; // milliseconds between two questions while a run goes on
const NO_STEP = { step: "none" };
/** By the column of a panel: over both columns, the columns, and under them. */
const COLUMNS = ["run-wide", "run-column", "run-column", "run-wide"];

/** @param {HTMLElement} root @param {(params: Record<string, string>) => void} remember */
export async function create(root, remember) {
  /** @type {Frame[]} */
  const frames = site.panels.run;
  const modules = await Promise.all(frames.map(({ drawing }) => import(`fivefold/${drawing}.js`)));
  const columns = COLUMNS.map((name) => el("div", { class: name }));
  root.append(...columns);
  const panels = frames.map(({ name, title, hint, column }, i) => {
    const frame = panel(name, title, hint);
    columns[column].append(frame.root);
    return { ...frame, name, make: /** @type {Make} */ (modules[i][name]) };
  });
  const tab = new RunTab(panels, remember);
  return { show: (/** @type {Record<string, string>} */ params) => void tab.show(params) };
}

class RunTab {
  /** @param {{name: string, body: HTMLElement, root: HTMLElement, say: (text: string) => void, make: Make}[]} panels
   * @param {(params: Record<string, string>) => void} remember */
  constructor(panels, remember) {
    const choose = (/** @type {Record<string, string>} */ params) => void this.choose(params);
    this.drawings = panels.map(({ body, make }) => make(body, choose));
    /** The panel that says why a step cannot be shown. */
    this.frame = panels.find(({ name }) => name === "step") ?? panels[0];
    this.remember = remember;
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
    for (const { update } of this.drawings) update(view);
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
export function head(body) {
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
