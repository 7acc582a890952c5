"""How often a run saves with `save_every = "auto"`: Young and Daly, from what the run measures.

The cost of a save is the time for which the slowest rank's steps waited for the last ones. The
failures are those of this run: starts that did not end by themselves, in the hours since its first
start. To them belongs one failure that is assumed, in the time that was given or is usual, so that
a run without failures has a rate as well: (failures + 1) in (hours + assumed hours).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from fivefold.core import counted
from fivefold.core.plan import Plan, steps_between, young_interval

FIRST = 10  # steps before each of the first two saves, which show the cost
_USUAL = 50_700.0  # hours of a GPU between interruptions: Llama 3's H100
_HOUR = 3600.0
_CHANGED = 0.5  # a smaller change is not said again
_COSTS = 5  # saves whose median counts: a disk is not always as fast


class ObservedRate(NamedTuple):
    """Failures of a run in so many hours, and an assumed mean time between failures, with its
    source."""

    failures: int
    hours: float
    assumed: float
    source: str

    @property
    def mtbf(self) -> float:
        """Seconds between failures."""
        return _HOUR * (self.hours + self.assumed) / (self.failures + 1)


def observed_rate(
    starts: Sequence[Mapping[str, Any]], time_now: float, plan: Plan, hours_given: float | None
) -> ObservedRate:
    """Failure rate of a run, from the starts in `run.json`, of which the last runs now."""
    failures = sum(start.get("ended") is None for start in starts[:-1])
    hours = max(0.0, time_now - float(starts[0]["began"])) / _HOUR
    if hours_given is not None:
        return ObservedRate(failures, hours, hours_given, f"mtbf_hours = {hours_given:g}")
    known = None if plan.machine is None else plan.machine.gpu_mtbf_hours
    name = "a GPU" if plan.machine is None or known is None else f"a GPU of {plan.machine.name}"
    world = plan.layout.world
    source = f"{known or _USUAL:,.0f} h for {name}, {counted(world, 'rank')}"
    return ObservedRate(failures, hours, (known or _USUAL) / world, source)


class SaveDecision(NamedTuple):
    """Steps until the next save, with the reason."""

    steps: int
    why: str
    measured: bool = True  # by the cost of a save; else that is still to be found


def decide_saves(cost: float | None, step: float, rate: ObservedRate) -> SaveDecision:
    """Interval for a save of `cost` seconds, None before the first save."""
    if cost is None:
        why = "the cost of a checkpoint is not known yet"
        return SaveDecision(FIRST, f"every {FIRST} steps at first: {why}", measured=False)
    steps = steps_between(max(cost, 1e-6), rate.mtbf, max(step, 1e-6))
    best = young_interval(cost, rate.mtbf)
    return SaveDecision(
        steps,
        f"every {counted(steps, 'step')} of {step:.3g} s: Young and Daly, sqrt(2 · {cost:.3g} s a "
        f"checkpoint · {rate.mtbf / _HOUR:,.3g} h between failures) = {best:,.3g} s; "
        f"{counted(rate.failures, 'failure')} in {rate.hours:,.3g} h here, and one assumed in "
        f"{rate.assumed:,.3g} h ({rate.source})",
    )


class SaveInterval:
    """Schedule of saves, equal on all ranks."""

    def __init__(
        self,
        step: int,
        rate: Callable[[], ObservedRate],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.due, self.reported = step + FIRST, 0
        self.rate, self._clock = rate, clock
        self._last, self._since = step, clock()
        self._costs: deque[float] = deque(maxlen=_COSTS)

    @property
    def cost(self) -> float | None:
        """Seconds that a save blocks this rank: the median of the last ones."""
        return median(self._costs) if self._costs else None

    def begin(self) -> float:
        """Begin a save; returns the time."""
        return self._clock()

    def end(self, number: int, began: float) -> None:
        """End the blocking part of a save."""
        self._last, self._since = number, self._clock()
        self._costs.append(self._since - began)

    def decide(self, number: int, began: float, costs: Sequence[float | None]) -> SaveDecision:
        """Decide the steps to the next save, from the last costs on all ranks."""
        step = (began - self._since) / max(1, number - self._last)
        known = [cost for cost in costs if cost is not None]
        return decide_saves(max(known) if known else None, step, self.rate())

    def follow(self, number: int, decision: SaveDecision) -> bool:
        """Apply a decision; returns whether it differs enough from the last report."""
        self.due = number + decision.steps
        news = abs(decision.steps - self.reported) > _CHANGED * self.reported
        if news:
            self.reported = decision.steps if decision.measured else 0
        return news
