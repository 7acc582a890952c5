// @ts-check
// Words with their definitions: on hover, on focus, on a tap; and all of them as a list.

import { clear, el } from "fivefold/dom.js";
import { site } from "fivefold/ask.js";

const GAP = 6; // pixels between a word and its definition
const LINGER_MS = 200; // so that the pointer can move onto the definition
let hiding = 0;
let numbered = 0;

const tip = el("div", { class: "tip", role: "tooltip", onmouseenter: stay, onmouseleave: leave });
/** @type {HTMLElement | null} */
let shown = null;

addEventListener("keydown", (event) => void (event.key === "Escape" && hide()));
addEventListener("hashchange", hide);
addEventListener("resize", hide);

/** A word that says what it means. @param {string} text @param {string} key of the glossary */
export function term(text, key) {
  const node = el(
    "span",
    { class: "term", role: "button", tabindex: "0", "data-term": key, "aria-expanded": "false", onmouseenter: show, onfocus: show, onclick: show, onmouseleave: leave, onblur: hide },
    text,
  );
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    show();
  });
  function show() {
    stay();
    if (shown === node) return;
    hide();
    shown = node;
    tip.id = `tip-${++numbered}`;
    clear(tip, el("b", {}, key), ` ${site.glossary[key].replaceAll("`", "")}`);
    document.body.append(tip);
    node.setAttribute("aria-describedby", tip.id);
    node.setAttribute("aria-expanded", "true");
    put(node);
  }
  return node;
}

/** Under the word, or above it, and always inside of the window. @param {HTMLElement} node */
function put(node) {
  const word = node.getClientRects()[0];
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(GAP, Math.min(word.left, document.documentElement.clientWidth - width - GAP));
  const under = word.bottom + GAP;
  const top = under + height <= innerHeight ? under : Math.max(GAP, word.top - height - GAP);
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

function stay() {
  clearTimeout(hiding);
}

function leave() {
  stay();
  hiding = window.setTimeout(() => shown !== document.activeElement && hide(), LINGER_MS);
}

function hide() {
  stay();
  shown?.setAttribute("aria-expanded", "false");
  shown?.removeAttribute("aria-describedby");
  shown = null;
  tip.remove();
}

/** All words, folded. */
export function list() {
  const names = Object.keys(site.glossary).sort((one, other) => one.localeCompare(other, "en"));
  const rows = names.flatMap((name) => [el("dt", {}, name), el("dd", {}, site.glossary[name].replaceAll("`", ""))]);
  return el("details", { class: "words" }, el("summary", {}, "All words of the glossary"), el("dl", {}, ...rows));
}
