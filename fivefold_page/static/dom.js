// @ts-check
// Elements without markup: texts are always text, so that nothing a user wrote can run.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. Attributes that are functions listen (`onclick`), true ones stand alone,
 * and null, undefined or false ones are left out.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | number | null | undefined)} children
 * @returns {HTMLElement}
 */
export function el(tag, attributes = {}, ...children) {
  return /** @type {HTMLElement} */ (fill(document.createElement(tag), attributes, children));
}

/**
 * An SVG element; see `el`.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | number | null | undefined)} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  return /** @type {SVGElement} */ (fill(document.createElementNS(SVG, tag), attributes, children));
}

/**
 * Replace all that a node holds.
 * @template {Element} T
 * @param {T} node
 * @param {...(Node | string | number | null | undefined)} children
 * @returns {T}
 */
export function clear(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

/** @param {Element} node @param {Record<string, any>} attributes @param {any[]} children */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.replace(/^on/, ""), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...present(children));
  return node;
}

/** @param {any[]} children */
function present(children) {
  return children
    .filter((each) => each !== null && each !== undefined)
    .map((each) => (each instanceof Node ? each : String(each)));
}
