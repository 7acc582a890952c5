"""How long collectives take on a machine's links.

A group of n ranks that lie `stride` apart crosses every tier whose domain it does not fit in.
Inside a domain it has the bandwidth of one GPU; out of it, that of all its ranks there, each with
a link of its own. A ring pays the latency of each of its n - 1 hops, of the tier that it crosses.
"""

from __future__ import annotations

import numpy as np

from fivefold.core.estimate.grid import Array
from fivefold.core.machine import Machine


class Links:
    """The wires of a machine, with what software reaches of them."""

    def __init__(self, machine: Machine) -> None:
        self.tiers = machine.tiers
        self.shares = machine.efficiency.links

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
        inside = np.ones_like(ranks)
        slowest = np.zeros_like(ranks)  # seconds a byte
        latency: Array | float = 0.0
        for number, tier in enumerate(self.tiers):
            reached = self._reached(number, ranks, stride)
            here = 1 / (tier.bandwidth * self.share(number) * (1.0 if flat else inside))
            slowest = np.where(reached > inside, np.maximum(slowest, here), slowest)
            latency = latency + tier.link.latency * (ranks / inside - ranks / reached)
            inside = reached
        return (1 - 1 / ranks) * size * slowest + pieces * latency

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
            wire = size * share / (tier.bandwidth * self.share(number))
            seconds = seconds + wire + tier.link.latency * np.log2(reached / inside)
            inside = reached
        return np.asarray(seconds)

    def pair(self, size: Array, stride: Array) -> Array:
        """One message to a rank that lies `stride` away."""
        seconds = np.zeros_like(stride)
        for number, tier in enumerate(self.tiers):
            inner = self.tiers[number - 1].size if number else 0
            here = size / (tier.bandwidth * self.share(number)) + tier.link.latency
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
