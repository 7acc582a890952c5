"""Seconds of one layer and of the head, for one microbatch on one rank.

A matmul takes its FLOPs over the speed that the chip reaches, and a start. Elementwise kernels are
added, not hidden: they take their bytes over the memory bandwidth that the chip reaches. Seconds
are kept by part (products, attention, tp, ...), so that the parts of a step can be shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fivefold.core.count import visible_keys
from fivefold.core.machine import Machine
from fivefold.core.precision import PRECISIONS, itemsize_of, matmul_bytes
from fivefold.core.shape import Mla, Moe, Shape
from fivefold.cost.frozen import freeze
from fivefold.cost.grid import Array, LayoutGrid, fullest_rank_load, layer_job
from fivefold.cost.layer_collectives import (
    UNEVEN_AXES,
    CountedCollective,
    context_layer,
    expert_layer,
    tensor_ends,
    tensor_layer,
)
from fivefold.cost.links import Links
from fivefold.cost.overlap import hide_exchange, shown_seconds
from fivefold.cost.stack import SoftwareStack

TimeParts = dict[str, Array]

# Seconds of attention's backward over its forward: 2.5 times the FLOPs, at 0.81 of the speed with
# cuDNN and 0.87 with FlashAttention-2, as measured on one H200.
ATTENTION_BACKWARD = 3.0
# Passes over the scores of unfused attention (scale and mask, softmax, dropout, and what the
# matmuls read and write), in forward and backward.
SCORE_PASSES, SCORE_PASSES_BACKWARD = 5.5, 9.5
# Rows of an expert's matmul are padded to tiles of 128: half a tile is lost on average.
PADDED_ROWS = 64.0
# Bytes that 8-bit matmuls move per element of their inputs: read in 16 bits, written twice.
CAST_BYTES = 4.0
# The part of a step that an axis belongs to.
_PARTS = {"tp": "tp", "etp": "tp", "ulysses": "cp", "ring": "cp"} | dict.fromkeys(UNEVEN_AXES, "ep")


class Gemm(NamedTuple):
    """A matmul of every token: its sizes on one rank."""

    outputs: Array
    inputs: Array


@dataclass(frozen=True)
class LayerTimes:
    """Seconds by part: forward, input gradient, weight gradient, and recomputation."""

    forward: TimeParts
    inputs: TimeParts
    weights: TimeParts
    again: TimeParts


def total_seconds(parts: TimeParts) -> Array:
    return sum(parts.values(), np.zeros(1))


class LayerTimer:
    """Times the layers and the head of one model on one machine, for every layout of a grid."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        stack: SoftwareStack,
        grid: LayoutGrid,
        seq: int,
        precision: str,
        imbalance: float = 1.0,
    ) -> None:
        self.imbalance = imbalance
        self.shape, self.machine, self.stack, self.grid, self.seq = shape, machine, stack, grid, seq
        self.links, self.reach = Links(machine, grid.world), machine.efficiency
        self._hidden = {"tp": stack.tp_hidden, "ep": stack.experts_hidden}
        self.wide = PRECISIONS[precision].runs_in if precision in PRECISIONS else precision
        self.precision = precision
        self.itemsize = itemsize_of(precision)
        self.job = layer_job(
            shape,
            grid,
            seq,
            self.itemsize,
            keeps_shards=stack.gathers_again and not stack.saves_gathered,
            node=machine.tiers[0].size if stack.node_by_node else None,
        )
        self.tokens = self.job.tokens
        self.split = np.where(grid.sp, grid.tp, 1.0)
        self.peak = machine.peak(self.wide) * stack.compute_share
        self.speed = self.narrow_speed = self.peak * self.reach.matmul
        self.late_speed = 1.0  # of weight gradients, over that of other matmuls
        self.dispatched = 1.0  # bytes of dispatch and combine, over those of wide activations
        if precision != self.wide:
            reached = self.reach.matmul_fp4 if precision == "nvfp4" else self.reach.matmul_fp8
            self.narrow_speed = machine.peak(precision) * stack.compute_share * reached
            self.late_speed = stack.weight_gradient_share
            if stack.narrow_dispatch:
                self.dispatched = (1 + matmul_bytes(precision) / self.itemsize) / 2

    def matmul(self, flops: Array, narrow: bool) -> Array:
        """Seconds of one matmul."""
        return flops / (self.narrow_speed if narrow else self.speed) + self.reach.start

    def moved(self, size: Array) -> Array:
        """Seconds to read or write so many bytes."""
        return size / (self.machine.memory_bandwidth * self.reach.memory)

    def _accumulated(self, size: Array) -> Array:
        """Seconds to accumulate the gradients of so many weights over microbatches."""
        return self.moved(self.stack.accumulated_bytes * size)

    def message(self) -> Array:
        """Seconds to send the activations of a microbatch to the next stage."""
        grid = self.grid
        size = self.tokens * self.shape.width * self.itemsize / self.split
        if self.stack.scatters_messages:
            size = size / np.where(grid.sp, 1.0, grid.tp)
        return self.links.send(size, grid.tp * grid.cp * grid.dp)

    def layer(self, i: int) -> LayerTimes:
        """Layer i of the model."""
        shape = self.shape
        moe = shape.moe if shape.is_moe_layer(i) else None
        gemms = [*self._attention_gemms()]
        if moe is None:
            gemms += self._mlp_gemms(shape.ffn)
        seconds = self._gemm_seconds(gemms)
        core, core_backward = self._attention(i)
        elementwise = self._elementwise(shape.ffn if moe is None else 0)
        cast = self._casts(gemms)
        split_blocks = 1 if moe is not None or shape.parallel_block else 2
        forward: TimeParts = {"products": seconds, "attention": core}
        forward["elementwise"] = elementwise + cast + split_blocks * self._token_copies(1)
        inputs: TimeParts = {"products": seconds, "attention": core_backward}
        num_gathers = np.where(self.job.full > 0, 1, 1 + self.job.keeps_shards)
        passes = self.stack.elementwise_backward * elementwise + cast
        copies = split_blocks * self._token_copies(num_gathers)
        inputs["elementwise"] = passes + copies + self._all_tokens(self.stack.summed_passes)
        size = sum((each.outputs * each.inputs for each in gemms), np.zeros(1))
        weights: TimeParts = {"products": seconds / self.late_speed + self._accumulated(size)}
        if moe is not None:
            self._add_experts(moe, forward, inputs, weights)
        again = self._recomputation(forward)
        if self.stack.stops_early and moe is None:
            skipped = np.where(self.grid.recompute == 2, self._gemm_seconds(gemms[-1:]), 0.0)
            again["products"] = again["products"] - self.stack.recomputed * skipped
        times = LayerTimes(forward, inputs, weights, again)
        if self.stack.frozen:
            freeze((forward, inputs), weights, self._adapter_seconds(gemms))
        self._add_traffic(times, moe)
        if self.grid.cp.max() > 1:
            self._add_context(times)
        if moe is not None:
            shared = self._gemm_seconds(self._mlp_gemms(moe.shared_ffn)) if moe.shared else 0.0
            passes = (times.forward, times.inputs, times.again)
            hide_exchange(passes, times.weights, shared, self.grid, self.stack)
        return times

    def _add_traffic(self, times: LayerTimes, moe: Moe | None) -> None:
        """The collectives of the layer, without those inside attention."""
        ends_segment = int(self.stack.stops_early)
        issued = [*tensor_layer(self.job, moe is not None, ends_segment)]
        if moe is not None:
            issued += expert_layer(self.job, moe, ends_segment)
        joined = self.stack.joins_blocks and self.shape.parallel_block and moe is None
        for each in issued:
            part = _PARTS[each.axis]
            seconds = self._seconds_of(each) * (1 - self._hidden[part])
            if joined and part == "tp":
                seconds = seconds / 2
            self._add(times, part, seconds, each)

    def _add(self, times: LayerTimes, part: str, seconds: Array, issued: CountedCollective) -> None:
        """Add so many collectives of so many seconds each."""
        counts = (issued.forward, issued.backward, self.stack.recomputed * issued.again)
        for parts, count in zip((times.forward, times.inputs, times.again), counts, strict=True):
            parts[part] = parts.get(part, np.zeros(1)) + count * seconds

    def _seconds_of(self, issued: CountedCollective) -> Array:
        """Seconds of one of these collectives."""
        job, size, once = self.job, issued.bytes, None
        near = job.etp * (job.ep // job.ep_nodes)
        strides = {"etp": 1, "tp": 1, "ulysses": job.tp, "ring": job.tp * job.inner}
        strides |= {"ep": job.etp, "ep-near": job.etp, "ep-far": near}
        stride = strides[issued.axis] * np.ones_like(self.grid.tp)
        moe = self.shape.moe
        if moe is not None and _PARTS[issued.axis] == "ep":
            # All ranks wait for the rank with the fullest expert.
            size = size * fullest_rank_load(moe, self.grid.ep, self.imbalance) * self.dispatched
            copies = moe.groups_kept if moe.groups > 1 else moe.top_k
            once = (moe.top_k, copies) if self.stack.crosses_once else None
        ranks = issued.group * np.ones_like(self.grid.tp)
        seconds = self.links.seconds(issued.kind, size, ranks, stride, once)
        if self.stack.node_wait and issued.axis == "tp":
            seconds = seconds + self.stack.node_wait * (self.links.domains(ranks, stride) - 1)
        return seconds

    def _recomputation(self, forward: TimeParts) -> TimeParts:
        """What is computed again: the full forward; or, if selective, attention (unfused) or the
        elementwise kernels, and some matmuls."""
        full = np.where(self.grid.recompute == 2, self.stack.recomputed, 0.0)
        selective = self.grid.recompute == 1
        found = {name: full * each for name, each in forward.items()}
        cheap = "attention" if self.stack.attention == "unfused" else "elementwise"
        found[cheap] = found[cheap] + selective * forward[cheap]
        if self.stack.selective_repeats:
            found["products"] = (
                found["products"] + self.stack.selective_repeats * selective * forward["products"]
            )
        return found

    def head(self) -> LayerTimes:
        """The LM head and the loss, and again for each MTP layer."""
        shape, grid = self.shape, self.grid
        words = shape.vocab / grid.tp
        seconds = self.matmul(2 * self.tokens * shape.width * words, narrow=False)
        seconds = (1 + shape.mtp) * seconds / self.stack.head_efficiency
        loss = (1 + shape.mtp) * self.moved(self.stack.loss_bytes * self.tokens * words)
        learns = 0.0 if self.stack.frozen else 1.0
        weights = {"head": learns * (seconds + self._accumulated(shape.width * words))}
        forward, inputs = ({"head": seconds + loss / 2} for _ in range(2))
        times = LayerTimes(forward, inputs, weights, {})
        lookups = shape.mtp + np.where(grid.pp == 1, 1, 0)
        for each in tensor_ends(self.job, lookups, 1 + shape.mtp):
            self._add(times, "tp", self._seconds_of(each) * (1 - self._hidden["tp"]), each)
        return times

    def _gemm_seconds(self, gemms: list[Gemm]) -> Array:
        flops = sum((each.outputs * each.inputs for each in gemms), np.zeros(1))
        return 2 * self.tokens * flops / self.narrow_speed + len(gemms) * self.reach.start

    def _adapter_seconds(self, gemms: list[Gemm]) -> Array:
        """One pass of low-rank adapters beside so many matmuls."""
        size = sum((each.outputs + each.inputs for each in gemms), np.zeros(1))
        start = 2 * len(gemms) * self.reach.start if self.stack.lora_rank else 0.0
        return 2 * self.tokens * self.stack.lora_rank * size / self.speed + start

    def _casts(self, gemms: list[Gemm]) -> Array:
        """Casts of the inputs of matmuls in fewer bits than activations have."""
        if self.precision == self.wide:
            return np.zeros(1)
        return self.moved(CAST_BYTES * self.tokens * sum(each.inputs for each in gemms))

    def _attention_gemms(self) -> Iterator[Gemm]:
        shape, tp = self.shape, self.grid.tp
        heads = shape.heads / tp
        whole = np.full_like(tp, float(shape.width))
        if shape.mla is None:
            kv_heads = np.maximum(shape.kv_heads / tp, 1.0)
            yield Gemm((heads + 2 * kv_heads) * shape.head_dim, whole)
        else:
            yield from self._latent_gemms(shape.mla, heads, whole)
        yield Gemm(whole, heads * shape.value_dim)

    def _latent_gemms(self, mla: Mla, heads: Array, whole: Array) -> Iterator[Gemm]:
        ones = np.ones_like(whole)
        if mla.q_rank is None:
            yield Gemm(heads * self.shape.head_dim, whole)
        else:
            yield Gemm(ones * mla.q_rank, whole)
            yield Gemm(heads * self.shape.head_dim, ones * mla.q_rank)
        yield Gemm(ones * (mla.kv_rank + mla.rope_dim), whole)
        yield Gemm(heads * (mla.nope_dim + mla.value_dim), ones * mla.kv_rank)

    def _mlp_gemms(self, ffn: int) -> list[Gemm]:
        width, inner = np.full_like(self.grid.tp, float(self.shape.width)), ffn / self.grid.tp
        return [Gemm(inner * (2 if self.shape.gated else 1), width), Gemm(width, inner)]

    def _attention(self, i: int) -> tuple[Array, Array]:
        """The core of attention, forward and backward."""
        shape, grid, reach = self.shape, self.grid, self.reach
        heads = shape.heads / grid.tp
        peak = self.peak
        if self.stack.attention == "unfused":
            pairs = grid.microbatch_size * self.seq * self.seq / grid.cp * heads
            flops = 2 * pairs * (shape.head_dim + shape.value_dim)
            matmuls = flops / (peak * reach.unfused) + 2 * reach.start
            scores = self.moved(pairs * self.itemsize)
            backward = 2 * matmuls + SCORE_PASSES_BACKWARD * scores
            return matmuls + SCORE_PASSES * scores, backward
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
        """Width of what rotary positions rotate: queries and keys; of MLA, the rotary part of the
        queries."""
        shape = self.shape
        if shape.positions != "rotary":
            return 0.0
        if shape.mla is not None:
            return float(shape.heads * shape.mla.rope_dim)
        return float((shape.heads + shape.kv_heads) * shape.head_dim)

    def _all_tokens(self, passes: Array | float) -> Array:
        """Seconds of so many passes over all tokens of the tp group, in the model's width."""
        return self.moved(passes * self.tokens * self.shape.width * self.itemsize)

    def _token_copies(self, num_gathers: Array | int) -> Array:
        """Copies of tokens into rank order: before each reduce-scatter, and, if a microbatch has
        several sequences, after each all-gather."""
        if not self.stack.copies_tokens:
            return np.zeros(1)
        grid = self.grid
        num_copies = 1 + np.where(grid.microbatch_size > 1, num_gathers, 0)
        return self._all_tokens(np.where(grid.sp & (grid.tp > 1), 2 * num_copies, 0))

    def _add_experts(
        self, moe: Moe, forward: TimeParts, inputs: TimeParts, weights: TimeParts
    ) -> None:
        shape, grid = self.shape, self.grid
        tokens = self.tokens / self.split
        # All ranks wait for the rank with the fullest expert: its dispatch, compute and combine.
        slots = tokens * moe.top_k * fullest_rank_load(moe, grid.ep, self.imbalance)
        rows = slots * grid.etp + PADDED_ROWS * moe.experts / grid.ep
        inner = (3 if shape.gated else 2) * moe.ffn / grid.etp
        # A matmul with few rows is bound by reading its weights from memory.
        read = self.moved(moe.experts / grid.ep * shape.width * inner * self.itemsize)
        grouped = np.maximum(2 * rows * shape.width * inner / self.narrow_speed, read)
        grouped = grouped + 2 * self.reach.start
        router = self._router(2 * tokens * shape.width * moe.experts)
        seconds = grouped + router
        if moe.shared:
            seconds = seconds + self._gemm_seconds(self._mlp_gemms(moe.shared_ffn))
        passes = self.stack.slot_passes * shape.width + inner
        elementwise = self.moved(passes * slots * grid.etp * self.itemsize)
        for parts, factor in ((forward, 1.0), (inputs, self.stack.elementwise_backward)):
            parts["elementwise"] = parts["elementwise"] + factor * elementwise
            parts["experts"] = seconds
            parts["launch"] = np.full_like(grid.ep, self.stack.expert_wait)
        size = moe.experts / grid.ep * shape.width * inner
        weights["experts"] = seconds / self.late_speed + self._accumulated(size)

    def _router(self, flops: Array) -> Array:
        """The matmul of the router, in 32 bits if the stack does not round its scores."""
        if not self.stack.wide_router:
            return self.matmul(flops, narrow=False)
        peak = self.machine.peaks.known().get("fp32", self.machine.peak(self.wide))
        return flops / (peak * self.reach.matmul) + self.reach.start

    def _add_context(self, times: LayerTimes) -> None:
        """What context parallelism adds to attention.

        Rings overlap keys and values with attention, which slows it down, and merge a partial
        result at every hop; the last hop of the gradients overlaps with nothing. Only zigzag gives
        all ranks equal work. An all-gather is not hidden, nor are the all-to-alls of Ulysses.
        """
        grid, job = self.grid, self.job
        heads = self.shape.heads / grid.tp * self.shape.value_dim
        merge = self.moved(self.stack.merge_bytes * self.tokens * heads) + self.reach.start
        merges = grid.context_has(lambda kind: kind.merges)
        uneven = (grid.cp > 1) & grid.context_has(lambda kind: not kind.zigzag)
        slowest = np.where(uneven, 2 - 1 / grid.cp, 1.0)
        shown, hidden = (LayerTimes({}, {}, {}, {}) for _ in range(2))
        for each in context_layer(job):
            of_ring, seconds = each.kind in ("send", "recv"), self._seconds_of(each)
            self._add(hidden if of_ring else shown, "cp", seconds, each)
            if of_ring and np.all(each.forward == 0):  # gradients: in backward alone
                last = np.where(each.backward > 0, seconds, 0.0)
                shown.inputs["cp"] = shown.inputs.get("cp", np.zeros(1)) + last
        for name in ("forward", "inputs", "again"):
            mine, bare, behind = (getattr(each, name) for each in (times, shown, hidden))
            runs = merges & (mine["attention"] > 0)
            core = mine["attention"] * slowest + np.where(runs, merge * (job.outer - 1), 0)
            mine["attention"] = core
            mine["cp"] = bare["cp"] + shown_seconds(behind["cp"], core)
