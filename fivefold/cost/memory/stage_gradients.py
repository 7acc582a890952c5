"""Gradients of a stage, at the moments when a rank may reach its peak. The first backward
of a step allocates the accumulated gradients unit by unit, while activations are freed: all
activations meet no gradients, and all gradients meet few activations. From the second backward on,
all meet all. If data ranks shard gradients, a unit is unreduced only until its reduce-scatter is
done: at most three units, two in flight and one being filled; and two of each other chunk.

Memory of the head and its losses: inputs, logits, and what waits for the backward of a loss.

What the layers of a stage hold for one microbatch: saved by its forward, made again in its
backward, and left between its input and weight gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from fivefold.core.model import Recompute, Shape, layer_kinds, layer_parameters, most_routed
from fivefold.cost import Array, Flags, LayoutGrid
from fivefold.cost.hardware import SoftwareStack
from fivefold.cost.memory.activations import WIDE, Activations
from fivefold.cost.stages import (
    RankLayers,
    RankStage,
    backward_by_chunk,
    holds_all_microbatches,
    looped,
)


class LossMemory:
    """Bytes of the losses of the last stage, for every layout of a grid."""

    def __init__(self, activations: Activations, tokens: Array) -> None:
        self.activations, self.tokens = activations, tokens
        self.shape, self.grid, self.memory = activations.shape, activations.grid, activations.memory
        self.itemsize, self.chunks = activations.itemsize, np.ones(1)
        if self.memory.chunks_loss:
            self.chunks = self.grid.loss_chunks(self.shape, tokens)
        self.chunked = self.chunks > 1

    def input(self) -> Array:
        """Of the head, for the loss that is being computed."""
        return self.activations.at_head() * self.tokens

    def other_inputs(self) -> Array:
        """Of the head, for losses that wait for their backward."""
        return (self._number() - 1) * self.input()

    def computed(self) -> Array:
        """Logits of the loss that is being computed, and their gradients; if it is computed in
        chunks, those of a chunk, and the gradients that wait for the backward."""
        memory, tp = self.memory, self.grid.tp
        size = np.where(
            tp > 1, memory.split_logits_bytes or memory.logits_bytes, memory.logits_bytes
        )
        num_logits, capped = self.tokens * self.shape.vocab / tp, self.shape.logit_cap is not None
        size, wide = (
            num_bytes + capped * self.itemsize for num_bytes in (size, memory.chunk_bytes)
        )
        if not self.chunked.any():
            return size * num_logits
        chunk, waiting = num_logits / self.chunks, self.gradients()
        full_bytes = chunk * (self.itemsize + wide) + waiting
        # Over a split vocabulary, chunks are those of what is wide.
        split = num_logits * self.itemsize + np.maximum(chunk * wide, waiting)
        return np.where(self.chunked, np.where(tp > 1, split, full_bytes), size * num_logits)

    def gradients(self) -> Array:
        """Of the input and the weight of a head that computes them in its forward."""
        weight = self.shape.vocab * self.shape.width / self.grid.tp
        return (self.tokens * self.shape.width + weight) * self.itemsize

    def other_losses(self) -> Array:
        """What other losses save until their backward."""
        saved = self.memory.loss_bytes * self.tokens * self.shape.vocab / self.grid.tp
        return (self._number() - 1) * np.where(self.chunked, self.gradients(), saved)

    def _number(self) -> Array:
        """Losses that are there at once: one for each prediction of a token; of all microbatches,
        if no backward comes before the last forward."""
        num_losses = np.full(1, 1.0 + self.shape.mtp)
        if (every := holds_all_microbatches(self.grid)).any():
            num_losses = num_losses * np.where(every, self.grid.microbatches, 1.0)
        return num_losses


class SavedLayers:
    """Bytes of a microbatch in the layers of a stage, for every layout of a grid."""

    def __init__(self, activations: Activations, stack: SoftwareStack, tokens: Array) -> None:
        self.activations, self.stack, self.tokens = activations, stack, tokens
        self.shape, self.grid, self.memory = activations.shape, activations.grid, activations.memory

    def of(self, stage: RankStage) -> tuple[Array, Array]:
        """What a microbatch saves, and what one layer needs during recomputation and backward."""
        return self.saved(stage), self.working(stage)

    def working(self, stage: RankStage) -> Array:
        """What one layer needs during recomputation and backward."""
        working = np.zeros(1)
        for rule, layers in self._by_rule(stage):
            for i, count in layer_numbers(self.shape, layers).items():
                backward = self._again(rule, layers, i) * self.tokens
                backward = backward + self._backward_gradients(i)
                working = np.maximum(working, np.where(count > 0, backward, 0.0))
        return working

    def saved(self, stage: RankStage) -> Array:
        """What a microbatch saves."""
        num_bytes = np.zeros(1)
        for rule, layers in self._by_rule(stage):
            counts = layer_numbers(self.shape, layers)
            if rule.full:
                num_bytes = (
                    num_bytes + self._segments(rule, stage, layers) * self.activations.inputs()
                )
            for i, count in counts.items():
                # Layers that predict ahead are like the last ones.
                ahead = self._ahead(i) * stage.head * (count > 0)
                num_bytes = num_bytes + (count + ahead) * self._saved_beside_inputs(rule, i)
        return num_bytes * self.tokens * (1 - self.memory.offloaded)

    def most(self, stage: RankStage, saved: Array, done: Array | float = 0.0) -> Array:
        """What microbatches that `saved` so much hold at most, in flight or while they wait for
        weight gradients; after so many are `done`."""
        num_bytes = saved * (stage.flight - done)
        if stage.deferred:
            left, share = self._left(stage), self._share_of_last_chunk(stage)
            for before, waiting in stage.deferred:
                in_layers = waiting * share
                before = before - (in_layers - waiting)
                early = np.maximum(before - np.maximum(done - in_layers, 0.0), 0.0)
                late = np.maximum(in_layers - done, 0.0)
                num_bytes = np.maximum(num_bytes, early * saved + late * left)
        return num_bytes

    def _share_of_last_chunk(self, stage: RankStage) -> Array:
        """Layers of a rank's last chunk over the mean of its chunks. In a loop weight gradients of
        that one wait, and layers that do not divide by chunks are in the last ones."""
        layers, chunks = np.maximum(stage.layers.all, 1.0), self.grid.chunks
        return np.where(looped(self.grid), np.ceil(layers / chunks) * chunks / layers, 1.0)

    def microbatch_bytes(self, stage: RankStage) -> tuple[Array, Array]:
        """Bytes of a microbatch from its forward on, and between its input and weight gradients."""
        return self.saved(stage), self._left(stage)

    def _left(self, stage: RankStage) -> Array:
        """Bytes of a microbatch between its input and weight gradients."""
        left = stage.head * (1 + self.shape.mtp) * self.activations.deferred_at_head()
        left = left + stage.embedding * self.activations.residual
        counts = layer_numbers(self.shape, stage.layers)
        for i, count in counts.items():
            ahead = self._ahead(i) * stage.head
            deferred = self.activations.of_layer(i).deferred(self.shape.is_moe_layer(i))
            left = left + (count + ahead) * deferred
        return left * self.tokens

    def _ahead(self, i: int) -> int:
        """Layers that predict ahead and are like layer i: all are like the last one."""
        shape, last = self.shape, self.shape.layers - 1
        alike = all(of(i) == of(last) for of in (shape.is_moe_layer, shape.is_recurrent))
        return shape.mtp if alike else 0

    def _by_rule(self, stage: RankStage) -> Iterator[tuple[Recompute, RankLayers]]:
        """The layers of a rank by their rule of recomputation."""
        if stage.by_rule:
            yield from stage.by_rule
            return
        for number, rule in enumerate(self.grid.rules):
            matches = self.grid.recompute == number
            if matches.any():
                yield rule, RankLayers(*(np.where(matches, count, 0.0) for count in stage.layers))

    def _segments(self, rule: Recompute, stage: RankStage, layers: RankLayers) -> Array:
        """How many inputs full recomputation saves: one for each segment of every chunk."""
        chunks = self.grid.chunks
        segments = chunks * np.ceil(layers.all / chunks / rule.blocks) * self.stack.recomputed
        return segments + self.shape.mtp * stage.head * (layers.all > 0)

    def _saved_beside_inputs(self, rule: Recompute, i: int) -> Array:
        """What layer i saves, without the inputs of segments."""
        activations, routed = self.activations.of_layer(i), self.shape.is_moe_layer(i)
        if not rule.full:
            return activations.saved(routed, rule)
        saved_bytes = self.stack.recomputed * self._kept(rule)
        return (1 - self.stack.recomputed) * activations.saved(routed) + saved_bytes

    def _kept(self, rule: Recompute) -> Array | float:
        """Of attention, in a layer that is recomputed."""
        return self.activations.kept_attention() if rule.keeps_attention else 0.0

    def _again(self, rule: Recompute, layers: RankLayers, i: int) -> Array:
        """What recomputation adds to what layers like i saved, at most: a segment, or a module."""
        activations, routed = self.activations.of_layer(i), self.shape.is_moe_layer(i)
        if not rule.full:
            return activations.remade(routed, rule)
        input_bytes = self.activations.inputs() if self.memory.unit_by_unit else 0.0
        blocks = np.minimum(rule.blocks, np.maximum(layers.all, 1.0))
        return blocks * (activations.saved(routed) - self._kept(rule)) - input_bytes

    def _backward_gradients(self, i: int) -> Array:
        """Gradients in the backward of a layer: of activations, or of its largest weight; they are
        not alive at the same time."""
        routed = self.shape.is_moe_layer(i)
        num_bytes = self.activations.backward_gradients(routed) * self.tokens
        besides = self.activations.pairs()[1] + self.activations.rounding_copies(routed)
        num_bytes = num_bytes + besides * self.tokens
        if not self.memory.unit_by_unit:
            return num_bytes
        shape, matrices = self.shape, 3 if self.shape.gated else 2
        weight = shape.width * shape.ffn / self.grid.tp
        if routed:
            spread = matrices * self.grid.ep * self.grid.etp
            weight = layer_parameters(shape, i).experts / spread
            if self.activations.coded_slots:  # operands that are values again, and their products
                stacks = 2 if shape.gated else 1
                return num_bytes + stacks * weight * self.activations.itemsize
        return np.maximum(num_bytes, weight * self.activations.itemsize)


def layer_numbers(shape: Shape, layers: RankLayers) -> dict[int, Array]:
    """How many layers of each kind, by the index of one of them."""
    first: dict[tuple[bool, bool], int] = {}
    for i in layer_kinds(shape):
        first.setdefault((shape.is_moe_layer(i), shape.is_recurrent(i)), i)
    return {i: layers.kinds[kind] for kind, i in first.items()}


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
