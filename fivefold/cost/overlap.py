"""What of a collective shows if it overlaps with compute.

A hidden collective is not free: its kernels take SMs and memory bandwidth from compute. The
exchange of tokens with experts overlaps with shared experts, or, if a forward and a backward of two
microbatches run as a pair (DualPipe), with all compute of both.
"""

from __future__ import annotations

import numpy as np

from fivefold.cost.grid import FAMILIES, Array, LayoutGrid
from fivefold.cost.stack import SoftwareStack

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
) -> None:
    """Leave in `ep` what shows of a layer's exchange with experts.

    `passes`: forward, input gradient, recomputation; `shared`: seconds of the shared experts'
    forward, beside which a stack may dispatch, in backward with the gradients of their weights.
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
        for name, each in parts.items():
            compute = compute + (0.0 if name in ("ep", "launch") else each)
    # A stack that gives SMs to communication has slowed its compute down by that.
    slowdown = OVERLAP_SLOWDOWN if stack.compute_share == 1 else 0.0
    shown = shown_seconds(exchange, compute, slowdown=slowdown)
    left = 1 - share + share * shown / np.maximum(exchange, 1e-12)
    for parts in passes:
        parts["ep"] = parts["ep"] * left
