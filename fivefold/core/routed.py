"""What experts send in one optimizer step on one rank, and what their balancing does.

How many bytes a rank sends to experts depends on the routing. Summed over an ep group they do not,
or, where slots are dropped or tokens cross to nodes, they lie between two bounds: the lists here
have the upper one, in even shares, and `least_share` says how much less there may be.

Legend: D width, K experts of a token, E experts, N tokens of a microbatch on one rank.
"""

from __future__ import annotations

from collections import Counter

from fivefold.core.axes import COUNT, Call, Chunk, segments_of, wide_size
from fivefold.core.plan import Plan
from fivefold.core.shape import Moe

UNEVEN = ("ep", "ep-near", "ep-far")  # axes whose bytes are known for the ep group as a whole


def expert(plan: Plan, chunk: Chunk, itemsize: int) -> Counter[Call]:
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
    calls: Counter[Call] = Counter()
    if layout.etp > 1 and layout.sp:
        calls[Call("etp", "all_gather", here * row, layout.etp)] += forwards + layers
        calls[Call("etp", "all_gather", here * weight, layout.etp)] += forwards
        calls[Call("etp", "all_gather", here * moe.top_k * COUNT, layout.etp)] += forwards
    kind = "reduce_scatter" if layout.sp else "all_reduce"
    if layout.etp > 1:
        calls[Call("etp", kind, tokens * row, layout.etp)] += sums
        calls[Call("etp", kind, tokens * weight, layout.etp)] += layers
    if layout.ep > 1:
        calls += _all_to_alls(plan, moe, tokens, itemsize, forwards, layers)
    return +Counter({call: count * chunk.num_microbatches for call, count in calls.items()})


def _all_to_alls(
    plan: Plan, moe: Moe, tokens: int, itemsize: int, forwards: int, backwards: int
) -> Counter[Call]:
    """Over ep: the counts of every expert, forward, unless each has its room; then the rows of all
    slots, there and back, forward and backward.

    Over several nodes, first over ep-far: how many rows go to each node, then for each row the
    token, its choices and their weights; and inside of a node over ep-near the same as over ep.
    """
    nodes, row = plan.ep_nodes, plan.shape.width * itemsize
    near = plan.layout.ep // nodes
    axis = "ep" if nodes == 1 else "ep-near"
    calls: Counter[Call] = Counter()
    room = room_of(plan)
    slots = tokens * moe.top_k if room is None else room * moe.experts
    if room is None:
        calls[Call(axis, "all_to_all", moe.experts // nodes * COUNT, near)] += forwards
    calls[Call(axis, "all_to_all", slots * row, near)] += 2 * (forwards + backwards)
    if nodes == 1:
        return calls
    if near == 1:
        calls.clear()
    rows = tokens * most_nodes(plan, moe)
    calls[Call("ep-far", "all_to_all", nodes * COUNT, nodes)] += forwards
    calls[Call("ep-far", "all_to_all", rows * moe.top_k * COUNT, nodes)] += forwards
    weights = rows * moe.top_k * wide_size(itemsize)
    calls[Call("ep-far", "all_to_all", weights, nodes)] += forwards + backwards
    calls[Call("ep-far", "all_to_all", rows * row, nodes)] += 2 * (forwards + backwards)
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


def balance(plan: Plan, chunk: Chunk, itemsize: int) -> Counter[Call]:
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
    calls: Counter[Call] = Counter()
    loads = plan.batch.microbatch_size * moe.experts * COUNT
    calls[Call("row", "all_reduce", loads, ranks)] += any(rule.counts_rows for rule in plan.balance)
    if any(rule.kind == "capacity" for rule in plan.balance):
        choices = _tokens(plan) * moe.top_k
        calls[Call("row", "all_gather", choices * COUNT, ranks)] += 1
        calls[Call("row", "all_gather", choices * wide_size(itemsize), ranks)] += 1
    return +Counter({call: each * count for call, each in calls.items()})


def _tokens(plan: Plan) -> int:
    """Tokens of a microbatch on one rank."""
    ranks = plan.layout.tp if plan.layout.sp else 1
    return plan.batch.microbatch_size * plan.local_seq // ranks
