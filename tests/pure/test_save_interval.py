"""`save_every = "auto"`: the interval from costs and failures, and its reason in words."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.plan.failures import young_interval
from fivefold.core.plan.great_runs import parse_settings
from fivefold.core.plan.plan import Plan, options_from, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.train.recovery.save_interval import (
    FIRST,
    ObservedRate,
    SaveInterval,
    decide_saves,
    observed_rate,
)

HOUR = 3600.0


def plan(machine: str | None = None) -> Plan:
    return resolve(options_from("tiny", {"layout": "dp=64", "machine": machine}))


def test_the_interval_is_young_and_dalys() -> None:
    rate = ObservedRate(3, 10.0, 2.0, "a test")
    assert rate.mtbf == 3 * HOUR
    found = decide_saves(cost=4.0, step=2.0, rate=rate)
    assert found.steps == math.ceil(young_interval(4.0, 3 * HOUR) / 2.0)
    for word in ("Young and Daly", "3 failures in 10 h", "one assumed in 2 h (a test)", "4 s a"):
        assert word in found.why
    assert decide_saves(None, 2.0, rate).steps == FIRST


def test_costly_saves_are_rare_and_frequent_failures_make_them_frequent() -> None:
    rates = [ObservedRate(n, 10.0, 2.0, "") for n in (0, 1, 5, 50)]
    assert all(
        a.steps >= b.steps for a, b in pairwise(decide_saves(4.0, 1.0, rate) for rate in rates)
    )
    costs = [decide_saves(cost, 1.0, rates[0]).steps for cost in (0.0, 0.1, 1.0, 10.0)]
    assert costs == sorted(costs) and costs[0] == 1


def test_failures_are_starts_that_did_not_end_by_themselves() -> None:
    killed, stopped = {"began": 0.0}, {"began": HOUR, "ended": {"at": 2 * HOUR}}
    failed = {"began": 2 * HOUR, "failed": {"at": 3 * HOUR, "why": "lost rank 1"}}
    now = {"began": 3 * HOUR}
    found = observed_rate([killed, stopped, failed, now], 4 * HOUR, plan(), hours_given=8.0)
    assert (found.failures, found.hours, found.assumed) == (2, 4.0, 8.0)
    assert found.mtbf == 4 * HOUR and "mtbf_hours = 8" in found.source


def test_the_rate_of_the_machine_is_assumed_where_none_is_given() -> None:
    found = observed_rate([{"began": 0.0}], 0.0, plan("h100"), None)
    assert found.assumed == 50_700 / 64 and "a GPU of h100" in found.source
    other = observed_rate([{"began": 0.0}], 0.0, plan("b200"), None)
    assert other.assumed == 50_700 / 64 and "b200" not in other.source


def test_a_run_follows_its_measured_costs() -> None:
    """A clock that a test moves: steps of 1 s, saves that block for 2 s."""
    now = [100.0]
    interval = SaveInterval(5, lambda: ObservedRate(0, 0.0, 1.0, ""), lambda: now[0])
    saved: list[int] = []
    for number in range(6, 400):
        now[0] += 1.0
        if number >= interval.due:
            began = interval.begin()
            decision = interval.decide(number, began, [interval.cost, interval.cost])
            interval.follow(number, decision)
            now[0] += 2.0
            interval.end(number, began)
            saved.append(number)
    assert saved[:2] == [15, 25]
    assert {b - a for a, b in pairwise(saved[1:])} == {120}  # sqrt(2 · 2 s · 3,600 s)


def test_only_news_is_said() -> None:
    interval = SaveInterval(0, lambda: ObservedRate(0, 0.0, 1.0, ""))
    said = [interval.follow(9, decide_saves(c, 1.0, interval.rate())) for c in (1, 1.1, 4, 4)]
    assert said == [True, False, True, False]


def test_keys_of_saves() -> None:
    assert parse_settings({"save_every": "auto"}).train == {"save_every": "auto"}
    assert parse_settings({"save_every": "7"}).train == {"save_every": 7}
    assert parse_settings({"save_every": "none"}).train == {"save_every": None}
    with pytest.raises(BadFile, match=r"expected a whole number or auto$"):
        parse_settings({"save_every": "often"})
    assert Recipe(save_every="auto", mtbf_hours=3.0).is_due("auto", 7) is False
    for keys, rule in (
        ({"save_every": 0}, "at least 1, or auto"),
        ({"save_every": "auto", "mtbf_hours": 0.0}, "above 0"),
        ({"save_every": 5, "mtbf_hours": 1.0}, "only save_every = auto reads it"),
        ({"save_every": "auto", "keep_best": "web", "eval_every": 2}, "multiple of eval_every"),
    ):
        with pytest.raises(FivefoldError, match=rule):
            Recipe(**keys)
