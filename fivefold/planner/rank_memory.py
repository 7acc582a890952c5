"""Peak memory of every rank of one plan, with the microbatches that its own schedule has in flight.

A search counts in-flight microbatches by closed forms; here the schedule's actions are followed one
by one. Between input and weight gradients a stage holds other tensors than before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fivefold.core.plan import Plan
from fivefold.core.recompute import Recompute
from fivefold.core.schedule.clock import StageBytes, peak_held
from fivefold.cost.grid import Array
from fivefold.cost.memory import rank_peak_memory
from fivefold.cost.memory_entries import MemoryEntries
from fivefold.cost.pipeline_ranks import RankLayers, RankStage
from fivefold.planner.setting import EstimateSetting, plan_arguments

Bytes = dict[str, float]


def fullest_memory(plan: Plan, setting: EstimateSetting) -> Bytes:
    """Peak bytes by category of the rank that has most."""
    return max(memory_by_pipeline_rank(plan, setting), key=lambda one: sum(one.values()))


def rank_memory(plan: Plan, setting: EstimateSetting, rank: int) -> Bytes:
    """Peak bytes of one rank by category, with the microbatches that its schedule has in flight."""
    return memory_by_pipeline_rank(plan, setting)[plan.layout.coord(rank).pp]


def memory_by_pipeline_rank(plan: Plan, setting: EstimateSetting) -> list[Bytes]:
    """The same for every rank of one pipeline."""
    placement, job = plan.schedule.placement, plan_arguments(plan, setting)
    ranks = [placement.stages_of(i) for i in range(plan.layout.pp)]
    copies = 2 if placement.mirrored else 1
    stage = _held_by(plan, ranks, copies)
    stage = stage._replace(flight=_flight(plan, MemoryEntries(*job), ranks) * copies)
    parts = rank_peak_memory(*job, stage)
    if plan.schedule.asynchronous:
        # An asynchronous rank stashes the weights with which microbatches in flight have begun.
        parts = {**parts, "weights": parts["weights"] * np.array(plan.schedule.weight_versions)}
    columns = {name: np.broadcast_to(each, plan.layout.pp) for name, each in parts.items()}
    return [{name: float(each[i]) for name, each in columns.items()} for i in range(len(ranks))]


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
