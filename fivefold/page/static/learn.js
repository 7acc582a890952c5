// @ts-check
// Learn: a list of panels, each a small example that the reader can change and walk through.

import { clear, el } from "fivefold/dom.js";
import { ask, site } from "fivefold/ask.js";
import { panel } from "fivefold/panel.js";
import { stepper } from "fivefold/stepper.js";

/** @typedef {{update: (view: any) => void, frame: (view: any, place: number) => void}} Drawing */

/**
 * @param {HTMLElement} root
 * @param {(params: Record<string, string>) => void} remember
 */
export function create(root, remember) {
  /** @type {Record<string, Lesson>} */
  const lessons = {};
  const names = Object.keys(site.lessons);
  const list = el("nav", { class: "lessons", "aria-label": "Panels" });
  const place = el("div", { class: "lesson" });
  root.append(list, place);
  let asks = 0;
  for (const name of names)
    list.append(el("button", { type: "button", "data-lesson": name, onclick: () => show({ panel: name }) }, site.lessons[name].title));

  /** @param {Record<string, string>} params */
  async function show({ panel: asked, frame = "0", ...params }) {
    const number = ++asks;
    const name = Object.hasOwn(site.lessons, asked) ? asked : names[0];
    for (const each of list.children)
      each.setAttribute("aria-current", String(each.getAttribute("data-lesson") === name));
    const module = await import(`fivefold/learn_${name}.js`);
    if (number !== asks) return; // the reader is further already
    lessons[name] ??= new Lesson(name, module, remember);
    if (place.firstChild !== lessons[name].root) clear(place, lessons[name].root);
    await lessons[name].show(params, Math.trunc(Number(frame)) || 0);
  }
  return { show };
}

class Lesson {
  /** @param {string} name @param {{create: (body: HTMLElement) => Drawing}} module
   * @param {(params: Record<string, string>) => void} remember */
  constructor(name, module, remember) {
    const { root, body, say } = panel(name, site.lessons[name].title);
    this.name = name;
    this.root = root;
    this.say = say;
    this.remember = remember;
    this.view = /** @type {any} */ (null);
    this.params = /** @type {Record<string, string>} */ ({});
    this.choices = el("div", { class: "choices" });
    this.says = el("p", { class: "says", "aria-live": "polite" });
    this.picture = el("div", { class: "picture" });
    this.takeaways = el("ul", { class: "takeaways" });
    this.steps = stepper((place) => this.frame(place));
    body.append(this.choices, this.steps.root, this.says, this.picture, this.takeaways);
    this.drawing = module.create(this.picture);
  }

  /** @param {Record<string, string>} params @param {number} frame */
  async show(params, frame) {
    this.params = params;
    try {
      const view = await ask(`learn/${this.name}`, params);
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

  /** @param {number} place */
  frame(place) {
    if (!this.view) return;
    clear(this.says, this.view.frames[place].says);
    this.drawing.frame(this.view, place);
    this.remember({ panel: this.name, ...this.params, ...(place ? { frame: String(place) } : {}) });
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
