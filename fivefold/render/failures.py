"""Simulated failures as text, JSON and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.core import counted
from fivefold.core.plan import Plan, young_interval
from fivefold.render.text import (
    bar,
    duration,
    percent,
    rough_duration,
)

if TYPE_CHECKING:
    from fivefold.planner import FailingJob, FailureForecast


_DAY = 86_400.0
LOST_WORDS = {
    "save": "checkpoints, which stall or slow the steps",
    "rework": "steps since the last complete checkpoint",
    "detect": "until a failure was noticed",
    "restart": "to start ranks and load",
    "shrunk": "fewer replicas, after the spares",
    "waiting": "no replica left: until a repair",
}
_PLACES = {"disk": "the shared disk", "memory": "the memory of partner hosts"}


def forecast_json(plan: Plan, forecast: FailureForecast) -> dict[str, Any]:
    """What `fivefold simulate --json` prints."""
    job = forecast.job
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "gpus": job.domain.gpus,
        "hosts": job.domain.hosts,
        "days": forecast.days,
        "runs": forecast.runs,
        "seed": forecast.seed,
        "goodput": forecast.goodput,
        "goodput_band": list(forecast.goodput_band),
        "closed_form": job.expected,
        "interruptions": forecast.interruptions,
        "interruptions_band": list(forecast.interruptions_band),
        "mtbf_s": 1 / job.rate,
        "lost_s": forecast.lost,
        "step_s": job.step,
        "interval_s": job.interval,
        "interval_steps": job.steps,
        "interval_why": interval_words(job),
        "checkpoint": job.location,
        "checkpoint_bytes": job.save.bytes,
        "save_s": {
            "stall": job.save.stall,
            "slowed": job.save.slowed,
            "write": job.save.write,
            "load": job.save.load,
        },
        "recovery_s": job.recovery,
        "spares": job.design.spares,
    }


def interval_words(job: FailingJob) -> str:
    """Why a job saves as often as it does."""
    best = young_interval(job.save.cost, 1 / job.rate)
    text = (
        f"Young and Daly: sqrt(2 · {duration(job.save.cost)} a checkpoint · "
        f"{rough_duration(1 / job.rate)} between failures) = {duration(best)}"
    )
    if best >= max(job.save.write, job.step):
        return text
    if job.save.write > job.step:
        return f"{text}; but a checkpoint is written for {duration(job.save.write)}"
    return f"{text}; but a step takes {duration(job.step)}"


def forecast_lines(plan: Plan, forecast: FailureForecast) -> list[str]:
    """The same as text."""
    job, end = forecast.job, forecast.days * _DAY
    spares = "" if job.design.spares is None else f", {counted(job.design.spares, 'spare')}"
    low, high = forecast.interruptions_band
    best, worst = forecast.goodput_band[1], forecast.goodput_band[0]
    lines = [
        f"job       {plan.shape.name} on {plan.layout}: {counted(job.domain.gpus, 'GPU')} on "
        f"{counted(job.domain.hosts, 'host')}{spares}, {counted(forecast.days, 'day')}",
        f"failures  one in {rough_duration(1 / job.rate)}: {forecast.interruptions:,.0f} "
        f"interruptions ({low:,.0f} to {high:,.0f} in 90% of {forecast.runs:,} runs)",
        f"saves     every {duration(job.interval)} ({counted(job.steps, 'step')}) to "
        f"{_PLACES[job.location]}: {job.save.bytes / 1e9:,.0f} GB",
        f"          steps wait for {duration(job.save.stall)}, "
        f"written in {duration(job.save.write)}",
        *(f"          {clause}" for clause in interval_words(job).split("; ")),
        f"recovery  {rough_duration(job.recovery)}: {rough_duration(job.design.detect)} to notice, "
        f"{rough_duration(job.design.restart)} to start, {duration(job.save.load)} to load",
        f"goodput   {percent(forecast.goodput)} ({percent(worst)} to {percent(best)}): of "
        f"{counted(forecast.days, 'day')} {forecast.goodput * forecast.days:,.1f} count; closed "
        f"form {percent(job.expected)}",
    ]
    for cause, seconds in forecast.lost.items():
        if seconds > 0:
            lines.append(
                bar(cause, rough_duration(seconds), seconds / end) + f"  {LOST_WORDS[cause]}"
            )
    return lines
