"""What was measured beside what was expected: losses beside those of one process that reads the
same text through the same step, memory and traffic beside the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fivefold.core.batch import Batch
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.cost.collectives import least_traffic_share, predict_traffic
from fivefold.cost.layer_collectives import UNEVEN_AXES
from fivefold.cost.static_memory import static_bytes
from fivefold.train.state import (
    AxisTraffic,
    RankMemory,
    TrainedRank,
    TrainSettings,
    count_flips,
    traffic_by_axis,
)

EXACT = 1e-9  # float64: the most that losses may differ, in nats
LEAST = 2e-6  # float32: allowed even if two runs of one process agree better
_SPREADS = 3


@dataclass(frozen=True)
class Check:
    """Losses beside those of one process, in nats: the largest difference of the first `steps`.

    `spread` is the difference of two runs of one process that sum in another order; None in
    float64, which needs none. `flips` of `routed` tokens times layers had other experts.
    """

    steps: int  # that the ranks and the one process have both run
    loss: float  # of one process in the last of them
    difference: float
    spread: float | None
    allowed: float
    flips: int
    routed: int

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


def num_references(plan: Plan, settings: TrainSettings) -> int:
    """How many runs of one process a check takes."""
    exact = settings.dtype == "float64" and plan.units.grad_dtype == "fp32"
    return 1 if exact else 2


def single_process(plan: Plan) -> Plan:
    """The same training on one rank, which takes the microbatches of all data ranks in turn."""
    batch = plan.batch
    batch = Batch.over(1, batch)
    return replace(plan, layout=Layout(), batch=batch, stage_layers=None, ep_nodes=1)


def judge(plan: Plan, runs: Sequence[TrainedRank], references: Sequence[TrainedRank]) -> Check:
    """Compare the ranks with one process; a second run of it, if there is one, gives the spread.

    A request to stop reaches each of them in another step, so the steps that all have run count.
    """
    everyone = (*runs, *references)
    stopped = any(run.stopped for run in everyone)
    steps = min(len(run.losses) for run in everyone) if stopped else None
    runs, references = (
        [replace(run, losses=run.losses[:steps], routes=run.routes[:steps]) for run in some]
        for some in (runs, references)
    )
    truth, *others = references
    spread = max((_largest(other.losses, truth.losses) for other in others), default=None)
    flips, routed = count_flips(plan, [run.routes for run in runs], truth.routes)
    return Check(
        steps=len(truth.losses),
        loss=truth.losses[-1],
        difference=max(_largest(run.losses, truth.losses) for run in runs),
        spread=spread,
        allowed=EXACT if spread is None else max(_SPREADS * spread, LEAST),
        flips=flips,
        routed=routed,
    )


def _largest(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference; infinite if a loss is not a number."""
    differences = [abs(one - other) for one, other in zip(found, wanted, strict=True)]
    return max(each if each == each else float("inf") for each in differences)


@dataclass(frozen=True)
class MemoryMatch:
    """The memory of the rank that has most at its last update."""

    rank: int
    planned: RankMemory
    measured: RankMemory
    num_as_planned: int  # ranks whose memory is as planned, to the byte


@dataclass(frozen=True)
class MeasuredRun:
    """The memory of the ranks, and the traffic of all of them in one step.

    The step is the last one that is known, or the first whose traffic differs from the plan. It is
    summed over all ranks, because what a rank sends to experts depends on its tokens. `memory` is
    None if the plan does not know the optimizer, or if its states are offloaded.
    """

    memory: MemoryMatch | None
    step: int
    planned_traffic: dict[str, AxisTraffic]
    traffic: dict[str, AxisTraffic]
    traffic_as_planned: bool  # in every step that is known

    def to_json(self) -> dict[str, Any]:
        """What `train --json` says of it."""
        by_source = {"planned": self.planned_traffic, "measured": self.traffic}
        traffic = {
            "step": self.step,
            "match": self.traffic_as_planned,
            **{
                name: {axis: one._asdict() for axis, one in axes.items()}
                for name, axes in by_source.items()
            },
        }
        memory = self.memory
        if memory is None:
            return {"memory": None, "traffic": traffic}
        sizes = {"planned": memory.planned, "measured": memory.measured}
        return {
            "memory": {
                "rank": memory.rank,
                "ranks_as_planned": memory.num_as_planned,
                **{name: {**asdict(each), "total": each.total} for name, each in sizes.items()},
            },
            "traffic": traffic,
        }


def compare_with_plan(
    plan: Plan, settings: TrainSettings, runs: list[TrainedRank]
) -> MeasuredRun | None:
    """Measured memory and traffic beside the plan; None if no step was run."""
    num_steps = len(runs[0].traffic)
    if not num_steps:
        return None
    ranks = range(plan.layout.world)
    planned = _sum_ranks(_planned_traffic(plan, settings, rank) for rank in ranks)
    steps = [_sum_ranks(run.traffic[number] for run in runs) for number in range(num_steps)]
    differing = [number for number, one in enumerate(steps) if not _matches(plan, planned, one)]
    shown = differing[0] if differing else num_steps - 1
    return MeasuredRun(
        memory=_memory(plan, settings, runs),
        step=runs[0].first_step + shown,
        planned_traffic=planned,
        traffic=steps[shown],
        traffic_as_planned=not differing,
    )


def _memory(plan: Plan, settings: TrainSettings, runs: list[TrainedRank]) -> MemoryMatch | None:
    recipe = settings.recipe
    measured = [run.memory for run in runs if run.memory is not None]
    on_device = recipe.states == "fp32" and recipe.offload == recipe.offload_grads == "none"
    known = on_device and not recipe.optimizer_kind.full_matrices
    if not known or len(measured) < len(runs):
        return None
    estimates = [
        static_bytes(
            plan,
            rank,
            itemsize=settings.weights.itemsize,
            optimizer=recipe.optimizer,
            master=settings.master,
        )
        for rank in range(plan.layout.world)
    ]
    planned = [RankMemory.planned(estimate) for estimate in estimates]
    worst = max(range(len(measured)), key=lambda rank: measured[rank].total)
    equal = sum(one == other for one, other in zip(measured, planned, strict=True))
    return MemoryMatch(worst, planned[worst], measured[worst], equal)


def _matches(
    plan: Plan, expected: Mapping[str, AxisTraffic], found: Mapping[str, AxisTraffic]
) -> bool:
    """Whether traffic is as planned; to experts it may be less where slots are dropped."""
    if expected.keys() != found.keys():
        return False
    for axis, planned in expected.items():
        uneven = axis in UNEVEN_AXES or (axis == "etp" and plan.fp8 is not None)  # maxima of rows
        least = least_traffic_share(plan, axis) if uneven else 1.0
        calls, size = found[axis]
        if calls != planned.calls or not least * planned.bytes <= size <= planned.bytes:
            return False
    return True


def _planned_traffic(plan: Plan, settings: TrainSettings, rank: int) -> dict[str, AxisTraffic]:
    listed = predict_traffic(
        plan,
        rank,
        itemsize=settings.weights.itemsize,
        matrices=settings.recipe.optimizer_kind.full_matrices,
    )
    return traffic_by_axis(Counter({(e.axis, e.kind, e.bytes, e.group): e.count for e in listed}))


def _sum_ranks(ranks: Iterable[Mapping[str, AxisTraffic]]) -> dict[str, AxisTraffic]:
    total: dict[str, AxisTraffic] = {}
    for axis, one in sorted(pair for rank in ranks for pair in rank.items()):
        before = total.get(axis, AxisTraffic(0, 0))
        total[axis] = AxisTraffic(before.calls + one.calls, before.bytes + one.bytes)
    return total
