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

/** Change the address without asking anybody to draw again.
 * @param {string} tab @param {Record<string, string>} params */
export function replace(tab, params) {
  history.replaceState(null, "", `#${written(tab, params)}`);
}

/** @param {string} text @param {string} mark */
function splitOnce(text, mark) {
  const place = text.indexOf(mark);
  return place < 0 ? [text] : [text.slice(0, place), text.slice(place + 1)];
}
