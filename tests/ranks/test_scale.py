"""No part of the control plane grows with the square of the job."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.scale import ACTIVITIES, Cost, Usage, over_budget, watched


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    watched.cache_clear()
    gc.unfreeze()


@pytest.mark.parametrize("name", ACTIVITIES)
def test_costs_stay_within_their_budgets(name: str) -> None:
    activity, sizes = ACTIVITIES[name]
    costs = {world: activity(world) for world in sizes[:2]}
    assert not over_budget(name, costs)


@pytest.mark.nightly  # minutes
@pytest.mark.parametrize("name", ACTIVITIES)
def test_costs_of_16_384_ranks_stay_within_their_budgets(name: str) -> None:
    activity, sizes = ACTIVITIES[name]
    costs = {world: activity(world) for world in sizes}
    assert not over_budget(name, costs)
    most = max(sizes)
    assert costs[most].rank.open_files <= 64
    if name == "pace":
        assert float(costs[most].says.split("%")[0]) < 1, costs[most]


def test_squares_are_seen() -> None:
    small = Cost(Usage(calls=100, open_files=40), Usage(calls=1_000))
    grown = Cost(Usage(calls=200, open_files=640), Usage(calls=64_000))
    problems = over_budget("all to all", {64: small, 1024: grown})
    assert [problem.partition(" at ")[0] for problem in problems] == [
        "all to all, rank: 640 open_files",
        "all to all, busiest: 64000 calls",
    ]
    fine = replace(grown.rank, open_files=40), replace(grown.busiest, calls=16_000)
    assert not over_budget("all to all", {64: small, 1024: Cost(*fine)})
