"""Memory of forward and backward: the activations of a microbatch and the gradients of a stage.

`Activations` counts what the forward of a layer saves for its backward, op by op, in bytes per
token of the microbatch: inputs of norms and matmuls, queries, keys and values, what attention
returns, and what the MLP computes inside. Tensor parallelism shards what is as wide as the heads or
the MLP. Sequence parallelism shards what is as wide as the model, except inputs that a stack keeps
gathered.

`StageGradients` counts gradients at the moments when a rank may reach its peak. The first backward
of a step allocates the accumulated gradients unit by unit, while activations are freed: all
activations meet no gradients, and all gradients meet few activations. From the second backward on,
all meet all. If data ranks shard gradients, a unit is unreduced only until its reduce-scatter is
done: at most three units, two in flight and one being filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fivefold.core.shape import Mla, Shape
from fivefold.cost.grid import Array, LayoutGrid, fullest_rank_load
from fivefold.cost.pipeline_ranks import RankStage
from fivefold.cost.stack import SoftwareStack, StackMemory

LSE = 4  # bytes of a head's log-sum-exp
WIDE = 4  # bytes of a float32 element


class Activations:
    """Bytes per token that layers save on one rank, for each layout of a grid."""

    def __init__(
        self,
        shape: Shape,
        stack: SoftwareStack,
        memory: StackMemory,
        grid: LayoutGrid,
        seq: int,
        itemsize: int,
        imbalance: float,
    ) -> None:
        self.shape, self.grid, self.memory, self.seq = shape, grid, memory, seq
        self.itemsize, self.imbalance = itemsize, imbalance
        self.unfused = stack.attention == "unfused"
        self.split = np.where(grid.sp, grid.tp, 1.0)
        self.heads = shape.heads / grid.tp
        self.kv_heads = np.maximum(shape.kv_heads / grid.tp, 1.0)
        self.residual = shape.width * itemsize / self.split
        self.whole = np.full_like(self.split, float(shape.width * itemsize))
        self.saved_size = memory.input_bytes or itemsize  # of an element that a matmul reads
        self.input = self.whole if memory.gathered_inputs else self.residual
        self.input = self.input * self.saved_size / itemsize

    def saved(self, routed: bool) -> Array:
        """By one layer without recomputation."""
        norms = 1 if self.shape.parallel_block else 2
        kept = norms * (self.residual + self._statistics / self.split)
        kept = kept + self.input + self._queries_keys_values() + self._attended()
        kept = kept + 2 * self.memory.mask_bytes * self.shape.width / self.split
        return kept + (self._routed() if routed else self._plain(norms))

    def saved_selectively(self, routed: bool) -> Array:
        """By one layer with selective recomputation."""
        if self.memory.selective == "core":
            return self.saved(routed) - self._core()
        if self.memory.selective == "remade":
            return self.saved(routed) - self._remade(routed)
        return self._every_second_matmul(routed)

    def inputs(self) -> Array:
        """By one layer with full recomputation."""
        return self.residual

    def at_head(self) -> Array:
        """By the final norm and the head, without logits."""
        kept = self.residual + self._statistics / self.split + self.input
        if self.memory.gathered_head_input:
            kept = kept + np.where(self.split > 1, self.whole, 0.0)
        return kept

    def rotary_tables(self) -> float:
        """Sines and cosines of a microbatch, which all layers of a stage share."""
        mla = self.shape.mla
        width = self.shape.head_dim if mla is None else mla.rope_dim
        return float(WIDE * width) if self.shape.positions == "rotary" else 0.0

    def backward_gradients(self, routed: bool = False) -> Array:
        """Gradients of activations inside one layer while its backward runs."""
        shape, moe, copies = self.shape, self.shape.moe, self.memory.backward_copies * self.itemsize
        if moe is None or not routed or not self.memory.weighed_bytes:
            return copies * shape.ffn / self.grid.tp
        weighed = self.memory.weighed_bytes * shape.width
        return self._slots() * np.maximum(weighed, copies * moe.ffn / self.grid.etp)

    def context_buffers(self) -> Array:
        """Keys and values of other context ranks, and their float32 gradients: the current block
        and the next one of the ring, or all blocks of an all-gather."""
        width = (self.shape.head_dim + self.shape.value_dim) * self.kv_heads
        ring = width * (2 * self.itemsize + WIDE)
        all_of_them = width * self.grid.cp * (self.itemsize + WIDE)
        gathers = self.grid.context_has(lambda kind: kind.gathers)
        return np.where(self.grid.cp > 1, np.where(gathers, all_of_them, ring), 0.0)

    def dispatch_buffers(self) -> Array:
        """Slots on their way to experts and back, of one layer; 0 if more are weighed at once."""
        if self.shape.moe is None or self.memory.weighed_bytes:
            return np.zeros(1)
        return np.where(self.grid.ep > 1, 2 * self._slots() * self.shape.width * self.itemsize, 0.0)

    @property
    def _statistics(self) -> float:
        return self.memory.statistics * (2 if self.shape.norm == "layer" else 1)

    def _queries_keys_values(self) -> Array:
        """As attention reads them; with QK norms, also as the norms read them."""
        shape, size = self.shape, self.itemsize
        if shape.mla is not None:
            return self._latents(shape.mla)
        found = (self.heads + 2 * self.kv_heads) * shape.head_dim * size
        if shape.qk_norm != "none":
            found = found + (self.heads + self.kv_heads) * shape.head_dim * size
        if self.memory.packed and shape.kv_heads == shape.heads:
            found = found + 2 * self.kv_heads * shape.head_dim * size
        return found

    def _latents(self, mla: Mla) -> Array:
        """Latents before and after their norms, on every tp rank; heads of queries and keys, and
        the projection that includes the values."""
        ranks = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim
        return ranks * self.itemsize + self._latent_heads(mla)

    def _latent_heads(self, mla: Mla) -> Array:
        heads = 2 * self.shape.head_dim + mla.nope_dim + mla.value_dim
        return self.heads * heads * self.itemsize

    def _attended(self) -> Array:
        return self.heads * self.shape.value_dim * self.itemsize + self._core()

    def _core(self) -> Array:
        """What attention saves for itself: its scores, or their log-sum-exp."""
        return self.heads * (self.memory.score_bytes * self.seq if self.unfused else LSE)

    def _plain(self, norms: int) -> Array:
        """An MLP with its input, which is also attention's if one norm serves both."""
        kept = self._mlp(self.shape.ffn / self.grid.tp)
        return kept + self.input if norms == 2 else kept

    def _mlp(self, width: Array) -> Array:
        """Saved inside an MLP of this width."""
        copies = self.memory.gated_copies if self.shape.gated else 2.0
        read = self.saved_size if self.memory.narrow_activations else self.itemsize
        return ((copies - 1) * read + self.saved_size) * width

    def _slots(self) -> Array:
        """Rows of this rank's experts per token of the microbatch."""
        moe = self.shape.moe
        assert moe is not None
        load = fullest_rank_load(moe, self.grid.ep, self.imbalance)
        return load * moe.top_k * self.grid.etp / self.split

    def _routed(self) -> Array:
        """The router's input and float32 scores; slots as they arrive, inside the experts, and as
        they come back; and the shared experts, whose input is the router's if that is not wide."""
        shape, moe, wide = self.shape, self.shape.moe, self.memory.wide_router
        assert moe is not None
        kept = (
            (WIDE if wide else self.itemsize) * shape.width + WIDE * 2 * moe.experts
        ) / self.split
        back = self.itemsize if self.memory.returned_slots else 0
        inside = shape.width * (self.saved_size + back) + self._mlp(moe.ffn / self.grid.etp)
        kept = kept + self._slots() * inside
        if moe.shared:
            kept = kept + (self.input if wide else 0.0) + self._mlp(moe.shared_ffn / self.grid.tp)
        return kept

    def _remade(self, routed: bool) -> Array:
        """Outputs of norms and of activations, which GEMMs do not save."""
        shape, moe, size = self.shape, self.shape.moe, self.saved_size
        kept = self.input
        if shape.mla is not None:
            kept = kept + ((shape.mla.q_rank or 0) + shape.mla.kv_rank) * self.itemsize
            if self.memory.remakes_heads:
                kept = kept + self._latent_heads(shape.mla)
        if not routed or moe is None:
            kept = kept + (self.input if not shape.parallel_block else 0.0)
            return kept + shape.ffn / self.grid.tp * size
        kept = kept + self.residual + self._slots() * moe.ffn / self.grid.etp * size
        return kept + moe.shared_ffn / self.grid.tp * size

    def _gate_and_up(self, routed: bool) -> Iterator[Array]:
        """Results of the matmuls into the MLPs' widths: gate and up."""
        shape, moe = self.shape, self.shape.moe
        copies = (2.0 if shape.gated else 1.0) * self.itemsize
        if not routed or moe is None:
            yield copies * shape.ffn / self.grid.tp
            return
        yield self._slots() * copies * moe.ffn / self.grid.etp
        yield copies * moe.shared_ffn / self.grid.tp

    def _every_second_matmul(self, routed: bool) -> Array:
        """The layer's input and result; queries, values, attention, and gate."""
        shape = self.shape
        heads = (self.heads * shape.head_dim + self.kv_heads * shape.value_dim) * self.itemsize
        half = sum(self._gate_and_up(routed)) / (2.0 if shape.gated else 1.0)
        return 2 * self.residual + heads + self._attended() + half


# --- Gradients over a backward


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


class StageGradients:
    """Bytes of the gradients of one stage.

    `matrix` counts the parameters of an embedding or a head, `owned` those of the rank's shards;
    `size` is the bytes of a gradient element, `unit_parameters` are reduced together. With
    `leave`, reduced gradients leave the device.
    """

    def __init__(
        self,
        parameters: RankParameters,
        stage: RankStage,
        grid: LayoutGrid,
        matrix: Array,
        owned: Array,
        size: int,
        unit_parameters: UnitParameters,
        leave: bool,
    ) -> None:
        self.grid, self.full, self.owned = grid, parameters.all * size, owned * size
        # If all microbatches are in flight before the first backward, no forward meets gradients.
        self.begun = grid.microbatches > stage.flight
        self.each_microbatch = (grid.zero >= 2) | leave
        if leave:
            self.owned = 0.0 * self.owned
        self.reduced = self.each_microbatch | ((grid.zero == 1) & (grid.microbatches == 1))
        dense = self.reduced & ((grid.shard * grid.cp > 1) | leave)
        experts = self.reduced & ((grid.edp > 1) | leave)
        self.head, self.flight = stage.head, stage.flight
        unit, routed = (each * size for each in unit_parameters)
        # Gradients of the head and one layer that are not sharded.
        self.unsharded = np.where(dense, 0.0, stage.head * matrix * size + unit)
        self.unsharded = self.unsharded + np.where(experts, 0.0, routed)
        # Unreduced bytes: of an end, of a dense unit, and of the last two and three units. The
        # experts of a layer are a unit of their own, after the rest of the layer.
        self.end = np.where(dense, matrix * size, 0.0)
        self.embedding = stage.embedding * self.end
        self.unit = np.where(dense, unit, 0.0)
        expert_unit = np.where(experts, routed, 0.0)
        larger = np.maximum(self.unit, expert_unit)
        two_units = np.where(routed > 0, self.unit + expert_unit, 2 * self.unit)
        self.two_units = np.minimum(two_units, self.full)  # units may hold many layers each
        self.three_units = np.minimum(self.two_units + larger, self.full)
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
        before, mine = self.at_loss(), self.head * self.end
        accumulated = np.where(self.begun, before.accumulated, self.unsharded)
        return GradientLevel(accumulated, before.unreduced + np.where(self.reduced, mine, 0.0))

    def at_last_layer(self) -> GradientLevel:
        """When the backward of the layers begins."""
        before = np.where(self.head > 0, self.embedding, self.two_units)
        before = np.where(self.begun & self.each_microbatch, before, 0.0)
        few = before + self.head * self.end + self.layer
        alone = np.where(self.flight > 1, 0.0, self.late_shards)
        accumulated = np.where(self.begun, self._so_far(), self.unsharded)
        return GradientLevel(accumulated, np.where(self.reduced, few, alone))

    def at_first_layer(self) -> GradientLevel:
        """When it ends, in the first layer or in the embedding."""
        most = np.maximum(self.three_units, self.embedding + self.two_units)
        accumulated = np.where(self.reduced, self.owned, self.full)
        return GradientLevel(accumulated, np.where(self.reduced, most, self._at_end_of_step()))

    def flight_after_backward(self) -> Array:
        """Microbatches in flight after a backward with all gradients; none if the step ends with
        it, which is when the shards of ZeRO-1 arrive."""
        return np.where(self._at_end_of_step() > 0, 0.0, self.flight - 1 / self.grid.chunks)

    def _at_end_of_step(self) -> Array:
        """Shards that arrive at the end of the step, beside sums of an earlier backward."""
        return np.where(self.begun, self.late_shards, 0.0)

    def _so_far(self) -> Array:
        """What earlier backwards have accumulated."""
        return np.where(self.begun, np.where(self.each_microbatch, self.owned, self.full), 0.0)
