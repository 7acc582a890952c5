"""The collectives of one optimizer step on one rank, known before anything runs.

One function per axis says which collective, how many bytes, over which group, and when. The mesh
records what a step really issues; both lists must be equal, so nothing here is an estimate.

Legend of the docstrings: A = microbatch size · sequence · width · itemsize, the activations between
two layers; N = tokens of a microbatch; L layers of a stage; wide = float32 or wider.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.schedule.action import FORWARD
from fivefold.core.schedule.asynchronous import Delays
from fivefold.core.schedule.transfers import needed, sent, twins
from fivefold.core.units import Part, Unit, pack, rows_of
from fivefold.core.weights import by_name, held_by

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_SUMMED = 4  # bytes: the narrowest type that losses and partial gradients are summed in
_COUNT = 8  # bytes: the number of tokens, float64
_TOTALS = 16  # bytes: the loss and the squared norm, float64


class Call(NamedTuple):
    """One collective: `bytes` of this rank's input buffer, `group` the number of ranks in it."""

    axis: str
    kind: str
    bytes: int
    group: int


class Chunk(NamedTuple):
    """A stage as one rank holds it, and how many microbatches pass through this copy of it."""

    layers: range
    num_microbatches: int
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Entry:
    """Equal collectives of a step, and how many there are."""

    axis: str
    kind: str
    count: int
    bytes: int
    group: int


def predict(
    plan: Plan, rank: int, *, itemsize: int, grad_itemsize: int, bucket: int | None = None
) -> tuple[Entry, ...]:
    """Every collective of one optimizer step on `rank`.

    `itemsize` is that of weights and activations, `grad_itemsize` that of the buffers in which data
    ranks sum gradients. Offload moves no byte between ranks.
    """
    _require_covered(plan)
    chunks = chunks_of(plan, rank, itemsize, bucket)
    units = [unit for chunk in chunks for unit in chunk.units]
    parts = owned_by(plan.layout, rank, units)
    calls = pipeline(plan, rank, itemsize) + twin(plan, rank, parts, itemsize)
    for chunk in chunks:
        calls += tensor(plan, chunk, itemsize) + context(plan, chunk, itemsize)
        calls += data(plan, chunk, itemsize, grad_itemsize)
    calls += partial(plan, parts, itemsize) + step(plan.layout)
    return entries(calls.items())


def predict_stream(
    plan: Plan,
    rank: int,
    steps: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    bucket: int | None = None,
) -> tuple[Entry, ...]:
    """Every collective of an asynchronous run of so many optimizer steps on `rank`.

    Messages and tensor collectives go with the microbatches, gradients and weights with the
    updates; tokens in front, losses and norms behind, are summed once for all of them.
    """
    schedule, layout = plan.schedule, plan.layout
    (chunk,) = chunks_of(plan, rank, itemsize, bucket)
    parts = owned_by(layout, rank, chunk.units)
    microbatches = pipeline(plan, rank, itemsize) + tensor(plan, chunk, itemsize)
    microbatches += context(plan, chunk, itemsize)
    updates = data(plan, chunk, itemsize, grad_itemsize) + partial(plan, parts, itemsize)
    count = steps * Delays.of(schedule).every
    calls: Counter[Call] = Counter()
    for call, each in microbatches.items():
        calls[call] += each * count // schedule.num_microbatches
    for call, each in updates.items():
        calls[call] += each * steps
    for call in step(layout):
        calls[call._replace(bytes=call.bytes * steps)] += 1
    return entries(calls.items())


def chunks_of(plan: Plan, rank: int, itemsize: int, bucket: int | None = None) -> tuple[Chunk, ...]:
    """The stages that a rank holds, each with its units and its share of the microbatches."""
    place = plan.layout.coord(rank).pp
    forwards = Counter(a.stage for a in plan.schedule.actions(place) if a.kind == FORWARD)
    return tuple(
        Chunk(plan.stages[stage], forwards[stage], units_of(plan, stage, itemsize, bucket))
        for stage in plan.schedule.placement.held(place)
    )


def entries(counted: Iterable[tuple[tuple[str, str, int, int], int]]) -> tuple[Entry, ...]:
    """Calls and their counts, predicted or recorded, as a sorted list."""
    return tuple(
        Entry(axis, kind, count, size, group)
        for (axis, kind, size, group), count in sorted(counted)
    )


def listed(plan: Plan) -> list[dict[str, Any]] | None:
    """The traffic of rank 0 as JSON, gradients summed in float32; None where the job goes beyond
    what is predicted."""
    itemsize = ITEMSIZE[plan.precision]
    try:
        found = predict(plan, 0, itemsize=itemsize, grad_itemsize=_wide(itemsize))
    except FivefoldError:
        return None
    return [asdict(entry) for entry in found]


def tensor(plan: Plan, chunk: Chunk, itemsize: int) -> Counter[Call]:
    """The tp axis inside forward and backward, for each microbatch of a chunk, over the tp group.

    With sequence parallelism: all-gathers of A/tp in front of attention and MLP (2L) and of the
    head, and reduce-scatters of A behind attention and MLP (2L) and the embedding; backward has the
    mirror of each. Without it: all-reduces of A, behind attention, MLP and embedding forward, and
    for attention, MLP and head backward. Full recomputation repeats the forward of the blocks but
    stops at the last activation that backward needs, in front of the last sum of each segment;
    selective recomputation keeps the results of collectives. The loss, where the head is, is never
    repeated: an all-reduce of N maxima, and one of 2N sums, both wide.
    """
    layout, batch, layers = plan.layout, plan.batch, len(chunk.layers)
    if layout.tp == 1:
        return Counter()
    tokens = batch.microbatch_size * plan.local_seq
    activations = tokens * plan.shape.width * itemsize
    has_embedding, has_head = chunk.layers.start == 0, chunk.layers.stop == plan.shape.layers
    gathers = sums = 4 * layers + has_embedding + has_head
    if plan.recompute.kind == "full":
        segments = -(-layers // plan.recompute.blocks)
        gathers, sums = gathers + 2 * layers, sums + 2 * layers - segments
    calls: Counter[Call] = Counter()
    if layout.sp:
        calls[Call("tp", "all_gather", activations // layout.tp, layout.tp)] += gathers
        calls[Call("tp", "reduce_scatter", activations, layout.tp)] += sums
    else:
        calls[Call("tp", "all_reduce", activations, layout.tp)] += sums
    for numbers in (tokens, 2 * tokens) if has_head else ():
        calls[Call("tp", "all_reduce", numbers * _wide(itemsize), layout.tp)] += 1
    return Counter({call: count * chunk.num_microbatches for call, count in calls.items()})


def context(plan: Plan, chunk: Chunk, itemsize: int) -> Counter[Call]:
    """The cp axis, for each layer and microbatch of a chunk, inside attention.

    Over `ulysses`, the ranks that share a place: all-to-alls of queries and outputs, and of keys
    and of values, forward, and the mirror of each backward. Heads of keys and values that are no
    multiple of the ranks are repeated until they are. Over `ring`, the places: keys and values in
    one message, n − 1 hops forward and again backward, and their gradients, wide, n hops; or one
    all-gather forward and one backward, and one reduce-scatter of the gradients. Full recomputation
    repeats the forward, selective keeps its results.
    """
    shape, split, layers = plan.shape, plan.split, len(chunk.layers)
    heads, kv_heads = shape.heads // plan.layout.tp, max(1, shape.kv_heads // plan.layout.tp)
    kv_heads = math.lcm(kv_heads, split.inner)
    tokens = plan.batch.microbatch_size * plan.local_seq
    forwards = 2 if plan.recompute.kind == "full" else 1
    calls: Counter[Call] = Counter()
    for num_heads in (heads, kv_heads) if split.inner > 1 else ():
        size = tokens * num_heads * shape.head_dim * itemsize
        calls[Call("ulysses", "all_to_all", size, split.inner)] += 2 * (forwards + 1)
    # A place's tokens with 1/inner of the heads are as many numbers as a rank's with all of them.
    keys = 2 * tokens * kv_heads * shape.head_dim
    here, wide, hops = keys * itemsize, keys * _wide(itemsize), split.outer - 1
    if hops and split.gathers:
        calls[Call("ring", "all_gather", here, split.outer)] += forwards + 1
        calls[Call("ring", "reduce_scatter", wide * split.outer, split.outer)] += 1
    for kind in ("send", "recv") if hops and not split.gathers else ():
        calls[Call("ring", kind, here, split.outer)] += (forwards + 1) * hops
        calls[Call("ring", kind, wide, split.outer)] += split.outer
    each = layers * chunk.num_microbatches
    return Counter({call: count * each for call, count in calls.items()})


def pipeline(plan: Plan, rank: int, itemsize: int) -> Counter[Call]:
    """The pp axis: activations A to the rank of the next stage, their gradients A to that of the
    stage before, for each microbatch, as this tp and cp rank holds them.

    A message is a send on one rank and a recv on the other. Stages of one rank send nothing.
    """
    schedule, size = plan.schedule, message_bytes(plan, itemsize)
    calls: Counter[Call] = Counter()
    for action in schedule.actions(plan.layout.coord(rank).pp):
        calls[Call("pp", "send", size, 2)] += sent(schedule, action) is not None
        calls[Call("pp", "recv", size, 2)] += needed(schedule, action) is not None
    return +calls


def message_bytes(plan: Plan, itemsize: int) -> int:
    """Activations of a microbatch between two stages, as one rank holds them."""
    seq = plan.local_seq // (plan.layout.tp if plan.layout.sp else 1)
    return plan.batch.microbatch_size * seq * plan.shape.width * itemsize


def twin(plan: Plan, rank: int, parts: list[Part], itemsize: int) -> Counter[Call]:
    """Gradients of weights that two pipeline ranks hold, once a step, after the data axis.

    One wide all-reduce over `twin`, the two ranks, of what this rank owns: of everything under a
    mirrored placement, else of a tied embedding on first and last stage. None where it owns none.
    """
    place, placement = plan.layout.coord(rank).pp, plan.schedule.placement
    if not any(place in pair for pair in twins(placement, plan.shape.tied)):
        return Counter()
    shared = [part for part in parts if placement.mirrored or part[0].alone]
    numel = sum(stop - start for _, start, stop in shared)
    calls: Counter[Call] = Counter()
    calls[Call("twin", "all_reduce", numel * _wide(itemsize), 2)] += numel > 0
    return +calls


def partial(plan: Plan, parts: list[Part], itemsize: int) -> Counter[Call]:
    """Gradients that are partial sums on each tp rank, once a step, after the data axis.

    One wide all-reduce over tp of what this rank owns of the weights that every tp rank holds whole
    but uses on its own tokens or heads; one over `replica`, the tp ranks that hold the same KV
    heads, of what it owns of those. A rank that owns none has no such call.
    """
    shape, layout = plan.shape, plan.layout
    table = by_name(shape)
    owned: Counter[str] = Counter()
    for row, start, stop in parts:
        held = held_by(table[row.name], shape, layout, layout.coord(0))
        if held.partial:
            owned["tp" if held.dim is None else "replica"] += stop - start
    sizes = {"tp": layout.tp, "replica": max(1, layout.tp // shape.kv_heads)}
    return Counter(
        Call(axis, "all_reduce", numel * _wide(itemsize), sizes[axis])
        for axis, numel in owned.items()
    )


def data(plan: Plan, chunk: Chunk, itemsize: int, grad_itemsize: int) -> Counter[Call]:
    """The data axes, for each unit of a chunk; whole or slice of its buffer, padding included.

    Not sliced (stage 0, or a shard group of one): an all-reduce of the whole gradients over dp-cp,
    once a step. Sliced: a reduce-scatter of the whole gradients over fsdp, once a step (stage 1) or
    for every microbatch (2, 3); an all-reduce of the slice over the replicas, once a step; an
    all-gather of the slice of the weights over fsdp, once a step (1 and 2, after the optimizer; 3
    where weights are kept over the step) or for every microbatch as `_gathers` says (3).
    """
    layout, microbatches = plan.layout, chunk.num_microbatches
    calls: Counter[Call] = Counter()
    for unit in chunk.units:
        whole, part = unit.size * grad_itemsize, unit.slice_size * grad_itemsize
        if unit.num_slices == 1:
            everyone = layout.edp if unit.expert else layout.dp * layout.cp
            calls[Call(unit.sum_axis, "all_reduce", whole, everyone)] += everyone > 1
            continue
        reductions = 1 if layout.zero == 1 else microbatches
        every_time = layout.zero == 3 and plan.gathers_each_time(chunk.layers)
        gathers = _gathers(unit, plan) * microbatches if every_time else 1
        axis, shards = unit.shard_axis, unit.num_slices
        calls[Call(axis, "reduce_scatter", whole, shards)] += reductions
        calls[Call(axis, "all_gather", unit.slice_size * itemsize, shards)] += gathers
        replicas = 1 if unit.expert else layout.replicate
        calls[Call("replicate", "all_reduce", part, replicas)] += replicas > 1
    return +calls


def step(layout: Layout) -> Counter[Call]:
    """What a step sums once: in front the number of tokens (8 bytes) over dp-cp, behind the loss
    and the squared gradient norm (16 bytes) over the world."""
    everyone = layout.dp * layout.cp
    calls: Counter[Call] = Counter()
    calls[Call("dp-cp", "all_reduce", _COUNT, everyone)] += everyone > 1
    calls[Call("world", "all_reduce", _TOTALS, layout.world)] += layout.world > 1
    return +calls


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


def _gathers(unit: Unit, plan: Plan) -> int:
    """How often one microbatch of stage 3 gathers a unit: for forward, and again for backward.

    Not again where the head, with which backward begins, still has it from forward, which takes a
    backward right behind the forward and so no pipeline; nor where only the embedding uses it,
    whose backward reads no weight. Recomputation runs while the unit is here for backward, whatever
    the segments: it leaves only behind the backward of its first block.
    """
    tied = plan.shape.tied and any(entry.row.name == "embed.weight" for entry in unit.entries)
    kept = plan.layout.pp == 1 and (tied or "head" in unit.blocks)
    return 1 if kept or unit.blocks == ("embed",) else 2


def _wide(itemsize: int) -> int:
    return max(itemsize, _SUMMED)


def _require_covered(plan: Plan) -> None:
    if plan.schedule.asynchronous:
        raise FivefoldError(
            "an asynchronous run has no steps of its own: see the traffic of another schedule than "
            f"{plan.schedule.name}, or verify it, which runs it whole"
        )
    if plan.layout.ep > 1:
        raise FivefoldError(
            f"the traffic of ep={plan.layout.ep} is not predicted: use dp, tp, pp and cp only to "
            "see a list"
        )
