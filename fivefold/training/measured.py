"""What a training held and moved, beside what was planned before it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fivefold.core.memory import static_bytes
from fivefold.core.plan import Plan
from fivefold.core.routed import UNEVEN, least_share
from fivefold.core.traffic import predict
from fivefold.training.held import Held
from fivefold.training.loop import Moved, RankRun, by_axis
from fivefold.training.settings import Settings


@dataclass(frozen=True)
class Memory:
    """What the rank that holds most has held at its last update."""

    rank: int
    planned: Held
    held: Held
    num_as_planned: int  # ranks that hold what was planned, to the byte


@dataclass(frozen=True)
class Measured:
    """What ranks held, and what all of them moved in a step.

    The step is the last one that is known, or the first that moved something else than was planned.
    Summed over all ranks, for what a rank sends to experts is up to its tokens. `memory` is None
    where the ledger does not know the optimizer, or where states live elsewhere.
    """

    memory: Memory | None
    step: int
    planned_moved: dict[str, Moved]
    moved: dict[str, Moved]
    moved_as_planned: bool  # in every step that is known


def beside_the_plan(plan: Plan, settings: Settings, runs: list[RankRun]) -> Measured | None:
    """Plan and training side by side; None where no step was run."""
    num_steps = len(runs[0].moved)
    if not num_steps:
        return None
    ranks = range(plan.layout.world)
    wanted = _together(_planned(plan, settings, rank) for rank in ranks)
    steps = [_together(run.moved[number] for run in runs) for number in range(num_steps)]
    off = [number for number, moved in enumerate(steps) if not _fits(plan, wanted, moved)]
    shown = off[0] if off else num_steps - 1
    return Measured(
        memory=_memory(plan, settings, runs),
        step=runs[0].first_step + shown,
        planned_moved=wanted,
        moved=steps[shown],
        moved_as_planned=not off,
    )


def _memory(plan: Plan, settings: Settings, runs: list[RankRun]) -> Memory | None:
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
    planned = [Held.planned(ledger) for ledger in ledgers]
    worst = max(range(len(held)), key=lambda rank: held[rank].total)
    alike = sum(one == other for one, other in zip(held, planned, strict=True))
    return Memory(worst, planned[worst], held[worst], alike)


def _grad_size(settings: Settings) -> int:
    return 4 if settings.master else settings.weights.itemsize


def _fits(plan: Plan, wanted: Mapping[str, Moved], found: Mapping[str, Moved]) -> bool:
    """Whether all was moved as planned; to experts it may be less where slots are dropped."""
    if wanted.keys() != found.keys():
        return False
    for axis, planned in wanted.items():
        least = least_share(plan, axis) if axis in UNEVEN else 1.0
        calls, size = found[axis]
        if calls != planned.calls or not least * planned.bytes <= size <= planned.bytes:
            return False
    return True


def _planned(plan: Plan, settings: Settings, rank: int) -> dict[str, Moved]:
    listed = predict(
        plan,
        rank,
        itemsize=settings.weights.itemsize,
        grad_itemsize=_grad_size(settings),
        matrices=settings.recipe.optimizer == "muon",
    )
    return by_axis(Counter({(e.axis, e.kind, e.bytes, e.group): e.count for e in listed}))


def _together(ranks: Iterable[Mapping[str, Moved]]) -> dict[str, Moved]:
    total: dict[str, Moved] = {}
    for axis, moved in sorted(pair for rank in ranks for pair in rank.items()):
        before = total.get(axis, Moved(0, 0))
        total[axis] = Moved(before.calls + moved.calls, before.bytes + moved.bytes)
    return total
