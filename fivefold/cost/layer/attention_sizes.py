"""What one tp rank has of attention, or of an own mixer in its place."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fivefold.core.model import MixerWeight, Shape, mixer_cost, mixer_table
from fivefold.cost import Array


def replicated_weights(shape: Shape) -> tuple[int, int]:
    """Elements of attention that every tp rank has, norms not counted, and those of one KV head,
    which several ranks have where KV heads are fewer than they."""
    if shape.own_mixer is not None:
        rows = mixer_table(shape)
        full_size = sum(_numel(row) for row in rows if row.split == "whole")
        full_size += sum(row.shape[0] for row in rows if row.reads == "mixed" and row.bias)
        keys = sum(_numel(row) for row in rows if row.split == "kv_heads")
        return full_size, keys // shape.kv_heads
    if shape.mla is None:
        return 0, 2 * shape.width * shape.head_dim
    latents = (shape.mla.q_rank or 0) + shape.mla.kv_rank + shape.mla.rope_dim
    return shape.width * latents, 0


def _numel(row: MixerWeight) -> int:
    return math.prod(row.shape) + row.bias * row.shape[0]


class MixerSizes(NamedTuple):
    """Elements of a token on one rank: what linears of the input make, by name, what the linear
    back reads, and what the function saves and moves besides, with its FLOPs. `kernels` are those
    of a microbatch."""

    projections: dict[str, Array]
    back: Array
    saved: Array
    moved: Array
    flops: Array
    kernels: float

    @classmethod
    def of(cls, shape: Shape, tp: Array, seq: Array | int) -> MixerSizes | None:
        """None for attention."""
        if shape.own_mixer is None:
            return None
        # The class of a mixer knows one length; a curve over lengths has an array of them.
        lengths = np.asarray(seq)
        costs = [mixer_cost(shape, int(length)) for length in lengths.flat]
        flops, saved, moved = (
            np.array(column).reshape(lengths.shape) / tp
            for column in zip(*(cost[:-1] for cost in costs), strict=True)
        )
        rows = mixer_table(shape)
        ranks = {"heads": tp, "kv_heads": np.minimum(tp, shape.kv_heads), "whole": np.ones_like(tp)}
        projections = {
            row.name: row.split_size / ranks[row.split] for row in rows if row.reads == "input"
        }
        back = rows[-1].split_size / tp
        return cls(projections, back, saved, moved, flops, costs[0].kernels)

    @property
    def projected(self) -> Array:
        """All that linears of the input make."""
        return sum(self.projections.values(), 0.0 * self.back)
