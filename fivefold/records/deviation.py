"""Compare a measured pipeline step with the plan, and find what explains the difference.

The measured step is replayed from its own times: those of every action, of every message that was
waited for, and of every pause. Then one of them is set to the plan and the step is replayed again.
The difference between the two is what that cause explains. So a slow stage is found where it is,
and not where other stages wait for it.

`compare` works with an `Expectation`, which `expectation` makes of the planner's estimate or, for a
plan without a machine, of the mean times of the run.
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
    Costs,
    Overlap,
    Schedule,
    Step,
    Timeline,
    actions_of,
    merged,
    play,
)
from fivefold.cost.step import COMPUTE
from fivefold.planner import estimate_setting, simulate_step
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
from fivefold.records.steps import StepRecord, shares_of

Change = Callable[[ActionNode], ActionNode]
NodeKey = tuple[int, Step]
What = Literal["compute", "straggler", "collective", "message", "pause", "around"]
PAIR = "X"  # the kind of an overlapped forward and backward
UPDATE = "update"
_NEGLIGIBLE = 0.02  # share of the plan: a smaller difference needs no cause
_MOST = 0.75  # share of a cause: a part that explains this much is named instead
_LEAST = 0.005  # share of the plan below which a cause is not listed
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
    change: Change | None = None  # of an action to the plan; None outside of the pipeline


class CausePart(NamedTuple):
    """What a cause adds to the difference if causes are set to the plan one after the other.

    Without a cause it is what is left in the end; `residual` marks what is left of a cause after
    the named one, which is a part of it. `share` is that of all parts, whatever their signs, so
    that shares are between 0 and 1 and sum to 1 even if slow and fast parts cancel.
    """

    cause: Cause | None
    residual: bool
    seconds: float
    share: float


@dataclass(frozen=True)
class Comparison:
    """A measured pipeline and the expected one, in seconds since its first action."""

    graph: ActionGraph
    ran: Timeline
    played: Timeline
    full_step: bool  # whether the full step is compared, or only its pipeline
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
        cause = max(self.causes, key=lambda candidate: sign * candidate.gain)
        return narrowed(cause) if sign * cause.gain > 0 else None

    @cached_property
    def parts(self) -> list[CausePart]:
        """The difference in parts that sum to it, that of the named cause first."""
        named = self.named
        large = [
            deviation for deviation in self.causes if abs(deviation.gain) >= _LEAST * self.planned
        ]
        causes = [] if named is None else [(named, False)]
        for candidate in large:
            inside = named is not None and _contains(candidate, named)
            if candidate is not named:
                causes.append((candidate, True) if inside else (narrowed(candidate), False))
        nodes, makespan, seconds = list(self.graph.nodes), self.graph.makespan, list[float]()
        for candidate, _ in causes:
            if candidate.change is None:
                seconds.append(candidate.gain)
                continue
            nodes = list(map(candidate.change, nodes))
            shorter = self.graph.play(nodes)
            seconds.append(makespan - shorter)
            makespan = shorter
        seconds.append(self.difference - sum(seconds))
        parts = zip([*causes, (None, True)], seconds, shares_of(seconds), strict=True)
        cause_parts = [CausePart(*cause, *amounts) for cause, *amounts in parts]
        return [part for part in cause_parts if part.share > 0 or not part.residual]


def _contains(cause: Cause, other: Cause) -> bool:
    return cause is other or any(_contains(part, other) for part in cause.parts)


def narrowed(cause: Cause) -> Cause:
    """The smallest part of a cause that explains most of it."""
    sign = 1 if cause.gain > 0 else -1
    part = max(cause.parts, key=lambda candidate: sign * candidate.gain, default=None)
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
    seconds = graph.makespan
    planned = expected.played.makespan
    is_complete = expected.around is not None
    if expected.around is not None:
        planned += sum(expected.around.values())
        known = None if record is None else record.seconds
        measured = spans.end - spans.begin if known is None else known
        seconds = max(measured, graph.makespan)
        causes += _around(expected.around, graph, spans, seconds)
    causes.sort(key=lambda cause: -abs(cause.gain))
    return Comparison(
        graph, _ran(graph), expected.played, is_complete, seconds, planned, tuple(causes)
    )


def own_seconds(rank_spans: RankSpans) -> float:
    """Seconds of computation of a rank: its actions without waits and collectives."""
    inside = collective_seconds(rank_spans)
    total = sum(did.end - did.ready for did in rank_spans.actions)
    return total - sum(sum(axis_seconds.values()) for axis_seconds in inside)


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
    starts, ends = (tuple(tuple(pair[i] for pair in row) for row in rows) for i in (0, 1))
    return replace(played, starts=starts, ends=ends)


def _key(node: ActionNode) -> NodeKey:
    return node.pp_rank, node.step


def _gain(graph: ActionGraph, change: Change) -> float:
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

        meant = [node for node in graph.nodes if is_meant(node)]
        planned, measured = fmean(n.planned for n in meant), fmean(map(_computed, meant))

        def change(node: ActionNode) -> ActionNode:
            seconds = node.planned + sum(node.excess.values())
            return replace(node, seconds=seconds) if is_meant(node) else node

        gain = _gain(graph, change)
        return Cause("compute", gain, planned, measured, stage=stage, kind=kind, change=change)

    pairs = sorted({(stage_of(node.step), kind_of(node.step)) for node in graph.nodes})
    alone = list(_stragglers(graph, ranks, peers))
    single = {pair: cause(*pair) for pair in pairs}
    by_stage: list[Cause] = []
    for stage in sorted({stage for stage, _ in pairs}):
        slow = [stage_cause for stage_cause in alone if stage_cause.stage == stage]
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
    for pp_rank, rank_spans in enumerate(ranks):
        peer_seconds = [
            own_seconds(peer) for peer in peers.get(pp_rank, ()) if peer.rank != rank_spans.rank
        ]
        rank_seconds = own_seconds(rank_spans)
        if peer_seconds and rank_seconds >= _STRAGGLES * median(peer_seconds):
            share = (rank_seconds - median(peer_seconds)) / len(rank_spans.actions)
            change, stage = _shorter(pp_rank, share), stage_of(rank_spans.actions[0].step)
            yield Cause(
                *("straggler", _gain(graph, change), median(peer_seconds), rank_seconds, stage),
                pp_rank=pp_rank,
                change=change,
            )


def _shorter(pp_rank: int, late: float) -> Change:
    """The actions of a rank are shorter by so many seconds."""

    def change(node: ActionNode) -> ActionNode:
        seconds = max(0.0, node.seconds - late) if node.pp_rank == pp_rank else node.seconds
        return replace(node, seconds=seconds)

    return change


def _without(axis: str) -> Change:
    """Collectives of an axis take as long as planned."""

    def change(node: ActionNode) -> ActionNode:
        seconds = max(0.0, node.seconds - node.excess.get(axis, 0.0))
        excess = {name: late for name, late in node.excess.items() if name != axis}
        return replace(node, seconds=seconds, excess=excess)

    return change


def _collectives(graph: ActionGraph) -> Iterator[Cause]:
    """The extra time of collectives within actions, by axis."""
    for axis in sorted({axis for node in graph.nodes for axis in node.excess}):
        planned = sum(graph.expected.inside(node.step).get(axis, 0.0) for node in graph.nodes)
        late = sum(node.excess.get(axis, 0.0) for node in graph.nodes)
        gain = _gain(graph, _without(axis))
        yield Cause("collective", gain, planned, planned + late, axis=axis, change=_without(axis))


def _messages(graph: ActionGraph) -> Cause:
    """Messages that were waited for: all, by pair of ranks, and the latest of each pair."""
    usual = max(graph.expected.played.costs.transfer)
    waiting = [node for node in graph.nodes if node.causes and node.message > usual]

    def cause(meant: Sequence[ActionNode]) -> Cause:
        keys = {_key(node) for node in meant}

        def change(node: ActionNode) -> ActionNode:
            return replace(node, message=usual) if _key(node) in keys else node

        measured = fmean(node.message for node in meant) if meant else usual
        return Cause("message", _gain(graph, change), usual, measured, change=change)

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
        def change(node: ActionNode) -> ActionNode:
            return replace(node, pause=0.0) if node.pp_rank in pp_ranks else node

        total = sum(node.pause for node in graph.nodes if node.pp_rank in pp_ranks)
        alone = pp_ranks[0] if len(pp_ranks) == 1 else None
        return Cause("pause", _gain(graph, change), 0.0, total, pp_rank=alone, change=change)

    pp_ranks = range(len(graph.ranks))
    return cause(pp_ranks)._replace(parts=tuple(cause([pp_rank]) for pp_rank in pp_ranks))


def _around(
    planned: Mapping[str, float], graph: ActionGraph, spans: StepSpans, seconds: float
) -> Iterator[Cause]:
    """Time outside of the pipeline: collectives of data ranks, and the update with the rest.

    It is measured on the rank whose pipeline ended last, because the others wait for that rank.
    """
    last = max(graph.ranks, key=lambda rank_spans: rank_spans.actions[-1].end)
    end = last.actions[-1].end
    after = last.actions[-1]._replace(begin=end, ready=end, end=max(end, spans.end))
    calls = collective_seconds(replace(last, actions=(after,)))[0]
    total = max(0.0, seconds - graph.makespan)
    moved = min(total, sum(calls.values()))
    for axis, measured in ((DATA, moved), (UPDATE, total - moved)):
        expected = planned.get(axis, 0.0)
        yield Cause("around", measured - expected, expected, measured, axis=axis)


# What a measured step is compared with: the planner's estimate, or the mean times of the run.


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
        *(tuple(factor * seconds for seconds in column) for column in times), overlap=costs.overlap
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
    for rank_spans in ranks:
        for did, inside in zip(rank_spans.actions, collective_seconds(rank_spans), strict=True):
            seconds.setdefault(kind_of(did.step), []).append(did.end - did.ready)
            calls.setdefault(kind_of(did.step), []).append(inside)
    mean = {kind: fmean(durations) for kind, durations in seconds.items()}
    weight = mean.get(WEIGHT_GRAD, 0.0)
    backward = mean[INPUT_GRAD] if INPUT_GRAD in mean else mean.get(BACKWARD, 0.0) - weight
    pair = mean.get(FORWARD, 0.0) + backward + weight
    stages = schedule.num_stages
    costs = Costs(
        *((value,) * stages for value in (mean.get(FORWARD, 0.0), backward, weight, 0.0)),
        overlap=mean[PAIR] / pair if PAIR in mean and pair else 1.0,
    )
    usual = {
        kind: {
            axis: fmean(table.get(axis, 0.0) for table in tables)
            for axis in {axis for table in tables for axis in table}
        }
        for kind, tables in calls.items()
    }
    return Expectation(
        play(as_run(schedule), costs), lambda step: usual.get(kind_of(step), {}), None
    )


def as_run(schedule: Schedule) -> Schedule:
    """The schedule with adjacent I and W merged, as the runtime merges them."""
    order = tuple(merged(schedule, rank) for rank in range(schedule.num_ranks))
    return replace(schedule, order=order)
