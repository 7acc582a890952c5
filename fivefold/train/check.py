"""What was measured beside what was expected: losses and gradients beside those of one process that
reads the same text through the same step, memory and traffic beside the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from fivefold.core.layout import Batch, Layout
from fivefold.core.plan import Plan
from fivefold.cost.memory import static_bytes
from fivefold.cost.traffic import UNEVEN_AXES, least_traffic_share, predict_traffic
from fivefold.train.state import (
    AxisTraffic,
    RankMemory,
    Routes,
    Sketch,
    TrainedRank,
    TrainSettings,
    count_flips,
    joined_routes,
    traffic_by_axis,
)

EXACT = 1e-9  # float64: the most that losses may differ, in nats, and gradients, as a share
LEAST = 2e-6  # float32: allowed even if two runs of one process agree better, in nats
_SPREADS = 3
_SMALL = 1e-3  # float64: a gradient below this share of the largest one may be rounding alone


@dataclass(frozen=True)
class GradientCheck:
    """The gradient nearest to its tolerance, or farthest beyond it.

    Differences are shares of its norm. `spread` is what two runs of one process differ by that sum
    in another order: in this gradient, or in nine of ten gradients of the step if that is more.
    None in float64.
    """

    steps: int  # compared: the first ones, before any token went to other experts
    step: int
    tensor: str
    difference: float
    spread: float | None
    allowed: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Check:
    """Comparison with the losses of one process, in nats: the largest difference of the first
    `steps`.

    `spread` is the difference of two runs of one process that sum in another order; None in
    float64, which needs none. A single number may agree by chance, so it is no less than the share
    by which most gradients differ: that is about how far logits do, and losses of single tokens.
    `flips` of `routed` tokens times layers had other experts. Where losses differ by more than is
    allowed, `difference` is that to a process whose tokens go to the experts of the ranks, and
    `tie_gap` is the most by which the score of such an expert is below one that it would choose. It
    may be as much as losses may differ: then two experts were a tie, which rounding decides.
    """

    steps: int  # that the ranks and the one process have both run
    loss: float  # of one process in the last of them
    difference: float
    spread: float | None
    allowed: float
    flips: int
    routed: int
    gradients: GradientCheck | None = None  # None: tokens of the first step had other experts
    tie_gap: float | None = None

    @property
    def passed(self) -> bool:
        sound = self.gradients is None or self.gradients.passed
        tied = self.tie_gap is None or self.tie_gap <= self.allowed
        return self.difference <= self.allowed and sound and tied


RankArguments = tuple[Plan, TrainSettings, bool, None, Sequence[Routes]]
"""Those of `run_rank`."""


def reference_runs(plan: Plan, settings: TrainSettings) -> list[RankArguments]:
    """Single-process runs of a check; a second one sums in another order."""
    single_plan, plain, eager = _single(plan, settings)
    exact = settings.dtype == "float64" and plan.units.grad_dtype == "fp32"
    reordered: list[RankArguments] = [] if exact else [(single_plan, eager, True, None, ())]
    return [(single_plan, plain, False, None, ()), *reordered]


def _single(plan: Plan, settings: TrainSettings) -> tuple[Plan, TrainSettings, TrainSettings]:
    """One process, its settings, and those without a compiler, which a dispatch mode does not
    allow."""
    recipe = replace(settings.recipe, sample_every=0, callbacks="")
    options = replace(settings.options, callbacks=())
    plain = replace(settings, options=options, folder=None, recipe=recipe)
    return single_process(plan), plain, replace(plain, recipe=replace(recipe, compile=False))


def single_process(plan: Plan) -> Plan:
    """The same training on one rank, with the microbatches of all data ranks in turn."""
    batch = plan.batch
    batch = Batch.over(1, batch)
    return replace(plan, layout=Layout(), batch=batch, stage_layers=None, ep_nodes=1)


def check_runs(
    plan: Plan,
    settings: TrainSettings,
    runs: Sequence[TrainedRank],
    references: Sequence[TrainedRank],
    run: Callable[[RankArguments], TrainedRank],
) -> Check | None:
    """Compare the ranks with one process; None if nothing was asked of one. If that fails and
    tokens went to other experts, it runs once more with those of the ranks: what differs then is
    no matter of ties."""
    if not references:
        return None
    check = judge(plan, runs, references)
    if check.passed or not check.flips or any(rank.stopped for rank in runs):
        return check
    single_plan, _, eager = _single(plan, settings)
    routes = joined_routes(plan, [rank.routes for rank in runs])
    truth = run((single_plan, eager, False, None, routes))
    difference, loss = _most_apart(runs, truth), truth.losses[-1]
    return replace(check, loss=loss, difference=difference, tie_gap=truth.tie_gap)


def judge(plan: Plan, runs: Sequence[TrainedRank], references: Sequence[TrainedRank]) -> Check:
    """Compare the ranks with one process; its second run, if any, gives the spread.

    A request to stop reaches each of them in another step, so the steps that all have run count.
    """
    everyone = (*runs, *references)
    stopped = any(run.stopped for run in everyone)
    steps = min(len(run.losses) for run in everyone) if stopped else None
    runs, references = (
        [replace(run, losses=run.losses[:steps], routes=run.routes[:steps]) for run in group]
        for group in (runs, references)
    )
    truth, *alternates = references
    routes = joined_routes(plan, [run.routes for run in runs])
    flips, routed = count_flips(routes, truth.routes)
    alike = runs[0].first_step + _steps_before(flips, alternates, truth)
    gradients = list(_compared_gradients(runs, references, alike))
    apart = [_largest(other.losses, truth.losses) for other in alternates]
    usual = [gradient.usual for gradient in gradients if gradient.usual is not None]
    spread = max([*apart, *usual]) if alternates else None
    return Check(
        steps=len(truth.losses),
        loss=truth.losses[-1],
        difference=_most_apart(runs, truth),
        spread=spread,
        allowed=EXACT if spread is None else max(_SPREADS * spread, LEAST),
        flips=sum(flips),
        routed=routed,
        gradients=max((gradient.worst for gradient in gradients), key=_share, default=None),
    )


def _steps_before(
    flips: Sequence[int], alternates: Sequence[TrainedRank], truth: TrainedRank
) -> int:
    """The steps before a token went to other experts, on the ranks or in another run of one
    process. It changes the gradients of these experts by far more than rounding does."""
    flipped = [number for number, count in enumerate(flips) if count]
    for other in alternates:
        for number, (routes, true_routes) in enumerate(
            zip(other.routes, truth.routes, strict=True)
        ):
            last = max((microbatch for _, microbatch in true_routes), default=0)
            turned = (routes[layer, last - microbatch] for layer, microbatch in true_routes)
            pairs = zip(turned, true_routes.values(), strict=True)
            flipped += [number] if any((a != b).any() for a, b in pairs) else []
    return min(flipped, default=len(truth.losses))


class _StepGradients(NamedTuple):
    """Gradients of one step: the worst one, and the usual spread of two runs of one process."""

    worst: GradientCheck
    usual: float | None


def _compared_gradients(
    runs: Sequence[TrainedRank], references: Sequence[TrainedRank], end: int
) -> Iterator[_StepGradients]:
    """The gradients of the first steps, before step `end`, beside those of one process."""
    truth, *alternates = references
    numbers = set(truth.sketches).intersection(*(run.sketches for run in (*runs, *alternates)))
    steps = sorted(number for number in numbers if number < end)
    for number in steps:
        true_sketches = truth.sketches[number]
        sizes = {name: _norm(sketch) for name, sketch in true_sketches.items()}
        if not all(map(isfinite, sizes.values())):  # one process skipped this step too
            return
        distances = _distances([run.sketches[number] for run in runs], true_sketches)
        usual, spreads = None, dict.fromkeys(sizes, 0.0)
        floor = _SMALL * max(sizes.values())
        allowed = {name: EXACT * max(size, floor) for name, size in sizes.items()}
        for other in alternates:
            spreads = _distances([other.sketches[number]], true_sketches)
            shares = [spreads[name] / size for name, size in sizes.items() if size]
            usual = median(shares or [0.0])
            # One run is one draw of what rounding does to a gradient, and may be small by chance:
            # nine of ten gradients of the step together are not.
            most = sorted(shares or [0.0])[len(shares) * 9 // 10 - 1]
            spreads = {name: max(spreads[name], most * size) for name, size in sizes.items()}
            allowed = {name: _SPREADS * spread for name, spread in spreads.items()}
        checks = [
            GradientCheck(
                steps=len(steps),
                step=number,
                tensor=name,
                difference=distances[name] / (size or 1.0),
                spread=spreads[name] / (size or 1.0) if alternates else None,
                allowed=allowed[name] / (size or 1.0),
            )
            for name, size in sizes.items()
        ]
        yield _StepGradients(max(checks, key=_share), usual)


def _share(check: GradientCheck) -> float:
    """How much of what is allowed a gradient takes."""
    if check.allowed:
        return check.difference / check.allowed
    return inf if check.difference else 0.0


def _distances(
    parts: Sequence[Mapping[str, Sketch]], truths: Mapping[str, Sketch]
) -> dict[str, float]:
    """How far the sketches of all ranks together are from those of one process, by weight."""
    distances: dict[str, float] = {}
    for name, truth in truths.items():
        total = sum((part[name] for part in parts if name in part), np.zeros_like(truth))
        distances[name] = _norm(total - truth)
    return distances


def _norm(sketch: Sketch) -> float:
    """The norm; infinite if a number is none."""
    norm = float(np.linalg.norm(sketch))
    return norm if norm == norm else inf


def _most_apart(runs: Sequence[TrainedRank], truth: TrainedRank) -> float:
    """The largest difference of a loss of any rank."""
    return max(_largest(run.losses, truth.losses) for run in runs)


def _largest(losses: Sequence[float], true_losses: Sequence[float]) -> float:
    """The largest difference; infinite if a loss is not a number."""
    differences = [abs(loss - other) for loss, other in zip(losses, true_losses, strict=True)]
    return max(difference if difference == difference else inf for difference in differences)


@dataclass(frozen=True)
class MemoryMatch:
    """Memory of the largest rank at its last update."""

    rank: int
    planned: RankMemory
    measured: RankMemory
    num_as_planned: int  # ranks whose memory is as planned, to the byte


@dataclass(frozen=True)
class MeasuredRun:
    """Measured memory of the ranks, and traffic of one step.

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
        """Convert to the JSON of `train --json`."""
        by_source = {"planned": self.planned_traffic, "measured": self.traffic}
        traffic = {
            "step": self.step,
            "match": self.traffic_as_planned,
            **{
                name: {axis: axis_traffic._asdict() for axis, axis_traffic in axes.items()}
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
                **{name: {**asdict(size), "total": size.total} for name, size in sizes.items()},
            },
            "traffic": traffic,
        }


def compare_with_plan(
    plan: Plan, settings: TrainSettings, runs: list[TrainedRank]
) -> MeasuredRun | None:
    """Compare measured memory and traffic with the plan; None without a step."""
    num_steps = len(runs[0].traffic)
    if not num_steps:
        return None
    ranks = range(plan.layout.world)
    planned = _sum_ranks(_planned_traffic(plan, settings, rank) for rank in ranks)
    steps = [_sum_ranks(run.traffic[number] for run in runs) for number in range(num_steps)]
    differing = [number for number, step in enumerate(steps) if not _matches(plan, planned, step)]
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
    equal = sum(value == other for value, other in zip(measured, planned, strict=True))
    return MemoryMatch(worst, planned[worst], measured[worst], equal)


def _matches(
    plan: Plan, expected: Mapping[str, AxisTraffic], traffic: Mapping[str, AxisTraffic]
) -> bool:
    """Whether traffic is as planned; to experts it may be less where slots are dropped."""
    if expected.keys() != traffic.keys():
        return False
    for axis, planned in expected.items():
        uneven = axis in UNEVEN_AXES or (axis == "etp" and plan.fp8 is not None)  # maxima of rows
        least = least_traffic_share(plan, axis) if uneven else 1.0
        calls, size = traffic[axis]
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
    for axis, axis_traffic in sorted(pair for rank in ranks for pair in rank.items()):
        before = total.get(axis, AxisTraffic(0, 0))
        total[axis] = AxisTraffic(
            before.calls + axis_traffic.calls, before.bytes + axis_traffic.bytes
        )
    return total
