"""Any rank of any job on one machine: the real program without the others."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.core.distinct import distinct_ranks
from fivefold.core.plan import Plan
from fivefold.rehearsal.forecast import Forecasted, forecast_on_gpu
from fivefold.rehearsal.job import Rehearsed, judged, rehearse, representatives
from fivefold.rehearsal.measured import Measured, measure_rank
from fivefold.rehearsal.rank import RankRun, rehearse_rank

__all__ = [
    "Forecasted",
    "Measured",
    "RankRun",
    "Rehearsed",
    "forecast_on_gpu",
    "how_many",
    "judged",
    "measure_rank",
    "rehearse",
    "rehearse_rank",
    "representatives",
]


def how_many(plan: Plan, ranks: Sequence[int] | None) -> int:
    """Runs of a rehearsal: its ranks, and those that run again without replay."""
    chosen = list(ranks or distinct_ranks(plan))
    return len(chosen) + len(representatives(plan, chosen))
