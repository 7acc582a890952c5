// @ts-check
// The numbers that decide: does it fit, how fast is a step, how long is the run.

import { clear, el } from "fivefold/dom.js";
import { count, digits, gib, percent, seconds } from "fivefold/format.js";

const MARKS = { fits: "✓", tight: "≈", "does not fit": "✗" };

/** @param {HTMLElement} body @returns {{update: (part: any, view: any) => void}} */
export function create(body) {
  const tiles = el("div", { class: "tiles" });
  const lines = el("div", { class: "facts" });
  const files = el("p", { class: "files" });
  body.append(tiles, lines, files);
  return {
    update(one, view) {
      clear(tiles, ...made(one));
      const words = [`${one.model}: ${billions(one.parameters)} parameters, ${billions(one.active)} active a token`];
      words.push(...one.readings, one.batch, ...one.notes);
      clear(lines, ...words.map((each) => el("p", {}, each)));
      clear(files, ...downloads(view));
    },
  };
}

/** @param {any} one */
function made(one) {
  const mark = MARKS[/** @type {keyof typeof MARKS} */ (one.verdict)];
  const verdict = tile(`${mark} ${one.verdict}`, `${gib(one.total)} of ${gib(one.limit)}`, one.verdict_says);
  verdict.dataset.verdict = one.verdict;
  return [
    verdict,
    tile(seconds(one.step), "a step"),
    tile(digits(one.tokens_per_s_per_gpu), "tokens/s a GPU"),
    tile(count(one.tokens_per_s), "tokens/s"),
    tile(percent(one.mfu), "MFU", one.peak),
    tile(percent(one.bubble), "bubble of the step"),
    tile(`${one.days < 1000 ? digits(one.days) : count(one.days)} days`, `${count(one.gpu_hours)} GPU-hours`, `for ${one.tokens.toPrecision(3)} tokens`),
  ];
}

/** @param {string} value @param {string} label @param {string} [title] */
function tile(value, label, title) {
  return el("div", { class: "tile", title }, el("b", {}, value), el("span", {}, label));
}

/** 8.03e9 → "8.03 B", 124e6 → "124 M". @param {number} number */
const billions = (number) => (number < 1e9 ? `${digits(number / 1e6)} M` : `${digits(number / 1e9)} B`);

/** Files that every verb reads, and what is shared: the command, and the address of this state.
 * @param {any} view */
function downloads(view) {
  const plan = button("plan.toml", view.plan_toml);
  const config = view.config ? button("config.json", view.config) : null;
  const share = copies("Copy command line", "The command is copied", () => view.command);
  const link = copies("Copy link", "The address is copied", () => location.href);
  return ["Share ", share, link, " Download ", plan, config];
}

/** A button that copies a text, and says so. @param {string} name @param {string} done @param {() => string} text */
function copies(name, done, text) {
  const said = el("span", { role: "status" });
  const onclick = async () => {
    try {
      await navigator.clipboard.writeText(text());
      clear(said, ` ${done} `);
    } catch {
      clear(said, ` ${text()} `); // to be selected by hand
    }
    setTimeout(() => clear(said), 4000);
  };
  return el("span", {}, el("button", { type: "button", onclick }, name), said);
}

/** @param {string} name @param {string} text */
function button(name, text) {
  const onclick = () => {
    const address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    el("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  };
  return el("button", { type: "button", onclick }, name);
}
