"""Copies of a run in memory: who keeps whose, and from which copies a restart goes on.

A failure domain is what is lost at once: so many consecutive ranks, those of a host or of a rack.
The partner of a rank has the same place in the next domain. It keeps a copy of what the rank has
beside its own, so that the loss of one domain loses no copy of both kinds. Without domains the
launcher of a host keeps the copies of its ranks: they outlive a rank, and not the host.

Functions of values alone: neither a clock nor a process is asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.core import FivefoldError, counted

SLOTS = 2  # copies of each rank: while one is written, the one before it stays


class CopyOf(NamedTuple):
    """One copy that somebody keeps: what a rank of a start had after a step."""

    step: int
    start: int
    world: int  # ranks of that start
    slot: int
    rank: int


class CopySet(NamedTuple):
    """The copies of all ranks of one start after one step, each with those who keep it."""

    step: int
    start: int
    world: int
    slot: int
    keepers: tuple[tuple[int, ...], ...]  # by rank


@dataclass(frozen=True)
class Partners:
    """The ranks of a run and their failure domains; `domain` 0: the launcher keeps all copies."""

    world: int
    domain: int = 0

    @classmethod
    def checked(cls, world: int, domain: int, per_host: int) -> Partners:
        """Refuse partners that one failure would lose together."""
        if not domain:
            return cls(world)
        rule = "a rank and its partner must be in two failure domains"
        if per_host >= world:
            raise FivefoldError(
                f"copy_domain = {domain}: {rule}, and all {counted(world, 'rank')} are on one host;"
                " leave it out, so that copies outlive a rank, or start ranks on several hosts"
            )
        if domain % per_host:
            raise FivefoldError(
                f"copy_domain = {domain}: {rule}, and a host has {per_host} ranks, which are lost "
                f"together; use a multiple of {per_host}"
            )
        if world % domain or world == domain:
            legal = [n for n in range(per_host, world, per_host) if world % n == 0]
            raise FivefoldError(
                f"copy_domain = {domain}: {rule}, and {world} ranks are not two or more domains of "
                f"{domain}; use {' or '.join(map(str, legal)) or 'another number of ranks'}"
            )
        return cls(world, domain)

    def partner_of(self, rank: int) -> int | None:
        """Who keeps a second copy of what a rank has.

        >>> [Partners(8, 4).partner_of(rank) for rank in (0, 3, 4, 7)]
        [4, 7, 0, 3]
        """
        return (rank + self.domain) % self.world if self.domain else None

    def ward_of(self, rank: int) -> int | None:
        """Whose second copy a rank keeps."""
        return (rank - self.domain) % self.world if self.domain else None


def newest_set(copies_by_keeper: Mapping[int, Iterable[CopyOf]]) -> CopySet | None:
    """The newest step of which every rank's copy is kept by somebody; None: only the disk is left.

    `copies_by_keeper` are the copies that each keeper still has.
    """
    keepers: defaultdict[tuple[int, int, int, int], dict[int, list[int]]] = defaultdict(dict)
    for keeper, copies in sorted(copies_by_keeper.items()):
        for copy in copies:
            rank_keepers = keepers[copy.step, copy.start, copy.world, copy.slot]
            rank_keepers.setdefault(copy.rank, []).append(keeper)
    complete = [key for key, ranks in keepers.items() if ranks.keys() >= set(range(key[2]))]
    if not complete:
        return None
    newest = max(complete)
    ranks = keepers[newest]
    return CopySet(*newest, tuple(tuple(ranks[rank]) for rank in range(newest[2])))


def next_slot(slot: int | None) -> int:
    """Where the first copy after a restart goes: never over what the restart has read."""
    return 0 if slot is None else (slot + 1) % SLOTS
