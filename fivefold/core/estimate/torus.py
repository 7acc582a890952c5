"""What a group of ranks has of a torus: the links along each of its dimensions.

Ranks run along the first dimension, then the second, and so on; every rank has two links in each.
A group of ranks that lie `stride` apart spans some of the dimensions. Along one that it goes all
the way around, it is a ring and has both directions; along a part of one it is a line, at whose
ends there is one way only. Groups that lie between its ranks share its links.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fivefold.core.estimate.grid import Array


class Span(NamedTuple):
    """A group along one dimension."""

    ranks: Array  # 1: it does not spread there
    gap: Array  # links between two of its ranks, and groups that share each of them
    ways: Array  # 2 around a ring, 1 along a line


class Torus:
    """A torus of given degrees; `bandwidth`: bytes/s one way over all links of a rank."""

    def __init__(self, degrees: tuple[int, ...], bandwidth: float) -> None:
        self.degrees = degrees
        self.link = bandwidth / (2 * len(degrees))

    def gather_rate(self, ranks: Array, stride: Array) -> Array:
        """Bytes/s at which each rank gets what others have, or gives it: along all dimensions of
        the group at once, each with its share of the bytes."""
        rate = np.zeros(np.broadcast_shapes(ranks.shape, stride.shape))
        for span in self._spans(ranks, stride):
            rate = rate + np.where(span.ranks > 1, span.ways * self.link / span.gap, 0.0)
        return np.where(rate > 0, rate, self.link)

    def hops(self, ranks: Array, stride: Array) -> Array:
        """Links that the farthest shard passes: half of a ring, all of a line."""
        found = np.zeros(1)
        for span in self._spans(ranks, stride):
            found = found + np.where(span.ranks > 1, span.ranks * span.gap / span.ways, 0.0)
        return found

    def exchange_rate(self, ranks: Array, stride: Array) -> Array:
        """Bytes/s at which each rank sends evenly to all, itself among them: half of what one half
        sends crosses the middle of the longest dimension, by two links of a ring or one of a
        line."""
        rate = np.full(np.broadcast_shapes(ranks.shape, stride.shape), np.inf)
        for span in self._spans(ranks, stride):
            cut = 4 * span.ways * self.link / (span.ranks * span.gap)
            rate = np.where(span.ranks > 1, np.minimum(rate, cut), rate)
        return np.where(np.isfinite(rate), rate, self.link)

    def pair_rate(self, stride: Array) -> Array:
        """Bytes/s to the rank that lies `stride` away, when all ranks send as far."""
        rate = np.full_like(stride, self.link)
        below = 1
        for degree in self.degrees:
            inside = (stride >= below) & (stride < below * degree)
            steps = stride / below
            # The shorter way around; all messages on their way share each link.
            links = np.maximum(np.minimum(steps, degree - steps), 1.0)
            rate = np.where(inside, self.link / links, rate)
            below *= degree
        return rate

    def _spans(self, ranks: Array, stride: Array) -> Iterator[Span]:
        below, inside = 1, np.ones_like(ranks)
        for degree in self.degrees:
            reached = np.clip(np.floor(below * degree / stride), 1.0, ranks)
            gap = np.maximum(stride / below, 1.0)
            here = reached / inside
            yield Span(here, gap, np.where(here * gap >= degree, 2.0, 1.0))
            below, inside = below * degree, reached
