// @ts-check
// Explore: inputs on one side, pictures on the other; every change is one question, and its answer
// repaints everything.

import { clear, el } from "fivefold/dom.js";
import { Answers } from "fivefold/answers.js";
import { site } from "fivefold/ask.js";
import { panel } from "fivefold/panel.js";
import { create as controls } from "fivefold/controls.js";

/** @typedef {Record<string, string>} Params */
/** A panel of `explore.PANELS`, and of the same name its part of the answer, of "pictures" if `later`.
 * @typedef {{name: string, title: string, hint: string, later: boolean, drawing: string}} Frame */
/** @typedef {{create: (body: HTMLElement, how: any) => {update: (part: any, view: any) => void}}} Module */

const REST = 250; // milliseconds without a change, after which what is unseen is drawn
const FIRST = "numbers"; // the panel that is drawn with every answer, seen or not

/**
 * @param {HTMLElement} root
 * @param {(params: Params) => void} remember
 */
export async function create(root, remember) {
  /** @type {Frame[]} */
  const frames = site.panels.explore;
  /** @type {Module[]} */
  const modules = await Promise.all(frames.map(({ name, drawing }) => import(`fivefold/${drawing || name}.js`)));
  const page = new Explore(root, remember, frames, modules);
  return { show: (/** @type {Params} */ params) => page.show(params) };
}

class Explore {
  /** @param {HTMLElement} root @param {(params: Params) => void} remember
   * @param {Frame[]} frames @param {Module[]} modules */
  constructor(root, remember, frames, modules) {
    this.remember = remember;
    /** The job that the page was opened for. @type {Params} */
    this.start = site.job;
    /** What is wanted, what was answered last, and how many answers there were. @type {Params} */
    this.wanted = {};
    /** @type {any} */
    this.view = null;
    this.number = 0;
    this.answers = new Answers("explore");
    this.pictures = new Answers("pictures");
    this.asking = false;
    this.began = 0;
    /** @type {number | undefined} */
    this.rest = undefined;
    /** Where sliders were, which tells their direction. @type {Record<string, number>} */
    this.former = {};
    this.aborter = new AbortController();
    const change = (/** @type {Params} */ set) => this.change(set);
    this.controls = controls(change);
    this.problem = el("div", { class: "refusal", role: "alert", hidden: true });
    /** @type {{name: string, later: boolean, root: HTMLElement, say: (text: string) => void, drawing: any, seen: boolean, drawn: any}[]} */
    this.panels = [];
    const pictures = el("div", { class: "pictures" }, this.problem);
    frames.forEach(({ name, title, hint, later }, i) => {
      const { root: frame, body, say } = panel(name, title, hint);
      const drawing = modules[i].create(body, { onChoose: change });
      this.panels.push({ name, later, root: frame, say, drawing, seen: name === FIRST, drawn: null });
      pictures.append(frame);
    });
    root.append(this.controls.root, pictures);
    this.frames = pictures;
    this.watch();
  }

  /** Panels that nobody sees are drawn when there is time. */
  watch() {
    const watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const one = this.panels.find(({ root }) => root === target);
        if (!one) continue;
        one.seen = isIntersecting || one.name === FIRST;
        if (one.seen) void this.draw(one);
      }
    }, { rootMargin: "100px" });
    for (const { root } of this.panels) watcher.observe(root);
  }

  /** What the address says; without a word of a job, the page's own. @param {Params} params */
  show(params) {
    this.aborter.abort();
    this.aborter = new AbortController();
    this.asking = false;
    this.wanted = Object.keys(params).length ? params : this.start;
    this.began = performance.now();
    void this.ask();
  }

  /** Another value of some inputs; "" takes one away. @param {Params} set */
  change(set) {
    this.wanted = merged(this.wanted, set);
    this.began ||= performance.now();
    if (!this.asking) void this.ask();
  }

  /** One question at a time: the next asks for the latest that is wanted. */
  async ask() {
    const { aborter, wanted, began } = this;
    this.asking = true;
    this.began = 0;
    try {
      const view = await this.answers.to(wanted, aborter.signal);
      if (aborter.signal.aborted) return;
      await this.answered(view, wanted);
      this.painted(began);
    } catch (error) {
      if (aborter.signal.aborted) return;
      await this.refused(/** @type {Error} */ (error), wanted);
    }
    this.asking = false;
    if (this.wanted !== (this.view?.state ?? this.wanted)) void this.ask();
  }

  /** Everything that is seen is drawn again. @param {any} view @param {Params} asked */
  async answered(view, asked) {
    const latest = this.wanted === asked;
    this.view = view;
    if (latest) {
      this.wanted = view.state;
      this.remember(view.state);
      this.controls.update(view);
    }
    this.explain(view.problem);
    this.frames.classList.toggle("stale", Boolean(view.problem));
    await Promise.all(this.panels.filter((one) => one.seen).map((one) => this.draw(one)));
  }

  /** The question itself was refused: what was there stays, or else where the page begins.
   * @param {Error} error @param {Params} asked */
  async refused(error, asked) {
    if (!this.view && asked !== this.start) {
      this.wanted = this.start;
      await this.ask();
    } else if (this.view && this.wanted === asked) {
      this.wanted = this.view.state;
      this.remember(this.view.state);
      this.controls.update(this.view);
    }
    this.controls.say(error.message);
    if (!this.view) this.explain({ reasons: [error.message], nearest: [] });
  }

  /** @param {any} one of the panels */
  async draw(one) {
    const { view } = this;
    if (!view || view.problem || one.drawn === view) return;
    one.drawn = view;
    let parts = view;
    try {
      if (one.later) parts = { ...view, ...(await this.pictures.to(view.state)) };
      one.say("");
    } catch (error) {
      one.say(/** @type {Error} */ (error).message);
      return;
    }
    if (this.view !== view) return;
    one.drawing.update(parts[one.name], parts);
  }

  /** An illegal job: every reason, and legal layouts to choose from. @param {any} problem */
  explain(problem) {
    this.problem.hidden = !problem;
    if (!problem) return;
    const reasons = problem.reasons.map((/** @type {string} */ each) => el("li", {}, each));
    const near = problem.nearest.map((/** @type {any} */ each) =>
      el("button", { type: "button", onclick: () => this.change(each.set) }, each.label),
    );
    clear(
      this.problem,
      el("strong", {}, "This job cannot be."),
      el("ul", {}, ...reasons),
      near.length ? el("p", {}, "Nearest legal: ", ...near) : null,
    );
  }

  /** After the browser has painted, say so: benchmarks read it, and what is unseen is drawn.
   * @param {number} began when the input changed */
  painted(began) {
    const number = ++this.number;
    requestAnimationFrame(() =>
      setTimeout(() => {
        performance.mark("fivefold:painted");
        if (began) performance.measure("fivefold:repaint", { start: began, end: performance.now() });
        document.documentElement.dataset.painted = String(number);
        this.foresee();
        window.clearTimeout(this.rest);
        this.rest = window.setTimeout(() => this.unseen(), REST);
      }),
    );
  }

  /** One panel at a time, so that sliders stay quick. */
  unseen() {
    const next = this.panels.find((one) => one.drawn !== this.view);
    if (!next || this.asking || this.view.problem) return;
    void this.draw(next);
    requestIdleCallback(() => this.unseen(), { timeout: 1500 });
  }

  /** Ask for what the slider in hand comes to next, if it goes on. */
  foresee() {
    const { view } = this;
    const axis = document.activeElement?.getAttribute("name") ?? "";
    const slider = view.sliders?.[axis];
    if (!slider || view.problem) return;
    const here = slider.values.findIndex((/** @type {any} */ each) => each.value === slider.value);
    const falls = slider.value < this.former[axis];
    this.former[axis] = slider.value;
    const ahead = falls ? slider.values.slice(0, here).reverse() : slider.values.slice(here + 1);
    const next = ahead.find((/** @type {any} */ each) => each.legal);
    if (next) void this.answers.to(merged(view.state, next.set)).catch(() => undefined);
  }
}

/** Parameters with some changed; "" takes one away. @param {Params} params @param {Params} set */
const merged = (params, set) =>
  Object.fromEntries(Object.entries({ ...params, ...set }).filter(([, text]) => text !== ""));
