"""Training: a plan on forked ranks of this machine, or one rank of it under a launcher."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.core.plan import Plan
from fivefold.launch import Pool
from fivefold.records import StepRecord
from fivefold.train.build import checked_source
from fivefold.train.callbacks import SampleText, Shortage, estimate_of
from fivefold.train.check import Check, MeasuredRun, compare_with_plan, judge, reference_runs
from fivefold.train.loop import run_rank
from fivefold.train.recovery import check_resume, nothing_left
from fivefold.train.state import TrainedRank, TrainSettings
from fivefold.train.tokenizers import keep_tokenizer

__all__ = [
    "Check",
    "MeasuredRun",
    "SampleText",
    "Shortage",
    "TrainSettings",
    "TrainedRank",
    "check_resume",
    "checked_source",
    "compare_with_plan",
    "estimate_of",
    "keep_tokenizer",
    "nothing_left",
    "num_processes",
    "run_rank",
    "train",
]


def num_processes(plan: Plan, settings: TrainSettings) -> int:
    """Number of ranks, with the single processes of a check."""
    return plan.layout.world + (len(reference_runs(plan, settings)) if settings.check else 0)


def train(
    pool: Pool,
    plan: Plan,
    settings: TrainSettings,
    on_report: Callable[[StepRecord | Shortage | SampleText | str], None],
) -> tuple[list[TrainedRank], Check | None]:
    """Train on the first ranks of the pool. `on_report` receives step records, and warnings.

    For a check a single process trains at the same time, and in float32 a second one that adds the
    terms of every sum in another order.
    """
    world = plan.layout.world
    tasks = [(run_rank, (plan, settings))] * world
    if settings.check:
        tasks += [(run_rank, reference) for reference in reference_runs(plan, settings)]
    runs = pool.run_each(tasks, on_report=on_report)
    ranks, references = runs[:world], runs[world:]
    return ranks, judge(plan, ranks, references) if references else None
