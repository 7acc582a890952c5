// @ts-check
// A frame round a picture: its title, what it says when it cannot be drawn, and its text twin.

import { clear, el } from "fivefold/dom.js";
import { MOVED, read, written } from "fivefold/address.js";
import { site } from "fivefold/ask.js";

/**
 * @param {string} name as `--panel` knows it
 * @param {string} title
 * @param {string} [hint] one sentence under the title
 * @returns {{root: HTMLElement, body: HTMLElement, say: (text: string) => void, fail: (text: string) => void}}
 */
export function panel(name, title, hint) {
  const body = el("div", { class: "body" });
  const problem = el("p", { class: "problem", role: "status" });
  const twin = el("details", { class: "twin" }, el("summary", {}, "in a terminal"));
  const command = el("code");
  twin.append(command);
  const told = () => void (twin.hasAttribute("open") && twin.isConnected && clear(command, commandFor(name)));
  twin.addEventListener("toggle", told);
  addEventListener(MOVED, told);
  const root = el(
    "section",
    { class: `panel panel-${name.replace("/", "-")}`, id: `panel-${name}`, "aria-labelledby": `title-${name}` },
    el("h2", { id: `title-${name}` }, title),
    hint ? el("p", { class: "hint" }, hint) : null,
    problem,
    body,
    twin,
  );
  const say = (/** @type {string} */ text) => void clear(problem, text);
  /** What was drawn belongs to something else: it is not shown. @param {string} text */
  const fail = (text) => ((body.hidden = true), say(text));
  return { root, body, say, fail };
}

/** The command that prints the same in a terminal. @param {string} name */
export function commandFor(name) {
  const { tab, params } = read();
  if (tab === "run") {
    const at = params.run && name !== "runs" ? ` --set 'at=run?run=${Number(params.run)}'` : "";
    return `fivefold observe ${site.run}${at} --text --panel ${name}`;
  }
  return `fivefold observe --set 'at=${written(tab, params)}' --text --panel ${name}`;
}
