"""What a measured step is compared with: the planner's estimate, or the mean times of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from fivefold.core.plan import Plan
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Costs,
    Schedule,
    Step,
    merged,
    play,
)
from fivefold.cost.step import COMPUTE
from fivefold.planner import estimate_setting, simulate_step
from fivefold.records.deviation import PAIR, UPDATE, kind_of
from fivefold.records.spans import DATA, INSIDE, Expectation, RankSpans, collective_seconds


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
