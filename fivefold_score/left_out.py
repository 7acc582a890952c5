"""Accuracy on sources that no constant was fitted on: leave out one source at a time.

A row is estimated without every number of its machine and stack that was fitted to its own source:
a number that was fitted to that source alone is left to the base of its file, and a pooled one is
made from the other sources. Numbers that several sources gave together stay. Form and choice of the
formulas were made with all sources in sight, which leaving one out cannot undo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fivefold.core import FivefoldError
from fivefold.core import hardware as machines
from fivefold.cost.hardware import stack_presets
from fivefold_score.outcome import ScoredRun, pair_errors, score_row, stats
from fivefold_score.published import cases
from fivefold_score.scoring import (
    BREAKDOWNS,
    Table,
    figures,
    job_groups,
    runs_with_memory,
    runs_with_time,
)

KINDS = ("layers", "pipeline")  # breakdowns that an estimate of any job has, too


def rescore(
    outcomes: Sequence[ScoredRun], on_row: Callable[[], None] = lambda: None
) -> list[ScoredRun]:
    """Every run again, without the numbers that were fitted to its source."""
    runs: list[ScoredRun] = []
    for run in outcomes:
        runs.append(_rescored(run))
        on_row()
    return runs


def _rescored(run: ScoredRun) -> ScoredRun:
    known, left = cases(run.row)[0], cases(run.row, run.source_name)[0]
    if (known.machine, known.stack) == (left.machine, left.stack):
        return run
    try:
        return score_row(run.row, run.source_name)
    except FivefoldError as error:  # what was scored with its numbers is scored without them
        raise AssertionError(f"{run.name}: {error}") from error


def leave_one_out(runs: Sequence[ScoredRun]) -> Table:
    """The figures of rescored runs: overall, published and fully specified, and by source."""
    sources = sorted({run.source_name for run in runs})
    published = [run for run in runs if run.row.get("fully_specified") and _is_published(run)]
    return {
        **figures(runs),
        "published": stats([run.time_error for run in runs_with_time(published)]),
        "by_source": {
            source: figures([run for run in runs if run.source_name == source])
            for source in sources
        },
        "new_source": error_bars(runs),
    }


def _is_published(run: ScoredRun) -> bool:
    """Whether it is a run of a paper or a benchmark, not of a validation sweep."""
    return not run.name.startswith("vtrain-")


# --- What to expect of a source that was never seen


def error_bars(runs: Sequence[ScoredRun]) -> Table:
    """Errors of time and memory with the same weight for every source, overall and by kind; and of
    the ratio of two steps of one job whose estimates are close (`layouts`)."""
    groups: dict[str, list[ScoredRun]] = {}
    for run in runs:
        for kind in KINDS:
            groups.setdefault(_KIND_KEYS[BREAKDOWNS[kind](run)], []).append(run)
    return {
        "time": {
            **_weighted_time(runs),
            **{name: _weighted_time(group) for name, group in sorted(groups.items())},
        },
        "memory": {
            **_weighted_memory(runs),
            **{name: _weighted_memory(group) for name, group in sorted(groups.items())},
        },
        "layouts": _weighted(
            [(source, error) for source, times in job_groups(runs) for error in pair_errors(times)]
        ),
    }


_KIND_KEYS = {"dense": "dense", "MoE": "moe", "pp = 1": "one_stage", "pp > 1": "pipeline"}


def _weighted_time(runs: Sequence[ScoredRun]) -> Table:
    return _weighted([(run.source_name, run.time_error) for run in runs_with_time(runs)])


def _weighted(errors: Sequence[tuple[str, float]]) -> Table:
    pairs = _by_source(errors)
    return {"median": quantile(pairs, 0.5), "p90": quantile(pairs, 0.9), "n": len(pairs)}


def _weighted_memory(runs: Sequence[ScoredRun]) -> Table:
    pairs = _by_source([(run.source_name, run.memory_error) for run in runs_with_memory(runs)])
    total = sum(weight for _, weight in pairs)
    mean = sum(error * weight for error, weight in pairs) / total if pairs else None
    return {"mean": mean, "p90": quantile(pairs, 0.9), "n": len(pairs)}


def _by_source(errors: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    """Errors with weights, which sum to 1 for every source."""
    counts = Counter(name for name, _ in errors)
    return [(error, 1 / counts[name]) for name, error in errors]


def quantile(pairs: Sequence[tuple[float, float]], share: float) -> float | None:
    """The smallest value below or at which lies `share` of the weight; None without values."""
    ordered = sorted(pairs)
    enough = share * sum(weight for _, weight in ordered) * (1 - 1e-12)
    sums = accumulate(weight for _, weight in ordered)
    return next(
        (value for (value, _), sum_ in zip(ordered, sums, strict=True) if sum_ >= enough), None
    )


# --- Which numbers are fitted


class FittedNumber(NamedTuple):
    """A number that was fitted: its file, its key, and the sources whose runs it was fitted to."""

    where: str
    key: str
    to: tuple[str, ...]


def fitted_numbers() -> list[FittedNumber]:
    """Every fitted number of machines and stacks, where it is written; machines with the same
    numbers from the same sources share them."""
    numbers = [FittedNumber(*fields) for fields in stack_presets.fitted_numbers()]
    seen: set[tuple[Any, ...]] = set()
    for name in machines.presets():
        for key, value, sources in machines.fitted_numbers(name):
            if (key, value, sources) not in seen:
                seen.add((key, value, sources))
                to = tuple(source.strip() for source in sources.split(","))
                numbers.append(FittedNumber(f"machines/{name}", key, to))
    return numbers
