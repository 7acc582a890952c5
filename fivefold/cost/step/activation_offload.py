"""Seconds of saved activations that wait on the host: out after the forward, back for the backward.

Both ways overlap with compute, and the link to the host is full duplex: a steady step has as many
bytes on their way out as back. What is longer than the compute of a step shows.
"""

from __future__ import annotations

import numpy as np

from fivefold.core.model import layer_kinds
from fivefold.cost import RECOMPUTE, Array
from fivefold.cost.layer import LayerTimer
from fivefold.cost.memory import Activations
from fivefold.cost.step.overlap import shown_seconds


def activation_offload_seconds(work: LayerTimer, compute: Array) -> Array:
    """Exposed offload time of a step with `compute` seconds of compute."""
    grid, stack, shape = work.grid, work.stack, work.shape
    if not stack.memory.offloaded:
        return np.zeros(1)
    saved = Activations(shape, stack, stack.memory, grid, work.seq, work.itemsize, work.imbalance)
    size = np.zeros(1)
    for i, count in layer_kinds(shape).items():
        size = size + count * saved.of_layer(i).saved(shape.is_moe_layer(i))
    full = grid.recompute == RECOMPUTE.index("full")
    size = np.where(full, shape.layers * saved.inputs(), size)
    size = size * work.tokens * grid.microbatches / grid.pp * stack.memory.offloaded
    return shown_seconds(size / work.machine.host.link.bandwidth, compute)
