"""The collectives of the data axes, for one plan or for many.

Weights are gathered and gradients reduced in flat units (`core.units`). The rule is written once,
over numbers that are integers for one unit of a plan and arrays for all units of a rank in many
layouts (`flat_units`). The integers must be what the mesh records, the arrays are what is priced.

The collectives of one optimizer step on one rank, axis by axis.

What happens inside of layers is counted in `layer_collectives`, for one layer and microbatch. Here
it is summed over a rank's chunks; the rest is once per microbatch, or per step. `collectives` puts
the axes together.

Legend of the docstrings: A = bytes of the activations between two layers = microbatch size · tokens
per context rank · width · itemsize; wide = float32 or wider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.core.layout import (
    OwnedRange,
    Unit,
    by_name,
    coded_shard_bytes,
    gathered_as_codes,
    is_coded,
    shard_of,
)
from fivefold.core.model import Balance, Recompute, Shape
from fivefold.core.plan import Plan
from fivefold.core.schedule import needed, sent, twins
from fivefold.cost.traffic.layers import (
    COUNT,
    CountedCollective,
    LayerJob,
    Number,
    balance_layer,
    context_layer,
    expert_layer,
    fp8_layer,
    layer_maxima,
    tensor_ends,
    tensor_layer,
    weight_maxima,
    where,
    wide_size,
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


@dataclass(frozen=True)
class DataJob:
    """What the collectives of the data axes depend on."""

    zero: Number
    ranks: Number  # dp · cp
    shards: Number  # of dense weights, if ZeRO shards them
    replicas: Number  # of the shards
    expert_ranks: Number  # edp
    itemsize: Number  # of gathered weights
    grad_itemsize: Number

    @classmethod
    def of(cls, plan: Plan, itemsize: int) -> DataJob:
        """One plan, in integers."""
        layout = plan.layout
        return cls(
            zero=layout.zero,
            ranks=layout.dp * layout.cp,
            shards=layout.shard * layout.cp,
            replicas=layout.replicate,
            expert_ranks=layout.edp,
            itemsize=itemsize,
            grad_itemsize=plan.units.grad_itemsize(itemsize),
        )


class UnitGroup(NamedTuple):
    """Flat units of one kind on a rank: one of a plan, or all of them."""

    expert: bool
    number: Number
    size: Number  # elements of all of them, with padding
    reductions: Number  # of each in a step, if every microbatch reduces
    gathers: Number  # of all of them in a step, if ZeRO shards the weights too
    gathered: Number  # elements of these gathers together, over all shards
    sent: Number | None = None  # bytes of a rank's input of them, if some of ZeRO-3 are codes
    frozen: bool = False  # never updated


class DataCollective(NamedTuple):
    """Collectives of one kind in a step: how many, and the bytes of a rank's input in all."""

    axis: str
    kind: str
    bytes: Number
    group: Number
    times: Number


def unit_collectives(job: DataJob, units: UnitGroup) -> Iterator[DataCollective]:
    """The data axes of some flat units; gradients in the dtype in which the plan sums them.

    Not sharded (ZeRO-0, or a shard group of one rank): an all-reduce of the gradients over dp-cp,
    once a step. Sharded: a reduce-scatter of the gradients over fsdp, once a step (ZeRO-1) or per
    microbatch (2, 3); an all-reduce of the shard over the replicas, once a step; an all-gather of
    the weight shards over fsdp, once a step (1 and 2, after the optimizer; 3 if weights stay
    gathered over the step) or per microbatch (3, see `gathers_per_microbatch`). Frozen weights have
    no gradients, and are sharded and gathered by ZeRO-3 only.
    """
    learn = 0 if units.frozen else 1
    everyone = job.expert_ranks if units.expert else job.ranks
    shards = where(job.zero > 2 * (1 - learn), job.expert_ranks if units.expert else job.shards, 1)
    replicas = 1 if units.expert else job.replicas
    sharded, grad_bytes = shards > 1, units.size * job.grad_itemsize
    sum_axis, shard_axis = ("edp", "edp") if units.expert else ("dp-cp", "fsdp")
    summed = units.number * (1 - sharded) * (everyone > 1) * learn
    yield DataCollective(sum_axis, "all_reduce", grad_bytes * (summed > 0), everyone, summed)
    rounds = where(job.zero == 1, 1, units.reductions) * sharded * learn
    scattered = grad_bytes * rounds
    yield DataCollective(shard_axis, "reduce_scatter", scattered, shards, units.number * rounds)
    third = job.zero == 3
    gathers = where(third, units.gathers, units.number) * sharded
    moved = where(third, units.gathered, units.size) * sharded * job.itemsize // shards
    if units.sent is not None:
        moved = where(third, units.sent * sharded, moved)
    yield DataCollective(shard_axis, "all_gather", moved, shards, gathers)
    copied = units.number * sharded * (replicas > 1) * learn
    yield DataCollective(
        "replicate", "all_reduce", grad_bytes // shards * (copied > 0), replicas, copied
    )


_TOTALS = 40  # bytes: loss, squared norm, stop requests and two sums of hashes, float64
_ASYNC_TOTALS = 16  # asynchronous runs take no stop requests


def step_totals(ranks: Number, world: Number, size: int) -> Iterator[DataCollective]:
    """All-reduces once a step: first the token count (8 bytes) over dp-cp; at the end, over the
    world, the loss, the squared gradient norm, stop requests and sums of hashes (40 bytes), and
    what the experts recorded."""
    yield DataCollective("dp-cp", "all_reduce", COUNT * (ranks > 1), ranks, 1 * (ranks > 1))
    yield DataCollective("world", "all_reduce", size * (world > 1), world, 1 * (world > 1))


def totals_bytes(shape: Shape, balance: Sequence[Balance], asynchronous: bool = False) -> int:
    """Bytes of the totals of a step; of experts, per layer, the slots of every expert and the value
    of every balancing loss."""
    if asynchronous:
        return _ASYNC_TOTALS
    losses = sum(rule.is_loss for rule in balance)
    records = 0 if shape.moe is None else len(shape.moe_layers) * (shape.moe.experts + losses)
    return _TOTALS + COUNT * records


class SharedGradients(NamedTuple):
    """Elements of gradients that a rank owns and that ranks of other axes have too."""

    partial: Number  # replicated over tp, but used on a rank's own tokens or heads
    kv: Number  # of KV heads that several tp ranks have
    twin: Number  # on two pipeline ranks
    etp: Number = 0  # of adapters of experts whose width is cut over etp


def shared_collectives(
    owned: SharedGradients, tp: Number, copies: Number, itemsize: int, etp: Number = 1
) -> Iterator[DataCollective]:
    """Sums of gradients over other axes than data, once a step, after the data axis: wide
    all-reduces, over tp, over `replica`, the `copies` tp ranks with the same KV heads, over etp,
    and over `twin`, two pipeline ranks. A rank that owns none issues none."""
    wide = wide_size(itemsize)
    for axis, numel, ranks in (
        ("tp", owned.partial, tp),
        ("replica", owned.kv, copies),
        ("etp", owned.etp, etp),
        ("twin", owned.twin, 2),
    ):
        issues = (numel > 0) * (ranks > 1)
        yield DataCollective(axis, "all_reduce", numel * wide * issues, ranks, 1 * issues)


def gathers_per_microbatch(blocks: Iterable[str], tied_embedding: bool, pipeline: bool) -> int:
    """How often one microbatch of ZeRO-3 gathers a unit of these blocks: for forward, and again for
    backward.

    Once if the head uses it and backward follows forward directly (no pipeline), because backward
    begins with the head. Once if only the embedding uses it, whose backward reads no weight.
    Recomputation adds no gather: the unit stays gathered until the backward of its first block.
    """
    blocks = set(blocks)
    is_reused = not pipeline and (tied_embedding or "head" in blocks)
    return 1 if is_reused or blocks == {"embed"} else 2


def data_collectives(plan: Plan, chunk: RankChunk, itemsize: int) -> Counter[Collective]:
    """The data axes of a chunk of one plan, unit by unit."""
    job, issued = DataJob.of(plan, itemsize), Counter[Collective]()
    coded = gathered_as_codes(plan.shape, plan.fp8) if plan.layout.zero == 3 else frozenset[str]()
    for unit in chunk.units:
        counts = _counted(unit_collectives(job, _alone(plan, chunk, unit)))
        if is_coded(unit, coded):
            axis, shards, size = unit.shard_axis, unit.num_shards, unit.shard_size * itemsize
            times = counts.pop(Collective(axis, "all_gather", size, shards))
            size = coded_shard_bytes(unit, coded, itemsize)
            counts[Collective(axis, "all_gather", size, shards)] = times
        issued += counts
    return issued


def shared_gradients(
    plan: Plan, rank: int, parts: list[OwnedRange], itemsize: int
) -> Counter[Collective]:
    """Sums of gradients over other axes than data, of what `rank` owns.

    Twins share all weights under a mirrored placement, otherwise an embedding that is on the first
    and the last stage.
    """
    shape, layout, placement = plan.shape, plan.layout, plan.schedule.placement
    table, owned, twin = by_name(shape), Counter[str](), 0
    pp_coord = layout.coord(rank).pp
    paired = any(pp_coord in pair for pair in twins(placement, shape.ends_share))
    for row, start, stop in parts:
        shard = shard_of(table[row.name], shape, layout, layout.coord(0))
        if shard.partial:
            owned[shard.sum_axis] += stop - start
        if paired and (placement.mirrored or row.alone):
            twin += stop - start
    numbers = SharedGradients(owned["tp"], owned["replica"], twin, owned["etp"])
    copies = max(1, layout.tp // shape.kv_heads)
    return _counted(shared_collectives(numbers, layout.tp, copies, itemsize, layout.etp))


def step_collectives(plan: Plan) -> Counter[Collective]:
    """The totals of a step of one plan."""
    layout = plan.layout
    size = totals_bytes(plan.shape, plan.balance, plan.schedule.asynchronous)
    return _counted(step_totals(layout.dp * layout.cp, layout.world, size))


def _counted(collectives: Iterable[DataCollective]) -> Counter[Collective]:
    """As a list has them: each with its own bytes."""
    issued: Counter[Collective] = Counter()
    for collective in collectives:
        if collective.times:
            size = collective.bytes // collective.times
            issued[Collective(collective.axis, collective.kind, size, collective.group)] += (
                collective.times
            )
    return issued


def _alone(plan: Plan, chunk: RankChunk, unit: Unit) -> UnitGroup:
    """One unit of a chunk."""
    gathers, microbatches = 1, chunk.num_microbatches
    if plan.gathers_each_time(chunk.layers):
        tied = plan.shape.tied and any(entry.row.name == "embed.weight" for entry in unit.entries)
        gathers = microbatches * gathers_per_microbatch(unit.blocks, tied, plan.layout.pp > 1)
    sizes = (1, unit.size, microbatches, gathers, gathers * unit.size)
    return UnitGroup(unit.expert, *sizes, frozen=unit.frozen)
