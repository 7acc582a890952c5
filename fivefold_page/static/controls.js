// @ts-check
// The inputs of Explore. What can be chosen, and what a choice changes, stands in the answer; here
// it is shown, and chosen.

import { clear, el } from "fivefold/dom.js";
import { slider } from "fivefold/slider.js";
import { jobOf } from "fivefold/slow.js";

/** @typedef {Record<string, string>} Params */
/** @typedef {{value: any, legal: boolean, why: string, set: Params}} Option */

/** @type {Record<string, string>} what is chosen from a list */
const SELECTS = {
  machine: "Machine",
  zero: "ZeRO stage",
  schedule: "Schedule",
  chunks: "Chunks a rank",
  context: "Context kind",
  recompute: "Recompute",
  precision: "Precision",
  microbatch_size: "Microbatch",
  replicate: "Replicas of shards",
  etp: "Expert tensor degree",
};
/** @type {Record<string, [string, string, string[]]>} label, unit, and what is often meant */
const NUMBERS = {
  gpus: ["GPUs", "", ["8", "64", "256", "1024", "2048", "4096", "8192", "16384"]],
  seq: ["Sequence", "tokens", ["2048", "4096", "8192", "16384", "32768", "65536", "131072", "1048576"]],
  batch: ["Global batch", "sequences", ["256", "512", "1024", "2048", "4096", "8192"]],
  tokens: ["Whole run", "tokens", ["300e9", "1e12", "2e12", "15e12"]],
};

/**
 * @param {(set: Params) => void} change
 * @returns {{root: HTMLElement, update: (view: any) => void, say: (text: string) => void}}
 */
export function create(change) {
  const said = el("p", { class: "problem", role: "alert" });
  const say = (/** @type {string} */ text) => void clear(said, text);
  const model = modelInput(change);
  const numbers = Object.entries(NUMBERS).map(([key, about]) => numberInput(key, about, change));
  const selects = Object.entries(SELECTS).map(([key, label]) => selectInput(key, label, change));
  const sliders = Object.fromEntries(["dp", "tp", "pp", "cp", "ep"].map((axis) => [axis, slider(axis, change)]));
  const root = el(
    "aside",
    { class: "controls", "aria-label": "Inputs" },
    model.root,
    said,
    el("div", { class: "fields" }, ...numbers.map((each) => each.root)),
    el("div", { class: "sliders" }, ...Object.values(sliders).map((each) => each.root)),
    el("div", { class: "fields" }, ...selects.map((each) => each.root)),
  );
  let job = "";
  return {
    root,
    say,
    update(view) {
      const isOther = job !== (job = JSON.stringify(jobOf(view.state)));
      say("");
      model.update(view);
      for (const each of [...numbers, ...selects]) each.update(view);
      for (const [axis, each] of Object.entries(sliders)) each.update(view.sliders[axis], isOther);
    },
  };
}

/** A preset by its name, found by typing; or a pasted config. @param {(set: Params) => void} change */
function modelInput(change) {
  const list = el("datalist", { id: "models" });
  const input = /** @type {HTMLInputElement} */ (
    el("input", { list: "models", name: "model", autocomplete: "off", spellcheck: "false" })
  );
  input.addEventListener("change", () => change({ model: input.value, config: "", also: "" }));
  // A list shows what matches the text: an empty one shows all.
  input.addEventListener("focus", () => input.select());
  const area = /** @type {HTMLTextAreaElement} */ (
    el("textarea", { name: "config", rows: 6, spellcheck: "false", placeholder: '{"model_type": "llama", …}' })
  );
  const use = el("button", { type: "button", onclick: () => change({ config: area.value, also: "" }) }, "Use this config");
  const box = el("details", { class: "paste" }, el("summary", {}, "Paste a config.json"),
    el("label", {}, el("span", { class: "label" }, "Hugging Face config"), area), use);
  let known = 0;
  return {
    root: el("div", { class: "model" }, el("label", {}, el("span", { class: "label" }, "Model"), input), list, box),
    /** @param {any} view */
    update(view) {
      const options = view.choices.model;
      if (known !== options.length)
        clear(list, ...options.map((/** @type {Option} */ { value }) => el("option", { value })));
      known = options.length;
      input.value = view.state.model ?? "";
      input.placeholder = view.config ? "pasted config" : "";
    },
  };
}

/** @param {string} key @param {[string, string, string[]]} about @param {(set: Params) => void} change */
function numberInput(key, [label, unit, usual], change) {
  const list = el("datalist", { id: `usual-${key}` }, ...usual.map((value) => el("option", { value })));
  const input = /** @type {HTMLInputElement} */ (
    el("input", { name: key, list: `usual-${key}`, inputmode: "decimal", autocomplete: "off", size: 10 })
  );
  input.addEventListener("change", () => input.value.trim() && change({ [key]: input.value.trim() }));
  const words = el("span", { class: "label" }, unit ? `${label} (${unit})` : label);
  return {
    root: el("label", {}, words, input, list),
    /** @param {any} view */
    update(view) {
      input.value = key === "tokens" ? Number(view.state[key]).toPrecision(3) : view.state[key];
    },
  };
}

/** @param {string} key @param {string} label @param {(set: Params) => void} change */
function selectInput(key, label, change) {
  const select = /** @type {HTMLSelectElement} */ (el("select", { name: key }));
  const root = el("label", {}, el("span", { class: "label" }, label), select);
  /** @type {Option[]} */
  let options = [];
  let shown = "";
  select.addEventListener("change", () => change(options[select.selectedIndex].set));
  return {
    root,
    /** @param {any} view */
    update(view) {
      options = view.choices[key];
      root.hidden = options.length < 2;
      const sign = JSON.stringify(options);
      if (sign !== shown) clear(select, ...options.map((each) => optionOf(each)));
      shown = sign;
      select.value = view.state[key];
    },
  };
}

/** @param {Option} one */
function optionOf({ value, legal, why }) {
  return el("option", { value, disabled: !legal, title: why || null }, legal ? value : `${value} – not here`);
}
