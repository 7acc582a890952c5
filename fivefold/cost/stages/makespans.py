"""The longest paths of a pipeline schedule, which bound its time from below.

A step of a pipeline is as long as the longest chain of actions that wait for each other. In every
schedule few kinds of chains can be the longest: the first microbatch runs to some rank, that rank
works without a pause, and the last microbatch runs out. A path is a row that says how often each
cost is on it; many layouts are then timed at once by matmuls of rows with costs. Not all chains of
a schedule are followed, so the result is a bound, and almost never above the simulated time.

Legend: p ranks, v chunks per rank, m microbatches; k is every rank at once, along the first axis.
F, I, W of a stage: forward, input gradient with recomputation, weight gradient.

The clock for many costs at once: one pass over the actions of a schedule serves all of them.

It gives the same as `core.schedule.clock`. The order of a schedule does not depend on costs, so it
is found once which rows are run together: in each turn, all ranks run their next row whose inputs
were made in turns before. A row is a forward, a backward, or an overlapped pair of both. No rank
waits for weight gradients of another: they only keep their own rank busy after the row before them.

Orders in loops are expanded into arrays, without an object for each action.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.plan import named_schedule
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    HALF_BLOCKS,
    INPUT_GRAD,
    MIN_BLOCK,
    PERIOD,
    WEIGHT_GRAD,
    BuildingBlock,
    LoopOrder,
    Overlap,
    Schedule,
    actions_of,
    path,
)
from fivefold.cost import Array, Flags


class StageRows(NamedTuple):
    """Rows of the F, I and W of every stage, in order. `lag` is the row of one message."""

    forward: Array
    inputs: Array
    weights: Array
    lag: Array

    @property
    def joined(self) -> StageRows:
        """With input and weight gradients as one backward."""
        return self._replace(inputs=self.inputs + self.weights, weights=0 * self.weights)

    @property
    def total(self) -> Array:
        return self.forward + self.inputs + self.weights


class ScheduleSize(NamedTuple):
    """Size of a schedule, and the costs at which paths are compared, in columns."""

    p: int
    v: int
    m: int
    samples: Array


def longest(paths: Array, samples: Array) -> Array:
    """The paths that are the longest for some of the sampled costs."""
    mask = np.zeros(len(paths), bool)
    mask[(paths @ samples).argmax(axis=0)] = True
    return paths[mask]


def _ranks(p: int) -> Array:
    return np.arange(float(p))[:, None]


def _before(rows: Array) -> Array:
    return rows.cumsum(axis=0) - rows


def _after(rows: Array) -> Array:
    return rows.sum(axis=0) - rows.cumsum(axis=0)


def _both(first: Array, then: Array) -> Array:
    """Every path of `first`, followed by every path of `then`."""
    return (first[:, None] + then[None]).reshape(-1, first.shape[1])


def _in_rounds(rows: Array, count: Array, p: int) -> Array:
    """The first `count` actions of each rank: p of a chunk, then p of the next; rows by chunk."""
    v = len(rows)
    rounds, remainder = np.divmod(count, p * v)
    of_chunk = rounds * p + np.clip(remainder - p * np.arange(v), 0, p)
    return np.einsum("kc,ckq->kq", of_chunk, rows)


def gpipe(stages: StageRows, size: ScheduleSize) -> Array:
    """All forwards, then all backwards: two independent legs."""
    legs = (stages.forward, (stages.inputs + stages.weights)[::-1])
    return _both(*(longest(_leg(rows, stages.lag, size), size.samples) for rows in legs))


def _leg(rows: Array, lag: Array, size: ScheduleSize) -> Array:
    """m microbatches through all stages; the rank that sets the pace may change once."""
    p, v, m, _ = size
    total = rows.sum(axis=0)
    one_stage = total + (m - 1) * rows + (p * v - 1) * lag
    if v == 1:
        return one_stage
    chunks = rows.reshape(v, p, -1)
    start, end = _before(chunks[0]), _after(chunks[-1])
    until = m * chunks.cumsum(axis=0)
    hops = chunks[:-1].cumsum(axis=1)
    first = start + until[:-1] - hops
    then = until[-1] - until[:-1] + end + hops + (p - 1) * lag
    paths = [one_stage, start + until[-1] + end + (p - 1) * lag]
    return np.concatenate([*paths, _downwards(first, then, size.samples)])


def _downwards(first: Array, then: Array, samples: Array) -> Array:
    """Paths that leave rank k and continue at a later one, with the best k for each; by chunk."""
    seconds = first @ samples
    best = np.maximum.accumulate(seconds, axis=1)
    rank = (best + then @ samples).argmax(axis=1)  # of each chunk and sample
    places = np.where(seconds == best, _ranks(len(first[0])), 0).astype(np.int64)
    chunk, sample = np.ogrid[: len(first), : samples.shape[1]]
    start = np.maximum.accumulate(places, axis=1)[chunk, rank, sample]
    pairs = np.zeros((*first.shape[:2], first.shape[1]), bool)
    pairs[chunk, start, rank] = True
    chunk, start, rank = pairs.nonzero()
    return first[chunk, start] + then[chunk, rank]


def one_forward_one_backward(stages: StageRows, size: ScheduleSize) -> Array:
    p, _, m, _ = size
    k = _ranks(p)
    paths = [_looped(stages.joined, size, p - k, 0 * k), _last_forward(stages, size, p - k)]
    # A rank waits for a message whenever it has no other microbatch in flight.
    stage_seconds = stages.total
    trip = (stage_seconds + _after(stage_seconds) + 2 * (p - 1 - k) * stages.lag) / (p - k)
    turns = stage_seconds.sum(axis=0) + 2 * (p - 1) * stages.lag + (m - 1) * trip
    return np.concatenate([*paths, turns[m > (p - k)[:, 0]]])


def interleaved(stages: StageRows, size: ScheduleSize) -> Array:
    p, v, _, _ = size
    ahead = (v - 1) * p + 2 * (p - 1 - _ranks(p)) + 1
    joined = _looped(stages.joined, size, ahead, 0 * ahead)
    return np.concatenate([joined, _last_forward(stages, size, ahead)])


def zb_h1(stages: StageRows, size: ScheduleSize) -> Array:
    return _looped(stages, size, size.v * size.p - _ranks(size.p), deferred=_ranks(size.p))


def zb_h2(stages: StageRows, size: ScheduleSize) -> Array:
    k = _ranks(size.p)
    return _looped(stages, size, 2 * (size.p - k) - 1, deferred=2 * k)


def _looped(stages: StageRows, size: ScheduleSize, ahead: Array, deferred: Array) -> Array:
    """Rank k runs `ahead` forwards first and defers `deferred` weight gradients."""
    p, v, m, samples = size
    k, n, lag = _ranks(p), m * v, stages.lag
    forward, inputs, weights = (rows.reshape(v, p, -1) for rows in stages[:3])
    late: Array = np.minimum(np.minimum(deferred, np.maximum(0, n - ahead)), n - 1) + 1
    inside = (late <= m).astype(float)
    last = inside * weights[0] + (1 - inside) * weights.max(axis=0)
    fill, out = _before(forward[0]), _before(inputs[0]) + weights[0, 0]
    passes, work, spent = (m * rows.sum(axis=0) for rows in (forward, inputs, weights))
    # The first microbatch comes back to the rank, which has run its forwards meanwhile.
    start = _warm_up(forward, forward, min(m, p), samples)
    # Or the rank waits for it in every chunk.
    alone = forward.sum(axis=(0, 1)) + (v - 1) * p * lag
    turn = start + forward[-1] + _after(forward[-1])
    turn = longest(np.concatenate([turn, alone[None]]), samples)
    left = passes - _in_rounds(forward, np.minimum(ahead, n), p)
    remainder = left + work + spent
    paths = [
        fill + passes + work + spent - late * last + out + 2 * k * lag,
        fill + passes + work + spent + k * lag,
        _both(turn, _after(inputs[-1]) + remainder + (2 * (p - 1) - k) * lag),
    ]
    if v == 1 or not deferred.any():  # with chunks it is not known which gradients are late
        paths.append(_both(turn, _drain(stages, size, remainder, late, last)))
    return np.concatenate(paths)


def _drain(
    stages: StageRows, size: ScheduleSize, remainder: Array, late: Array, last: Array
) -> Array:
    """From the first gradient on: the `rest` of a rank, whose end may be on a rank before it.

    `late`: how many weight gradients follow the last input gradient; `last`: the row of one.
    """
    p, v, m, samples = size
    inputs, weights = (rows.reshape(v, p, -1) for rows in stages[1:3])
    backward = inputs + weights
    last_round = min(m, p) * (backward.sum(axis=0) - backward[-1]) + late * weights[-1]
    hops = _before(inputs[-1])
    paced = _after(inputs[-1]) + remainder - last_round + hops + 2 * (p - 1) * stages.lag
    # With time reversed, the rest of the last round is a warm-up.
    end = _warm_up(backward, inputs, min(m, p), samples) - hops + weights[0, 0]
    end = end + late * (weights[-1] - last)
    alone = inputs[:-1].sum(axis=(0, 1)) + (v - 1) * p * stages.lag + weights[0, 0]
    return np.concatenate([_downwards(end[None], paced[None], samples), paced + alone])


def _last_forward(stages: StageRows, size: ScheduleSize, ahead: Array) -> Array:
    """The last forward of a rank goes to the last rank and comes back as a gradient."""
    p, v, m, samples = size
    forward, backward = (rows.reshape(v, p, -1) for rows in stages.joined[:2])
    before = _in_rounds(backward[::-1], np.maximum(0, m * v - ahead), p)
    after = _warm_up(backward, backward, min(m, p), samples)
    turn = _after(forward[-1]) + backward[-1] + _after(backward[-1])
    start = _before(forward[0]) + m * forward.sum(axis=0)
    return start + before + turn + after + 2 * (p - 1) * stages.lag


def _warm_up(order: Array, passing: Array, count: int, samples: Array) -> Array:
    """Until a rank has run `each` microbatches of all its chunks but the last.

    An earlier rank may set the pace for the first chunks; `passing` are the rows of one microbatch
    that goes from there to this rank.
    """
    v = len(order)
    until = count * order.cumsum(axis=0)
    start = _before(passing[0])
    best = start + (until[-2] if v > 1 else 0.0)
    if v < 3:
        return best
    mean, ranks = samples.mean(axis=1), np.arange(len(start))
    hops = passing[: v - 2].cumsum(axis=1)
    left = start + until[: v - 2] - hops
    seconds = left @ mean
    first = np.maximum.accumulate(seconds, axis=1)
    position = np.maximum.accumulate(np.where(seconds == first, ranks, 0), axis=1)
    moved = left[np.arange(v - 2)[:, None], position] + hops + until[-2] - until[: v - 2]
    every = np.concatenate([best[None], moved])
    return every[(every @ mean).argmax(axis=0), ranks]


class _Fold(NamedTuple):
    """The two stages of each rank of a V placement: `near` the input, and `far` from it."""

    near: StageRows
    far: StageRows

    @property
    def total(self) -> Array:
        return self.near.total + self.far.total


def _folded(stages: StageRows) -> _Fold:
    half = len(stages.forward) // 2
    near = StageRows(*(rows[:half] for rows in stages[:3]), lag=stages.lag)
    return _Fold(near, StageRows(*(rows[: -half - 1 : -1] for rows in stages[:3]), lag=stages.lag))


def _first_gradient(fold: _Fold, m: int, samples: Array) -> Array:
    """Until the first microbatch is back on the first rank; some rank runs its forwards first."""
    near, far = fold.near.forward, fold.far.forward
    p, k = len(near), _ranks(len(near))
    arrivals = _before(near) + np.minimum(m, 2 * (p - k) - 1) * near + np.cumsum(far, axis=0)
    return longest(arrivals + 2 * k * fold.near.lag, samples)


def zb_v(stages: StageRows, size: ScheduleSize) -> Array:
    p, _, m, samples = size
    fold, k, lag = _folded(stages), _ranks(p), stages.lag
    (near, far), inner = fold, p - k
    start = np.minimum(m, 2 * inner - 1)
    done = (start + np.minimum(k, m - start)) * near.forward + np.minimum(m, k + 1) * far.forward
    gradients = np.cumsum(far.inputs, axis=0)
    paced = gradients + m * fold.total - done - far.inputs + k * lag
    short = max(0, m - (max(m, 2 * p - 1) - p))  # microbatches after the steady state
    late = np.maximum(0, short - inner)
    weight_seconds = (late + 1) * near.weights + late * far.weights
    up = _before(near.inputs) + near.weights[0] + k * lag
    ends = [paced, paced - weight_seconds + up]
    # Or the last gradient goes to the last rank, and comes back from there.
    home = _after(far.inputs) + near.inputs.sum(axis=0) + near.weights[0] + (2 * (p - 1) - k) * lag
    if m >= 2 * p - 1:
        remainder = inner * near.inputs + p * near.weights + np.maximum(k, 1) * far.weights
        beyond = _after(far.inputs) + near.inputs[-1] + weight_seconds[-1] + (p - 1 - k) * lag
        ends += [paced - remainder + beyond, paced - remainder + home]
    else:
        turned = np.maximum(0, m - inner) * (near.inputs + near.weights)
        first = gradients + m * (near.forward + far.forward) - done + turned + k * lag
        first = first + (m - 1) * (far.inputs + far.weights)
        ends.append((first + far.weights[-1] + home)[m <= 2 * p - 1 - k[:, 0]])
    return _both(_first_gradient(fold, m, samples), longest(np.concatenate(ends), samples))


def dualpipe_v(stages: StageRows, size: ScheduleSize) -> Array:
    p, _, m, samples = size
    fold, k, lag = _folded(stages), _ranks(p), stages.lag
    near, far = fold
    done = (2 * (p - 1 - k) + k + 1) * near.forward + (k + 1) * far.forward
    gradients = np.cumsum(far.inputs, axis=0)
    paced = gradients + m * fold.total - done - far.inputs + k * lag
    backward, other = near.inputs + near.weights, far.inputs + far.weights
    # After the last shared slot: up to the first rank, where the step ends or gradients go around.
    up = (
        paced
        - p * backward
        - (k + 1) * other
        + _before(far.forward + backward)
        + other[0]
        + k * lag
    )
    round_trip = _after(far.inputs)[0] + near.inputs.sum(axis=0) + near.weights[0]
    # Some rank may set the pace of the shared slots, between two trips to the last rank.
    shared = np.cumsum(fold.total, axis=0)
    offset = gradients[-1] - far.inputs[-1] + 2 * fold.total[-1] + (4 * (p - 1) - 2 * k) * lag
    offset = offset + shared[-1] - fold.total[-1] - shared + (m - 2 * p + k) * fold.total
    up = np.concatenate([up, (offset + _before(far.forward + backward)[-1] + other[0])[:-1]])
    ends = [paced, up + p * backward[0], up + round_trip + 2 * (p - 1) * lag]
    return _both(_first_gradient(fold, m, samples), longest(np.concatenate(ends), samples))


def dualpipe(stages: StageRows, size: ScheduleSize) -> Array:
    """Two directions: each half of the ranks is a V with half of the microbatches."""
    return dualpipe_v(stages, size._replace(p=size.p // 2, m=size.m // 2))


def v_half(stages: StageRows, size: ScheduleSize) -> Array:
    p, _, m, _ = size
    if p % 2 and m < p:  # any building block fits, and only the schedule knows which one it took
        return _work_of_v(stages, size)
    return _repeated_block(stages, size, HALF_BLOCKS[p % 2])


def _work_of_v(stages: StageRows, size: ScheduleSize) -> Array:
    """A rank of a V that never waits once it has begun."""
    fold, k = _folded(stages), _ranks(size.p)
    return _before(fold.near.forward) + k * stages.lag + size.m * fold.total


def _repeated_block(stages: StageRows, size: ScheduleSize, block: BuildingBlock) -> Array:
    """Every microbatch repeats the building block; when it is back on a rank, a later one starts.

    A leg is a way out of a rank and back to it: the forward or the gradient around the bottom of
    the V, both around its top, or all of it. The rank then works until the next start.
    """
    p, _, m, _ = size
    (near, far), lag, k = _folded(stages), stages.lag, _ranks(p)
    slots = _slots(block, p)
    # From the start of the step to the end of each action of a rank.
    once = np.concatenate([stages.forward, stages.inputs[::-1]])
    hops = np.concatenate([k, 2 * p - 2 - k[::-1], 2 * p - 2 + k, 4 * p - 4 - k[::-1]])
    own = (near.forward, far.forward, far.inputs, near.inputs)
    until = np.split(np.cumsum(once, axis=0) + hops * lag, 4)
    ends = [rows[:: -1 if index % 2 else 1] for index, rows in enumerate(until)]
    home = ends[3][0] + stages.weights[0]
    paths = [_work_of_v(stages, size)]
    for first, last in ((0, 1), (2, 3), (1, 2), (0, 3)):
        shift = np.floor((slots[last] - slots[first]) / PERIOD) + 1
        stop = slots[first] + PERIOD * shift
        leg = ends[last] - ends[first] + own[first]
        rounds = (m - 1) // shift
        chain = home + rounds * leg
        for slot, rows in zip(slots, own, strict=True):
            # At both ends of the step, some of the microbatches in between are missing.
            num_rounds = np.maximum(0, rounds - np.ceil(abs(slots[last] - slot) / PERIOD / shift))
            chain = chain + _num_passes(slot, slots[last] + 1, stop) * num_rounds * rows
        paths.append(chain)
    # Before its first gradient a rank runs only forwards.
    early = [np.minimum(m, _num_passes(slot, slot, slots[2])) for slot in slots[:2]]
    paced = ends[2] - far.inputs + m * (near.total + far.total)
    return np.concatenate([*paths, paced - early[0] * near.forward - early[1] * far.forward])


@cache
def _slots(block: BuildingBlock, p: int) -> Array:
    """Slots of a microbatch on each rank: forward near and far, gradient far and near."""
    stages = [(near, 2 * p - 1 - near) for near in range(p)]
    ways = [[(FORWARD, a), (FORWARD, b), (INPUT_GRAD, b), (INPUT_GRAD, a)] for a, b in stages]
    table = [[taken[key] for key in leg] for leg, taken in zip(ways, path(block, p), strict=True)]
    return np.array(table, float).T[:, :, None]


def _num_passes(slot: Array, start: Array, stop: Array) -> Array:
    """How often a repeated action occurs from slot `start` to before slot `stop`."""
    return np.ceil((stop - slot) / PERIOD) - np.ceil((start - slot) / PERIOD)


def _work_of_loop(stages: StageRows, size: ScheduleSize) -> Array:
    """A rank of a loop that never waits once it has begun."""
    p, v, m, _ = size
    start = _before(stages.forward[:p]) + _ranks(p) * stages.lag
    return start + m * stages.total.reshape(v, p, -1).sum(axis=0)


# By the name in a schedule's family; "loop" and "V" fit every schedule on that placement.
PATHS: dict[str, Callable[[StageRows, ScheduleSize], Array]] = {
    "loop": _work_of_loop,
    "V": _work_of_v,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": lambda stages, size: _repeated_block(stages, size, MIN_BLOCK),
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "never drained": lambda stages, size: size.m * stages.total,
}


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
