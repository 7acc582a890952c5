"""Seconds of inference steps on one replica of a layout: decode of many sequences, and prompts.

A kernel of decode takes the longer of its bytes over the memory bandwidth and its FLOPs over the
speed of matmuls, and a start. Weights are read once a step whatever the number of sequences, of
experts only those that some token chose; keys and values are read once for each sequence. Sizes of
matmuls, collectives and speeds are those of training (`LayerTimer`); a prompt takes the forward of
training. What an engine reaches of the machine is measured (`presets/serving.toml`). Where steps
are not captured (`DecodeSteps`), the host may take longer than the GPU.

With a pipeline as many batches are under way as there are stages: a token takes all stages, and
between two tokens of a sequence every batch passes the slowest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fivefold.core import PRESETS, Machine, matmul_bytes, tables
from fivefold.core.layout import Layout, cut_stages
from fivefold.core.model import Moe, Shape, layer_kinds, token_bytes
from fivefold.core.plan import DecodeSteps
from fivefold.cost import Array, LayoutGrid, schedule_index
from fivefold.cost.hardware import BY_KERNELS, SoftwareStack
from fivefold.cost.layer import Gemm, LayerTimer, TimeParts, total_seconds
from fivefold.cost.traffic import CountedCollective, tensor_ends

# Kernels of a layer beside its matmuls and experts: two norms, positions with the write into the
# cache, attention in parts and their merge, the activation.
_OTHER_KERNELS = 6
# Of experts: router, choice, order of slots, gates with the activation, down, weighted sum.
_EXPERT_KERNELS = 6
_MANY_ROWS = 1024  # so many take longer than their weights are read
CostJob = tuple[Shape, Machine, SoftwareStack, LayoutGrid, int, str, float]
_LOGIT_BYTES = 12.0  # of a draw: logits are written, widened and read


@dataclass(frozen=True)
class DecodeRates:
    """What decode reaches of the hardware."""

    alone: float
    weights: float
    experts: float
    cache: float
    kernel: float
    route: float
    grouped: float
    grouped_route: float
    row: float
    step: float
    layer: float
    door: float
    source: str


@dataclass(frozen=True)
class MessageRates:
    """Small messages between GPUs."""

    base: float
    nvlink: float
    network: float
    bandwidth: float
    source: str


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of a GPU that an engine has beside weights, activations and cache."""

    engine: float
    source: str


@dataclass(frozen=True)
class ServingRates:
    """All of `presets/serving.toml`."""

    decode: DecodeRates
    messages: MessageRates
    memory: EngineMemory


@lru_cache
def serving_rates() -> ServingRates:
    """The rates of the preset."""
    path = PRESETS / "serving.toml"
    return tables.build(ServingRates, tables.read_toml(path), path.name)


def quick_links(machine: Machine, rates: MessageRates) -> Machine:
    """The machine as small messages see it."""
    tiers = tuple(
        replace(
            tier,
            link=replace(
                tier.link,
                bandwidth=tier.link.bandwidth * rates.bandwidth,
                latency=min(tier.link.latency, rates.network if number else rates.nvlink),
            ),
        )
        for number, tier in enumerate(machine.tiers)
    )
    return replace(machine, tiers=tiers)


class DecodeTimer(LayerTimer):
    """Layers of one decode step, for each of several numbers of sequences on a replica."""

    def __init__(self, job: CostJob, cache_itemsize: int, grouped_experts: bool) -> None:
        super().__init__(*job)
        self.rates, self.cache_itemsize = serving_rates(), cache_itemsize
        self.grouped_experts = grouped_experts

    @cached_property
    def _quick(self) -> LayerTimer:
        machine = quick_links(self.machine, self.rates.messages)
        job = (self.shape, machine, self.stack, self.grid, self.seq, self.precision)
        return LayerTimer(*job, self.imbalance)

    def collective(self, issued: CountedCollective) -> Array:
        """Seconds of all of these in a forward, each by the faster protocol."""
        if not np.any(issued.forward):
            return np.zeros(1)
        quick = self._quick.seconds_of(issued) + self.rates.messages.base
        once = np.minimum(self.seconds_of(issued), quick)
        return np.where(np.asarray(issued.forward) > 0, issued.forward * once, 0.0)

    def read(self, size: Array | float) -> Array:
        """Seconds to read so many bytes of weights."""
        rates = self.rates.decode
        share = np.where(self.tokens > 1, rates.weights, rates.alone)
        return np.asarray(size) / (self.machine.memory_bandwidth * share)

    def bounded(self, flops: Array, read: Array, speed: float) -> Array:
        """A matmul: bound by FLOPs or by the seconds that its weights are read. The start of those
        with many rows, a last wave that is not full, counts as much as FLOPs do."""
        compute = flops / speed
        wave = self.reach.start * compute / np.maximum(compute + read, 1e-12)
        return np.maximum(compute, read) + wave + self.rates.decode.kernel

    def products(self, gemms: list[Gemm]) -> Array:
        """Matmuls of every token."""
        itemsize, wide = matmul_bytes(self.precision), np.zeros(1)
        for gemm in gemms:
            size = gemm.outputs * gemm.inputs
            read = self.read(size * itemsize)
            wide = wide + self.bounded(2 * self.tokens * size, read, self.narrow_speed)
        return wide

    def attended(self, i: int, context: float) -> Array:
        """Attention of single tokens to their keys, which are read once."""
        shape, tp = self.shape, int(self.grid.tp.flat[0])
        keys = context
        if shape.window is not None and not shape.is_global_layer(i):
            keys = min(context, float(shape.window))
        size = self.tokens * keys * token_bytes(shape, 1, tp, self.cache_itemsize)
        read = size / (self.machine.memory_bandwidth * self.rates.decode.cache)
        dims = shape.head_dim + shape.value_dim
        if shape.mla is not None:  # in the space of latents
            dims = 2 * shape.mla.kv_rank + shape.mla.rope_dim
        flops = 2 * self.tokens * shape.heads / tp * dims * keys
        return np.maximum(read, flops / (self.peak * self.reach.attention))

    def touched(self, moe: Moe) -> Array:
        """Experts of a rank that some token of a step chose, if all are as likely."""
        tokens = self.tokens / self.split * self.grid.ep * self.grid.etp
        return moe.experts / self.grid.ep * (1 - (1 - moe.top_k / moe.experts) ** tokens)

    @cached_property
    def _expert_rates(self) -> tuple[float, float]:
        """Share of the bandwidth at which experts are read, and what their choice takes beside
        kernels: of kernels for few tokens, or of the operators of training."""
        rates = self.rates.decode
        if self.grouped_experts:
            return rates.grouped, rates.grouped_route
        return rates.experts, rates.route

    def reading_experts(self, moe: Moe) -> Array:
        """Seconds to read the experts that were chosen."""
        inner = (3 if self.shape.gated else 2) * moe.ffn / self.grid.etp
        size = self.touched(moe) * self.shape.width * inner * matmul_bytes(self.precision)
        return size / (self.machine.memory_bandwidth * self._expert_rates[0])

    def experts(self, moe: Moe) -> Array:
        """Router, routed and shared experts."""
        shape, grid = self.shape, self.grid
        inner = (3 if shape.gated else 2) * moe.ffn / grid.etp
        rows = self._slots(moe) * grid.etp
        speed = self.narrow_speed * self.stack.grouped_share
        routed = self.bounded(2 * rows * shape.width * inner, self.reading_experts(moe), speed)
        router = self.read(shape.width * moe.experts * self.itemsize)
        kernels = _EXPERT_KERNELS * self.rates.decode.kernel + self._expert_rates[1]
        return routed + router + kernels + self.products(self._shared_gemms(moe))

    def reading(self) -> Array:
        """Seconds that a step reads weights of layers: what a prompt in it reads anyway."""
        shape, seconds = self.shape, np.zeros(1)
        for i, times in layer_kinds(shape).items():
            moe = shape.moe if shape.is_moe_layer(i) else None
            gemms = [*self._attention_gemms()]
            gemms += self._mlp_gemms(shape.ffn) if moe is None else []
            size = sum((gemm.outputs * gemm.inputs for gemm in gemms), np.zeros(1))
            seconds = seconds + times * self.read(size * matmul_bytes(self.precision))
            if moe is not None:
                seconds = seconds + times * self.reading_experts(moe)
        return seconds

    def layer_parts(self, i: int, context: float) -> TimeParts:
        """Layer i of a step whose sequences have so many tokens before them."""
        shape = self.shape
        moe = shape.moe if shape.is_moe_layer(i) else None
        gemms = [*self._attention_gemms()]
        parts: TimeParts = {"attention": self.attended(i, context)}
        if moe is None:
            gemms += self._mlp_gemms(shape.ffn)
        else:
            parts["experts"] = self.experts(moe)
        parts["products"] = self.products(gemms)
        kernels = _OTHER_KERNELS * self.rates.decode.kernel
        parts["elementwise"] = self._elementwise(shape.ffn if moe is None else 0) + kernels
        parts["collectives"] = sum(map(self.collective, self.collectives(moe)), np.zeros(1))
        return parts

    def head_parts(self) -> TimeParts:
        """The LM head, the draw and the collectives of both ends."""
        shape = self.shape
        vocab_shard = shape.vocab / self.grid.tp
        size = shape.width * vocab_shard
        read = self.read(size * self.itemsize)
        seconds = self.bounded(2 * self.tokens * size, read, self.speed)
        ends = sum(map(self.collective, tensor_ends(self.job, 1, 1)), np.zeros(1))
        drawn = self.moved(_LOGIT_BYTES * self.tokens * vocab_shard)
        rates = self.rates.decode
        host = rates.step + rates.row * self.tokens
        return {"head": seconds + drawn, "collectives": ends, "host": host}


class ReplicaStep(NamedTuple):
    """A decode step of a replica, for each number of its sequences."""

    sequences: Array
    seconds: Array  # between two tokens of a sequence
    reading: Array  # of weights in it
    parts: TimeParts


@dataclass(frozen=True)
class ServedModel:
    """A model as one engine serves it: the precision of matmuls and weights, and of the cache."""

    shape: Shape
    machine: Machine
    layout: Layout
    precision: str = "bf16"
    cache_itemsize: int = 2
    imbalance: float = 1.0
    external: bool = False  # an engine without kernels for few tokens, which captures all steps

    @cached_property
    def steps(self) -> DecodeSteps:
        """How fivefold's own engine decodes it; narrow weights are codes there."""
        return DecodeSteps(self.shape, self.layout, codes=matmul_bytes(self.precision) < 2)

    @cached_property
    def most_captured(self) -> float:
        """Most sequences whose steps are captured; with a pipeline as many batches have so many."""
        return math.inf if self.external else self.steps.most_captured * self.layout.pp

    @cached_property
    def stages(self) -> tuple[range, ...]:
        return cut_stages(self.shape, self.layout.pp, seq=min(8192, self.shape.max_seq))

    def _job(self, rows: Array, seq: int) -> CostJob:
        layout, ones = self.layout, np.ones(1)
        grid = LayoutGrid(
            tp=ones * layout.tp,
            cp=ones * layout.cp,
            pp=ones * layout.pp,
            replicate=ones * layout.replicate,
            shard=ones * layout.shard,
            ep=ones * layout.ep,
            etp=ones * layout.etp,
            zero=0 * ones,
            chunks=ones,
            microbatch_size=rows,
            microbatches=ones,
            recompute=0 * ones,
            schedule=ones * schedule_index("1f1b"),
            sp=np.array([layout.sp]),
            offload=0 * ones,
        )
        stack = replace(BY_KERNELS["graphs"], tp_overlap=0)
        return self.shape, self.machine, stack, grid, seq, self.precision, self.imbalance

    def decode_timer(self, tokens: Array) -> DecodeTimer:
        """Of steps with so many tokens on a replica; with sequence parallelism ranks of tp have
        equal shares of them."""
        layout = self.layout
        rows = np.ceil(tokens / layout.tp) if layout.sp else tokens
        grouped = self.external or not self.steps.few_token_experts
        return DecodeTimer(self._job(rows, 1), self.cache_itemsize, grouped)

    def decode(self, sequences: Array, context: float) -> ReplicaStep:
        """A step of each of these numbers of sequences, with so many tokens before each."""
        pp, shape = self.layout.pp, self.shape
        batches = np.minimum(np.maximum(sequences, 1.0), pp)
        timer = self.decode_timer(np.ceil(sequences / batches))
        kinds: dict[object, TimeParts] = {}
        parts: TimeParts = {}
        stages: list[Array] = []
        for number, layers in enumerate(self.stages):
            total = np.zeros(1)
            for i in layers:
                kind = shape.layer_kind(i)
                if kind not in kinds:
                    kinds[kind] = timer.layer_parts(i, context)
                _add(parts, kinds[kind])
                total = total + total_seconds(kinds[kind])
            if number == len(self.stages) - 1:
                _add(parts, head := timer.head_parts())
                total = total + total_seconds(head)
            # Beyond them the host issues kernel by kernel.
            issued = np.where(sequences > self.most_captured, timer.rates.decode.layer, 0.0)
            stages.append(np.maximum(total, len(layers) * issued))
        message = timer.message() if pp > 1 else np.zeros(1)
        through = sum(stages, np.zeros(1)) + (pp - 1) * message
        slowest = np.maximum.reduce(stages) + message
        seconds = np.maximum(through, batches * slowest)
        return ReplicaStep(sequences, seconds, timer.reading() / pp + 0 * seconds, parts)

    def prompt(self, tokens: int) -> tuple[float, float]:
        """Seconds of a prompt through all stages, and of the slowest: what it takes of the time of
        others. The forward of training, or all weights read once if that is longer."""
        timer = LayerTimer(*self._job(np.ones(1), tokens))
        few = self.decode_timer(np.array([float(tokens)]))
        head = float(total_seconds(self.decode_timer(np.ones(1)).head_parts())[0])
        stages: list[float] = []
        kinds: dict[object, float] = {}
        for number, layers in enumerate(self.stages):
            total = 0.0
            for i in layers:
                kind = self.shape.layer_kind(i)
                if kind not in kinds:
                    kinds[kind] = float(np.max(total_seconds(timer.layer(i).forward)))
                    if tokens < _MANY_ROWS:
                        least = float(total_seconds(few.layer_parts(i, 0.0))[0])
                        kinds[kind] = max(kinds[kind], least)
                total += kinds[kind]
            stages.append(total + (head if number == len(self.stages) - 1 else 0.0))
        message = float(np.max(timer.message())) if self.layout.pp > 1 else 0.0
        return sum(stages) + (self.layout.pp - 1) * message, max(stages) + message


def _add(total: TimeParts, parts: TimeParts) -> None:
    for name, seconds in parts.items():
        total[name] = total.get(name, np.zeros(1)) + seconds


def interpolated(step: ReplicaStep, values: Array, sequences: float) -> float:
    """A value of a step between the numbers of sequences that were timed; beyond the last along
    its slope."""
    xs = step.sequences
    if sequences <= xs[-1] or len(xs) == 1:
        return float(np.interp(sequences, xs, values))
    (x0, x1), (y0, y1) = list(pairwise(xs))[-1], list(pairwise(values))[-1]
    return float(y1 + (sequences - x1) * (y1 - y0) / (x1 - x0))
