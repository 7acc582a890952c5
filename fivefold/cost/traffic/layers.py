"""The collectives of one layer and one microbatch, for one plan or for many.

Each is written once, over numbers that are integers for one plan and arrays for many. `collectives`
sums them over the layers and microbatches of a rank, which must be what the mesh records;
`layer_time` asks the links how long they take. So what is priced is what runs.

A function for each axis says which collectives there are, with the bytes of this rank's input
buffer, and how often each is issued in forward, in backward, and again if backward repeats the
forward.

Legend of the docstrings: A = bytes of the activations between two layers = microbatch size · tokens
per context rank · width · itemsize; N = tokens of a microbatch; wide = float32 or wider.

The collectives of routed experts in one layer and one microbatch, for one plan or for many.

What `layer_collectives` says of the others holds for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.core.layout import SCALE_BYTES, Fp8, maxima_joined, packed_row
from fivefold.core.model import MODULES, Balance, Module, Moe, Recompute, Shape, mixer_table

if TYPE_CHECKING:
    from fivefold.core.plan import Plan


Number = Any  # an integer, or an array of many
_SUMMED = 4  # bytes: losses and partial gradients are reduced in float32 or wider
MAXIMUM = SCALE_BYTES  # that of values which share a scale in fp8
COUNT = 8  # bytes: a token count is float64, the index of an expert int64
UNEVEN_AXES = ("ep", "ep-near", "ep-far")  # whose bytes are known only for the whole ep group


def where(condition: Number, yes: Number, no: Number) -> Number:
    """One of two numbers, by a condition or by an array of them."""
    return condition * yes + (1 - condition) * no


def least(first: Number, second: Number) -> Number:
    """The smaller one."""
    return where(first < second, first, second)


def wide_size(itemsize: int) -> int:
    """Bytes of the float32-or-wider type that partial sums are reduced in."""
    return max(itemsize, _SUMMED)


class CountedCollective(NamedTuple):
    """Equal collectives of one layer and microbatch, and how many there are of them."""

    axis: str
    kind: str
    bytes: Number  # of this rank's input buffer
    group: Number
    forward: Number
    backward: Number = 0
    again: Number = 0  # in the forward that backward repeats
    module: str = ""  # of the layer, on the tp axis

    @property
    def times(self) -> Number:
        """How many there are in all."""
        return self.forward + self.backward + self.again


@dataclass(frozen=True)
class LayerJob:
    """What the collectives of a layer depend on.

    Flags are 0 or 1: `full`, if whole segments of layers are computed again; `repeats`, for the
    modules whose forward runs again; `attends_again`, if what is inside attention does too;
    `keeps_shards`, if inputs of split matmuls are saved as sequence shards. `inner` context ranks
    exchange tokens for heads, `outer` are a ring. `kv_heads` are those of a rank, repeated up to a
    multiple of `inner`.
    """

    shape: Shape
    itemsize: int
    microbatch_size: Number
    seq: Number  # tokens of a row on one context rank
    tp: Number
    sp: Number
    etp: Number
    ep: Number
    ep_nodes: Number
    inner: Number
    outer: Number
    kv_heads: Number
    gathers: Number
    full: Number
    repeats: Mapping[Module, Number]
    attends_again: Number
    keeps_shards: Number
    tp_chunks: Number = 1  # in which tensor collectives of layers are issued
    balance: tuple[Balance, ...] = ()
    row_seq: Number = 0  # tokens of a row without padding
    fp8: Fp8 | None = None
    narrowing: Number = 1  # bytes of activations over those of all-gathers, of other stacks

    @classmethod
    def of(cls, plan: Plan, recompute: Recompute, itemsize: int) -> LayerJob:
        """One plan, in integers, with the rule of one of its stages."""
        layout, split = plan.layout, plan.split
        return cls(
            shape=plan.shape,
            itemsize=itemsize,
            microbatch_size=plan.batch.microbatch_size,
            seq=plan.local_seq,
            tp=layout.tp,
            sp=layout.sp,
            etp=layout.etp,
            ep=layout.ep,
            ep_nodes=plan.ep_nodes,
            inner=split.inner,
            outer=split.outer,
            kv_heads=math.lcm(max(1, plan.shape.kv_heads // layout.tp), split.inner),
            gathers=split.gathers,
            full=int(recompute.full),
            repeats={module: int(recompute.repeats(module)) for module in MODULES},
            attends_again=int(recompute.attends_again),
            keeps_shards=int(plan.saves_input_shards),
            tp_chunks=max(1, plan.options.tp_overlap),
            balance=plan.balance,
            row_seq=plan.batch.seq,
            fp8=plan.fp8,
        )

    @property
    def tokens(self) -> Number:
        """Tokens of a microbatch on one context rank."""
        return self.microbatch_size * self.seq

    @property
    def shard_tokens(self) -> Number:
        """Tokens of a microbatch on one rank, between layers."""
        return self.tokens // where(self.sp, self.tp, 1)

    @property
    def expert_tokens(self) -> Number:
        """Tokens that a rank routes: those of all ranks that split an expert's width."""
        return self.shard_tokens * where(self.sp, self.etp, 1)

    @property
    def activations(self) -> Number:
        """Bytes of a microbatch on one context rank."""
        return self.tokens * self.shape.width * self.itemsize

    @property
    def capacity(self) -> Number | None:
        """Rows per expert from one rank, if capacity is padded; otherwise None."""
        moe, rules = self.shape.moe, [rule for rule in self.balance if rule.pads]
        if moe is None or not rules:
            return None
        seq = self.shard_tokens // self.microbatch_size
        slots = least(seq, rules[0].capacity(self.row_seq, moe.top_k, moe.experts))
        return self.microbatch_size * slots * where(self.sp, self.etp, 1)


# --- Tensor


class _Block(NamedTuple):
    """Column-split and row-split matmuls between two collectives."""

    module: Module
    unreached: Number  # if its sum is the last of a segment, no backward needs it


def stops_before_sum(job: LayerJob, ends_segment: Number) -> Number:
    """1 where no backward reads what MLP or experts give at the end of what is computed again: a
    norm after them would."""
    return ends_segment * (1 - job.full) if job.shape.outer_norms else ends_segment


def _blocks(shape: Shape, moe: bool, ends_segment: Number) -> Iterator[_Block]:
    """Attention, and the MLP or the shared experts; the results of experts come after these."""
    yield _Block("attention", 0)
    if not moe or shape.moe is None:
        yield _Block("mlp", ends_segment)
    elif shape.moe.shared:
        yield _Block("experts", 0)


def tensor_layer(
    job: LayerJob, moe: bool, ends_segment: Number, rounded: bool = False
) -> Iterator[CountedCollective]:
    """The tp axis; of a layer that is `rounded` to fp8, all-gathers may move codes.

    With sequence parallelism: all-gathers of A/tp before attention and MLP, reduce-scatters of A
    after them, and the mirror of each in backward. Without it: all-reduces of A after them in
    forward, and before them in backward. Recomputation repeats the forward of the layer, or of some
    modules, up to the last activation that backward needs, so not the last reduction of a segment
    or module. Elsewhere inputs that are saved as shards are gathered again in backward. All of them
    are issued in chunks.
    """
    split, size = where(job.tp > 1, job.tp_chunks, 0), job.activations // job.tp_chunks
    coded = rounded and job.fp8 is not None and job.fp8.gathers_codes
    narrow = job.itemsize if coded else job.narrowing
    for block in _blocks(job.shape, moe, stops_before_sum(job, ends_segment)):
        repeated = job.repeats[block.module]
        kept_shard = where(repeated > 0, 0, job.keeps_shards)
        alone = 0 if block.module == "experts" else 1 - job.full
        summed_again = repeated * (1 - block.unreached) * (1 - alone)
        with_sp, without = where(job.sp, split, 0), where(job.sp, 0, split)
        yield CountedCollective(
            "tp",
            "all_gather",
            size // job.tp // narrow,
            job.tp,
            with_sp,
            with_sp * (1 + kept_shard),
            with_sp * repeated,
            block.module,
        )
        for kind, used in (("reduce_scatter", with_sp), ("all_reduce", without)):
            yield CountedCollective(
                "tp", kind, size, job.tp, used, used, used * summed_again, block.module
            )


def fused_matmuls(shape: Shape, moe: bool) -> dict[Module, int]:
    """How many matmuls of a layer are rounded, those of one input as one."""
    inside = 0 if shape.mla is None else 1 + (shape.mla.q_rank is not None)
    matmuls: dict[Module, int] = {"attention": 2 + inside}
    if not moe or shape.moe is None:
        return {**matmuls, "mlp": 2}
    return {**matmuls, "experts": 2} if shape.moe.shared else matmuls


def fp8_layer(job: LayerJob, fp8: Fp8, moe: bool) -> Iterator[CountedCollective]:
    """What only fp8 issues.

    Tensorwise, an all-reduce over tp · cp of the maximum of each input, and in backward of each
    output gradient; recomputation repeats the former. Outputs that several tp ranks compute for
    heads of their own (replicated KV heads, latents): an all-reduce of their gradients.
    """
    ranks = job.tp * job.inner * job.outer
    scaled = where(ranks > 1, int(fp8.scaling == "tensorwise"), 0)
    for module, count in fused_matmuls(job.shape, moe).items():
        times = scaled * count
        yield CountedCollective(
            "scale", "all_reduce", MAXIMUM, ranks, times, times, times * job.repeats[module]
        )
    mla, tokens = job.shape.mla, job.tokens * job.itemsize
    if mla is not None:
        size = tokens * ((mla.q_rank or 0) + mla.kv_rank + mla.rope_dim)
        yield CountedCollective("tp", "all_reduce", size, job.tp, 0, where(job.tp > 1, 1, 0))
        return
    copies = where(job.tp > job.shape.kv_heads, job.tp // job.shape.kv_heads, 1)
    size = tokens * 2 * job.shape.head_dim
    yield CountedCollective("replica", "all_reduce", size, copies, 0, where(copies > 1, 1, 0))


class LayerMaxima(NamedTuple):
    """How many weights of a layer have a scale: those of fused matmuls, tensorwise, and those of a
    rank's experts, each in two grouped matmuls."""

    linears: Number
    experts: Number


def layer_maxima(fp8: Fp8, shape: Shape, moe: bool, ep: Number) -> LayerMaxima:
    """Of one layer that is rounded."""
    linears = sum(fused_matmuls(shape, moe).values()) if fp8.scaling == "tensorwise" else 0
    routed = shape.moe if moe and fp8.experts else None
    return LayerMaxima(linears, 0 if routed is None else 2 * (routed.experts // ep))


def weight_maxima(layout: Any, linears: Number, experts: Number) -> Iterator[CountedCollective]:
    """All-reduces of the maxima of so many weights, once a step, for a layout or a grid of them:
    over the ranks with other slices, and over tp or, of experts, etp; as one where the ranks are
    the same (axes `fsdp` and `tp`)."""
    joined = maxima_joined(layout)
    dense, routed = linears + joined * experts, (1 - joined) * experts
    slices = where(layout.zero > 0, layout.shard * layout.cp, 1)
    for axis, degree, number in (
        ("fsdp", slices, dense),
        ("tp", layout.tp, dense),
        ("edp", where(layout.zero > 0, layout.edp, 1), routed),
        ("etp", layout.etp, routed),
    ):
        times = where((degree > 1) & (number > 0), 1, 0)
        yield CountedCollective(axis, "all_reduce", MAXIMUM * number, degree, times)


def tensor_ends(job: LayerJob, lookups: Number, losses: Number) -> Iterator[CountedCollective]:
    """The tp axis at the embedding, looked up so often, and at the head, for so many losses. A
    frozen embedding has no backward.

    With sequence parallelism, a reduce-scatter of A after the embedding, an all-gather of A/tp
    before the head, and their mirrors in backward; without it an all-reduce of A after the
    embedding, and one in the backward of the head. The loss is never recomputed: an all-reduce of N
    maxima and one of 2N sums, both wide.
    """
    split, size = where(job.tp > 1, 1, 0), job.activations
    with_sp, without = where(job.sp, split, 0), where(job.sp, 0, split)
    tuning = job.shape.tuning
    learned = lookups if tuning is None or tuning.learns("embed.weight") else 0 * lookups
    counts = (job.tp, with_sp * losses, with_sp * learned)
    yield CountedCollective("tp", "all_gather", size // job.tp, *counts)
    counts = (job.tp, with_sp * lookups, with_sp * losses)
    yield CountedCollective("tp", "reduce_scatter", size, *counts)
    yield CountedCollective("tp", "all_reduce", size, job.tp, without * lookups, without * losses)
    wide = job.tokens * wide_size(job.itemsize)
    for numbers in (wide, 2 * wide):
        yield CountedCollective("tp", "all_reduce", numbers, job.tp, split * losses)


# --- Context


def context_layer(job: LayerJob) -> Iterator[CountedCollective]:
    """The cp axis, inside attention.

    Over `ulysses`: all-to-alls of queries and outputs, of keys and of values in forward, and the
    mirror of each in backward. KV heads are repeated up to a multiple of the ranks. Over `ring`:
    keys and values in one message, n − 1 hops in forward and again in backward, and their wide
    gradients, n hops; or one all-gather in forward, one in backward, and one reduce-scatter of the
    gradients. Recomputation of attention repeats the forward, unless its results are kept.
    """
    shape, again = job.shape, job.attends_again
    if shape.own_mixer is not None:
        yield from _mixer_exchanges(job)
        return
    swaps = where(job.inner > 1, 2, 0)
    for heads in (shape.heads // job.tp, job.kv_heads):
        size = job.tokens * heads * shape.attended_dim * job.itemsize
        yield CountedCollective(
            "ulysses", "all_to_all", size, job.inner, swaps, swaps, swaps * again
        )
    # After Ulysses, a rank has `inner` times its tokens with 1/inner of the heads: as many numbers.
    keys = 2 * job.tokens * job.kv_heads * shape.attended_dim
    key_bytes, wide, hops = keys * job.itemsize, keys * wide_size(job.itemsize), job.outer - 1
    gathered, passed = (where(hops > 0, share, 0) for share in (job.gathers, 1 - job.gathers))
    yield CountedCollective(
        "ring", "all_gather", key_bytes, job.outer, gathered, gathered, gathered * again
    )
    yield CountedCollective("ring", "reduce_scatter", wide * job.outer, job.outer, 0, gathered)
    for kind in ("send", "recv"):
        times = passed * hops
        yield CountedCollective("ring", kind, key_bytes, job.outer, times, times, times * again)
        yield CountedCollective("ring", kind, wide, job.outer, 0, passed * job.outer)


def _mixer_exchanges(job: LayerJob) -> Iterator[CountedCollective]:
    """Of an own mixer: all-to-alls of what each linear of the input made, and of what was mixed."""
    swaps, again = where(job.inner > 1, 1, 0), job.repeats["attention"]
    for row in mixer_table(job.shape):
        if row.reads != "nothing":
            size = job.tokens * (row.split_size // job.tp) * job.itemsize
            yield CountedCollective(
                "ulysses", "all_to_all", size, job.inner, swaps, swaps, swaps * again
            )


# --- Experts; their all-to-alls are in `expert_collectives.py`


def max_nodes_per_token(moe: Moe, nodes: Number) -> Number:
    """How many of the nodes a token is sent to at most."""
    limited = (moe.groups_kept < moe.groups) & (moe.groups % nodes == 0)
    reached = least(moe.top_k, nodes)
    return where(limited, least(reached, moe.groups_kept), reached)


def balance_layer(job: LayerJob, moe: Moe, cp: Number) -> Iterator[CountedCollective]:
    """The `row` axis (ranks that share sequences) of a layer with experts.

    For losses over sequences or microbatches, one all-reduce of the slots of every sequence and
    expert. For a capacity, two all-gathers: of the choices and of their wide scores. Recomputation
    repeats both.
    """
    ranks, again = cp * where(job.sp, job.tp, 1), job.repeats["experts"]
    shared = where(ranks > 1, 1, 0)
    loads = job.microbatch_size * moe.experts * COUNT
    counted = shared * any(rule.counts_rows for rule in job.balance)
    yield CountedCollective("row", "all_reduce", loads, ranks, counted, 0, counted * again)
    ranked = shared * any(rule.kind == "capacity" for rule in job.balance)
    choices = job.shard_tokens * moe.top_k
    for size in (choices * COUNT, choices * wide_size(job.itemsize)):
        yield CountedCollective("row", "all_gather", size, ranks, ranked, 0, ranked * again)


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
    plain = job.shape.width * job.itemsize
    coded = packed_row(job.shape.width) if rounded else plain
    sizes = _RowBytes(plain if moe.weigh_inputs else coded, coded, coded, plain)
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


def expert_slots(job: LayerJob, moe: Moe) -> Number:
    """Rows that the experts of a rank get, if all get as many."""
    capacity = job.capacity
    return job.expert_tokens * moe.top_k if capacity is None else capacity * moe.experts


def _all_to_alls(job: LayerJob, moe: Moe, sizes: _RowBytes) -> Iterator[CountedCollective]:
    """Over ep: in forward the token counts of every expert, once however often the forward runs,
    and not if each has a padded capacity; then dispatch and combine of all slots, in forward and
    backward, and their weights, which go one way.

    Over several nodes, first over ep-far: how many rows and slots go to each node and its experts,
    then for each row the token, its choices and their weights; inside a node, over ep-near, the
    same as over ep.
    """
    again, slots = job.repeats["experts"], expert_slots(job, moe)
    nodes, tokens, capacity = job.ep_nodes, job.expert_tokens, job.capacity
    near = job.ep // nodes
    for axis, used in (("ep", nodes == 1), ("ep-near", nodes > 1)):
        ones = where(used, where(near > 1, 1, 0), 0)
        counted = ones if capacity is None else 0 * ones
        counts = moe.experts // nodes * COUNT
        yield CountedCollective(axis, "all_to_all", counts, near, counted)
        yield from _there_and_back(
            axis, slots, near, ones, again, sizes._replace(tokens=sizes.slots)
        )
        if not moe.weigh_inputs:
            size = slots * wide_size(job.itemsize)
            yield CountedCollective(axis, "all_to_all", size, near, ones, ones, ones * again)
    ones = where(nodes > 1, 1, 0)
    rows = tokens * max_nodes_per_token(moe, nodes)
    forward, weights = (ones, 0, ones * again), rows * moe.top_k * wide_size(job.itemsize)
    counts = (moe.experts + nodes) * COUNT
    yield CountedCollective("ep-far", "all_to_all", counts, nodes, ones)
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
