"""The collectives of one optimizer step on one rank, axis by axis.

What happens inside of layers is counted in `layer_collectives`, for one layer and microbatch. Here
it is summed over a rank's chunks; the rest is once per microbatch, or per step. `collectives` puts
the axes together.

Legend of the docstrings: A = bytes of the activations between two layers = microbatch size · tokens
per context rank · width · itemsize; wide = float32 or wider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from fivefold.core.layout import Unit
from fivefold.core.model import Recompute
from fivefold.core.plan import Plan
from fivefold.core.schedule import needed, sent
from fivefold.cost.traffic.experts import expert_layer
from fivefold.cost.traffic.layers import (
    CountedCollective,
    LayerJob,
    balance_layer,
    context_layer,
    fp8_layer,
    layer_maxima,
    tensor_ends,
    tensor_layer,
    weight_maxima,
)

# How often a rank sends its input buffer, by the size of the group.
_SENT: dict[str, Callable[[int], float]] = {
    "all_gather": lambda ranks: ranks - 1.0,
    "reduce_scatter": lambda ranks: 1 - 1 / ranks,
    "all_reduce": lambda ranks: 2 - 2 / ranks,
    "all_to_all": lambda ranks: 1 - 1 / ranks,
    "send": lambda ranks: 1.0,
    "recv": lambda ranks: 0.0,
}
# What is in the buffers, by kind and axis; a message is listed once, as a send.
PAYLOADS: dict[tuple[str, str], str] = {
    (
        "all_reduce",
        "tp",
    ): "sums of split matmuls, without sequence parallelism; the loss; norms; maxima in fp8",
    (
        "all_reduce",
        "etp",
    ): "results of experts sharded in width, without sequence parallelism; maxima in fp8",
    ("all_reduce", "dp-cp"): "gradients with ZeRO-0; the number of tokens of a step",
    (
        "all_reduce",
        "edp",
    ): "gradients of experts with ZeRO-0; maxima of their weights in fp8, with ZeRO",
    ("all_reduce", "replicate"): "shards of gradients, over the replicas of dp=RxS",
    (
        "all_reduce",
        "replica",
    ): "gradients of KV heads that several tp ranks have; in fp8 also of their outputs",
    ("all_reduce", "row"): "how many tokens of a row each expert was given, for balancing losses",
    ("all_reduce", "fsdp"): "maxima of weights in fp8, with ZeRO",
    ("all_reduce", "scale"): "maxima of inputs and gradients that share a scale in fp8",
    ("all_reduce", "twin"): "gradients of weights that are on two stages",
    ("all_reduce", "world"): "loss, squared gradient norm and hashes, once a step",
    ("all_gather", "tp"): "tokens before split matmuls, with sequence parallelism",
    ("all_gather", "etp"): "tokens before experts that are sharded in width",
    ("all_gather", "fsdp"): "weights, with ZeRO",
    ("all_gather", "edp"): "weights of experts, with ZeRO",
    ("all_gather", "ring"): "keys and values of the whole row, with context allgather",
    ("reduce_scatter", "tp"): "sums of split matmuls, each rank its tokens",
    ("reduce_scatter", "etp"): "sums of experts that are sharded in width, each rank its tokens",
    ("reduce_scatter", "fsdp"): "gradients, with ZeRO",
    ("reduce_scatter", "edp"): "gradients of experts, with ZeRO",
    ("reduce_scatter", "ring"): "gradients of keys and values, with context allgather",
    ("all_to_all", "ep"): "tokens to their experts, and results back",
    ("all_to_all", "ep-near"): "the same inside a node",
    ("all_to_all", "ep-far"): "the same between nodes, a token once to each",
    ("all_to_all", "ulysses"): "tokens for heads around attention, and back",
    ("send", "pp"): "activations to the next stage, gradients to the one before",
    ("send", "ring"): "keys and values, hop by hop, and their gradients",
}


class Collective(NamedTuple):
    """One collective: `bytes` of this rank's input buffer, and the size of its `group`."""

    axis: str
    kind: str
    bytes: int
    group: int

    @property
    def payload(self) -> str:
        """What is in the buffer."""
        return PAYLOADS["send" if self.kind == "recv" else self.kind, self.axis]

    @property
    def sent(self) -> float:
        """Bytes that this rank sends if the collective runs as a ring.

        >>> Collective("tp", "all_gather", 10, 4).sent
        30.0
        >>> Collective("tp", "reduce_scatter", 40, 4).sent
        30.0
        """
        return self.bytes * _SENT[self.kind](self.group)


class RankChunk(NamedTuple):
    """A stage on one rank: its layers, its flat units, how many microbatches it runs, and what its
    backward computes again."""

    layers: range
    num_microbatches: int
    units: tuple[Unit, ...]
    recompute: Recompute = Recompute()


def tensor_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The tp axis of a chunk: all its layers, the embedding on the first stage, and on the last the
    head, with a loss for each token that is predicted ahead."""
    job, shape = LayerJob.of(plan, chunk.recompute, itemsize), plan.shape
    losses = 1 + shape.mtp if chunk.layers.stop == shape.layers else 0
    lookups = (chunk.layers.start == 0) + max(0, losses - 1)
    issued = counted(tensor_ends(job, lookups, losses), chunk.num_microbatches)
    for kind, times in layer_counts(plan, chunk).items():
        issued += counted(tensor_layer(job, *kind[:3]), times)
        if job.fp8 is not None and kind.rounded:
            issued += counted(fp8_layer(job, job.fp8, kind.moe), times)
    return issued


def maxima_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """In fp8, the maxima of all weights of a chunk that have a scale each, or for each expert."""
    fp8, layout, linears, experts = plan.fp8, plan.layout, 0, 0
    for kind, times in layer_counts(plan, chunk).items():
        if fp8 is not None and kind.rounded:
            maxima = layer_maxima(fp8, plan.shape, kind.moe, layout.ep)
            linears += times // chunk.num_microbatches * maxima.linears
            experts += times // chunk.num_microbatches * maxima.experts
    return counted(weight_maxima(layout, linears, experts), 1)


def context_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The cp axis of a chunk."""
    job, issued = LayerJob.of(plan, chunk.recompute, itemsize), Counter[Collective]()
    for kind, times in layer_counts(plan, chunk).items():
        mixes = plan.shape.of_mixer if kind.recurrent else plan.shape
        issued += counted(context_layer(replace(job, shape=mixes)), times)
    return issued


def expert_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The ep and etp axes of a chunk."""
    moe, issued = plan.shape.moe, Counter[Collective]()
    job = LayerJob.of(plan, chunk.recompute, itemsize)
    for kind, times in layer_counts(plan, chunk).items():
        if moe is not None and kind.moe:
            issued += counted(expert_layer(job, moe, kind.ends_segment, kind.rounded), times)
    return issued


def balance_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The row axis of a chunk, over which balancing counts."""
    moe = plan.shape.moe
    if moe is None:
        return Counter()
    job = LayerJob.of(plan, chunk.recompute, itemsize)
    times = sum(count for kind, count in layer_counts(plan, chunk).items() if kind.moe)
    return counted(balance_layer(job, moe, plan.layout.cp), times)


class _LayerPlace(NamedTuple):
    """Layers that issue the same."""

    moe: bool
    ends_segment: int  # 1: the last of those that are computed again together
    rounded: bool  # to fp8
    recurrent: bool  # of a hybrid: without attention


def layer_counts(plan: Plan, chunk: RankChunk) -> Counter[_LayerPlace]:
    """How often a chunk runs layers of each kind in a step."""
    fp8, layers = plan.fp8, plan.shape.layers
    return Counter(
        {
            layer_kind: count * chunk.num_microbatches
            for layer_kind, count in Counter(
                _LayerPlace(
                    plan.shape.is_moe_layer(layer),
                    int(layer == segment[-1]),
                    fp8 is not None and fp8.rounds(layer, layers),
                    plan.shape.is_recurrent(layer),
                )
                for segment in segments_of(plan, chunk)
                for layer in segment
            ).items()
        }
    )


def counted(collectives: Iterable[CountedCollective], times: int) -> Counter[Collective]:
    """So many times the collectives of a layer; those with no count are left out."""
    issued: Counter[Collective] = Counter()
    for collective in collectives:
        issued[
            Collective(collective.axis, collective.kind, collective.bytes, collective.group)
        ] += collective.times * times
    return +issued


def segments_of(plan: Plan, chunk: RankChunk) -> list[list[int]]:
    """The layers of a chunk, grouped by what is recomputed together; MTP layers are separate."""
    size, layers = max(1, chunk.recompute.blocks), list(chunk.layers)
    ahead = plan.shape.mtp if chunk.layers.stop == plan.shape.layers else 0
    main = [layers[start : start + size] for start in range(0, len(layers), size)]
    return main + [[plan.shape.layers]] * ahead


def pipeline_collectives(plan: Plan, rank: int, itemsize: int) -> Counter[Collective]:
    """The pp axis, for each microbatch: activations A to the next stage, and their gradients A to
    the stage before, as sharded over tp and cp.

    A message is a send on one rank and a recv on the other. Stages on the same rank send nothing.
    """
    schedule, size = plan.schedule, message_bytes(plan, itemsize)
    issued: Counter[Collective] = Counter()
    if schedule.num_ranks == 1:
        return issued
    for action in schedule.actions(plan.layout.coord(rank).pp):
        issued[Collective("pp", "send", size, 2)] += sent(schedule, action) is not None
        issued[Collective("pp", "recv", size, 2)] += needed(schedule, action) is not None
    return +issued


def message_bytes(plan: Plan, itemsize: int) -> int:
    """Bytes of one rank's activations of a microbatch between two stages."""
    seq = plan.local_seq // (plan.layout.tp if plan.layout.sp else 1)
    return plan.batch.microbatch_size * seq * plan.shape.width * itemsize
