"""Closed forms and published tables: bubbles, rates and peak activations of every schedule.

F, B, W are the times of a forward, an input gradient and a weight gradient of 1/p of the model;
p counts ranks, m microbatches, v chunks a rank. Forms are asserted where they hold: the papers
assume W ≤ F for the split schedules, and enough microbatches to fill the pipeline.
"""

from __future__ import annotations

import numpy as np
import pytest
from timelines import Times, bubble, timeline

from fivefold.core.errors import IllegalSchedule, UnknownName
from fivefold.core.schedule import catalog
from fivefold.core.schedule.clock import Costs, peak_activations, play
from fivefold.core.schedule.definition import Family
from fivefold.core.schedule.selection import AUTO_FAMILY
from fivefold.cost.grid import SCHEDULES, schedule_index
from fivefold.cost.stages.makespans import PATHS, ScheduleSize, StageRows

EQUAL: Times = (1.0, 1.0, 1.0)
SLOW_W: Times = (1.0, 1.5, 1.25)
BALANCED: Times = (1.0, 1.1, 0.7)
LONG_B: Times = (1.0, 2.0, 1.0)
LONG_F: Times = (2.0, 1.0, 0.5)

ANY_TIMES = pytest.mark.parametrize("times", [EQUAL, BALANCED, LONG_B, LONG_F, SLOW_W])
W_UP_TO_F = pytest.mark.parametrize("times", [EQUAL, BALANCED, LONG_B, LONG_F])
# W ≤ F ≤ B ≤ 2W, the last case with B = 2W
BALANCED_V = pytest.mark.parametrize("times", [EQUAL, BALANCED, LONG_B, (1.0, 1.2, 0.6)])
FEW = pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 3), (8, 8), (5, 2)])
FILLED = pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 5), (4, 8), (5, 17), (8, 32)])
ROUNDS = pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (3, 6), (4, 16), (8, 16)])
CHUNKS = pytest.mark.parametrize("v", [2, 3, 4])
WEIGHT_SHARES = pytest.mark.parametrize("weight_share", [1.0, 0.9, 0.5])


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def peaks(
    name: str, p: int, m: int, v: int | None = None, weight_share: float = 1.0
) -> list[float]:
    return peak_activations(catalog.make(name, p, m, v), weight_share)


@ANY_TIMES
@FILLED
@pytest.mark.parametrize("name", ["gpipe", "afab", "1f1b", "pipedream-flush"])
def test_flush_bubble_is_one_trip_of_the_pipeline(name: str, p: int, m: int, times: Times) -> None:
    assert bubble(name, p, m, times=times) == near((p - 1) * sum(times))
    assert timeline(name, p, m, times=times).bubble_makespan == near((p - 1) / (m + p - 1))


@FILLED
def test_gpipe_holds_every_microbatch_and_1f1b_at_most_the_stages_behind(p: int, m: int) -> None:
    assert peaks("gpipe", p, m) == [m] * p
    assert peaks("1f1b", p, m) == [min(m, p - r) for r in range(p)]


@FEW
@ANY_TIMES
def test_1f1b_with_few_microbatches(p: int, m: int, times: Times) -> None:
    assert timeline("1f1b", p, m, times=times).makespan == near((m + p - 1) * sum(times))
    assert peaks("1f1b", p, m) == [min(m, p - r) for r in range(p)]


@FEW
@W_UP_TO_F
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_zero_bubble_with_few_microbatches(name: str, p: int, m: int, times: Times) -> None:
    forward, backward, weight = times
    expected = (m + p - 1) * (forward + backward) + weight
    assert timeline(name, p, m, times=times).makespan == near(expected)


@ANY_TIMES
@ROUNDS
@CHUNKS
@pytest.mark.parametrize("name", ["interleaved", "bfs"])
def test_chunks_divide_the_bubble(name: str, p: int, m: int, v: int, times: Times) -> None:
    assert bubble(name, p, m, v, times) == near((p - 1) * sum(times) / v)


@ROUNDS
@CHUNKS
def test_peaks_of_interleaved_and_breadth_first(p: int, m: int, v: int) -> None:
    chunks = [min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
    assert peaks("interleaved", p, m, v) == near([held / v for held in chunks])
    assert peaks("bfs", p, m, v) == [m] * p
    if m >= 2 * p:
        assert max(peaks("interleaved", p, m, v)) == near(p * (1 + (p - 1) / (p * v)))


def test_breadth_first_needs_no_whole_rounds() -> None:
    assert bubble("bfs", 4, 7, 3, BALANCED) == near(3 * 2.8 / 3)


@W_UP_TO_F
@FILLED
def test_zb_h1_bubble(p: int, m: int, times: Times) -> None:
    forward, backward, weight = times
    assert bubble("zb-h1", p, m, times=times) == near((p - 1) * (forward + backward - weight))


@W_UP_TO_F
@FILLED
def test_zb_h2_span(p: int, m: int, times: Times) -> None:
    forward, backward, weight = times
    expected = (p - 1) * (forward + backward - 2 * weight)
    assert bubble("zb-h2", p, m, times=times, of="span") == near(expected)


@WEIGHT_SHARES
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 12), (8, 32)])
def test_peaks_of_zero_bubble_by_worker(p: int, m: int, weight_share: float) -> None:
    """M_B = 1 is what a forward leaves, M_W = weight_share what an input gradient leaves of it."""
    workers = range(1, p + 1)
    h1 = [(p - i + 1) + (i - 1) * weight_share for i in workers]
    h2 = [(2 * p - 2 * i + 1) + (2 * i - 2) * weight_share for i in workers]
    assert peaks("zb-h1", p, m, weight_share=weight_share) == near(h1)
    assert peaks("zb-h2", p, m, weight_share=weight_share) == near(h2)


@W_UP_TO_F
@ROUNDS
@CHUNKS
def test_interleaved_zero_bubble(p: int, m: int, v: int, times: Times) -> None:
    forward, backward, weight = times
    expected = (p - 1) * (forward + backward - weight) / v
    assert bubble("zb-interleaved", p, m, v, times) == near(expected)
    assert peaks("zb-interleaved", p, m, v) == near([p] * p)


@BALANCED_V
@FILLED
def test_zb_v(p: int, m: int, times: Times) -> None:
    _, backward, weight = times
    assert bubble("zb-v", p, m, times=times) == near((p - 1) * backward / 2)
    assert bubble("zb-v", p, m, times=times, of="span") == near((p - 1) * (backward - weight))
    assert peaks("zb-v", p, m) == near([min(m, p)] * p)


def test_zb_v_beyond_its_domain_is_bound_by_its_span() -> None:
    """With B > 2W the span bubble (p−1)(B−W) is longer than (p−1)B/2, and so is the makespan."""
    times = (1.0, 3.0, 0.5)
    assert bubble("zb-v", 8, 32, times=times, of="span") == near(7 * 2.5)
    assert bubble("zb-v", 8, 32, times=times) == near(7 * 2.5)


# The published form assumes F ≤ B; with F > B the pair meets a longer forward on the way down.
@pytest.mark.parametrize("times", [EQUAL, BALANCED, LONG_B, SLOW_W, (1.0, 3.0, 0.5)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 14), (6, 20), (8, 16), (8, 32)])
def test_dualpipe(p: int, m: int, times: Times) -> None:
    forward, backward, weight = times
    pair, full = sum(times), backward + weight
    upper = (p / 2 - 1) * (pair + full - 3 * weight)
    found = bubble("dualpipe", p, m, times=times)
    assert found <= upper + 1e-9
    if forward == backward == weight:
        assert found == near(upper)
    assert peaks("dualpipe", p, m) == [p + 1] * p


@pytest.mark.parametrize("times", [EQUAL, BALANCED, LONG_B, SLOW_W, (1.0, 3.0, 0.5)])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 8), (5, 20), (8, 32)])
def test_dualpipe_v(p: int, m: int, times: Times) -> None:
    forward, backward, weight = (time / 2 for time in times)  # of a chunk
    pair, full = forward + backward + weight, backward + weight
    upper = (p - 1) * (pair + full - 3 * weight)
    found = bubble("dualpipe-v", p, m, times=times)
    assert found <= upper + 1e-9
    if forward == backward == weight:
        assert found == near(upper)
    assert peaks("dualpipe-v", p, m) == [(2 * p + 1) / 2] * p


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_overlap_shortens_the_pairs_and_nothing_else(name: str) -> None:
    whole, half = (timeline(name, 4, 12, overlap=share) for share in (1.0, 0.5))
    assert half.makespan < whole.makespan
    pairs = [sum(";" in text for text in texts) for texts in whole.schedule.texts()]
    assert whole.ideal == near(36.0)
    saved = 0.5 * 3.0 * (1.0 if name == "dualpipe" else 0.5)
    assert half.ideal == near(36.0 - saved * min(pairs))


# Makespan bubbles at F=B=W=1 of the greedy orders published with the V-shaped schedules.
@pytest.mark.parametrize(
    ("name", "p", "m", "most_idle", "peak"),
    [
        ("v-half", 4, 16, 2.5, 3),
        ("v-half", 8, 32, 8.5, 5),
        ("v-half", 16, 64, 20.5, 9),
        ("v-min", 4, 16, 5.5, 2),
        ("v-min", 8, 32, 13.5, 4),
        ("v-min", 16, 64, 29.5, 6),
    ],
)
def test_v_half_and_v_min_reach_the_published_bubbles(
    name: str, p: int, m: int, most_idle: float, peak: int
) -> None:
    assert bubble(name, p, m) <= most_idle + 1e-9
    assert max(peaks(name, p, m)) == peak
    rate = timeline(name, p, m).bubble_makespan
    assert rate <= (p / (2 * m) if name == "v-half" else 2 * p / (3 * m))


@pytest.mark.parametrize("p", range(1, 17))
def test_v_half_and_v_min_keep_to_their_share_of_memory(p: int) -> None:
    assert max(peaks("v-half", p, 2 * p)) <= (p + 2) // 2
    assert max(peaks("v-min", p, 2 * p)) <= (p + 4) // 3


# Zero Bubble paper, times of its Table 9 and span rates of its Table 5.
@pytest.mark.parametrize(
    ("p", "m", "times", "transfer", "rates"),
    [
        (8, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
        (8, 32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837)),
        (8, 64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0554, 0.0294)),
        (16, 48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1397, 0.0672)),
        (32, 96, (10.419, 10.207, 7.715), 0.408, (0.2646, 0.1421, 0.0641)),
        (32, 256, (10.402, 10.248, 7.698), 0.460, (0.1352, 0.0594, 0.0257)),
    ],
)
def test_zero_bubble_paper_rates(
    p: int, m: int, times: Times, transfer: float, rates: tuple[float, float, float]
) -> None:
    found = (
        timeline(name, p, m, times=times, transfer=transfer).bubble_span
        for name in ("1f1b", "zb-h1", "zb-h2")
    )
    assert tuple(round(rate, 4) for rate in found) == rates


@pytest.mark.parametrize(
    ("name", "v", "rate"),
    [
        ("1f1b", 1, 0.1795),
        ("interleaved", 2, 0.0986),
        ("interleaved", 4, 0.0519),
        ("zb-h1", 1, 0.0986),
        ("zb-interleaved", 2, 0.0519),
        ("zb-v", 2, 0.0412),
    ],
)
def test_makespan_rates_at_8_ranks_and_32_microbatches(name: str, v: int, rate: float) -> None:
    assert round(timeline(name, 8, 32, v, BALANCED).bubble_makespan, 4) == rate


@pytest.mark.parametrize(("m", "ratio", "share"), [(8, 0.375, 0.273), (32, 0.094, 0.086)])
def test_both_conventions_of_the_bubble(m: int, ratio: float, share: float) -> None:
    played = timeline("1f1b", 4, m)
    assert round(played.bubble_ratio, 3) == ratio
    assert round(played.bubble_makespan, 3) == share
    assert played.ideal == 3 * m


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 4), (8, 16)])
@ANY_TIMES
def test_asynchronous_pipelines_do_not_idle_in_steady_state(
    name: str, p: int, m: int, times: Times
) -> None:
    once, twice = (timeline(name, p, count, times=times).makespan for count in (m, 2 * m))
    assert twice - once == near(m * sum(times))


def test_weight_versions_and_activations_of_asynchronous_pipelines() -> None:
    pipedream = catalog.make("pipedream", 4, 8)
    assert pipedream.asynchronous
    assert pipedream.weight_versions == (4, 3, 2, 1)
    assert peak_activations(pipedream) == [4, 3, 2, 1]
    double = catalog.make("pipedream-2bw", 4, 8)
    assert double.asynchronous
    assert double.weight_versions == (2, 2, 2, 2)
    assert peak_activations(double) == [4, 3, 2, 1]


def test_2bw_with_fewer_microbatches_than_stages_is_refused() -> None:
    with pytest.raises(IllegalSchedule, match="at least the stages") as refused:
        catalog.make("pipedream-2bw", 4, 3)
    assert "4 microbatches" in str(refused.value)


def test_synchronous_schedules_keep_no_weight_versions() -> None:
    for family, v in catalog.synchronous(4, 8, 2):
        schedule = catalog.make(family.name, 4, 8, v)
        assert not schedule.asynchronous, family.name
        assert schedule.weight_versions == (), family.name


@pytest.mark.parametrize(
    ("name", "hops"), [("1f1b", 3), ("zb-h1", 3), ("interleaved", 7), ("zb-v", 6)]
)
def test_transfers_count_between_ranks_and_not_inside_one(name: str, hops: int) -> None:
    """Four ranks, forward and back. The loop also goes from the last rank to the first; the V
    turns inside the last one, for nothing."""
    m = 4 if name == "interleaved" else 1
    apart, joined = (timeline(name, 4, m, transfer=cost).makespan for cost in (0.25, 0.0))
    assert apart - joined == near(2 * hops * 0.25)


def test_a_slow_last_stage_sets_the_pace() -> None:
    """A head that doubles the last stage: 2 forwards before it, its 6 · 6, 2 backwards after."""
    slow = (1.0, 1.0, 2.0)
    played = play(catalog.make("1f1b", 3, 6), Costs(slow, slow, slow, (0.0,) * 3))
    assert played.ideal == near(36)
    assert played.makespan == near(2 + 36 + 2 * 2)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean zb-h1"):
        catalog.make("zbh1", 4, 8)


# ---- what the planner takes from a family


def test_an_estimate_refuses_a_schedule_that_it_does_not_know() -> None:
    assert SCHEDULES[schedule_index("ZB-H1")] == "zb-h1"
    assert SCHEDULES[schedule_index("afab")] == "gpipe"
    assert SCHEDULES[schedule_index("mine.csv")] == "1f1b"  # played before it is shown
    with pytest.raises(UnknownName, match="zb-h1"):
        schedule_index("zb-h9")


def test_every_schedule_names_paths_that_exist() -> None:
    assert {family.paths for family in (*catalog.FAMILIES, AUTO_FAMILY)} <= {*PATHS}


@ANY_TIMES
@pytest.mark.parametrize("family", [each for each in catalog.FAMILIES if not each.asynchronous])
def test_the_paths_of_a_placement_bound_every_schedule_there(family: Family, times: Times) -> None:
    p, m, v = 4, 8, family.min_chunks
    if family.placement == "bidirectional":
        return  # its two copies share the work of a stage
    rows = np.eye(4)[:, None].repeat(p * v, axis=1)
    costs = np.array([*(each / v for each in times), 0.1])[:, None]
    paths = PATHS[family.placement](StageRows(*rows[:3], rows[3, 0]), ScheduleSize(p, v, m, costs))
    schedule = family.make(p, m, v)
    clock = play(schedule, Costs.uniform(schedule.placement, times, transfer=0.1))
    assert (paths @ costs).max() <= clock.makespan + 1e-9


@pytest.mark.parametrize("slow", [5, 11], ids=["forward", "input gradient"])
def test_the_longest_path_of_zb_v_may_turn_at_its_last_stage(slow: int) -> None:
    """Two microbatches on three ranks of two stages each; one pass takes ten times as long."""
    seconds, rows = np.ones(19), np.eye(19)
    seconds[slow], seconds[18] = 10.0, 0.0
    stages = StageRows(rows[:6], rows[6:12], rows[12:18], rows[18])
    paths = PATHS["zb-v"](stages, ScheduleSize(3, 2, 2, seconds[:, None]))
    forward, inputs, weights = (tuple(seconds[at : at + 6]) for at in (0, 6, 12))
    schedule = catalog.make("zb-v", 3, 2)
    clock = play(schedule, Costs(forward, inputs, weights, (0.0,) * 6))
    assert (paths @ seconds).max() == near(clock.makespan)
