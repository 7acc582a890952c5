// @ts-check
// Explore: answers, inputs and pictures. Every change is one question, and its answer repaints
// everything. Another model, machine, number of GPUs or batch is another job: the planner is asked
// first, and its best layout is loaded.

import { clear, el } from "fivefold/dom.js";
import { Answers } from "fivefold/answers.js";
import { site } from "fivefold/ask.js";
import { panel } from "fivefold/panel.js";
import { create as controls } from "fivefold/controls.js";
import { JOB, jobOf, search } from "fivefold/slow.js";
import { merged } from "fivefold/address.js";
import { count } from "fivefold/format.js";

/** @typedef {Record<string, string>} Params */
/** A panel of `explore.PANELS`, and of the same name its part of the answer, of "pictures" if `later`.
 * @typedef {{name: string, title: string, hint: string, later: boolean, drawing: string}} Frame */
/** @typedef {{create: (body: HTMLElement, how: any) => {update: (part: any, view: any) => void}}} Module */

const REST = 250; // milliseconds without a change, after which what is unseen is drawn
const AHEAD = 60; // milliseconds without a change, after which the next answer is asked for
const FIRST = "numbers"; // the panel that is drawn with every answer, seen or not
const NEW_JOB = ["model", "config", "machine", "gpus", "batch"]; // keys of another job

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
    /** Whether there is nothing to draw: the job is illegal, or the question was refused. */
    this.isBlank = false;
    this.began = 0;
    /** @type {number | undefined} */
    this.rest = undefined;
    /** @type {number | undefined} */
    this.ahead = undefined;
    /** Where sliders were, which tells their direction. @type {Record<string, number>} */
    this.former = {};
    this.aborter = new AbortController();
    this.loading = false;
    /** Whether an input, and not the address, asked for the job. */
    this.byHand = false;
    const change = (/** @type {Params} */ set) => this.change(set);
    this.controls = controls(change);
    this.problem = el("div", { class: "refusal", role: "alert", hidden: true });
    this.notice = el("div", { class: "notice", role: "status", hidden: true });
    /** What the planner said about this job, if it was asked for it. @type {any} */
    this.loaded = null;
    /** @type {{name: string, later: boolean, root: HTMLElement, body: HTMLElement, say: (text: string) => void, fail: (text: string) => void, drawing: any, seen: boolean, drawn: any}[]} */
    this.panels = [];
    const answers = el("div", { class: "answers" }, this.notice, this.problem);
    const pictures = el("div", { class: "pictures" });
    frames.forEach(({ name, title, hint, later }, i) => {
      const { root: frame, body, say, fail } = panel(name, title, hint);
      const drawing = modules[i].create(body, { onChoose: change });
      this.panels.push({ name, later, root: frame, body, say, fail, drawing, seen: name === FIRST, drawn: null });
      (name === FIRST ? answers : pictures).append(frame);
    });
    root.append(answers, this.controls.root, pictures);
    this.root = root;
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
    this.byHand = false;
    this.say(null);
    this.wanted = Object.keys(params).length ? params : this.start;
    if (site.live && onlyJob(this.wanted)) return void this.load();
    this.began = performance.now();
    void this.ask();
  }

  /** Another value of some inputs; "" takes one away. @param {Params} set */
  change(set) {
    const isOther = NEW_JOB.some((name) => name in set && (this.wanted[name] ?? "") !== set[name]);
    this.wanted = merged(this.wanted, set);
    if (site.live && (this.loading || isOther)) return void this.load();
    this.loaded = null; // it told of the layout that is left
    this.byHand = true;
    window.clearTimeout(this.ahead);
    this.began ||= performance.now();
    if (!this.asking) void this.ask();
  }

  /** The planner's best for the job that is wanted; if nothing fits, its leanest layout. */
  async load() {
    this.aborter.abort();
    const { signal } = (this.aborter = new AbortController());
    const asked = this.wanted;
    this.loading = true;
    this.asking = false;
    for (const { drawing } of this.panels) drawing.leave?.();
    const bar = /** @type {HTMLProgressElement} */ (el("progress", { max: 1, value: 0, "aria-label": "The planner searches" }));
    this.tell(el("p", {}, `The planner searches the best layout for ${nameOf(asked)} `, bar));
    this.root.classList.add("stale");
    try {
      const onProgress = (/** @type {number} */ share) => void (bar.value = share);
      const found = await search("ranking", jobOf(asked), { signal, onProgress });
      if (signal.aborted) return;
      this.loading = false;
      this.wanted = merged(asked, { ...found.job, ...(found.layouts[0]?.set ?? found.lean ?? {}) });
      this.loaded = found;
      await this.ask();
    } catch (error) {
      if (signal.aborted) return;
      this.loading = false;
      this.say(null);
      await this.refused(/** @type {Error} */ (error), asked);
    }
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
    else if (this.view?.problem && !this.loaded && this.byHand && site.live) void this.load();
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
    this.say(this.loaded);
    this.root.classList.remove("stale");
    this.isBlank = false;
    if (view.problem) this.blank();
    await Promise.all(this.panels.filter((one) => one.seen).map((one) => this.draw(one)));
  }

  /** Answers of another job are not read as those of this one. */
  blank() {
    this.isBlank = true;
    for (const one of this.panels) one.fail(""), (one.drawn = null);
  }

  /** The question itself was refused: the inputs go back to what was there, or else to where the
   * page begins; its answers are shown again when they are asked for.
   * @param {Error} error @param {Params} asked */
  async refused(error, asked) {
    if (!this.view && asked !== this.start) {
      this.wanted = this.start;
      await this.ask();
    } else if (this.view && this.wanted === asked) {
      this.wanted = this.view.state;
      this.remember(this.view.state);
      this.controls.update(this.view);
      this.root.classList.remove("stale");
    }
    this.controls.say(error.message);
    this.blank();
    this.say(null);
    const back = this.view ? [{ label: `back to ${nameOf(this.view.state)}`, set: {} }] : [];
    this.explain({ title: "This question has no answer.", reasons: [error.message], nearest: back });
  }

  /** @param {any} one of the panels */
  async draw(one) {
    const { view } = this;
    if (!view || this.isBlank || one.drawn === view) return;
    one.drawn = view;
    try {
      const parts = one.later ? { ...view, ...(await this.pictures.to(view.state)) } : view;
      if (this.view !== view || this.isBlank) return;
      const part = parts[one.name];
      if (part?.failed) throw new Error(part.failed);
      one.say("");
      one.body.hidden = false; // before it is drawn: a hidden chart has no size
      one.drawing.update(part, parts);
    } catch (error) {
      if (this.view === view) one.fail(/** @type {Error} */ (error).message);
    }
  }

  /** What the planner loaded, or why nothing fits and where something does. @param {any} found */
  say(found) {
    this.loaded = found;
    if (!found) return void (this.notice.hidden = true);
    const notes = found.notes.length ? ` Note: ${found.notes.join("; ")}.` : "";
    const name = nameOf(found.job);
    const best = found.layouts[0];
    if (best)
      return this.tell(el("p", {}, el("strong", {}, "The planner's best"), ` for ${name} is loaded: ${best.layout}, the first of `
        + `${count(found.candidates)} layouts weighed.${notes}`));
    const ways = found.ways.map((/** @type {any} */ each) => this.way(each, () => this.reach(each.set)));
    const lean = found.lean ? " The leanest layout is shown." : "";
    this.tell(el("p", {}, el("strong", {}, "Nothing fits: "), `${found.refused}.${lean}${notes}`),
      el("p", { class: "ways" }, "Something fits with: ", ...ways));
  }

  /** @param {...HTMLElement} words */
  tell(...words) {
    this.notice.hidden = false;
    clear(this.notice, ...words);
  }

  /** A button that leads to another job or layout.
   * @param {{label: string, set: Params}} each @param {() => void} [onclick] */
  way(each, onclick = () => this.change(each.set)) {
    return el("button", { type: "button", onclick }, each.label);
  }

  /** Another job, with the planner's best layout for it. @param {Params} set */
  reach(set) {
    this.wanted = merged(this.wanted, set);
    void this.load();
  }

  /** An illegal job: every reason, legal layouts to choose from, and the planner's best.
   * @param {any} problem */
  explain(problem) {
    this.problem.hidden = !problem;
    if (!problem) return;
    const reasons = problem.reasons.map((/** @type {string} */ each) => el("li", {}, each));
    const near = problem.nearest.map((/** @type {any} */ each) => this.way(each));
    const best = el("button", { type: "button", onclick: () => void this.load() }, "the planner's best");
    clear(
      this.problem,
      el("strong", {}, problem.title ?? "This layout cannot run this job."),
      el("ul", {}, ...reasons),
      this.loaded ? null : el("p", { class: "ways" }, "Load instead: ", ...near, site.live && !problem.title ? best : null),
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
        window.clearTimeout(this.ahead);
        this.ahead = window.setTimeout(() => this.foresee(), AHEAD);
        window.clearTimeout(this.rest);
        this.rest = window.setTimeout(() => this.unseen(), REST);
      }),
    );
  }

  /** One panel at a time, so that sliders stay quick. */
  unseen() {
    const next = this.panels.find((one) => one.drawn !== this.view);
    if (!next || this.asking || this.isBlank) return;
    void this.draw(next);
    requestIdleCallback(() => this.unseen(), { timeout: 1500 });
  }

  /** Ask for what the slider in hand comes to next, if it goes on; not while it moves, for a wrong
   * guess would delay the right question. */
  foresee() {
    const { view } = this;
    if (this.asking) return;
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

/** Whether an address names a job and leaves its layout to the planner. @param {Params} params */
const onlyJob = (params) => Object.keys(params).every((name) => JOB.includes(name) || name === "tokens");

/** A job in words. @param {Params} job */
const nameOf = (job) => {
  const gpus = Number(job.gpus || 0);
  const many = gpus ? `${count(gpus)} ${gpus === 1 ? "GPU" : "GPUs"}` : "the GPUs";
  return `${job.config ? "the pasted config" : (job.model ?? "the model")} on ${many}${job.machine ? ` of ${job.machine}` : ""}`;
};
