"""Compare a measured pipeline step with the plan, and find what explains the difference.

The measured step is replayed from its own times: those of every action, of every message that was
waited for, and of every pause. Then one of them is set to the plan and the step is replayed again.
The difference between the two is what that cause explains. So a slow stage is found where it is,
and not where other stages wait for it.

`compare` works with an `Expectation`, which comes from the planner's estimate (`from_plan`) or, for
a plan without a machine, from the mean times of the run (`from_means`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Literal, NamedTuple

from fivefold.core.plan import Plan
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Overlap,
    Schedule,
    Step,
    actions_of,
    merged,
)
from fivefold.core.schedule.clock import Costs, Timeline, play
from fivefold.cost import COMPUTE
from fivefold.planner import estimate_setting
from fivefold.planner.estimate import simulate_step
from fivefold.records import StepRecord
from fivefold.records.spans import (
    DATA,
    INSIDE,
    ActionGraph,
    ActionNode,
    Expectation,
    RankSpans,
    StepSpans,
    collective_seconds,
)

What = Literal["compute", "straggler", "collective", "message", "pause", "around"]
PAIR = "X"  # the kind of an overlapped forward and backward
UPDATE = "update"
_NEGLIGIBLE = 0.02  # share of the plan: a smaller difference needs no cause
_MOST = 0.75  # share of a cause: a part that explains this much is named instead
_STRAGGLES = 1.1  # times the other ranks of its stage


class Cause(NamedTuple):
    """One cause of the difference: as planned, the step would be `gain` seconds shorter.

    `planned` and `measured` are mean seconds of an action or message if there are several, else
    seconds of the step.
    """

    what: What
    gain: float
    planned: float
    measured: float
    stage: int | None = None
    kind: str | None = None
    axis: str | None = None
    pp_rank: int | None = None
    source: int | None = None
    action: str | None = None
    cause: str | None = None
    parts: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A measured pipeline and the expected one, in seconds since its first action."""

    ran: Timeline
    played: Timeline
    whole: bool  # whether the full step is compared, or only its pipeline
    seconds: float
    planned: float
    causes: tuple[Cause, ...]

    @property
    def difference(self) -> float:
        """Seconds by which it was slower."""
        return self.seconds - self.planned

    @cached_property
    def named(self) -> Cause | None:
        """The cause that explains most of the difference; None if the difference is negligible."""
        if abs(self.difference) < _NEGLIGIBLE * self.planned:
            return None
        sign = 1 if self.difference > 0 else -1
        found = max(self.causes, key=lambda one: sign * one.gain)
        return narrowed(found) if sign * found.gain > 0 else None


def narrowed(cause: Cause) -> Cause:
    """The smallest part of a cause that explains most of it."""
    sign = 1 if cause.gain > 0 else -1
    part = max(cause.parts, key=lambda one: sign * one.gain, default=None)
    if part is None or sign * part.gain < _MOST * sign * cause.gain:
        return cause
    return narrowed(part)


def compare(
    expected: Expectation,
    spans: StepSpans,
    column: Sequence[int],
    record: StepRecord | None,
    peers: Mapping[int, Sequence[RankSpans]],
) -> Comparison:
    """Compare the ranks of one pipeline with what was expected; `spans` come from `split_waiting`.

    `peers` are the ranks with the same stages, by pipeline rank.
    """
    ranks = [spans.ranks[rank] for rank in column]
    graph = ActionGraph(expected, ranks)
    causes = [_compute(graph, ranks, peers), *_collectives(graph), _messages(graph), _pauses(graph)]
    seconds, planned, whole = graph.makespan, expected.played.makespan, expected.around is not None
    if expected.around is not None:
        planned += sum(expected.around.values())
        measured = spans.end - spans.begin if record is None else record.seconds
        seconds = max(measured, graph.makespan)
        causes += _around(expected.around, graph, spans, seconds)
    causes.sort(key=lambda one: -abs(one.gain))
    return Comparison(_ran(graph), expected.played, whole, seconds, planned, tuple(causes))


def own_seconds(one: RankSpans) -> float:
    """Seconds of computation of a rank: its actions without waits and collectives."""
    inside = collective_seconds(one)
    total = sum(did.end - did.ready for did in one.actions)
    return total - sum(sum(each.values()) for each in inside)


def kind_of(step: Step) -> str:
    """F, B, I or W; X for an overlapped pair."""
    return PAIR if isinstance(step, Overlap) else step.kind


def stage_of(step: Step) -> int:
    return actions_of(step)[0].stage


def _ran(graph: ActionGraph) -> Timeline:
    """The measured step as a timeline."""
    played, times = graph.expected.played, graph.times(graph.nodes)
    rows: list[list[tuple[float, float]]] = [[] for _ in played.schedule.order]
    for node, time in zip(graph.nodes, times, strict=True):
        rows[node.pp_rank].append(time)
    starts, ends = (tuple(tuple(one[i] for one in row) for row in rows) for i in (0, 1))
    return replace(played, starts=starts, ends=ends)


def _gain(graph: ActionGraph, change: Callable[[ActionNode], ActionNode]) -> float:
    return graph.makespan - graph.play([change(node) for node in graph.nodes])


def _computed(node: ActionNode) -> float:
    """Seconds of an action without the extra time of its collectives."""
    return node.seconds - sum(node.excess.values())


def _compute(
    graph: ActionGraph, ranks: Sequence[RankSpans], peers: Mapping[int, Sequence[RankSpans]]
) -> Cause:
    """Computation: of all actions, by kind, by stage, and of stragglers."""

    def cause(stage: int | None = None, kind: str | None = None) -> Cause:
        def is_meant(node: ActionNode) -> bool:
            return stage in (None, stage_of(node.step)) and kind in (None, kind_of(node.step))

        def as_planned(node: ActionNode) -> ActionNode:
            late = _computed(node) - node.planned
            return replace(node, seconds=node.seconds - late) if is_meant(node) else node

        meant = [node for node in graph.nodes if is_meant(node)]
        planned, measured = fmean(n.planned for n in meant), fmean(map(_computed, meant))
        gain = _gain(graph, as_planned)
        return Cause("compute", gain, planned, measured, stage=stage, kind=kind)

    pairs = sorted({(stage_of(node.step), kind_of(node.step)) for node in graph.nodes})
    alone = list(_stragglers(graph, ranks, peers))
    single = {pair: cause(*pair) for pair in pairs}
    by_stage: list[Cause] = []
    for stage in sorted({stage for stage, _ in pairs}):
        slow = [each for each in alone if each.stage == stage]
        parts = [single[pair] for pair in pairs if pair[0] == stage]
        by_stage.append(cause(stage=stage)._replace(parts=(*slow, *parts)))
    by_kind = [
        cause(kind=kind)._replace(parts=tuple(single[pair] for pair in pairs if pair[1] == kind))
        for kind in sorted({kind for _, kind in pairs})
    ]
    return cause()._replace(parts=(*by_stage, *by_kind))


def _stragglers(
    graph: ActionGraph, ranks: Sequence[RankSpans], peers: Mapping[int, Sequence[RankSpans]]
) -> Iterator[Cause]:
    """Ranks that compute longer than their peers; each counts for its first stage."""
    for pp_rank, one in enumerate(ranks):
        others = [own_seconds(each) for each in peers.get(pp_rank, ()) if each.rank != one.rank]
        mine = own_seconds(one)
        if others and mine >= _STRAGGLES * median(others):
            share = (mine - median(others)) / len(one.actions)
            gain = _without(graph, lambda node, r=pp_rank, s=share: s if node.pp_rank == r else 0.0)
            stage = stage_of(one.actions[0].step)
            yield Cause("straggler", gain, median(others), mine, stage=stage, pp_rank=pp_rank)


def _without(graph: ActionGraph, late: Callable[[ActionNode], float]) -> float:
    """The gain if every action were shorter by `late(action)` seconds."""
    return _gain(graph, lambda node: replace(node, seconds=max(0.0, node.seconds - late(node))))


def _collectives(graph: ActionGraph) -> Iterator[Cause]:
    """The extra time of collectives within actions, by axis."""
    for axis in sorted({axis for node in graph.nodes for axis in node.excess}):
        planned = sum(graph.expected.inside(node.step).get(axis, 0.0) for node in graph.nodes)
        late = sum(node.excess.get(axis, 0.0) for node in graph.nodes)
        gain = _without(graph, lambda node, axis=axis: node.excess.get(axis, 0.0))
        yield Cause("collective", gain, planned, planned + late, axis=axis)


def _messages(graph: ActionGraph) -> Cause:
    """Messages that were waited for: all, by pair of ranks, and the latest of each pair."""
    usual = max(graph.expected.played.costs.transfer)
    waiting = [node for node in graph.nodes if node.causes and node.message > usual]

    def cause(meant: Sequence[ActionNode]) -> Cause:
        ids = {id(node) for node in meant}
        gain = _gain(graph, lambda node: replace(node, message=usual) if id(node) in ids else node)
        measured = fmean(node.message for node in meant) if meant else usual
        return Cause("message", gain, usual, measured)

    pairs: dict[tuple[int, int], list[ActionNode]] = {}
    for node in waiting:
        pairs.setdefault((graph.nodes[node.causes[-1]].pp_rank, node.pp_rank), []).append(node)
    parts: list[Cause] = []
    for (source, pp_rank), meant in pairs.items():
        late = max(meant, key=lambda node: node.message)
        action, sender = str(late.step), str(graph.nodes[late.causes[-1]].step)
        where = {"source": source, "pp_rank": pp_rank}
        worst = cause([late])._replace(**where, action=action, cause=sender)
        parts.append(cause(meant)._replace(**where, parts=(worst,)))
    return cause(waiting)._replace(parts=tuple(parts))


def _pauses(graph: ActionGraph) -> Cause:
    """Time in which a rank had all inputs but did nothing, by rank."""

    def cause(pp_ranks: Sequence[int]) -> Cause:
        ids = {id(node) for node in graph.nodes if node.pp_rank in pp_ranks}
        gain = _gain(graph, lambda node: replace(node, pause=0.0) if id(node) in ids else node)
        total = sum(node.pause for node in graph.nodes if id(node) in ids)
        return Cause("pause", gain, 0.0, total, pp_rank=pp_ranks[0] if len(pp_ranks) == 1 else None)

    pp_ranks = range(len(graph.ranks))
    return cause(pp_ranks)._replace(parts=tuple(cause([each]) for each in pp_ranks))


def _around(
    planned: Mapping[str, float], graph: ActionGraph, spans: StepSpans, seconds: float
) -> Iterator[Cause]:
    """Time outside of the pipeline: collectives of data ranks, and the update with the rest.

    It is measured on the rank whose pipeline ended last, because the others wait for that rank.
    """
    last = max(graph.ranks, key=lambda one: one.actions[-1].end)
    end = last.actions[-1].end
    after = last.actions[-1]._replace(begin=end, ready=end, end=max(end, spans.end))
    calls = collective_seconds(replace(last, actions=(after,)))[0]
    total = max(0.0, seconds - graph.makespan)
    moved = min(total, sum(calls.values()))
    for axis, measured in ((DATA, moved), (UPDATE, total - moved)):
        expected = planned.get(axis, 0.0)
        yield Cause("around", measured - expected, expected, measured, axis=axis)


# What a measured step is compared with.


def from_plan(plan: Plan) -> Expectation | None:
    """The planner's estimate of a step; None if the plan has no machine.

    The collectives of an action have the share that they have in the work of the busiest rank.
    """
    if plan.machine is None:
        return None
    recipe = plan.options.train
    setting, _ = estimate_setting(plan.machine, plan.precision, 0.0, recipe.kernels, 1.0)
    known = simulate_step(plan, setting)
    costs, factor = known.timeline.costs, setting.stack.factor
    times = (costs.forward, costs.backward, costs.weight, costs.transfer)
    scaled = Costs(
        *(tuple(factor * each for each in column) for column in times), overlap=costs.overlap
    )
    busy = sum(known.parts.get(name, 0.0) for name in (*COMPUTE, "rounding", "launch", *INSIDE))
    shares = {axis: known.parts.get(axis, 0.0) / busy for axis in INSIDE}

    def inside(step: Step) -> Mapping[str, float]:
        return {axis: share * scaled.of(step) for axis, share in shares.items()}

    around = {
        DATA: known.parts.get("dp", 0.0),
        UPDATE: sum(known.parts.get(name, 0.0) for name in ("optimizer", "offload", "fixed")),
    }
    return Expectation(play(as_run(plan.schedule), scaled), inside, around)


def from_means(schedule: Schedule, ranks: Sequence[RankSpans]) -> Expectation:
    """The schedule with the measured mean time of each kind of action, and free messages."""
    seconds: dict[str, list[float]] = {}
    calls: dict[str, list[dict[str, float]]] = {}
    for one in ranks:
        for did, inside in zip(one.actions, collective_seconds(one), strict=True):
            seconds.setdefault(kind_of(did.step), []).append(did.end - did.ready)
            calls.setdefault(kind_of(did.step), []).append(inside)
    mean = {kind: fmean(each) for kind, each in seconds.items()}
    weight = mean.get(WEIGHT_GRAD, 0.0)
    backward = mean[INPUT_GRAD] if INPUT_GRAD in mean else mean.get(BACKWARD, 0.0) - weight
    pair = mean.get(FORWARD, 0.0) + backward + weight
    stages = schedule.num_stages
    costs = Costs(
        *((each,) * stages for each in (mean.get(FORWARD, 0.0), backward, weight, 0.0)),
        overlap=mean[PAIR] / pair if PAIR in mean and pair else 1.0,
    )
    usual = {
        kind: {
            axis: fmean(one.get(axis, 0.0) for one in each)
            for axis in {axis for one in each for axis in one}
        }
        for kind, each in calls.items()
    }
    return Expectation(
        play(as_run(schedule), costs), lambda step: usual.get(kind_of(step), {}), None
    )


def as_run(schedule: Schedule) -> Schedule:
    """The schedule with adjacent I and W merged, as the runtime merges them."""
    order = tuple(merged(schedule, rank) for rank in range(schedule.num_ranks))
    return replace(schedule, order=order)
