// @ts-check
// Learn: a path of chapters. Each asks a question, answers it in prose, and has a panel: a small
// example that the reader can change and walk through. A panel without a chapter stands alone.

import { clear, el } from "fivefold/dom.js";
import { ask, site } from "fivefold/ask.js";
import { chapter as drawn, contents } from "fivefold/learn_chapter.js";
import { panel } from "fivefold/panel.js";
import { stepper } from "fivefold/stepper.js";

/** @typedef {{update: (view: any) => void, frame: (view: any, place: number) => void}} Drawing */
/** Where we are: a chapter, or a panel alone. @typedef {{chapter?: string, panel: string, start: Record<string, string>}} Place */

/**
 * @param {HTMLElement} root
 * @param {(params: Record<string, string>) => void} remember
 */
export function create(root, remember) {
  /** @type {Record<string, {root: HTMLElement, lesson: Lesson}>} */
  const made = {};
  const list = contents();
  const holder = el("div", { class: "lesson" });
  root.append(list.root, holder);
  let asks = 0;

  /** @param {Record<string, string>} params */
  async function show({ chapter, panel: asked, frame = "0", ...params }) {
    const number = ++asks;
    const place = placeOf(chapter, asked);
    const name = place.chapter ?? `panel/${place.panel}`;
    list.mark(place.chapter);
    if (!made[name]) {
      const [module, told] = await Promise.all([
        import(`fivefold/learn_${place.panel}.js`),
        place.chapter ? ask(`chapter/${place.chapter}`, {}).catch(() => null) : null,
      ]);
      if (number !== asks) return; // the reader is further already
      const lesson = new Lesson(place, module, remember);
      made[name] ??= { lesson, root: told ? drawn(told, lesson.root) : lesson.root };
    }
    turn(holder, made[name].root);
    await made[name].lesson.show(params, Math.trunc(Number(frame)) || 0);
  }
  return { show };
}

/** A chapter by its name, or by its panel; the first one if there is no such. @param {string} [chapter] @param {string} [asked] @returns {Place} */
function placeOf(chapter, asked) {
  const path = /** @type {any[]} */ (site.chapters);
  const alone = asked !== undefined && Object.hasOwn(site.lessons, asked);
  const found =
    path.find((each) => each.name === chapter) ??
    path.find((each) => each.panel === asked && !Object.keys(each.start).length);
  if (!found && alone) return { panel: asked, start: {} };
  const { name, panel, start } = found ?? path[0];
  return { chapter: name, panel, start };
}

/** Another chapter begins at its top, also for who reads with the keyboard.
 * @param {HTMLElement} holder @param {HTMLElement} next */
function turn(holder, next) {
  const before = holder.firstElementChild;
  if (before === next) return;
  const inside = before?.contains(document.activeElement);
  clear(holder, next);
  if (!before) return;
  scrollTo(0, 0);
  if (inside) /** @type {HTMLElement | null} */ (next.querySelector("h2"))?.focus();
}

class Lesson {
  /** @param {Place} place @param {{create: (body: HTMLElement) => Drawing}} module
   * @param {(params: Record<string, string>) => void} remember */
  constructor(place, module, remember) {
    const { root, body, say } = panel(place.panel, site.lessons[place.panel].title);
    this.place = place;
    this.name = place.panel;
    this.root = root;
    this.say = say;
    this.remember = remember;
    this.view = /** @type {any} */ (null);
    this.params = /** @type {Record<string, string>} */ ({});
    this.choices = el("div", { class: "choices" });
    this.says = el("p", { class: "says", "aria-live": "polite" });
    this.picture = el("div", { class: "picture" });
    this.takeaways = el("ul", { class: "takeaways" });
    this.steps = stepper((frame) => this.frame(frame));
    body.append(this.choices, this.steps.root, this.says, this.picture, this.takeaways);
    this.drawing = module.create(this.picture);
  }

  /** @param {Record<string, string>} params @param {number} frame */
  async show(params, frame) {
    this.params = params;
    try {
      const view = await ask(`learn/${this.name}`, { ...this.place.start, ...params });
      if (this.params !== params) return; // the reader is further already
      this.view = view;
    } catch (problem) {
      if (this.params !== params) return;
      // An address that cannot be: the example as it begins, and the reason.
      if (!this.view && Object.keys(params).length) await this.show({}, 0);
      this.say(/** @type {Error} */ (problem).message);
      return;
    }
    this.say("");
    this.select();
    this.drawing.update(this.view);
    clear(this.takeaways, ...this.view.sentences.map((/** @type {string} */ each) => el("li", {}, each)));
    this.steps.set(this.view.frames.length, Math.min(frame, this.view.frames.length - 1));
  }

  /** @param {number} frame */
  frame(frame) {
    if (!this.view) return;
    clear(this.says, this.view.frames[frame].says);
    this.drawing.frame(this.view, frame);
    const { chapter, panel } = this.place;
    this.remember({ ...(chapter ? { chapter } : { panel }), ...this.params, ...(frame ? { frame: String(frame) } : {}) });
  }

  select() {
    const boxes = Object.entries(site.lessons[this.name].choices).map(([name, choice]) => {
      const now = this.view.choices[name];
      const options = choice.values.map((/** @type {string} */ value) =>
        el("option", { value, selected: value === now }, value),
      );
      const onchange = (/** @type {Event} */ event) =>
        this.show({ ...this.view.choices, ...this.params, [name]: /** @type {HTMLSelectElement} */ (event.target).value }, 0);
      return el("label", {}, `${choice.label} `, el("select", { name, onchange }, ...options));
    });
    // Where focus was, it stays.
    const held = document.activeElement?.getAttribute("name");
    clear(this.choices, ...boxes);
    if (held) /** @type {HTMLElement | null} */ (this.choices.querySelector(`[name="${held}"]`))?.focus();
  }
}
