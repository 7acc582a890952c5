// @ts-check
// Where every GPU of the map lies, by arithmetic: ranks to places and back, and groups of ranks.
// Node by node in rows; nodes that share their fastest links stand together in a block.

const LARGEST = 36;
const BETWEEN_NODES = 0.4; // of a cell
const BETWEEN_BLOCKS = 1.6;

/**
 * @typedef {{world: number, cell: number, node: number, across: number, down: number, gap: number,
 *   nodeWide: number, nodeHigh: number, block: number, columns: number, blockColumns: number,
 *   blockWide: number, blockHigh: number, framed: boolean, width: number, height: number}} Grid
 */

/**
 * The largest cells with which all GPUs fit; a row holds as many nodes as suit the pipeline's runs.
 * @param {any} view @param {number} width @param {number} height @returns {Grid}
 */
export function gridOf(view, width, height) {
  const nodes = Math.ceil(view.world / view.node);
  const shared = view.domain ? view.domain.size / view.node : 1;
  const block = shared > 1 ? Math.min(shared, nodes) : nodes;
  const run = view.run / view.node;
  let best = null;
  for (const columns of columnsFor(block)) {
    const found = fitted(view, block, columns, width, height);
    const suits = nodes > block || run % columns === 0 ? 1 : columns % run === 0 ? 0.8 : 0.55;
    // Of cells much alike the wider arrangement: it fills the panel and leaves the page shorter.
    const score = found.cell * suits * (1 + (0.25 * found.width) / width);
    if (!best || score >= best.score) best = { score, found };
  }
  const { found } = /** @type {{found: Grid}} */ (best);
  return { ...found, framed: shared > 1 };
}

/** How many nodes a row of a block may hold: up to 64 any number, then eighths. @param {number} block */
function columnsFor(block) {
  const found = [];
  for (let each = 1; each <= Math.min(block, 512); each += each < 64 ? 1 : 8) found.push(each);
  return found;
}

/** @param {any} view @param {number} block @param {number} columns @param {number} width @param {number} height @returns {Grid} */
function fitted(view, block, columns, width, height) {
  const { across, down } = folded(view.node);
  const nodes = Math.ceil(view.world / view.node);
  const blocks = Math.ceil(nodes / block);
  const wide = columns * (across + BETWEEN_NODES) + (blocks > 1 ? BETWEEN_BLOCKS : 0);
  const high = Math.ceil(block / columns) * (down + BETWEEN_NODES) + (blocks > 1 ? BETWEEN_BLOCKS : 0);
  let best = { cell: 0, blockColumns: 1 };
  for (let blockColumns = 1; blockColumns <= blocks; blockColumns += 1) {
    const fits = Math.min(width / (blockColumns * wide), height / (Math.ceil(blocks / blockColumns) * high));
    if (fits > best.cell) best = { cell: fits, blockColumns };
    if (width / (blockColumns * wide) < best.cell) break;
  }
  const cell = Math.min(LARGEST, best.cell);
  const { blockColumns } = best;
  return {
    world: view.world,
    cell,
    node: view.node,
    across,
    down,
    gap: BETWEEN_NODES * cell,
    nodeWide: (across + BETWEEN_NODES) * cell,
    nodeHigh: (down + BETWEEN_NODES) * cell,
    block,
    columns,
    blockColumns,
    blockWide: wide * cell,
    blockHigh: high * cell,
    framed: false,
    width: Math.min(blockColumns, blocks) * wide * cell,
    height: Math.ceil(blocks / blockColumns) * high * cell,
  };
}

/** A node of 8 as 4 × 2, of 4 as 2 × 2: as square as its number of GPUs allows. @param {number} node */
function folded(node) {
  let across = Math.ceil(Math.sqrt(node));
  while (node % across) across += 1;
  return { across, down: node / across };
}

/** The corner of a node. @param {Grid} grid @param {number} node */
function cornerOf(grid, node) {
  const block = Math.floor(node / grid.block);
  const inside = node % grid.block;
  return {
    x: (block % grid.blockColumns) * grid.blockWide + (inside % grid.columns) * grid.nodeWide,
    y: Math.floor(block / grid.blockColumns) * grid.blockHigh + Math.floor(inside / grid.columns) * grid.nodeHigh,
  };
}

/** The corner of a rank's cell. @param {Grid} grid @param {number} rank */
export function placeOf(grid, rank) {
  const { x, y } = cornerOf(grid, Math.floor(rank / grid.node));
  const inside = rank % grid.node;
  return { x: x + (inside % grid.across) * grid.cell, y: y + Math.floor(inside / grid.across) * grid.cell };
}

/** The rank at a point, or null between blocks and outside. @param {Grid} grid @param {number} x @param {number} y */
export function rankAt(grid, x, y) {
  if (x < 0 || y < 0) return null;
  const [column, row] = [Math.floor(x / grid.blockWide), Math.floor(y / grid.blockHigh)];
  const [inX, inY] = [x - column * grid.blockWide, y - row * grid.blockHigh];
  const [nodeColumn, nodeRow] = [Math.floor(inX / grid.nodeWide), Math.floor(inY / grid.nodeHigh)];
  if (column >= grid.blockColumns || nodeColumn >= grid.columns) return null;
  const inside = nodeRow * grid.columns + nodeColumn;
  if (inside >= grid.block) return null;
  const node = (row * grid.blockColumns + column) * grid.block + inside;
  const across = Math.min(grid.across - 1, Math.floor((inX - nodeColumn * grid.nodeWide) / grid.cell));
  const down = Math.min(grid.down - 1, Math.floor((inY - nodeRow * grid.nodeHigh) / grid.cell));
  const rank = node * grid.node + down * grid.across + across;
  return rank < grid.world ? rank : null;
}

/**
 * Rectangles that cover `count` consecutive ranks, as few as can be.
 * @param {Grid} grid @param {number} first @param {number} count
 * @returns {{x: number, y: number, wide: number, high: number}[]}
 */
export function areaOf(grid, first, count) {
  const found = [];
  for (let rank = first; rank < first + count; ) {
    const left = first + count - rank;
    const whole = rank % grid.node === 0 && left >= grid.node;
    const { ranks, ...area } = whole ? nodesFrom(grid, rank, left) : cellsFrom(grid, rank, left);
    found.push(area);
    rank += ranks;
  }
  return found;
}

/** Whole nodes from a rank on: whole rows of a block, or what is left of one. @param {Grid} grid @param {number} rank @param {number} left */
function nodesFrom(grid, rank, left) {
  const node = rank / grid.node;
  const inside = node % grid.block;
  const column = inside % grid.columns;
  const most = Math.min(Math.floor(left / grid.node), grid.block - inside);
  const rows = column === 0 ? Math.max(1, Math.floor(most / grid.columns)) : 1;
  const columns = Math.min(most, grid.columns - column);
  return {
    ...cornerOf(grid, node),
    wide: columns * grid.nodeWide - grid.gap,
    high: rows * grid.nodeHigh - grid.gap,
    ranks: rows * columns * grid.node,
  };
}

/** Cells of one node from a rank on. @param {Grid} grid @param {number} rank @param {number} left */
function cellsFrom(grid, rank, left) {
  const inside = rank % grid.node;
  const column = inside % grid.across;
  const most = Math.min(left, grid.node - inside);
  const rows = column === 0 ? Math.max(1, Math.floor(most / grid.across)) : 1;
  const columns = Math.min(most, grid.across - column);
  return { ...placeOf(grid, rank), wide: columns * grid.cell, high: rows * grid.cell, ranks: rows * columns };
}

/** Consecutive ranks of an ascending list as [first, count] pairs. @param {number[]} ranks @returns {number[][]} */
export function runsOf(ranks) {
  /** @type {number[][]} */
  const found = [];
  for (const rank of ranks) {
    const last = found[found.length - 1];
    if (last && rank === last[0] + last[1]) last[1] += 1;
    else found.push([rank, 1]);
  }
  return found;
}

/** The place of a rank in the line, and the rank at a place; `RankOrder` of core/layout/groups.py says what a line is.
 * @param {number[][]} digits @param {number} rank */
function lineOf(digits, rank) {
  let [place, unit] = [0, 1];
  for (const [size, stride] of digits) {
    place += (Math.floor(rank / stride) % size) * unit;
    unit *= size;
  }
  return place;
}

/** @param {number[][]} digits @param {number} place */
function rankOf(digits, place) {
  let rank = 0;
  for (const [size, stride] of digits) {
    rank += (place % size) * stride;
    place = Math.floor(place / size);
  }
  return rank;
}

/** The group of a rank along an axis, and its coord there. @param {any} view @param {any} axis @param {number} rank */
export function groupOf(view, axis, rank) {
  const place = lineOf(view.digits, rank);
  const coord = Math.floor(place / axis.stride) % axis.size;
  const first = place - coord * axis.stride;
  const ranks = [];
  for (let i = 0; i < axis.size; i += 1) ranks.push(rankOf(view.digits, first + i * axis.stride));
  return { coord, ranks };
}
