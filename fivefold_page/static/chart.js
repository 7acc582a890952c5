// @ts-check
// Lines and points by Plotly, in the colours and letters of the page; and pictures of our own, which
// are drawn again when their room changes.

import { clear, el } from "fivefold/dom.js";

/** @type {any} */
const Plotly = /** @type {any} */ (window).Plotly;
const CONFIG = { displayModeBar: false, responsive: false, scrollZoom: false, showTips: false };
/** A chart over steps: its reader may draw a frame around some of them, and click twice to see all.
 * A finger scrolls the page instead. */
const FINGER = matchMedia("(pointer: coarse)").matches;
export const ZOOM = { dragmode: FINGER ? false : "zoom", xaxis: { fixedrange: FINGER } };
/** @type {Map<HTMLElement, () => void>} */
const drawn = new Map();
/** @type {WeakMap<HTMLElement, {width: number, height: number}>} */
const sizes = new WeakMap();

/**
 * Draw, or draw again; only what changed is touched.
 * @param {HTMLElement} node
 * @param {any[]} traces of Plotly; no text that a user wrote, for Plotly reads tags
 * @param {any} layout of Plotly, as far as it differs from the page's
 * @param {string} label what somebody hears who cannot see it
 */
export function draw(node, traces, layout, label) {
  const again = () => Plotly.react(node, traces, themed(node, layout), CONFIG);
  keep(node, again, label);
  return again();
}

/**
 * Draw a picture of our own; its colours follow the theme by themselves.
 * @param {HTMLElement} node
 * @param {(size: {width: number, height: number}) => SVGElement} picture
 * @param {string} label what somebody hears who cannot see it
 * @param {(size: {width: number, height: number}, x: number, y: number) => string | undefined} tell
 *   what lies at a point
 */
export function paint(node, picture, label, tell) {
  const words = el("p", { class: "chart-words", hidden: true });
  const again = () => void clear(node, picture(sizeOf(node)), words);
  if (!drawn.has(node)) {
    node.addEventListener("pointermove", (event) => point(node, event));
    node.addEventListener("pointerleave", () => tells.get(node)?.words.setAttribute("hidden", ""));
  }
  tells.set(node, { tell, words });
  keep(node, again, label);
  again();
}

/** @type {WeakMap<HTMLElement, {tell: (size: any, x: number, y: number) => string | undefined, words: HTMLElement}>} */
const tells = new WeakMap();

/** Say what lies under the pointer. @param {HTMLElement} node @param {PointerEvent} event */
function point(node, event) {
  const { tell, words } = /** @type {any} */ (tells.get(node));
  const { left, top } = node.getBoundingClientRect();
  const [x, y] = [event.clientX - left, event.clientY - top];
  const size = sizeOf(node);
  const said = tell(size, x, y);
  words.hidden = !said;
  clear(words, said ?? "");
  words.style.top = `${y + 14}px`;
  words.style[x > size.width / 2 ? "right" : "left"] = `${x > size.width / 2 ? size.width - x : x}px`;
  words.style[x > size.width / 2 ? "left" : "right"] = "auto";
}

/** @param {HTMLElement} node @param {() => void} again @param {string} label */
function keep(node, again, label) {
  if (!drawn.has(node)) {
    node.classList.add("chart");
    watch.observe(node);
  }
  drawn.set(node, again);
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
}

/** A text that a user wrote, for Plotly, which reads tags. @param {string} text */
export const plain = (text) => text.replace(/[<>&]/g, (mark) => ({ "<": "‹", ">": "›" })[mark] ?? "+").trim();

/** How large a chart is; measured once and when that changes, for measuring makes the browser lay out
 * everything that was drawn before. @param {HTMLElement} node */
export function sizeOf(node) {
  const known = sizes.get(node) ?? { width: node.clientWidth || 480, height: node.clientHeight || 280 };
  if (node.isConnected) sizes.set(node, known);
  return known;
}

/** @param {HTMLElement} node @param {any} layout */
function themed(node, layout) {
  const { ink, line } = inks();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, fixedrange: true };
  const asked = Object.fromEntries(Object.entries(layout).filter(([name]) => !/^[xy]axis/.test(name)));
  const axes = ["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis\d/.test(name))];
  return {
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 12, t: 8, b: 36 },
    hoverlabel: { align: "left" },
    legend: { orientation: "h", y: -0.18, itemclick: false, itemdoubleclick: false },
    ...sizeOf(node),
    ...asked,
    ...Object.fromEntries(axes.map((name) => [name, { ...axis, ...layout[name] }])),
  };
}

/** @type {{ink: string, line: string} | undefined} */
let known;

/** Colours of the page; asked once a theme, for the question is dear. */
function inks() {
  const style = known ? null : getComputedStyle(document.documentElement);
  known ??= {
    ink: style?.getPropertyValue("--ink").trim() || "#222",
    line: style?.getPropertyValue("--line").trim() || "#ddd",
  };
  return known;
}

/** Draw everything again: the theme has changed. */
export function redraw() {
  known = undefined;
  for (const [node, again] of drawn) node.isConnected ? again() : drawn.delete(node);
}

const watch = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const node = /** @type {any} */ (target);
    const own = tells.has(node);
    const { width, height } = (own ? sizes.get(node) : node._fullLayout) ?? {};
    if (!node.isConnected || !node.clientWidth) continue;
    sizes.set(node, { width: node.clientWidth, height: node.clientHeight });
    // A picture of our own has its height from the style sheet, or sets it.
    if (node.clientWidth !== width || (!own && node.clientHeight !== height)) drawn.get(node)?.();
  }
});
