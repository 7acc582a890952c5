// @ts-check
// The Run tab: the folders of runs, asked again while the training goes on.

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
const BESIDE = "Loss, speed and memory of all runs that are chosen, and how their recipes differ.";

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
    return { ...frame, name, title, make: /** @type {Make} */ (modules[i][name]) };
  });
  const missing = el("ul", { class: "run-missing" });
  columns[3].append(missing);
  const tab = new RunTab(panels, missing, remember);
  if (site.runs.length > 1) {
    const frame = panel("runs", "Runs side by side", BESIDE);
    columns[0].prepend(frame.root);
    const { runs } = await import("fivefold/run_compare.js");
    tab.beside = runs(frame.body, (/** @type {Record<string, string>} */ params) => void tab.show(tab.remembered(params)));
  }
  return { show: (/** @type {Record<string, string>} */ params) => void tab.show(params) };
}

/** The params that say which runs are looked at. @param {Record<string, string>} params */
const which = (params) => Object.fromEntries(Object.entries(params).filter(([name]) => name === "run" || name === "runs"));

class RunTab {
  /** @param {{name: string, title: string, body: HTMLElement, root: HTMLElement, say: (text: string) => void, make: Make}[]} panels
   * @param {HTMLElement} missing @param {(params: Record<string, string>) => void} remember */
  constructor(panels, missing, remember) {
    const choose = (/** @type {Record<string, string>} */ params) => void this.choose(params);
    this.panels = panels;
    this.missing = missing;
    this.drawings = panels.map(({ body, make }) => make(body, choose));
    /** The panel that says why a step cannot be shown. */
    this.frame = panels.find(({ name }) => name === "step") ?? panels[0];
    this.remember = remember;
    /** @type {{update: (view: any, params: Record<string, string>) => void} | undefined} */
    this.beside = undefined;
    /** @type {Record<string, string>} */
    this.params = {};
    this.timer = 0;
    this.live = false;
    this.others = false;
    this.drawn = false;
    document.addEventListener("visibilitychange", () => this.again());
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    this.params = params;
    const { runs: _, ...one } = params;
    await Promise.all([this.asked(one), this.askedBeside()]);
    this.again();
  }

  /** Another step or rank of the same run. @param {Record<string, string>} params */
  choose(params) {
    const { runs: _, ...one } = this.remembered({ ...which(this.params), ...params });
    return this.asked(one);
  }

  /** @param {Record<string, string>} params */
  remembered(params) {
    this.params = params;
    this.remember(params);
    return params;
  }

  /** @param {Record<string, string>} params */
  async asked(params) {
    const { run: _, ...rest } = params;
    const asks = params.run === "0" ? rest : params; // as an offline page names it
    try {
      this.draw(await ask("run", asks));
      this.frame.say("");
    } catch (error) {
      this.frame.say(/** @type {Error} */ (error).message);
      const run = asks.run ? { run: asks.run } : {};
      if (!this.drawn && asks.step !== NO_STEP.step) this.draw(await ask("run", { ...run, ...NO_STEP }).catch(() => ask("run", NO_STEP)));
    }
  }

  async askedBeside() {
    if (!this.beside) return;
    const view = await ask("runs", {}).catch(() => null);
    if (!view) return;
    this.beside.update(view, this.params);
    this.others = view.runs.some((/** @type {any} */ one) => one.live);
  }

  /** @param {any} view */
  draw(view) {
    this.live = site.live && view.head.live;
    this.drawn = true;
    const lines = [];
    for (const { name, title, root } of this.panels) {
      const why = view.missing[name];
      root.hidden = why !== undefined;
      if (why) lines.push(el("li", {}, el("b", {}, title), ` is not recorded: ${why}`));
    }
    clear(this.missing, ...lines);
    for (const { update } of this.drawings) update(view);
  }

  /** Ask again as long as a run goes on and somebody looks; the step on show stays. */
  again() {
    clearTimeout(this.timer);
    const goes = this.live || (site.live && this.others);
    if (!goes || document.hidden || !this.missing.isConnected) return;
    this.timer = window.setTimeout(async () => {
      const run = this.params.run ? { run: this.params.run } : {};
      await Promise.all([this.asked({ ...run, ...NO_STEP }), this.askedBeside()]);
      this.again();
    }, EVERY);
  }
}

/** @param {HTMLElement} body */
export function head(body) {
  const state = el("p", { class: "run-state", role: "status" });
  const facts = el("dl", { class: "run-facts" });
  const problem = el("p", { class: "run-marks" });
  body.append(state, facts, problem);
  return {
    update(/** @type {any} */ { head }) {
      state.classList.toggle("live", head.live && !head.silent);
      state.classList.toggle("silent", head.silent || head.failed);
      clear(state, head.state);
      clear(facts, ...rows(head).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
      const problems = [head.no_plan, ...head.damage].filter(Boolean);
      clear(problem, problems.join(". "));
      problem.hidden = !problems.length;
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
