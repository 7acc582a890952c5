"""Seconds of one layer, of the head and of the embedding, for one microbatch on one rank.

Matrix products take their FLOPs over what the chip reaches, and a start each. Elementwise kernels
are added to them, not hidden: they take their bytes over the memory's bandwidth. Every part is a
name with its seconds, so that a step can be taken apart again.

Legend: T tokens of a microbatch on a context rank, D width, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fivefold.core.count import visible_keys
from fivefold.core.machine import Machine
from fivefold.core.shape import Mla, Moe, Shape
from fivefold.cost.grid import CONTEXTS, Array, Grid, fullest_rank
from fivefold.cost.links import Links
from fivefold.cost.stack import SoftwareStack

Parts = dict[str, Array]

# Seconds of attention's backward over its forward: 2.5 times the FLOPs, at 0.81 of the speed with
# cuDNN and 0.87 with FlashAttention-2, as measured on one H200.
ATTENTION_BACKWARD = 3.0
# Passes over the scores of attention in separate kernels (scale and mask, softmax, dropout, and
# what the products read and write), forward and backward.
SCORE_PASSES, SCORE_PASSES_BACKWARD = 5.5, 9.5
# Bytes that the merge of two partial results moves for each element of attention's output: the
# sum so far, in 32 bits, read and written, and the visit's result.
MERGE_BYTES = 10.0
# Rows of an expert's product are padded to tiles of 128: half a tile is lost on average.
PADDED_ROWS = 64.0
# Bytes that 8-bit products move for each element of their inputs: read in 16 bits, written twice.
CAST_BYTES = 4.0


class Gemm(NamedTuple):
    """A matrix product of every token: sizes on one rank."""

    outputs: Array
    inputs: Array


@dataclass(frozen=True)
class LayerTimes:
    """Seconds by part: forward, gradients of inputs and of weights, and forward once again."""

    forward: Parts
    inputs: Parts
    weights: Parts
    again: Parts


def total(parts: Parts) -> Array:
    return sum(parts.values(), np.zeros(1))


class LayerTimer:
    """The speeds of one chip for one model: turns work into seconds."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        stack: SoftwareStack,
        grid: Grid,
        seq: int,
        precision: str,
        imbalance: float = 1.0,
    ) -> None:
        self.imbalance = imbalance
        self.shape, self.machine, self.stack, self.grid, self.seq = shape, machine, stack, grid, seq
        self.links, self.reach = Links(machine), machine.efficiency
        self.wide = "bf16" if precision == "fp8" else precision
        self.precision = precision
        self.itemsize = 4 if precision == "fp32" else 2
        self.tokens = grid.rows * seq / grid.cp
        self.split = np.where(grid.sp, grid.tp, 1.0)
        self.tp_stride = np.ones_like(grid.tp)
        self.speed = machine.peak(self.wide) * self.reach.matmul
        self.narrow_speed = self.speed
        if precision == "fp8":
            self.narrow_speed = machine.peak("fp8") * self.reach.matmul_fp8

    def product(self, flops: Array, narrow: bool) -> Array:
        """Seconds of one matrix product."""
        return flops / (self.narrow_speed if narrow else self.speed) + self.reach.start

    def moved(self, size: Array) -> Array:
        """Seconds to read or write so many bytes."""
        return size / (self.machine.memory_bandwidth * self.reach.memory)

    def _accumulated(self, size: Array) -> Array:
        """Seconds to add the gradients of so many weights to the sum over microbatches."""
        return self.moved(self.stack.accumulated_bytes * size)

    def message(self) -> Array:
        """Seconds of a microbatch's activations to the next stage."""
        grid = self.grid
        size = self.tokens * self.shape.width * self.itemsize / self.split
        if self.stack.scatters_messages:
            size = size / np.where(grid.sp, 1.0, grid.tp)
        return self.links.pair(size, grid.tp * grid.cp * grid.dp)

    def layer(self, i: int) -> LayerTimes:
        """Layer i of the model."""
        shape = self.shape
        moe = shape.moe if shape.is_moe_layer(i) else None
        products = [*self._attention_products()]
        if moe is None:
            products += self._mlp_products(shape.ffn)
        seconds = self._products(products)
        core, core_backward = self._attention(i)
        elementwise = self._elementwise(shape.ffn if moe is None else 0)
        cast = self._casts(products)
        split_blocks = 1 if moe is not None or shape.parallel_block else 2
        sums = split_blocks * self._tp_sum()
        forward: Parts = {"products": seconds, "attention": core, "tp": sums}
        forward["elementwise"] = elementwise + cast + split_blocks * self._copies(1)
        inputs: Parts = {"products": seconds, "attention": core_backward, "tp": sums}
        num_gathers: Array | int = 1
        if self.stack.gathers_again:
            num_gathers = np.where(self.grid.sp & (self.grid.recompute == 0), 2, 1)
            inputs["tp"] = sums * (1 + num_gathers) / 2
        passes = self.stack.elementwise_backward * elementwise + cast
        copies = split_blocks * self._copies(num_gathers)
        inputs["elementwise"] = passes + copies + self._whole(self.stack.summed_passes)
        size = sum((each.outputs * each.inputs for each in products), np.zeros(1))
        weights: Parts = {"products": seconds + self._accumulated(size)}
        if moe is not None:
            self._add_experts(moe, forward, inputs, weights)
        if self.grid.cp.max() > 1:
            self._add_context(forward, inputs)
        again = self._again(forward)
        if self.stack.stops_early and moe is None:
            spared = np.where(self.grid.recompute == 2, self._products(products[-1:]), 0.0)
            again["products"] = again["products"] - self.stack.recomputed * spared
        return LayerTimes(forward, inputs, weights, again)

    def _again(self, forward: Parts) -> Parts:
        """What recomputation repeats: everything, or the attention core of unfused kernels."""
        full = np.where(self.grid.recompute == 2, self.stack.recomputed, 0.0)
        selective = self.grid.recompute == 1
        found = {name: full * each for name, each in forward.items()}
        cheap = "attention" if self.stack.attention == "unfused" else "elementwise"
        found[cheap] = found[cheap] + selective * forward[cheap]
        if self.stack.repeated:
            found["products"] = (
                found["products"] + self.stack.repeated * selective * forward["products"]
            )
        return found

    def head(self) -> LayerTimes:
        """The LM head and the loss, once more for each layer that predicts further tokens."""
        shape, grid = self.shape, self.grid
        words = shape.vocab / grid.tp
        seconds = self.product(2 * self.tokens * shape.width * words, narrow=False)
        seconds = (1 + shape.mtp) * seconds / self.stack.head_reach
        loss = (1 + shape.mtp) * self.moved(self.stack.loss_bytes * self.tokens * words)
        sums = (1 + shape.mtp) * self._tp_sum() / 2
        forward = {"head": seconds + loss / 2, "tp": sums}
        weights = {"head": seconds + self._accumulated(shape.width * words)}
        return LayerTimes(forward, {"head": seconds + loss / 2, "tp": sums}, weights, {})

    def _products(self, products: list[Gemm]) -> Array:
        flops = sum((each.outputs * each.inputs for each in products), np.zeros(1))
        return 2 * self.tokens * flops / self.narrow_speed + len(products) * self.reach.start

    def _casts(self, products: list[Gemm]) -> Array:
        """Inputs of 8-bit products are cast first."""
        if self.precision != "fp8":
            return np.zeros(1)
        return self.moved(CAST_BYTES * self.tokens * sum(each.inputs for each in products))

    def _attention_products(self) -> Iterator[Gemm]:
        shape, tp = self.shape, self.grid.tp
        heads = shape.heads / tp
        whole = np.full_like(tp, float(shape.width))
        if shape.mla is None:
            kv_heads = np.maximum(shape.kv_heads / tp, 1.0)
            yield Gemm((heads + 2 * kv_heads) * shape.head_dim, whole)
        else:
            yield from self._latent_products(shape.mla, heads, whole)
        yield Gemm(whole, heads * shape.value_dim)

    def _latent_products(self, mla: Mla, heads: Array, whole: Array) -> Iterator[Gemm]:
        ones = np.ones_like(whole)
        if mla.q_rank is None:
            yield Gemm(heads * self.shape.head_dim, whole)
        else:
            yield Gemm(ones * mla.q_rank, whole)
            yield Gemm(heads * self.shape.head_dim, ones * mla.q_rank)
        yield Gemm(ones * (mla.kv_rank + mla.rope_dim), whole)
        yield Gemm(heads * (mla.nope_dim + mla.value_dim), ones * mla.kv_rank)

    def _mlp_products(self, ffn: int) -> list[Gemm]:
        width, inner = np.full_like(self.grid.tp, float(self.shape.width)), ffn / self.grid.tp
        return [Gemm(inner * (2 if self.shape.gated else 1), width), Gemm(width, inner)]

    def _attention(self, i: int) -> tuple[Array, Array]:
        """The core of attention, forward and backward."""
        shape, grid, reach = self.shape, self.grid, self.reach
        heads = shape.heads / grid.tp
        peak = self.machine.peak(self.wide)
        if self.stack.attention == "unfused":
            pairs = grid.rows * self.seq * self.seq / grid.cp * heads
            flops = 2 * pairs * (shape.head_dim + shape.value_dim)
            products = flops / (peak * reach.unfused) + 2 * reach.start
            scores = self.moved(pairs * self.itemsize)
            backward = 2 * products + SCORE_PASSES_BACKWARD * scores
            return products + SCORE_PASSES * scores, backward
        keys = visible_keys(shape, i, self.seq)
        flops = 2 * self.tokens * keys * heads * (shape.head_dim + shape.value_dim)
        reached = reach.attention if self.stack.attention == "fused" else reach.attention_old
        seconds = flops / (peak * reached) + reach.start
        return seconds, ATTENTION_BACKWARD * seconds

    def _elementwise(self, ffn: int) -> Array:
        shape, grid, stack = self.shape, self.grid, self.stack
        wide = stack.wide_passes * shape.width / self.split
        heads = shape.heads * shape.head_dim + shape.kv_heads * shape.head_dim
        inner = heads + ffn * (1.5 if shape.gated else 1.0)
        narrow = (stack.narrow_passes * inner + stack.rotary_passes * self._rotated()) / grid.tp
        return self.moved((wide + narrow) * self.tokens * self.itemsize)

    def _rotated(self) -> float:
        """Width of what positions turn: queries and keys, or of latent ones the queries' part."""
        shape = self.shape
        if shape.positions != "rotary":
            return 0.0
        if shape.mla is not None:
            return float(shape.heads * shape.mla.rope_dim)
        return float((shape.heads + shape.kv_heads) * shape.head_dim)

    def _whole(self, passes: Array | float) -> Array:
        """Seconds of so many passes over tokens of the model's width that nothing splits."""
        return self.moved(passes * self.tokens * self.shape.width * self.itemsize)

    def _copies(self, num_gathers: Array | int) -> Array:
        """Tokens in the order of ranks: all that is scattered is read and written first, and where
        a microbatch has several rows, all that was gathered too."""
        if not self.stack.copies_tokens:
            return np.zeros(1)
        grid = self.grid
        num_copies = 1 + np.where(grid.rows > 1, num_gathers, 0)
        return self._whole(np.where(grid.sp & (grid.tp > 1), 2 * num_copies, 0))

    def _tp_sum(self) -> Array:
        """The two collectives around a split computation, as far as they show."""
        size = self.tokens * self.shape.width * self.itemsize
        seconds = 2 * self.links.ring(size, self.grid.tp, self.tp_stride)
        if self.links.reduces and not self.grid.sp.all():
            summed = self.links.all_reduce(size, self.grid.tp, self.tp_stride)
            seconds = np.where(self.grid.sp, seconds, summed)
        return seconds * (1 - self.stack.tp_hidden)

    def _add_experts(self, moe: Moe, forward: Parts, inputs: Parts, weights: Parts) -> None:
        shape, grid = self.shape, self.grid
        tokens = self.tokens / self.split
        # All wait for the rank with the fullest expert: what it gets, computes and sends back.
        slots = tokens * moe.top_k * fullest_rank(moe, grid.ep, self.imbalance)
        rows = slots * grid.etp + PADDED_ROWS * moe.experts / grid.ep
        inner = (3 if shape.gated else 2) * moe.ffn / grid.etp
        # A product with few rows waits for its weights, which are read at the memory's speed.
        read = self.moved(moe.experts / grid.ep * shape.width * inner * self.itemsize)
        grouped = np.maximum(2 * rows * shape.width * inner / self.narrow_speed, read)
        grouped = grouped + 2 * self.reach.start
        router = self._router(2 * tokens * shape.width * moe.experts)
        seconds, sums = grouped + router, np.zeros(1)
        if moe.shared:
            seconds = seconds + self._products(self._mlp_products(moe.shared_ffn))
            sums = self._tp_sum()
        passes = self.stack.slot_passes * shape.width + inner
        elementwise = self.moved(passes * slots * grid.etp * self.itemsize)
        copies = moe.groups_kept if moe.groups > 1 else moe.top_k
        travel = 2 * self.links.all_to_all(
            slots * shape.width * self.itemsize,
            grid.ep,
            grid.etp,
            (moe.top_k, copies) if self.stack.crosses_once else None,
        )
        travel = travel * (1 - self.stack.experts_hidden)
        gathers = 2 * self.links.ring(
            tokens * grid.etp * shape.width * self.itemsize, grid.etp, self.tp_stride
        )
        for parts, factor in ((forward, 1.0), (inputs, self.stack.elementwise_backward)):
            parts["elementwise"] = parts["elementwise"] + factor * elementwise
            parts["experts"] = seconds
            parts["tp"] = parts["tp"] + sums + gathers
            parts["ep"] = travel
            parts["launch"] = np.full_like(travel, self.stack.expert_wait)
        size = moe.experts / grid.ep * shape.width * inner
        weights["experts"] = seconds + self._accumulated(size)

    def _router(self, flops: Array) -> Array:
        """The product that scores experts, in 32 bits where a rounded score must not choose."""
        if not self.stack.wide_router:
            return self.product(flops, narrow=False)
        peak = self.machine.peaks.known().get("fp32", self.machine.peak(self.wide))
        return flops / (peak * self.reach.matmul) + self.reach.start

    def _add_context(self, forward: Parts, inputs: Parts) -> None:
        """What a split of the sequence adds to attention.

        Rings hide keys and values behind attention, and merge a partial result with every visit;
        only zigzag gives all ranks the same work. A gather shows, and so do the exchanges of
        sequence for heads.
        """
        shape, grid = self.shape, self.grid
        split = grid.cp > 1
        kind = {name: grid.context == number for number, name in enumerate(CONTEXTS)}
        heads = shape.heads / grid.tp * shape.value_dim
        keys = np.maximum(shape.kv_heads / grid.tp, 1.0) * (shape.head_dim + shape.value_dim)
        tokens = self.tokens * self.itemsize
        travel = self.links.ring(tokens * keys * grid.cp, grid.cp, grid.tp)
        swap = self.links.all_to_all(tokens * (2 * heads + keys), grid.cp, grid.tp)
        whole = kind["allgather"] | kind["ulysses"]
        merges = self.moved(MERGE_BYTES * self.tokens * heads) * (grid.cp - 1)
        uneven = np.where(kind["ring"] & split, 2 - 1 / grid.cp, 1.0)
        for parts, times in ((forward, 1.0), (inputs, 2.0)):
            core = parts["attention"] * uneven + np.where(whole, 0.0, merges)
            shown = np.maximum(0.0, times * travel - core)
            shown = np.where(kind["allgather"], times * travel, shown)
            shown = np.where(kind["ulysses"] | kind["hybrid"], swap, shown)
            parts["attention"] = core
            parts["cp"] = np.where(split, shown, 0.0)
