"""A plan trained by forked ranks on this machine: planned beside measured, many beside one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fivefold.core.plan import Plan
from fivefold.launch.processes import Pool
from fivefold.records import StepRecord
from fivefold.train.check import Check, MeasuredRun, alone, beside_the_plan, judge, num_alone
from fivefold.train.loop import TrainedRank, run_rank, source_of
from fivefold.train.out_of_memory import Shortage, expected
from fivefold.train.settings import PRECISIONS, TrainSettings

__all__ = [
    "PRECISIONS",
    "Check",
    "MeasuredRun",
    "Shortage",
    "TrainSettings",
    "TrainedRank",
    "beside_the_plan",
    "expected",
    "num_processes",
    "run_rank",
    "source_of",
    "train",
]


def num_processes(plan: Plan, settings: TrainSettings) -> int:
    """The ranks, and behind them those that train alone for a check."""
    return plan.layout.world + (num_alone(settings) if settings.check else 0)


def train(
    pool: Pool,
    plan: Plan,
    settings: TrainSettings,
    on_report: Callable[[StepRecord | Shortage | str], None],
) -> tuple[list[TrainedRank], Check | None]:
    """Train on the pool's first ranks; `on_report` is told of every step when it is over, and of
    what went wrong and does not end the run.

    For a check, one process trains beside them while they wait for one another, and in float32 a
    second one in another order of sums.
    """
    world = plan.layout.world
    tasks = [(run_rank, (plan, settings))] * world
    if settings.check:
        apart = replace(settings, folder=None)
        lonely = [(run_rank, (alone(plan), apart, reverse)) for reverse in (False, True)]
        tasks += lonely[: num_alone(settings)]
    runs = pool.run_each(tasks, on_report=on_report)
    ranks, references = runs[:world], runs[world:]
    return ranks, judge(plan, ranks, references) if references else None
