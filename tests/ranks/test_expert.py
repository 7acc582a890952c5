"""`verify` over the expert axis: wherever the experts lie, ranks compute what one device does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fivefold.commands.verify import runnable
from fivefold.core.plan.plan import PlanOptions
from fivefold.launch.processes import Pool
from fivefold.verify.compare import Call, Traffic, evened
from fivefold.verify.runs import VerifySettings, run_rank
from fivefold.verify.trial import run_trial

PUBLISHED = 1e-10


# ep takes the fastest ranks first: tp alone, dp alone, cp alone, tp·cp, tp·cp·dp, part of dp.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp=2 ep=2", {"recompute": "full:2"}),
    ("dp=2 ep=2", {"zero": 0}),
    ("cp=2 ep=2", {"context": "ulysses", "packed": True}),
    ("tp=2 cp=2 ep=4", {"recompute": "selective"}),
    ("dp=2 tp=2 cp=2 ep=8", {"zero": 3}),
    ("dp=4 ep=2", {"zero": 2}),
    ("dp=2 tp=2", {"zero": 3}),
    ("dp=2 tp=2 ep=2 etp=2", {"zero": 1, "recompute": "full"}),
    ("tp=2 etp=2", {"sp": False}),
    ("tp=4 etp=2", {"sp": False}),  # two replicas of each expert, with the same tokens
    ("dp=2 tp=2", {"sp": False, "zero": 2}),
    ("dp=2 pp=2 ep=2", {"schedule": "dualpipe-v", "zero": 3, "gather": "microbatch"}),
    ("tp=2 pp=2 cp=2 ep=2", {"schedule": "zb-h1"}),
)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("layout", "options"), CASES, ids=str)
def test_experts_anywhere(pool: Pool, layout: str, options: dict[str, Any]) -> None:
    check(pool, PlanOptions("tiny-moe", layout=layout, set={"layers": "4"}, **options))


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("layout", ["tp=2 pp=2 cp=2 ep=2", "tp=2 pp=2 cp=2 ep=2 etp=2"])
def test_latents_groups_shared_experts_and_prediction_ahead(pool: Pool, layout: str) -> None:
    check(pool, PlanOptions("deepseek-v3", layout=layout), steps=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [("mixtral-8x7b", "tp=2 ep=2"), ("qwen2-57b-a14b", "dp=2 ep=2"), ("olmoe-1b-7b", "dp=2 ep=2")],
)
def test_other_families(pool: Pool, model: str, layout: str) -> None:
    check(pool, PlanOptions(model, layout=layout), steps=1)


def test_float32_goes_through_grouped_products(pool: Pool) -> None:
    plan = runnable(PlanOptions("tiny-moe", layout="dp=2 tp=2 ep=4", set={"layers": "4"}))
    verdict = run_trial(pool, plan, VerifySettings(dtype="float32"))
    assert verdict.passed, (verdict.errors, verdict.tolerance)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_without_any_counted_token(pool: Pool, zero: int) -> None:
    plan = runnable(PlanOptions("tiny-moe", layout="dp=4 ep=2", zero=zero, set={"layers": "2"}))
    verdict = run_trial(pool, plan, VerifySettings(empty_rank=3))
    assert verdict.passed, (verdict.errors, verdict.diverges_at)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_mesh_notes_what_the_dispatcher_sees(pool: Pool, recompute: str) -> None:
    options = PlanOptions("tiny-moe", layout="dp=2 tp=2 ep=2 etp=2", recompute=recompute)
    plan = runnable(options)
    for rank in pool.run_each([(run_rank, (plan, VerifySettings(steps=1)))] * plan.layout.world):
        for heard in rank.heard:
            assert heard.noted and heard.seen == heard.noted


def check(pool: Pool, options: PlanOptions, steps: int = 2) -> None:
    verdict = run_trial(pool, runnable(options), VerifySettings(steps=steps))
    assert verdict.traffic_match, verdict.traffic
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert max(verdict.errors.values()) <= PUBLISHED


ROWS = ("ep", "all_to_all", 100, 2)


TENSOR = ("tp", "all_reduce", 8, 2)
PREDICTED = Counter({ROWS: 2, TENSOR: 1})


def sent(size: int, count: int = 2) -> Counter[Call]:
    """What a rank was seen to send: this many rows of this size, and its sum over tp."""
    return Counter({("ep", "all_to_all", size, 2): count, TENSOR: 1})


def matches(least: float, *seen: Counter[Call]) -> list[bool]:
    return [each.match for each in evened([Traffic(PREDICTED, one) for one in seen], {"ep": least})]


def test_uneven_rows_are_held_against_their_sum() -> None:
    assert matches(1.0, sent(120), sent(80)) == [True, True]
    more = sent(80) + Counter({("ep", "all_to_all", 0, 2): 1})  # one call too many
    assert matches(1.0, sent(120), more) == [False, False]
    assert matches(1.0, sent(120), sent(79)) == [False, False]
    assert matches(1.0, sent(120), sent(80) - Counter({TENSOR: 1})) == [True, False]


def test_a_range_holds_the_sum_and_never_the_count() -> None:
    assert matches(0.5, sent(40), sent(60)) == [True, True], "the least"
    assert matches(0.5, sent(70), sent(60)) == [True, True]
    assert matches(0.5, sent(200), sent(0)) == [True, True], "the most"
    assert matches(0.5, sent(40), sent(59)) == [False, False], "below the least"
    assert matches(0.5, sent(100), sent(101)) == [True, False], "above the most"
    assert matches(0.5, sent(70), sent(60, 1)) == [False, False], "a call too few"
    assert matches(0.5, sent(70), sent(40, 3)) == [False, False], "a call too many"


def test_a_rank_that_sends_what_is_predicted_by_chance_counts_in_the_sum() -> None:
    """Half of all is the least; the first rank has its whole share, so the second may have none."""
    assert matches(0.5, sent(100), sent(0)) == [True, True]
    assert matches(0.6, sent(100), sent(0)) == [True, False]
    assert matches(0.5, sent(100), sent(101)) == [True, False]


def test_a_range_of_one_axis_is_none_of_another() -> None:
    far = Counter({("ep-far", "all_to_all", 100, 2): 1})
    less = Counter({("ep-far", "all_to_all", 60, 2): 1})
    for least, expected in (
        ({"ep-far": 0.5}, True),
        ({"ep-far": 0.7}, False),
        ({"ep": 0.5}, False),
    ):
        assert [each.match for each in evened([Traffic(far, less)], least)] == [expected]
