// @ts-check
// A chapter of Learn round its panel: prose, analogy, commands, and the way on; and the contents.

import { clear, el } from "fivefold/dom.js";
import { site } from "fivefold/ask.js";
import { list as glossary, term } from "fivefold/glossary.js";

const WIDE = matchMedia("(min-width: 761px)");
const SHOWN_MS = 1500;

/** The address of a chapter. @param {string} name */
const address = (name) => `#learn?chapter=${name}`;

/** All chapters, in order; on a narrow screen folded.
 * @returns {{root: HTMLElement, mark: (name: string | undefined) => void}} */
export function contents() {
  const path = /** @type {{name: string, question: string}[]} */ (site.chapters);
  const links = path.map((each) => el("a", { href: address(each.name), "data-chapter": each.name }, each.question));
  const title = el("summary", {}, "Chapters");
  const fold = el("details", {}, title, el("ol", {}, ...links.map((link) => el("li", {}, link))));
  const fit = () => fold.toggleAttribute("open", WIDE.matches);
  WIDE.addEventListener("change", fit);
  fit();
  return {
    root: el("nav", { class: "lessons", "aria-label": "Chapters" }, fold),
    mark(name) {
      const place = path.findIndex((each) => each.name === name);
      clear(title, place < 0 ? "Chapters" : `Chapters: ${place + 1} of ${path.length}`);
      links.forEach((link, at) => {
        if (at === place) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
        link.toggleAttribute("data-read", at < place);
      });
      if (!WIDE.matches) fold.removeAttribute("open");
    },
  };
}

/** @param {any} view as `chapters.view` of Python answers @param {HTMLElement} panel */
export function chapter(view, panel) {
  const title = "chapter-title";
  return el(
    "article",
    { class: "chapter", "data-chapter": view.name, "aria-labelledby": title },
    el("p", { class: "progress" }, `Chapter ${view.number} of ${view.total}`, along(view)),
    el("h2", { id: title, tabindex: "-1" }, view.question),
    el(
      "div",
      { class: "explained" },
      el("div", { class: "prose" }, ...view.paragraphs.map((/** @type {any[]} */ each) => el("p", {}, ...words(each)))),
      el("aside", { class: "kitchen" }, el("h3", {}, "In a kitchen"), el("p", {}, ...words(view.analogy))),
    ),
    panel,
    el("section", { class: "real" }, el("h3", {}, "Do it for real"), el("p", { class: "hint" }, "In a terminal, on any laptop; no GPU is needed."), ...view.commands.map(command)),
    ways(view),
    glossary(),
  );
}

/** How far along the path. @param {any} view */
function along(view) {
  const bar = el("span", { style: `width:${(100 * view.number) / view.total}%` });
  return el("span", { class: "along", "aria-hidden": "true" }, bar);
}

/** @param {{text: string, term?: string, code?: boolean}[]} parts */
function words(parts) {
  return parts.map((each) => {
    if (each.term) return term(each.text, each.term);
    return each.code ? el("code", {}, each.text) : each.text;
  });
}

/** A command, and a button that copies it. @param {string} text */
function command(text) {
  const code = el("code", {}, text);
  const button = el("button", { type: "button", "aria-label": `Copy ${text}`, onclick: copy }, "copy");
  async function copy() {
    clear(button, (await copied(text, code)) ? "copied" : "press Ctrl-C");
    setTimeout(() => clear(button, "copy"), SHOWN_MS);
  }
  return el("div", { class: "command" }, code, button);
}

/** Whether it is on the clipboard; where a page may not write to it, the text is selected instead.
 * @param {string} text @param {HTMLElement} node */
async function copied(text, node) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(node);
    return false;
  }
}

/** @param {any} view */
function ways(view) {
  const asked = (/** @type {string} */ name) => site.chapters.find((/** @type {any} */ each) => each.name === name).question;
  const way = (/** @type {string | null} */ name, /** @type {string} */ rel, /** @type {string} */ word) =>
    name ? el("a", { class: rel, rel, href: address(name) }, el("span", {}, word), asked(name)) : null;
  const on = view.after ? way(view.after, "next", "Next") : el("a", { class: "next", href: "#explore" }, el("span", {}, "Next"), "Explore a job of your own");
  return el("nav", { class: "ways", "aria-label": "Previous and next chapter" }, way(view.before, "prev", "Previous"), on);
}
