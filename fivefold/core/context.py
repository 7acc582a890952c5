"""How a row of tokens is cut over the context ranks, and which attention each of them computes.

A row of T tokens is dealt to `outer` places that form a ring, and the tokens of each place to
`inner` ranks that exchange tokens for heads (Ulysses). Plain `ring` deals one contiguous piece to
a place; the other kinds deal in zigzag: pieces r and 2n−1−r of 2n, so that all places have the
same causal work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fivefold.core.layout import Layout

if TYPE_CHECKING:
    from fivefold.core.shape import Shape

Ranges = tuple[range, ...]
"""Tokens of a row, in the order in which a rank holds them."""


class Call(NamedTuple):
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


def calls(queries: Ranges, keys: Ranges, window: int | None = None) -> tuple[Call, ...]:
    """What queries of some tokens compute with keys of some tokens, in as few calls as can be."""
    if queries == keys:
        size = sum(map(len, queries))
        return (Call(0, size, 0, size, causal=window is None, masked=window is not None),)
    found: list[Call] = []
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
) -> Iterator[Call]:
    """The calls of one contiguous piece of queries."""
    earliest = 0 if window is None else piece.start - window + 1
    found: list[Call] = []
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
            found.append(Call(q_start, q_stop, low, low + len(part), causal, masked))
        offset += len(each)
    yield from _joined(found)


def _joined(found: Sequence[Call]) -> Iterator[Call]:
    """Neighbouring calls over all of their keys as one."""
    open_: Call | None = None
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
