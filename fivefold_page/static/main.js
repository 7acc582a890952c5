// @ts-check
// Tabs, theme and address; each tab is a module that is loaded when it is first shown.

import { clear, el } from "fivefold/dom.js";
import { read, replace } from "fivefold/address.js";
import { site } from "fivefold/ask.js";
import { redraw } from "fivefold/chart.js";

/** @typedef {{show: (params: Record<string, string>) => void}} Tab */
/** @type {Record<string, {title: string, load: () => Promise<any>}>} */
const TABS = {
  explore: { title: "Explore", load: () => import("fivefold/explore.js") },
  learn: { title: "Learn", load: () => import("fivefold/learn.js") },
  ...(site.run ? { run: { title: "Run", load: () => import("fivefold/run.js") } } : {}),
};
const main = /** @type {HTMLElement} */ (document.getElementById("main"));
/** @type {Record<string, Promise<{root: HTMLElement, tab: Tab}>>} */
const made = {};
/** Where each tab was left, or begins. @type {Record<string, Record<string, string>>} */
const last = { explore: site.job };
let turns = 0;

/** Show what the address says. */
async function follow() {
  if (!Object.hasOwn(TABS, read().tab)) history.replaceState(null, "", `#${site.start}`);
  const { tab: name, params } = read();
  const number = ++turns;
  last[name] = params;
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each.getAttribute("data-tab") === name;
    each.setAttribute("aria-selected", String(chosen));
    each.setAttribute("tabindex", chosen ? "0" : "-1");
  }
  made[name] ??= make(name);
  const { root, tab } = await made[name];
  if (number !== turns) return; // another tab was chosen meanwhile
  if (main.firstChild !== root) clear(main, root);
  tab.show(params);
}

/** @param {string} name */
async function make(name) {
  const root = el("div", { class: `tab tab-${name}`, role: "tabpanel", "aria-label": TABS[name].title });
  const module = await TABS[name].load();
  /** @param {Record<string, string>} params */
  const remember = (params) => {
    last[name] = params;
    if (read().tab === name) replace(name, params);
  };
  return { root, tab: await module.create(root, remember) };
}

/** @param {string} name */
function open(name) {
  const query = new URLSearchParams(last[name] ?? {}).toString();
  location.hash = query ? `${name}?${query}` : name;
}

/** @param {KeyboardEvent} event */
function turn(event) {
  const names = Object.keys(TABS);
  const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (!step) return;
  const here = names.indexOf(/** @type {HTMLElement} */ (event.target).dataset.tab ?? "");
  const next = names[(here + step + names.length) % names.length];
  open(next);
  document.querySelector(`[data-tab=${next}]`)?.["focus"]();
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement;
  const now = root.dataset.theme ?? (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  redraw();
}

for (const [name, { title }] of Object.entries(TABS)) {
  const onclick = () => open(name);
  const attributes = { type: "button", role: "tab", "data-tab": name, onclick, onkeydown: turn };
  document.getElementById("tabs")?.append(el("button", attributes, title));
}
// The address holds the state, so that the link to the pictures must not become the address.
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("theme")?.addEventListener("click", theme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("hashchange", follow);
void follow();
