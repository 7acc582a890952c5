"""What ranks did in one step, on a clock that all ranks share, and the step as a graph.

Three sections: the spans of a step and the facts of its run; `split_waiting`, which separates the
work of an action from the wait before it; and `ActionGraph`, the measured step as a graph of
actions that can be replayed with other times.

The span of an action begins when its rank reaches it, so it includes the wait for messages from
other ranks. If a receive of the same rank ends within the span, the work begins there. If not, the
work cannot begin before the other rank is done: on a GPU, actions are timed by the device and
receives by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from fivefold.core.layout import DIMENSIONS
from fivefold.core.plan import Plan
from fivefold.core.schedule import (
    FORWARD,
    WEIGHT_GRAD,
    Message,
    Schedule,
    Step,
    Timeline,
    actions_of,
    merged,
    needed,
)
from fivefold.records.steps import EVAL, StepRecord, Summary

Result = tuple[int, bool, int]  # stage, whether it is of a forward, microbatch
_PIPELINE = "pp"
_RECEIVE = "recv"
_SLACK = 0.02  # share of a step by which ranks may begin before rank 0


class ActionSpan(NamedTuple):
    """An action in seconds; `ready` is when its inputs were there."""

    step: Step
    begin: float
    ready: float
    end: float


class CollectiveSpan(NamedTuple):
    """A collective, from its issue to the end of the wait for it; `bytes` of its input."""

    axis: str
    kind: str
    begin: float
    end: float
    bytes: int
    group: int


@dataclass(frozen=True)
class RankSpans:
    """What one rank did in a step; `reported` is when it reported the end of the step."""

    rank: int
    reported: float
    actions: tuple[ActionSpan, ...]
    calls: tuple[CollectiveSpan, ...]


@dataclass(frozen=True)
class StepSpans:
    """One step of a start, by rank, in seconds since the first span of all ranks.

    `num_ranks` ranks ran. A rank that is not in `ranks` has no events of the step, or was not read:
    the number of ranks that are read is limited.
    """

    number: int
    restart: int
    num_ranks: int
    ranks: Mapping[int, RankSpans]

    def within(self, record: StepRecord | None) -> StepSpans:
        """Without the collectives of evaluations and checkpoints, which are logged with the step.

        The record has the time of the step and of the evaluation after it.
        """
        first = self.ranks.get(0)
        if record is None or record.seconds is None or first is None:
            return self
        end = first.reported - record.spent.get(EVAL, 0.0)
        begin = end - (1 + _SLACK) * record.seconds
        ranks = {rank: _cut(rank_spans, begin, end) for rank, rank_spans in self.ranks.items()}
        return replace(self, ranks=ranks)

    @cached_property
    def begin(self) -> float:
        """When the first rank began."""
        return min(_edges(rank_spans)[0] for rank_spans in self.ranks.values())

    @cached_property
    def end(self) -> float:
        """When the last rank was done."""
        return max(_edges(rank_spans)[1] for rank_spans in self.ranks.values())


class StartFacts(NamedTuple):
    """One start of a run, as `run.json` has it; times since the epoch."""

    began: float
    ended: float | None  # None if it runs or died
    why: str | None
    spent: Mapping[str, float]  # after its last step
    facts: Mapping[str, Any]  # model, layout, world, versions, commit, machine


class RunSample(NamedTuple):
    """What the model wrote after a step of a start, and from which beginning."""

    step: int
    restart: int
    prompt: str
    text: str


@dataclass(frozen=True)
class RunFacts:
    """A run, as read from its folder. `no_plan` says why there is no plan.

    `event_steps` has the first and last step with events of each start. `idle_s` has the seconds
    since the last write.
    """

    name: str
    starts: tuple[StartFacts, ...]
    records: tuple[StepRecord, ...]
    lost: tuple[StepRecord, ...]
    summary: Summary
    plan: Plan | None
    no_plan: str | None
    event_steps: Mapping[int, tuple[int, int]]
    idle_s: float
    samples: tuple[RunSample, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])  # every key of its plan file
    damage: tuple[str, ...] = ()  # which lines of its records cannot be read

    @property
    def steps(self) -> list[int]:
        """Every step with events, of any start."""
        return sorted({step for a, b in self.event_steps.values() for step in range(a, b + 1)})

    def record(self, step: int, restart: int) -> StepRecord | None:
        """The record of a step in a start."""
        same = (
            step_record for step_record in (*self.records, *self.lost) if step_record.step == step
        )
        return next((step_record for step_record in same if step_record.restart == restart), None)


# Separate work from waiting.


def split_waiting(spans: StepSpans, schedule: Schedule, column: Sequence[int]) -> StepSpans | None:
    """The spans of the ranks of one pipeline, with `ready` set to the end of the wait.

    None if a rank does not have all actions of the schedule.
    """
    members: list[RankSpans] = []
    for pp_rank, rank in enumerate(column):
        rank_spans = spans.ranks.get(rank)
        steps = merged(schedule, pp_rank)
        if rank_spans is None or [did.step for did in rank_spans.actions] != list(steps):
            return None
        members.append(rank_spans)
    ends = {
        result: did.end
        for member in members
        for did in member.actions
        for result in results(did.step)
    }
    ranks = {member.rank: _split(member, schedule, ends) for member in members}
    return replace(spans, ranks=ranks)


def results(step: Step) -> list[Result]:
    """What a step sends to other ranks; input gradients and full backwards send the same."""
    return [
        (action.stage, action.kind == FORWARD, action.microbatch)
        for action in actions_of(step)
        if action.kind != WEIGHT_GRAD
    ]


def awaited(schedule: Schedule, step: Step) -> list[tuple[Message, Result]]:
    """The messages that a step needs from other ranks, and the results they carry."""
    messages: list[tuple[Message, Result]] = []
    for action in actions_of(step):
        message = None if action.kind == WEIGHT_GRAD else needed(schedule, action)
        if message is not None:
            forward = action.kind == FORWARD
            sender = action.stage + (-1 if forward else 1)
            messages.append((message, (sender, forward, action.microbatch)))
    return messages


def _cut(rank_spans: RankSpans, begin: float, end: float) -> RankSpans:
    """The collectives of a step. A rank may begin the evaluation before rank 0 is done, so pipeline
    messages count up to the last action of the rank."""
    last = max((did.end for did in rank_spans.actions), default=end)
    calls = (
        call
        for call in rank_spans.calls
        if (call.begin <= last if call.axis == _PIPELINE else begin <= call.begin <= end)
    )
    return replace(rank_spans, calls=tuple(calls))


def _split(rank_spans: RankSpans, schedule: Schedule, ends: Mapping[Result, float]) -> RankSpans:
    """Set `ready`: receives end in the order of the actions that need them."""
    needed_by = [
        (did, cause) for did in rank_spans.actions for _, cause in awaited(schedule, did.step)
    ]
    received = sorted(
        call.end for call in rank_spans.calls if (call.axis, call.kind) == (_PIPELINE, _RECEIVE)
    )
    known = received if len(received) == len(needed_by) else [float("-inf")] * len(needed_by)
    ready = {did.step: did.begin for did in rank_spans.actions}
    for (did, cause), arrived in zip(needed_by, known, strict=True):
        moment = arrived if did.begin <= arrived <= did.end else ends.get(cause, did.begin)
        if did.begin < moment <= did.end:
            ready[did.step] = max(ready[did.step], moment)
    actions = tuple(did._replace(ready=ready[did.step]) for did in rank_spans.actions)
    return replace(rank_spans, actions=actions)


def _edges(rank_spans: RankSpans) -> tuple[float, float]:
    spans = [
        *((did.begin, did.end) for did in rank_spans.actions),
        *((c.begin, c.end) for c in rank_spans.calls),
    ]
    if not spans:
        return rank_spans.reported, rank_spans.reported
    return min(begin for begin, _ in spans), max(end for _, end in spans)


# The measured step as a graph of actions.
#
# The extra time of an action over the plan is first assigned to its collectives, as far as they are
# slower than planned, and the rest to its computation. The span of a collective is the host's: one
# that is hidden by computation counts only as far as its action is late.


INSIDE = ("tp", "cp", "ep")  # dimensions whose collectives run within actions
DATA = "dp"  # all other collectives


@dataclass(frozen=True)
class Expectation:
    """The expected step of one pipeline.

    `inside` returns the seconds of collectives in an action by axis. `around` has the seconds
    outside of the pipeline, as `dp` and `update`; None if only the pipeline can be compared.
    """

    played: Timeline
    inside: Callable[[Step], Mapping[str, float]]
    around: Mapping[str, float] | None


def collective_seconds(rank_spans: RankSpans) -> list[dict[str, float]]:
    """For each action, the seconds in which a collective was running, by axis of the plan."""
    totals: list[dict[str, float]] = [{} for _ in rank_spans.actions]
    by_axis: dict[str, list[tuple[float, float]]] = {}
    for call in rank_spans.calls:
        if call.axis != "pp":
            dimension = DIMENSIONS.get(call.axis)
            axis = dimension if dimension in INSIDE else DATA
            by_axis.setdefault(axis, []).append((call.begin, call.end))
    for axis, intervals in by_axis.items():
        first = 0
        for begin, end in _union(intervals):
            while first < len(rank_spans.actions) and rank_spans.actions[first].end <= begin:
                first += 1
            for index in range(first, len(rank_spans.actions)):
                did = rank_spans.actions[index]
                if did.ready >= end:
                    break
                inside = min(end, did.end) - max(begin, did.ready)
                if inside > 0:
                    totals[index][axis] = totals[index].get(axis, 0.0) + inside
    return totals


def _union(intervals: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The union of intervals, in order."""
    begin, end = float("-inf"), float("-inf")
    for start, other in sorted(intervals):
        if start > end:
            if end > begin:
                yield begin, end
            begin, end = start, other
        end = max(end, other)
    if end > begin:
        yield begin, end


@dataclass(frozen=True)
class ActionNode:
    """One action of the pipeline: its rank, what it waits for, and its seconds."""

    pp_rank: int
    step: Step
    causes: tuple[int, ...]  # the nodes whose messages it needs
    seconds: float
    message: float  # from the end of the last cause to its begin; planned if it did not wait
    pause: float
    planned: float
    excess: Mapping[str, float]  # extra seconds of collectives over the plan, by axis


class ActionGraph:
    """The measured step as a graph of actions that can be replayed with other times."""

    def __init__(self, expected: Expectation, ranks: list[RankSpans]) -> None:
        self.expected, self.ranks = expected, ranks
        self.zero = min(rank_spans.actions[0].ready for rank_spans in ranks)
        self.nodes = list(self._nodes())
        self.order = self._sorted()  # causes before effects
        self.makespan = self.play(self.nodes)

    def _nodes(self) -> Iterator[ActionNode]:
        number, ends = dict[Result, int](), list[float]()
        for rank_spans in self.ranks:
            for did in rank_spans.actions:
                number |= {result: len(ends) for result in results(did.step)}
                ends.append(did.end - self.zero)
        for pp_rank, rank_spans in enumerate(self.ranks):
            free = 0.0
            for did, inside in zip(rank_spans.actions, collective_seconds(rank_spans), strict=True):
                needs = awaited(self.expected.played.schedule, did.step)
                causes = tuple(number[result] for _, result in needs)
                last = max((ends[cause] for cause in causes), default=None)
                yield self._node(pp_rank, did, causes, free, last, inside)
                free = did.end - self.zero

    def _node(
        self,
        pp_rank: int,
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
        return ActionNode(pp_rank, did.step, causes, seconds, message, pause, planned, excess)

    def _sorted(self) -> list[int]:
        firsts = [at for at in range(len(self.nodes)) if self._before(at) is None]
        done, order, heads = set[int](), list[int](), firsts
        while heads:
            new_heads: list[int] = []
            for head in heads:
                at = head
                while self._is_of(at, head) and done.issuperset(self.nodes[at].causes):
                    done.add(at)
                    order.append(at)
                    at += 1
                if self._is_of(at, head):
                    new_heads.append(at)
            assert new_heads != heads, "a schedule that ran has no cycle"
            heads = new_heads
        return order

    def _is_of(self, at: int, head: int) -> bool:
        return at < len(self.nodes) and self.nodes[at].pp_rank == self.nodes[head].pp_rank

    def _before(self, at: int) -> int | None:
        return at - 1 if at and self.nodes[at - 1].pp_rank == self.nodes[at].pp_rank else None

    def play(self, nodes: Sequence[ActionNode]) -> float:
        """When the last action ends."""
        return max(end for _, end in self.times(nodes))

    def times(self, nodes: Sequence[ActionNode]) -> list[tuple[float, float]]:
        """When every action begins and ends."""
        intervals = [(0.0, 0.0)] * len(nodes)
        for at in self.order:
            node, before = nodes[at], self._before(at)
            free = intervals[before][1] if before is not None else 0.0
            arrived = max(
                (intervals[cause][1] + node.message for cause in node.causes), default=0.0
            )
            begin = max(free, arrived) + node.pause
            intervals[at] = begin, begin + node.seconds
        return intervals
