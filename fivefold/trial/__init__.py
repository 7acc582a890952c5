"""One trial: a plan run by its ranks and by one process, and the two compared."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.core.plan import Plan
from fivefold.run.ranks import Pool
from fivefold.trial.runs import RankRun, run_rank, run_reference
from fivefold.trial.settings import Settings, num_phases
from fivefold.trial.verdict import Verdict, judge

__all__ = [
    "RankRun",
    "Settings",
    "Verdict",
    "judge",
    "num_phases",
    "run_rank",
    "run_reference",
    "run_trial",
]


def run_trial(
    pool: Pool, plan: Plan, settings: Settings, on_phase: Callable[[], None] | None = None
) -> Verdict:
    """Run the plan on the pool's first ranks, and the truth on the one after them."""
    ranks = [(run_rank, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))], on_phase)
    return judge(plan, settings, runs, truths)
