"""The training held against one process that reads the same text through the same step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.cost.collectives import UNEVEN, least_share, predict
from fivefold.cost.static_memory import static_bytes
from fivefold.train.loop import AxisTraffic, TrainedRank, by_axis
from fivefold.train.result import HeldBytes, count_flips
from fivefold.train.settings import TrainSettings

EXACT = 1e-9  # float64: the most that losses may differ, in nats
LEAST = 2e-6  # float32: what is allowed where two runs of one process happen to agree
_SPREADS = 3


@dataclass(frozen=True)
class Check:
    """Losses beside those of one process, in nats: the largest difference of all steps.

    `spread` is that of two runs of one process which differ only in the order of their sums; None
    in float64, which needs none. `flips` of `routed` tokens times layers had other experts.
    """

    loss: float  # the last one of one process
    difference: float
    spread: float | None
    allowed: float
    flips: int
    routed: int

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


def num_alone(settings: TrainSettings) -> int:
    """How many runs of one process a check takes."""
    return 1 if settings.dtype == "float64" else 2


def alone(plan: Plan) -> Plan:
    """The same training on one rank: the rows of each microbatch of each data rank together."""
    batch = plan.batch
    batch = replace(batch, dp=1, microbatches=batch.microbatches * batch.dp)
    return replace(plan, layout=Layout(), batch=batch, stage_layers=None, ep_nodes=1)


def judge(plan: Plan, runs: Sequence[TrainedRank], references: Sequence[TrainedRank]) -> Check:
    """The ranks beside one process, and beside a second run of it where there is one."""
    truth, *others = references
    spread = max((_largest(other.losses, truth.losses) for other in others), default=None)
    flips, routed = count_flips(plan, [run.routes for run in runs], truth.routes)
    return Check(
        loss=truth.losses[-1],
        difference=max(_largest(run.losses, truth.losses) for run in runs),
        spread=spread,
        allowed=EXACT if spread is None else max(_SPREADS * spread, LEAST),
        flips=flips,
        routed=routed,
    )


def _largest(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference; what is no number is infinitely far from one."""
    pairs = zip(found, wanted, strict=True)
    differences = [abs(one - other) for one, other in pairs]
    return max(each if each == each else float("inf") for each in differences)


# What a training held and moved, beside what was planned before it ran.


@dataclass(frozen=True)
class Memory:
    """What the rank that holds most has held at its last update."""

    rank: int
    planned: HeldBytes
    held: HeldBytes
    num_as_planned: int  # ranks that hold what was planned, to the byte


@dataclass(frozen=True)
class MeasuredRun:
    """What ranks held, and what all of them moved in a step.

    The step is the last one that is known, or the first that moved something else than was planned.
    Summed over all ranks, for what a rank sends to experts is up to its tokens. `memory` is None
    where the ledger does not know the optimizer, or where states live elsewhere.
    """

    memory: Memory | None
    step: int
    planned_moved: dict[str, AxisTraffic]
    moved: dict[str, AxisTraffic]
    moved_as_planned: bool  # in every step that is known


def beside_the_plan(
    plan: Plan, settings: TrainSettings, runs: list[TrainedRank]
) -> MeasuredRun | None:
    """Plan and training side by side; None where no step was run."""
    num_steps = len(runs[0].moved)
    if not num_steps:
        return None
    ranks = range(plan.layout.world)
    wanted = _together(_planned(plan, settings, rank) for rank in ranks)
    steps = [_together(run.moved[number] for run in runs) for number in range(num_steps)]
    off = [number for number, moved in enumerate(steps) if not _fits(plan, wanted, moved)]
    shown = off[0] if off else num_steps - 1
    return MeasuredRun(
        memory=_memory(plan, settings, runs),
        step=runs[0].first_step + shown,
        planned_moved=wanted,
        moved=steps[shown],
        moved_as_planned=not off,
    )


def _memory(plan: Plan, settings: TrainSettings, runs: list[TrainedRank]) -> Memory | None:
    recipe = settings.recipe
    held = [run.held for run in runs if run.held is not None]
    known = recipe.optimizer != "muon" and recipe.states == "fp32" and recipe.offload == "none"
    if not known or len(held) < len(runs):
        return None
    assert recipe.optimizer != "muon"
    ledgers = [
        static_bytes(
            plan,
            rank,
            itemsize=settings.weights.itemsize,
            grad_itemsize=_grad_size(settings),
            optimizer=recipe.optimizer,
            master=settings.master,
        )
        for rank in range(plan.layout.world)
    ]
    planned = [HeldBytes.planned(ledger) for ledger in ledgers]
    worst = max(range(len(held)), key=lambda rank: held[rank].total)
    alike = sum(one == other for one, other in zip(held, planned, strict=True))
    return Memory(worst, planned[worst], held[worst], alike)


def _grad_size(settings: TrainSettings) -> int:
    return 4 if settings.master else settings.weights.itemsize


def _fits(plan: Plan, wanted: Mapping[str, AxisTraffic], found: Mapping[str, AxisTraffic]) -> bool:
    """Whether all was moved as planned; to experts it may be less where slots are dropped."""
    if wanted.keys() != found.keys():
        return False
    for axis, planned in wanted.items():
        least = least_share(plan, axis) if axis in UNEVEN else 1.0
        calls, size = found[axis]
        if calls != planned.calls or not least * planned.bytes <= size <= planned.bytes:
            return False
    return True


def _planned(plan: Plan, settings: TrainSettings, rank: int) -> dict[str, AxisTraffic]:
    listed = predict(
        plan,
        rank,
        itemsize=settings.weights.itemsize,
        grad_itemsize=_grad_size(settings),
        matrices=settings.recipe.optimizer == "muon",
    )
    return by_axis(Counter({(e.axis, e.kind, e.bytes, e.group): e.count for e in listed}))


def _together(ranks: Iterable[Mapping[str, AxisTraffic]]) -> dict[str, AxisTraffic]:
    total: dict[str, AxisTraffic] = {}
    for axis, moved in sorted(pair for rank in ranks for pair in rank.items()):
        before = total.get(axis, AxisTraffic(0, 0))
        total[axis] = AxisTraffic(before.calls + moved.calls, before.bytes + moved.bytes)
    return total
