"""Stages of a folded pipeline: rank i has stages i and 2p − 1 − i, and its pace is that of both.

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

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


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
