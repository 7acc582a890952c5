"""All outcomes in figures: overall, by group, by half, and set by set beside other planners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fivefold.core.score.metrics import LEAST_RANKED, confusion, ranking, stats
from fivefold.core.score.outcome import Outcome, Scored
from fivefold.core.score.peers import compared

Table = dict[str, Any]

# How rows are grouped: always by inputs or predictions, never by what was measured.
BREAKDOWNS: dict[str, Callable[[Outcome], str]] = {
    "source": lambda one: one.family,
    "gpu": lambda one: str(one.row["gpu"]),
    "layers": lambda one: "MoE" if one.routed else "dense",
    "pipeline": lambda one: "pp = 1" if one.row["pp"] == 1 else "pp > 1",
    "recompute": lambda one: str(one.row["recompute"] or "not said"),
    "stack": lambda one: "fitted factor" if one.fitted else "no factor",
    "inputs": lambda one: "fully specified" if one.specified else "partly open",
}


def summary(scored: Scored) -> Table:
    """Everything that is on the screen, as JSON."""
    outcomes = scored.outcomes
    skipped = [{"id": each.id, "reason": each.reason} for each in scored.skipped]
    unmeasured = [{"id": each.id, "reason": each.reason} for each in scored.unmeasured]
    return {
        "rows": len(outcomes) + len(skipped) + len(unmeasured),
        **figures(outcomes),
        "intervals": intervals(outcomes),
        "from_tflops": from_tflops(outcomes),
        "held_out": halves(outcomes),
        "groups": dict(_groups(outcomes)),
        "sets": compared(outcomes, ranked),
        "specified": _specified(scored),
        "skipped": skipped,
        "unmeasured": unmeasured,
    }


def figures(outcomes: Sequence[Outcome]) -> Table:
    """Errors on step time and memory, fits or not, and ranking; of runs that leave nothing open."""
    verdicts = [
        (one.fits, one.did_fit)
        for one in outcomes
        if one.fits is not None and one.did_fit is not None
    ]
    return {
        "time": stats([one.time_error for one in timed(outcomes)]),
        "memory": stats([one.memory_error for one in weighed(outcomes)]),
        "oom": confusion(verdicts),
        "rank": ranked(outcomes),
    }


def timed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs with one predicted and one measured time."""
    return [one for one in outcomes if not one.is_open and _is_clocked(one)]


def weighed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs with one predicted and one measured peak."""
    return [one for one in outcomes if not one.is_open and one.measured_gib is not None]


def _is_clocked(one: Outcome) -> bool:
    return one.measured_seconds is not None and one.source != "tflops_per_gpu"


def ranked(outcomes: Sequence[Outcome]) -> Table:
    """How well runs of the same job on as many GPUs are put in order."""
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    for one in timed(outcomes):
        groups.setdefault(_job(one), []).append(one)
    large = [sorted(each, key=lambda one: one.name) for each in groups.values()]
    return ranking(
        [
            [(one.seconds.low, one.measured_seconds or 0.0) for one in group]
            for group in large
            if len(group) >= LEAST_RANKED
        ]
    )


def _job(one: Outcome) -> tuple[Any, ...]:
    """What runs share that a planner would choose among."""
    same = (
        "model",
        "layers",
        "hidden",
        "ffn_hidden",
        "heads",
        "vocab",
        "gpu",
        "gpus",
        "global_batch",
        "seq_len",
    )
    return (one.family, *(one.row.get(key) for key in same))


def intervals(outcomes: Sequence[Outcome]) -> Table:
    """Runs that leave open what time depends on: how many lie inside, and how far out the rest."""
    return _spans([one for one in outcomes if one.is_open and _is_clocked(one)])


def from_tflops(outcomes: Sequence[Outcome]) -> Table:
    """Runs whose time was worked out from published TFLOP/s: the weakest evidence."""
    return _spans([one for one in outcomes if one.source == "tflops_per_gpu"])


def _spans(outcomes: Sequence[Outcome]) -> Table:
    errors = [one.time_error for one in outcomes]
    widths = [one.seconds.high / one.seconds.low - 1 for one in outcomes]
    return {**stats(errors), "inside": errors.count(0.0), "width": stats(widths)["median"]}


def halves(outcomes: Sequence[Outcome]) -> Table:
    """Step time of families with a fitted factor, memory and verdicts, on either half by hash.

    `families_without`: those with a factor of which no run is in the held-out half, so that nothing
    here tells how well their factor holds elsewhere.
    """
    parts = {
        "all": list(outcomes),
        "fitted_half": [one for one in outcomes if not one.is_held_out],
        "held_out_half": [one for one in outcomes if one.is_held_out],
    }
    found = {name: _half(part) for name, part in parts.items()}
    missing = set(found["all"]["by_family"]) - set(found["held_out_half"]["by_family"])
    return {**found, "families_without": sorted(missing)}


def _half(outcomes: Sequence[Outcome]) -> Table:
    fitted = [one for one in outcomes if one.fitted]
    found = figures(outcomes)
    families = sorted({one.family for one in fitted})
    return {
        "time": stats([one.time_error for one in timed(fitted)]),
        "by_family": {
            family: stats([one.time_error for one in timed(fitted) if one.family == family])
            for family in families
        },
        "memory": found["memory"],
        "oom": found["oom"],
    }


def _groups(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Table]]:
    for dimension, name_of in BREAKDOWNS.items():
        parts: dict[str, list[Outcome]] = {}
        for one in outcomes:
            parts.setdefault(name_of(one), []).append(one)
        for name in sorted(parts):
            found = {**figures(parts[name]), "intervals": intervals(parts[name])}
            yield f"{dimension}: {name}", found


def _specified(scored: Scored) -> Table:
    """Of the fully specified rows with a measurement, how many could not be expressed."""
    skipped = sum(each.specified for each in scored.skipped)
    total = skipped + sum(one.specified for one in scored.outcomes)
    return {"n": total, "skipped": skipped, "share": skipped / total if total else None}
