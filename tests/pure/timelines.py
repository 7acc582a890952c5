"""Named schedules on the clock, for the tests that hold them against published numbers."""

from __future__ import annotations

from fivefold.core.schedule import catalog
from fivefold.core.schedule.clock import Costs, Timeline, play

Times = tuple[float, float, float]
EVERY_FAMILY = [family.name for family in catalog.FAMILIES]
UNEVEN = {"times": (1.0, 1.1, 0.7), "transfer": 0.05}


def timeline(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    times: Times = (1.0, 1.0, 1.0),
    transfer: float = 0.0,
    overlap: float = 1.0,
) -> Timeline:
    """Play a named schedule with equal stages."""
    schedule = catalog.make(name, num_ranks, num_microbatches, num_chunks)
    return play(schedule, Costs.uniform(schedule.placement, times, transfer, overlap))


def bubble(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    times: Times = (1.0, 1.0, 1.0),
    of: str = "makespan",
) -> float:
    """Makespan (or span) minus m(F+B+W), in the unit of the times."""
    played = timeline(name, num_ranks, num_microbatches, num_chunks, times)
    return getattr(played, of) - num_microbatches * sum(times)


def busy(timeline: Timeline, rank: int) -> float:
    """How long a rank works."""
    return sum(map(timeline.costs.of, timeline.schedule.order[rank]))
