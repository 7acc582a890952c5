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
from typing import NamedTuple

from fivefold.core.plan import Plan
from fivefold.core.recompute import Recompute
from fivefold.core.schedule import needed, sent, twins
from fivefold.core.units import OwnedRange, Unit
from fivefold.core.weights import by_name, shard_of
from fivefold.cost.layer_collectives import (
    COUNT,
    CountedCollective,
    LayerJob,
    balance_layer,
    context_layer,
    expert_layer,
    tensor_ends,
    tensor_layer,
    wide_size,
)

_TOTALS = 24  # bytes: the loss, the squared norm and stop requests, float64
_ASYNC_TOTALS = 16  # asynchronous runs take no stop requests
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
    ("all_reduce", "tp"): "sums of split matmuls, without sequence parallelism; the loss; norms",
    ("all_reduce", "etp"): "results of experts sharded in width, without sequence parallelism",
    ("all_reduce", "dp-cp"): "gradients with ZeRO-0; the number of tokens of a step",
    ("all_reduce", "edp"): "gradients of experts with ZeRO-0",
    ("all_reduce", "replicate"): "shards of gradients, over the replicas of dp=RxS",
    ("all_reduce", "replica"): "gradients of KV heads that several tp ranks have",
    ("all_reduce", "row"): "how many tokens of a row each expert was given, for balancing losses",
    ("all_reduce", "twin"): "gradients of weights that are on two stages",
    ("all_reduce", "world"): "loss and squared gradient norm, once a step",
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
        issued += counted(tensor_layer(job, *kind), times)
    return issued


def context_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The cp axis of a chunk."""
    job = LayerJob.of(plan, chunk.recompute, itemsize)
    return counted(context_layer(job), layer_counts(plan, chunk).total())


def expert_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The ep and etp axes of a chunk."""
    moe, issued = plan.shape.moe, Counter[Collective]()
    job = LayerJob.of(plan, chunk.recompute, itemsize)
    for kind, times in layer_counts(plan, chunk).items():
        if moe is not None and kind.moe:
            issued += counted(expert_layer(job, moe, kind.ends_segment), times)
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


def layer_counts(plan: Plan, chunk: RankChunk) -> Counter[_LayerPlace]:
    """How often a chunk runs layers of each kind in a step."""
    return Counter(
        {
            place: count * chunk.num_microbatches
            for place, count in Counter(
                _LayerPlace(plan.shape.is_moe_layer(layer), int(layer == segment[-1]))
                for segment in segments_of(plan, chunk)
                for layer in segment
            ).items()
        }
    )


def counted(found: Iterable[CountedCollective], times: int) -> Counter[Collective]:
    """So many times the collectives of a layer; those with no count are left out."""
    issued: Counter[Collective] = Counter()
    for each in found:
        issued[Collective(each.axis, each.kind, each.bytes, each.group)] += each.times * times
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
    for action in schedule.actions(plan.layout.coord(rank).pp):
        issued[Collective("pp", "send", size, 2)] += sent(schedule, action) is not None
        issued[Collective("pp", "recv", size, 2)] += needed(schedule, action) is not None
    return +issued


def message_bytes(plan: Plan, itemsize: int) -> int:
    """Bytes of one rank's activations of a microbatch between two stages."""
    seq = plan.local_seq // (plan.layout.tp if plan.layout.sp else 1)
    return plan.batch.microbatch_size * seq * plan.shape.width * itemsize


def twin_collectives(
    plan: Plan, rank: int, parts: list[OwnedRange], itemsize: int
) -> Counter[Collective]:
    """Gradients of weights that two pipeline ranks share, once a step, after the data axis.

    One wide all-reduce over `twin`, the two ranks, of what this rank owns: of all weights under a
    mirrored placement, otherwise of a tied embedding on the first and last stage. None if this rank
    owns none of them.
    """
    pp_rank, placement = plan.layout.coord(rank).pp, plan.schedule.placement
    if not any(pp_rank in pair for pair in twins(placement, plan.shape.ends_share)):
        return Counter()
    shared = [part for part in parts if placement.mirrored or part[0].alone]
    numel = sum(stop - start for _, start, stop in shared)
    issued: Counter[Collective] = Counter()
    issued[Collective("twin", "all_reduce", numel * wide_size(itemsize), 2)] += numel > 0
    return +issued


def partial_sum_collectives(
    plan: Plan, parts: list[OwnedRange], itemsize: int
) -> Counter[Collective]:
    """Gradients that are partial sums on each tp rank, once a step, after the data axis.

    One wide all-reduce over tp of what this rank owns of the weights that are replicated over tp
    but used on a rank's own tokens or heads; one over `replica`, the tp ranks with the same KV
    heads, of what it owns of those. A rank that owns none issues none.
    """
    shape, layout = plan.shape, plan.layout
    table = by_name(shape)
    owned: Counter[str] = Counter()
    for row, start, stop in parts:
        shard = shard_of(table[row.name], shape, layout, layout.coord(0))
        if shard.partial:
            owned["tp" if shard.dim is None else "replica"] += stop - start
    sizes = {"tp": layout.tp, "replica": max(1, layout.tp // shape.kv_heads)}
    return Counter(
        Collective(axis, "all_reduce", numel * wide_size(itemsize), sizes[axis])
        for axis, numel in owned.items()
    )


def data_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The data axes, for each flat unit of a chunk, padding included; gradients in the dtype in
    which the plan sums them.

    Not sharded (ZeRO-0, or a shard group of one rank): an all-reduce of the gradients over dp-cp,
    once a step. Sharded: a reduce-scatter of the gradients over fsdp, once a step (ZeRO-1) or per
    microbatch (2, 3); an all-reduce of the shard over the replicas, once a step; an all-gather of
    the weight shards over fsdp, once a step (1 and 2, after the optimizer; 3 if weights stay
    gathered over the step) or per microbatch (3, see `_gathers_per_microbatch`).
    """
    layout, microbatches = plan.layout, chunk.num_microbatches
    grad_itemsize = plan.units.grad_itemsize(itemsize)
    issued: Counter[Collective] = Counter()
    for unit in chunk.units:
        whole, part = unit.size * grad_itemsize, unit.shard_size * grad_itemsize
        if unit.num_shards == 1:
            everyone = layout.edp if unit.expert else layout.dp * layout.cp
            issued[Collective(unit.sum_axis, "all_reduce", whole, everyone)] += everyone > 1
            continue
        reductions = 1 if layout.zero == 1 else microbatches
        every_time = layout.zero == 3 and plan.gathers_each_time(chunk.layers)
        gathers = _gathers_per_microbatch(unit, plan) * microbatches if every_time else 1
        axis, shards = unit.shard_axis, unit.num_shards
        issued[Collective(axis, "reduce_scatter", whole, shards)] += reductions
        issued[Collective(axis, "all_gather", unit.shard_size * itemsize, shards)] += gathers
        replicas = 1 if unit.expert else layout.replicate
        issued[Collective("replicate", "all_reduce", part, replicas)] += replicas > 1
    return +issued


def step_collectives(plan: Plan) -> Counter[Collective]:
    """All-reduces once a step: first the token count (8 bytes) over dp-cp; at the end, over the
    world, the loss, the squared gradient norm and stop requests (24 bytes), and what the experts
    recorded."""
    layout, everyone = plan.layout, plan.layout.dp * plan.layout.cp
    issued: Counter[Collective] = Counter()
    issued[Collective("dp-cp", "all_reduce", COUNT, everyone)] += everyone > 1
    totals = _ASYNC_TOTALS if plan.schedule.asynchronous else _TOTALS
    size = totals + COUNT * num_records(plan)
    issued[Collective("world", "all_reduce", size, layout.world)] += layout.world > 1
    return +issued


def num_records(plan: Plan) -> int:
    """How many numbers a step records of its experts: per layer, the slots of every expert and the
    value of every balancing loss."""
    shape, moe = plan.shape, plan.shape.moe
    if moe is None or plan.schedule.asynchronous:
        return 0
    losses = sum(rule.is_loss for rule in plan.balance)
    return len(shape.moe_layers) * (moe.experts + losses)


def _gathers_per_microbatch(unit: Unit, plan: Plan) -> int:
    """How often one microbatch of ZeRO-3 gathers a unit: for forward, and again for backward.

    Once if the head uses it and backward follows forward directly (no pipeline), because backward
    begins with the head. Once if only the embedding uses it, whose backward reads no weight.
    Recomputation adds no gather: the unit stays gathered until the backward of its first block.
    """
    tied = plan.shape.tied and any(entry.row.name == "embed.weight" for entry in unit.entries)
    kept = plan.layout.pp == 1 and (tied or "head" in unit.blocks)
    return 1 if kept or unit.blocks == ("embed",) else 2
