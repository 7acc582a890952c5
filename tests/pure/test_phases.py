"""Who hangs where no collectives are counted: at the start, in a build, in a save."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from math import inf

from fivefold.launch.watch.hang import verdict
from fivefold.launch.watch.phases import late, with_limits
from fivefold.launch.watch.positions import Position

BOUND = 24.0


def building(within: float, worked: float | None = None, **said: object) -> Position:
    """A rank that builds for so long; it has done its part after `worked` seconds."""
    usual = Position({}, phase="build", idle=within, allowed=600 - within, mark=1, within=within)
    return replace(usual, worked=worked, waits=worked is not None, **said)


def loading(within: float, built: float) -> Position:
    return replace(building(within, 0.1), phase="load", mark=2, took={"1": built})


def named(positions: dict[int, Position], silent: Collection[int] = ()) -> int | None:
    found = verdict(positions, silent, BOUND)
    return None if found is None else found.rank


def test_the_rank_that_builds_while_others_wait_is_named() -> None:
    at = {0: building(25.0, 2.0), 1: building(25.0), 2: loading(22.0, 3.0)}
    assert named(at) == 1
    found = verdict(at, (), BOUND)
    assert found is not None and found.cause.startswith(
        "has not come through build, and ranks 0 and 2 wait; it has not moved for 25 s"
    )
    assert named({**at, 1: building(23.0)}) is None, "it has 24 s in any case"


def test_a_phase_has_twice_the_time_that_others_took() -> None:
    slow = {0: building(110.0, 60.0), 1: building(110.0)}
    assert named(slow) is None
    assert named({0: building(121.0, 60.0), 1: building(121.0)}) == 1
    assert named({0: loading(70.0, 60.0), 1: building(125.0)}) == 1


def test_who_waits_in_a_pipeline_tells_nothing_of_a_step() -> None:
    """The last stage waits at once for the first, which compiles."""
    step = replace(building(90.0), alike=False, phase="step 1")
    waits = replace(building(90.0, 0.1), alike=False, phase="step 1")
    assert named({0: step, 1: waits}) is None
    assert named({0: replace(step, allowed=0.0), 1: waits}) == 0, "its own limit holds"
    done = replace(waits, mark=2, took={"1": 40.0})
    assert named({0: step, 1: done}) == 0


def test_what_it_took_before_counts_too() -> None:
    at = {0: building(50.0, 2.0), 1: building(50.0, usual=30.0)}
    assert named(at) is None and named({**at, 1: building(61.0, usual=30.0)}) == 1


def test_while_all_work_nobody_is_named() -> None:
    assert named({0: building(100.0), 1: building(100.0)}) is None
    assert named({0: building(601.0), 1: building(601.0)}) is None, "nobody waits for either"


def test_a_rank_that_never_came_and_one_that_was_stopped() -> None:
    start = [replace(building(within, 1.0), mark=0) for within in (20.0, 25.0)]
    assert named({0: start[0], 2: start[0]}, {1}) is None
    assert named({0: start[1], 2: start[1]}, {1}) == 1
    stopped = Position({}, phase="build")  # its log, without its state
    assert named({0: building(25.0, 2.0), 1: stopped, 2: building(25.0, 2.0)}, {1}) == 1
    at = {0: building(25.0, 2.0), 1: stopped, 2: building(25.0, 2.0)}
    assert late(at, {1}, BOUND, excused={1}) is None, "it loads a kernel"


def test_a_rank_alone_is_named_by_itself() -> None:
    step = replace(building(30.0), phase="step 4", allowed=0.0, stack=["  model.py:7 f: sleep()"])
    found = verdict({5: step}, (), BOUND)
    assert found is not None and (found.rank, found.doing) == (5, "step 4")
    assert "has not moved for 30 s, in:\n  model.py:7" in found.cause
    assert verdict({5: replace(step, idle=20.0)}, (), BOUND) is None
    assert verdict({5: replace(step, idle=inf)}, (), BOUND) is None, "it has ended"


def test_only_the_one_that_works_is_ever_named() -> None:
    draw = random.Random(7)
    for _ in range(300):
        worked = [draw.uniform(0.1, 200) for _ in range(draw.randint(2, 8))]
        guilty, now = draw.randrange(len(worked)), max(worked) + draw.uniform(0, 400)
        at = {
            rank: replace(building(now, each), idle=now - each) for rank, each in enumerate(worked)
        }
        at[guilty] = building(now)
        others = max(each for rank, each in enumerate(worked) if rank != guilty)
        limit = min(600.0, 2 * others)
        assert named(at) == (guilty if now >= max(BOUND, limit) else None)
        assert with_limits(at)[guilty].allowed <= limit - now + 1e-9
