"""What is asked of a serving plan, and what one layout holds on a GPU: weights, cache, the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fivefold.core import FivefoldError, Machine, itemsize_of, matmul_bytes
from fivefold.core.layout import (
    Coord,
    Layout,
    Weight,
    local_shape,
    planned_weights,
    shard_of,
    stores_codes,
)
from fivefold.core.model import (
    BLOCK,
    KV_FORMATS,
    STEP_TOKENS,
    Shape,
    blocks_of,
    kept_tokens,
    layer_kinds,
    token_bytes,
)
from fivefold.cost.memory import layout_nccl_bytes
from fivefold.cost.step import ServedModel, serving_rates

MOST_SEQUENCES = 1024  # of a replica at a time: beyond it a step is longer, not fuller
_MOST_HELD = 0.1  # share of a GPU that the engine and its communicators take


@dataclass(frozen=True)
class ServingRequest:
    """What is asked. Neither `rate` (requests a second) nor `concurrency`: one sequence for the
    latency, and as many as fit for the throughput."""

    shape: Shape
    machine: Machine
    gpus: int
    prompt: int
    output: int
    rate: float | None = None
    concurrency: int | None = None
    ttft: float | None = None
    tpot: float | None = None
    precision: str = "bf16"
    kv: str = "bf16"  # of the cache
    headroom: float = 0.05
    imbalance: float = 1.0
    price: float | None = None  # of a GPU-hour
    layout: Layout | None = None  # the only one
    external: bool = False  # an engine without kernels for few tokens, which captures all steps

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise FivefoldError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                yield f"--{name} {getattr(self, name)}: give 1 token at least"
        for name in ("rate", "concurrency", "ttft", "tpot", "price"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                yield f"{name} {value:g}: give a finite number above 0"
        if self.rate is not None and self.concurrency is not None:
            yield (
                "rate and concurrency are two descriptions of one load: give requests a second "
                "or requests at a time"
            )
        longest, most = self.prompt + self.output, self.shape.max_seq
        if min(self.prompt, self.output) >= 1 and longest > most:
            remedy = (
                f"--prompt {most - self.output}" if most > self.output else "a shorter --output"
            )
            yield (
                f"--prompt {self.prompt} and --output {self.output} are {longest:,} tokens, and "
                f"{self.shape.name} has a context of {most:,}: use {remedy}"
            )

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a number in the cache."""
        return KV_FORMATS[self.kv]

    @property
    def cached_tokens(self) -> int:
        """Tokens of a sequence for which the cache has room, in whole blocks."""
        window = self.shape.window_everywhere
        return blocks_of(kept_tokens(self.prompt + self.output, window, STEP_TOKENS)) * BLOCK

    @property
    def domain(self) -> int:
        """GPUs that the fastest links join."""
        return self.machine.tiers[0].size or self.gpus

    @property
    def usable(self) -> float:
        return self.machine.memory * (1 - self.headroom)


def weight_itemsize(weight: Weight, precision: str) -> float:
    """Bytes of a weight's element: those of matmuls in layers are narrow, others wide."""
    narrow = stores_codes(weight.name)
    return matmul_bytes(precision) if narrow else float(itemsize_of(precision))


def model_bytes(shape: Shape, precision: str) -> float:
    """All weights once."""
    rows = planned_weights(replace(shape, mtp=0))
    return sum(row.numel * weight_itemsize(row, precision) for row in rows)


class ServingFit:
    """What one layout holds on the GPU of its fullest stage."""

    def __init__(self, request: ServingRequest, layout: Layout) -> None:
        self.request, self.layout = request, layout
        options = (request.precision, request.cache_itemsize, request.imbalance)
        options = (*options, request.external)
        self.served = ServedModel(request.shape, request.machine, layout, *options)

    @cached_property
    def stage_weights(self) -> list[float]:
        """Bytes of weights of a rank in each stage."""
        shape, stages = replace(self.request.shape, mtp=0), self.served.stages
        kinds = {shape.layer_kind(i): f"blocks.{i}" for i in layer_kinds(shape)}
        sizes = dict.fromkeys(("embed", "head", *kinds.values()), 0.0)
        origin = Coord(*[0] * 9)
        for weight in planned_weights(shape):
            if weight.block in sizes:
                local = local_shape(weight, shard_of(weight, shape, self.layout, origin))
                sizes[weight.block] += prod(local) * weight_itemsize(weight, self.request.precision)
        totals = [sum(sizes[kinds[shape.layer_kind(i)]] for i in stage) for stage in stages]
        totals[0] += sizes["embed"]
        totals[-1] += sizes["head"] + (sizes["embed"] if shape.tied and len(stages) > 1 else 0.0)
        return totals

    @property
    def weights(self) -> float:
        return max(self.stage_weights)

    @property
    def overhead(self) -> float:
        """Activations of a full step, what NCCL holds, and the engine's own."""
        shape, layout = self.request.shape, self.layout
        moe = shape.moe
        inner = shape.ffn / layout.tp * (2 if shape.gated else 1)
        if moe is not None:
            inner = max(inner, moe.top_k * (moe.ffn / layout.etp + shape.width))
        rows = STEP_TOKENS * (4 * shape.width + inner) * 2
        logits = MOST_SEQUENCES * shape.vocab / layout.tp * 6
        groups = layout_nccl_bytes(shape, layout, self.request.machine)
        # Small devices have smaller engines: of a CPU process there is no context.
        engine_bytes = min(
            groups + serving_rates().memory.engine, _MOST_HELD * self.request.machine.memory
        )
        return rows + logits + engine_bytes

    @property
    def cache(self) -> float:
        """Bytes of a GPU that are left for keys and values."""
        return self.request.usable - self.weights - self.overhead

    @property
    def token_bytes(self) -> int:
        """Of the cache on a GPU: of the stage with most layers."""
        layers = max(len(stage) for stage in self.served.stages)
        return token_bytes(self.request.shape, layers, self.layout.tp, self.request.cache_itemsize)

    @property
    def replica_room(self) -> int:
        """Sequences of a replica whose keys and values fit."""
        return max(0, int(self.cache // (self.token_bytes * self.request.cached_tokens)))
