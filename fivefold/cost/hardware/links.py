"""Seconds of collectives and messages on the links of a machine.

A group of n ranks with a `stride` crosses every tier whose domain it does not fit in. Inside a
domain it has the bandwidth of one GPU; out of the domain, that of all its ranks there, each with
its own link. A ring pays the latency of each of its n - 1 hops, at the tier that a hop crosses: so
the time of small collectives grows with the number of ranks, whatever the bandwidth. A sum between
domains may instead go up and down a tree of them, with hops by the logarithm of their number and
some of the bandwidth lost; the faster of both is taken, as NCCL does.

A switch that reduces adds what comes up and copies what goes down: an all-reduce sends each byte
once up and once down, at the same time, where a ring sends it around twice. A reduce-scatter alone
still sends all bytes, and an all-gather alone still receives all; only their hops are fewer.

In a torus, ranks run along the first dimension, then the second, and so on; every rank has two
links per dimension. A group spans some of the dimensions. If it goes all the way around one, it is
a ring with both directions; otherwise it is a line. Groups between its ranks share its links.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fivefold.core import Machine, Tier
from fivefold.cost import Array

Crossing = tuple[int, int]  # copies of a token, and domains that they are sent to at most


class TorusSpan(NamedTuple):
    """A group along one dimension of a torus."""

    ranks: Array  # 1: the group does not extend along it
    gap: Array  # links between two of its ranks, and groups that share each link
    ways: Array  # directions: 2 in a ring, 1 in a line


class Torus:
    """A torus of given degrees; `bandwidth`: bytes/s in one direction over all links of a rank."""

    def __init__(self, degrees: tuple[int, ...], bandwidth: float) -> None:
        self.degrees = degrees
        self.link = bandwidth / (2 * len(degrees))

    def gather_rate(self, ranks: Array, stride: Array) -> Array:
        """Bytes/s of each rank in an all-gather or reduce-scatter, which use all dimensions of the
        group at once, each for its share of the bytes."""
        rate = np.zeros(np.broadcast_shapes(ranks.shape, stride.shape))
        for span in self._spans(ranks, stride):
            rate = rate + np.where(span.ranks > 1, span.ways * self.link / span.gap, 0.0)
        return np.where(rate > 0, rate, self.link)

    def hops(self, ranks: Array, stride: Array) -> Array:
        """Links on the way of the farthest shard: half of a ring, all of a line."""
        num_hops = np.zeros(1)
        for span in self._spans(ranks, stride):
            num_hops = num_hops + np.where(span.ranks > 1, span.ranks * span.gap / span.ways, 0.0)
        return num_hops

    def exchange_rate(self, ranks: Array, stride: Array) -> Array:
        """Bytes/s of each rank in an all-to-all, itself included: half of what one half sends
        crosses the middle of the longest dimension, over two links of a ring or one of a line."""
        rate = np.full(np.broadcast_shapes(ranks.shape, stride.shape), np.inf)
        for span in self._spans(ranks, stride):
            cut = 4 * span.ways * self.link / (span.ranks * span.gap)
            rate = np.where(span.ranks > 1, np.minimum(rate, cut), rate)
        return np.where(np.isfinite(rate), rate, self.link)

    def pair_rate(self, stride: Array) -> Array:
        """Bytes/s to the rank at distance `stride`, when all ranks send as far."""
        rate = np.full_like(stride, self.link)
        below = 1
        for degree in self.degrees:
            inside = (stride >= below) & (stride < below * degree)
            steps = stride / below
            # The shorter direction; all messages in transit share each link.
            links = np.maximum(np.minimum(steps, degree - steps), 1.0)
            rate = np.where(inside, self.link / links, rate)
            below *= degree
        return rate

    def _spans(self, ranks: Array, stride: Array) -> Iterator[TorusSpan]:
        below, inside = 1, np.ones_like(ranks)
        for degree in self.degrees:
            reached = np.clip(np.floor(below * degree / stride), 1.0, ranks)
            gap = np.maximum(stride / below, 1.0)
            num_ranks = reached / inside
            yield TorusSpan(num_ranks, gap, np.where(num_ranks * gap >= degree, 2.0, 1.0))
            below, inside = below * degree, reached


_UP_AND_DOWN = 2  # hops through a switch, or passes through a tree
# Share of a ring's bandwidth that a tree of nodes reaches: NCCL's tuning model (tuning.cc,
# version 2.28).
TREE_SHARE = 0.92
# Exchange between more domains than a few slows down by this power of their number: DeepEP's
# dispatch has 58 GB/s a GPU on 16 to 32 GPUs and 41 to 45 on 128.
_FEW_DOMAINS, _CONGESTION = 4, 0.18


class Links:
    """The links of a machine, with the share of their bandwidth that software reaches.

    A job of `world` ranks takes equal shares of as few domains as hold it: 128 GPUs are 64 in each
    of two NVL72, 144 are all of both. A group whose ranks do not divide such a share straddles two
    domains somewhere, and all wait for it.
    """

    def __init__(self, machine: Machine, world: Array | None = None) -> None:
        self.tiers, self.world = machine.tiers, world
        if world is not None and world.min() == world.max():  # as in a search
            self.world = world.reshape(-1)[:1]
        self.sizes = [_job_share(tier, world) for tier in machine.tiers]
        self.shares = machine.efficiency.links
        self.reduces = any(tier.reduces for tier in machine.tiers)
        self.tori = [
            Torus(tier.torus, tier.bandwidth * self.share(number)) if tier.torus else None
            for number, tier in enumerate(machine.tiers)
        ]
        self._known: dict[tuple[object, ...], tuple[Array, Array | float]] = {}

    def ring(
        self,
        size: Array,
        ranks: Array,
        stride: Array,
        num_buckets: Array | float = 1.0,
        flat: bool = False,
    ) -> Array:
        """All-gather or reduce-scatter; `size`: bytes of the gathered buffer.

        The bytes go in `num_buckets` collectives, each of which pays the latency of the ring.
        `flat`: the ranks of a domain do not share their links to other domains.
        """
        slowest, latency = self._slowest(ranks, stride, flat, summed=False)
        return (1 - 1 / ranks) * size * slowest + num_buckets * latency

    def all_reduce(
        self,
        size: Array,
        ranks: Array,
        stride: Array,
        num_buckets: Array | float = 1.0,
        flat: bool = False,
    ) -> Array:
        """All-reduce of `size` bytes: around a ring, or up and down a tree of domains if faster."""
        slowest, latency = self._slowest(ranks, stride, flat, summed=True)
        ring = (1 - 1 / ranks) * size * slowest + num_buckets * latency
        if len(self.tiers) == 1 or self.reduces or not self.tiers[-1].link.trees:
            return ring
        inside = self._reached(len(self.tiers) - 2, ranks, stride)
        hops = _UP_AND_DOWN * self.tiers[0].link.latency * (inside - 1)
        hops = hops + _UP_AND_DOWN * self.tiers[-1].link.latency * np.log2(ranks / inside)
        tree = size * slowest / TREE_SHARE + num_buckets * hops
        return np.where(ranks > inside, np.minimum(ring, tree), ring)

    def _slowest(
        self, ranks: Array, stride: Array, flat: bool, summed: bool
    ) -> tuple[Array, Array | float]:
        """Seconds per byte of the slowest tier of a group, and the latency of all hops; `summed`:
        for an all-reduce. Many collectives of a step have the same groups: made once for each."""
        groups = (ranks.shape, ranks.tobytes(), stride.shape, stride.tobytes())
        key = (*groups, flat, summed)
        if key not in self._known:
            self._known[key] = self._slowest_tier(ranks, stride, flat, summed)
        return self._known[key]

    def _slowest_tier(
        self, ranks: Array, stride: Array, flat: bool, summed: bool
    ) -> tuple[Array, Array | float]:
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
                # All bytes go up once and come down at the same time; a ring keeps its own shard.
                passes = ranks / np.maximum(ranks - 1, 1) if summed else 1.0
            slowest = np.where(crosses, np.maximum(slowest, passes / rate), slowest)
            latency = latency + tier.link.latency * hops
            inside = reached
        return slowest, latency

    def _rate(self, number: int, reached: Array, stride: Array) -> Array | float:
        """Bytes/s of one rank among the ranks of a group that share a domain."""
        if (torus := self.tori[number]) is not None:
            return torus.gather_rate(reached, stride)
        return self.tiers[number].bandwidth * self.share(number)

    def seconds(
        self, kind: str, size: Array, ranks: Array, stride: Array, once: Crossing | None = None
    ) -> Array:
        """One collective, as the list of collectives names it; `size`: bytes of a rank's input."""
        match kind:
            case "all_gather":
                return self.ring(size * ranks, ranks, stride)
            case "reduce_scatter":
                return self.ring(size, ranks, stride)
            case "all_reduce":
                return self.all_reduce(size, ranks, stride)
            case "all_to_all":
                return self.all_to_all(size, ranks, stride, once)
            case "recv":  # sent by another rank at the same time
                return np.zeros(1)
            case _:  # what one rank sends
                return self.send(size, stride)

    def all_to_all(
        self, size: Array, ranks: Array, stride: Array, once: Crossing | None = None
    ) -> Array:
        """All-to-all: each rank sends `size` bytes, evenly to all.

        `once` = (k, most): of k copies of a token only one crosses to each domain that needs some,
        and to at most `most` domains; the others are copied there.
        """
        inside = np.ones_like(ranks)
        seconds: Array | float = 0.0
        for number, tier in enumerate(self.tiers):
            reached = self._reached(number, ranks, stride)
            share = (reached - inside) / ranks
            if once is not None and number:
                domains = reached / inside
                destinations = np.minimum(domains * (1 - (1 - 1 / domains) ** once[0]), once[1])
                share = share * destinations / once[0]
            rate: Array | float = tier.bandwidth * self.share(number)
            if number:  # many domains exchange with many
                rate = rate * np.maximum(reached / inside / _FEW_DOMAINS, 1.0) ** -_CONGESTION
            if (torus := self.tori[number]) is not None:
                rate = torus.exchange_rate(reached, stride)
                share = np.where(reached > inside, reached / ranks, 0.0)
            seconds = seconds + size * share / rate + tier.link.latency * np.log2(reached / inside)
            inside = reached
        return np.asarray(seconds)

    def send(self, size: Array, stride: Array) -> Array:
        """One message to the rank at distance `stride`."""
        seconds = np.zeros_like(stride)
        for number, tier in enumerate(self.tiers):
            inner = self.tiers[number - 1].size if number else 0
            torus = self.tori[number]
            rate = tier.bandwidth * self.share(number) if torus is None else torus.pair_rate(stride)
            tier_seconds = size / rate + tier.link.latency
            seconds = np.where(stride >= (inner or 0), tier_seconds, seconds)
        return seconds

    def share(self, number: int) -> float:
        """Share of a tier's bandwidth that software reaches; the last known one for outer tiers."""
        return self.shares[min(number, len(self.shares) - 1)]

    def domains(self, ranks: Array, stride: Array) -> Array:
        """How many innermost domains a group spans."""
        return np.ceil(ranks / self._reached(0, ranks, stride))

    def _reached(self, number: int, ranks: Array, stride: Array) -> Array:
        """How many ranks of a group share one domain of a tier."""
        size = self.sizes[number]
        if size is None:
            return ranks
        inside = np.clip(np.floor(size / stride), 1.0, ranks)
        if self.world is None or self.tiers[number].torus:
            return inside
        span = ranks * stride
        straddles = (size % span > 0) & (span < size) & (self.world > size)
        if not straddles.any():
            return inside
        part = np.gcd(np.asarray(size).astype(np.int64), span.astype(np.int64)) / stride
        return np.where(straddles, np.clip(np.floor(part), 1.0, ranks), inside)


def _job_share(tier: Tier, world: Array | None) -> Array | int | None:
    """Ranks of a job in each domain of a tier, in as few domains as hold them all evenly."""
    if tier.size is None or world is None or tier.torus:
        return tier.size
    shares = np.array(world, float)
    for number in sorted(set(world.ravel().tolist())):
        ranks = int(number)
        fewest = -(-ranks // tier.size)
        even = (count for count in range(fewest, 2 * fewest) if ranks % count == 0)
        count = next(even, 0)
        shares[world == number] = ranks // count if count else tier.size
    return shares if shares.min() < shares.max() else int(shares.flat[0])


# Matrices of a layer that fill a gradient bucket each, if they are larger: queries with keys and
# values, output, gate with up, down; and those of both ends.
_LAYER_MATRICES, _END_MATRICES = 4, 2


def num_buckets(weights: Array, layers: Array, bucket_bytes: float | None) -> Array | float:
    """In how many collectives the gradients of so many bytes of weights are reduced below ZeRO-3;
    a matrix is never split. Each pays the latency of all hops, which grows with the ranks."""
    if bucket_bytes is None:
        return 1.0
    return np.clip(weights / bucket_bytes, 1.0, _LAYER_MATRICES * layers + _END_MATRICES)
