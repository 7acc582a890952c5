"""The clock: plays a schedule with the costs of its stages, and reports time and memory.

A step starts when its rank is free and its inputs have arrived: a forward needs the forward of the
previous stage; a backward needs its own forward and the backward of the next stage; a weight
gradient needs its input gradient. An edge between two ranks costs a transfer, as pure latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fivefold.core import IllegalSchedule
from fivefold.core.schedule.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Loop,
    LoopOrder,
    Overlap,
    Placement,
    Schedule,
    Step,
    actions_of,
    alike_turns,
    merged_steps,
)


@dataclass(frozen=True)
class Costs:
    """Costs by stage, in any unit: forward, input and weight gradient, transfer to the next stage.

    `overlap` is the time of a forward and a backward that run as one step, over the sum of the two.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    overlap: float = 1.0

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        times: tuple[float, float, float] = (1.0, 1.0, 1.0),
        transfer: float = 0.0,
        overlap: float = 1.0,
    ) -> Costs:
        """Equal stages; `times` are for 1/p of the model, so a chunk takes its share."""
        stages = placement.num_stages
        share = placement.num_ranks / stages
        forward, backward, weight = ((time * share,) * stages for time in times)
        return cls(forward, backward, weight, (transfer,) * stages, overlap)

    def of(self, step: Step) -> float:
        """How long a rank is busy with a step."""
        if isinstance(step, Overlap):
            return self.overlap * (self.of(step.forward) + self.of(step.backward))
        if step.kind == FORWARD:
            return self.forward[step.stage]
        if step.kind == INPUT_GRAD:
            return self.backward[step.stage]
        if step.kind == WEIGHT_GRAD:
            return self.weight[step.stage]
        return self.backward[step.stage] + self.weight[step.stage]


Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class Goal:
    """What a search minimises: the costs of each placement, the most activations per rank (in
    microbatches of a full stage), and which time."""

    costs_of: Callable[[Placement], Costs]
    memory_limit: float | None = None
    objective: Objective = "makespan"


_MOST_FILLED = 100_000  # actions


class Wait(NamedTuple):
    """An idle slot: `rank` waits from `start` to `end`, at `step`, for the result of `cause`."""

    rank: int
    start: float
    end: float
    step: Step
    cause: Action


@dataclass(frozen=True)
class Timeline:
    """When every step of every rank starts and ends, in the order of the schedule."""

    schedule: Schedule
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From zero to the last end: the time of a step if a global norm separates steps."""
        return max(ends[-1] for ends in self.ends)

    @cached_property
    def span(self) -> float:
        """The longest time from a rank's own first start to its own last end."""
        return max(
            ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @cached_property
    def ideal(self) -> float:
        """The work of the busiest rank: the makespan of a pipeline without a bubble."""
        return max(sum(map(self.costs.of, steps)) for steps in self.schedule.order)

    @property
    def bubble_makespan(self) -> float:
        """Idle share of the makespan."""
        return 1 - self.ideal / self.makespan

    @property
    def bubble_span(self) -> float:
        """Idle share of the span."""
        return 1 - self.ideal / self.span

    @property
    def bubble_ratio(self) -> float:
        """Idle time over the ideal time: the other convention of the literature."""
        return self.makespan / self.ideal - 1

    def waits(self, longer_than: float = 0.0) -> Iterator[Wait]:
        """The idle slots before each rank's last step, with the action that ends them."""
        ends = {
            action: end
            for steps, ends in zip(self.schedule.order, self.ends, strict=True)
            for step, end in zip(steps, ends, strict=True)
            for action in actions_of(step)
        }
        least = max(longer_than, 1e-9 * self.makespan)
        for rank, steps in enumerate(self.schedule.order):
            free = 0.0
            for step, start, end in zip(steps, self.starts[rank], self.ends[rank], strict=True):
                if start > free + least:
                    causes = [cause for cause in _causes(step) if cause in ends]
                    last = max(
                        causes, key=lambda cause: (ends[cause] + self._lag(cause, rank), cause)
                    )
                    yield Wait(rank, free, start, step, last)
                free = end

    def _lag(self, cause: Action, rank: int) -> float:
        if self.schedule.rank_of(cause.stage, cause.microbatch) == rank:
            return 0.0
        return self.costs.transfer[cause.stage - (cause.kind != FORWARD)]


def needs(action: Action) -> tuple[Action, ...]:
    """What must run before this action, including stages beyond the ends."""
    stage, kind, microbatch = action
    if kind == FORWARD:
        return (Action(stage - 1, FORWARD, microbatch),)
    if kind == WEIGHT_GRAD:
        return (Action(stage, INPUT_GRAD, microbatch),)
    return (Action(stage, FORWARD, microbatch), Action(stage + 1, BACKWARD, microbatch))


def _causes(step: Step) -> Iterator[Action]:
    """A gradient arrives from a full backward or from an input gradient: both are named."""
    for cause in (cause for action in actions_of(step) for cause in needs(action)):
        yield cause
        if cause.kind == BACKWARD:
            yield cause._replace(kind=INPUT_GRAD)


def steady_bubble(timeline: Timeline, make: Callable[[int, int, int], Schedule]) -> float:
    """Idle share of each further window of microbatches, if the pipeline does not drain.

    `make` makes the same schedule for any (stages, microbatches, chunks).
    """
    schedule = timeline.schedule
    ranks, window, chunks = schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks
    # Twice the ranks fill any pipeline; a very deep one would take too long to fill.
    filled = max(window, min(2 * ranks, _MOST_FILLED // ranks))
    once, twice = (
        play(make(ranks, count, chunks), timeline.costs).makespan
        for count in (filled, filled + window)
    )
    return max(0.0, 1 - timeline.ideal / (twice - once))


def play(schedule: Schedule, costs: Costs) -> Timeline:
    """Run the schedule; a deadlock raises an error that names who waits for what."""
    player = _Player(schedule, costs)
    woken = list(range(schedule.num_ranks))
    while woken:
        woken += player.advance(woken.pop())
    player.require_end()
    return Timeline(
        schedule, costs, tuple(map(tuple, player.starts)), tuple(map(tuple, player.ends))
    )


class _Player:
    """Advances each rank as far as possible; the result that a rank waits for wakes it.

    Results have numbered slots, forwards first, then gradients. A search plays millions of actions,
    hence the flat tables and the one long loop.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.overlap = schedule, costs.overlap
        self.starts: list[list[float]] = [[] for _ in schedule.order]
        self.ends: list[list[float]] = [[] for _ in schedule.order]
        self.gradients = schedule.num_stages * schedule.num_microbatches
        self.done = [-1.0] * (2 * self.gradients)
        self.waiting: dict[int, list[int]] = {}
        full_backward = tuple(map(sum, zip(costs.backward, costs.weight, strict=True)))
        self.costs = {
            FORWARD: costs.forward,
            INPUT_GRAD: costs.backward,
            WEIGHT_GRAD: costs.weight,
            BACKWARD: full_backward,
        }
        homes = schedule.placement.homes
        self.lags = [
            0.0 if homes[stage] == homes[stage + 1] else costs.transfer[stage]
            for stage in range(len(homes) - 1)
        ]

    def advance(self, rank: int) -> list[int]:
        """Play one rank until it must wait; return the ranks that its results wake."""
        starts, ends, woken = self.starts[rank], self.ends[rank], list[int]()
        time_now = ends[-1] if ends else 0.0
        done, waiting, costs, lags = self.done, self.waiting, self.costs, self.lags
        num, last, offset = self.schedule.num_microbatches, len(lags), self.gradients
        steps = self.schedule.order[rank]
        for index in range(len(ends), len(steps)):
            actions = actions_of(steps[index])
            cost = 0.0
            for stage, kind, microbatch in actions:
                position = stage * num + microbatch
                if kind == FORWARD:
                    slot, lag = (position - num, lags[stage - 1]) if stage else (-1, 0.0)
                elif kind == WEIGHT_GRAD:
                    slot, lag = offset + position, 0.0
                elif stage == last or done[position] < 0:
                    slot, lag = position, 0.0
                else:
                    slot, lag = offset + position + num, lags[stage]
                if slot >= 0:
                    arrival = done[slot]
                    if arrival < 0:
                        waiting.setdefault(slot, []).append(rank)
                        return woken
                    if arrival + lag > time_now:
                        time_now = arrival + lag
                cost += costs[kind][stage]
            starts.append(time_now)
            time_now += cost if len(actions) == 1 else self.overlap * cost
            ends.append(time_now)
            for stage, kind, microbatch in actions:
                if kind != WEIGHT_GRAD:
                    slot = stage * num + microbatch + (0 if kind == FORWARD else offset)
                    done[slot] = time_now
                    if slot in waiting:
                        woken += waiting.pop(slot)
        return woken

    def require_end(self) -> None:
        """Name every rank that is stuck, and at what."""
        stuck = [
            f"rank {rank} waits at {steps[len(ends)]} for {self._missing(rank)}"
            for rank, (steps, ends) in enumerate(zip(self.schedule.order, self.ends, strict=True))
            if len(ends) < len(steps)
        ]
        if stuck:
            raise IllegalSchedule(
                "the schedule deadlocks: " + "; ".join(stuck) + "; put what is waited for first"
            )

    def _missing(self, rank: int) -> Action:
        (slot,) = (slot for slot, ranks in self.waiting.items() if rank in ranks)
        num = self.schedule.num_microbatches
        stage, microbatch = slot % self.gradients // num, slot % num
        if slot < self.gradients:
            return Action(stage, FORWARD, microbatch)
        backward = Action(stage, BACKWARD, microbatch)
        written = {
            action for steps in self.schedule.order for step in steps for action in actions_of(step)
        }
        return backward if backward in written else backward._replace(kind=INPUT_GRAD)


def memory_levels(
    steps: tuple[Step, ...], unit: float = 1.0, after_input_grad: float = 1.0
) -> list[float]:
    """Activations in memory while each step runs, from the start of F to the end of W or B.

    A forward adds `unit`; an input gradient leaves `after_input_grad` of it for the weight
    gradient, which releases the rest.
    """
    left = unit * after_input_grad
    return _levels_from(0.0, steps, lambda stage: unit, lambda stage: left)[0]


StageBytes = Callable[[int], float]


def _levels_from(
    live: float, steps: Iterable[Step], saved: StageBytes, deferred: StageBytes
) -> tuple[list[float], float]:
    """The same from a level on, and the level after the last step: the forward of a stage adds
    `saved`, and its input gradient leaves `deferred` for the weight gradient."""
    levels = list[float]()
    for step in steps:
        after = live
        for stage, kind, _ in actions_of(step):
            change = _change(kind, saved(stage), deferred(stage))
            after += change
            live += change if kind == FORWARD else 0.0
        levels.append(live)
        live = after
    return levels, live


def _change(kind: str, saved: float, deferred: float) -> float:
    """By how much an action changes the level."""
    if kind == FORWARD:
        return saved
    return -saved if kind == BACKWARD else deferred - saved if kind == INPUT_GRAD else -deferred


def peak_activations(schedule: Schedule, after_input_grad: float = 1.0) -> list[float]:
    """Peak activations of each rank, in microbatches of a full stage (1/p of the model)."""
    unit = schedule.num_ranks / schedule.num_stages
    left = unit * after_input_grad
    sizes: tuple[StageBytes, StageBytes] = (lambda stage: unit, lambda stage: left)
    return [round(_peak(_loops(schedule, rank), *sizes), 9) for rank in range(schedule.num_ranks)]


def peak_held(schedule: Schedule, rank: int, saved: StageBytes, deferred: StageBytes) -> float:
    """The most that a rank holds, as it runs: an input and a weight gradient that follow one
    another are one backward, which defers nothing."""
    if not isinstance(schedule.order, LoopOrder):
        return _peak([(1, merged_steps(schedule, schedule.order[rank]))], saved, deferred)
    live = peak = 0.0
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for times, turns in schedule.order.loops[rank]:
        alike = alike_turns(turns)  # most are the same as one before
        if alike not in known:
            steps = merged_steps(schedule, Loop(1, turns).steps(0))
            levels, after = _levels_from(0.0, steps, saved, deferred)
            known[alike] = after, max(levels)
        change, top = known[alike]
        peak = max(peak, live + top + max(0.0, (times - 1) * change))
        live += times * change
    return peak


def _loops(schedule: Schedule, rank: int) -> Iterator[tuple[int, tuple[Step, ...]]]:
    """How often steps repeat, and one turn of them."""
    if isinstance(schedule.order, LoopOrder):
        for loop in schedule.order.loops[rank]:
            yield loop.times, tuple(loop.steps(0))
    else:
        yield 1, schedule.order[rank]


def _peak(
    loops: Iterable[tuple[int, tuple[Step, ...]]], saved: StageBytes, deferred: StageBytes
) -> float:
    """Every turn of a loop changes the level by as much, so its first or its last turn has the
    peak."""
    live = peak = 0.0
    for times, steps in loops:
        levels, after = _levels_from(live, steps, saved, deferred)
        grown = (times - 1) * (after - live)
        peak = max(peak, max(levels, default=0.0) + max(0.0, grown))
        live = after + grown
    return peak
