"""Schedules as loops: what estimates read of them is what the clock plays step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.schedule.catalog import FAMILIES, HALF_BLOCKS, MIN_BLOCK, _filled, make
from fivefold.core.schedule.clock import Costs, peak_activations, play
from fivefold.core.schedule.schedule import (
    FORWARD,
    Loop,
    LoopOrder,
    Run,
    Schedule,
    Step,
    Turn,
    alternating,
    forwards_of,
    part,
    within,
)
from fivefold.cost.stages.makespans import StageSeconds, simulate_trace, trace_schedule
from fivefold.render.plan import describe_plan

SIZES = ((2, 8, 2), (3, 6, 2), (4, 8, 3), (4, 16, 1), (6, 12, 2))


def schedules() -> list[Schedule]:
    return [
        family.make(*size) for family in FAMILIES for size in SIZES if not family.problems(*size)
    ]


def by_steps(schedule: Schedule) -> Schedule:
    """The same with an order of steps instead of loops."""
    return Schedule(
        schedule.name, schedule.placement, schedule.num_microbatches, tuple(schedule.order)
    )


@pytest.mark.parametrize("schedule", schedules(), ids=lambda one: f"{one.name}-{one.num_ranks}")
def test_arrays_and_peaks_are_those_of_the_steps(schedule: Schedule) -> None:
    stages, columns = schedule.num_stages, 3
    drawn = np.random.default_rng(stages).uniform(0.5, 2.0, (3, stages, columns))
    seconds = StageSeconds(drawn[0], drawn[1], drawn[2], np.array([0.0, 0.1, 0.3]))
    found = simulate_trace(trace_schedule(schedule), seconds)
    assert found == pytest.approx(simulate_trace(trace_schedule(by_steps(schedule)), seconds))
    for column in range(columns):
        costs = Costs(
            *(tuple(map(float, each[:, column])) for each in drawn),
            transfer=(float(seconds.lag[column]),) * stages,
        )
        assert found[column] == pytest.approx(play(schedule, costs).makespan, rel=1e-12)
        one = StageSeconds(*(each[:, column : column + 1] for each in drawn), seconds.lag[column:])
        assert simulate_trace(trace_schedule(schedule), one) == pytest.approx(found[column])
    for left in (1.0, 0.4):
        expected = peak_activations(by_steps(schedule), left)
        assert peak_activations(schedule, left) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", schedules(), ids=lambda one: f"{one.name}-{one.num_ranks}")
def test_forwards_are_counted_as_the_steps_are(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        steps = Counter(a.stage for a in schedule.actions(rank) if a.kind == FORWARD)
        assert +forwards_of(schedule, rank) == steps


def test_a_million_microbatches_cost_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts loops: made one by one, the steps of this one took 25 s."""
    made: list[int] = []
    one = Loop.steps

    def counted(loop: Loop, number: int) -> Iterator[Step]:
        made.append(number)
        return one(loop, number)

    monkeypatch.setattr(Loop, "steps", counted)
    plan = resolve(PlanOptions("tiny-moe", microbatches=1_000_000))
    assert describe_plan(plan)["batch"]["microbatches"] == 1_000_000
    assert len(made) < 100


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8, 9])
def test_long_building_blocks_are_those_that_are_filled_in_full(num_ranks: int) -> None:
    limits = {"v-half": (HALF_BLOCKS, (num_ranks + 2) // 2), "v-min": ((MIN_BLOCK,), None)}
    for name, (blocks, limit) in limits.items():
        for count in (2 * num_ranks + 5, 4 * num_ranks + 1):
            chunks = (num_ranks + 4) // 3 if limit is None else limit
            filled = _filled(blocks, num_ranks, count, chunks)
            made = make(name, num_ranks, count)
            assert isinstance(made.order, LoopOrder) and made.order == filled


def test_runs_are_cut_and_alternate() -> None:
    runs = [Run(0, "F", 0, 3), Run(4, "F", 0, 3)]
    assert part(runs, 2, 5) == [Run(0, "F", 2, 1), Run(4, "F", 0, 2)]
    others = [Run(0, "B", 0, 6)]
    order = LoopOrder([alternating(others, runs)])
    assert [str(step) for step in order[0]] == [
        "0B0", "0F0", "0B1", "0F1", "0B2", "0F2", "0B3", "4F0", "0B4", "4F1", "0B5", "4F2",
    ]  # fmt: skip
    assert len(order.loops[0]) == 2


def test_loops_end_at_the_last_microbatch() -> None:
    loops = [Loop(4, (Turn(0, "F", 0), Turn(1, "F", 2)))]
    order = LoopOrder([within(loops, 4)])
    assert [str(step) for step in order[0]] == ["0F0", "1F2", "0F1", "1F3", "0F2", "0F3"]
