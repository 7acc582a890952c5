"""Gradients over a backward, at the moments when a rank may hold most.

The first backward of a step makes the sums of gradients, unit by unit, while activations go: all
activations meet no gradients, and all gradients few activations. From the next one on all meet all.
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
        self.head, self.flight = stage.head, stage.flight
        unit = (held.dense - held.ends) / np.maximum(stage.layers.all, 1.0) * size
        routed = held.experts / np.maximum(stage.layers.routed, 1.0) * size
        # Of the head and a layer, what stays whole.
        self.made = np.where(dense, 0.0, stage.head * matrix * size + unit)
        self.made = self.made + np.where(experts, 0.0, routed)
        self.end_flies = np.where(dense, matrix * size, 0.0)
        self.embedding_flies = stage.embedding * self.end_flies
        self.unit_flies = np.where(dense, unit, 0.0)
        routed_flies = np.where(experts, routed, 0.0)
        # Experts are a unit of their own, behind the rest of their layer.
        larger = np.maximum(self.unit_flies, routed_flies)
        self.two_fly = np.where(routed > 0, self.unit_flies + routed_flies, 2 * self.unit_flies)
        self.three_fly = self.two_fly + larger
        self.layer_flies = self.unit_flies + routed_flies
        self.arriving = self._arriving(unit, routed)

    def _arriving(self, unit: Array, routed: Array) -> Array:
        """Stage 1's last backward: two units' slices, beside the sums that they come from."""
        grid, slices = self.grid, self.grid.shard * self.grid.cp
        dense = np.where(slices > 1, np.where(routed > 0, 1.0, 2.0) * unit / slices, 0.0)
        experts = np.where(grid.edp > 1, routed / grid.edp, 0.0)
        return np.where((grid.zero == 1) & ~self.leaves, dense + experts, 0.0)

    def at_turn(self) -> Moment:
        """Where a forward is over, at the loss: the last backward's last two are on their way."""
        last = np.where(
            self.embedding_flies > 0, self.embedding_flies + self.unit_flies, self.two_fly
        )
        return Moment(self._so_far(), np.where(self.begun & self.each_time, last, 0.0))

    def at_last_layer(self) -> Moment:
        """Where the layers' backward begins."""
        before = np.where(self.head > 0, self.embedding_flies, self.two_fly)
        before = np.where(self.begun & self.each_time, before, 0.0)
        few = before + self.head * self.end_flies + self.layer_flies
        alone = np.where(self.flight > 1, 0.0, self.arriving)
        stay = np.where(self.begun, self._so_far(), self.made)
        return Moment(stay, np.where(self.leaves, few, alone))

    def at_first_layer(self) -> Moment:
        """Where it ends, in the first layer or in the embedding."""
        most = np.maximum(self.three_fly, self.embedding_flies + self.two_fly)
        stay = np.where(self.leaves, self.owned, self.whole)
        return Moment(stay, np.where(self.leaves, most, self._at_last()))

    def behind(self) -> Array:
        """Microbatches that a backward leaves in flight where all gradients are there: none where
        the step ends with it, which is when slices of stage 1 come."""
        return np.where(self._at_last() > 0, 0.0, self.flight - 1 / self.grid.chunks)

    def _at_last(self) -> Array:
        """Slices that come at the end of the step, where an earlier backward has made the sums."""
        return np.where(self.begun, self.arriving, 0.0)

    def _so_far(self) -> Array:
        """What earlier backwards have left."""
        return np.where(self.begun, np.where(self.each_time, self.owned, self.whole), 0.0)
