"""Shares of a run sum to 100% whatever was measured: where the time went, and what was late."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fivefold.core.schedule.schedule import merged
from fivefold.records.deviation import Comparison, compare, from_means, from_plan
from fivefold.records.spans import ActionSpan, RankSpans, StepSpans, split_waiting
from fivefold.records.steps import RunStart, shares_of, summarize
from fivefold_page.run import step as run_step
from fivefold_page.run import view as run_view
from tests.pure.fake_runs import RECORD, plan_of

PLANS = {
    name: plan_of(machine, layout="pp=2") for name, machine in (("means", None), ("h100",) * 2)
}
FORECASTS = {name: from_plan(plan) for name, plan in PLANS.items()}
NUM_ACTIONS = len(merged(PLANS["means"].schedule, 0))
ODD = st.floats(allow_nan=True, allow_infinity=True)
CLOCKS = st.floats(-1e9, 1e9)
TIMES = st.floats(0.0, 10.0)


@given(st.lists(ODD, max_size=20))
def test_shares_are_between_0_and_1_and_sum_to_1(amounts: list[float]) -> None:
    found = shares_of(amounts)
    assert all(0.0 <= each <= 1.0 for each in found)
    known = [each for each in amounts if math.isfinite(each) and each]
    assert sum(round(1000 * each) for each in found) == (1000 if known else 0)


@given(
    st.lists(st.tuples(CLOCKS, st.none() | CLOCKS, ODD), min_size=1, max_size=4),
    st.lists(st.tuples(CLOCKS, CLOCKS, ODD, st.integers(0, 3)), max_size=8),
)
@example([(0.0, None, 1e308), (0.0, None, 1e308)], [])  # finite, and their sum is not
def test_the_parts_of_the_wall_time_are_its_shares_if_clocks_jump(
    starts: list[tuple[float, float | None, float]],
    steps: list[tuple[float, float, float, int]],
) -> None:
    """Clocks of hosts that differ, or that are set back, make no time negative."""
    made = [
        replace(RECORD, step=n + 1, wall=wall, seconds=seconds, restart=start, spent={"eval": odd})
        for n, (wall, seconds, odd, start) in enumerate(steps)
    ]
    made = [replace(one, wall_s=1.0) for one in made]  # the rates are no matter here
    begun = [RunStart(began, end, {"save": odd}) for began, end, odd in starts]
    summary = summarize(begun, made[::2], made[1::2], 0)
    assert all(0.0 <= each < math.inf for each in summary.spent.values())
    assert summary.wall_s == pytest.approx(sum(summary.spent.values()))
    assert 0.0 <= summary.goodput <= 1.0
    parts = run_view.goodput(summary)["parts"]
    assert sum(round(1000 * one["share"]) for one in parts) == (1000 if summary.wall_s else 0)
    assert all(0.0 <= one["share"] <= 1.0 for one in parts)


def compared(name: str, lengths: list[float], gaps: list[float], seconds: float) -> Comparison:
    """Two stages whose actions and pauses take whatever is given, in a step of so many seconds."""
    plan, ranks = PLANS[name], dict[int, RankSpans]()
    for rank in (0, 1):
        now, actions = 0.0, list[ActionSpan]()
        for i, step in enumerate(merged(plan.schedule, rank)):
            begin = now + gaps[rank * NUM_ACTIONS + i]
            now = begin + lengths[rank * NUM_ACTIONS + i]
            actions.append(ActionSpan(step, begin, begin, now))
        ranks[rank] = RankSpans(rank, now, tuple(actions), ())
    spans = split_waiting(StepSpans(1, 0, 2, ranks), plan.schedule, (0, 1))
    assert spans is not None
    both = [spans.ranks[rank] for rank in (0, 1)]
    expected = FORECASTS[name] or from_means(plan.schedule, both)
    record = replace(RECORD, seconds=seconds)
    return compare(expected, spans, (0, 1), record, {0: both[:1], 1: both[1:]})


@pytest.mark.parametrize("name", PLANS)
@given(data=st.data())
@settings(max_examples=20)
def test_the_parts_of_a_difference_sum_to_it_and_their_shares_to_1(
    name: str, data: st.DataObject
) -> None:
    many = st.lists(TIMES, min_size=2 * NUM_ACTIONS, max_size=2 * NUM_ACTIONS)
    found = compared(name, data.draw(many), data.draw(many), data.draw(st.floats(0.0, 100.0)))
    parts = found.parts
    # What is left in the end is not listed if it is less than a thousandth.
    least = 0.001 * sum(abs(one.seconds) for one in parts) + 1e-9
    assert sum(one.seconds for one in parts) == pytest.approx(found.difference, abs=least)
    total = sum(round(1000 * one.share) for one in parts)
    assert total == (1000 if any(one.seconds for one in parts) else 0)
    assert all(0.0 <= one.share <= 1.0 for one in parts)
    if found.planned > 0:
        said = re.findall(r"(-?\d+)%", run_step.verdict(found, (0, 1)))
        assert all(0 <= int(each) <= 100 for each in said)


def test_slow_and_fast_parts_that_cancel_have_no_share_above_100() -> None:
    """Actions that take longer and pauses that are gone leave almost no difference."""
    as_planned = [0.01] * (2 * NUM_ACTIONS)
    late = [0.05 if i % 2 else 0.0 for i in range(2 * NUM_ACTIONS)]
    found = compared("means", as_planned, late, 1.0)
    shares = [one.share for one in found.parts]
    assert found.parts and max(shares) <= 1.0 and sum(shares) == pytest.approx(1.0)
