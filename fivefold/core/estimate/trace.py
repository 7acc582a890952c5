"""The clock for many costs at once: how long one schedule takes under each of them.

The order of a schedule does not hang on costs, so that one walk over its actions serves them all.
Every rank has a place in its order, and all ranks whose next row has what it needs run it together.
A row is a forward, a backward or a pair of both that runs as one. Nobody waits for weight
gradients: they keep their rank busy behind the row before them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.estimate.grid import Array, Flags
from fivefold.core.estimate.paths import Stages
from fivefold.core.plan import named_schedule
from fivefold.core.schedule.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Overlap,
    actions_of,
)
from fivefold.core.schedule.value import Schedule

Places = NDArray[np.int64]
_KINDS = {FORWARD: 0, INPUT_GRAD: 1, BACKWARD: 2, WEIGHT_GRAD: 3}
# Microbatches, over the ranks, from which a pipeline repeats itself, and up to which it is walked.
_STEADY, _LONGEST = 5, 8


class _Actions(NamedTuple):
    """All actions, rank after rank; `opens` where a row begins."""

    stage: Places
    kind: Places
    microbatch: Places
    row: Places
    opens: Flags


class Walk(NamedTuple):
    """A schedule in rows, rank after rank; behind a rank's last row is one that never runs.

    `sources` are the rows on other ranks that send a row what it needs, by the number of the row;
    the last row of all stands for nobody. A pair may have two.
    """

    starts: Places
    sources: tuple[Places, ...]
    actions: _Actions


def makespans(name: str, numbers: tuple[int, int, int], stages: Stages, costs: Array) -> Array:
    """Seconds of a step for each column of costs; `numbers`: ranks, microbatches and chunks.

    A long schedule is told from two shorter ones, by what each further round of it takes.
    """
    ranks, count, chunks = numbers
    if not is_long(*numbers):
        return walked(_walk(name, ranks, count, chunks), stages, costs)
    few, many = (each * ranks + count % ranks for each in (_STEADY, _LONGEST))
    early, late = (walked(_walk(name, ranks, each, chunks), stages, costs) for each in (few, many))
    return late + (late - early) * (count - many) / (many - few)


def is_long(num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether a schedule is told from shorter ones."""
    return num_microbatches > _LONGEST * num_ranks


@lru_cache(maxsize=64)
def _walk(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Walk:
    return walk(named_schedule(name, num_ranks, num_microbatches, num_chunks))


def walk(schedule: Schedule) -> Walk:
    """The rows of a schedule, and who waits for whom."""
    actions, starts = _actions(schedule)
    stage, kind, microbatch, row, opens = actions
    nobody = int(row[-1]) + 2
    sends, backwards = kind != _KINDS[WEIGHT_GRAD], (kind > 0).astype(np.int64)
    # By stage, with one beyond either end: which row has a microbatch's output, and its gradient.
    made = np.full((2, schedule.num_stages + 2, schedule.num_microbatches), nobody)
    made[backwards[sends], stage[sends] + 1, microbatch[sends]] = row[sends]
    homes = np.array([-1, *schedule.placement.homes, -1])
    there = stage + 2 * backwards
    moves = sends & (homes[there] >= 0) & (homes[there] != homes[stage + 1])
    sources: list[Places] = []
    for which in (moves & opens, moves & ~opens):
        found = np.full(nobody + 1, nobody)
        found[row[which]] = made[backwards[which], there[which], microbatch[which]]
        sources.append(found)
    behind = np.append(starts[1:], nobody) - 1
    sources[0][behind] = behind
    pairs = bool((moves & ~opens).any())
    return Walk(starts, tuple(sources[: 1 + pairs]), actions)


def _actions(schedule: Schedule) -> tuple[_Actions, Places]:
    """All actions, and the first row of each rank."""
    steps = [step for order in schedule.order for step in order]
    found = [action for step in steps for action in actions_of(step)]
    count = len(found)
    paired = np.fromiter((isinstance(step, Overlap) for step in steps), bool, len(steps))
    first = np.cumsum(1 + paired) - 1 - paired  # of each step's actions
    stage = np.fromiter((each[0] for each in found), np.int64, count)
    kind = np.fromiter((_KINDS[each[1]] for each in found), np.int64, count)
    microbatch = np.fromiter((each[2] for each in found), np.int64, count)
    opens = kind != _KINDS[WEIGHT_GRAD]
    opens[first[paired] + 1] = False
    begins = first[np.cumsum([0, *map(len, schedule.order[:-1])])]
    rank = np.zeros(count, np.int64)
    rank[begins[1:]] = 1
    row = np.cumsum(opens) - 1 + np.cumsum(rank)
    return _Actions(stage, kind, microbatch, row, opens), row[begins]


def walked(walk: Walk, stages: Stages, costs: Array) -> Array:
    """Seconds until all ranks are done, for each column of costs."""
    own, whole = _seconds(walk.actions, stages, costs)
    lag = stages.lag @ costs
    source, *others = walk.sources
    ends = np.full((len(source), costs.shape[1]), -np.inf)
    done = np.zeros(len(source), bool)
    done[-1] = True
    place, now = walk.starts.copy(), np.zeros((len(walk.starts), costs.shape[1]))
    left = int(walk.actions.opens.sum())
    while left:
        ready = done[source[place]]
        for other in others:
            ready &= done[other[place]]
        ranks = np.flatnonzero(ready)
        assert len(ranks), "a schedule that ends"
        rows = place[ranks]
        start = np.maximum(now[ranks], ends[source[rows]] + lag)
        for other in others:
            start = np.maximum(start, ends[other[rows]] + lag)
        ends[rows] = start + own[rows]
        now[ranks] = start + whole[rows]
        done[rows] = True
        place[ranks] += 1
        left -= len(ranks)
    return now.max(axis=0)


def _seconds(actions: _Actions, stages: Stages, costs: Array) -> tuple[Array, Array]:
    """Of each row: until it is sent, and until its rank is free."""
    forward, inputs, weights, _ = stages
    kinds = np.array([forward, inputs, inputs + weights, weights]) @ costs
    seconds = kinds[actions.kind, actions.stage]
    heads = np.flatnonzero(actions.opens)
    found: list[Array] = []
    late = (actions.kind == _KINDS[WEIGHT_GRAD])[:, None]
    for each in (np.where(late, 0.0, seconds), seconds):
        rows = np.zeros((int(actions.row[-1]) + 3, costs.shape[1]))
        rows[actions.row[heads]] = np.add.reduceat(each, heads)
        found.append(rows)
    return found[0], found[1]
