"""The covering array: every pair of values is in a case, or can be in none."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fivefold.commands.verify import runnable
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.rules import problems
from fivefold.core.model.balance import NONE, WORDS
from fivefold.core.model.presets import load
from fivefold.core.plan.plan import PlanOptions
from fivefold.core.schedule.catalog import family
from fivefold.cost.traffic.collectives import predict_traffic
from tests.ranks.covering import (
    ASYNCHRONOUS,
    DEGREES,
    FACTORS,
    IDLE,
    MODEL,
    MOST_RANKS,
    Case,
    Pair,
    Value,
    all_pairs,
    cases,
    foot,
    why_never,
)

NEVER = {pair: never for pair in all_pairs() if (never := why_never(pair))}
REFUSALS = {
    "zero": "older versions of full weights",
    "tied": "share a tied embedding",
    "balance": "an asynchronous schedule has no step",
}


def uncovered(array: tuple[Case, ...]) -> set[Pair]:
    covered = set[Pair]().union(*(case.pairs for case in array))
    return set(all_pairs()) - covered - NEVER.keys()


def excluded(kind: str) -> list[Pair]:
    return [pair for pair, never in NEVER.items() if never.kind == kind]


def test_every_pair_is_in_a_case_or_has_a_reason_not_to_be() -> None:
    assert uncovered(cases()) == set()
    assert not any(case.pairs & NEVER.keys() for case in cases())
    sizes = map(len, FACTORS.values())
    assert len(set(all_pairs())) == sum(a * b for a, b in itertools.combinations(sizes, 2))


def test_no_case_can_be_left_out() -> None:
    times = Counter(pair for case in cases() for pair in case.pairs)
    assert all(any(times[pair] == 1 for pair in case.pairs) for case in cases())
    assert uncovered(cases()[1:])  # a hole is seen


def test_every_case_is_legal_and_all_it_says_is_used() -> None:
    for case in cases():
        layout, schedule = case.plan.layout, case.plan.schedule
        assert layout.world <= MOST_RANKS
        assert layout.zero == 0 or layout.shard * layout.cp > 1
        assert (case.sp is None, case.schedule is None, case.context is None) == (
            layout.tp == 1,
            layout.pp == 1,
            layout.cp == 1,
        )
        assert schedule.num_microbatches >= max(2, layout.pp)
        assert case.plan.shape.layers > layout.pp


def test_the_factors_have_all_that_the_core_has() -> None:
    rules = {str(rule).partition(":")[0] for rule in FACTORS["balance"]}
    assert rules == {*WORDS, NONE}
    # Of schedules and kinds the factors are the core's own lists.
    assert {family(str(name)).asynchronous for name in FACTORS["schedule"]} == {True, False}


@pytest.mark.parametrize("pair", excluded("count"), ids=str)
def test_every_legal_layout_with_such_degrees_has_too_many_ranks(pair: Pair) -> None:
    shape = load(MODEL)
    found = [
        layout
        for layout in every_layout()
        if all(getattr(layout, name) == value for name, value in pair)
        and not problems(layout, shape, seq=shape.max_seq)
    ]
    assert found
    assert min(layout.world for layout in found) > MOST_RANKS


def every_layout() -> Iterator[Layout]:
    for degrees in itertools.product(*(FACTORS[name] for name in DEGREES)):
        words = zip(DEGREES, degrees, strict=True)
        yield Layout.parse(" ".join(f"{name}={degree}" for name, degree in words))


@pytest.mark.parametrize("name", IDLE)
def test_without_its_axis_a_factor_changes_nothing(name: str) -> None:
    axis, _ = IDLE[name]
    alone, together = (
        {carried_out(name, value, axis, degree) for value in FACTORS[name]} for degree in (1, 2)
    )
    assert len(alone) == 1
    assert len(together) > 1
    assert {pair for pair in excluded("idle") if pair[1][0] == name} == {
        ((axis, 1), (name, value)) for value in FACTORS[name]
    }


def carried_out(name: str, value: Value, axis: str, degree: int) -> tuple[object, ...]:
    """What ranks do under a plan: the order of their actions, their tokens, what they move."""
    degrees = dict.fromkeys(("dp", "tp", "pp", "cp"), 2) | {axis: degree}
    text = " ".join(f"{key}={count}" for key, count in degrees.items())
    wish = {name: value == "on" if name == "sp" else value}
    plan = runnable(PlanOptions(MODEL, layout=text, microbatches=4, **wish))  # type: ignore[arg-type]
    tokens = tuple(
        plan.split.rank_tokens(plan.padded_seq, coord) for coord in range(plan.layout.cp)
    )
    # Of a schedule the order says it all; the traffic of an asynchronous one is no step's.
    moved = () if name == "schedule" else predict_traffic(plan, 0, itemsize=8)
    return repr(plan.schedule), tokens, moved


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_core_refuses_what_an_asynchronous_schedule_does_not_take(name: str) -> None:
    refused = {pair for pair in excluded("refused") if name in dict(pair)}
    assert refused
    for pair in refused:
        said = dict(pair)
        legal = [case for case in cases() if case.schedule == said["schedule"]]
        assert legal
        for case in legal:
            with pytest.raises(FivefoldError, match=REFUSALS[name]):
                runnable(replace(case, **{name: said[name]}).options)


def test_the_foot_of_the_table_lists_what_is_left_out() -> None:
    text = foot()
    assert text.startswith(f"{len(NEVER)} pairs")
    for (one, first), (other, second) in NEVER:
        assert f"{one}={first} with {other}={second}" in text
