// @ts-check
// The address holds the state: `#explore?model=tiny&tp=2`, a tab and its parameters.

/** What the address says. */
export const read = () => parsed(location.hash.slice(1));

/** The text behind `#`, read. @param {string} text @returns {{tab: string, params: Record<string, string>}} */
export function parsed(text) {
  const [tab, query = ""] = splitOnce(text, "?");
  return { tab, params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The text behind `#`, written. @param {string} tab @param {Record<string, string>} params */
export function written(tab, params) {
  const query = new URLSearchParams(params).toString();
  return query ? `${tab}?${query}` : tab;
}

/** Heard on the window when the address was changed by `replace`. */
export const MOVED = "fivefold:moved";

/** Change the address without asking anybody to draw again.
 * @param {string} tab @param {Record<string, string>} params */
export function replace(tab, params) {
  history.replaceState(null, "", `#${written(tab, params)}`);
  dispatchEvent(new Event(MOVED));
}

/** @param {string} text @param {string} mark */
function splitOnce(text, mark) {
  const place = text.indexOf(mark);
  return place < 0 ? [text] : [text.slice(0, place), text.slice(place + 1)];
}
