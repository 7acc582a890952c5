"""Gradients of a stage, at the moments when a rank may reach its peak. The first backward
of a step allocates the accumulated gradients unit by unit, while activations are freed: all
activations meet no gradients, and all gradients meet few activations. From the second backward on,
all meet all. If data ranks shard gradients, a unit is unreduced only until its reduce-scatter is
done: at most three units, two in flight and one being filled; and two of each other chunk.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from fivefold.core.model import Shape, most_routed
from fivefold.cost import Array, Flags, LayoutGrid
from fivefold.cost.memory.activations import WIDE
from fivefold.cost.stages import RankStage, backward_by_chunk


class RankParameters(NamedTuple):
    """How many parameters one rank has, before ZeRO shards them."""

    dense: Array  # ends included
    experts: Array
    ends: Array  # embedding and head

    @property
    def all(self) -> Array:
        return self.dense + self.experts


class UnitParameters(NamedTuple):
    """How many parameters a flat unit has: one of dense weights, and one of experts."""

    dense: Array
    experts: Array


class GradientLevel(NamedTuple):
    """Bytes of gradients at one moment."""

    accumulated: Array  # stay until the end of the step
    unreduced: Array  # full gradients of units that are being reduced


class LeastBytes(NamedTuple):
    """What a rank has at least: always, all of its gradients, and what its activations take.
    Gradients meet activations where they have `begun` before."""

    static: Array
    gradients: Array
    activations: Array
    begun: Flags

    @property
    def any_sharding(self) -> Array:
        """A lower bound of the peak of a block's layouts with any of its shardings."""
        before = _leanest(self.static)
        after = _leanest(self.static + self.gradients)
        return np.maximum(np.where(self.begun, after, before) + self.activations, after)


def _leanest(states: Array) -> Array:
    """The least of all shardings of a block."""
    return states.min(axis=3, keepdims=True)


N = TypeVar("N", float, Array)


def sums_of_copies(owned: N, size: float) -> N:
    """Bytes of gradients in float32 while both copies of a model, or those of mirrored stages, are
    summed; `size` is the bytes of a gradient element."""
    return owned * (WIDE if size == WIDE else 2 * WIDE)


class StageGradients:
    """Bytes of the gradients of one stage.

    `owned` are the parameters of the rank's shards; `size` is the bytes of a gradient element,
    `unit_parameters` are reduced together. With `leave`, reduced gradients leave the device. The
    head of a tied weight has no gradient of its own to accumulate: it waits for the embedding's.
    """

    def __init__(
        self,
        shape: Shape,
        parameters: RankParameters,
        stage: RankStage,
        grid: LayoutGrid,
        owned: Array,
        size: float,
        unit_parameters: UnitParameters,
        leave: bool,
    ) -> None:
        self.grid, self.full, self.owned = grid, parameters.all * size, owned * size
        # Chunks that have gradients when the first backwards end.
        self.seen = np.where(backward_by_chunk(grid), 1.0, grid.chunks)
        # If all microbatches are in flight before the first backward, no forward meets gradients.
        self.begun = grid.microbatches > stage.flight
        self.each_microbatch = (grid.zero >= 2) | leave
        if leave:
            self.owned = 0.0 * self.owned
        self.reduced = self.each_microbatch | ((grid.zero == 1) & (grid.microbatches == 1))
        dense, experts = (grid.shard * grid.cp > 1) | leave, (grid.edp > 1) | leave
        self.head, self.flight = stage.head, stage.flight
        unit, routed = (numel * size for numel in unit_parameters)
        # Gradients of the head and one layer that are not sharded.
        matrix = shape.vocab * shape.width / grid.tp * size
        apart = np.where(shape.tied & (grid.pp == 1), 0.0, stage.head)
        self.unsharded = np.where(self.reduced & dense, 0.0, apart * matrix + unit)
        self.unsharded = self.unsharded + np.where(self.reduced & experts, 0.0, routed)
        # Of what is sharded: an end, a dense unit, and the last two and three units. The experts of
        # a layer are a unit of their own, after the rest of the layer.
        self.end = np.where(dense, matrix, 0.0)
        self.embedding = stage.embedding * self.end
        self.end_of_head = apart * self.end
        self.unit = np.where(dense, unit, 0.0)
        expert_unit = np.where(experts, routed, 0.0)
        larger = np.maximum(self.unit, expert_unit)
        has_units = (self.unit > 0) & (expert_unit > 0)
        two_units = np.where(has_units, self.unit + expert_unit, 2 * larger)
        # Each chunk keeps its last two until its next backward; units may hold many layers each.
        self.last_units = np.minimum(two_units, self.full / grid.chunks)
        self.two_units = self.seen * self.last_units
        # A third one is being filled. Experts follow experts, if neighbours have some, or those of
        # the microbatch before.
        spaced = has_units & (most_routed(shape, 2) < 2) & (grid.microbatches == 1)
        self.third = np.where(spaced, self.unit, larger)
        self.layer = self.unit + expert_unit
        self.late_shards = self._late_shards(unit, routed)

    def _late_shards(self, unit: Array, routed: Array) -> Array:
        """ZeRO-1's last backward: the shards of two units, beside the full sums."""
        grid, shards = self.grid, self.grid.shard * self.grid.cp
        dense = np.where(shards > 1, np.where(routed > 0, 1.0, 2.0) * unit / shards, 0.0)
        experts = np.where(grid.edp > 1, routed / grid.edp, 0.0)
        return np.where((grid.zero == 1) & ~self.reduced, dense + experts, 0.0)

    def at_loss(self) -> GradientLevel:
        """After a forward: the last two units of the backward before are still being reduced."""
        last = np.where(self.embedding > 0, self.embedding + self.unit, self.two_units)
        return GradientLevel(self._so_far(), np.where(self.begun & self.each_microbatch, last, 0.0))

    def at_head(self) -> GradientLevel:
        """When the backward of the head ends: its gradient, beside what is still being reduced."""
        before = self.at_loss()
        head_grads = np.where(self.reduced, self.end_of_head, 0.0)
        accumulated = np.where(self.begun, before.accumulated, self.unsharded)
        return GradientLevel(accumulated, before.unreduced + head_grads)

    def at_last_layer(self) -> GradientLevel:
        """When the backward of the layers begins."""
        before = np.where(self.head > 0, self.embedding, self.two_units)
        before = np.where(self.begun & self.each_microbatch, before, 0.0)
        few = before + self.end_of_head + self.layer
        alone = np.where(self.flight > 1, 0.0, self.late_shards)
        accumulated = np.where(self.begun, self._so_far(), self.unsharded)
        return GradientLevel(accumulated, np.where(self.reduced, few, alone))

    def at_first_layer(self) -> GradientLevel:
        """When a first backward ends; of all chunks, or of the one that comes before the others."""
        return self._at_end(self.two_units + self.third, self.seen)

    def at_last_chunk(self) -> GradientLevel:
        """When all chunks have gradients."""
        return self._at_end(self.grid.chunks * self.last_units + self.third, self.grid.chunks)

    def at_embedding(self) -> GradientLevel:
        """After it, in the embedding."""
        return self._at_end(self.embedding + self.grid.chunks * self.last_units, self.grid.chunks)

    def at_update(self) -> GradientLevel:
        """After the last backward."""
        return GradientLevel(self.owned, np.zeros(1))

    def _at_end(self, few: Array, chunks: Array) -> GradientLevel:
        accumulated = np.where(self.reduced, self._owned_by(chunks), self._summed(chunks))
        return GradientLevel(accumulated, np.where(self.reduced, few, self._at_end_of_step()))

    def _owned_by(self, chunks: Array) -> Array:
        return self.owned * chunks / self.grid.chunks

    def _summed(self, chunks: Array) -> Array:
        """Full gradients of so many chunks. In ZeRO-1 those that have ended are shards, but for
        their last two units."""
        chunk_size, ended = self.full / self.grid.chunks, chunks - 1
        sharded = (self.grid.zero == 1) & (self.seen < self.grid.chunks)
        return chunk_size + np.where(
            sharded, self._owned_by(ended) + ended * self.last_units, chunk_size * ended
        )

    def done_after_backward(self) -> Array:
        """Microbatches of those in flight that a backward with all gradients ends; all, if the step
        ends with it, which is when the shards of ZeRO-1 arrive."""
        return np.where(self._at_end_of_step() > 0, self.flight, 1 / self.grid.chunks)

    def _at_end_of_step(self) -> Array:
        """Shards that arrive at the end of the step, beside sums of an earlier backward."""
        return np.where(self.begun, self.late_shards, 0.0)

    def _so_far(self) -> Array:
        """What earlier backwards have accumulated."""
        seen = np.where(self.each_microbatch, self._owned_by(self.seen), self._summed(self.seen))
        return np.where(self.begun, seen, 0.0)
