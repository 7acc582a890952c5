"""Layers moved between the stages of a plan, where that makes it faster.

One layer at a time, as long as the longest path gets shorter; the simulation decides whether that
was a gain. No stage gets more layers than the largest one has, and the first gets none, so memory
is no worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np

from fivefold.core.plan import resolve
from fivefold.cost import grid_of_plan
from fivefold.cost.layer import LayerTimer
from fivefold.cost.stages import PATHS, ScheduleSize, pipeline_timer
from fivefold.cost.step import path_costs
from fivefold.planner.estimate import Estimate, estimate_plan

StageSizes = tuple[int, ...]  # layers of each stage
_MOST_MOVES = 8
_LEAST_GAIN = 1e-3  # share of a step: less is not worth a plan with explicit stages


def rebalance_stages(chosen: Estimate) -> Estimate:
    """The plan with other stages, if they make it faster; what fits must still fit."""
    plan = chosen.plan
    if plan.layout.pp == 1 or not plan.family.is_named or plan.stage_layers is not None:
        return chosen
    sizes = tuple(map(len, plan.stages))
    best = _best_sizes(chosen, sizes)
    if best == sizes:
        return chosen
    options = replace(plan.options, stage_layers=",".join(map(str, best)))
    other = estimate_plan(resolve(options), chosen.setting)
    fits = other.over <= 0 or chosen.over > 0
    return other if fits and other.step < (1 - _LEAST_GAIN) * chosen.step else chosen


def _best_sizes(chosen: Estimate, start_sizes: StageSizes) -> StageSizes:
    """Make the best move, as long as one helps."""
    seconds = _LongestPath(chosen)
    best, least = start_sizes, seconds.of(start_sizes)
    for _ in range(_MOST_MOVES):
        times = {sizes: seconds.of(sizes) for sizes in _moves(best, start_sizes)}
        if not times or min(times.values()) >= least:
            break
        best = min(times, key=times.__getitem__)
        least = times[best]
    return best


def _moves(sizes: StageSizes, start_sizes: StageSizes) -> Iterator[StageSizes]:
    """Move a layer from an end or a full stage to the last stage or one that has room."""
    last, most = len(sizes) - 1, max(start_sizes)
    full = [stage for stage, size in enumerate(sizes) if size == most]
    spaces = [stage for stage in range(1, len(sizes)) if sizes[stage] < most]
    givers = {0, last, *full[:1], *full[-1:]}
    takers = {last, *spaces[:2], *spaces[-2:]} & set(spaces)
    if sizes[0] < start_sizes[0]:
        takers.add(0)
    for giver, taker in product(givers, takers):
        if giver != taker and sizes[giver] > 1:
            step = {giver: -1, taker: 1}
            yield tuple(size + step.get(stage, 0) for stage, size in enumerate(sizes))


class _LongestPath:
    """Seconds of the longest path of one plan with any stage sizes."""

    def __init__(self, chosen: Estimate) -> None:
        plan, layout, batch = chosen.plan, chosen.plan.layout, chosen.plan.batch
        setting = chosen.setting.with_keys(plan.options)
        job = setting.arguments(plan.shape, grid_of_plan(plan), batch.seq)
        costs = path_costs(LayerTimer(*job))
        self.costs = np.array([float(np.asarray(cost).item()) for cost in costs])[:, None]
        self.timer, self.paths = pipeline_timer(plan.shape, batch.seq), PATHS[plan.family.paths]
        self.size = ScheduleSize(layout.pp, layout.chunks, batch.microbatches, self.costs)

    def of(self, sizes: StageSizes) -> float:
        spans = [range(start, stop) for start, stop in pairwise((0, *accumulate(sizes)))]
        return float((self.paths(self.timer.stages(spans), self.size) @ self.costs).max())
