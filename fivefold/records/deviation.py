"""One step of a pipeline as it ran, beside the plan: what explains the difference.

The measured step is played again from its own parts: the seconds of every action, of every message
that was waited for, and of every pause. With one part as planned and all else as measured it ends
earlier, and by how much is what that part explains. A slow stage that others merely wait for is so
found where it is, not where it is waited for.
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
from fivefold.planner import setting_of
from fivefold.planner.estimate import COMPUTE, forecast
from fivefold.records import StepRecord
from fivefold.records.spans import (
    DATA,
    INSIDE,
    ActionGraph,
    ActionNode,
    Expectation,
    RankSpans,
    StepSpans,
    covered,
)

What = Literal["compute", "straggler", "collective", "message", "pause", "around"]
PAIR = "X"  # the kind of a forward and a backward that run as one
UPDATE = "update"
_ALIKE = 0.02  # of the plan: less is no difference that needs a name
_MOST_OF_IT = 0.75  # of what a cause explains: then a part of it is the better name
_SLOWER = 1.1  # than the other ranks of its stage


class Cause(NamedTuple):
    """Something that differs; with it as planned the step would be shorter by `gain` seconds.

    `planned` and `measured` are seconds of one action or message where there are several, and
    else of the step.
    """

    what: What
    gain: float
    planned: float
    measured: float
    stage: int | None = None
    kind: str | None = None
    axis: str | None = None
    place: int | None = None  # of a pipeline rank
    source: int | None = None
    action: str | None = None
    cause: str | None = None
    parts: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A pipeline as it ran beside what was expected; seconds from the begin of its first action."""

    ran: Timeline
    played: Timeline
    whole: bool  # whether the step is compared, or its pipeline alone
    seconds: float
    planned: float
    causes: tuple[Cause, ...]

    @property
    def difference(self) -> float:
        """Seconds that it took longer."""
        return self.seconds - self.planned

    @cached_property
    def named(self) -> Cause | None:
        """What explains most of the difference; None where there is next to none."""
        if abs(self.difference) < _ALIKE * self.planned:
            return None
        sign = 1 if self.difference > 0 else -1
        found = max(self.causes, key=lambda one: sign * one.gain)
        return narrowed(found) if sign * found.gain > 0 else None


def narrowed(cause: Cause) -> Cause:
    """The smallest part of a cause that still explains most of what it does."""
    sign = 1 if cause.gain > 0 else -1
    part = max(cause.parts, key=lambda one: sign * one.gain, default=None)
    if part is None or sign * part.gain < _MOST_OF_IT * sign * cause.gain:
        return cause
    return narrowed(part)


def compare(
    expected: Expectation,
    spans: StepSpans,
    column: Sequence[int],
    record: StepRecord | None,
    peers: Mapping[int, Sequence[RankSpans]],
) -> Comparison:
    """Hold the ranks of one pipeline, `worked` spans of them, against what was expected.

    `peers` are other ranks by the pipeline rank whose stages they have too.
    """
    ranks = [spans.ranks[rank] for rank in column]
    net = ActionGraph(expected, ranks)
    causes = [_compute(net, ranks, peers), *_collectives(net), _messages(net), _pauses(net)]
    seconds, planned, whole = net.makespan, expected.played.makespan, expected.around is not None
    if expected.around is not None:
        planned += sum(expected.around.values())
        told = spans.end - spans.begin if record is None else record.seconds
        seconds = max(told, net.makespan)
        causes += _around(expected.around, net, spans, seconds)
    causes.sort(key=lambda one: -abs(one.gain))
    return Comparison(_ran(net), expected.played, whole, seconds, planned, tuple(causes))


def own_seconds(one: RankSpans) -> float:
    """What a rank computed itself: its actions without waiting and without collectives."""
    inside = covered(one)
    total = sum(did.end - did.ready for did in one.actions)
    return total - sum(sum(each.values()) for each in inside)


def kind_of(step: Step) -> str:
    """F, B, I, W, or X for a pair."""
    return PAIR if isinstance(step, Overlap) else step.kind


def stage_of(step: Step) -> int:
    return actions_of(step)[0].stage


def _ran(net: ActionGraph) -> Timeline:
    """The measured step in the clothes of a played one."""
    played, times = net.expected.played, net.times(net.nodes)
    rows: list[list[tuple[float, float]]] = [[] for _ in played.schedule.order]
    for node, time in zip(net.nodes, times, strict=True):
        rows[node.place].append(time)
    starts, ends = (tuple(tuple(one[i] for one in row) for row in rows) for i in (0, 1))
    return replace(played, starts=starts, ends=ends)


def _gain(net: ActionGraph, change: Callable[[ActionNode], ActionNode]) -> float:
    return net.makespan - net.play([change(node) for node in net.nodes])


def _computed(node: ActionNode) -> float:
    """Without what collectives took longer."""
    return node.seconds - sum(node.excess.values())


def _compute(
    net: ActionGraph, ranks: Sequence[RankSpans], peers: Mapping[int, Sequence[RankSpans]]
) -> Cause:
    """Actions without their collectives: all, by kind, by stage, and ranks that are slow alone."""

    def cause(stage: int | None = None, kind: str | None = None) -> Cause:
        def is_meant(node: ActionNode) -> bool:
            return stage in (None, stage_of(node.step)) and kind in (None, kind_of(node.step))

        def as_planned(node: ActionNode) -> ActionNode:
            late = _computed(node) - node.planned
            return replace(node, seconds=node.seconds - late) if is_meant(node) else node

        meant = [node for node in net.nodes if is_meant(node)]
        planned, measured = fmean(n.planned for n in meant), fmean(map(_computed, meant))
        gain = _gain(net, as_planned)
        return Cause("compute", gain, planned, measured, stage=stage, kind=kind)

    pairs = sorted({(stage_of(node.step), kind_of(node.step)) for node in net.nodes})
    alone = list(_stragglers(net, ranks, peers))
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
    net: ActionGraph, ranks: Sequence[RankSpans], peers: Mapping[int, Sequence[RankSpans]]
) -> Iterator[Cause]:
    """Ranks that compute longer than others with the same stages; each part of its first stage."""
    for place, one in enumerate(ranks):
        others = [own_seconds(each) for each in peers.get(place, ()) if each.rank != one.rank]
        mine = own_seconds(one)
        if others and mine >= _SLOWER * median(others):
            share = (mine - median(others)) / len(one.actions)
            gain = _without(net, lambda node, here=place, s=share: s if node.place == here else 0.0)
            stage = stage_of(one.actions[0].step)
            yield Cause("straggler", gain, median(others), mine, stage=stage, place=place)


def _without(net: ActionGraph, late: Callable[[ActionNode], float]) -> float:
    """What the step would be shorter by, were every action shorter by its own part."""
    return _gain(net, lambda node: replace(node, seconds=max(0.0, node.seconds - late(node))))


def _collectives(net: ActionGraph) -> Iterator[Cause]:
    """By axis: what collectives inside of actions take longer."""
    for axis in sorted({axis for node in net.nodes for axis in node.excess}):
        planned = sum(net.expected.inside(node.step).get(axis, 0.0) for node in net.nodes)
        late = sum(node.excess.get(axis, 0.0) for node in net.nodes)
        gain = _without(net, lambda node, axis=axis: node.excess.get(axis, 0.0))
        yield Cause("collective", gain, planned, planned + late, axis=axis)


def _messages(net: ActionGraph) -> Cause:
    """Messages that were waited for: all, by the pair of ranks, and each that is late by itself."""
    usual = max(net.expected.played.costs.transfer)
    waiting = [node for node in net.nodes if node.causes and node.message > usual]

    def cause(meant: Sequence[ActionNode]) -> Cause:
        ids = {id(node) for node in meant}
        gain = _gain(net, lambda node: replace(node, message=usual) if id(node) in ids else node)
        measured = fmean(node.message for node in meant) if meant else usual
        return Cause("message", gain, usual, measured)

    pairs: dict[tuple[int, int], list[ActionNode]] = {}
    for node in waiting:
        pairs.setdefault((net.nodes[node.causes[-1]].place, node.place), []).append(node)
    parts: list[Cause] = []
    for (source, place), meant in pairs.items():
        late = max(meant, key=lambda node: node.message)
        action, giver = str(late.step), str(net.nodes[late.causes[-1]].step)
        where = {"source": source, "place": place}
        worst = cause([late])._replace(**where, action=action, cause=giver)
        parts.append(cause(meant)._replace(**where, parts=(worst,)))
    return cause(waiting)._replace(parts=tuple(parts))


def _pauses(net: ActionGraph) -> Cause:
    """Time in which a rank had all that it needs and did nothing, by rank."""

    def cause(places: Sequence[int]) -> Cause:
        gain = _gain(net, lambda node: replace(node, pause=0.0) if node.place in places else node)
        total = sum(node.pause for node in net.nodes if node.place in places)
        return Cause("pause", gain, 0.0, total, place=places[0] if len(places) == 1 else None)

    places = range(len(net.ranks))
    return cause(places)._replace(parts=tuple(cause([place]) for place in places))


def _around(
    planned: Mapping[str, float], net: ActionGraph, spans: StepSpans, seconds: float
) -> Iterator[Cause]:
    """Outside of the pipeline: sums and gathers of data ranks, and the update with the rest.

    As the rank whose pipeline ended last sees it: others wait for it there.
    """
    last = max(net.ranks, key=lambda one: one.actions[-1].end)
    end = last.actions[-1].end
    behind = last.actions[-1]._replace(begin=end, ready=end, end=max(end, spans.end))
    calls = covered(replace(last, actions=(behind,)))[0]
    total = max(0.0, seconds - net.makespan)
    moved = min(total, sum(calls.values()))
    for axis, measured in ((DATA, moved), (UPDATE, total - moved)):
        expected = planned.get(axis, 0.0)
        yield Cause("around", measured - expected, expected, measured, axis=axis)


# What a measured step is held against: the planner's forecast, or the run's own means.


def from_plan(plan: Plan) -> Expectation | None:
    """The planner's forecast of a step, as the run was made; None where it knows no machine.

    Traffic inside of an action is the share that it has in the work of the busiest rank.
    """
    if plan.machine is None:
        return None
    recipe = plan.wishes.train
    kernels = "compiled" if recipe.compile else "eager"
    setting, _ = setting_of(plan.machine, plan.precision, 0.0, kernels, 1.0)
    known = forecast(plan, setting, "nvme" if recipe.disk else recipe.offload)
    costs, factor = known.timeline.costs, setting.stack.factor
    times = (costs.forward, costs.backward, costs.weight, costs.transfer)
    scaled = Costs(
        *(tuple(factor * each for each in column) for column in times), overlap=costs.overlap
    )
    busy = sum(known.parts.get(name, 0.0) for name in (*COMPUTE, "launch", *INSIDE))
    shares = {axis: known.parts.get(axis, 0.0) / busy for axis in INSIDE}

    def inside(step: Step) -> Mapping[str, float]:
        return {axis: share * scaled.of(step) for axis, share in shares.items()}

    around = {
        DATA: known.parts.get("dp", 0.0),
        UPDATE: sum(known.parts.get(name, 0.0) for name in ("optimizer", "offload", "fixed")),
    }
    return Expectation(play(as_run(plan.schedule), scaled), inside, around)


def from_means(schedule: Schedule, ranks: Sequence[RankSpans]) -> Expectation:
    """The schedule with the mean of each kind of action as it was measured, and free messages."""
    seconds: dict[str, list[float]] = {}
    calls: dict[str, list[dict[str, float]]] = {}
    for one in ranks:
        for did, inside in zip(one.actions, covered(one), strict=True):
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
    """The schedule with neighbouring I and W joined, as the runtime joins them."""
    order = tuple(merged(schedule, rank) for rank in range(schedule.num_ranks))
    return replace(schedule, order=order)
