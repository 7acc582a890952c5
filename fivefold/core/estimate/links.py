"""How long collectives take on a machine's links.

A group of n ranks that lie `stride` apart crosses every tier whose domain it does not fit in.
Inside a domain it has the bandwidth of one GPU; out of it, that of all its ranks there, each with
a link of its own. A ring pays the latency of each of its n - 1 hops, of the tier that it crosses.

A switch that reduces adds what comes up and copies what goes down: a sum over all ranks takes each
byte once up and once down, at the same time, where a ring takes it around twice. A scatter alone
still sends all, and a gather alone still receives all; only their hops are fewer.
"""

from __future__ import annotations

import numpy as np

from fivefold.core.estimate.grid import Array
from fivefold.core.estimate.torus import Torus
from fivefold.core.machine import Machine

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
