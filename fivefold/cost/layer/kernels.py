"""Seconds of the kernels of a layer on one rank.

A matmul takes its FLOPs over the speed that the chip reaches, and a start. Elementwise kernels are
added, not hidden: they take their bytes over the memory bandwidth that the chip reaches.

Seconds that rounding to fp8 takes, and how fast the matmuls of rounded operands are.

Rounding is bound by memory. Tensorwise it reads a tensor twice, for its maximum and for its codes;
with blocks once. Codes are written in one order or in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fivefold.core import PRECISIONS, Machine, itemsize_of, matmul_bytes
from fivefold.core.layout import EXPERT_WEIGHT, Fp8, Scaling, packed_row
from fivefold.core.model import Mla, Moe, Shape, visible_keys
from fivefold.cost import Array, Flags, LayoutGrid, fullest_rank_load, layer_job
from fivefold.cost.hardware import Links, SoftwareStack
from fivefold.cost.layer.attention_sizes import MixerSizes

if TYPE_CHECKING:
    from fivefold.cost.memory import RankParameters


# Of the memory bandwidth of other kernels, what those that round reach: transposed codes are
# written in short rows. Fitted to steps of Llama-3.1-8B on an H200 (`docs/fp8.md`).
ROUNDED_SHARE = 0.7


def rounded_weights_stay(stack: SoftwareStack, grid: LayoutGrid) -> Flags:
    """Where rounded weights stay over a step: where full weights do."""
    return (grid.zero < 3) | (grid.shard * grid.cp == 1) | stack.stays(grid)


def rounded_weights(
    stack: SoftwareStack, grid: LayoutGrid, parameters: RankParameters, layers: int
) -> Array:
    """Bytes of the weights of a rank in fp8, in both orders, where they stay; of all layers of the
    model, some may not be rounded."""
    if stack.fp8 is None:
        return np.zeros(1)
    num_bytes = stack.fp8.weight_bytes * (parameters.dense - parameters.ends)
    if stack.fp8.experts:
        num_bytes = num_bytes + EXPERT_WEIGHT * parameters.experts
    return np.where(rounded_weights_stay(stack, grid), num_bytes * stack.fp8.share(layers), 0.0)


def codes_under_way(stack: SoftwareStack, linears: Array, experts: Array) -> Array:
    """Bytes of the codes of so many weights that ZeRO-3 gathers ahead, beside their values."""
    fp8, none = stack.fp8, np.zeros(1)
    tensorwise = fp8 is not None and fp8.scaling == "tensorwise"
    routed = fp8 is not None and fp8.experts
    return (linears if tensorwise else none) + (experts if routed else none)


class MatmulShares(NamedTuple):
    """Speed over that of matmuls with one scale for a tensor."""

    usual: float = 1.0  # forward and input gradient
    wgrad: float = 1.0


# Blocks on an H200: 201.4 and 135.4 ms where tensorwise matmuls of the same size take 178.3 and
# 89.1 (`docs/fp8.md`). What only Blackwell multiplies is assumed to be at its speed.
_SHARES: dict[Scaling, MatmulShares] = {"blockwise": MatmulShares(0.885, 0.655)}


def matmul_shares(fp8: Fp8) -> MatmulShares:
    """How fast matmuls are, by what shares a scale."""
    return _SHARES.get(fp8.scaling, MatmulShares())


class RoundingPasses:
    """Bytes that rounding moves on one rank, for every layout of a grid. Inputs of modules and
    output gradients of their last linears are gathered from `local` to all `tokens`; with
    `shards` inputs are saved before that, and gathered once more."""

    def __init__(
        self, fp8: Fp8, itemsize: int, tokens: Array, local: Array, gathers: Flags, shards: Array
    ) -> None:
        self.fp8, self.itemsize, self.tokens, self.local = (fp8, itemsize, tokens, local)
        self.shards, self.orders = shards, 1 + (fp8.wgrad == "fp8")
        self.coded = gathers & fp8.gathers_codes
        self.maximum = itemsize if fp8.scaling == "tensorwise" else 0

    def gathered_input(self, width: Array | float) -> Array:
        """Of the linears that read the input of a module, in forward."""
        orders = np.where(self.shards > 0, 1.0, self.orders)
        return width * (self.local * self.maximum + self._cast(orders))

    def read_again(self, width: Array | float) -> Array:
        """The same input, gathered again in backward."""
        return width * self.shards * self._cast(self.orders)

    def inner_input(self, width: Array | float) -> Array:
        """Of a linear whose input no rank gathers."""
        return width * self.tokens * (self.maximum + self._written(self.orders))

    def gradient(self, width: Array | float) -> Array:
        """Of outputs that no rank gathers."""
        return self.inner_input(width)

    def gathered_gradient(self, width: Array | float) -> Array:
        """Of the output of a module."""
        return width * (self.local * self.maximum + self._cast(self.orders))

    def _cast(self, orders: Array | float) -> Array:
        """Codes of all tokens: transposed after a gather of codes, else made from values."""
        code = self.fp8.code_bytes
        turned = self.local * (self.itemsize + code) + 2 * code * self.tokens * (orders - 1)
        return np.where(self.coded, turned, self.tokens * self._written(orders))

    def _written(self, orders: Array | float) -> Array | float:
        return self.itemsize + orders * self.fp8.code_bytes


class ExpertPasses(NamedTuple):
    """Bytes that routed experts in fp8 move beside their matmuls, in forward, in backward, and for
    weight gradients, whose operands become values again."""

    forward: Array
    backward: Array
    weights: Array


def expert_passes(
    tokens: Array, rows: Array, width: int, inner: Array, gated: bool, itemsize: int, etp: Array
) -> ExpertPasses:
    """Of a rank's tokens and the rows of its experts, of the model's and the experts' width. One
    kernel finds the maximum of a row and its codes, unless etp cuts the row."""
    into, code = (2 if gated else 1) * inner, itemsize + 1
    travel = tokens * (width * itemsize + packed_row(width))  # rounded where a token is
    cut = code + np.where(etp > 1, itemsize, 0)
    operands = rows * (2 * width + inner + into) * code
    return ExpertPasses(travel + rows * inner * cut, travel + rows * into * cut, operands)


def travelling_share(width: int, itemsize: int) -> float:
    """Of the bytes of rows to experts and back, what is left where codes go there."""
    return (1 + packed_row(width) / (width * itemsize)) / 2


def weight_bytes(fp8: Fp8, stack: SoftwareStack, grid: LayoutGrid, itemsize: int) -> Array:
    """Bytes moved in a step to round a weight, in both orders: once, or at every use where full
    weights do not stay, with the maximum of the first."""
    maximum = itemsize if fp8.scaling == "tensorwise" else 0
    return maximum + _uses(stack, grid) * (itemsize + fp8.weight_bytes)


def expert_weight_bytes(stack: SoftwareStack, grid: LayoutGrid, itemsize: int) -> Array:
    """The same of a routed expert's weight, which always has a maximum."""
    return itemsize + _uses(stack, grid) * (itemsize + EXPERT_WEIGHT)


def _uses(stack: SoftwareStack, grid: LayoutGrid) -> Array:
    return np.where(rounded_weights_stay(stack, grid), 1.0, 2 * grid.microbatches)


# Seconds of attention's backward over its forward: 2.5 times the FLOPs, at 0.81 of the speed with
# cuDNN and 0.87 with FlashAttention-2, as measured on one H200.
ATTENTION_BACKWARD = 3.0
# Passes over the scores of unfused attention (scale and mask, softmax, dropout, and what the
# matmuls read and write), in forward and backward.
SCORE_PASSES, SCORE_PASSES_BACKWARD = 5.5, 9.5
# The speed of attention is that of heads with 128 dims, and of 8,192 causal tokens: a query sees
# 4,096 keys in the mean.
KNOWN_DIMS, KNOWN_KEYS = 128, 4096
# Seconds of an own mixer's backward over its forward: a matmul has two in backward.
MIXER_BACKWARD = 2.0
# Bytes that 8-bit matmuls move per element of their inputs: read in 16 bits, written twice.
CAST_BYTES = 4.0
# Passes over the width of the model that a norm takes: it reads and writes.
NORM_PASSES = 2.0


class Gemm(NamedTuple):
    """A matmul of every token: its sizes on one rank."""

    outputs: Array
    inputs: Array


class LayerKernels:
    """One model on one machine under one stack, for every layout of a grid."""

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
        self.wide = PRECISIONS[precision].wide if precision in PRECISIONS else precision
        self.precision = precision
        self.itemsize = itemsize_of(precision)
        self.job = layer_job(
            shape,
            grid,
            seq,
            self.itemsize,
            keeps_shards=stack.gathers_again and not stack.saves_gathered,
            tp_chunks=max(1, stack.tp_overlap),
            node=machine.tiers[0].size if stack.node_by_node else None,
            balance=stack.balance,
            fp8=stack.fp8,
            narrowing=self.itemsize / matmul_bytes(precision) if stack.narrow_tp else 1.0,
        )
        self.tokens = self.job.tokens
        self.mixer = MixerSizes.of(shape, grid.tp, seq)
        self.split = np.where(grid.sp, grid.tp, 1.0)
        self.peak = machine.peak(self.wide) * stack.compute_share
        self.speed = self.narrow_speed = self.peak * self.reach.matmul
        self.row_speed = self.speed  # of matmuls with a scale for each row
        self.late_speed = 1.0  # of weight gradients, over that of other matmuls
        self.dispatched = 1.0  # bytes of dispatch and combine, over those of wide activations
        if precision != self.wide:
            reached = self.reach.matmul_fp4 if precision == "nvfp4" else self.reach.matmul_fp8
            self.narrow_speed = machine.peak(precision) * stack.compute_share * reached
            self.row_speed = self.narrow_speed
            self.late_speed = stack.weight_gradient_share
            if stack.fp8 is not None:
                shares = matmul_shares(stack.fp8)
                late = self.narrow_speed * shares.wgrad
                self.narrow_speed = self.narrow_speed * shares.usual
                late = late if stack.fp8.wgrad == "fp8" else self.speed
                self.late_speed = late / self.narrow_speed
            if stack.narrow_dispatch:
                self.dispatched = (1 + matmul_bytes(precision) / self.itemsize) / 2

    def matmul(self, flops: Array, narrow: bool) -> Array:
        """Seconds of one matmul."""
        return flops / (self.narrow_speed if narrow else self.speed) + self.reach.start

    def moved(self, size: Array) -> Array:
        """Seconds to read or write so many bytes."""
        return size / (self.machine.memory_bandwidth * self.reach.memory)

    def _accumulated(self, size: Array | float) -> Array:
        """Seconds to add the gradients of so many weights to those of other microbatches."""
        return self.moved(self.stack.accumulated_bytes * np.asarray(size))

    def _gemm_seconds(self, gemms: list[Gemm]) -> Array:
        flops = sum((gemm.outputs * gemm.inputs for gemm in gemms), np.zeros(1))
        return 2 * self.tokens * flops / self.narrow_speed + len(gemms) * self.reach.start

    def _adapter_seconds(self, gemms: list[Gemm]) -> Array:
        """One pass of low-rank adapters beside so many matmuls."""
        size = sum((gemm.outputs + gemm.inputs for gemm in gemms), np.zeros(1))
        start = 2 * len(gemms) * self.reach.start if self.stack.lora_rank else 0.0
        return 2 * self.tokens * self.stack.lora_rank * size / self.speed + start

    def _casts(self, gemms: list[Gemm]) -> Array:
        """Casts of the inputs of matmuls in fewer bits than activations have, where a stack says
        nothing else of them."""
        if self.precision == self.wide or self.stack.fp8 is not None:
            return np.zeros(1)
        return self.moved(CAST_BYTES * self.tokens * sum(gemm.inputs for gemm in gemms))

    def grouped_seconds(self, flops: Array, read: Array, router: Array) -> tuple[Array, Array]:
        """Grouped matmuls of experts and that of the router: one pass, and weight gradients. With
        few rows they are bound by reading weights from memory, in so many seconds."""

        def pass_seconds(speed: float, read: Array) -> Array:
            seconds = np.maximum(flops / (speed * self.stack.grouped_share), read)
            return seconds + 2 * self.reach.start + router

        if self.stack.fp8 is None:
            seconds = pass_seconds(self.narrow_speed, read)
            return seconds, seconds / self.late_speed
        plain = pass_seconds(self.speed, read)
        return (
            pass_seconds(self.row_speed, read / self.itemsize) if self.rounds_experts else plain
        ), plain

    @property
    def rounds_experts(self) -> bool:
        """Whether grouped matmuls of experts are rounded, by our own rules."""
        return self.stack.fp8 is not None and self.stack.fp8.experts

    def expert_rounding(self, moe: Moe) -> ExpertPasses:
        """Seconds of rounding around routed experts."""
        grid, tokens = self.grid, self.tokens / self.split
        sizes = (self.shape.width, moe.ffn / grid.etp, self.shape.gated, self.itemsize, grid.etp)
        passes = expert_passes(tokens, self._slots(moe) * grid.etp, *sizes)
        return ExpertPasses(*(self.moved(size / ROUNDED_SHARE) for size in passes))

    def rounded_gemms(self, i: int) -> list[Gemm]:
        """The matmuls of a layer that fp8 rounds."""
        shape, moe = self.shape, self.shape.moe
        gemms = [*self._attention_gemms()]
        if moe is None or not shape.is_moe_layer(i):
            return gemms + self._mlp_gemms(shape.ffn)
        return gemms + (self._mlp_gemms(moe.shared_ffn) if moe.shared else [])

    def rounding_seconds(self, gemms: list[Gemm]) -> tuple[Array, Array]:
        """Rounding of what the matmuls of a module read, in forward and in backward."""
        fp8, job = self.stack.fp8, self.job
        if fp8 is None or not gemms:
            return np.zeros(1), np.zeros(1)
        gathers = self.grid.sp & (self.grid.tp > 1)
        sizes = (self.itemsize, self.tokens, self.tokens / self.split, gathers)
        passes = RoundingPasses(fp8, *sizes, job.keeps_shards)
        *before, last = gemms
        first = self._reading_input(gemms)
        between = [gemm.inputs for gemm in before if gemm.inputs is not first[0].inputs]
        forward = passes.gathered_input(first[0].inputs) + passes.inner_input(
            sum(between, last.inputs)
        )
        outputs = sum((gemm.outputs for gemm in before), np.zeros(1))
        backward = passes.read_again(first[0].inputs) + passes.gradient(outputs)
        backward = backward + passes.gathered_gradient(last.outputs)
        return self.moved(forward / ROUNDED_SHARE), self.moved(backward / ROUNDED_SHARE)

    def _attention_gemms(self) -> Iterator[Gemm]:
        shape, tp = self.shape, self.grid.tp
        heads = shape.heads / tp
        width = np.full_like(tp, float(shape.width))
        if self.mixer is not None:
            yield Gemm(self.mixer.projected, width)
            yield Gemm(width, self.mixer.back)
            return
        if shape.mla is None:
            kv_heads = np.maximum(shape.kv_heads / tp, 1.0)
            queries = (1 + shape.attention_gate) * heads
            yield Gemm((queries + 2 * kv_heads) * shape.head_dim, width)
        else:
            yield from self._latent_gemms(shape.mla, heads, width)
        yield Gemm(width, heads * shape.value_dim)

    def _latent_gemms(self, mla: Mla, heads: Array, width: Array) -> Iterator[Gemm]:
        ones = np.ones_like(width)
        if mla.q_rank is None:
            yield Gemm(heads * self.shape.head_dim, width)
        else:
            yield Gemm(ones * mla.q_rank, width)
            yield Gemm(heads * self.shape.head_dim, ones * mla.q_rank)
        yield Gemm(ones * (mla.kv_rank + mla.rope_dim), width)
        yield Gemm(heads * (mla.nope_dim + mla.value_dim), ones * mla.kv_rank)

    def _mlp_gemms(self, ffn: int) -> list[Gemm]:
        width, inner = np.full_like(self.grid.tp, float(self.shape.width)), ffn / self.grid.tp
        return [Gemm(inner * (2 if self.shape.gated else 1), width), Gemm(width, inner)]

    def _attention(self, i: int) -> tuple[Array, Array]:
        """The core of attention, forward and backward."""
        shape, grid, reach = self.shape, self.grid, self.reach
        heads = shape.heads / grid.tp
        peak = self.peak
        if self.mixer is not None:
            seconds = self.tokens * self.mixer.flops / self.speed + reach.start
            seconds = seconds + self.moved(self.tokens * self.mixer.moved * self.itemsize)
            return seconds, MIXER_BACKWARD * seconds
        if self.stack.runs_plans and shape.score_cap is not None:
            # By the formula: matmuls and passes over all scores in 32 bits.
            pairs = grid.microbatch_size * self.seq * self.seq / grid.cp * heads
            wide = self.machine.peaks.known().get("fp32", peak) * self.stack.compute_share
            flops = 2 * pairs * (shape.head_dim + shape.value_dim)
            matmuls = flops / (wide * reach.unfused) + 2 * reach.start
            scores = self.moved(pairs * 4.0)
            backward = 2.5 * matmuls + SCORE_PASSES_BACKWARD * scores
            return matmuls + SCORE_PASSES * scores, backward
        if self.stack.attention == "unfused":
            pairs = grid.microbatch_size * self.seq * self.seq / grid.cp * heads
            flops = 2 * pairs * (shape.head_dim + shape.value_dim)
            matmuls = flops / (peak * reach.unfused) + 2 * reach.start
            scores = self.moved(pairs * self.itemsize)
            backward = 2 * matmuls + SCORE_PASSES_BACKWARD * scores
            return matmuls + SCORE_PASSES * scores, backward
        fused = self.stack.attention == "fused"
        flops = 2 * self.tokens * heads * self._pair_dims(i, fused)
        reached = reach.attention if fused else reach.attention_old
        seconds = flops / (peak * reached) + reach.start
        return seconds, ATTENTION_BACKWARD * seconds

    def _pair_dims(self, i: int, fused: bool) -> float:
        """Dims of the query-key pairs of one query in attention, for scores and values.

        The softmax of a pair and the start of a query take time as well, if the machine's fused
        kernel was measured so. Both are counted as dims, over what they are at its known speed.
        """
        shape, reach = self.shape, self.reach
        softmax, start = (reach.softmax_dims, reach.short_keys) if fused else (0.0, 0.0)
        dims = shape.head_dim + shape.value_dim + 2 * softmax
        keys = visible_keys(shape, i, self.seq) + start
        known = (1 + softmax / KNOWN_DIMS) * (1 + start / KNOWN_KEYS)
        return dims * keys / known

    def _elementwise(self, ffn: int) -> Array:
        shape, grid, stack = self.shape, self.grid, self.stack
        extra_norms = max(0, shape.inner_norms + shape.outer_norms - 2)
        passes = stack.wide_passes + extra_norms * NORM_PASSES
        wide = passes * shape.width / self.split
        heads = (shape.heads + shape.kv_heads) * shape.head_dim if self.mixer is None else 0
        if shape.attention_gate:  # read twice and written, as in a gated MLP
            heads = heads + 1.5 * shape.heads * shape.value_dim
        inner = heads + ffn * (1.5 if shape.gated else 1.0)
        narrow = (stack.narrow_passes * inner + stack.rotary_passes * self._rotated()) / grid.tp
        return self.moved((wide + narrow) * self.tokens * self.itemsize)

    def _rotated(self) -> float:
        """Width of what rotary positions rotate: queries and keys; of MLA, the rotary part of the
        queries."""
        shape = self.shape
        if shape.positions != "rotary" or self.mixer is not None:
            return 0.0
        keys = shape.kv_heads if shape.mla is None else 0
        return float((shape.heads + keys) * shape.rotated_dim)

    def _all_tokens(self, passes: Array | float) -> Array:
        """Seconds of so many passes over all tokens of the tp group, in the model's width."""
        return self.moved(passes * self.tokens * self.shape.width * self.itemsize)

    def _head_copies(self) -> Array:
        """Copies of heads between the order of gathers and that of rows: none if a microbatch is
        one row in one chunk."""
        if not self.stack.copies_heads:
            return np.zeros(1)
        grid, gemms = self.grid, list(self._attention_gemms())
        projected = sum((gemm.outputs for gemm in self._reading_input(gemms)), gemms[-1].inputs)
        reorders = (grid.microbatch_size > 1) | (self.stack.tp_overlap > 1)
        seconds = self.moved(2 * self.tokens * projected * self.itemsize)
        return np.where(grid.sp & (grid.tp > 1) & reorders, seconds, 0.0)

    def _reading_input(self, gemms: list[Gemm]) -> list[Gemm]:
        """Of the matmuls of a module, those that read its input."""
        return [gemm for gemm in gemms if gemm.inputs is gemms[0].inputs]

    def _slots(self, moe: Moe) -> Array:
        """Rows of the rank with the fullest expert."""
        slots = self.tokens / self.split * moe.top_k
        return slots * self._load(moe)

    def _load(self, moe: Moe) -> Array | float:
        cuts = self.grid.cp * self.split
        return fullest_rank_load(moe, self.grid.ep, self.imbalance, self.stack.balance, cuts)

    def _router(self, flops: Array) -> Array:
        """The matmul of the router, in 32 bits if the stack does not round its scores."""
        if not self.stack.wide_router:
            return self.matmul(flops, narrow=False)
        peak = self.machine.peaks.known().get("fp32", self.machine.peak(self.wide))
        return flops / (peak * self.reach.matmul) + self.reach.start
