"""What each axis sends in one optimizer step on one rank: a function for each dimension, and what a
step sums beside them.

Legend of the docstrings: A = microbatch size · tokens of a row on one context rank · width ·
itemsize, the activations between two layers; N = tokens of a microbatch; L layers; m microbatches;
wide = float32 or wider.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from fivefold.core.plan import Plan
from fivefold.core.schedule import needed, sent, twins
from fivefold.core.shape import Shape
from fivefold.core.units import Part, Unit
from fivefold.core.weights import by_name, held_by

_SUMMED = 4  # bytes: the narrowest type that losses and partial gradients are summed in
COUNT = 8  # bytes: the number of tokens, float64; the number of an expert, int64
_TOTALS = 24  # bytes: the loss, the squared norm and wishes to stop, float64
_TOTALS_OF_STREAM = 16  # nobody stops an asynchronous run
# How often a rank sends its input buffer, by the number of ranks in the group.
_SENT: dict[str, Callable[[int], float]] = {
    "all_gather": lambda ranks: ranks - 1.0,
    "reduce_scatter": lambda ranks: 1 - 1 / ranks,
    "all_reduce": lambda ranks: 2 - 2 / ranks,
    "all_to_all": lambda ranks: 1 - 1 / ranks,
    "send": lambda ranks: 1.0,
    "recv": lambda ranks: 0.0,
}


class Collective(NamedTuple):
    """One collective: `bytes` of this rank's input buffer, `group` the number of ranks in it."""

    axis: str
    kind: str
    bytes: int
    group: int

    @property
    def sent(self) -> float:
        """Bytes that this rank gives to its links, where rings carry them.

        >>> Call("tp", "all_gather", 10, 4).sent, Call("tp", "reduce_scatter", 40, 4).sent
        (30.0, 30.0)
        """
        return self.bytes * _SENT[self.kind](self.group)


class ChunkShards(NamedTuple):
    """A stage as one rank holds it, and how many microbatches pass through this copy of it."""

    layers: range
    num_microbatches: int
    units: tuple[Unit, ...]


def tensor(plan: Plan, chunk: ChunkShards, itemsize: int) -> Counter[Collective]:
    """The tp axis inside forward and backward, for each microbatch of a chunk, over the tp group.

    With sequence parallelism: all-gathers of A/tp in front of attention and MLP (2L) and of the
    head, and reduce-scatters of A behind attention and MLP (2L) and the embedding; backward has the
    mirror of each. Without it: all-reduces of A, behind attention, MLP and embedding forward, and
    for attention, MLP and head backward. Full recomputation repeats the forward of the blocks but
    stops at the last activation that backward needs, in front of the last sum of each segment;
    selective recomputation keeps the results of collectives. Without recomputation the inputs of
    the products are kept as shards, and their all-gathers repeated in backward. The loss, where
    the head is, is never repeated: an all-reduce of N maxima, and one of 2N sums, both wide.
    """
    layout, shape, batch = plan.layout, plan.shape, plan.batch
    if layout.tp == 1:
        return Counter()
    tokens = batch.microbatch_size * plan.local_seq
    activations = tokens * shape.width * itemsize
    losses = 1 + shape.mtp if chunk.layers.stop == shape.layers else 0
    lookups = (chunk.layers.start == 0) + max(0, losses - 1)
    segments = segments_of(plan, chunk)
    pairs = sum(_pairs(shape, layer) for segment in segments for layer in segment)
    gathers = sums = 2 * pairs + lookups + losses
    if plan.recompute.kind == "full":
        # Experts are waited for behind the last sum of their layer.
        unreached = sum(not shape.is_moe_layer(segment[-1]) for segment in segments)
        gathers, sums = gathers + pairs, sums + pairs - unreached
    if plan.keeps_shards:
        gathers += pairs
    calls: Counter[Collective] = Counter()
    if layout.sp:
        calls[Collective("tp", "all_gather", activations // layout.tp, layout.tp)] += gathers
        calls[Collective("tp", "reduce_scatter", activations, layout.tp)] += sums
    else:
        calls[Collective("tp", "all_reduce", activations, layout.tp)] += sums
    for numbers in (tokens, 2 * tokens):
        calls[Collective("tp", "all_reduce", numbers * wide_size(itemsize), layout.tp)] += losses
    return +Counter({call: count * chunk.num_microbatches for call, count in calls.items()})


def segments_of(plan: Plan, chunk: ChunkShards) -> list[list[int]]:
    """The layers of a chunk by what is recomputed together; MTP layers stand alone."""
    size, layers = plan.recompute.blocks, list(chunk.layers)
    ahead = plan.shape.mtp if chunk.layers.stop == plan.shape.layers else 0
    main = [layers[start : start + size] for start in range(0, len(layers), size)]
    return main + [[plan.shape.layers]] * ahead


def _pairs(shape: Shape, layer: int) -> int:
    """Split computations of a layer: attention, and the MLP or the shared experts."""
    routed = shape.moe is not None and shape.is_moe_layer(layer)
    return 2 if not routed or (shape.moe is not None and shape.moe.shared) else 1


def context(plan: Plan, chunk: ChunkShards, itemsize: int) -> Counter[Collective]:
    """The cp axis, for each layer and microbatch of a chunk, inside attention.

    Over `ulysses`, the ranks that share a place: all-to-alls of queries and outputs, and of keys
    and of values, forward, and the mirror of each backward. Heads of keys and values that are no
    multiple of the ranks are repeated until they are. Over `ring`, the places: keys and values in
    one message, n − 1 hops forward and again backward, and their gradients, wide, n hops; or one
    all-gather forward and one backward, and one reduce-scatter of the gradients. Full recomputation
    repeats the forward, selective keeps its results.
    """
    shape, split = plan.shape, plan.split
    layers = sum(map(len, segments_of(plan, chunk)))
    heads, kv_heads = shape.heads // plan.layout.tp, max(1, shape.kv_heads // plan.layout.tp)
    kv_heads = math.lcm(kv_heads, split.inner)
    tokens = plan.batch.microbatch_size * plan.local_seq
    forwards = 2 if plan.recompute.kind == "full" else 1
    calls: Counter[Collective] = Counter()
    for num_heads in (heads, kv_heads) if split.inner > 1 else ():
        size = tokens * num_heads * shape.head_dim * itemsize
        calls[Collective("ulysses", "all_to_all", size, split.inner)] += 2 * (forwards + 1)
    # A place's tokens with 1/inner of the heads are as many numbers as a rank's with all of them.
    keys = 2 * tokens * kv_heads * shape.head_dim
    here, wide, hops = keys * itemsize, keys * wide_size(itemsize), split.outer - 1
    if hops and split.gathers:
        calls[Collective("ring", "all_gather", here, split.outer)] += forwards + 1
        calls[Collective("ring", "reduce_scatter", wide * split.outer, split.outer)] += 1
    for kind in ("send", "recv") if hops and not split.gathers else ():
        calls[Collective("ring", kind, here, split.outer)] += (forwards + 1) * hops
        calls[Collective("ring", kind, wide, split.outer)] += split.outer
    each = layers * chunk.num_microbatches
    return Counter({call: count * each for call, count in calls.items()})


def pipeline(plan: Plan, rank: int, itemsize: int) -> Counter[Collective]:
    """The pp axis: activations A to the rank of the next stage, their gradients A to that of the
    stage before, for each microbatch, as this tp and cp rank holds them.

    A message is a send on one rank and a recv on the other. Stages of one rank send nothing.
    """
    schedule, size = plan.schedule, message_bytes(plan, itemsize)
    calls: Counter[Collective] = Counter()
    for action in schedule.actions(plan.layout.coord(rank).pp):
        calls[Collective("pp", "send", size, 2)] += sent(schedule, action) is not None
        calls[Collective("pp", "recv", size, 2)] += needed(schedule, action) is not None
    return +calls


def message_bytes(plan: Plan, itemsize: int) -> int:
    """Activations of a microbatch between two stages, as one rank holds them."""
    seq = plan.local_seq // (plan.layout.tp if plan.layout.sp else 1)
    return plan.batch.microbatch_size * seq * plan.shape.width * itemsize


def twin(plan: Plan, rank: int, parts: list[Part], itemsize: int) -> Counter[Collective]:
    """Gradients of weights that two pipeline ranks hold, once a step, after the data axis.

    One wide all-reduce over `twin`, the two ranks, of what this rank owns: of everything under a
    mirrored placement, else of a tied embedding on first and last stage. None where it owns none.
    """
    place, placement = plan.layout.coord(rank).pp, plan.schedule.placement
    if not any(place in pair for pair in twins(placement, plan.shape.ends_share)):
        return Counter()
    shared = [part for part in parts if placement.mirrored or part[0].alone]
    numel = sum(stop - start for _, start, stop in shared)
    calls: Counter[Collective] = Counter()
    calls[Collective("twin", "all_reduce", numel * wide_size(itemsize), 2)] += numel > 0
    return +calls


def partial(plan: Plan, parts: list[Part], itemsize: int) -> Counter[Collective]:
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
        Collective(axis, "all_reduce", numel * wide_size(itemsize), sizes[axis])
        for axis, numel in owned.items()
    )


def data(plan: Plan, chunk: ChunkShards, itemsize: int, grad_itemsize: int) -> Counter[Collective]:
    """The data axes, for each unit of a chunk; whole or slice of its buffer, padding included.

    Not sliced (stage 0, or a shard group of one): an all-reduce of the whole gradients over dp-cp,
    once a step. Sliced: a reduce-scatter of the whole gradients over fsdp, once a step (stage 1) or
    for every microbatch (2, 3); an all-reduce of the slice over the replicas, once a step; an
    all-gather of the slice of the weights over fsdp, once a step (1 and 2, after the optimizer; 3
    where weights are kept over the step) or for every microbatch as `_gathers` says (3).
    """
    layout, microbatches = plan.layout, chunk.num_microbatches
    calls: Counter[Collective] = Counter()
    for unit in chunk.units:
        whole, part = unit.size * grad_itemsize, unit.slice_size * grad_itemsize
        if unit.num_slices == 1:
            everyone = layout.edp if unit.expert else layout.dp * layout.cp
            calls[Collective(unit.sum_axis, "all_reduce", whole, everyone)] += everyone > 1
            continue
        reductions = 1 if layout.zero == 1 else microbatches
        every_time = layout.zero == 3 and plan.gathers_each_time(chunk.layers)
        gathers = _gathers(unit, plan) * microbatches if every_time else 1
        axis, shards = unit.shard_axis, unit.num_slices
        calls[Collective(axis, "reduce_scatter", whole, shards)] += reductions
        calls[Collective(axis, "all_gather", unit.slice_size * itemsize, shards)] += gathers
        replicas = 1 if unit.expert else layout.replicate
        calls[Collective("replicate", "all_reduce", part, replicas)] += replicas > 1
    return +calls


def step(plan: Plan) -> Counter[Collective]:
    """What a step sums once: in front the number of tokens (8 bytes) over dp-cp; behind, over the
    world, the loss, the squared gradient norm and wishes to stop (24 bytes), and what experts
    recorded."""
    layout, everyone = plan.layout, plan.layout.dp * plan.layout.cp
    calls: Counter[Collective] = Counter()
    calls[Collective("dp-cp", "all_reduce", COUNT, everyone)] += everyone > 1
    totals = _TOTALS_OF_STREAM if plan.schedule.asynchronous else _TOTALS
    size = totals + COUNT * num_records(plan)
    calls[Collective("world", "all_reduce", size, layout.world)] += layout.world > 1
    return +calls


def num_records(plan: Plan) -> int:
    """Numbers that a step records of its experts: for each layer the slots of every expert, and
    the value of every loss."""
    shape, moe = plan.shape, plan.shape.moe
    if moe is None or plan.schedule.asynchronous:
        return 0
    losses = sum(rule.is_loss for rule in plan.balance)
    return len(shape.moe_layers) * (moe.experts + losses)


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


def wide_size(itemsize: int) -> int:
    return max(itemsize, _SUMMED)
