"""Two lanes that take turns: in a fixed order, hiding what there is to hide, come what may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import groupby, zip_longest
from types import SimpleNamespace

import pytest
from forked_steps import Setup, run, small_plan

from fivefold.core.schedule.schedule import Overlap, Step
from fivefold.launch.processes import Pool
from fivefold.parallel.composition import Job
from fivefold.parallel.lanes import Lanes
from fivefold.parallel.mesh import CollectiveRecord
from fivefold.parallel.stage import ActionObserver

Log = list[tuple[str, int]]


def pairs(job: Job, *_: object) -> Callable[[], list[list[tuple[int, str]]]]:
    """The lane and the kind of every collective of each pair of the last step, in their order."""
    found: list[list[tuple[int, str]]] = []
    main = threading.get_ident()

    class Actions(ActionObserver):
        def begin(self, action: Step) -> None:
            if action == job.pipeline.steps[0]:
                found.clear()
            if isinstance(action, Overlap):
                found.append([])

    class Collectives:
        def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> None:
            if any(job.mesh.lanes._running):
                lane = int(threading.get_ident() != main)
                found[-1].append((lane, f"{record.kind} on {record.axis}"))

        def end(self, token: object) -> None: ...

    job.pipeline.observer = Actions()
    job.mesh.observers = (Collectives(),)
    return lambda: found


@pytest.mark.sample(2)
@pytest.mark.parametrize(("recompute", "overlap"), [("none", 0), ("full", 0), ("none", 1)])
def test_a_pair_is_interleaved(pool: Pool, recompute: str, overlap: int) -> None:
    """A lane that waits for every collective at once gives its turn away after each; one that has
    two of them beside matmuls, after both."""
    said = {"schedule": "dualpipe", "microbatches": 8, "recompute": recompute}
    plan = small_plan("tp=2 pp=2", **said, tp_overlap=overlap)
    ranks = run(pool, plan, Setup(), pairs)
    for rank, found in enumerate(ranks):
        place = plan.layout.coord(rank).pp
        assert len(found) == sum(isinstance(one, Overlap) for one in plan.schedule.order[place])
        for events in found:
            forward, backward = ([one for one in events if one[0] == lane] for lane in (0, 1))
            assert min(len(forward), len(backward)) >= 4
            if overlap:
                turns = [len(list(each)) for _, each in groupby(events, lambda one: one[0])]
                assert max(turns[: 2 * min(len(forward), len(backward)) // 3]) <= 2
            else:
                assert events == alternating(backward, forward)  # type: ignore[arg-type]
    for first, second in plan.layout.groups("tp"):
        assert ranks[first] == ranks[second]  # or they would wait for one another


def test_pairs_without_a_collective_run_one_after_the_other(pool: Pool) -> None:
    plan = small_plan("pp=2", schedule="dualpipe", microbatches=8)
    for found in run(pool, plan, Setup(), pairs):
        assert found and not any(found)


def lane(
    lanes: Lanes, log: Log, name: str, times: int, fails_at: int | None = None
) -> Callable[[], str]:
    """Notes its turns, a collective behind each of them, and returns its name."""

    def work() -> str:
        for number in range(times):
            log.append((name, number))
            if number == fails_at:
                raise ValueError(name)
            lanes.pause()
        return name

    return work


def alternating(first: list[tuple[str, int]], second: list[tuple[str, int]]) -> Log:
    pairs = zip_longest(first, second)
    return [turn for pair in pairs for turn in pair if turn is not None]


def turns(name: str, times: int) -> Log:
    return [(name, number) for number in range(times)]


@pytest.mark.parametrize("times", [(3, 3), (1, 4), (4, 1), (0, 2), (2, 0), (50, 50)])
def test_turns_alternate_until_one_lane_is_done(times: tuple[int, int]) -> None:
    lanes = Lanes()
    for _ in range(3):
        log: Log = []
        both = (lane(lanes, log, name, count) for name, count in zip("ab", times, strict=True))
        assert lanes.run(*both) == ("a", "b")
        assert log == alternating(turns("b", times[1]), turns("a", times[0]))
        assert not any(lanes._running)


@pytest.mark.parametrize("fails", [(2, None), (None, 2), (0, None), (None, 0), (1, 1)])
def test_what_a_lane_raises_is_raised_when_the_other_is_done(
    fails: tuple[int | None, int | None],
) -> None:
    lanes, log = Lanes(), Log()
    both = [lane(lanes, log, name, 5, at) for name, at in zip("ab", fails, strict=True)]
    with pytest.raises(ValueError, match=r"a|b"):
        lanes.run(*both)
    kept = [5 if at is None else at + 1 for at in fails]
    assert log == alternating(turns("b", kept[1]), turns("a", kept[0]))
    assert not any(lanes._running)
    log.clear()
    assert lanes.run(lane(lanes, log, "a", 2), lane(lanes, log, "b", 2)) == ("a", "b")
    assert log == alternating(turns("b", 2), turns("a", 2))


def test_one_lane_computes_while_the_other_waits() -> None:
    """On a clock that only work and waiting move: 4 units of both kinds in each lane."""
    clock, lanes, free_at = SimpleNamespace(now=0.0), Lanes(), SimpleNamespace(time=0.0)

    def work() -> None:
        for _ in range(4):
            clock.now += 1.0
            # Collectives of one group run one after the other, each for one unit.
            free_at.time = ready = max(clock.now, free_at.time) + 1.0
            lanes.pause()
            clock.now = max(clock.now, ready)

    work()
    work()
    assert clock.now == 16.0
    lanes.run(work, work)
    assert clock.now - 16.0 == 9.0  # the work of both, and the last collective
