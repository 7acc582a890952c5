"""How a row of tokens is cut over the context ranks, and which attention each of them computes.

A row of T tokens is dealt to `outer` places that form a ring, and the tokens of each place to
`inner` ranks that exchange tokens for heads (Ulysses). Plain `ring` deals one contiguous piece to
a place; the other kinds deal in zigzag: pieces r and 2n−1−r of 2n, so that all places have the
same causal work.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from fivefold.core import count
from fivefold.core.errors import FivefoldError, counted
from fivefold.core.layout import Layout
from fivefold.core.shape import Shape

if TYPE_CHECKING:
    from fivefold.core.shape import Shape


Ranges = tuple[range, ...]
"""Tokens of a row, in the order in which a rank holds them."""


class AttentionCall(NamedTuple):
    """One attention call: queries [q_start, q_stop) of a shard over keys [k_start, k_stop).

    `causal`: queries and keys are the same tokens. `masked`: some query does not see some key for
    another reason, a window or an uneven cut, and the visible pairs must be worked out.
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
class Split:
    """The cut of a row over cp = inner · outer ranks.

    A rank's coord is its place on the ring times `inner`, plus its number inside the place.
    """

    inner: int
    outer: int
    zigzag: bool
    gathers: bool  # keys and values of the ring are gathered at once instead of passed on

    @property
    def unit(self) -> int:
        """What the length of a row must be a multiple of."""
        return self.inner * self.outer * (2 if self.zigzag and self.outer > 1 else 1)

    def place(self, seq: int, place: int) -> Ranges:
        """The tokens of one place on the ring."""
        if not self.zigzag or self.outer == 1:
            size = seq // self.outer
            return (range(place * size, (place + 1) * size),)
        size, last = seq // (2 * self.outer), 2 * self.outer - 1
        return tuple(range(piece * size, (piece + 1) * size) for piece in (place, last - place))

    def rank(self, seq: int, coord: int) -> Ranges:
        """The tokens of one rank."""
        place, inside = divmod(coord, self.inner)
        size = seq // (self.inner * self.outer)
        return tuple(_cut(self.place(seq, place), inside * size, (inside + 1) * size))


def split_of(layout: Layout, shape: Shape) -> Split:
    """The cut of a layout for a model, whose heads bound the inner degree."""
    cp, kind = layout.cp, layout.context
    inner = ulysses_degree(shape, layout) if kind == "hybrid" else cp if kind == "ulysses" else 1
    return Split(inner, cp // inner, zigzag=kind != "ring", gathers=kind == "allgather")


def ulysses_degree(shape: Shape, layout: Layout) -> int:
    """The inner degree of `hybrid`: the largest divisor of cp up to √cp that the heads allow.

    The rest of cp is the ring around it, so that 1 (all ring) is always legal.
    """
    heads = max(1, shape.heads // layout.tp)
    small = range(1, math.isqrt(layout.cp) + 1)
    return max(d for d in small if layout.cp % d == 0 and heads % d == 0)


def padded(seq: int, unit: int) -> int:
    """The length to which a row is padded; the padding never shows in the loss."""
    return -(-seq // unit) * unit


def calls(queries: Ranges, keys: Ranges, window: int | None = None) -> tuple[AttentionCall, ...]:
    """What queries of some tokens compute with keys of some tokens, in as few calls as can be."""
    if queries == keys:
        size = sum(map(len, queries))
        return (AttentionCall(0, size, 0, size, causal=window is None, masked=window is not None),)
    found: list[AttentionCall] = []
    start = 0
    for piece in queries:
        stop = start + len(piece)
        now = list(_calls_of(piece, keys, window, start, stop))
        same = [(one.k_start, one.k_stop) for one in now] == [
            (one.k_start, one.k_stop) for one in found if one.q_stop == start
        ]
        clean = not any(one.causal or one.masked for one in (*now, *found))
        if now and same and clean:  # neighbours that see the same keys share their calls
            found = [one._replace(q_stop=stop) if one.q_stop == start else one for one in found]
        else:
            found += now
        start = stop
    return tuple(found)


def pairs(split: Split, seq: int, window: int | None = None) -> list[int]:
    """Pairs of a query and a key that each rank computes for each of its heads' sequences.

    Inside a place the ranks share heads, each with 1/inner of them: pairs are per head of the model
    over the `inner` ranks, so that the sum over ranks is that of one device.
    """
    found: list[int] = []
    for place in range(split.outer):
        queries = split.place(seq, place)
        total = sum(
            call.pairs
            for other in range(split.outer)
            for call in calls(queries, split.place(seq, other), window)
        )
        found += [total // split.inner] * split.inner
    return found


def _calls_of(
    piece: range, keys: Ranges, window: int | None, q_start: int, q_stop: int
) -> Iterator[AttentionCall]:
    """The calls of one contiguous piece of queries."""
    earliest = 0 if window is None else piece.start - window + 1
    found: list[AttentionCall] = []
    offset = 0
    for each in keys:
        before = range(max(each.start, earliest), min(each.stop, piece.start))
        inside = range(max(each.start, piece.start), min(each.stop, piece.stop))
        for part in (before, inside):
            if not part:
                continue
            low = offset + part.start - each.start
            causal = part == piece and window is None
            hidden = window is not None and piece.stop - 1 - part.start >= window
            masked = not causal and (hidden or part is inside)
            found.append(AttentionCall(q_start, q_stop, low, low + len(part), causal, masked))
        offset += len(each)
    yield from _joined(found)


def _joined(found: Sequence[AttentionCall]) -> Iterator[AttentionCall]:
    """Neighbouring calls over all of their keys as one."""
    open_: AttentionCall | None = None
    for call in found:
        plain = open_ is not None and not (open_.causal or open_.masked)
        if open_ and plain and open_.k_stop == call.k_start and not (call.causal or call.masked):
            open_ = open_._replace(k_stop=call.k_stop)
            continue
        if open_ is not None:
            yield open_
        open_ = call
    if open_ is not None:
        yield open_


def _cut(ranges: Ranges, start: int, stop: int) -> Iterator[range]:
    """Tokens [start, stop) of the joined ranges."""
    offset = 0
    for each in ranges:
        part = each[max(0, start - offset) : max(0, stop - offset)]
        if part:
            yield part
        offset += len(each)


# Which layers each pipeline stage holds.
#
# The largest stage sets the pace of a pipeline, so that layers are dealt to make it as small as
# can be: by the FLOPs of the forward, where the head weighs on the last stage and the lookup of
# the input embedding costs nothing. Of all cuts with that largest stage, the one whose parameters
# are spread best is taken: there embedding and head both count.


_TEXT = re.compile(r"[1-9][0-9]{0,5}(?:[,\s]+[1-9][0-9]{0,5})*")


def cut(
    shape: Shape, num_stages: int, given: Sequence[int] | None = None, *, seq: int | None = None
) -> tuple[range, ...]:
    """The layers of each stage, in order; `given` are their numbers where a user has chosen.

    `seq` is the length of a sequence, on which attention depends: by default the model's longest.
    """
    if given is None:
        most = shape.layers
        if not 1 <= num_stages <= most:
            raise FivefoldError(
                f"{counted(num_stages, 'stage')} for {counted(most, 'layer')}: every stage needs a "
                f"layer, so use 1 to {most}"
            )
        return _dealt(shape, num_stages, seq or shape.max_seq)
    if reasons := list(problems(given, num_stages, shape.layers)):
        raise FivefoldError("; ".join(reasons))
    return _spans([*accumulate(given)])


@lru_cache
def _dealt(shape: Shape, num_stages: int, seq: int) -> tuple[range, ...]:
    """By cost; whoever explores a job asks for the same again and again."""
    return _spans(_best_ends(compute(shape, seq), sizes(shape, num_stages), num_stages))


def parse(text: str) -> tuple[int, ...]:
    """Read `7,8,8,7`: the number of layers of each stage."""
    if not _TEXT.fullmatch(text.strip()):
        raise FivefoldError(
            f"stage_layers {text!r}: write the number of layers of each stage, such as 7,8,8,7"
        )
    return tuple(int(word) for word in re.split(r"[,\s]+", text.strip()))


def problems(given: Sequence[int], num_stages: int | None, num_layers: int) -> Iterator[str]:
    """What is wrong with the layers that a user gave each stage; None stages are not yet known."""
    shown = ",".join(map(str, given))
    if num_stages is not None and len(given) != num_stages:
        yield (
            f"stage_layers {shown} is for {counted(len(given), 'stage')} and the pipeline has "
            f"{num_stages}: give {counted(num_stages, 'number')}"
        )
    if min(given, default=0) < 1:
        yield f"stage_layers {shown}: every stage needs a layer"
    if sum(given) != num_layers:
        yield (
            f"stage_layers {shown} sum to {sum(given)}, and the model has "
            f"{counted(num_layers, 'layer')}: give numbers that sum to {num_layers}"
        )


def compute(shape: Shape, seq: int) -> list[int]:
    """Forward FLOPs per token of each layer, with what runs before the first and after the last."""
    flops = [count.layer_flops(shape, i, seq).total for i in range(shape.layers)]
    whole = count.forward_flops(shape, seq)
    flops[0] += 2.0 * count.embedding_parameters(shape).norms
    flops[-1] += 2.0 * count.head_parameters(shape).norms + whole.head + whole.mtp
    return [round(each) for each in flops]  # whole numbers, so that equal stages compare equal


def sizes(shape: Shape, num_stages: int) -> list[int]:
    """Parameters of each layer, with the embedding in the first and the head in the last.

    Where a tied model is cut, the last stage has a copy of the embedding's weight.
    """
    found = [count.layer_parameters(shape, i).total for i in range(shape.layers)]
    found[0] += count.embedding_parameters(shape).total
    found[-1] += count.head_parameters(shape).total
    found[-1] += shape.mtp * count.mtp_parameters(shape).total
    if shape.ends_share and num_stages > 1:
        found[-1] += shape.vocab * shape.width
    return found


def _spans(ends: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise([0, *ends]))


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
    found = [len(costs)]
    for before in reversed(starts[1:]):
        found.append(before[found[-1]])
    return found[::-1]


def _best_starts(
    ends: range, starts: range, first: dict[int, int], squares: dict[int, int], weight: list[int]
) -> Iterator[tuple[int, int, int]]:
    """For each end of a stage its best start and the sum of squares up to there.

    `first` is the first start within the limit, `squares` the best sum up to each start. A later
    end never has an earlier best start, so that the middle one halves the search for the others.
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
    """How far 0, 1, 2, … stages reach within the limit, and leave a layer to each that follows."""
    far, num_layers = [0], len(cost) - 1
    for left in range(num_stages - 1, -1, -1):
        far.append(min(num_layers - left, bisect_right(cost, cost[far[-1]] + limit) - 1))
    return far


def _nearest(cost: list[int], num_stages: int, limit: int) -> list[int]:
    """Where 0, 1, 2, … stages must end at least, for the rest to hold what is left."""
    near = [len(cost) - 1]
    for before in range(num_stages - 1, -1, -1):
        near.append(max(before, bisect_left(cost, cost[near[-1]] - limit)))
    return near[::-1]


# Which activations are computed again in the backward.


@dataclass(frozen=True)
class Recompute:
    """What a plan says: `selective` repeats cheap parts only, `full` keeps the input of every
    `blocks`-th block."""

    kind: Literal["none", "selective", "full"] = "none"
    blocks: int = 1

    @classmethod
    def parse(cls, text: str) -> Recompute:
        found = re.fullmatch(r"(none|selective|full)(?::([1-9][0-9]{0,4}))?", text)
        if not found or (found[2] and found[1] != "full"):
            raise FivefoldError(
                f"recompute {text!r}: choose none, selective, full, or full:K for segments of K "
                "blocks"
            )
        return cls(cast(Any, found[1]), int(found[2] or 1))

    def __str__(self) -> str:
        return self.kind if self.blocks == 1 else f"{self.kind}:{self.blocks}"
