// @ts-check
// Drawing at the width that there is: letters keep their size on a phone, the picture is laid anew.

import { clear, svg } from "fivefold/dom.js";

const NARROWEST = 280;

/**
 * An SVG that is painted again when its place gets wider or narrower.
 * @param {HTMLElement} place
 * @param {(width: number) => {height: number, label: string, parts: SVGElement[]}} paint
 * @returns {() => void} paints again
 */
export function canvas(place, paint) {
  const sheet = svg("svg", { role: "img" });
  sheet.style.display = "block";
  place.append(sheet);
  let painted = 0;
  const again = () => {
    const width = Math.max(NARROWEST, Math.floor(place.clientWidth));
    const { height, label, parts } = paint(width);
    painted = width;
    for (const [name, value] of Object.entries({ width, height, "aria-label": label }))
      sheet.setAttribute(name, String(value));
    clear(sheet, ...parts);
  };
  new ResizeObserver(() => {
    if (place.clientWidth && Math.abs(place.clientWidth - painted) > 1) again();
  }).observe(place);
  return again;
}

/**
 * Letters; the page's own style would win over attributes, so that these are styles too.
 * @param {number} x @param {number} y the base line
 * @param {string} content
 * @param {{size?: number, bold?: boolean, anchor?: string, fill?: string, opacity?: number}} [look]
 */
export function letters(x, y, content, { size = 11, bold = false, anchor = "start", fill, opacity } = {}) {
  const node = svg("text", { x, y, "text-anchor": anchor, opacity }, content);
  node.style.fontSize = `${size}px`;
  if (bold) node.style.fontWeight = "600";
  if (fill) node.style.fill = fill;
  return node;
}

/** @param {number} x @param {number} y @param {number} width @param {number} height
 * @param {Record<string, any>} [look] */
export const box = (x, y, width, height, look = {}) => svg("rect", { x, y, width, height, ...look });

/** Many rectangles as one path. @param {number[][]} boxes x, y, width, height */
export const boxes = (boxes) => boxes.map(([x, y, w, h]) => `M${x} ${y}h${w}v${h}h${-w}z`).join("");

/** A line with a head, from one point to another.
 * @param {number[]} from @param {number[]} to @param {string} colour @param {number} [bend] */
export function arrow([x1, y1], [x2, y2], colour, bend = 0) {
  const [mx, my] = [(x1 + x2) / 2, (y1 + y2) / 2 - bend];
  const turn = Math.atan2(y2 - my, x2 - mx);
  const side = (/** @type {number} */ off) => `${x2 - 7 * Math.cos(turn + off)} ${y2 - 7 * Math.sin(turn + off)}`;
  const head = `M${side(0.45)}L${x2} ${y2}L${side(-0.45)}`;
  const line = bend ? `M${x1} ${y1}Q${mx} ${my - bend / 2} ${x2} ${y2}` : `M${x1} ${y1}L${x2} ${y2}`;
  return svg("path", { d: line + head, fill: "none", stroke: colour, "stroke-width": 2, "stroke-linecap": "round" });
}
