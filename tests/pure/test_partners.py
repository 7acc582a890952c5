"""Who keeps whose copies, and what a restart goes on from when some of them are lost."""

from __future__ import annotations

import random

import pytest

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.partners import CopyOf, Partners, newest_set, next_slot

WORLD, PER_HOST = 8, 2


@pytest.mark.parametrize(
    ("world", "domain", "per_host", "rule"),
    [
        (8, 4, 8, "all 8 ranks are on one host; leave it out"),
        (8, 8, 4, r"8 ranks are not two or more domains of 8; use 4"),
        (8, 2, 4, "a host has 4 ranks, which are lost together; use a multiple of 4"),
        (12, 8, 4, r"12 ranks are not two or more domains of 8; use 4"),
        (1, 1, 1, "all 1 rank are on one host"),
    ],
)
def test_partners_in_one_failure_domain_are_refused(
    world: int, domain: int, per_host: int, rule: str
) -> None:
    with pytest.raises(FivefoldError, match=rule) as refused:
        Partners.checked(world, domain, per_host)
    assert "a rank and its partner must be in two failure domains" in str(refused.value)


@pytest.mark.parametrize(("world", "domain"), [(4, 2), (8, 2), (8, 4), (12, 4), (1024, 8)])
def test_a_partner_is_in_another_domain_and_knows_its_ward(world: int, domain: int) -> None:
    partners = Partners.checked(world, domain, domain)
    for rank in range(world):
        partner = partners.partner_of(rank)
        assert partner is not None and partner // domain != rank // domain
        assert partners.ward_of(partner) == rank
    assert Partners(world).partner_of(0) is None


def kept(step: int, slot: int, partners: Partners, start: int = 0) -> dict[int, list[CopyOf]]:
    """What the memory of each host has after a copy: of its ranks, and of their wards."""
    held: dict[int, list[CopyOf]] = {rank: [] for rank in range(partners.world)}
    for keeper in held:
        first = keeper // PER_HOST * PER_HOST
        for rank in range(first, first + PER_HOST):
            for each in (rank, partners.ward_of(rank)):
                if each is not None:
                    held[keeper].append(CopyOf(step, start, partners.world, slot, each))
    return held


def both(*held: dict[int, list[CopyOf]]) -> dict[int, list[CopyOf]]:
    return {rank: [copy for each in held for copy in each[rank]] for rank in held[0]}


def test_every_host_may_be_lost_and_no_two_neighbours() -> None:
    partners = Partners.checked(WORLD, PER_HOST, PER_HOST)
    held = kept(10, 0, partners)
    for host in range(WORLD // PER_HOST):
        left = {rank: copies for rank, copies in held.items() if rank // PER_HOST != host}
        found = newest_set(left)
        assert found is not None and found.step == 10
        assert all(keepers and not set(keepers) & {2 * host, 2 * host + 1} for keepers in found[4])
        neighbour = (host + 1) % (WORLD // PER_HOST)  # it keeps the copies of this host
        left = {rank: each for rank, each in left.items() if rank // PER_HOST != neighbour}
        assert newest_set(left) is None, "only the disk is left"


def test_the_newest_step_that_all_have_is_taken() -> None:
    partners = Partners.checked(WORLD, PER_HOST, PER_HOST)
    held = both(kept(10, 0, partners), kept(15, 1, partners))
    found = newest_set(held)
    assert found is not None and (found.step, next_slot(found.slot)) == (15, 0)
    torn = {
        rank: [copy for copy in copies if copy[:1] + copy[4:] != (15, 3)]
        for rank, copies in held.items()
    }
    found = newest_set(torn)
    assert found is not None and (found.step, found.slot, next_slot(found.slot)) == (10, 0, 1)


def test_copies_of_two_starts_are_not_mixed() -> None:
    """After a restart with other ranks the same step is copied again."""
    partners = Partners(4)
    old = {0: [CopyOf(10, 0, 4, 0, rank) for rank in range(3)]}
    new = {0: [*old[0], *(CopyOf(10, 1, 3, 0, rank) for rank in range(3))]}
    assert newest_set(old) is None and partners.partner_of(1) is None
    found = newest_set(new)
    assert found is not None and (found.start, found.world) == (1, 3)


def test_random_losses_never_lose_a_set_while_partners_live() -> None:
    draw, partners = random.Random(3), Partners.checked(WORLD, PER_HOST, PER_HOST)
    hosts = WORLD // PER_HOST
    for _ in range(200):
        lost = {host for host in range(hosts) if draw.random() < 0.3}
        held = kept(7, 1, partners)
        left = {rank: copies for rank, copies in held.items() if rank // PER_HOST not in lost}
        together = any(host in lost and (host + 1) % hosts in lost for host in range(hosts))
        assert (newest_set(left) is None) == together
