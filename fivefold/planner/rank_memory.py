"""Peak memory of every rank of one plan, with the actions of its own schedule.

A search counts microbatches in flight by closed forms. Here the actions of a plan are followed, and
for fivefold's own program all that each of them makes and frees (`cost/rank_ledger.py`). Without
that, for asynchronous schedules and narrow matmuls, what a stage saves is followed, and what it
holds between input and weight gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fivefold.core.plan import Plan
from fivefold.core.recompute import Recompute
from fivefold.core.schedule.clock import StageBytes, peak_held
from fivefold.core.weights import is_buildable
from fivefold.cost.grid import Array
from fivefold.cost.memory import CATEGORIES, rank_peak_memory
from fivefold.cost.memory_entries import MemoryEntries
from fivefold.cost.pipeline_ranks import RankLayers, RankStage
from fivefold.cost.rank_ledger import PlanLedger
from fivefold.planner.setting import EstimateSetting, plan_arguments

Bytes = dict[str, float]
_FULLEST = 4  # ranks that are followed to find the one that has most


def fullest_memory(plan: Plan, setting: EstimateSetting, enough: float = np.inf) -> Bytes:
    """Peak bytes by category of the rank that has most, of those that closed forms find fullest; or
    of the first of them with more than `enough`."""
    entries = MemoryEntries(*plan_arguments(plan, setting))
    if not _is_followed(plan, entries):
        return max(_by_closed_forms(plan, setting, entries), key=_total)
    order = range(plan.layout.pp)
    if plan.layout.pp > 1:
        closed = _by_closed_forms(plan, setting, entries)
        order = sorted(order, key=lambda place: -_total(closed[place]))
    ledger, found = PlanLedger(plan, entries), list[Bytes]()
    for place in order[:_FULLEST]:
        found.append(_with_overhead(entries, ledger.peak(place)))
        if _total(found[-1]) > enough:
            break
    return max(found, key=_total)


def rank_memory(plan: Plan, setting: EstimateSetting, rank: int) -> Bytes:
    """Peak bytes of one rank by category, with the microbatches that its schedule has in flight."""
    entries, place = MemoryEntries(*plan_arguments(plan, setting)), plan.layout.coord(rank).pp
    if _is_followed(plan, entries):
        return _followed(plan, entries, [place])[0]
    return _by_closed_forms(plan, setting, entries)[place]


def memory_by_pipeline_rank(plan: Plan, setting: EstimateSetting) -> list[Bytes]:
    """The same for every rank of one pipeline."""
    entries = MemoryEntries(*plan_arguments(plan, setting))
    if _is_followed(plan, entries):
        return _followed(plan, entries, range(plan.layout.pp))
    return _by_closed_forms(plan, setting, entries)


def _followed(plan: Plan, entries: MemoryEntries, places: Sequence[int]) -> list[Bytes]:
    """These ranks of the pipeline, operator by operator."""
    ledger = PlanLedger(plan, entries)
    return [_with_overhead(entries, ledger.peak(place)) for place in places]


def _by_closed_forms(plan: Plan, setting: EstimateSetting, entries: MemoryEntries) -> list[Bytes]:
    """All ranks of the pipeline, by what their stages save."""
    placement, job = plan.schedule.placement, plan_arguments(plan, setting)
    ranks = [placement.stages_of(i) for i in range(plan.layout.pp)]
    copies = 2 if placement.mirrored else 1
    stage = _held_by(plan, ranks, copies)
    stage = stage._replace(flight=_flight(plan, entries, ranks) * copies)
    parts = rank_peak_memory(*job, stage)
    if plan.schedule.asynchronous:
        # An asynchronous rank stashes the weights with which microbatches in flight have begun.
        parts = {**parts, "weights": parts["weights"] * np.array(plan.schedule.weight_versions)}
    columns = {name: np.broadcast_to(each, plan.layout.pp) for name, each in parts.items()}
    return [{name: float(each[i]) for name, each in columns.items()} for i in range(len(ranks))]


def _is_followed(plan: Plan, entries: MemoryEntries) -> bool:
    """Whether the operators of this plan are known one by one."""
    if not is_buildable(plan.shape):
        return False
    memory, stack = entries.memory, entries.stack
    if plan.shape.tuning is not None:  # frozen weights have other operators
        return False
    narrow = memory.input_bytes is not None and stack.fp8 is None
    return memory.unit_by_unit and not (
        narrow or plan.schedule.asynchronous or stack.frozen or memory.offloaded
    )


def _total(held: Bytes) -> float:
    return sum(held.values())


def _with_overhead(entries: MemoryEntries, held: Bytes) -> Bytes:
    """With what belongs to no tensor."""
    besides = entries.overhead(np.array([held.get("activations", 0.0)]))
    return {
        **{name: held.get(name, 0.0) for name in CATEGORIES},
        **{name: float(each[0]) for name, each in besides.items()},
    }


def _held_by(plan: Plan, groups: Sequence[Sequence[int]], copies: int = 1) -> RankStage:
    """The layers of each of these groups of stages, with one microbatch in flight."""
    layers = [[i for n in stages for i in plan.stages[n]] for stages in groups]

    def number(of_rule: Recompute | None = None) -> RankLayers:
        mine = [
            [i for n in stages if of_rule in (None, plan.recompute.of(n)) for i in plan.stages[n]]
            for stages in groups
        ]
        routed = [sum(map(plan.shape.is_moe_layer, each)) for each in mine]
        return RankLayers(np.array([*map(len, mine)]) / copies, np.array(routed) / copies)

    return RankStage(
        number(),
        copies=np.array([float(copies)]),
        flight=np.ones(len(groups)),
        embedding=np.array([float(0 in mine) for mine in layers]),
        head=np.array([float(plan.shape.layers - 1 in mine) for mine in layers]),
        by_rule=tuple((rule, number(rule)) for rule in dict.fromkeys(plan.recompute.rules)),
    )


def _flight(plan: Plan, entries: MemoryEntries, ranks: Sequence[Sequence[int]]) -> Array:
    """Microbatches that each rank of the pipeline holds at most, in units of what its layers save.

    What waits for a weight gradient counts with its own bytes.
    """
    held = entries.layers.held(_held_by(plan, [(n,) for n in range(len(plan.stages))]))
    saved, deferred = (np.broadcast_to(each, len(plan.stages)) for each in held)
    sizes: tuple[StageBytes, StageBytes] = (lambda n: float(saved[n]), lambda n: float(deferred[n]))
    return np.array(
        [
            peak_held(plan.schedule, rank, *sizes) / sum(saved[n] for n in mine)
            for rank, mine in enumerate(ranks)
        ]
    )
