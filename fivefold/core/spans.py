"""What ranks did when, as values: the spans of one step on a clock that all ranks share.

A span of an action begins when its rank comes to it, and so holds the time in which it waits for
what another rank sends. `worked` takes that apart: where a receive of the same rank ends inside of
the span, work begins there; where it does not (a GPU's actions are told in the device's time, its
receives in the host's), work cannot have begun before the other rank was done. `RunFacts` is what
else a run's folder tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fivefold.core.plan import Plan
from fivefold.core.progress import EVAL, StepRecord, Summary
from fivefold.core.schedule.action import FORWARD, WEIGHT_GRAD, Step, actions_of
from fivefold.core.schedule.transfers import Message, merged, needed
from fivefold.core.schedule.value import Schedule

Result = tuple[int, bool, int]  # stage, whether it is of a forward, microbatch
_PIPELINE = "pp"
_RECEIVE = "recv"
_SLACK = 0.02  # of a step, by which ranks may begin it before the first one does


class Did(NamedTuple):
    """An action and what it ran with, in seconds; `ready` is when it had all that it needs."""

    step: Step
    begin: float
    ready: float
    end: float


class Call(NamedTuple):
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
    actions: tuple[Did, ...]
    calls: tuple[Call, ...]


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
