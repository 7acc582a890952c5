"""Gradients over a backward, at the moments when a rank may hold most.

The first backward of a step makes the sums of gradients, unit by unit, while activations go: all
activations meet no gradients, or all gradients few activations. From the next backward on they meet.
Where data ranks own slices, the sum of a unit is whole only until the others have it: of three
units at the most, two on their way and one that is filled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fivefold.core.estimate.ends import Stage
from fivefold.core.estimate.grid import Array, Grid


class Held(NamedTuple):
    """Parameters of one rank."""

    dense: Array  # with the ends
    experts: Array
    ends: Array  # embedding and head

    @property
    def all(self) -> Array:
        return self.dense + self.experts


class Moment(NamedTuple):
    """Bytes of gradients."""

    stay: Array  # to the end of the step
    fly: Array  # whole, of units whose slices stay


class Gradients:
    """Bytes of the gradients of one stage.

    `matrix` are the parameters of an embedding or a head, `owned` those of the rank's slices, where
    there are any; `size` is the bytes of a gradient's element.
    """

    def __init__(
        self, held: Held, stage: Stage, grid: Grid, matrix: Array, owned: Array, size: int
    ) -> None:
        self.grid, self.whole, self.owned = grid, held.all * size, owned * size
        # Where every microbatch is in flight before the first backward, none of it meets gradients.
        self.begun = grid.microbatches > stage.flight
        self.each_time = grid.zero >= 2
        self.leaves = self.each_time | ((grid.zero == 1) & (grid.microbatches == 1))
        dense = self.leaves & (grid.shard * grid.cp > 1)
        experts = self.leaves & (grid.edp > 1)
        self.head = stage.head * matrix * size
        unit = (held.dense - held.ends) / np.maximum(stage.layers.all, 1.0) * size
        routed = held.experts / np.maximum(stage.layers.routed, 1.0) * size
        self.layer = unit + routed
        self.end_flies = np.where(dense, matrix * size, 0.0)
        self.embedding_flies = stage.embedding * self.end_flies
        self.layer_flies = np.where(dense, unit, 0.0) + np.where(experts, routed, 0.0)
        larger = np.maximum(np.where(dense, unit, 0.0), np.where(experts, routed, 0.0))
        # Three units: three layers, or one and a half where experts are units of their own.
        self.three_fly = np.where(held.experts > 0, self.layer_flies + larger, 3 * larger)
        self.spread = np.where(held.experts > 0, 1.0, 2.0)  # layers behind the first of the three
        # The last backward of stage 1 has its slices beside the sums that they come from.
        received = 2 * self.layer * self.owned / np.maximum(self.whole, 1.0)
        self.arriving = np.where((grid.zero == 1) & ~self.leaves, received, 0.0)
        self.at_head = stage.head

    def at_turn(self) -> Moment:
        """Where a forward is over, at the loss: the last backward's last two are on their way."""
        last = np.maximum(self.embedding_flies + self.layer_flies, self.three_fly * 2 / 3)
        return Moment(self._so_far(), np.where(self.begun & self.each_time, last, 0.0))

    def at_last_layer(self, kept: Array) -> Moment:
        """Where the layers' backward begins; they keep so many bytes each, which go as sums come."""
        made = np.where(self.leaves, self.whole * 0, self.head + self.layer)
        stay = np.where(self.begun, self._so_far(), made)
        head = self.at_head * self.end_flies
        other = np.where(self.at_head > 0, self.embedding_flies, self.three_fly * 2 / 3)
        before = np.where(self.begun & self.each_time, other, 0.0)
        few = np.maximum(head + before + self.layer_flies, self.three_fly - self.spread * kept)
        return Moment(stay, np.where(self.leaves, few, self.arriving))

    def at_first_layer(self) -> Moment:
        """Where only the embedding is left."""
        stay = np.where(self.leaves, self.owned, self.whole)
        return Moment(stay, np.where(self.leaves, self.three_fly, self.arriving))

    def at_embedding(self) -> Moment:
        """Where it has its gradient."""
        stay = np.where(self.leaves, self.owned, self.whole)
        fly = self.embedding_flies + self.three_fly * 2 / 3
        return Moment(stay, np.where(self.leaves, fly, self.arriving))

    def _so_far(self) -> Array:
        """What earlier backwards have left."""
        return np.where(self.begun, np.where(self.each_time, self.owned, self.whole), 0.0)
