"""Training on the ranks of a pool that a test keeps, without a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold.core.plan.plan import Plan
from fivefold.launch.processes import Pool
from fivefold.train.check import Check, RankArguments, check_runs, reference_runs
from fivefold.train.loop import run_rank
from fivefold.train.state import TrainedRank, TrainSettings


def train(
    pool: Pool, plan: Plan, settings: TrainSettings, on_report: Callable[[Any], None]
) -> tuple[list[TrainedRank], Check | None]:
    """Train on the first ranks of the pool, and on those after them what a check compares with."""
    world = plan.layout.world
    singles = reference_runs(plan, settings) if settings.options.check else []
    tasks = [(run_rank, (plan, settings))] * world + [(run_rank, single) for single in singles]
    runs = pool.run_each(tasks, on_report=on_report)

    def run_alone(arguments: RankArguments) -> TrainedRank:
        return pool.run_each([(run_rank, arguments)])[0]

    return runs[:world], check_runs(plan, settings, runs[:world], runs[world:], run_alone)
