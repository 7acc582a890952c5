"""The collectives of routed experts in one layer and one microbatch, for one plan or for many.

What `layer_collectives` says of the others holds for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.core.layout import packed_row
from fivefold.core.model import Moe
from fivefold.cost.traffic.layers import (
    COUNT,
    MAXIMUM,
    CountedCollective,
    LayerJob,
    Number,
    max_nodes_per_token,
    stops_before_sum,
    where,
    wide_size,
)


def expert_layer(
    job: LayerJob, moe: Moe, ends_segment: Number, rounded: bool = False
) -> Iterator[CountedCollective]:
    """The ep and etp axes of a layer with experts; if it is `rounded` to fp8, what goes to experts
    (tokens in forward, gradients in backward) are codes with their scales.

    Over etp, with sequence parallelism: all-gathers of tokens, weights and choices before the
    experts and a reduce-scatter after them, and in backward the mirror of all but the choices;
    without it, an all-reduce after them and, in backward, of tokens and weights. In fp8 also an
    all-reduce of the maxima of all rows in forward, and one in backward. Over ep see
    `_all_to_alls`. Recomputation repeats the forward, but not the last reduction of a segment, or
    of the experts alone.
    """
    again = job.repeats["experts"]
    local_tokens, tokens = job.shard_tokens, job.expert_tokens
    row, weight = job.shape.width * job.itemsize, moe.top_k * wide_size(job.itemsize)
    split = where(job.etp > 1, 1, 0)
    with_sp, without = where(job.sp, split, 0), where(job.sp, 0, split)
    repeated = with_sp * again
    group = job.etp
    sizes = _row_bytes(job, moe, rounded)
    yield CountedCollective(
        "etp", "all_gather", local_tokens * sizes.tokens, group, with_sp, 0, repeated
    )
    yield CountedCollective("etp", "all_gather", local_tokens * sizes.gradients, group, 0, with_sp)
    if rounded:
        maxima = expert_slots(job, moe) * MAXIMUM
        yield CountedCollective("etp", "all_reduce", maxima, group, split, split, split * again)
    yield CountedCollective("etp", "all_gather", local_tokens * weight, group, with_sp, 0, repeated)
    choices = local_tokens * moe.top_k * COUNT
    yield CountedCollective("etp", "all_gather", choices, group, with_sp, 0, repeated)
    reached = again * (1 - stops_before_sum(job, ends_segment))
    for kind, used in (("reduce_scatter", with_sp), ("all_reduce", without)):
        yield CountedCollective("etp", kind, tokens * row, group, used, used, used * reached)
        yield CountedCollective("etp", kind, tokens * weight, group, 0, used)
    yield from _all_to_alls(job, moe, sizes)


class _RowBytes(NamedTuple):
    """Bytes of a row: of a token and of a slot to experts, of a gradient to them, and of any result
    from them. Where the weights of slots multiply their inputs, tokens are rounded after that."""

    tokens: Number
    slots: Number
    gradients: Number
    results: Number


def _row_bytes(job: LayerJob, moe: Moe, rounded: bool) -> _RowBytes:
    plain = job.shape.width * job.itemsize
    coded = packed_row(job.shape.width) if rounded else plain
    return _RowBytes(plain if moe.weigh_inputs else coded, coded, coded, plain)


def expert_slots(job: LayerJob, moe: Moe) -> Number:
    """Rows that the experts of a rank get, if all get as many."""
    capacity = job.capacity
    return job.expert_tokens * moe.top_k if capacity is None else capacity * moe.experts


def _all_to_alls(job: LayerJob, moe: Moe, sizes: _RowBytes) -> Iterator[CountedCollective]:
    """Over ep: in forward the token counts of every expert, unless each has a padded capacity; then
    dispatch and combine of all slots, in forward and backward, and their weights, which go one way.

    Over several nodes, first over ep-far: how many rows go to each node, then for each row the
    token, its choices and their weights; inside a node, over ep-near, the same as over ep.
    """
    again, slots = job.repeats["experts"], expert_slots(job, moe)
    nodes, tokens, capacity = job.ep_nodes, job.expert_tokens, job.capacity
    near = job.ep // nodes
    for axis, used in (("ep", nodes == 1), ("ep-near", nodes > 1)):
        ones = where(used, where(near > 1, 1, 0), 0)
        counted = ones if capacity is None else 0 * ones
        counts = moe.experts // nodes * COUNT
        yield CountedCollective(axis, "all_to_all", counts, near, counted, 0, counted * again)
        yield from _there_and_back(
            axis, slots, near, ones, again, sizes._replace(tokens=sizes.slots)
        )
        if not moe.weigh_inputs:
            size = slots * wide_size(job.itemsize)
            yield CountedCollective(axis, "all_to_all", size, near, ones, ones, ones * again)
    ones = where(nodes > 1, 1, 0)
    rows = tokens * max_nodes_per_token(moe, nodes)
    forward, weights = (ones, 0, ones * again), rows * moe.top_k * wide_size(job.itemsize)
    yield CountedCollective("ep-far", "all_to_all", nodes * COUNT, nodes, *forward)
    yield CountedCollective("ep-far", "all_to_all", rows * moe.top_k * COUNT, nodes, *forward)
    yield CountedCollective("ep-far", "all_to_all", weights, nodes, ones, ones, ones * again)
    yield from _there_and_back("ep-far", rows, nodes, ones, again, sizes)


def _there_and_back(
    axis: str, rows: Number, group: Number, ones: Number, again: Number, sizes: _RowBytes
) -> Iterator[CountedCollective]:
    """Rows to experts and results from them, and in backward their gradients."""
    dispatch = (rows * sizes.tokens, group, ones, 0, ones * again)
    yield CountedCollective(axis, "all_to_all", *dispatch)
    yield CountedCollective(axis, "all_to_all", rows * sizes.gradients, group, 0, ones)
    back = (rows * sizes.results, group, ones, ones, ones * again)
    yield CountedCollective(axis, "all_to_all", *back)
