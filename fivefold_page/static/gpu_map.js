// @ts-check
// The GPU map: every rank on its node, coloured by its pipeline stage, and the groups of the one
// that is pointed at, each with its own colour and its own mark.

import { colourOf, shadeOf } from "fivefold/colours.js";
import { clear, el, svg } from "fivefold/dom.js";
import { count } from "fivefold/format.js";
import { areaOf, gridOf, groupOf, placeOf, rankAt, runsOf } from "fivefold/gpu_map_grid.js";

const NUMBERED = 19; // pixels of a cell that holds a rank's number
const FRAMED = 8;
const LABELS = 42;
const PAD = 8; // for frames round the outermost GPUs
const MANY = 3000; // marks; above, cells are filled instead
// How an axis is marked on a GPU; the colours come from the page's own.
const SHAPES = /** @type {Record<string, string>} */ ({
  dp: "fill",
  tp: "frame",
  ep: "ring",
  cp: "dot",
  pp: "cross",
  etp: "corner",
  edp: "plus",
  fsdp: "bar",
});
const DERIVED = ["etp", "edp", "fsdp"]; // of the ranks that other axes number
const STROKED = ["frame", "ring", "cross", "plus"];

/** The panel of Explore. @param {HTMLElement} body */
export function create(body) {
  const map = new GpuMap(body);
  return { update: (/** @type {any} */ view) => map.show(view) };
}

class GpuMap {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.view = /** @type {any} */ (null);
    this.pinned = 0;
    this.lit = -1;
    this.title = el("p", { style: "margin:0 0 .3rem;font-weight:600" });
    this.box = el("div", { class: "gpu-map", tabindex: "0", role: "group", style: "outline-offset:-2px" });
    this.words = el("p", { class: "gpu-map-words", "aria-live": "polite", style: "margin:.4rem 0 .2rem" });
    this.table = el("table", { class: "gpu-map-groups", style: "font-size:.85rem" });
    clear(host, this.title, this.box, this.words, this.table);
    this.width = host.clientWidth || 640;
    new ResizeObserver(([entry]) => this.resize(entry.contentRect.width)).observe(host);
    this.box.addEventListener("pointermove", (event) => this.light(this.rankUnder(event) ?? this.pinned));
    this.box.addEventListener("pointerleave", () => this.light(this.pinned));
    this.box.addEventListener("pointerdown", (event) => this.pin(this.rankUnder(event) ?? this.pinned));
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  /** @param {number} width */
  resize(width) {
    if (Math.abs(width - this.width) < 1 || width < 1) return;
    this.width = width;
    if (this.view) this.render();
  }

  /** @param {any} view what `map_view` of explore_panels.py makes */
  show(view) {
    this.view = view;
    if (this.pinned >= view.world) this.pinned = 0;
    clear(this.title, view.headline);
    const how = "Arrow keys go from rank to rank and light up the groups of each.";
    this.box.setAttribute("aria-label", `Map of ${view.headline}. ${how}`);
    this.rows = view.axes.map((/** @type {any} */ axis) => this.line(axis));
    clear(this.table, el("tbody", {}, ...this.rows.map((/** @type {any} */ row) => row.root)));
    this.render();
  }

  render() {
    const most = Math.max(360, Math.min(520, 1.5 * this.width));
    const { view } = this;
    const labelled = gridOf(view, this.width - LABELS - PAD, most);
    this.left = view.stages.length > 1 && bands(view, labelled) ? LABELS : PAD;
    this.grid = this.left === LABELS ? labelled : gridOf(view, this.width - 2 * PAD, most);
    const { grid } = this;
    const size = { width: Math.ceil(this.left + grid.width + PAD), height: Math.ceil(grid.height + 2 * PAD) };
    this.under = svg("g");
    this.over = svg("g");
    const parts = [...this.stages(), this.under, ...this.lines(), this.over, ...this.numbers()];
    const inside = svg("g", { transform: `translate(${this.left} ${PAD})` }, ...parts);
    const style = "display:block;max-width:100%;touch-action:pan-y;cursor:crosshair";
    clear(this.box, svg("svg", { ...size, style, role: "presentation" }, ...this.labels(), inside));
    this.lit = -1;
    this.light(this.pinned);
  }

  /** A path for each stage: the runs of consecutive ranks that hold it. */
  stages() {
    const { run, stages, world } = this.view;
    const paths = stages.map(() => /** @type {string[]} */ ([]));
    for (let first = 0; first < world; first += run) {
      const number = (first / run) % stages.length;
      for (const area of areaOf(this.grid, first, Math.min(run, world - first))) paths[number].push(rectangle(area));
    }
    return paths.map((/** @type {string[]} */ d, /** @type {number} */ number) =>
      svg("path", { d: d.join(""), fill: shadeOf(number, stages.length), "fill-opacity": number % 2 ? 0.22 : 0.4 }),
    );
  }

  /** Lines of paper between GPUs and, wider, between nodes; frames round nodes that share links. */
  lines() {
    const { grid } = this;
    const [thin, wide] = [/** @type {string[]} */ ([]), /** @type {string[]} */ ([])];
    const middle = (/** @type {number} */ end) => end - grid.gap / 2;
    const blockRows = Math.round(grid.height / grid.blockHigh);
    for (let each = 0; each < grid.blockColumns * grid.columns; each += 1) {
      const x = Math.floor(each / grid.columns) * grid.blockWide + (each % grid.columns) * grid.nodeWide;
      for (let i = 1; i < grid.across; i += 1) thin.push(`M${short(x + i * grid.cell)} 0V${short(grid.height)}`);
      wide.push(`M${short(middle(x + grid.nodeWide))} 0V${short(grid.height)}`);
    }
    const rows = Math.ceil(grid.block / grid.columns);
    for (let each = 0; each < blockRows * rows; each += 1) {
      const y = Math.floor(each / rows) * grid.blockHigh + (each % rows) * grid.nodeHigh;
      for (let i = 1; i < grid.down; i += 1) thin.push(`M0 ${short(y + i * grid.cell)}H${short(grid.width)}`);
      wide.push(`M0 ${short(middle(y + grid.nodeHigh))}H${short(grid.width)}`);
    }
    const line = { stroke: "var(--paper)", fill: "none" };
    return [
      grid.cell > 2.5 ? svg("path", { d: thin.join(""), ...line, "stroke-width": Math.max(0.5, 0.09 * grid.cell) }) : null,
      svg("path", { d: wide.join(""), ...line, "stroke-width": grid.gap }),
      this.view.domain && (grid.framed || grid.cell > FRAMED)
        ? svg("path", { d: this.frames(), fill: "none", stroke: "var(--muted)", "stroke-opacity": 0.7 })
        : null,
    ].flatMap((each) => each ?? []);
  }

  /** Round the GPUs that share the fastest links. */
  frames() {
    const { size } = this.view.domain;
    const parts = [];
    for (let first = 0; first < this.view.world; first += size) {
      const areas = areaOf(this.grid, first, Math.min(size, this.view.world - first));
      parts.push(...areas.map((area) => rectangle(grown(area, 0.3 * this.grid.gap))));
    }
    return parts.join("");
  }

  /** The coord of a band, where bands are whole rows. */
  labels() {
    if (this.left !== LABELS) return [];
    const { run, stages, world } = this.view;
    const high = (run / this.grid.node / this.grid.columns) * this.grid.nodeHigh;
    const every = Math.ceil(12 / high);
    const found = [];
    for (let first = 0; first < world; first += run * every) {
      const y = PAD + placeOf(this.grid, first).y + Math.min(high, 60) / 2 + 3;
      const words = `pp ${(first / run) % stages.length}`;
      found.push(svg("text", { x: LABELS - 8, y, "text-anchor": "end", style: "fill:var(--muted)" }, words));
    }
    return found;
  }

  numbers() {
    const { grid } = this;
    if (grid.cell < NUMBERED) return [];
    const attributes = { "text-anchor": "middle", style: "font-size:9.5px;pointer-events:none" };
    const places = Array.from({ length: grid.world }, (_, rank) => {
      const { x, y } = placeOf(grid, rank);
      return { rank, x: x + grid.cell / 2, y: y + grid.cell / 2, wide: 6 * String(rank).length + 2 };
    });
    // On paper: whatever colour lights up a cell, its number can be read.
    const plates = places.map(({ x, y, wide }) => `M${short(x - wide / 2)} ${short(y - 5.5)}h${wide}v11h${-wide}z`);
    return [
      svg("path", { d: plates.join(""), fill: "var(--paper)", "pointer-events": "none" }),
      ...places.map(({ rank, x, y }) => svg("text", { x: short(x), y: short(y + 3.5), ...attributes }, rank)),
    ];
  }

  /** @param {PointerEvent} event */
  rankUnder(event) {
    const place = /** @type {Element} */ (this.box.firstChild).getBoundingClientRect();
    return rankAt(this.grid, event.clientX - place.left - this.left, event.clientY - place.top - PAD);
  }

  /** @param {number} rank */
  pin(rank) {
    this.pinned = rank;
    this.light(rank);
  }

  /** Show the groups of a rank. @param {number} rank */
  light(rank) {
    if (rank === this.lit || !this.view) return;
    this.lit = rank;
    const { view, grid } = this;
    const marks = new Map();
    view.axes.forEach((/** @type {any} */ axis, /** @type {number} */ place) => {
      const group = groupOf(view, axis, rank);
      this.rows[place].say(group, tierOf(view, group.ranks));
      if (axis.size > 1) marks.set(axis.axis, marksOf(grid, axis.axis, group.ranks));
    });
    // What covers nearly everything goes under the lines between GPUs, or these would be lost.
    const many = view.axes.filter((/** @type {any} */ axis) => axis.size > MANY && axis.axis !== "tp");
    const under = many.map((/** @type {any} */ axis) => axis.axis);
    clear(this.under, ...under.map((/** @type {string} */ axis) => marks.get(axis)));
    const order = Object.keys(SHAPES).filter((axis) => !under.includes(axis));
    clear(this.over, this.domain(rank), ...order.map((axis) => marks.get(axis)), own(grid, rank));
    const stage = Math.floor(rank / view.run) % view.stages.length;
    clear(this.words, `rank ${count(rank)} · node ${count(Math.floor(rank / view.node))} · ${view.stages[stage]}`);
    this.box.dataset.rank = String(rank);
  }

  /** A dashed frame round the GPUs that share the fastest links with a rank. @param {number} rank */
  domain(rank) {
    const { view, grid } = this;
    const size = view.domain?.size ?? view.node;
    if (size >= view.world) return null;
    const first = Math.floor(rank / size) * size;
    const areas = areaOf(grid, first, Math.min(size, view.world - first));
    const d = areas.map((area) => rectangle(grown(area, Math.max(1.5, grid.gap / 2)))).join("");
    return svg("path", { d, fill: "none", stroke: "var(--ink)", "stroke-width": 1, "stroke-dasharray": "3 2" });
  }

  /** A row of the table below: the mark, the axis, how many ranks and which, and their link. @param {any} axis */
  line(axis) {
    const ranks = el("td", { style: "overflow-wrap:anywhere" });
    const tier = el("td");
    const size = `${count(axis.size)} rank${axis.size > 1 ? "s" : ""}`;
    const about = [el("td", {}, swatch(axis.axis)), el("th", {}, axis.axis), el("td", { style: "white-space:nowrap" }, size)];
    const coord = el("td", { style: "white-space:nowrap" });
    const root = el("tr", { "data-axis": axis.axis }, ...about, coord, ranks, tier);
    if (axis.size === 1) root.setAttribute("style", "color:var(--muted)");
    const say = (/** @type {{coord: number, ranks: number[]}} */ group, /** @type {string} */ own) => {
      if (axis.size === 1) return;
      coord.textContent = `coord ${count(group.coord)}`;
      ranks.textContent = listed(group.ranks);
      tier.textContent = own + (axis.tier === own ? "" : ` (others: ${axis.tier})`);
    };
    return { root, say };
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const { grid, pinned } = this;
    const { x, y } = placeOf(grid, pinned);
    const above = (/** @type {number} */ step) => {
      for (let far = 1; far < 6; far += 1) {
        const found = rankAt(grid, x + grid.cell / 2, y + grid.cell / 2 + step * far * grid.cell);
        if (found !== null && found !== pinned) return found;
      }
      return pinned;
    };
    const moves = /** @type {Record<string, () => number>} */ ({
      ArrowRight: () => Math.min(grid.world - 1, pinned + 1),
      ArrowLeft: () => Math.max(0, pinned - 1),
      ArrowDown: () => above(1),
      ArrowUp: () => above(-1),
      Home: () => 0,
      End: () => grid.world - 1,
    });
    if (event.ctrlKey || event.metaKey || event.altKey || !moves[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    this.pin(moves[event.key]());
  }
}

/** Whether every run of a stage is whole rows of nodes. @param {any} view @param {any} grid */
function bands(view, grid) {
  const nodes = view.run / view.node;
  return grid.block * grid.node >= view.world && nodes % grid.columns === 0;
}

/** The innermost tier with one domain that holds all ranks. @param {any} view @param {number[]} ranks */
function tierOf(view, ranks) {
  const [low, high] = [ranks[0], ranks[ranks.length - 1]];
  const holds = (/** @type {any} */ tier) =>
    tier.size === null || Math.floor(low / tier.size) === Math.floor(high / tier.size);
  return view.tiers.find(holds)?.name ?? "";
}

/** All GPUs of a group in one path. @param {any} grid @param {string} axis @param {number[]} ranks */
function marksOf(grid, axis, ranks) {
  const shape = ranks.length > MANY && axis !== "tp" ? "fill" : SHAPES[axis];
  const { cell } = grid;
  const one = (/** @type {number} */ rank) => {
    const { x, y } = placeOf(grid, rank);
    return drawn(shape, x + cell / 2, y + cell / 2, cell);
  };
  const merged = shape === "frame" || ranks.length > MANY;
  const d = merged
    ? runsOf(ranks).flatMap(([first, length]) => areaOf(grid, first, length).map(rectangle))
    : ranks.map(one);
  const path = d.join("");
  const wide = STROKED.includes(shape) ? strokeOf(cell) + 2 : 1.5;
  const halo = svg("path", { d: path, fill: "none", stroke: "var(--paper)", "stroke-width": wide, "stroke-opacity": 0.85 });
  return svg("g", {}, halo, svg("path", { d: path, ...paint(shape, axis, cell) }));
}

/** @param {string} shape @param {string} axis @param {number} cell */
function paint(shape, axis, cell) {
  const colour = DERIVED.includes(axis) ? "var(--ink)" : colourOf(axis);
  if (!STROKED.includes(shape)) return { fill: colour, "fill-opacity": shape === "fill" ? 0.75 : 1 };
  return { fill: "none", stroke: colour, "stroke-width": strokeOf(cell) };
}

/** @param {number} cell */
const strokeOf = (cell) => Math.max(2, Math.min(2.8, cell / 6));

/** One mark with its middle at (x, y). @param {string} shape @param {number} x @param {number} y @param {number} cell */
function drawn(shape, x, y, cell) {
  const half = Math.max(2, 0.42 * cell);
  const out = Math.max(3.6, 0.34 * cell);
  if (shape === "fill" || shape === "frame") return rectangle({ x: x - half, y: y - half, wide: 2 * half, high: 2 * half });
  if (shape === "dot") return circle(x, y, Math.max(2.2, 0.2 * cell));
  if (shape === "ring") return circle(x, y, Math.max(3.2, 0.3 * cell));
  if (shape === "cross") {
    return `M${short(x - out)} ${short(y - out)}l${short(2 * out)} ${short(2 * out)}m0 ${short(-2 * out)}l${short(-2 * out)} ${short(2 * out)}`;
  }
  if (shape === "plus") return `M${short(x - out)} ${short(y)}h${short(2 * out)}M${short(x)} ${short(y - out)}v${short(2 * out)}`;
  if (shape === "corner") return `M${short(x - half)} ${short(y - half)}h${short(half)}l${short(-half)} ${short(half)}z`;
  return rectangle({ x: x - half, y: y + half * 0.45, wide: 2 * half, high: Math.max(1.5, half * 0.5) });
}

/** The rank itself. @param {any} grid @param {number} rank */
function own(grid, rank) {
  const { x, y } = placeOf(grid, rank);
  const half = Math.max(5, grid.cell / 2 + 1);
  const area = { x: x + grid.cell / 2 - half, y: y + grid.cell / 2 - half, wide: 2 * half, high: 2 * half };
  return svg("path", { class: "own", d: rectangle(area), fill: "none", stroke: "var(--ink)", "stroke-width": 2.5 });
}

/** @param {string} axis */
function swatch(axis) {
  const d = drawn(SHAPES[axis], 8, 8, 13);
  return svg("svg", { width: 16, height: 16, "aria-hidden": "true" }, svg("path", { d, ...paint(SHAPES[axis], axis, 13) }));
}

/** Ranks in few words. @param {number[]} ranks */
function listed(ranks) {
  const last = ranks[ranks.length - 1];
  if (ranks.length > 2 && last - ranks[0] === ranks.length - 1) return `${count(ranks[0])}–${count(last)}`;
  if (ranks.length <= 4) return ranks.map(count).join(", ");
  return `${ranks.slice(0, 3).map(count).join(", ")} … ${count(last)}`;
}

/** @param {{x: number, y: number, wide: number, high: number}} area @param {number} by */
const grown = ({ x, y, wide, high }, by) => ({ x: x - by, y: y - by, wide: wide + 2 * by, high: high + 2 * by });

/** @param {{x: number, y: number, wide: number, high: number}} area */
const rectangle = ({ x, y, wide, high }) => `M${short(x)} ${short(y)}h${short(wide)}v${short(high)}h${short(-wide)}z`;

/** @param {number} x @param {number} y @param {number} r */
const circle = (x, y, r) => `M${short(x - r)} ${short(y)}a${short(r)} ${short(r)} 0 1 0 ${short(2 * r)} 0a${short(r)} ${short(r)} 0 1 0 ${short(-2 * r)} 0z`;

/** @param {number} number */
const short = (number) => Math.round(number * 10) / 10;
