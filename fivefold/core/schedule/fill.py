"""Fits weight gradients into a given order of forwards and input gradients.

Forwards and input gradients carry the pipeline; weight gradients can wait. Each rank follows its
given order, and runs a weight gradient when the next step is not there yet for long enough, or
when the memory limit leaves no room for the next forward.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.core.schedule.action import FORWARD, WEIGHT_GRAD, Action, Step
from fivefold.core.schedule.costs import Costs
from fivefold.core.schedule.placement import Placement

Frame = tuple[tuple[Action, ...], ...]
"""Forwards and input gradients by rank, in order."""


class Patience(NamedTuple):
    """How long a rank must expect to idle before it runs a weight gradient instead.

    As a share of the weight gradient's own time, by rank: while it still has forwards to run, and
    while it drains.
    """

    running: tuple[float, ...]
    draining: tuple[float, ...]

    @classmethod
    def uniform(cls, num_ranks: int, running: float = 1.0, draining: float = 1.0) -> Patience:
        return cls((running,) * num_ranks, (draining,) * num_ranks)


class _Work(NamedTuple):
    """One action of a frame, lowered: slot `result` gets its end, slot `source` holds its input."""

    result: int
    source: int
    lag: float
    cost: float
    weight: float
    forward: bool
    draining: bool
    action: Action


@dataclass(frozen=True)
class Lowered:
    """A frame with its costs looked up once, to be filled many times."""

    work: tuple[tuple[_Work, ...], ...]
    num_slots: int

    @property
    def num_actions(self) -> int:
        """Forwards and input gradients, and a weight gradient for each of the latter."""
        return 3 * sum(map(len, self.work)) // 2


@dataclass(frozen=True)
class Filled:
    """A completed frame and how long it takes.

    `turns` says for each step of a rank whether it is the next of the frame (1) or the oldest
    weight gradient that is due (0): a search makes thousands of these and reads few orders.
    """

    lowered: Lowered
    turns: tuple[bytearray, ...]
    makespan: float
    span: float

    def order(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of every rank."""
        return tuple(map(_merge, self.lowered.work, self.turns))


def _merge(work: tuple[_Work, ...], turns: bytearray) -> tuple[Step, ...]:
    frame = iter([item.action for item in work])
    weights = iter([Action(each.stage, WEIGHT_GRAD, each.microbatch) for each in _gradients(work)])
    return tuple(next(frame) if turn else next(weights) for turn in turns)


def _gradients(work: tuple[_Work, ...]) -> list[Action]:
    return [item.action for item in work if not item.forward]


def lower(frame: Frame, placement: Placement, num_microbatches: int, costs: Costs) -> Lowered:
    """Look up costs and transfers of every action. Slots: forwards first, then gradients."""
    stages, homes = placement.num_stages, placement.homes
    half = stages * num_microbatches

    def work(action: Action, draining: bool) -> _Work:
        stage, kind, microbatch = action
        here, weight = stage * num_microbatches + microbatch, costs.weight[stage]
        if kind == FORWARD:
            source = here - num_microbatches if stage else -1
            lag = costs.transfer[stage - 1] if stage and homes[stage - 1] != homes[stage] else 0.0
            return _Work(here, source, lag, costs.forward[stage], weight, True, draining, action)
        if stage == stages - 1:
            source, lag = here, 0.0
        else:
            source = half + here + num_microbatches
            lag = costs.transfer[stage] if homes[stage + 1] != homes[stage] else 0.0
        cost = costs.backward[stage]
        return _Work(half + here, source, lag, cost, weight, False, draining, action)

    def rank_work(actions: tuple[Action, ...]) -> tuple[_Work, ...]:
        last = max(place for place, action in enumerate(actions) if action.kind == FORWARD)
        return tuple(work(action, place > last) for place, action in enumerate(actions))

    return Lowered(tuple(map(rank_work, frame)), 2 * half)


def fill(lowered: Lowered, most_held: int, patience: Patience) -> Filled | None:
    """Complete the frame; None where it cannot keep to `most_held` chunks of activations."""
    ranks = range(len(lowered.work))
    ends = [-1.0] * lowered.num_slots
    waiting: dict[int, int] = {}
    place, held = [0 for _ in ranks], [0 for _ in ranks]
    first, free = [-1.0 for _ in ranks], [0.0 for _ in ranks]
    pending: list[deque[float]] = [deque() for _ in ranks]
    turns = tuple(bytearray() for _ in ranks)
    agenda = [(0.0, rank) for rank in ranks]
    while agenda:
        now, rank = heapq.heappop(agenda)
        now = max(now, free[rank])
        if place[rank] == len(lowered.work[rank]):
            continue
        result, source, lag, cost, weight, forward, draining, _ = lowered.work[rank][place[rank]]
        arrival = 0.0 if source < 0 else ends[source]
        missing = arrival < 0
        blocked = forward and held[rank] >= most_held
        if pending[rank]:
            due = pending[rank][0]
            share = (patience.draining if draining else patience.running)[rank]
            if blocked or missing or arrival + lag - now >= share * due - 1e-9:
                pending[rank].popleft()
                turns[rank].append(0)
                held[rank] -= 1
                free[rank] = now + due
                heapq.heappush(agenda, (free[rank], rank))
                continue
        if blocked:
            return None
        if missing:
            waiting[source] = rank
        elif arrival + lag > now + 1e-9:
            heapq.heappush(agenda, (arrival + lag, rank))
        else:
            place[rank] += 1
            turns[rank].append(1)
            if first[rank] < 0:
                first[rank] = now
            ends[result] = free[rank] = now + cost
            if forward:
                held[rank] += 1
            else:
                pending[rank].append(weight)
            heapq.heappush(agenda, (free[rank], rank))
            if result in waiting:
                heapq.heappush(agenda, (now, waiting.pop(result)))
    if any(place[rank] < len(lowered.work[rank]) for rank in ranks):
        return None
    for rank in ranks:
        turns[rank].extend(bytes(len(pending[rank])))
        free[rank] += sum(pending[rank])
    span = max(end - start for start, end in zip(first, free, strict=True))
    return Filled(lowered, turns, max(free), span)
