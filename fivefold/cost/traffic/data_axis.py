"""The collectives of the data axes, for one plan or for many.

Weights are gathered and gradients reduced in flat units (`core.units`). The rule is written once,
over numbers that are integers for one unit of a plan and arrays for all units of a rank in many
layouts (`flat_units`). The integers must be what the mesh records, the arrays are what is priced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from fivefold.core.model import Balance, Shape
from fivefold.core.plan import Plan
from fivefold.core.schedule import twins
from fivefold.cost.traffic.axes import Collective, RankChunk
from fivefold.cost.traffic.layers import COUNT, Number, where, wide_size


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
