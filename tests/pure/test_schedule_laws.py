"""Laws that hold for every schedule on its whole domain, and for the clock that plays them."""

from __future__ import annotations

import re
import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import IllegalSchedule
from fivefold.core.schedule import catalog
from fivefold.core.schedule.clock import Costs, Timeline, peak_activations, play
from fivefold.core.schedule.schedule import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRAD,
    Action,
    Schedule,
    actions_of,
    linear_placement,
    parse_steps,
)
from fivefold.core.schedule.selection import choose, parse_schedule, require_legal
from tests.selection import within

Numbers = tuple[int, int, int]

MOST_RANKS, MOST_MICROBATCHES, MOST_CHUNKS = 8, 32, 4
NAMES = [family.name for family in catalog.FAMILIES]


# The domains once more, from the papers rather than from the catalog.
def in_domain(name: str, p: int, m: int, v: int) -> bool:
    if min(p, m) < 1:
        return False
    if name in ("interleaved", "zb-interleaved"):
        return v >= 2 and m % p == 0
    if name == "bfs":
        return v >= 2
    if name in ("zb-v", "v-half", "v-min"):
        return v == 2
    if name == "dualpipe-v":
        return v == 2 and m >= 2 * p
    if name == "dualpipe":
        return v == 1 and p % 2 == 0 and m % 2 == 0 and m >= 2 * p
    if name == "pipedream-2bw":
        return v == 1 and m >= p
    return v == 1


GRID = list(
    product(range(1, MOST_RANKS + 1), range(1, MOST_MICROBATCHES + 1), range(1, MOST_CHUNKS + 1))
)
DOMAIN = {name: [numbers for numbers in GRID if in_domain(name, *numbers)] for name in NAMES}
AROUND = list(product(range(-1, 11), range(-1, 25), range(-1, 6)))
OUTSIDE = {name: [numbers for numbers in AROUND if not in_domain(name, *numbers)] for name in NAMES}

named = st.sampled_from(NAMES)
legal = named.flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(DOMAIN[name])))
illegal = named.flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(OUTSIDE[name])))
eighths = st.integers(1, 24).map(lambda number: number / 8)
times = st.tuples(eighths, eighths, eighths)
transfers = st.integers(0, 8).map(lambda number: number / 8)
overlaps = st.sampled_from([0.5, 0.75, 1.0])


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any schedule, with stages and links that differ from one to the next."""
    name, (p, m, v) = draw(legal)
    schedule = catalog.make(name, p, m, v)

    def uneven(number: float) -> tuple[float, ...]:
        step = draw(st.integers(0, 2))
        return tuple(number * (1 + stage * step % 3) for stage in range(schedule.num_stages))

    forward, backward, weight = map(uneven, draw(times))
    return play(schedule, Costs(forward, backward, weight, uneven(draw(transfers)), draw(overlaps)))


def examples(number: int) -> settings:
    return settings(max_examples=number, derandomize=True)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_legal_on_its_whole_domain(name: str) -> None:
    for p, m, v in DOMAIN[name]:
        schedule = catalog.make(name, p, m, v)
        require_legal(schedule)
        assert (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks) == (p, m, v)


@given(illegal)
@examples(400)
def test_outside_its_domain_a_schedule_is_refused_with_the_nearest_inside(
    case: tuple[str, Numbers],
) -> None:
    name, numbers = case
    with pytest.raises(IllegalSchedule) as refused:
        catalog.make(name, *numbers)
    text = str(refused.value)
    family = catalog.family(name)
    assert all(rule in text for rule in family.problems(*numbers))
    offered = re.search(r"nearest\D+(\d+)\D+(\d+)\D+(\d+)", text)
    assert offered is not None, text
    nearest = tuple(map(int, offered.groups()))
    assert nearest == family.nearest(*numbers)
    assert in_domain(name, *nearest)
    assert family.problems(*nearest) == []
    assert _distance(numbers, nearest) == min(
        _distance(numbers, other)
        for other in product(range(1, 13), range(1, 50), range(1, 6))
        if in_domain(name, *other)
    )


@pytest.mark.parametrize("name", [*NAMES, "auto"])
@pytest.mark.parametrize(
    "numbers", [(10**9, 1, 2), (4096, 10**12, 2), (4095, 3, 64), (4, 8, 10**9), (10**12, 10**12, 2)]
)
def test_absurd_sizes_are_refused_at_once(name: str, numbers: Numbers) -> None:
    family = choose(name)
    with within(1, time.process_time), pytest.raises(IllegalSchedule, match=r"must be"):
        family.require(*numbers)


def test_few_microbatches_on_many_ranks_are_quick() -> None:
    with within(2, time.process_time):
        for name in ("zb-v", "1f1b", "gpipe"):
            schedule = catalog.make(name, 4000, 2)
            assert schedule.num_chunks == (2 if name == "zb-v" else 1)


def _distance(numbers: Numbers, other: tuple[int, ...]) -> Numbers:
    """Stages are bound to hardware and change least, microbatches next, chunks last."""
    ranks, microbatches, chunks = (abs(a - b) for a, b in zip(numbers, other, strict=True))
    return ranks, microbatches, chunks


@given(legal)
@examples(150)
def test_the_text_of_a_schedule_reads_back_as_itself(case: tuple[str, Numbers]) -> None:
    name, numbers = case
    schedule = catalog.make(name, *numbers)
    for text in (schedule.to_csv(), "\n".join(map(" ".join, schedule.texts()))):
        again = parse_schedule(text, name)
        assert again.order == schedule.order
        assert again.placement == schedule.placement
        assert again.num_microbatches == schedule.num_microbatches


@given(timelines())
@examples(120)
def test_steps_start_when_their_inputs_and_their_rank_are_there(timeline: Timeline) -> None:
    """The clock once more, without its tables: never too early, and never later than needed."""
    schedule, costs = timeline.schedule, timeline.costs
    ends = _ends(timeline)
    for rank, steps in enumerate(schedule.order):
        free = 0.0
        for step, start, end in zip(steps, timeline.starts[rank], timeline.ends[rank], strict=True):
            arrivals = [_arrival(action, rank, timeline, ends) for action in actions_of(step)]
            assert start == pytest.approx(max([free, *arrivals]))
            assert end - start == pytest.approx(costs.of(step))
            free = end


def _ends(timeline: Timeline) -> dict[tuple[int, bool, int], float]:
    """When the output (True) or the input gradient (False) of a stage and microbatch is there."""
    found: dict[tuple[int, bool, int], float] = {}
    for steps, ends in zip(timeline.schedule.order, timeline.ends, strict=True):
        for step, end in zip(steps, ends, strict=True):
            for stage, kind, microbatch in actions_of(step):
                if kind != WEIGHT_GRAD:
                    found[stage, kind == FORWARD, microbatch] = end
    return found


def _arrival(
    action: Action, rank: int, timeline: Timeline, ends: dict[tuple[int, bool, int], float]
) -> float:
    stage, kind, microbatch = action
    schedule = timeline.schedule
    if kind == WEIGHT_GRAD:
        return ends[stage, False, microbatch]
    other = stage - 1 if kind == FORWARD else stage + 1
    own = 0.0 if kind == FORWARD else ends[stage, True, microbatch]
    if not 0 <= other < schedule.num_stages:
        return own
    edge = min(stage, other)
    lag = 0.0 if schedule.rank_of(other, microbatch) == rank else timeline.costs.transfer[edge]
    return max(own, ends[other, kind == FORWARD, microbatch] + lag)


@given(timelines())
@examples(120)
def test_work_and_waits_account_for_all_time(timeline: Timeline) -> None:
    busy = [sum(map(timeline.costs.of, steps)) for steps in timeline.schedule.order]
    idle = [0.0] * timeline.schedule.num_ranks
    for wait in timeline.waits():
        assert wait.end > wait.start
        idle[wait.rank] += wait.end - wait.start
    for rank, ends in enumerate(timeline.ends):
        assert busy[rank] + idle[rank] == pytest.approx(ends[-1])
    assert timeline.ideal == pytest.approx(max(busy))


@given(timelines())
@examples(120)
def test_every_wait_ends_when_its_cause_arrives(timeline: Timeline) -> None:
    schedule, ends = timeline.schedule, _ends(timeline)
    known = {action for steps in schedule.order for step in steps for action in actions_of(step)}
    for wait in timeline.waits():
        assert wait.cause in known
        stage, kind, microbatch = wait.cause
        sender = schedule.rank_of(stage, microbatch)
        assert sender != wait.rank, f"rank {wait.rank} waits for itself at {wait.step}"
        edge = stage if kind == FORWARD else stage - 1
        arrival = ends[stage, kind == FORWARD, microbatch] + timeline.costs.transfer[edge]
        assert arrival == pytest.approx(wait.end)


@given(timelines())
@examples(120)
def test_no_schedule_beats_its_work(timeline: Timeline) -> None:
    slack = 1e-9 * timeline.makespan
    assert timeline.ideal <= timeline.span + slack
    assert timeline.span <= timeline.makespan + slack
    assert -1e-9 <= timeline.bubble_span <= timeline.bubble_makespan + 1e-9
    assert timeline.bubble_makespan < 1
    share = timeline.bubble_makespan
    assert timeline.bubble_ratio == pytest.approx(share / (1 - share), abs=1e-9)


@given(legal, times, transfers, st.sampled_from([1e-6, 0.3, 1000.0]))
@examples(80)
def test_the_unit_of_time_does_not_matter(
    case: tuple[str, Numbers], each: tuple[float, float, float], transfer: float, unit: float
) -> None:
    name, numbers = case
    schedule = catalog.make(name, *numbers)
    forward, backward, weight = (unit * time for time in each)
    placement = schedule.placement
    plain = play(schedule, Costs.uniform(placement, each, transfer))
    scaled = play(schedule, Costs.uniform(placement, (forward, backward, weight), unit * transfer))
    assert scaled.makespan == pytest.approx(unit * plain.makespan)
    assert scaled.span == pytest.approx(unit * plain.span)
    assert scaled.bubble_makespan == pytest.approx(plain.bubble_makespan, abs=1e-9)
    assert len(list(scaled.waits())) == len(list(plain.waits()))


@given(legal, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
@examples(150)
def test_no_rank_holds_more_than_all_microbatches(
    case: tuple[str, Numbers], weight_share: float
) -> None:
    name, (p, m, v) = case
    schedule = catalog.make(name, p, m, v)
    peaks = peak_activations(schedule, weight_share)
    assert len(peaks) == p
    assert all(1 / v <= peak <= m for peak in peaks)
    whole = peak_activations(schedule)
    assert all(peak <= most + 1e-9 for peak, most in zip(peaks, whole, strict=True))


@given(legal, st.data())
@examples(100)
def test_a_backward_put_before_its_forward_never_runs(
    case: tuple[str, Numbers], data: st.DataObject
) -> None:
    name, numbers = case
    schedule = catalog.make(name, *numbers)
    order = [list(steps) for steps in schedule.order]
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    gradients = [step for step in order[rank] if isinstance(step, Action) and step.kind in "BI"]
    moved = data.draw(st.sampled_from(gradients))
    order[rank].remove(moved)
    order[rank].insert(0, moved)
    text = "\n".join(",".join(map(str, steps)) for steps in order)
    missing = moved._replace(kind=FORWARD)
    with pytest.raises(IllegalSchedule, match=f"rank {rank} waits at {moved} for {missing}"):
        parse_schedule(text)


def test_a_full_backward_is_both_halves_of_a_split_one() -> None:
    costs = Costs((1.0,), (2.0,), (4.0,), (0.0,))
    whole, halves = parse_schedule("0F0,0B0"), parse_schedule("0F0,0I0,0W0")
    assert play(whole, costs).ends == ((1.0, 7.0),)
    assert play(halves, costs).ends == ((1.0, 3.0, 7.0),)
    assert costs.of(Action(0, BACKWARD, 0)) == 6.0


def test_a_pair_waits_for_what_arrives_last_not_for_what_ends_last() -> None:
    """0F1 ends at 12 on a link without delay; 2B0 ends at 11.5 and is 1.5 on the way.

    The clock times a pair of one stage too, which is legal nowhere.
    """
    lines = ("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1")
    order = tuple(parse_steps(line.split(), "") for line in lines)
    schedule = Schedule("slow first stage", linear_placement(3), 2, order)
    ones = (1.0, 1.0, 1.0)
    timeline = play(schedule, Costs((6.0, 1.0, 1.0), ones, ones, (0.0, 1.5, 0.0)))
    (wait,) = (wait for wait in timeline.waits() if wait.step == schedule.order[1][1])
    assert (wait.start, wait.end) == (7.0, 13.0)
    assert wait.cause == Action(2, BACKWARD, 0)
