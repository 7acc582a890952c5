"""Makes frames, the order of forwards and input gradients, and fits weight gradients into them.

Other ranks wait for forwards and input gradients; weight gradients can be delayed. `eager` makes a
frame by list scheduling: every free rank takes the best step that is ready. `fill` completes a
frame: each rank follows it, and runs a weight gradient if the input of its next step is late enough
or if the memory limit leaves no room for the next forward.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fivefold.core.schedule.clock import Costs
from fivefold.core.schedule.schedule import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Placement

Frame = tuple[tuple[Action, ...], ...]
"""Forwards and input gradients by rank, in order; once filled, weight gradients too."""


class Patience(NamedTuple):
    """How long a rank must expect to idle before it runs a weight gradient instead.

    As a share of the weight gradient's time, by rank: while forwards remain, and while draining.
    """

    running: tuple[float, ...]
    draining: tuple[float, ...]

    @classmethod
    def uniform(cls, num_ranks: int, running: float = 1.0, draining: float = 1.0) -> Patience:
        return cls((running,) * num_ranks, (draining,) * num_ranks)


class _Work(NamedTuple):
    """One action of a frame: slot `result` gets its end time, `source` has that of its input."""

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
    """A frame with its costs looked up once, so that it can be filled many times."""

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
    pending weight gradient (0): a search makes thousands of these and needs few orders.
    """

    lowered: Lowered
    turns: tuple[bytearray, ...]
    makespan: float
    span: float

    def order(self) -> tuple[tuple[Action, ...], ...]:
        """The steps of every rank."""
        return tuple(map(_merge, self.lowered.work, self.turns))


def _merge(work: tuple[_Work, ...], turns: bytearray) -> tuple[Action, ...]:
    frame = iter([item.action for item in work])
    weights = iter(
        [Action(gradient.stage, WEIGHT_GRAD, gradient.microbatch) for gradient in _gradients(work)]
    )
    return tuple(next(frame) if turn else next(weights) for turn in turns)


def _gradients(work: tuple[_Work, ...]) -> list[Action]:
    return [item.action for item in work if not item.forward]


def lower(frame: Frame, placement: Placement, num_microbatches: int, costs: Costs) -> Lowered:
    """Look up costs and transfers of every action. Slots: forwards first, then gradients."""
    stages, homes = placement.num_stages, placement.homes
    half = stages * num_microbatches

    def first(stage: int, kind: str) -> tuple[int, int, float, float, bool]:
        """Slots of the result and of the input of microbatch 0, the transfer and the cost."""
        base = stage * num_microbatches
        if kind == FORWARD:
            moves = stage and homes[stage - 1] != homes[stage]
            lag = costs.transfer[stage - 1] if moves else 0.0
            return base, base - num_microbatches, lag, costs.forward[stage], True
        source, lag = base, 0.0
        if stage < stages - 1:
            source = half + base + num_microbatches
            lag = costs.transfer[stage] if homes[stage + 1] != homes[stage] else 0.0
        return half + base, source, lag, costs.backward[stage], False

    known = {
        (stage, kind): first(stage, kind)
        for stage in range(stages)
        for kind in (FORWARD, INPUT_GRAD)
    }

    def rank_work(actions: tuple[Action, ...]) -> Iterator[_Work]:
        last = max(position for position, action in enumerate(actions) if action.kind == FORWARD)
        for index, action in enumerate(actions):
            stage, kind, microbatch = action
            result, source, lag, cost, forward = known[stage, kind]
            source = source + microbatch if source >= 0 else -1
            weight, late = costs.weight[stage], index > last
            yield _Work(result + microbatch, source, lag, cost, weight, forward, late, action)

    return Lowered(tuple(tuple(rank_work(actions)) for actions in frame), 2 * half)


def fill(lowered: Lowered, chunk_limit: int, patience: Patience) -> Filled | None:
    """Complete the frame; None if it needs more than `chunk_limit` chunks of activations."""
    ranks = range(len(lowered.work))
    ends = [-1.0] * lowered.num_slots
    waiting: dict[int, int] = {}
    positions, live = [0 for _ in ranks], [0 for _ in ranks]
    first, free = [-1.0 for _ in ranks], [0.0 for _ in ranks]
    pending: list[deque[float]] = [deque() for _ in ranks]
    turns = tuple(bytearray() for _ in ranks)
    agenda = [(0.0, rank) for rank in ranks]
    while agenda:
        time_now, rank = heapq.heappop(agenda)
        if free[rank] > time_now:
            time_now = free[rank]
        work = lowered.work[rank]
        if positions[rank] == len(work):
            continue
        result, source, lag, cost, weight, forward, draining, _ = work[positions[rank]]
        arrival = 0.0 if source < 0 else ends[source]
        missing = arrival < 0
        blocked = forward and live[rank] >= chunk_limit
        if pending[rank]:
            due = pending[rank][0]
            share = (patience.draining if draining else patience.running)[rank]
            if blocked or missing or arrival + lag - time_now >= share * due - 1e-9:
                pending[rank].popleft()
                turns[rank].append(0)
                live[rank] -= 1
                free[rank] = time_now + due
                heapq.heappush(agenda, (free[rank], rank))
                continue
        if blocked:
            return None
        if missing:
            waiting[source] = rank
        elif arrival + lag > time_now + 1e-9:
            heapq.heappush(agenda, (arrival + lag, rank))
        else:
            positions[rank] += 1
            turns[rank].append(1)
            if first[rank] < 0:
                first[rank] = time_now
            ends[result] = free[rank] = time_now + cost
            if forward:
                live[rank] += 1
            else:
                pending[rank].append(weight)
            heapq.heappush(agenda, (free[rank], rank))
            if result in waiting:
                heapq.heappush(agenda, (time_now, waiting.pop(result)))
    if any(positions[rank] < len(lowered.work[rank]) for rank in ranks):
        return None
    for rank in ranks:
        turns[rank].extend(bytes(len(pending[rank])))
        free[rank] += sum(pending[rank])
    span = max(end - start for start, end in zip(first, free, strict=True))
    return Filled(lowered, turns, max(free), span)


# List scheduling. Greedy orders waste memory, but where there is enough of it they leave almost
# nothing idle. The search starts from a few of them.


Priority = Literal["gradients", "inner", "forwards"]
"""What goes first: input gradients; forwards of later chunks and then gradients; all forwards."""


def eager(
    placement: Placement, num_microbatches: int, costs: Costs, chunk_limit: int, priority: Priority
) -> Frame | None:
    """A frame by list scheduling; None if memory runs out."""
    return _Ranks(placement, num_microbatches, costs, chunk_limit, priority).run()


class _Ranks:
    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: Costs,
        chunk_limit: int,
        priority: Priority,
    ) -> None:
        self.num, self.costs, self.chunk_limit = num_microbatches, costs, chunk_limit
        self.homes, self.last = placement.homes, placement.num_stages - 1
        ranks = range(placement.num_ranks)
        self.stages: list[list[int]] = [[] for _ in ranks]
        for stage, home in enumerate(self.homes):
            self.stages[home].append(stage)
        self.priority = priority
        self.forwards: list[list[float]] = [[] for _ in self.homes]
        self.gradients: list[list[float]] = [[] for _ in self.homes]
        self.owed: list[list[int]] = [[] for _ in ranks]
        self.live = [0 for _ in ranks]
        self.order: list[list[Action]] = [[] for _ in ranks]
        self.agenda = [(0.0, rank) for rank in ranks]
        self.asleep: set[int] = set()

    def run(self) -> Frame | None:
        while self.agenda:
            self._decide(*heapq.heappop(self.agenda))
        done = all(len(ends) == self.num for ends in self.gradients)
        return tuple(map(tuple, self.order)) if done else None

    def _decide(self, time_now: float, rank: int) -> None:
        """Run the best ready step, else a weight gradient, else wait for the next arrival."""
        candidates = list(self._candidates(rank))
        ready = [(key, stage, kind) for key, stage, kind, at in candidates if at <= time_now + 1e-9]
        if ready:
            _, stage, kind = min(ready)
            end = time_now + (self.costs.forward if kind == FORWARD else self.costs.backward)[stage]
            self._finish(rank, stage, kind, end)
        elif self.owed[rank]:
            end = time_now + self.costs.weight[self.owed[rank].pop(0)]
            self.live[rank] -= 1
        elif candidates:
            end = min(at for *_, at in candidates)
        else:
            self.asleep.add(rank)
            return
        heapq.heappush(self.agenda, (end, rank))

    def _candidates(self, rank: int) -> Iterator[tuple[tuple[int, int], int, str, float]]:
        """Steps whose input exists, as (preference, stage, kind, arrival)."""
        for chunk, stage in enumerate(self.stages[rank]):
            to_come = len(self.stages[rank]) - chunk
            # A forward leaves room for its microbatch's later chunks, or the pipeline locks up.
            if self.live[rank] + to_come <= self.chunk_limit:
                at = self._forward_arrival(stage, rank)
                if at is not None:
                    yield (self._preference(chunk), -stage), stage, FORWARD, at
            at = self._gradient_arrival(stage, rank)
            if at is not None:
                yield (1, -stage), stage, INPUT_GRAD, at

    def _preference(self, chunk: int) -> int:
        """The priority of forwards of this chunk; that of input gradients is 1."""
        return {"gradients": 2, "inner": 0 if chunk else 2, "forwards": 0}[self.priority]

    def _forward_arrival(self, stage: int, rank: int) -> float | None:
        microbatch = len(self.forwards[stage])
        if microbatch == self.num:
            return None
        if stage == 0:
            return 0.0
        if microbatch >= len(self.forwards[stage - 1]):
            return None
        lag = 0.0 if self.homes[stage - 1] == rank else self.costs.transfer[stage - 1]
        return self.forwards[stage - 1][microbatch] + lag

    def _gradient_arrival(self, stage: int, rank: int) -> float | None:
        microbatch = len(self.gradients[stage])
        if microbatch >= len(self.forwards[stage]):
            return None
        if stage == self.last:
            return self.forwards[stage][microbatch]
        if microbatch >= len(self.gradients[stage + 1]):
            return None
        lag = 0.0 if self.homes[stage + 1] == rank else self.costs.transfer[stage]
        return self.gradients[stage + 1][microbatch] + lag

    def _finish(self, rank: int, stage: int, kind: str, end: float) -> None:
        ends = (self.forwards if kind == FORWARD else self.gradients)[stage]
        self.order[rank].append(Action(stage, kind, len(ends)))
        ends.append(end)
        if kind == FORWARD:
            self.live[rank] += 1
            onward = stage + 1
        else:
            self.owed[rank].append(stage)
            onward = stage - 1
        neighbour = self.homes[onward] if 0 <= onward <= self.last else rank
        if neighbour in self.asleep:
            self.asleep.remove(neighbour)
            heapq.heappush(self.agenda, (end, neighbour))
