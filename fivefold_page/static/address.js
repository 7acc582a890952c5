// @ts-check
// The address holds the state: `#explore?model=tiny&tp=2`, a tab and its parameters.

/** @returns {{tab: string, params: Record<string, string>}} */
export function read() {
  const [tab, query = ""] = splitOnce(location.hash.slice(1), "?");
  return { tab, params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The text behind `#`. @param {string} tab @param {Record<string, string>} params */
export function written(tab, params) {
  const query = new URLSearchParams(params).toString();
  return query ? `${tab}?${query}` : tab;
}

/** Parameters with some changed; "" takes one away. What is changed is no longer derived: `typed` of
 * state.py. @param {Record<string, string>} params @param {Record<string, string>} set */
export function merged(params, set) {
  const derived = (params.derived ?? "").split(" ").filter((name) => !(name in set)).join(" ");
  return Object.fromEntries(Object.entries({ ...params, derived, ...set }).filter(([, text]) => text !== ""));
}

const PAUSE = 1000; // milliseconds
let changed = 0;
// An address that was come to is written out in its own place: a way back over it would end there.
let arrived = true;
addEventListener("hashchange", () => void (arrived = true));

/** Heard on the window when the address was changed by `replace`. */
export const MOVED = "fivefold:moved";

/** Change the address without asking anybody to draw again. The browser's way back leads over what
 * was left alone for a while, not over each value that a slider passed or each frame of a lesson.
 * @param {string} tab @param {Record<string, string>} params */
export function replace(tab, params) {
  const address = `#${written(tab, params)}`;
  const rested = !arrived && performance.now() - changed > PAUSE;
  arrived = false;
  if (address === location.hash) return;
  changed = performance.now();
  if (rested && frameless(address) !== frameless(location.hash)) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  dispatchEvent(new Event(MOVED));
}

/** @param {string} address */
const frameless = (address) => address.replace(/[?&]frame=\d+/, "");

/** @param {string} text @param {string} mark */
function splitOnce(text, mark) {
  const place = text.indexOf(mark);
  return place < 0 ? [text] : [text.slice(0, place), text.slice(place + 1)];
}
