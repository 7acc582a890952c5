"""Peak memory of every rank of one plan, with the actions of its own schedule.

A search counts microbatches in flight by closed forms. Here the actions of a plan are followed, and
for fivefold's own program all that each of them makes and frees (`cost/memory/rank_ledger.py`).
Without that, for asynchronous schedules and narrow matmuls, what a stage saves is followed, and
what it holds between input and weight gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from fivefold.core.layout import is_buildable
from fivefold.core.model import Recompute
from fivefold.core.plan import Plan
from fivefold.core.schedule import StageBytes, peak_held
from fivefold.cost import Array
from fivefold.cost.memory import CATEGORIES, MemoryEntries, PlanLedger, rank_peak_memory
from fivefold.cost.stages import RankLayers, RankStage, count_layers
from fivefold.planner.setting import EstimateSetting, plan_arguments

Bytes = dict[str, float]
_FULLEST = 4  # ranks that are followed to find the one that has most


class PlanRanks:
    """The ranks of one plan. Every rank of the pipeline is followed once, whoever asks for it."""

    def __init__(self, plan: Plan, setting: EstimateSetting) -> None:
        self.plan, self.job = plan, plan_arguments(plan, setting)
        self.entries = MemoryEntries(*self.job)
        self.is_followed = _is_followed(plan, self.entries)
        self._known: dict[int, Bytes] = {}

    @cached_property
    def _ledger(self) -> PlanLedger:
        return PlanLedger(self.plan, self.entries)

    @cached_property
    def _closed(self) -> list[Bytes]:
        """All ranks of the pipeline, by what their stages save."""
        plan, placement = self.plan, self.plan.schedule.placement
        ranks = [placement.stages_of(i) for i in range(plan.layout.pp)]
        copies = 2 if placement.mirrored else 1
        stage = _held_by(plan, ranks, copies)
        stage = stage._replace(flight=_flight(plan, self.entries, ranks) * copies)
        parts = rank_peak_memory(*self.job, stage)
        if plan.schedule.asynchronous:
            # An asynchronous rank stashes the weights with which microbatches in flight have begun.
            versions = np.array(plan.schedule.weight_versions)
            parts = {**parts, "weights": parts["weights"] * versions}
        columns = {
            name: np.broadcast_to(amounts, plan.layout.pp) for name, amounts in parts.items()
        }
        return [
            {name: float(column[i]) for name, column in columns.items()} for i in range(len(ranks))
        ]

    def peak(self, index: int) -> Bytes:
        """Of one rank of the pipeline: operator by operator, if they are known."""
        if not self.is_followed:
            return self._closed[index]
        if index not in self._known:
            self._known[index] = _with_overhead(self.entries, self._ledger.peak(index))
        return self._known[index]

    def peaks(self) -> list[Bytes]:
        """Of every rank of one pipeline."""
        return [self.peak(index) for index in range(self.plan.layout.pp)]

    def fullest(self, enough: float = np.inf) -> Bytes:
        """Of the rank that has most, of both ends and those that closed forms find fullest; or of
        the first of them with more than `enough`."""
        if not self.is_followed:
            return max(self._closed, key=_total)
        order: Sequence[int] = range(self.plan.layout.pp)
        if len(order) > (_FULLEST if np.isinf(enough) else 1):
            ends = (order[0], order[-1])  # with what closed forms tell least well: head and loss
            order = sorted(order, key=lambda position: -_total(self._closed[position]))
            order = list(dict.fromkeys((*order[:_FULLEST], *ends)))
        peaks: list[Bytes] = []
        for index in order:
            peaks.append(self.peak(index))
            if _total(peaks[-1]) > enough:
                break
        return max(peaks, key=_total)


def fullest_memory(plan: Plan, setting: EstimateSetting, enough: float = np.inf) -> Bytes:
    """Peak bytes by category of the fullest rank, or of one with more than `enough`."""
    return PlanRanks(plan, setting).fullest(enough)


def rank_memory(plan: Plan, setting: EstimateSetting, rank: int) -> Bytes:
    """Peak bytes of one rank by category, with the microbatches that its schedule has in flight."""
    return PlanRanks(plan, setting).peak(plan.layout.coord(rank).pp)


def memory_by_pipeline_rank(plan: Plan, setting: EstimateSetting) -> list[Bytes]:
    """The same for every rank of one pipeline."""
    return PlanRanks(plan, setting).peaks()


def _is_followed(plan: Plan, entries: MemoryEntries) -> bool:
    """Whether the operators of this plan are known one by one."""
    if not (is_buildable(plan.shape) or plan.shape.hybrid is not None):
        return False
    memory, stack = entries.memory, entries.stack
    if plan.shape.tuning is not None:  # frozen weights have other operators
        return False
    narrow = memory.input_bytes is not None and stack.fp8 is None
    return memory.unit_by_unit and not (
        narrow or plan.schedule.asynchronous or stack.frozen or memory.offloaded
    )


def _total(parts: Bytes) -> float:
    return sum(parts.values())


def _with_overhead(entries: MemoryEntries, parts: Bytes) -> Bytes:
    """With what belongs to no tensor."""
    besides = entries.overhead(np.array([parts.get("activations", 0.0)]))
    return {
        **{name: max(0.0, parts.get(name, 0.0)) for name in CATEGORIES},  # sums may end below 0
        **{name: float(amounts[0]) for name, amounts in besides.items()},
    }


def _held_by(plan: Plan, groups: Sequence[Sequence[int]], copies: int = 1) -> RankStage:
    """The layers of each of these groups of stages, with one microbatch in flight."""
    layers = [[i for n in stages for i in plan.stages[n]] for stages in groups]

    def number(of_rule: Recompute | None = None) -> RankLayers:
        rank_layers = [
            [i for n in stages if of_rule in (None, plan.recompute.of(n)) for i in plan.stages[n]]
            for stages in groups
        ]
        counts = np.array([count_layers(plan.shape, indices) for indices in rank_layers], float)
        return RankLayers(*counts.T / copies)

    return RankStage(
        number(),
        copies=np.array([float(copies)]),
        flight=np.ones(len(groups)),
        embedding=np.array([float(0 in stage_layers) for stage_layers in layers]),
        head=np.array([float(plan.shape.layers - 1 in stage_layers) for stage_layers in layers]),
        by_rule=tuple((rule, number(rule)) for rule in dict.fromkeys(plan.recompute.rules)),
    )


def _flight(plan: Plan, entries: MemoryEntries, ranks: Sequence[Sequence[int]]) -> Array:
    """Microbatches that each rank of the pipeline holds at most, in units of what its layers save.

    What waits for a weight gradient counts with its own bytes.
    """
    memory = entries.layers.microbatch_bytes(
        _held_by(plan, [(n,) for n in range(len(plan.stages))])
    )
    saved, deferred = (np.broadcast_to(amounts, len(plan.stages)) for amounts in memory)
    sizes: tuple[StageBytes, StageBytes] = (lambda n: float(saved[n]), lambda n: float(deferred[n]))
    return np.array(
        [
            peak_held(plan.schedule, rank, *sizes) / sum(saved[n] for n in stages)
            for rank, stages in enumerate(ranks)
        ]
    )
