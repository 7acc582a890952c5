"""What a search for a schedule is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fivefold.core.schedule.costs import Costs
from fivefold.core.schedule.placement import Placement

Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class Goal:
    """Costs by placement, the most activations a rank may hold (full-stage units), what to cut."""

    costs_of: Callable[[Placement], Costs]
    memory_limit: float | None = None
    objective: Objective = "makespan"
