"""Every collective of one optimizer step on one rank, known before anything runs.

The mesh records what a step really issues. Both lists must be equal, so nothing here is an
estimate. `axis_collectives` has a function for each axis; this file adds Muon, and puts all of them
together in `predict_traffic`.

How many bytes one rank sends to experts depends on the routing. Summed over an ep group they do
not, or, if slots are dropped or tokens cross nodes, they lie between two bounds: the lists here
have the upper bound, in even shares, and `least_traffic_share` says how much less there may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from fivefold.core import PRECISIONS, FivefoldError
from fivefold.core.layout import (
    Layout,
    LocalWeight,
    OwnedRange,
    Unit,
    by_name,
    local_weights,
    pack,
    shard_of,
)
from fivefold.core.model import Shape
from fivefold.core.plan import Plan
from fivefold.core.schedule import Delays, forwards_of
from fivefold.cost.traffic.data_axis import (
    Collective,
    RankChunk,
    balance_collectives,
    context_collectives,
    data_collectives,
    expert_collectives,
    maxima_collectives,
    pipeline_collectives,
    shared_gradients,
    step_collectives,
    tensor_collectives,
)
from fivefold.cost.traffic.layers import max_nodes_per_token


def least_traffic_share(plan: Plan, axis: str) -> float:
    """The least that an ep group can send over an uneven axis, as a share of the listed bytes."""
    moe = plan.shape.moe
    assert moe is not None, "only models with experts have uneven axes"
    factor = min((rule.coefficient for rule in plan.balance if rule.drops), default=None)
    share = 1.0
    if factor is not None:  # padding takes no capacity
        share = min(1.0, factor * moe.top_k / moe.experts) * plan.batch.seq / plan.padded_seq
    if axis != "ep-far":
        return share
    inside = min(moe.top_k, moe.experts // plan.ep_nodes)  # most choices of a token in one node
    return share * moe.top_k / (inside * max_nodes_per_token(moe, plan.ep_nodes))


# --- Muon, which updates full matrices, of which a rank owns shards


def is_muon_weight(row: LocalWeight) -> bool:
    """Whether Muon updates a weight: a matrix, or stacked ones, but not embedding or head."""
    return row.role == "matrix"


def muon_collectives(
    plan: Plan, rank: int, units: Iterable[Unit], itemsize: int
) -> Counter[Collective]:
    """The all-gathers of one update on `rank`: for each sharded unit with matrices, one of its
    shard; then one over tp (or etp) of the matrices of which this rank owns some and that are
    sharded there."""
    layout, issued = plan.layout, Counter[Collective]()
    table, coord = by_name(plan.shape), layout.coord(rank)
    places = {axis: layout.group(axis, rank).index(rank) for axis in ("fsdp", "edp")}
    for unit in units:
        if not any(is_muon_weight(entry.row) for entry in unit.entries):
            continue
        shard_index = 0
        if unit.num_shards > 1:
            shard_index, size = places[unit.shard_axis], unit.shard_size * itemsize
            issued[Collective(unit.shard_axis, "all_gather", size, unit.num_shards)] += 1
        axis, degree = ("etp", layout.etp) if unit.expert else ("tp", layout.tp)
        cut = sum(
            row.numel
            for row, _, _ in unit.owned(shard_index)
            if is_muon_weight(row)
            and (
                unit.expert or shard_of(table[row.name], plan.shape, layout, coord).dim is not None
            )
        )
        if cut and degree > 1:
            issued[Collective(axis, "all_gather", cut * itemsize, degree)] += 1
    return issued


# --- All axes together

# Axes with collectives inside the forward and backward of a chunk.
_INSIDE = (
    tensor_collectives,
    context_collectives,
    expert_collectives,
    balance_collectives,
    maxima_collectives,
)


@dataclass(frozen=True)
class TrafficEntry:
    """Equal collectives of a step, and their count."""

    axis: str
    kind: str
    count: int
    bytes: int
    group: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in all of them."""
        return self.count * Collective(self.axis, self.kind, self.bytes, self.group).sent


def predict_traffic(
    plan: Plan,
    rank: int,
    *,
    itemsize: int,
    matrices: bool = False,
) -> tuple[TrafficEntry, ...]:
    """Every collective of one optimizer step on `rank`.

    `itemsize` is that of weights and activations. Offload moves no byte between ranks. With
    `matrices` the optimizer gathers full matrices first, as Muon does.
    """
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"{plan.schedule.name} is asynchronous, and its traffic is not predicted step by step: "
            "choose another schedule, or use verify, which runs all of its steps"
        )
    chunks = chunks_of(plan, rank, itemsize)
    units = [unit for chunk in chunks for unit in chunk.units]
    parts = owned_shards(plan.layout, rank, units)
    issued = pipeline_collectives(plan, rank, itemsize)
    for chunk in chunks:
        for axis in _INSIDE:
            issued += axis(plan, chunk, itemsize)
        issued += data_collectives(plan, chunk, itemsize)
    issued += shared_gradients(plan, rank, parts, itemsize) + step_collectives(plan)
    if matrices:
        issued += muon_collectives(plan, rank, units, itemsize)
    return traffic_entries(issued.items())


def predict_async_traffic(
    plan: Plan, rank: int, steps: int, *, itemsize: int
) -> tuple[TrafficEntry, ...]:
    """Every collective of an asynchronous run of so many optimizer steps on `rank`.

    Messages and tensor collectives are issued per microbatch, gradients and weights per update.
    Token counts (first), losses and norms (last) are reduced once for the whole run.
    """
    schedule, layout = plan.schedule, plan.layout
    (chunk,) = chunks_of(plan, rank, itemsize)
    parts = owned_shards(layout, rank, chunk.units)
    microbatches = pipeline_collectives(plan, rank, itemsize)
    for axis in (tensor_collectives, context_collectives, expert_collectives):
        microbatches += axis(plan, chunk, itemsize)
    updates = data_collectives(plan, chunk, itemsize)
    updates += shared_gradients(plan, rank, parts, itemsize)
    count = steps * Delays.of(schedule).every
    issued: Counter[Collective] = Counter()
    for collective, times in microbatches.items():
        issued[collective] += times * count // schedule.num_microbatches
    for collective, times in updates.items():
        issued[collective] += times * steps
    for collective in step_collectives(plan):
        issued[collective._replace(bytes=collective.bytes * steps)] += 1
    return traffic_entries(issued.items())


def chunks_of(plan: Plan, rank: int, itemsize: int) -> tuple[RankChunk, ...]:
    """The stages of a rank, each with its flat units and the number of its microbatches."""
    pp_coord = plan.layout.coord(rank).pp
    forwards = forwards_of(plan.schedule, pp_coord)
    return tuple(
        RankChunk(
            plan.stages[stage],
            forwards[stage],
            units_of(plan, stage, itemsize),
            plan.recompute.of(stage),
        )
        for stage in plan.schedule.placement.stages_of(pp_coord)
    )


def traffic_entries(
    counted: Iterable[tuple[tuple[str, str, int, int], int]],
) -> tuple[TrafficEntry, ...]:
    """Collectives and their counts, predicted or recorded, as a sorted list."""
    return tuple(
        TrafficEntry(axis, kind, count, size, group)
        for (axis, kind, size, group), count in sorted(counted)
    )


def traffic_json(plan: Plan) -> list[dict[str, Any]] | None:
    """The traffic of rank 0 as JSON; None if the traffic of this plan is not predicted."""
    try:
        collectives = predict_traffic(plan, 0, itemsize=PRECISIONS[plan.precision].itemsize)
    except FivefoldError:
        return None
    return [asdict(entry) for entry in collectives]


def units_of(plan: Plan, stage: int, itemsize: int) -> tuple[Unit, ...]:
    """The flat units of a pipeline stage, as large and sharded as the plan says."""
    layout = plan.layout
    shards = (layout.shard * layout.cp, layout.edp) if layout.zero else (1, 1)
    degrees = Layout(shard=layout.ep * layout.etp, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    options = (shards, itemsize, plan.units.size, layout.zero == 3)
    return _packed(plan.shape, degrees, plan.stages[stage], *options)


@lru_cache(maxsize=64)  # plans of a search often differ in nothing of this
def _packed(
    shape: Shape,
    degrees: Layout,
    layers: range,
    shards: tuple[int, int],
    itemsize: int,
    bucket: int | None,
    cuts_frozen: bool,
) -> tuple[Unit, ...]:
    dense, experts = shards
    rows = local_weights(shape, degrees, layers)
    return pack(rows, dense, itemsize, bucket, experts, cuts_frozen)


def owned_shards(layout: Layout, rank: int, units: Iterable[Unit]) -> list[OwnedRange]:
    """The parts of weights whose optimizer is on `rank`; frozen ones have none."""
    return shards_of(layout, rank, (unit for unit in units if not unit.frozen))


def shards_of(layout: Layout, rank: int, units: Iterable[Unit]) -> list[OwnedRange]:
    """The parts of weights that are cut for `rank`."""
    places = {axis: layout.group(axis, rank).index(rank) for axis in ("fsdp", "edp")}
    return [
        part
        for unit in units
        for part in unit.owned(places[unit.shard_axis] if unit.num_shards > 1 else 0)
    ]
