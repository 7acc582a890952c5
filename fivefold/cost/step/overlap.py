"""What of a collective shows if it overlaps with compute.

A hidden collective is not free: its kernels take SMs and memory bandwidth from compute. The
exchange of tokens with experts overlaps with shared experts, or, if a forward and a backward of two
microbatches run as a pair (DualPipe), with all compute of both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fivefold.cost import FAMILIES, Array, LayoutGrid
from fivefold.cost.hardware import SoftwareStack

# Share of a hidden collective by which it slows compute down: reported for NVLink.
OVERLAP_SLOWDOWN = 0.15
# Forwards per pipeline rank that are in no pair, over all ranks on average: counted in schedules.
_UNPAIRED = 1.25


def shown_seconds(
    seconds: Array,
    window: Array,
    least: Array | float = 0.0,
    slowdown: float = OVERLAP_SLOWDOWN,
) -> Array:
    """Seconds of a collective that overlaps with a window of compute: what is not hidden (at least
    `least`), and how much it slows compute down."""
    shown = np.maximum(seconds - window, least)
    return shown + slowdown * (seconds - shown)


class SplitGemms(NamedTuple):
    """Seconds of the column-split and of the row-split matmuls of a module, in one pass, and of the
    weight gradients of the former."""

    columns: Array
    rows: Array
    weights: Array


class TensorSeconds(NamedTuple):
    """What shows of a module's collectives over tp: in forward, in backward, and how much more if
    the weight gradients are deferred; then nothing is left beside which a reduction could run."""

    forward: Array
    backward: Array
    late: Array


def tensor_seconds(
    kind: str, seconds: Array, gathers_again: Array, chunks: int, gemms: SplitGemms
) -> TensorSeconds:
    """Of collectives of one kind, each of which takes so many seconds in all of its chunks.

    Forward has a gather before columns and a reduction after rows. Of chunks, all but one overlap
    with matmuls of the others. Backward has the mirror of both, and gathers the input again, if it
    was saved as a shard, beside the input gradient; it reduces that beside weight gradients.
    """

    def in_chunks(window: Array) -> Array:
        return shown_seconds(seconds, window * (chunks - 1) / chunks, least=seconds / chunks)

    if kind == "all_gather":
        again = gathers_again * shown_seconds(seconds, gemms.columns)
        return TensorSeconds(in_chunks(gemms.columns), in_chunks(gemms.rows) + again, 0 * seconds)
    hidden = shown_seconds(seconds, gemms.weights)
    late = in_chunks(gemms.columns) - hidden
    return TensorSeconds(in_chunks(gemms.rows), hidden, late)


def paired_share(grid: LayoutGrid) -> Array:
    """Share of the microbatches whose forward runs as a pair with a backward."""
    pairs = np.array([family.pairs for family in FAMILIES])[grid.schedule.astype(np.int64)]
    share = 1 - _UNPAIRED * grid.pp / grid.microbatches
    return np.where(pairs & (grid.pp > 1), np.maximum(share, 0.0), 0.0)


def hide_exchange(
    passes: tuple[dict[str, Array], ...],
    weights: dict[str, Array],
    shared: Array | float,
    grid: LayoutGrid,
    stack: SoftwareStack,
    host: Array,
) -> None:
    """Leave in `ep` what shows of a layer's exchange with experts.

    `passes`: forward, input gradient, recomputation; `shared`: seconds of the shared experts'
    forward, beside which a stack may dispatch, in backward with the gradients of their weights.
    `host`: seconds of the layer's host, which are longer than its compute where that is short.
    """
    if stack.shared_overlap:
        for parts, window in zip(passes, (shared, 2 * shared, shared), strict=True):
            dispatch = parts["ep"] / 2
            parts["ep"] = parts["ep"] - dispatch + shown_seconds(dispatch, dispatch * 0 + window)
    share = np.ones(1) if stack.paired_layers else paired_share(grid)
    if not share.any():
        return
    exchange = sum((parts["ep"] for parts in passes), np.zeros(1))
    compute = np.zeros(1)
    for parts in (*passes, weights):
        for name, seconds in parts.items():
            compute = compute + (0.0 if name in ("ep", "launch") else seconds)
    # A stack that gives SMs to communication has slowed its compute down by that.
    slowdown = OVERLAP_SLOWDOWN if stack.compute_share == 1 else 0.0
    shown = shown_seconds(exchange, np.maximum(compute, host), slowdown=slowdown)
    left = 1 - share + share * shown / np.maximum(exchange, 1e-12)
    for parts in passes:
        parts["ep"] = parts["ep"] * left
