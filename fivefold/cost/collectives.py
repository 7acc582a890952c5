"""What experts send in one optimizer step on one rank, and what their balancing does.

How many bytes a rank sends to experts depends on the routing. Summed over an ep group they do not,
or, where slots are dropped or tokens cross to nodes, they lie between two bounds: the lists here
have the upper one, in even shares, and `least_share` says how much less there may be.

Legend: D width, K experts of a token, E experts, N tokens of a microbatch on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.schedule import FORWARD
from fivefold.core.schedule.flush import Delays
from fivefold.core.shape import Moe
from fivefold.core.units import Part, Unit, UnitRow, pack, rows_of
from fivefold.core.weights import by_name, held_by
from fivefold.cost.axis_collectives import (
    COUNT,
    ChunkShards,
    Collective,
    context,
    data,
    partial,
    pipeline,
    segments_of,
    step,
    tensor,
    twin,
    wide_size,
)

UNEVEN = ("ep", "ep-near", "ep-far")  # axes whose bytes are known for the ep group as a whole


def expert(plan: Plan, chunk: ChunkShards, itemsize: int) -> Counter[Collective]:
    """The ep and etp axes, for each layer with experts and microbatch of a chunk.

    Over etp, with sequence parallelism: all-gathers of tokens, weights and choices in front and a
    reduce-scatter behind, and the mirror of all but the choices backward; without it, all-reduces
    behind and, in backward, of tokens and weights. Over ep see `_all_to_alls`. Full recomputation
    repeats the forward, but not the last sum of a segment, behind which nothing is needed.
    """
    shape, layout, moe = plan.shape, plan.layout, plan.shape.moe
    if moe is None:
        return Counter()
    segments = segments_of(plan, chunk)
    layers = sum(shape.is_moe_layer(layer) for segment in segments for layer in segment)
    again = plan.recompute.kind == "full"
    unreached = sum(shape.is_moe_layer(each[-1]) for each in segments)
    here = _tokens(plan)
    tokens = here * (layout.etp if layout.sp else 1)
    row, weight = shape.width * itemsize, moe.top_k * wide_size(itemsize)
    forwards = layers * (2 if again else 1)
    sums = forwards - (unreached if again else 0) + layers
    calls: Counter[Collective] = Counter()
    if layout.etp > 1 and layout.sp:
        calls[Collective("etp", "all_gather", here * row, layout.etp)] += forwards + layers
        calls[Collective("etp", "all_gather", here * weight, layout.etp)] += forwards
        calls[Collective("etp", "all_gather", here * moe.top_k * COUNT, layout.etp)] += forwards
    kind = "reduce_scatter" if layout.sp else "all_reduce"
    if layout.etp > 1:
        calls[Collective("etp", kind, tokens * row, layout.etp)] += sums
        calls[Collective("etp", kind, tokens * weight, layout.etp)] += layers
    if layout.ep > 1:
        calls += _all_to_alls(plan, moe, tokens, itemsize, forwards, layers)
    return +Counter({call: count * chunk.num_microbatches for call, count in calls.items()})


def _all_to_alls(
    plan: Plan, moe: Moe, tokens: int, itemsize: int, forwards: int, backwards: int
) -> Counter[Collective]:
    """Over ep: the counts of every expert, forward, unless each has its room; then the rows of all
    slots, there and back, forward and backward.

    Over several nodes, first over ep-far: how many rows go to each node, then for each row the
    token, its choices and their weights; and inside of a node over ep-near the same as over ep.
    """
    nodes, row = plan.ep_nodes, plan.shape.width * itemsize
    near = plan.layout.ep // nodes
    axis = "ep" if nodes == 1 else "ep-near"
    calls: Counter[Collective] = Counter()
    room = room_of(plan)
    slots = tokens * moe.top_k if room is None else room * moe.experts
    if room is None:
        calls[Collective(axis, "all_to_all", moe.experts // nodes * COUNT, near)] += forwards
    calls[Collective(axis, "all_to_all", slots * row, near)] += 2 * (forwards + backwards)
    if nodes == 1:
        return calls
    if near == 1:
        calls.clear()
    rows = tokens * most_nodes(plan, moe)
    calls[Collective("ep-far", "all_to_all", nodes * COUNT, nodes)] += forwards
    calls[Collective("ep-far", "all_to_all", rows * moe.top_k * COUNT, nodes)] += forwards
    weights = rows * moe.top_k * wide_size(itemsize)
    calls[Collective("ep-far", "all_to_all", weights, nodes)] += forwards + backwards
    calls[Collective("ep-far", "all_to_all", rows * row, nodes)] += 2 * (forwards + backwards)
    return calls


def most_nodes(plan: Plan, moe: Moe) -> int:
    """To how many nodes a token goes at most."""
    most = min(moe.top_k, plan.ep_nodes)
    limited = moe.groups_kept < moe.groups and moe.groups % plan.ep_nodes == 0
    return min(most, moe.groups_kept) if limited else most


def least_share(plan: Plan, axis: str) -> float:
    """The least that an ep group can send over an uneven axis, as a share of what is listed."""
    moe = plan.shape.moe
    assert moe is not None, "only experts are sent to"
    factor = min((rule.coefficient for rule in plan.balance if rule.drops), default=None)
    kept = 1.0
    if factor is not None:  # padding has no room
        kept = min(1.0, factor * moe.top_k / moe.experts) * plan.batch.seq / plan.padded_seq
    if axis != "ep-far":
        return kept
    inside = min(moe.top_k, moe.experts // plan.ep_nodes)  # choices of a token in one node at most
    return kept * moe.top_k / (inside * most_nodes(plan, moe))


def room_of(plan: Plan) -> int | None:
    """Rows that each expert is given by one rank, where rooms are padded."""
    moe, rules = plan.shape.moe, [rule for rule in plan.balance if rule.pads]
    if moe is None or not rules:
        return None
    seq = _tokens(plan) // plan.batch.microbatch_size
    slots = min(seq, rules[0].room(plan.batch.seq, moe.top_k, moe.experts))
    gathered = plan.layout.etp if plan.layout.sp else 1
    return plan.batch.microbatch_size * slots * gathered


def balance(plan: Plan, chunk: ChunkShards, itemsize: int) -> Counter[Collective]:
    """The `row` axis, the ranks that share rows, for each layer with experts and microbatch.

    For losses over sequences or microbatches one all-reduce of the slots of every row and expert;
    for a capacity two all-gathers, of the choices and of their scores, wide. Full recomputation
    repeats both.
    """
    shape, layout, moe = plan.shape, plan.layout, plan.shape.moe
    ranks = layout.cp * (layout.tp if layout.sp else 1)
    if moe is None or ranks == 1:
        return Counter()
    layers = [layer for segment in segments_of(plan, chunk) for layer in segment]
    count = sum(map(shape.is_moe_layer, layers)) * chunk.num_microbatches
    count *= 2 if plan.recompute.kind == "full" else 1
    calls: Counter[Collective] = Counter()
    loads = plan.batch.microbatch_size * moe.experts * COUNT
    calls[Collective("row", "all_reduce", loads, ranks)] += any(
        rule.counts_rows for rule in plan.balance
    )
    if any(rule.kind == "capacity" for rule in plan.balance):
        choices = _tokens(plan) * moe.top_k
        calls[Collective("row", "all_gather", choices * COUNT, ranks)] += 1
        calls[Collective("row", "all_gather", choices * wide_size(itemsize), ranks)] += 1
    return +Counter({call: each * count for call, each in calls.items()})


def _tokens(plan: Plan) -> int:
    """Tokens of a microbatch on one rank."""
    ranks = plan.layout.tp if plan.layout.sp else 1
    return plan.batch.microbatch_size * plan.local_seq // ranks


# What Muon moves: it updates whole matrices, of which a rank owns parts.


def takes(row: UnitRow) -> bool:
    """Whether a weight is updated by Muon: a matrix, or stacked ones, between the two ends."""
    return len(row.shape) > 1 and row.block not in ("embed", "head")


def gathers(plan: Plan, rank: int, units: Iterable[Unit], itemsize: int) -> Counter[Collective]:
    """The all-gathers of one update on `rank`: for each unit with matrices that is sliced, one of
    its slice; then one over tp, or etp, of the matrices that this rank owns some of and that are
    cut there."""
    layout, calls = plan.layout, Counter[Collective]()
    table, coord = by_name(plan.shape), layout.coord(rank)
    places = {axis: layout.group(axis, rank).index(rank) for axis in ("fsdp", "edp")}
    for unit in units:
        if not any(takes(entry.row) for entry in unit.entries):
            continue
        place = 0
        if unit.num_slices > 1:
            place, size = places[unit.shard_axis], unit.slice_size * itemsize
            calls[Collective(unit.shard_axis, "all_gather", size, unit.num_slices)] += 1
        axis, degree = ("etp", layout.etp) if unit.expert else ("tp", layout.tp)
        cut = sum(
            row.numel
            for row, _, _ in unit.owned(place)
            if takes(row)
            and (unit.expert or held_by(table[row.name], plan.shape, layout, coord).dim is not None)
        )
        if cut and degree > 1:
            calls[Collective(axis, "all_gather", cut * itemsize, degree)] += 1
    return calls


# The collectives of one optimizer step on one rank, known before anything runs.
#
# The mesh records what a step really issues; both lists must be equal, so nothing is an estimate.
# `axes.py` has a function for each dimension; here they are put together.


ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class TrafficEntry:
    """Equal collectives of a step, and how many there are."""

    axis: str
    kind: str
    count: int
    bytes: int
    group: int

    @property
    def sent(self) -> float:
        """Bytes that this rank gives to its links in all of them."""
        return self.count * Collective(self.axis, self.kind, self.bytes, self.group).sent


def predict(
    plan: Plan,
    rank: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    bucket: int | None = None,
    matrices: bool = False,
) -> tuple[TrafficEntry, ...]:
    """Every collective of one optimizer step on `rank`.

    `itemsize` is that of weights and activations, `grad_itemsize` that of the buffers in which data
    ranks sum gradients. Offload moves no byte between ranks. With `matrices` the optimizer makes
    them whole first, as Muon does.
    """
    _require_covered(plan)
    chunks = chunks_of(plan, rank, itemsize, bucket)
    units = [unit for chunk in chunks for unit in chunk.units]
    parts = owned_by(plan.layout, rank, units)
    calls = pipeline(plan, rank, itemsize) + twin(plan, rank, parts, itemsize)
    for chunk in chunks:
        calls += tensor(plan, chunk, itemsize) + context(plan, chunk, itemsize)
        calls += expert(plan, chunk, itemsize) + balance(plan, chunk, itemsize)
        calls += data(plan, chunk, itemsize, grad_itemsize)
    calls += partial(plan, parts, itemsize) + step(plan)
    if matrices:
        calls += gathers(plan, rank, units, itemsize)
    return entries(calls.items())


def predict_stream(
    plan: Plan,
    rank: int,
    steps: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    bucket: int | None = None,
) -> tuple[TrafficEntry, ...]:
    """Every collective of an asynchronous run of so many optimizer steps on `rank`.

    Messages and tensor collectives go with the microbatches, gradients and weights with the
    updates; tokens in front, losses and norms behind, are summed once for all of them.
    """
    schedule, layout = plan.schedule, plan.layout
    (chunk,) = chunks_of(plan, rank, itemsize, bucket)
    parts = owned_by(layout, rank, chunk.units)
    microbatches = pipeline(plan, rank, itemsize) + tensor(plan, chunk, itemsize)
    microbatches += context(plan, chunk, itemsize) + expert(plan, chunk, itemsize)
    updates = data(plan, chunk, itemsize, grad_itemsize) + partial(plan, parts, itemsize)
    count = steps * Delays.of(schedule).every
    calls: Counter[Collective] = Counter()
    for call, each in microbatches.items():
        calls[call] += each * count // schedule.num_microbatches
    for call, each in updates.items():
        calls[call] += each * steps
    for call in step(plan):
        calls[call._replace(bytes=call.bytes * steps)] += 1
    return entries(calls.items())


def chunks_of(
    plan: Plan, rank: int, itemsize: int, bucket: int | None = None
) -> tuple[ChunkShards, ...]:
    """The stages that a rank holds, each with its units and its share of the microbatches."""
    place = plan.layout.coord(rank).pp
    forwards = Counter(a.stage for a in plan.schedule.actions(place) if a.kind == FORWARD)
    return tuple(
        ChunkShards(plan.stages[stage], forwards[stage], units_of(plan, stage, itemsize, bucket))
        for stage in plan.schedule.placement.held(place)
    )


def entries(counted: Iterable[tuple[tuple[str, str, int, int], int]]) -> tuple[TrafficEntry, ...]:
    """Calls and their counts, predicted or recorded, as a sorted list."""
    return tuple(
        TrafficEntry(axis, kind, count, size, group)
        for (axis, kind, size, group), count in sorted(counted)
    )


def listed(plan: Plan) -> list[dict[str, Any]] | None:
    """The traffic of rank 0 as JSON, gradients summed in float32; None where the job goes beyond
    what is predicted."""
    itemsize = ITEMSIZE[plan.precision]
    try:
        found = predict(plan, 0, itemsize=itemsize, grad_itemsize=wide_size(itemsize))
    except FivefoldError:
        return None
    return [asdict(entry) for entry in found]


def units_of(plan: Plan, stage: int, itemsize: int, bucket: int | None = None) -> tuple[Unit, ...]:
    """The data units of a pipeline stage, sliced where the plan's ZeRO stage slices anything."""
    layout = plan.layout
    dense, experts = (layout.shard * layout.cp, layout.edp) if layout.zero else (1, 1)
    rows = rows_of(plan.shape, layout, plan.stages[stage])
    return pack(rows, dense, itemsize, bucket, experts)


def owned_by(layout: Layout, rank: int, units: Iterable[Unit]) -> list[Part]:
    """The parts of weights whose optimizer is on `rank`."""
    places = {axis: layout.group(axis, rank).index(rank) for axis in ("fsdp", "edp")}
    return [
        part
        for unit in units
        for part in unit.owned(places[unit.shard_axis] if unit.num_slices > 1 else 0)
    ]


def _require_covered(plan: Plan) -> None:
    if plan.schedule.asynchronous:
        raise FivefoldError(
            "an asynchronous run has no steps of its own: see the traffic of another schedule than "
            f"{plan.schedule.name}, or verify it, which runs it whole"
        )
