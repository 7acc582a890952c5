"""What a training held and moved, beside what was planned before it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fivefold.core.memory import static_bytes
from fivefold.core.plan import Plan
from fivefold.core.routed import UNEVEN, least_share
from fivefold.core.traffic import predict
from fivefold.training.held import Held
from fivefold.training.loop import Moved, RankRun, by_axis
from fivefold.training.settings import Settings


@dataclass(frozen=True)
class Measured:
    """Memory of the rank that holds most, and what all ranks moved in a step.

    The step is the last one, or the first that moved something else than was planned. Summed over
    all ranks, for what a rank sends to experts is up to its tokens.
    """

    rank: int
    planned_held: Held
    held: Held
    num_as_planned: int  # ranks that hold what was planned, to the byte
    step: int  # from 1
    planned_moved: dict[str, Moved]
    moved: dict[str, Moved]
    moved_as_planned: bool  # in every step


def beside_the_plan(plan: Plan, settings: Settings, runs: list[RankRun]) -> Measured:
    """Plan and training side by side."""
    size = getattr(torch, settings.dtype).itemsize
    ranks = range(plan.layout.world)
    ledgers = [
        static_bytes(plan, rank, itemsize=size, grad_itemsize=size, optimizer="adamw")
        for rank in ranks
    ]
    held = [run.held for run in runs if run.held is not None]
    planned = [Held.planned(ledger) for ledger in ledgers]
    worst = max(ranks, key=lambda rank: held[rank].total)
    wanted = _together(_planned(plan, rank, size) for rank in ranks)
    steps = [_together(run.moved[number] for run in runs) for number in range(settings.steps)]
    off = [number for number, moved in enumerate(steps) if not _fits(plan, wanted, moved)]
    shown = off[0] if off else settings.steps - 1
    return Measured(
        rank=worst,
        planned_held=planned[worst],
        held=held[worst],
        num_as_planned=sum(one == other for one, other in zip(held, planned, strict=True)),
        step=shown + 1,
        planned_moved=wanted,
        moved=steps[shown],
        moved_as_planned=not off,
    )


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


def _planned(plan: Plan, rank: int, size: int) -> dict[str, Moved]:
    listed = predict(plan, rank, itemsize=size, grad_itemsize=size)
    return by_axis(Counter({(e.axis, e.kind, e.bytes, e.group): e.count for e in listed}))


def _together(ranks: Iterable[Mapping[str, Moved]]) -> dict[str, Moved]:
    total: dict[str, Moved] = {}
    for axis, moved in sorted(pair for rank in ranks for pair in rank.items()):
        before = total.get(axis, Moved(0, 0))
        total[axis] = Moved(before.calls + moved.calls, before.bytes + moved.bytes)
    return total
