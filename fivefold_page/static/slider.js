// @ts-check
// One slider over the values of an axis: it stops at legal ones, and says why it passed others.

import { clear, el } from "fivefold/dom.js";
import { colourOf } from "fivefold/colours.js";

/** @typedef {{value: number, legal: boolean, why: string, set: Record<string, string>}} Option */

const MOST_LABELS = 18;

/**
 * @param {string} axis
 * @param {(set: Record<string, string>) => void} change
 * @returns {{root: HTMLElement, update: (one: any, isOther: boolean) => void}}
 */
export function slider(axis, change) {
  /** @type {Option[]} */
  let values = [];
  let here = 0;
  let shown = "";
  /** The value that was passed over last, in this job. @type {number | undefined} */
  let passed;
  const input = /** @type {HTMLInputElement} */ (
    el("input", { type: "range", min: 0, step: 1, name: axis, disabled: true, "aria-describedby": `why-${axis}` })
  );
  const name = el("span", { class: "name" });
  const degree = el("output", { class: "degree" });
  const ticks = el("div", { class: "ticks", "aria-hidden": "true" });
  const why = el("p", { class: "why", id: `why-${axis}`, "aria-live": "polite" });
  input.style.setProperty("--hue", colourOf(axis));
  input.addEventListener("input", () => move(Number(input.value)));

  /** @param {number} to a place among the values */
  function move(to) {
    const stop = settled(values, here, to);
    passed = stop === to ? undefined : values[to].value;
    clear(why, note(axis, values, passed));
    input.value = String(stop);
    if (stop === here) return;
    here = stop;
    told();
    change(values[stop].set);
  }

  function told() {
    clear(degree, values[here].value);
    input.style.setProperty("--share", `${(100 * here) / Math.max(1, values.length - 1)}%`);
    input.setAttribute("aria-valuetext", `${axis} ${values[here].value}`);
    [...ticks.children].forEach((each, place) => each.toggleAttribute("data-here", place === here));
  }

  return {
    root: el("div", { class: "slider" }, el("label", {}, name, degree, input), ticks, why),
    update(one, isOther) {
      if (isOther || one.value !== values[here]?.value) passed = undefined;
      values = one.values;
      here = Math.max(0, values.findIndex((each) => each.value === one.value));
      clear(name, el("b", {}, axis), ` ${one.label}`);
      input.setAttribute("aria-label", `${axis}, ${one.label} degree`);
      input.max = String(values.length - 1);
      input.value = String(here);
      input.disabled = values.length < 2;
      const sign = JSON.stringify(values.map(({ value, legal, why: words }) => [value, legal, words]));
      if (sign !== shown) clear(ticks, ...values.map((each, place) => tick(each, place, values.length)));
      shown = sign;
      clear(why, note(axis, values, passed));
      told();
    },
  };
}

/** What stands under a slider: why a value was passed over, as long as that is so.
 * @param {string} axis @param {Option[]} values @param {number | undefined} passed */
export function note(axis, values, passed) {
  if (values.length < 2) return `${axis} can only be 1 for this model`;
  const one = values.find(({ value }) => value === passed);
  return one && !one.legal ? `${axis}=${one.value} cannot be: ${one.why}` : "";
}

/** Where a slider stops that is moved to `to`: there, or at the nearest legal value on that side.
 * @param {Option[]} values @param {number} here @param {number} to */
function settled(values, here, to) {
  if (values[to].legal) return to;
  let best = here;
  values.forEach(({ legal }, place) => {
    const ahead = to > here ? place > here : place < here;
    if (legal && ahead && (best === here || Math.abs(place - to) < Math.abs(best - to))) best = place;
  });
  return best;
}

/** A label under the track; the track itself is what is touched.
 * @param {Option} one @param {number} place @param {number} total */
function tick({ value, legal, why }, place, total) {
  const share = total > 1 ? place / (total - 1) : 0;
  const words = total > MOST_LABELS ? "·" : short(value);
  return el(
    "span",
    {
      class: legal ? "tick" : "tick illegal",
      style: `left: calc(8px + (100% - 16px) * ${share})`,
      title: legal ? String(value) : `${value}: ${why}`,
    },
    words,
  );
}

/** 16384 → "16k". @param {number} value */
const short = (value) => (value >= 1024 && value % 1024 === 0 ? `${value / 1024}k` : String(value));
