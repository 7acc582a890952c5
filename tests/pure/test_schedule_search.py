"""`auto`: never worse than a named schedule that fits, within its limit, and always the same."""

from __future__ import annotations

import math
from itertools import product

import pytest

from fivefold.core.errors import IllegalSchedule
from fivefold.core.schedule import catalog
from fivefold.core.schedule.clock import Costs, Goal, Objective, peak_activations, play
from fivefold.core.schedule.schedule import Placement
from fivefold.core.schedule.selection import FoundSchedule, lower_bound, require_legal, search

Times = tuple[float, float, float]

SHAPES = [(2, 3), (2, 7), (3, 6), (4, 4), (4, 8), (4, 16), (5, 11), (6, 12)]
TIMES: list[tuple[Times, float]] = [
    ((1.0, 1.0, 1.0), 0.0),
    ((1.0, 2.0, 1.0), 0.0),
    ((1.0, 1.1, 0.7), 0.2),
    ((1.0, 1.0, 1.6), 0.1),
    ((2.0, 1.0, 0.5), 0.0),
]
OBJECTIVES: list[Objective] = ["makespan", "span"]


def goal(
    times: Times, transfer: float, limit: float | None = None, objective: Objective = "makespan"
) -> Goal:
    return Goal(lambda placement: Costs.uniform(placement, times, transfer), limit, objective)


def best_named(p: int, m: int, max_chunks: int, wanted: Goal) -> float | None:
    """The best of all named schedules within the limit, by playing every one of them."""
    found: list[float] = []
    for family, chunks in catalog.synchronous(p, m, max_chunks):
        schedule = catalog.make(family.name, p, m, chunks)
        limit = wanted.memory_limit
        if limit is None or max(peak_activations(schedule)) <= limit:
            timeline = play(schedule, wanted.costs_of(schedule.placement))
            found.append(getattr(timeline, wanted.objective))
    return min(found, default=None)


def objective_of(found: FoundSchedule, wanted: Goal) -> float:
    timeline = play(found.schedule, wanted.costs_of(found.schedule.placement))
    return getattr(timeline, wanted.objective)


def limits(p: int) -> list[float | None]:
    return [(p + 4) // 3, (p + 2) // 2, p, p + 0.5, 2 * p, None]


# 48 combinations of shape and limit; times, chunks and objectives go round with them.
CASES = [
    (p, m, (1, 2, 4)[place % 3], *TIMES[place % 5], limit, OBJECTIVES[place // 3 % 2])
    for place, ((p, m), number) in enumerate(product(SHAPES, range(6)))
    for limit in [limits(p)[number]]
] + [
    (p, m, max_chunks, *TIMES[place % 5], limit, OBJECTIVES[place % 2])
    for place, ((p, m), max_chunks, limit) in enumerate(
        product([(3, 9), (4, 6)], [1, 2, 4], [2.0, 3.0, None])
    )
]


def test_the_grid_is_as_wide_as_promised() -> None:
    assert len(CASES) == len(set(CASES)) == 66
    assert {case[2] for case in CASES} == {1, 2, 4}
    assert {case[6] for case in CASES} == {"makespan", "span"}


@pytest.mark.sample(24)
@pytest.mark.parametrize(("p", "m", "max_chunks", "times", "transfer", "limit", "objective"), CASES)
def test_auto_is_never_worse_than_a_named_schedule_that_fits(
    p: int,
    m: int,
    max_chunks: int,
    times: Times,
    transfer: float,
    limit: float | None,
    objective: Objective,
) -> None:
    wanted = goal(times, transfer, limit, objective)
    found = search(p, m, max_chunks, wanted)
    schedule = found.schedule
    require_legal(schedule)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == ("auto", p, m)
    assert schedule.num_chunks <= max_chunks
    assert found.origin
    if limit is not None:
        assert max(peak_activations(schedule)) <= limit
    reached, named = objective_of(found, wanted), best_named(p, m, max_chunks, wanted)
    assert named is None or reached <= named + 1e-9
    costs = wanted.costs_of(schedule.placement)
    assert reached >= lower_bound(schedule.placement, costs, m, objective) - 1e-9


@pytest.mark.parametrize(("p", "m", "limit"), [(3, 7, None), (4, 8, 3.0), (5, 10, 5.0)])
def test_the_same_question_gets_the_same_answer(p: int, m: int, limit: float | None) -> None:
    first, second = (search(p, m, 2, goal((1.0, 1.3, 0.8), 0.1, limit)) for _ in range(2))
    assert first == second


def test_auto_beats_every_named_schedule_where_times_are_uneven() -> None:
    """A real search: here no named schedule is best."""
    wanted = goal((1.0, 2.0, 1.6), 0.2, 4.0)
    named = best_named(4, 12, 2, wanted)
    assert named is not None
    assert objective_of(search(4, 12, 2, wanted), wanted) < named - 0.1


def test_stages_may_differ() -> None:
    """A heavy head on the last stage: the costs follow the placement."""

    def costs_of(placement: Placement) -> Costs:
        share = placement.num_ranks / placement.num_stages
        each = (share,) * (placement.num_stages - 1) + (share + 1.0,)
        return Costs(each, each, each, (0.1,) * placement.num_stages)

    for limit in (4.0, None):
        wanted = Goal(costs_of, limit)
        found, named = search(4, 8, 2, wanted), best_named(4, 8, 2, wanted)
        require_legal(found.schedule)
        assert named is not None
        assert objective_of(found, wanted) <= named + 1e-9


@pytest.mark.parametrize("max_chunks", [1, 2, 4])
@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
def test_the_smallest_memory_still_gives_a_schedule(max_chunks: int, limit: float) -> None:
    found = search(4, 6, max_chunks, goal((1.0, 1.0, 1.0), 0.0, limit))
    require_legal(found.schedule)
    assert max(peak_activations(found.schedule)) <= limit


def test_more_memory_never_hurts() -> None:
    reached = [
        objective_of(search(4, 8, 2, wanted), wanted)
        for wanted in (goal((1.0, 1.1, 0.7), 0.0, limit) for limit in (1.0, 2.0, 3.0, 4.0, 8.0))
    ]
    assert reached == sorted(reached, reverse=True)


@pytest.mark.parametrize(
    ("p", "m", "max_chunks", "limit"), [(24, 24, 2, 1), (24, 24, 2, 8), (32, 32, 2, 8)]
)
def test_a_spent_budget_still_gives_a_schedule(
    p: int, m: int, max_chunks: int, limit: float
) -> None:
    found = search(p, m, max_chunks, goal((1.0, 1.0, 1.0), 0.0, limit))
    require_legal(found.schedule)
    assert max(peak_activations(found.schedule)) <= limit


def test_without_any_budget_list_scheduling_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.core.schedule.selection._BUDGET", 0)
    found = search(6, 12, 2, goal((1.0, 1.0, 1.0), 0.0, 1.0))
    require_legal(found.schedule)
    assert max(peak_activations(found.schedule)) == 1


def test_no_limit_is_infinite() -> None:
    assert search(3, 6, 2, goal((1.0, 1.0, 1.0), 0.0, math.inf)) == search(
        3, 6, 2, goal((1.0, 1.0, 1.0), 0.0, None)
    )


@pytest.mark.parametrize("limit", [0.99, 0.5, 0.0, -3.0, math.nan])
def test_a_limit_that_holds_no_microbatch_is_refused(limit: float) -> None:
    with pytest.raises(IllegalSchedule, match=r"holds no microbatch; give at least 1"):
        search(4, 8, 2, goal((1.0, 1.0, 1.0), 0.0, limit))


# Zero Bubble paper, times of its Table 9 and the ZB-2p column of its Table 5 (span rates).
@pytest.mark.parametrize(
    ("m", "times", "transfer", "rate"),
    [
        (24, (18.522, 18.086, 9.337), 0.601, 0.0433),
        (32, (18.513, 18.086, 9.331), 0.626, 0.0039),
    ],
)
def test_twice_the_memory_reaches_zb_2p(m: int, times: Times, transfer: float, rate: float) -> None:
    found = search(8, m, 2, goal(times, transfer, 16.0, "span"))
    assert max(peak_activations(found.schedule)) <= 16
    timeline = play(found.schedule, Costs.uniform(found.schedule.placement, times, transfer))
    assert timeline.bubble_span <= rate + 0.01
