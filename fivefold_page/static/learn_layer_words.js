// @ts-check
// What the picture of a layer says in words: collectives, weights, the legend.

import { el } from "fivefold/dom.js";
import { bytes, count } from "fivefold/format.js";

/** @param {any} wire */
const kindOf = (wire) => (wire.kind === "send" ? "send, receive" : wire.kind.replaceAll("_", "-"));

/** The largest collective of a station in one direction, and how many there are beside it.
 * @param {any[]} wires @param {string} way */
export function wireText(wires, way) {
  const most = wires.reduce((one, other) => (other.bytes > one.bytes ? other : one));
  const times = most.count > 1 ? `${most.count} × ` : "";
  const more = wires.length > 1 ? ` +${wires.length - 1}` : "";
  const arrow = way === "forward" ? "→" : "←";
  return `${arrow} ${times}${kindOf(most)} ${bytes(most.bytes)} · ${most.group} ${most.who} · ${most.tier}${more}`;
}

/** All that the station in focus moves and holds.
 * @param {any} view @param {any} frame */
export function card(view, frame) {
  const station = view.stations[frame.station];
  if (!station) return [el("p", { class: "hint" }, view.layout)];
  const way = frame.back ? "backward" : "forward";
  const wires = station[way].filter((/** @type {any} */ wire) => wire.kind !== "recv");
  const pair = station.pair ? `forward ${station.pair[0]} ↔ backward ${station.pair[1]}` : "";
  const lines = wires.map((/** @type {any} */ wire) => el("li", {}, sentence(wire)));
  const weights = station.weights.map((/** @type {any} */ each) => el("li", {}, weightText(each)));
  const list = el("ul", {}, ...lines, ...weights);
  list.style.margin = "0.2rem 0";
  return [el("strong", {}, station.title), pair ? ` ${pair}` : "", list];
}

/** @param {any} wire */
function sentence(wire) {
  const times = wire.count > 1 ? `${wire.count} × ` : "";
  return `${times}${kindOf(wire)} of ${bytes(wire.bytes)} among ${wire.group} ${wire.who} over ${wire.tier}: ${wire.what}`;
}

/** @param {any} weight */
function weightText(weight) {
  const sizes = (/** @type {number[]} */ each) => `[${each.map(count).join(", ")}]`;
  const same = String(weight.whole) === String(weight.local);
  return `${weight.name} ${sizes(weight.whole)}${same ? ", whole on every rank" : `: here ${sizes(weight.local)}, cut by ${weight.cut}`}`;
}

/** @param {any} view */
export function legend(view) {
  const symbols = view.legend.map((/** @type {any} */ row) => `${row.symbol} = ${row.what} (${count(row.size)})`);
  const arrows = "→ forward, ← backward, with what rank 0 gives; +1: one more collective";
  return `Little squares: tokens down, width or heads across; filled is what rank 0 has. ${arrows}. ${symbols.join(", ")}`;
}
