"""The clock for many costs at once: one pass over the actions of a schedule serves all of them.

It gives the same as `core.schedule.clock`. The order of a schedule does not depend on costs, so it
is found once which rows are run together: in each turn, all ranks run their next row whose inputs
were made in turns before. A row is a forward, a backward, or an overlapped pair of both. No rank
waits for weight gradients of another: they only keep their own rank busy after the row before them.

Orders in loops are expanded into arrays, without an object for each action.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.plan import named_schedule
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    LoopOrder,
    Overlap,
    Schedule,
    actions_of,
)
from fivefold.cost import Array, Flags

Indices = NDArray[np.int64]
_KINDS = {FORWARD: 0, INPUT_GRAD: 1, BACKWARD: 2, WEIGHT_GRAD: 3}
_W = _KINDS[WEIGHT_GRAD]
# Microbatches per rank from which a pipeline repeats itself, and up to which it is simulated.
_STEADY, _LONGEST = 5, 8
_FEW_RANKS = 16


class StageSeconds(NamedTuple):
    """Seconds of one microbatch in every stage, a row each, and of a message; a column each for
    every set of costs."""

    forward: Array
    inputs: Array
    weights: Array
    lag: Array

    @property
    def table(self) -> Array:
        """By kind of action and stage; the last row is nothing."""
        forward, inputs, weights, _ = self
        nothing = np.zeros((1, forward.shape[1]))
        return np.concatenate([forward, inputs, inputs + weights, weights, nothing])


class _ActionColumns(NamedTuple):
    """All actions, rank after rank; `opens`: whether an action begins a row."""

    stage: Indices
    kind: Indices
    microbatch: Indices
    opens: Flags
    begins: Indices  # the first action of each rank


class ScheduleTrace(NamedTuple):
    """The rows of a schedule in the order of their turns; `turns` are the ends of these.

    `before`: for each row, the row before it on its rank; `sources`: the row on another rank that
    sends its input, of which a pair may have two. The number of all rows stands for none. `runs`
    are the actions of each row: the first, the other one of a pair, and the weight gradients; each
    an index into the seconds of kinds and stages, of which the last stands for none, followed by
    the sums that are in `several`. `last`: the last row of each rank; `counts`: how often each rank
    runs each of the actions.
    """

    turns: list[int]
    before: Indices
    sources: tuple[Indices, ...]
    runs: tuple[Indices, ...]
    several: Array
    last: Indices
    counts: Array


def schedule_makespans(name: str, numbers: tuple[int, int, int], seconds: StageSeconds) -> Array:
    """Seconds of a step for each column of costs; `numbers`: ranks, microbatches and chunks.

    A long schedule is extrapolated from two shorter ones, by the seconds of each further round.
    """
    ranks, count, chunks = numbers
    if not is_long(*numbers):
        return simulate_trace(named_trace(name, ranks, count, chunks), seconds)
    few, many = (num_rounds * ranks + count % ranks for num_rounds in (_STEADY, _LONGEST))
    early, late = (
        simulate_trace(named_trace(name, ranks, num_microbatches, chunks), seconds)
        for num_microbatches in (few, many)
    )
    return late + (late - early) * (count - many) / (many - few)


def is_long(num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether a schedule is extrapolated from shorter ones: those together must be shorter."""
    return num_microbatches > (_STEADY + _LONGEST) * num_ranks


@lru_cache(maxsize=64)
def named_trace(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> ScheduleTrace:
    """The trace of a schedule that is not from a file."""
    return trace_schedule(named_schedule(name, num_ranks, num_microbatches, num_chunks))


def trace_schedule(schedule: Schedule) -> ScheduleTrace:
    """The rows of a schedule, and which row waits for which."""
    order = schedule.order
    actions = _of_loops(order) if isinstance(order, LoopOrder) else _of_steps(schedule)
    later = np.zeros(len(actions.stage), np.int64)
    later[actions.begins[1:]] = 1
    rank = np.cumsum(later)
    row = np.cumsum(actions.opens) - 1 + rank
    codes, width = actions.kind * schedule.num_stages + actions.stage, 4 * schedule.num_stages + 1
    runs, several = _runs(actions, row, codes, width)
    sources = _sources(schedule, actions, row)
    turns, order = _turns(row[actions.begins], sources, int(actions.opens.sum()))
    position = np.full(len(sources[0]), len(order))
    position[order] = np.arange(len(order))
    # Before the first row of a rank is one of the rank before that never runs.
    return ScheduleTrace(
        turns=turns,
        before=position[order - 1],
        sources=tuple(position[source[order]] for source in sources),
        runs=tuple(run[order] for run in runs),
        several=several,
        last=position[np.append(row[actions.begins][1:], row[-1] + 2) - 2],
        counts=_counted(rank, codes, schedule.num_ranks, width),
    )


def _turns(
    starts: Indices, sources: tuple[Indices, ...], num_rows: int
) -> tuple[list[int], Indices]:
    """The rows in the order of their turns, and the end of each turn. Rows are numbered rank after
    rank; after the last row of a rank is one that never runs."""
    source, *extra_sources = sources
    if len(starts) == 1:  # it waits for nobody
        return list(range(num_rows + 1)), np.arange(num_rows)
    done = np.zeros(len(source), bool)
    done[-1] = True
    positions, turns, ends = starts.copy(), list[Indices](), [0]
    while ends[-1] < num_rows:
        ready = done[source[positions]]
        for other in extra_sources:
            ready &= done[other[positions]]
        rows = positions[ready]
        assert len(rows), "a schedule that ends"
        turns.append(rows)
        ends.append(ends[-1] + len(rows))
        done[rows] = True
        positions += ready
    return ends, np.concatenate(turns)


def _sources(schedule: Schedule, actions: _ActionColumns, row: Indices) -> tuple[Indices, ...]:
    """Which row each row waits for: once, or twice if there are pairs."""
    stage, kind, microbatch, opens, begins = actions
    none = int(row[-1]) + 2
    sends, backwards = kind != _W, (kind > 0).astype(np.int64)
    # By stage, with one beyond either end: the row of a microbatch's output, and of its gradient.
    producers = np.full((2, schedule.num_stages + 2, schedule.num_microbatches), none)
    producers[backwards[sends], stage[sends] + 1, microbatch[sends]] = row[sends]
    homes = np.array([-1, *schedule.placement.homes, -1])
    source_stage = stage + 2 * backwards
    moves = sends & (homes[source_stage] >= 0) & (homes[source_stage] != homes[stage + 1])
    sources: list[Indices] = []
    for which in (moves & opens, moves & ~opens):
        indices = np.full(none + 1, none)
        indices[row[which]] = producers[backwards[which], source_stage[which], microbatch[which]]
        sources.append(indices)
    after = np.append(row[begins][1:], none) - 1
    sources[0][after] = after
    return tuple(sources[: 1 + bool((moves & ~opens).any())])


def _runs(
    actions: _ActionColumns, row: Indices, codes: Indices, width: int
) -> tuple[tuple[Indices, ...], Array]:
    """The actions of each row, and the sums of several weight gradients that some rows have."""
    late, num_rows = actions.kind == _W, int(row[-1]) + 3
    runs: list[Indices] = []
    for which in (actions.opens, ~actions.opens & ~late, late):
        selection = np.full(num_rows, width - 1)
        selection[row[which]] = codes[which]
        runs.append(selection)
    times = np.bincount(row[late], minlength=num_rows)
    (several,) = (times > 1).nonzero()
    # Most have two: those of the same two share their sum.
    first = np.full(num_rows, 0)
    first[row[late][::-1]] = codes[late][::-1]
    twice = times[several] == 2
    which = np.where(twice, first[several] * width + runs[2][several], -1 - several)
    _, example, same = np.unique(which, return_index=True, return_inverse=True)
    runs[2][several] = width + same.ravel()
    pair_index = np.full(num_rows, -1)
    pair_index[several[example]] = np.arange(len(example))
    selection = late & (pair_index[row] >= 0)
    sums = _counted(pair_index[row[selection]], codes[selection], len(example), width)
    has_pairs = bool((~actions.opens & ~late).any())
    return tuple(runs if has_pairs else runs[::2]), sums


def _counted(places: Indices, codes: Indices, num_places: int, width: int) -> Array:
    """How often each code occurs at each place."""
    counts = np.bincount(places * width + codes, minlength=num_places * width)
    return counts.astype(float).reshape(num_places, width)


def _of_loops(order: LoopOrder) -> _ActionColumns:
    """The actions of orders in loops, all loops at once."""
    loops = list(chain(*order.loops))
    turns = list(chain(*(loop.turns for loop in loops)))
    count = np.array([loop.times for loop in loops])
    width = np.array([len(loop.turns) for loop in loops])
    size = count * width
    number = np.repeat(np.arange(len(loops)), size)
    offset = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    k, inside = np.divmod(offset, width[number])
    turn = (np.cumsum(width) - width)[number] + inside
    stage = np.array([run.stage for run in turns])[turn]
    kind = np.array([_KINDS[run.kind] for run in turns])[turn]
    microbatch = np.array([run.first for run in turns])[turn] + k
    joined = np.array([run.joined for run in turns])[turn]
    opens = kind != _W
    opens[1:] &= ~joined[:-1]
    sizes = [sum(loop.times * len(loop.turns) for loop in loops) for loops in order.loops]
    begins = np.cumsum([0, *sizes[:-1]])
    return _ActionColumns(stage, kind, microbatch, opens, begins)


def _of_steps(schedule: Schedule) -> _ActionColumns:
    """The actions of an order that is given step by step."""
    steps = [step for order in schedule.order for step in order]
    actions = [action for step in steps for action in actions_of(step)]
    count = len(actions)
    paired = np.fromiter((isinstance(step, Overlap) for step in steps), bool, len(steps))
    first = np.cumsum(1 + paired) - 1 - paired  # of each step's actions
    stage = np.fromiter((record[0] for record in actions), np.int64, count)
    kind = np.fromiter((_KINDS[record[1]] for record in actions), np.int64, count)
    microbatch = np.fromiter((record[2] for record in actions), np.int64, count)
    opens = kind != _W
    opens[first[paired] + 1] = False
    begins = first[np.cumsum([0, *map(len, schedule.order[:-1])])]
    return _ActionColumns(stage, kind, microbatch, opens, begins)


def simulate_trace(trace: ScheduleTrace, seconds: StageSeconds) -> Array:
    """Seconds until all ranks are done, for each column of costs."""
    return trace_ends(trace, seconds).max(axis=0)


def trace_ends(trace: ScheduleTrace, seconds: StageSeconds) -> Array:
    """When each rank is done, for each column of costs."""
    table, columns = seconds.table, seconds.forward.shape[1]
    if len(trace.counts) == 1:  # it waits for nobody
        return trace.counts @ table
    lag, size = seconds.lag, (columns,)
    table = np.concatenate([table, trace.several @ table])
    if columns == 1:  # plain arrays are faster
        table, lag, size = table[:, 0], lag[0], ()
    first, *second, late = (table[run] for run in trace.runs)
    source, *extra_sources = trace.sources
    if columns == 1 and len(trace.counts) <= _FEW_RANKS and not extra_sources:
        return _ends_one_by_one(trace, first, late, float(lag))
    # When the rank is free again after each row, and when its output is on the next one.
    free, sent = (np.empty((len(source) + 1, *size)) for _ in range(2))
    free[-1], sent[-1] = 0.0, -np.inf
    for begin, end in pairwise(trace.turns):
        start = np.maximum(
            free.take(trace.before[begin:end], axis=0), sent.take(source[begin:end], axis=0)
        )
        for other in extra_sources:
            np.maximum(start, sent.take(other[begin:end], axis=0), out=start)
        start += first[begin:end]
        for run_seconds in second:
            start += run_seconds[begin:end]
        np.add(start, lag, out=sent[begin:end])
        np.add(start, late[begin:end], out=free[begin:end])
    return free[trace.last].reshape(-1, columns)


def _ends_one_by_one(trace: ScheduleTrace, first: Array, late: Array, lag: float) -> Array:
    """The same for one column of costs and few ranks, for which numbers are faster than arrays."""
    free, sent = [0.0] * (len(first) + 1), [float("-inf")] * (len(first) + 1)
    befores: list[int] = trace.before.tolist()
    sources: list[int] = trace.sources[0].tolist()
    actions: list[float] = first.tolist()
    late_ones: list[float] = late.tolist()
    rows = zip(befores, sources, actions, late_ones, strict=True)
    for row, (before, source, action, weights) in enumerate(rows):
        start, arrival = free[before], sent[source]
        end = (arrival if arrival > start else start) + action
        sent[row] = end + lag
        free[row] = end + weights
    return np.array(free)[trace.last][:, None]
