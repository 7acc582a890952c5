"""Who is slow, from the times of ranks that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_runs import RECORD

from fivefold.records.steps import StepRecord
from fivefold.records.stragglers import RankPace, slow_ones
from fivefold.render.training import step_line

# Four ranks of dp=2 pp=2 with tp-cp-dp-pp order: stages are ranks 0, 1 and 2, 3.
WAITS = {"dp-cp": [0.010, 0.011, 0.012]}
DP = {"dp-cp": [(0, 1), (2, 3)]}


def pace(stage: int, own: float = 0.8, host: str = "a", waits: float = 1.0) -> RankPace:
    waited = {role: [waits * each for each in times] for role, times in WAITS.items()}
    return RankPace(host, stage, own, 1.0, waited)


def named(
    paces: list[RankPace], **groups: list[tuple[int, ...]]
) -> list[tuple[str, tuple[int, ...]]]:
    found = slow_ones(paces, groups or DP, {})
    return [(each.what, each.ranks) for each in found]


def test_nothing_is_named_where_all_are_alike() -> None:
    assert named([pace(0), pace(0, 0.85), pace(1, 0.4), pace(1, 0.42)]) == []


def test_a_rank_slower_by_a_fifth_is_named_with_its_cost() -> None:
    paces = [pace(0), pace(0), pace(0, 0.96), pace(0)]
    (found,) = slow_ones(paces, {"dp-cp": [(0, 1, 2, 3)]}, {})
    assert (found.what, found.ranks) == ("rank", (2,))
    assert found.share == pytest.approx(0.16)
    assert "rank 2 on a computes 1.20 times as long as its peers" in found.text


def test_stages_are_not_compared_with_one_another() -> None:
    assert named([pace(0, 1.6), pace(0, 1.6), pace(1, 0.8), pace(1, 0.8)]) == []


def test_a_rank_without_peers_is_compared_with_itself() -> None:
    best: dict[object, float] = {}
    assert slow_ones([pace(0), pace(1)], {}, best) == []
    (found,) = slow_ones([pace(0), pace(1, 1.0)], {}, best)
    assert found.ranks == (1,) and "at its best" in found.text


def test_a_host_whose_ranks_are_all_slow_is_named_once() -> None:
    paces = [pace(0, host="a"), pace(0, host="a"), pace(0, 1.0, "b"), pace(0, 1.2, "b")]
    more = [*paces, *(pace(0, host=host) for host in "ccdd")]
    (found,) = slow_ones(more, {}, {})
    assert (found.what, found.ranks) == ("host", (2, 3))
    assert found.share == pytest.approx(0.4)


def test_a_link_at_half_its_speed_is_named() -> None:
    paces = [pace(0), pace(0, waits=2.1), pace(0), pace(0, waits=2.0)]
    assert named(paces, **{"dp-cp": [(0, 2), (1, 3)]}) == [("link", (1, 3))]


def test_waits_that_computation_cannot_hide_count_by_the_shortest() -> None:
    """Sums over a step are noise of two ranks that are late in turns; the shortest wait is not."""
    noisy = [
        replace(pace(0, waits=many), least={("tp", "all_gather"): (0.001, 40)}) for many in (1, 9)
    ]
    slow = [replace(each, least={("tp", "all_gather"): (0.002, 40)}) for each in noisy]
    groups = {"tp": [(0, 1), (2, 3)]}
    assert slow_ones([*noisy, *noisy], groups, {}) == []
    (found,) = slow_ones([*noisy, *slow], groups, {})
    assert (found.what, found.ranks) == ("link", (2, 3))
    assert found.share == pytest.approx(0.04)


def test_who_came_last_tells_the_time_of_a_link() -> None:
    """Rank 1 waits long for rank 3, which is late: their link is as fast as the other one."""
    paces = [pace(0), pace(0, waits=9.0), pace(0), pace(0)]
    assert named(paces, **{"dp-cp": [(0, 2), (1, 3)]}) == []


def test_a_slow_direction_of_a_pipeline_is_named() -> None:
    def column(first: int, second: int, seconds: float) -> list[RankPace]:
        sends = [10.0, 10.2, 10.4, 10.6]
        came = [
            (each - 0.1, each + seconds + late)
            for each, late in zip(sends, (0.5, 0, 0, 0.3), strict=True)
        ]
        sender, receiver = pace(0), pace(1)
        pair = (first, second)
        return [replace(sender, sends={pair: sends}), replace(receiver, receives={pair: came})]

    one, other = column(0, 2, 0.02), column(1, 3, 0.04)
    (found,) = slow_ones([one[0], other[0], one[1], other[1]], {}, {})
    assert (found.what, found.ranks) == ("link", (1, 3))
    assert found.share == pytest.approx(2 * 0.02)  # four messages in three steps
    assert "ranks 1 to 3 takes 2.00 times" in found.text


def test_the_step_line_has_what_costs_more_than_three_percent() -> None:
    slow = [
        {"what": "rank", "ranks": [3], "share": 0.161, "words": "rank 3 on a is late"},
        {"what": "link", "ranks": [0, 1], "share": 0.029, "words": "a link is slow"},
    ]
    record = replace(RECORD, slow=slow)
    line = step_line(record, 20)
    assert line.endswith("rank 3 on a is late: 16% of the step") and "link" not in line
    assert StepRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("slow", [[1], [{"ranks": [-1]}], [{"ranks": [], "share": "x"}], {}, "x"])
def test_slow_ones_of_another_type_are_refused(slow: object) -> None:
    table = {**RECORD.to_json(), "slow": slow or [0]}
    with pytest.raises((TypeError, ValueError, KeyError)):
        StepRecord.from_json(table)
