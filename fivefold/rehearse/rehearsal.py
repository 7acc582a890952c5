"""Any rank of any job on one machine: the real program without the others."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.core.plan import Plan
from fivefold.cost.traffic import distinct_ranks
from fivefold.rehearse.job import Rehearsed, judged, rehearse, representatives
from fivefold.rehearse.on_gpu import Forecasted, MeasuredRank, forecast_on_gpu, measure_rank
from fivefold.rehearse.rank import RehearsedRank, rehearse_rank

__all__ = [
    "Forecasted",
    "MeasuredRank",
    "Rehearsed",
    "RehearsedRank",
    "forecast_on_gpu",
    "how_many",
    "judged",
    "measure_rank",
    "rehearse",
    "rehearse_rank",
    "representatives",
]


def how_many(plan: Plan, ranks: Sequence[int] | None) -> int:
    """Number of runs of a rehearsal: its ranks, and those that run again without replay."""
    chosen = list(ranks or distinct_ranks(plan))
    return len(chosen) + len(representatives(plan, chosen))
