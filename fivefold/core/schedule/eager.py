"""List scheduling: every free rank takes the best step that is ready.

Greedy orders waste memory where it is scarce, but where there is enough of it they leave almost
nothing idle; the search starts from a few of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from fivefold.core.schedule.action import FORWARD, INPUT_GRAD, Action
from fivefold.core.schedule.costs import Costs
from fivefold.core.schedule.fill import Frame
from fivefold.core.schedule.placement import Placement

Priority = Literal["gradients", "inner", "forwards"]
"""What goes first: input gradients; forwards of later chunks and then gradients; all forwards."""


def eager(
    placement: Placement, num_microbatches: int, costs: Costs, most_held: int, priority: Priority
) -> Frame | None:
    """The order in which ranks run forwards and input gradients; None if memory runs out."""
    return _Ranks(placement, num_microbatches, costs, most_held, priority).run()


class _Ranks:
    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: Costs,
        most_held: int,
        priority: Priority,
    ) -> None:
        self.num, self.costs, self.most_held = num_microbatches, costs, most_held
        self.homes, self.last = placement.homes, placement.num_stages - 1
        ranks = range(placement.num_ranks)
        self.stages: list[list[int]] = [[] for _ in ranks]
        for stage, home in enumerate(self.homes):
            self.stages[home].append(stage)
        self.priority = priority
        self.forwards: list[list[float]] = [[] for _ in self.homes]
        self.gradients: list[list[float]] = [[] for _ in self.homes]
        self.owed: list[list[int]] = [[] for _ in ranks]
        self.held = [0 for _ in ranks]
        self.order: list[list[Action]] = [[] for _ in ranks]
        self.agenda = [(0.0, rank) for rank in ranks]
        self.asleep: set[int] = set()

    def run(self) -> Frame | None:
        while self.agenda:
            self._decide(*heapq.heappop(self.agenda))
        done = all(len(ends) == self.num for ends in self.gradients)
        return tuple(map(tuple, self.order)) if done else None

    def _decide(self, now: float, rank: int) -> None:
        """Run the best ready step, else a weight gradient, else wait for the next arrival."""
        candidates = list(self._candidates(rank))
        ready = [(key, stage, kind) for key, stage, kind, at in candidates if at <= now + 1e-9]
        if ready:
            _, stage, kind = min(ready)
            end = now + (self.costs.forward if kind == FORWARD else self.costs.backward)[stage]
            self._finish(rank, stage, kind, end)
        elif self.owed[rank]:
            end = now + self.costs.weight[self.owed[rank].pop(0)]
            self.held[rank] -= 1
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
            if self.held[rank] + to_come <= self.most_held:
                at = self._forward_arrival(stage, rank)
                if at is not None:
                    yield (self._preference(chunk), -stage), stage, FORWARD, at
            at = self._gradient_arrival(stage, rank)
            if at is not None:
                yield (1, -stage), stage, INPUT_GRAD, at

    def _preference(self, chunk: int) -> int:
        """Where forwards of this chunk stand against input gradients, which are 1."""
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
            self.held[rank] += 1
            onward = stage + 1
        else:
            self.owed[rank].append(stage)
            onward = stage - 1
        neighbour = self.homes[onward] if 0 <= onward <= self.last else rank
        if neighbour in self.asleep:
            self.asleep.remove(neighbour)
            heapq.heappush(self.agenda, (end, neighbour))
