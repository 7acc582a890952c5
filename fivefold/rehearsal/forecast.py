"""A step's time from what one GPU was measured to compute: the clock plays the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.core.distinct import distinct_ranks
from fivefold.core.estimate.outlook import Outlook
from fivefold.core.estimate.simulate import Forecast, Passes, forecast
from fivefold.core.plan import Plan
from fivefold.rehearsal.job import kind_of, representatives
from fivefold.rehearsal.measured import Measured, measure_rank
from fivefold.run.ranks import Pool
from fivefold.run.worker import Worker


@dataclass(frozen=True)
class Forecasted:
    """What was measured, rank by rank, and the step that follows where the machine is known."""

    measured: list[Measured]
    step: Forecast | None


def forecast_on_gpu(
    plan: Plan, ranks: Sequence[int] | None, imbalance: float, planned: Outlook | None
) -> Forecasted:
    """Measure one rank for each kind of stages, or these, each in a process of its own."""
    chosen = list(ranks or representatives(plan, distinct_ranks(plan)))
    found: list[Measured] = []
    for rank in chosen:
        with Pool(1, patience=3600.0) as pool:  # whose memory is the GPU's again afterwards
            found += pool.run_each([(_measure, (plan, rank, imbalance))])
    step = None
    if planned is not None and (passes := passes_of(plan, found)) is not None:
        step = forecast(plan, planned.setting, measured=passes)
    return Forecasted(found, step)


def _measure(worker: Worker, plan: Plan, rank: int, imbalance: float) -> Measured:
    worker.phase(f"rank {rank}")
    return measure_rank(plan, rank, imbalance, plan.wishes.train.compile)


def passes_of(plan: Plan, found: Sequence[Measured]) -> dict[int, Passes] | None:
    """The passes of every stage, from the stages of the same kind that were measured; None where a
    kind was not."""
    by_kind: dict[object, Passes] = {}
    for one in found:
        for stage in plan.schedule.placement.held(plan.layout.coord(one.rank).pp):
            by_kind.setdefault(kind_of(plan, stage), _passes(one, stage))
    kinds = [kind_of(plan, stage) for stage in range(len(plan.stages))]
    if any(kind not in by_kind for kind in kinds):
        return None
    return {stage: by_kind[kind] for stage, kind in enumerate(kinds)}


def _passes(one: Measured, stage: int) -> Passes:
    """A backward in one piece counts as one of inputs: the clock adds both."""
    times = {name: each for name, each in one.actions.items() if re.match(rf"{stage}[FBIW]$", name)}
    letter = {name[-1]: seconds for name, seconds in times.items()}
    whole = letter.get("B", letter.get("I", 0.0) + letter.get("W", 0.0))
    if "I" in letter:
        return Passes(letter["F"], letter["I"], letter.get("W", max(0.0, whole - letter["I"])))
    return Passes(letter["F"], whole)
