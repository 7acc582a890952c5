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

from fivefold.core.machine import Machine
from fivefold.cost.grid import Array


class TorusSpan(NamedTuple):
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

    def _spans(self, ranks: Array, stride: Array) -> Iterator[TorusSpan]:
        below, inside = 1, np.ones_like(ranks)
        for degree in self.degrees:
            reached = np.clip(np.floor(below * degree / stride), 1.0, ranks)
            gap = np.maximum(stride / below, 1.0)
            here = reached / inside
            yield TorusSpan(here, gap, np.where(here * gap >= degree, 2.0, 1.0))
            below, inside = below * degree, reached


# How long collectives take on a machine's links.
#
# A group of n ranks that lie `stride` apart crosses every tier whose domain it does not fit in.
# Inside a domain it has the bandwidth of one GPU; out of it, that of all its ranks there, each
# with a link of its own. A ring pays the latency of each of its n - 1 hops, of the tier that it
# crosses.
#
# A switch that reduces adds what comes up and copies what goes down: a sum over all ranks takes
# each byte once up and once down, at the same time, where a ring takes it around twice. A scatter
# alone still sends all, and a gather alone still receives all; only their hops are fewer.


_UP_AND_DOWN = 2  # hops by way of a switch


class Links:
    """The wires of a machine, with what software reaches of them."""

    def __init__(self, machine: Machine) -> None:
        self.tiers = machine.tiers
        self.shares = machine.efficiency.links
        self.reduces = any(tier.reduces for tier in machine.tiers)
        self.tori = [
            Torus(tier.torus, tier.bandwidth * self.share(number)) if tier.torus else None
            for number, tier in enumerate(machine.tiers)
        ]

    def ring(
        self,
        size: Array,
        ranks: Array,
        stride: Array,
        pieces: Array | float = 1.0,
        flat: bool = False,
    ) -> Array:
        """All-gather or reduce-scatter: `size` bytes are what every rank has in the end, or had.

        They go in `pieces`, each of which waits for the whole ring. `flat`: the ranks of a domain
        do not share their links to others.
        """
        slowest, latency = self._slowest(ranks, stride, flat, summed=False)
        return (1 - 1 / ranks) * size * slowest + pieces * latency

    def all_reduce(
        self,
        size: Array,
        ranks: Array,
        stride: Array,
        pieces: Array | float = 1.0,
        flat: bool = False,
    ) -> Array:
        """The sum of `size` bytes over all ranks, on each of them."""
        slowest, latency = self._slowest(ranks, stride, flat, summed=True)
        return (1 - 1 / ranks) * size * slowest + pieces * latency

    def _slowest(
        self, ranks: Array, stride: Array, flat: bool, summed: bool
    ) -> tuple[Array, Array | float]:
        """Seconds a byte of the tier that holds a group up, and the latency of all its hops;
        summed: there and back."""
        inside = np.ones_like(ranks)
        slowest = np.zeros_like(ranks)
        latency: Array | float = 0.0
        times = 2.0 if summed else 1.0
        for number, tier in enumerate(self.tiers):
            reached = self._reached(number, ranks, stride)
            crosses = reached > inside
            rate = self._rate(number, reached, stride) * (1.0 if flat else inside)
            hops = times * (ranks / inside - ranks / reached)
            passes: Array | float = times
            if (torus := self.tori[number]) is not None:
                hops = times * np.where(crosses, torus.hops(reached, stride), 0.0)
            if tier.reduces:
                hops = np.where(crosses, _UP_AND_DOWN, 0.0)
                # All of it goes up once and comes down at the same time; a ring keeps its own part.
                passes = ranks / np.maximum(ranks - 1, 1) if summed else 1.0
            slowest = np.where(crosses, np.maximum(slowest, passes / rate), slowest)
            latency = latency + tier.link.latency * hops
            inside = reached
        return slowest, latency

    def _rate(self, number: int, reached: Array, stride: Array) -> Array | float:
        """Bytes/s of one rank in the part of a group that shares a domain."""
        if (torus := self.tori[number]) is not None:
            return torus.gather_rate(reached, stride)
        return self.tiers[number].bandwidth * self.share(number)

    def all_to_all(
        self, size: Array, ranks: Array, stride: Array, once: tuple[int, int] | None = None
    ) -> Array:
        """`size` bytes leave each rank, evenly to all.

        `once` = (k, most): of k copies of a token one crosses to each domain that wants some, and
        to `most` domains at most; the others are made there.
        """
        inside = np.ones_like(ranks)
        seconds: Array | float = 0.0
        for number, tier in enumerate(self.tiers):
            reached = self._reached(number, ranks, stride)
            share = (reached - inside) / ranks
            if once is not None and number:
                domains = reached / inside
                wanted = np.minimum(domains * (1 - (1 - 1 / domains) ** once[0]), once[1])
                share = share * wanted / once[0]
            rate: Array | float = tier.bandwidth * self.share(number)
            if (torus := self.tori[number]) is not None:
                rate = torus.exchange_rate(reached, stride)
                share = np.where(reached > inside, reached / ranks, 0.0)
            seconds = seconds + size * share / rate + tier.link.latency * np.log2(reached / inside)
            inside = reached
        return np.asarray(seconds)

    def pair(self, size: Array, stride: Array) -> Array:
        """One message to a rank that lies `stride` away."""
        seconds = np.zeros_like(stride)
        for number, tier in enumerate(self.tiers):
            inner = self.tiers[number - 1].size if number else 0
            torus = self.tori[number]
            rate = tier.bandwidth * self.share(number) if torus is None else torus.pair_rate(stride)
            here = size / rate + tier.link.latency
            seconds = np.where(stride >= (inner or 0), here, seconds)
        return seconds

    def share(self, number: int) -> float:
        """What software reaches of a tier's bandwidth; outer tiers are as the last one known."""
        return self.shares[min(number, len(self.shares) - 1)]

    def _reached(self, number: int, ranks: Array, stride: Array) -> Array:
        """How many ranks of a group share one domain of a tier."""
        size = self.tiers[number].size
        if size is None:
            return ranks
        return np.clip(np.floor(size / stride), 1.0, ranks)
