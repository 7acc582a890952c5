"""What each rank has of a step: context tokens, layers of a stage, chunks of a loss.

Context: a row of T tokens is cut over `outer` positions of a ring, and the tokens of each position
over `inner` ranks that exchange tokens for heads (Ulysses). `CONTEXT_KINDS` is the one table of
what each kind of context parallelism does.

Stages: layers are cut so that the slowest stage has the least work.

Loss: tokens are cut so that few of their logits are held at once.

Stages of a folded pipeline: rank i has stages i and 2p − 1 − i, and its pace is that of both.

On a V the first rank has the embedding and the head, so a cut by stages leaves it with too much or
too little. This cut makes the slowest rank as fast as possible. Among such cuts, the two stages of
every rank but the first should be alike: they take turns.

Under limits for the cost of a rank and for that difference, ranks are filled from the turn of the V
outwards, each as far as the limits allow; the first rank gets what is left. The more layers inner
ranks have, the better for outer ones, so of all intervals with the same start only the longest is
kept. That is exact for models whose layers cost the same, after some first ones; for others the cut
is never worse than the one by stages.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fivefold.core import FivefoldError, counted
from fivefold.core.model import (
    LayerKind,
    Shape,
    embedding_parameters,
    forward_flops,
    head_parameters,
    layer_flops,
    layer_kinds,
    layer_parameters,
    mtp_parameters,
)

if TYPE_CHECKING:
    from fivefold.core.layout.layout import Layout


class _Limits(NamedTuple):
    """Most cost of a rank, and most difference of its stages; of all ranks but the first."""

    rank: int
    gap: int


class _Interval(NamedTuple):
    """Layers of some inner ranks, up to `stop`; `inside` is the start of those without the
    outermost of these ranks."""

    stop: int
    inside: int


def folded_ends(costs: Sequence[int], by_stage: Sequence[int]) -> list[int]:
    """Where each stage ends; `by_stage` is a cut by stages, which stays if no rank can be faster
    than its slowest."""
    fold = _LayersOfV(costs, len(by_stage) // 2)
    faster = fold.sums_of_two(fold.slowest(by_stage) - 1)
    if not faster or fold.cut(_Limits(faster[-1], faster[-1])) is None:
        return list(by_stage)
    rank = fold.least(faster, lambda most: _Limits(most, most))
    gap = fold.least([0, *fold.sums_of_one(rank)], lambda most: _Limits(rank, most))
    ends = fold.cut(_Limits(rank, gap))
    assert ends is not None, "limits under which there is a cut"
    return ends


class _LayersOfV:
    """Layers with these costs on a V of `num_ranks`."""

    def __init__(self, costs: Sequence[int], num_ranks: int) -> None:
        self.num_layers, self.num_ranks = len(costs), num_ranks
        self.before = [0, *accumulate(costs)]

    def slowest(self, ends: Sequence[int]) -> int:
        """The cost of the slowest rank of a cut."""
        stages = [self.cost(start, end) for start, end in pairwise([0, *ends])]
        return max(near + far for near, far in zip(stages, reversed(stages), strict=True))

    def cost(self, start: int, stop: int) -> int:
        return self.before[stop] - self.before[start]

    def sums_of_one(self, most: int) -> list[int]:
        """All costs that one stage can have, up to `most`."""
        layers = range(self.num_layers)
        sums = {
            self.before[stop] - self.before[start]
            for start in layers
            for stop in range(start + 1, bisect_right(self.before, self.before[start] + most))
        }
        return sorted(sums)

    def sums_of_two(self, most: int) -> list[int]:
        """All costs that a rank can have, from the mean of all ranks to `most`."""
        sums = self.sums_of_one(most)
        mean = -(-self.before[-1] // self.num_ranks)
        pair_sums: set[int] = set()
        for first in sums:
            low, high = bisect_left(sums, mean - first), bisect_right(sums, most - first)
            pair_sums.update(first + other for other in sums[low:high])
        return sorted(pair_sums)

    def least(self, known: Sequence[int], limits: Callable[[int], _Limits]) -> int:
        """The smallest of these numbers under whose limits there is a cut: there is one under those
        of the last."""
        low, high = 0, len(known) - 1
        while low < high:
            middle = (low + high) // 2
            if self.cut(limits(known[middle])) is None:
                low = middle + 1
            else:
                high = middle
        return known[low]

    def cut(self, limits: _Limits) -> list[int] | None:
        """Where each stage ends under the limits, if that is possible."""
        levels = [self._turn(limits)]
        for outer in range(self.num_ranks - 2, 0, -1):
            levels.append(self._around(levels[-1], outer, limits))
        if self.num_ranks == 1:
            fits = self.cost(0, self.num_layers) <= limits.rank
            return self._ends([], 0, self.num_layers) if fits else None
        left = {  # how much the stages of the first rank differ, by where the first one ends
            start: abs(self.before[start] - self.cost(interval.stop, self.num_layers))
            for start, interval in levels[-1].items()
            if self.before[-1] - self.cost(start, interval.stop) <= limits.rank
        }
        return (
            self._traced(levels, min(left, key=lambda start_sum: left[start_sum])) if left else None
        )

    def _turn(self, limits: _Limits) -> dict[int, _Interval]:
        """The longest interval of the rank at the turn, from each start."""
        outer, intervals = self.num_ranks - 1, dict[int, _Interval]()
        for start in range(outer, self.num_layers - outer - 1):
            limit = bisect_right(self.before, self.before[start] + limits.rank) - 1
            stop = min(limit, self.num_layers - outer)
            while stop - start >= 2 and self._gap(start, stop) > limits.gap:
                stop -= 1
            if stop - start >= 2:
                intervals[start] = _Interval(stop, start)
        return intervals

    def _around(
        self, inner: dict[int, _Interval], outer: int, limits: _Limits
    ) -> dict[int, _Interval]:
        """The same with one more rank, and `outer` ranks around it."""
        intervals: dict[int, _Interval] = {}
        before, last, (rank, gap) = self.before, self.num_layers - outer, limits
        for inside, (end, _) in inner.items():
            for start in range(inside - 1, outer - 1, -1):
                near = before[inside] - before[start]
                most = min(near + gap, rank - near)
                if most <= 0:
                    break
                stop = min(bisect_right(before, before[end] + most) - 1, last)
                if stop <= end or near - (before[stop] - before[end]) > gap:
                    continue
                if start not in intervals or stop > intervals[start].stop:
                    intervals[start] = _Interval(stop, inside)
        return intervals

    def _gap(self, start: int, stop: int) -> int:
        turn = self._turning_point(start, stop)
        return abs(self.cost(start, turn) - self.cost(turn, stop))

    def _turning_point(self, start: int, stop: int) -> int:
        """Where the interval of the last rank is cut into two stages, as evenly as possible."""
        half = bisect_left(self.before, (self.before[start] + self.before[stop]) / 2)
        return min(
            (max(start + 1, min(stop - 1, middle)) for middle in (half - 1, half)),
            key=lambda turn: max(self.cost(start, turn), self.cost(turn, stop)),
        )

    def _traced(self, levels: list[dict[int, _Interval]], start: int) -> list[int]:
        """The ends of a cut whose first stage ends at `start`."""
        pairs: list[tuple[int, int]] = []
        for level in reversed(levels):
            pairs.append((start, level[start].stop))
            start = level[start].inside
        return self._ends(pairs, *pairs[-1])

    def _ends(self, pairs: list[tuple[int, int]], start: int, stop: int) -> list[int]:
        downwards = [low for low, _ in pairs]
        upwards = [high for _, high in reversed(pairs)]
        return [*downwards, self._turning_point(start, stop), *upwards, self.num_layers]


MOST_LOGITS = 2**29  # of a chunk: 1 GiB in bf16
ContextKind = Literal["ring", "zigzag", "allgather", "ulysses", "hybrid"]
Ranges = tuple[range, ...]
"""Tokens of a row, in the order in which a rank has them."""


@dataclass(frozen=True)
class ContextMethod:
    """What one kind of context parallelism does.

    `heads`: how many of the cp ranks exchange tokens for heads: none, some (the largest divisor of
    cp up to √cp that the heads allow), or all. The rest of cp is a ring. `zigzag`: each ring
    position has parts r and 2n−1−r of 2n, so that all have the same causal work; else one part.
    `gathers`: keys and values of the ring are all-gathered at once; else passed from rank to rank.
    """

    heads: Literal["none", "some", "all"] = "none"
    zigzag: bool = True
    gathers: bool = False

    @property
    def merges(self) -> bool:
        """Whether a rank merges partial attention results, one for each visit of keys."""
        return not self.gathers and self.heads != "all"


# Planner and page try them in this order; the first is the default.
CONTEXT_KINDS: dict[ContextKind, ContextMethod] = {
    "zigzag": ContextMethod(),
    "ring": ContextMethod(zigzag=False),
    "allgather": ContextMethod(gathers=True),
    "ulysses": ContextMethod(heads="all"),
    "hybrid": ContextMethod(heads="some"),
}


class AttentionCall(NamedTuple):
    """One attention call: queries [q_start, q_stop) of a shard over keys [k_start, k_stop).

    `causal`: queries and keys are the same tokens. `masked`: some query does not see some key for
    another reason, a window or an uneven cut, and the visible pairs must be computed.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    masked: bool

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that are computed."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True)
class ContextSplit:
    """The cut of a row over cp = inner · outer ranks.

    A rank's coord is its position on the ring times `inner`, plus its number at that position.
    """

    inner: int
    outer: int
    zigzag: bool
    gathers: bool

    @property
    def unit(self) -> int:
        """What the length of a row must be a multiple of."""
        return self.inner * self.outer * (2 if self.zigzag and self.outer > 1 else 1)

    def ring_tokens(self, seq: int, position: int) -> Ranges:
        """The tokens of one position on the ring."""
        if not self.zigzag or self.outer == 1:
            size = seq // self.outer
            return (range(position * size, (position + 1) * size),)
        size, last = seq // (2 * self.outer), 2 * self.outer - 1
        return tuple(range(n * size, (n + 1) * size) for n in (position, last - position))

    def rank_tokens(self, seq: int, coord: int) -> Ranges:
        """The tokens of one rank."""
        position, number = divmod(coord, self.inner)
        size = seq // (self.inner * self.outer)
        return tuple(_cut(self.ring_tokens(seq, position), number * size, (number + 1) * size))


def context_split(layout: Layout, shape: Shape) -> ContextSplit:
    """The cut of a layout for a model, whose heads limit the inner degree."""
    cp, method = layout.cp, CONTEXT_KINDS[layout.context]
    inner = {"none": 1, "all": cp}.get(method.heads) or ulysses_degree(shape, layout.tp, cp)
    return ContextSplit(inner, cp // inner, method.zigzag, method.gathers)


def ulysses_degree(shape: Shape, tp: int, cp: int) -> int:
    """How many ranks of `hybrid` exchange tokens for heads; 1 (all ring) is always legal."""
    heads = max(1, shape.heads // tp)
    small = range(1, math.isqrt(cp) + 1)
    return max(d for d in small if cp % d == 0 and heads % d == 0)


def padded_length(seq: int, unit: int) -> int:
    """The length to which a row is padded; the loss ignores the padding."""
    return -(-seq // unit) * unit


def attention_calls(
    queries: Ranges, keys: Ranges, window: int | None = None
) -> tuple[AttentionCall, ...]:
    """The attention of these queries over these keys, in as few calls as possible."""
    if queries == keys:
        size = sum(map(len, queries))
        return (AttentionCall(0, size, 0, size, causal=window is None, masked=window is not None),)
    calls: list[AttentionCall] = []
    start = 0
    for run in queries:
        stop = start + len(run)
        new_calls = _calls_of(run, keys, window, start, stop)
        same = [(call.k_start, call.k_stop) for call in new_calls] == [
            (call.k_start, call.k_stop) for call in calls if call.q_stop == start
        ]
        clean = not any(call.causal or call.masked for call in (*new_calls, *calls))
        if new_calls and same and clean:  # neighbours that see the same keys share calls
            calls = [call._replace(q_stop=stop) if call.q_stop == start else call for call in calls]
        else:
            calls += new_calls
        start = stop
    return tuple(calls)


def _calls_of(
    run: range, keys: Ranges, window: int | None, q_start: int, q_stop: int
) -> list[AttentionCall]:
    """The calls of one contiguous run of queries; neighbours without a mask are joined."""
    earliest = 0 if window is None else run.start - window + 1
    calls: list[AttentionCall] = []
    offset = 0
    for span in keys:
        before = range(max(span.start, earliest), min(span.stop, run.start))
        inside = range(max(span.start, run.start), min(span.stop, run.stop))
        for part in (before, inside):
            if not part:
                continue
            low = offset + part.start - span.start
            causal = part == run and window is None
            hidden = window is not None and run.stop - 1 - part.start >= window
            masked = not causal and (hidden or part is inside)
            last = calls[-1] if calls and not (causal or masked) else None
            if last and last.k_stop == low and not (last.causal or last.masked):
                calls[-1] = last._replace(k_stop=low + len(part))
            else:
                calls.append(AttentionCall(q_start, q_stop, low, low + len(part), causal, masked))
        offset += len(span)
    return calls


def _cut(ranges: Ranges, start: int, stop: int) -> Iterator[range]:
    """Tokens [start, stop) of the joined ranges."""
    offset = 0
    for span in ranges:
        part = span[max(0, start - offset) : max(0, stop - offset)]
        if part:
            yield part
        offset += len(span)


# Which layers each pipeline stage has.
#
# The largest stage sets the pace of a pipeline, so the cut makes it as small as possible: by the
# FLOPs of the forward, where the head counts for the last stage and the embedding lookup is free.
# Of all cuts with that largest stage, the one with the most even parameters is taken, where
# embedding and head both count. On a V the largest rank sets the pace (`folded_ends`).


class StageKind(NamedTuple):
    """What a stage is made of: stages of one kind have the same weights and do the same work."""

    layers: tuple[LayerKind, ...]
    embedding: bool
    head: bool


def stage_kind(shape: Shape, layers: range) -> StageKind:
    """The kind of a stage with these layers; the head includes multi-token prediction."""
    kinds = tuple(map(shape.layer_kind, layers))
    return StageKind(kinds, layers.start == 0, layers.stop == shape.layers)


_TEXT = re.compile(r"[1-9][0-9]{0,5}(?:[,\s]+[1-9][0-9]{0,5})*")


def cut_stages(
    shape: Shape,
    num_stages: int,
    layer_counts: Sequence[int] | None = None,
    *,
    seq: int | None = None,
    folded: bool = False,
) -> tuple[range, ...]:
    """The layers of each stage, in order; `given` are the user's numbers of layers per stage.

    `seq` is the sequence length, which attention depends on: by default the model's longest.
    `folded`: rank i has stages i and 2p − 1 − i, and the slowest rank sets the pace.
    """
    if layer_counts is None:
        most = shape.layers
        if not 1 <= num_stages <= most:
            raise FivefoldError(
                f"{counted(num_stages, 'stage')} for {counted(most, 'layer')}: every stage needs a "
                f"layer, so use 1 to {most}"
            )
        return _cut_by_cost(shape, num_stages, seq or shape.max_seq, folded)
    if reasons := list(stage_layers_problems(layer_counts, num_stages, shape.layers)):
        raise FivefoldError("; ".join(reasons))
    return tuple(starmap(range, pairwise([0, *accumulate(layer_counts)])))


@lru_cache
def _cut_by_cost(shape: Shape, num_stages: int, seq: int, folded: bool) -> tuple[range, ...]:
    """The planner asks for the same cut many times."""
    costs, sizes = flops_by_layer(shape, seq), parameters_by_layer(shape, num_stages)
    ends = _best_ends(costs, sizes, num_stages)
    if folded and num_stages > 2:
        ends = folded_ends(costs, ends)
    return tuple(starmap(range, pairwise([0, *ends])))


def parse_stage_layers(text: str) -> tuple[int, ...]:
    """Read `7,8,8,7`: the number of layers of each stage."""
    if not _TEXT.fullmatch(text.strip()):
        raise FivefoldError(
            f"stage_layers {text!r}: write the number of layers of each stage, such as 7,8,8,7"
        )
    return tuple(int(word) for word in re.split(r"[,\s]+", text.strip()))


def stage_layers_problems(
    layer_counts: Sequence[int], num_stages: int | None, num_layers: int
) -> Iterator[str]:
    """What is wrong with a user's layers per stage; `num_stages` is None if not yet known."""
    shown = ",".join(map(str, layer_counts))
    if num_stages is not None and len(layer_counts) != num_stages:
        yield (
            f"stage_layers {shown} is for {counted(len(layer_counts), 'stage')} and the pipeline "
            f"has {num_stages}: give {counted(num_stages, 'number')}"
        )
    if min(layer_counts, default=0) < 1:
        yield f"stage_layers {shown}: every stage needs a layer"
    if sum(layer_counts) != num_layers:
        yield (
            f"stage_layers {shown} sum to {sum(layer_counts)}, and the model has "
            f"{counted(num_layers, 'layer')}: give numbers that sum to {num_layers}"
        )


def flops_by_layer(shape: Shape, seq: int) -> list[int]:
    """Forward FLOPs per token of each layer, with what runs before the first and after the last."""
    kinds = {shape.layer_kind(i): layer_flops(shape, i, seq).total for i in layer_kinds(shape)}
    flops = [kinds[shape.layer_kind(i)] for i in range(shape.layers)]
    total = forward_flops(shape, seq)
    flops[0] += 2.0 * embedding_parameters(shape).norms
    flops[-1] += 2.0 * head_parameters(shape).norms + total.head + total.mtp
    return [round(value) for value in flops]  # whole numbers, so that equal stages compare equal


def parameters_by_layer(shape: Shape, num_stages: int) -> list[int]:
    """Parameters of each layer, with the embedding in the first and the head in the last.

    If a tied model is cut, the last stage has a copy of the embedding.
    """
    kinds = {shape.layer_kind(i): layer_parameters(shape, i).total for i in layer_kinds(shape)}
    counts = [kinds[shape.layer_kind(i)] for i in range(shape.layers)]
    counts[0] += embedding_parameters(shape).total
    counts[-1] += head_parameters(shape).total
    counts[-1] += shape.mtp * mtp_parameters(shape).total
    if shape.ends_share and num_stages > 1:
        counts[-1] += shape.vocab * shape.width
    return counts


def _best_ends(costs: list[int], weights: list[int], num_stages: int) -> list[int]:
    """Where each stage ends: the least largest cost, then the least sum of squared weights."""
    cost, weight = [0, *accumulate(costs)], [0, *accumulate(weights)]
    low, high = max(costs), cost[-1]
    while low < high:
        middle = (low + high) // 2
        if _furthest(cost, num_stages, middle)[-1] == len(costs):
            high = middle
        else:
            low = middle + 1
    far, near = _furthest(cost, num_stages, low), _nearest(cost, num_stages, low)
    squares = {0: 0}
    starts: list[dict[int, int]] = []  # of each stage, by where it ends
    for stage in range(num_stages):
        ends = range(near[stage + 1], far[stage + 1] + 1)
        first = {end: bisect_left(cost, cost[end] - low) for end in ends}
        ways = [*_best_starts(ends, range(near[stage], far[stage] + 1), first, squares, weight)]
        squares = {end: square for end, _, square in ways}
        starts.append({end: start for end, start, _ in ways})
    stage_ends = [len(costs)]
    for before in reversed(starts[1:]):
        stage_ends.append(before[stage_ends[-1]])
    return stage_ends[::-1]


def _best_starts(
    ends: range, starts: range, first: dict[int, int], squares: dict[int, int], weight: list[int]
) -> Iterator[tuple[int, int, int]]:
    """For each end of a stage its best start and the sum of squares up to there.

    `first` is the first start within the limit, `squares` the best sum up to each start. A later
    end never has an earlier best start, so the middle one halves the search for the others.
    """
    if not ends:
        return
    half = len(ends) // 2
    end = ends[half]
    square, start = min(
        (squares[start] + (weight[end] - weight[start]) ** 2, start)
        for start in range(max(starts.start, first[end]), min(starts.stop, end))
    )
    yield from _best_starts(ends[:half], range(starts.start, start + 1), first, squares, weight)
    yield end, start, square
    yield from _best_starts(ends[half + 1 :], range(start, starts.stop), first, squares, weight)


def _furthest(cost: list[int], num_stages: int, limit: int) -> list[int]:
    """How far 0, 1, 2, … stages reach within the limit and leave a layer to each later stage."""
    far, num_layers = [0], len(cost) - 1
    for left in range(num_stages - 1, -1, -1):
        far.append(min(num_layers - left, bisect_right(cost, cost[far[-1]] + limit) - 1))
    return far


def _nearest(cost: list[int], num_stages: int, limit: int) -> list[int]:
    """Where 0, 1, 2, … stages must end at least, for the others to have the remaining layers."""
    near = [len(cost) - 1]
    for before in range(num_stages - 1, -1, -1):
        near.append(max(before, bisect_left(cost, cost[near[-1]] - limit)))
    return near[::-1]


def loss_chunks(tokens: Any, vocabulary: Any, width: int) -> Any:
    """Chunks of tokens in which a head with so much of the vocabulary computes its loss: integers
    or arrays. They are worth it where logits are many, and no fewer than the weights, whose
    gradient waits for the backward in their place.

    >>> [loss_chunks(8192, *each) for each in ((128256, 4096), (16032, 4096), (50257, 12288))]
    [2, 1, 1]
    """
    logits = tokens * vocabulary
    many = (2 * logits > MOST_LOGITS) & (tokens >= width)
    chunks = -(-logits // MOST_LOGITS)
    return 1 + many * (chunks + (chunks < 2) - 1)


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary size that tp splits evenly; the loss ignores the padding."""
    return -(-vocab // tp) * tp
