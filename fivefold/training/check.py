"""The training held against one process that reads the same text through the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.training.loop import RankRun
from fivefold.training.routes import count_flips
from fivefold.training.settings import Settings

EXACT = 1e-9  # float64: the most that losses may differ, in nats
LEAST = 2e-6  # float32: what is allowed where two runs of one process happen to agree
_SPREADS = 3


@dataclass(frozen=True)
class Check:
    """Losses beside those of one process, in nats: the largest difference of all steps.

    `spread` is that of two runs of one process which differ only in the order of their sums; None
    in float64, which needs none. `flips` of `routed` tokens times layers had other experts.
    """

    loss: float  # the last one of one process
    difference: float
    spread: float | None
    allowed: float
    flips: int
    routed: int

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


def num_alone(settings: Settings) -> int:
    """How many runs of one process a check takes."""
    return 1 if settings.dtype == "float64" else 2


def alone(plan: Plan) -> Plan:
    """The same training on one rank: the rows of each microbatch of each data rank together."""
    batch = plan.batch
    batch = replace(batch, dp=1, microbatches=batch.microbatches * batch.dp)
    return replace(plan, layout=Layout(), batch=batch, stage_layers=None, ep_nodes=1)


def judge(plan: Plan, runs: Sequence[RankRun], references: Sequence[RankRun]) -> Check:
    """The ranks beside one process, and beside a second run of it where there is one."""
    truth, *others = references
    spread = max((_largest(other.losses, truth.losses) for other in others), default=None)
    flips, routed = count_flips(plan, [run.routes for run in runs], truth.routes)
    return Check(
        loss=truth.losses[-1],
        difference=max(_largest(run.losses, truth.losses) for run in runs),
        spread=spread,
        allowed=EXACT if spread is None else max(_SPREADS * spread, LEAST),
        flips=flips,
        routed=routed,
    )


def _largest(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference; what is no number is infinitely far from one."""
    pairs = zip(found, wanted, strict=True)
    differences = [abs(one - other) for one, other in pairs]
    return max(each if each == each else float("inf") for each in differences)
