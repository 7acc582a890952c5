"""How a plan is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.core.plan import Plan
from fivefold.core.schedule.asynchronous import Delays
from fivefold.core.schedule.transfers import merged
from fivefold.run.compare import Dtype
from fivefold.run.optimizer import Name

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Settings:
    """How a plan is tried. `empty_rank`: a data rank without any counted token in step 1.

    On `cuda` all processes share one GPU. `compiled` blocks run as they do in training, on a rank
    that is alone; the truth is never compiled.
    """

    dtype: Dtype = "float64"
    grad_dtype: Dtype | None = None  # None: float64 for float64, else float32
    steps: int = 2
    optimizer: Name = "adamw"
    offload: bool = False
    bucket: int | None = None  # bytes
    seed: int = 0
    empty_rank: int | None = None
    device: Device = "cpu"
    compiled: bool = False

    @property
    def summed_in(self) -> Dtype:
        """The type in which data ranks sum gradients."""
        return self.grad_dtype or ("float64" if self.dtype == "float64" else "float32")


def num_microbatches(plan: Plan, settings: Settings) -> int:
    """Microbatches of a trial; PipeDream's optimizer steps after every one."""
    schedule = plan.schedule
    every = Delays.of(schedule).every if schedule.asynchronous else schedule.num_microbatches
    return settings.steps * every


def num_phases(plan: Plan, settings: Settings) -> int:
    """How often `on_phase` is called in a trial that ends well."""
    ranks, columns = plan.layout.pp, plan.layout.world // plan.layout.pp
    if plan.schedule.asynchronous:
        actions = 2 * ranks * num_microbatches(plan, settings)
    else:
        actions = settings.steps * sum(len(merged(plan.schedule, rank)) for rank in range(ranks))
    return columns * (2 * ranks * (1 + settings.steps) + actions) + 1 + settings.steps
