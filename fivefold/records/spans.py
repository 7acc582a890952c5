"""What ranks did when, as values: the spans of one step on a clock that all ranks share.

A span of an action begins when its rank comes to it, and so holds the time in which it waits for
what another rank sends. `worked` takes that apart: where a receive of the same rank ends inside of
the span, work begins there; where it does not (a GPU's actions are told in the device's time, its
receives in the host's), work cannot have begun before the other rank was done. `RunFacts` is what
else a run's folder tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from fivefold.core.groups import DIMENSIONS
from fivefold.core.plan import Plan
from fivefold.core.schedule import (
    FORWARD,
    WEIGHT_GRAD,
    Message,
    Schedule,
    Step,
    actions_of,
    merged,
    needed,
)
from fivefold.core.schedule.clock import Timeline
from fivefold.records import EVAL, StepRecord, Summary

Result = tuple[int, bool, int]  # stage, whether it is of a forward, microbatch
_PIPELINE = "pp"
_RECEIVE = "recv"
_SLACK = 0.02  # of a step, by which ranks may begin it before the first one does


class ActionSpan(NamedTuple):
    """An action and what it ran with, in seconds; `ready` is when it had all that it needs."""

    step: Step
    begin: float
    ready: float
    end: float


class CollectiveSpan(NamedTuple):
    """A collective, from its issue to when whoever needed it went on; bytes of its input."""

    axis: str
    kind: str
    begin: float
    end: float
    bytes: int
    group: int


@dataclass(frozen=True)
class RankSpans:
    """What one rank did in a step; `told` is when it said that the step was over."""

    rank: int
    told: float
    actions: tuple[ActionSpan, ...]
    calls: tuple[CollectiveSpan, ...]


@dataclass(frozen=True)
class StepSpans:
    """One step of a start, by rank; its seconds begin with the first span of all.

    `num_ranks` are those that ran; those that are not in `ranks` have told nothing of it, or were
    left out, for a step is read of a limited number of ranks.
    """

    number: int
    restart: int
    num_ranks: int
    ranks: Mapping[int, RankSpans]

    def within(self, record: StepRecord | None) -> StepSpans:
        """Without the calls of evaluations and checkpoints, which are told with the step's own.

        The record knows how long the step took, and how long the evaluation behind it.
        """
        first = self.ranks.get(0)
        if record is None or first is None:
            return self
        end = first.told - record.spent.get(EVAL, 0.0)
        begin = end - (1 + _SLACK) * record.seconds
        ranks = {rank: _cut(one, begin, end) for rank, one in self.ranks.items()}
        return replace(self, ranks=ranks)

    @cached_property
    def begin(self) -> float:
        """When the first rank began."""
        return min(_edges(one)[0] for one in self.ranks.values())

    @cached_property
    def end(self) -> float:
        """When the last rank was done."""
        return max(_edges(one)[1] for one in self.ranks.values())


class StartFacts(NamedTuple):
    """One start of a run, as `run.json` has it; times since the epoch."""

    began: float
    ended: float | None  # None where it runs, or died
    why: str | None
    spent: Mapping[str, float]  # behind its last step
    facts: Mapping[str, Any]  # model, layout, world, versions, commit, machine


@dataclass(frozen=True)
class RunFacts:
    """A run as its folder tells it. `no_plan` says why there is no plan.

    `told` are the steps with events, first and last by start; `silence` are the seconds since
    anything was written.
    """

    name: str
    starts: tuple[StartFacts, ...]
    kept: tuple[StepRecord, ...]
    lost: tuple[StepRecord, ...]
    summary: Summary
    plan: Plan | None
    no_plan: str | None
    told: Mapping[int, tuple[int, int]]
    silence: float

    @property
    def steps(self) -> list[int]:
        """Every step with events, whichever start told of it."""
        return sorted({step for a, b in self.told.values() for step in range(a, b + 1)})

    def record(self, step: int, restart: int) -> StepRecord | None:
        """The record of a step as that start did it."""
        same = (one for one in (*self.kept, *self.lost) if one.step == step)
        return next((one for one in same if one.restart == restart), None)


def worked(spans: StepSpans, schedule: Schedule, column: Sequence[int]) -> StepSpans | None:
    """The spans of one pipeline's ranks, in the order of its stages, with waiting taken apart.

    None where a rank has not told of every action that the schedule has.
    """
    found: list[RankSpans] = []
    for place, rank in enumerate(column):
        one = spans.ranks.get(rank)
        steps = merged(schedule, place)
        if one is None or [did.step for did in one.actions] != list(steps):
            return None
        found.append(one)
    ends = {each: did.end for one in found for did in one.actions for each in results(did.step)}
    ranks = {one.rank: _split(one, schedule, ends) for one in found}
    return replace(spans, ranks=ranks)


def results(step: Step) -> list[Result]:
    """What a step delivers to others: an input gradient and a full backward deliver the same."""
    return [
        (action.stage, action.kind == FORWARD, action.microbatch)
        for action in actions_of(step)
        if action.kind != WEIGHT_GRAD
    ]


def awaited(schedule: Schedule, step: Step) -> list[tuple[Message, Result]]:
    """What a step needs of other ranks, and the results that are sent for it."""
    found: list[tuple[Message, Result]] = []
    for action in actions_of(step):
        message = None if action.kind == WEIGHT_GRAD else needed(schedule, action)
        if message is not None:
            forward = action.kind == FORWARD
            giver = action.stage + (-1 if forward else 1)
            found.append((message, (giver, forward, action.microbatch)))
    return found


def _cut(one: RankSpans, begin: float, end: float) -> RankSpans:
    """The calls of a step; a rank may go on to the evaluation while the first is not yet done, so
    that messages end with its own actions."""
    last = max((did.end for did in one.actions), default=end)
    calls = (
        call
        for call in one.calls
        if (call.begin <= last if call.axis == _PIPELINE else begin <= call.begin <= end)
    )
    return replace(one, calls=tuple(calls))


def _split(one: RankSpans, schedule: Schedule, ends: Mapping[Result, float]) -> RankSpans:
    """Receives are waited for in the order of the actions that need them."""
    asked = [(did, cause) for did in one.actions for _, cause in awaited(schedule, did.step)]
    received = sorted(
        call.end for call in one.calls if (call.axis, call.kind) == (_PIPELINE, _RECEIVE)
    )
    known = received if len(received) == len(asked) else [float("-inf")] * len(asked)
    ready = {did.step: did.begin for did in one.actions}
    for (did, cause), heard in zip(asked, known, strict=True):
        moment = heard if did.begin <= heard <= did.end else ends.get(cause, did.begin)
        if did.begin < moment <= did.end:
            ready[did.step] = max(ready[did.step], moment)
    actions = tuple(did._replace(ready=ready[did.step]) for did in one.actions)
    return replace(one, actions=actions)


def _edges(one: RankSpans) -> tuple[float, float]:
    spans = [*((did.begin, did.end) for did in one.actions), *((c.begin, c.end) for c in one.calls)]
    if not spans:
        return one.told, one.told
    return min(begin for begin, _ in spans), max(end for _, end in spans)


# A measured step as a net of actions that can be played again with other times.
#
# What an action takes longer than planned is given first to the collectives inside of it, as far
# as they take longer than planned, and the rest to what it computes. A collective's span is the
# host's: one that is hidden behind computation counts as far as its action is late.


INSIDE = ("tp", "cp", "ep")  # dimensions whose collectives are parts of actions
DATA = "dp"  # all others: sums and gathers of data ranks


@dataclass(frozen=True)
class Expectation:
    """What a step of one pipeline should be.

    `inside` gives the seconds of collectives in an action by axis; `around` those outside of the
    pipeline, by `dp` and `update`, or None where only the pipeline can be compared.
    """

    played: Timeline
    inside: Callable[[Step], Mapping[str, float]]
    around: Mapping[str, float] | None


def covered(one: RankSpans) -> list[dict[str, float]]:
    """For each action, the seconds in which a collective was under way, by the plan's axis."""
    found: list[dict[str, float]] = [{} for _ in one.actions]
    lines: dict[str, list[tuple[float, float]]] = {}
    for call in one.calls:
        if call.axis != "pp":
            dimension = DIMENSIONS.get(call.axis)
            axis = dimension if dimension in INSIDE else DATA
            lines.setdefault(axis, []).append((call.begin, call.end))
    for axis, line in lines.items():
        first = 0
        for begin, end in _joined(line):
            while first < len(one.actions) and one.actions[first].end <= begin:
                first += 1
            for place in range(first, len(one.actions)):
                did = one.actions[place]
                if did.ready >= end:
                    break
                inside = min(end, did.end) - max(begin, did.ready)
                if inside > 0:
                    found[place][axis] = found[place].get(axis, 0.0) + inside
    return found


def _joined(line: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The same time without any of it twice."""
    begin, end = float("-inf"), float("-inf")
    for one, other in sorted(line):
        if one > end:
            if end > begin:
                yield begin, end
            begin, end = one, other
        end = max(end, other)
    if end > begin:
        yield begin, end


@dataclass(frozen=True)
class ActionNode:
    """One action of the pipeline: where it is, what it waits for, and its seconds."""

    place: int
    step: Step
    causes: tuple[int, ...]  # the nodes whose messages it needs
    seconds: float
    message: float  # from the last of them to its begin; planned where it was not waited for
    pause: float
    planned: float
    excess: Mapping[str, float]  # of collectives over the plan, by axis


@dataclass
class ActionGraph:
    """The measured step as a net of actions that can be played with other times."""

    expected: Expectation
    ranks: list[RankSpans]
    nodes: list[ActionNode] = field(default_factory=list[ActionNode])
    order: list[int] = field(default_factory=list[int])  # causes before effects

    def __post_init__(self) -> None:
        schedule = self.expected.played.schedule
        self.zero = min(one.actions[0].ready for one in self.ranks)
        number, ends = dict[tuple[int, bool, int], int](), list[float]()
        for one in self.ranks:
            for did in one.actions:
                number |= {each: len(ends) for each in results(did.step)}
                ends.append(did.end - self.zero)
        for place, one in enumerate(self.ranks):
            free, inside = 0.0, covered(one)
            for did, calls in zip(one.actions, inside, strict=True):
                causes = tuple(number[each] for _, each in awaited(schedule, did.step))
                last = max((ends[each] for each in causes), default=None)
                self.nodes.append(self._node(place, did, causes, free, last, calls))
                free = did.end - self.zero
        self.order = self._sorted()
        self.makespan = self.play(self.nodes)

    def _node(
        self,
        place: int,
        did: ActionSpan,
        causes: tuple[int, ...],
        free: float,
        last: float | None,
        calls: Mapping[str, float],
    ) -> ActionNode:
        begin, ready = did.begin - self.zero, did.ready - self.zero
        message, pause = 0.0, max(0.0, ready - free)
        if last is not None:
            usual = max(self.expected.played.costs.transfer)
            waited = last > free or ready - begin > begin - free
            message = max(0.0, ready - last) if waited else min(usual, max(0.0, ready - last))
            pause = 0.0 if waited else pause
        planned = self.expected.played.costs.of(did.step)
        seconds = did.end - did.ready
        left, excess = max(0.0, seconds - planned), dict[str, float]()
        usual_calls = self.expected.inside(did.step)
        for axis, length in calls.items():
            excess[axis] = min(left, max(0.0, length - usual_calls.get(axis, 0.0)))
            left -= excess[axis]
        return ActionNode(place, did.step, causes, seconds, message, pause, planned, excess)

    def _sorted(self) -> list[int]:
        firsts = [at for at in range(len(self.nodes)) if self._before(at) is None]
        done, order, heads = set[int](), list[int](), firsts
        while heads:
            rest: list[int] = []
            for head in heads:
                at = head
                while self._is_of(at, head) and done.issuperset(self.nodes[at].causes):
                    done.add(at)
                    order.append(at)
                    at += 1
                if self._is_of(at, head):
                    rest.append(at)
            assert rest != heads, "a schedule that ran has no circle"
            heads = rest
        return order

    def _is_of(self, at: int, head: int) -> bool:
        return at < len(self.nodes) and self.nodes[at].place == self.nodes[head].place

    def _before(self, at: int) -> int | None:
        return at - 1 if at and self.nodes[at - 1].place == self.nodes[at].place else None

    def play(self, nodes: Sequence[ActionNode]) -> float:
        """When the last action ends."""
        return max(end for _, end in self.times(nodes))

    def times(self, nodes: Sequence[ActionNode]) -> list[tuple[float, float]]:
        """When every action begins and ends."""
        found = [(0.0, 0.0)] * len(nodes)
        for at in self.order:
            one, before = nodes[at], self._before(at)
            free = found[before][1] if before is not None else 0.0
            arrived = max((found[each][1] + one.message for each in one.causes), default=0.0)
            begin = max(free, arrived) + one.pause
            found[at] = begin, begin + one.seconds
        return found
