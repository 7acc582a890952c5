"""Bytes that the forward of one microbatch leaves for its backward, op by op.

Each layer keeps the inputs of its norms, those of its products, queries, keys and values, what
attention returns, and what the MLP computes on its way. Tensor parallelism splits what is as wide
as heads or the MLP; sequence parallelism what is as wide as the model, but for inputs that a stack
keeps gathered.

Everything is in bytes of one token of the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fivefold.core.shape import Mla, Shape
from fivefold.cost.grid import CONTEXTS, Array, Grid, fullest_rank
from fivefold.cost.pipeline_ranks import EndStage
from fivefold.cost.stack import SoftwareStack, StackMemory

LSE = 4  # bytes of a head's log-sum-exp
WIDE = 4  # bytes of an element in float32


class Activations:
    """What layers keep on one rank, for each layout of a grid."""

    def __init__(
        self,
        shape: Shape,
        stack: SoftwareStack,
        keeps: StackMemory,
        grid: Grid,
        seq: int,
        itemsize: int,
        imbalance: float,
    ) -> None:
        self.shape, self.grid, self.keeps, self.seq = shape, grid, keeps, seq
        self.itemsize, self.imbalance = itemsize, imbalance
        self.unfused = stack.attention == "unfused"
        self.split = np.where(grid.sp, grid.tp, 1.0)
        self.heads = shape.heads / grid.tp
        self.kv_heads = np.maximum(shape.kv_heads / grid.tp, 1.0)
        self.residual = shape.width * itemsize / self.split
        self.whole = np.full_like(self.split, float(shape.width * itemsize))
        self.input = self.whole if keeps.gathered else self.residual

    def everything(self, routed: bool) -> Array:
        """Of one layer, without recomputation."""
        norms = 1 if self.shape.parallel_block else 2
        kept = norms * (self.residual + self._statistics / self.split)
        kept = kept + self.input + self._queries_keys_values() + self._attended()
        kept = kept + 2 * self.keeps.mask_bytes * self.shape.width / self.split
        return kept + (self._routed() if routed else self._plain(norms))

    def selected(self, routed: bool) -> Array:
        """Of one layer, with selective recomputation."""
        if self.keeps.selective == "core":
            return self.everything(routed) - self._core()
        return (
            self._every_product(routed)
            if self.keeps.selective == "products"
            else (self._every_second_product(routed))
        )

    def inputs(self) -> Array:
        """Of one layer, with full recomputation."""
        return self.residual

    def at_head(self) -> Array:
        """Of the final norm and the head, without logits."""
        kept = self.residual + self._statistics / self.split + self.input
        if self.keeps.whole_at_head:
            kept = kept + np.where(self.split > 1, self.whole, 0.0)
        return kept

    def tables(self) -> float:
        """Rotary angles of a microbatch, which all layers of a stage share: sines and cosines."""
        mla = self.shape.mla
        width = self.shape.head_dim if mla is None else mla.rope_dim
        return float(WIDE * width) if self.shape.positions == "rotary" else 0.0

    def inside(self, routed: bool = False) -> Array:
        """Gradients inside one layer, while its backward runs."""
        shape, moe, copies = self.shape, self.shape.moe, self.keeps.backward_copies * self.itemsize
        if moe is None or not routed or not self.keeps.weighed_bytes:
            return copies * shape.ffn / self.grid.tp
        weighed = self.keeps.weighed_bytes * shape.width
        return self._slots() * np.maximum(weighed, copies * moe.ffn / self.grid.etp)

    def of_other_ranks(self) -> Array:
        """Keys and values of other context ranks, and their gradients in float32: a block here
        and one on its way around the ring, or all of them at once."""
        width = (self.shape.head_dim + self.shape.value_dim) * self.kv_heads
        ring = width * (2 * self.itemsize + WIDE)
        all_of_them = width * self.grid.cp * (self.itemsize + WIDE)
        gathers = self.grid.context == CONTEXTS.index("allgather")
        return np.where(self.grid.cp > 1, np.where(gathers, all_of_them, ring), 0.0)

    def between_experts(self) -> Array:
        """Slots on their way to experts and back, of one layer; fewer than are weighed at once."""
        if self.shape.moe is None or self.keeps.weighed_bytes:
            return np.zeros(1)
        return np.where(self.grid.ep > 1, 2 * self._slots() * self.shape.width * self.itemsize, 0.0)

    @property
    def _statistics(self) -> float:
        return self.keeps.statistics * (2 if self.shape.norm == "layer" else 1)

    def _queries_keys_values(self) -> Array:
        """As attention takes them; with norms of heads, as those take them too."""
        shape, size = self.shape, self.itemsize
        if shape.mla is not None:
            return self._latents(shape.mla)
        found = (self.heads + 2 * self.kv_heads) * shape.head_dim * size
        if shape.qk_norm != "none":
            found = found + (self.heads + self.kv_heads) * shape.head_dim * size
        if self.keeps.packed and shape.kv_heads == shape.heads:
            found = found + 2 * self.kv_heads * shape.head_dim * size
        return found

    def _latents(self, mla: Mla) -> Array:
        """Latents in front of their norms and behind them, on every tp rank; heads of queries and
        keys, and the projection whose part the values are."""
        ranks = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim
        heads = 2 * self.shape.head_dim + mla.nope_dim + mla.value_dim
        return (ranks + self.heads * heads) * self.itemsize

    def _attended(self) -> Array:
        return self.heads * self.shape.value_dim * self.itemsize + self._core()

    def _core(self) -> Array:
        """What attention keeps for itself: its scores, or their sums."""
        return self.heads * (self.keeps.score_bytes * self.seq if self.unfused else LSE)

    def _plain(self, norms: int) -> Array:
        """An MLP with its input, which is attention's where one norm serves both."""
        kept = self._mlp(self.shape.ffn / self.grid.tp)
        return kept + self.input if norms == 2 else kept

    def _mlp(self, width: Array) -> Array:
        """Inside an MLP of this width."""
        copies = self.keeps.gated_copies if self.shape.gated else 2.0
        return copies * self.itemsize * width

    def _slots(self) -> Array:
        """Experts' rows on this rank for each token of the microbatch."""
        moe = self.shape.moe
        assert moe is not None
        load = fullest_rank(moe, self.grid.ep, self.imbalance)
        return load * moe.top_k * self.grid.etp / self.split

    def _routed(self) -> Array:
        """The router's input in float32 and its scores; slots as they arrive, inside the experts
        and as they come back; and the shared experts."""
        shape, moe = self.shape, self.shape.moe
        assert moe is not None
        kept = WIDE * (shape.width + 2 * moe.experts) / self.split
        inside = 2 * shape.width * self.itemsize + self._mlp(moe.ffn / self.grid.etp)
        kept = kept + self._slots() * inside
        if moe.shared:
            kept = kept + self.input + self._mlp(moe.shared_ffn / self.grid.tp)
        return kept

    def _every_product(self, routed: bool) -> Array:
        """The layer's input, results of products, attention and collectives.

        Of the products, that out of an MLP only where a stack keeps what no backward reads. Where
        results are weighed, as experts' and gated shared ones', the weights' gradient reads them.
        """
        shape, size = self.shape, self.itemsize
        kept = self.residual + self._projections() + self._attended() + self.whole
        between = np.where(self.grid.tp > 1, self.whole + self.residual, 0.0)
        kept = kept + between + sum(self._middles(routed))
        out = self.whole if self.keeps.unread else 0.0
        if not routed:
            return kept + out + between
        assert shape.moe is not None
        kept = kept + WIDE * shape.moe.experts / self.split  # the router's
        travelling = np.where(self.grid.ep > 1, 3.0, 1.0)  # there, back, and the product's result
        kept = kept + self._slots() * travelling * shape.width * size
        out = self.whole if shape.moe.shared_gated else out
        return kept + (out + between if shape.moe.shared else 0.0)

    def _projections(self) -> Array:
        """Results of the projections into heads."""
        shape, mla = self.shape, self.shape.mla
        if mla is None:
            return (self.heads + 2 * self.kv_heads) * shape.head_dim * self.itemsize
        ranks = (mla.q_rank or 0) + mla.kv_rank + mla.rope_dim
        heads = shape.head_dim + mla.nope_dim + mla.value_dim
        return (ranks + self.heads * heads) * self.itemsize

    def _middles(self, routed: bool) -> Iterator[Array]:
        """Results of the products into the widths of MLPs: gate and up."""
        shape, moe = self.shape, self.shape.moe
        copies = (2.0 if shape.gated else 1.0) * self.itemsize
        if not routed or moe is None:
            yield copies * shape.ffn / self.grid.tp
            return
        yield self._slots() * copies * moe.ffn / self.grid.etp
        yield copies * moe.shared_ffn / self.grid.tp

    def _every_second_product(self, routed: bool) -> Array:
        """The layer's input and result; queries, values, attention, and gate."""
        shape = self.shape
        heads = (self.heads * shape.head_dim + self.kv_heads * shape.value_dim) * self.itemsize
        half = sum(self._middles(routed)) / (2.0 if shape.gated else 1.0)
        return 2 * self.residual + heads + self._attended() + half


# Gradients over a backward, at the moments when a rank may hold most.
#
# The first backward of a step makes the sums of gradients, unit by unit, while activations go:
# all activations meet no gradients, and all gradients few activations. From the next one on all
# meet all. Where data ranks own slices, the sum of a unit is whole only until the others have it:
# of three units at the most, two on their way and one that is filled.


class GradientBytes(NamedTuple):
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
        self,
        held: GradientBytes,
        stage: EndStage,
        grid: Grid,
        matrix: Array,
        owned: Array,
        size: int,
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
