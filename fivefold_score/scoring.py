"""How accurate estimates are: all scored runs in figures, overall, by group and by half.

The figures are also shown set by set beside those of other planners. The numbers of Calculon and
llm-analysis are frozen. They were measured on the full public sets; `peer_runs` says on how many
runs, where that is known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold_score.outcome import (
    LEAST_RANKED,
    ScoredRun,
    ScoreResult,
    confusion,
    leave_one_size_out,
    ranking,
    stats,
)

Table = dict[str, Any]
LEAST_TFLOPS = 200.0  # below it the sweep's runs are bound by the host and noisy
_EXACT = ("step_time_s", "tokens_per_s_per_gpu")


@dataclass(frozen=True)
class PeerFigures:
    """Frozen figures of other planners for one metric on one set; None if there is none."""

    calculon: str | None
    llm_analysis: str | None
    aim: str
    peer_runs: int | None = None


PEERS: dict[tuple[str, str], PeerFigures] = {
    ("Korthikanti", "mean error"): PeerFigures("3.65%", "25.6%", "≤ 3.5%", 8),
    ("Korthikanti", "largest error"): PeerFigures("8.87%", "70.7%", "≤ 8%", 8),
    ("SC21 + MT-NLG + Korthikanti DP8", "mean error"): PeerFigures("12.8%", "> 50%", "≤ 8%"),
    ("SC21 ZeRO-3", "mean error"): PeerFigures("cannot express", "46%", "≤ 15%"),
    ("vTrain multi-node", "mean error"): PeerFigures("15.9% (scaled 13.7%)", "16.3%", "≤ 7.5%"),
    ("vTrain multi-node", "worst size left out"): PeerFigures(None, None, "≤ 15%"),
    ("vTrain single-node", "mean error"): PeerFigures("39.1% (scaled 30.1%)", None, "≤ 7%"),
    ("vTrain single-node", "best-of-3 regret"): PeerFigures("3.7%", None, "≤ 1%"),
    ("vTrain single-node", "Kendall tau"): PeerFigures(".45", None, "≥ .86"),
    ("HF sweep, predicted ≥ 200 TFLOP/s", "mean error"): PeerFigures("30.8%", None, "≤ 16%"),
    ("HF sweep, predicted ≥ 200 TFLOP/s", "median error"): PeerFigures("23.8%", None, "≤ 9%"),
    ("HF sweep", "mean memory error"): PeerFigures("29.2%", "45.3%", "≤ 8%"),
    ("HF sweep", "fits or not, right"): PeerFigures("94.8%", "90.3%", "≥ 98%"),
    ("HF sweep", "false fit"): PeerFigures("8.9%", "16.7%", "≤ 2%"),
    ("HF sweep", "best-of-3 regret"): PeerFigures("15–19%", "62%", "≤ 5%"),
    ("HF sweep", "Kendall tau"): PeerFigures(".45", ".44", "≥ .72"),
    ("published, fully specified", "median error"): PeerFigures(
        "cannot express most", None, "≤ 10%"
    ),
    ("published, fully specified", "p90 error"): PeerFigures("cannot express most", None, "≤ 25%"),
    ("Llama-3.1-405B, 8,192 H100", "error"): PeerFigures("+32%, does not fit", None, "≤ 10%"),
    ("Llama-3.1-405B, 16,384 H100", "error"): PeerFigures("+32%, does not fit", None, "≤ 10%"),
}


@dataclass(frozen=True)
class Figure:
    """Our figure: a value, and the number of runs (or groups of runs) that it is based on."""

    name: str
    metric: str
    value: float
    n: int
    detail: str = ""


def compare_with_peers(
    outcomes: Sequence[ScoredRun], left_out: Sequence[ScoredRun] = ()
) -> list[Table]:
    """One entry per metric and set with runs: for all runs, for the held-out half, and for all runs
    without the numbers that were fitted to their source."""
    without = {(entry.name, entry.metric): entry.value for entry in _figures(left_out)}
    held_out_half = {
        (figure.name, figure.metric): figure
        for figure in _figures([run for run in outcomes if run.is_held_out])
    }
    return [
        {
            "set": figure.name,
            "metric": figure.metric,
            "detail": figure.detail,
            "n": figure.n,
            "ours": figure.value,
            "left_out": without.get((figure.name, figure.metric)),
            "held_out_n": half.n if half else 0,
            "held_out": half.value if half else None,
            "calculon": peers.calculon,
            "llm_analysis": peers.llm_analysis,
            "peer_n": peers.peer_runs,
            "aim": peers.aim,
        }
        for figure in _figures(outcomes)
        for peers in [PEERS[figure.name, figure.metric]]
        for half in [held_out_half.get((figure.name, figure.metric))]
    ]


def _figures(outcomes: Sequence[ScoredRun]) -> Iterator[Figure]:
    yield from _paper_figures(outcomes)
    yield from _vtrain_figures(outcomes)
    yield from _sweep_figures(outcomes)


def _points(outcomes: Sequence[ScoredRun], pattern: str) -> list[ScoredRun]:
    """Runs whose id matches, with one predicted and one measured time."""
    return [
        run
        for run in outcomes
        if re.match(pattern, run.name) and not run.is_open and run.source in _EXACT
    ]


def _error_figures(
    name: str, runs: Sequence[ScoredRun], metrics: dict[str, str]
) -> Iterator[Figure]:
    errors = [run.time_error for run in runs]
    if errors:
        numbers = {**stats(errors), "max": max(errors)}
        for metric, key in metrics.items():
            yield Figure(name, metric, numbers[key], len(errors))


def _paper_figures(outcomes: Sequence[ScoredRun]) -> Iterator[Figure]:
    korthikanti = _points(outcomes, r"korth-\d+[bt]-(full|selective)$")
    metrics = {"mean error": "mean", "largest error": "max"}
    yield from _error_figures("Korthikanti", korthikanti, metrics)
    # Table 2 of SC21 leaves the split of its Megatron rows open: they are not in the set.
    megatron = _points(outcomes, r"sc21-t1-|mtnlg-|korth-530b-selective-dp8$")
    yield from _error_figures("SC21 + MT-NLG + Korthikanti DP8", megatron, {"mean error": "mean"})
    sharded = _points(outcomes, r"sc21-.*zero3")
    yield from _error_figures("SC21 ZeRO-3", sharded, {"mean error": "mean"})
    full = [candidate for candidate in outcomes if candidate.row.get("fully_specified") is True]
    published = _points(full, r"(?!vtrain-)")
    spread = {"median error": "median", "p90 error": "p90"}
    yield from _error_figures("published, fully specified", published, spread)
    for gpus in (8192, 16384):
        for run in outcomes:
            if re.match(rf"llama3-405b-{gpus}g-s8192", run.name) and run.measured_seconds:
                name = f"Llama-3.1-405B, {gpus:,} H100"
                yield Figure(name, "error", run.time_error, 1, _interval(run))


def _interval(run: ScoredRun) -> str:
    """The predicted range of a run that leaves choices open, and with which choices it fits."""
    fits = "fits" if run.fits else "does not fit"
    if run.fits is None:
        fits = f"fits in {len(run.fitting)} of {run.num_cases} cases: {run.fitting[0]}"
    low, high = run.seconds
    return f"{low:.2f} to {high:.2f} s for {run.measured_seconds:.2f} s, {fits}"


def _vtrain_figures(outcomes: Sequence[ScoredRun]) -> Iterator[Figure]:
    multi = _points(outcomes, "vtrain-multi-")
    yield from _error_figures("vTrain multi-node", multi, {"mean error": "mean"})
    sizes: dict[str, list[tuple[float, float]]] = {}
    for run in multi:
        size = f"{run.row['layers']} x {run.row['hidden']}"
        sizes.setdefault(size, []).append((run.seconds.low, run.measured_seconds or 0.0))
    if worst := leave_one_size_out(sizes):
        yield Figure("vTrain multi-node", "worst size left out", max(worst.values()), len(worst))
    single = _points(outcomes, "vtrain-single-")
    yield from _error_figures("vTrain single-node", single, {"mean error": "mean"})
    yield from _ranking_figures("vTrain single-node", ranked(single))


def _sweep_figures(outcomes: Sequence[ScoredRun]) -> Iterator[Figure]:
    runs = [run for run in outcomes if run.family == "hfbench"]
    points = _points(runs, "")
    fast = [run for run in points if run.tflops >= LEAST_TFLOPS]
    spread = {"mean error": "mean", "median error": "median"}
    yield from _error_figures("HF sweep, predicted ≥ 200 TFLOP/s", fast, spread)
    peaks = [run.memory_error for run in runs if run.measured_gib is not None]
    if peaks:
        yield Figure("HF sweep", "mean memory error", stats(peaks)["mean"], len(peaks))
    verdicts = [
        (run.fits, run.did_fit) for run in runs if run.fits is not None and run.did_fit is not None
    ]
    counts = confusion(verdicts)
    if counts["accuracy"] is not None:
        yield Figure("HF sweep", "fits or not, right", counts["accuracy"], counts["n"])
    if counts["false_fit"] is not None:
        yield Figure("HF sweep", "false fit", counts["false_fit"], counts["failed"])
    yield from _ranking_figures("HF sweep", ranked(points))


def _ranking_figures(name: str, table: Table) -> Iterator[Figure]:
    if table["groups"]:
        yield Figure(name, "best-of-3 regret", table["best3_regret"], table["groups"])
        yield Figure(name, "Kendall tau", table["tau"], table["groups"])


# --- Overall, by group and by half

# How rows are grouped: always by inputs or predictions, never by measurements.
BREAKDOWNS: dict[str, Callable[[ScoredRun], str]] = {
    "source": lambda run: run.source_name,
    "gpu": lambda run: str(run.row["gpu"]),
    "layers": lambda run: "MoE" if run.routed else "dense",
    "pipeline": lambda run: "pp = 1" if run.row["pp"] == 1 else "pp > 1",
    "recompute": lambda run: str(run.row["recompute"] or "not said"),
    "stack": lambda run: "fitted factor" if run.fitted else "no factor",
    "inputs": lambda run: "fully specified" if run.specified else "partly open",
}


def summary(scored: ScoreResult, left_out: Sequence[ScoredRun] = ()) -> Table:
    """All figures as JSON; the text and the page are made from it.

    `left_out`: the same runs without the numbers that were fitted to their source.
    """
    outcomes = scored.outcomes
    skipped = [{"id": row.id, "reason": row.reason} for row in scored.skipped]
    impossible = [{"id": row.id, "reason": row.reason} for row in scored.impossible]
    unmeasured = [{"id": row.id, "reason": row.reason} for row in scored.unmeasured]
    return {
        "rows": len(outcomes) + len(skipped) + len(impossible) + len(unmeasured),
        **figures(outcomes),
        "intervals": intervals(outcomes),
        "from_tflops": from_tflops(outcomes),
        "held_out": halves(outcomes),
        "groups": dict(_groups(outcomes)),
        "sets": compare_with_peers(outcomes, left_out),
        "assumptions": _assumptions(outcomes),
        "specified": _specified(scored),
        "skipped": skipped,
        "internal_errors": impossible,
        "unmeasured": unmeasured,
    }


def figures(outcomes: Sequence[ScoredRun]) -> Table:
    """Errors of step time and memory, fits or not, and ranking, of runs that leave nothing open."""
    verdicts = [
        (run.fits, run.did_fit)
        for run in outcomes
        if run.fits is not None and run.did_fit is not None
    ]
    return {
        "time": stats([run.time_error for run in runs_with_time(outcomes)]),
        "memory": stats([run.memory_error for run in runs_with_memory(outcomes)]),
        "oom": confusion(verdicts),
        "rank": ranked(outcomes),
    }


def runs_with_time(outcomes: Sequence[ScoredRun]) -> list[ScoredRun]:
    """Runs with one predicted and one measured time."""
    return [run for run in outcomes if not run.is_open and _has_time(run)]


def runs_with_memory(outcomes: Sequence[ScoredRun]) -> list[ScoredRun]:
    """Runs with one predicted and one measured peak."""
    return [run for run in outcomes if not run.is_open and run.measured_gib is not None]


def _has_time(run: ScoredRun) -> bool:
    return run.measured_seconds is not None and run.source != "tflops_per_gpu"


def ranked(outcomes: Sequence[ScoredRun]) -> Table:
    """How well runs of the same job on the same number of GPUs are ranked."""
    return ranking([times for _, times in job_groups(outcomes)])


def job_groups(outcomes: Sequence[ScoredRun]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Predicted and measured times of the runs of one job, with their source, if there are some."""
    groups: dict[tuple[Any, ...], list[ScoredRun]] = {}
    for run in runs_with_time(outcomes):
        groups.setdefault(_job(run), []).append(run)
    large = [sorted(jobs, key=lambda candidate: candidate.name) for jobs in groups.values()]
    return [
        (
            group[0].source_name,
            [(candidate.seconds.low, candidate.measured_seconds or 0.0) for candidate in group],
        )
        for group in large
        if len(group) >= LEAST_RANKED
    ]


def _job(run: ScoredRun) -> tuple[Any, ...]:
    """What runs have in common if a planner would choose among them."""
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
    return (run.family, *(run.row.get(key) for key in same))


def intervals(outcomes: Sequence[ScoredRun]) -> Table:
    """Runs that leave choices open that time depends on: how many are inside the predicted range,
    and how far outside the others are."""
    return _ranges([run for run in outcomes if run.is_open and _has_time(run)])


def from_tflops(outcomes: Sequence[ScoredRun]) -> Table:
    """Runs whose time was computed from published TFLOP/s: the weakest evidence."""
    return _ranges([run for run in outcomes if run.source == "tflops_per_gpu"])


def _ranges(outcomes: Sequence[ScoredRun]) -> Table:
    errors = [run.time_error for run in outcomes]
    widths = [run.seconds.high / run.seconds.low - 1 for run in outcomes]
    return {**stats(errors), "inside": errors.count(0.0), "width": stats(widths)["median"]}


def halves(outcomes: Sequence[ScoredRun]) -> Table:
    """Step time of families with a fitted factor, memory and verdicts, on each half by hash.

    `families_without`: families with a factor but without a run in the held-out half, so that
    nothing here tests the factor.
    """
    parts = {
        "all": list(outcomes),
        "fitted_half": [run for run in outcomes if not run.is_held_out],
        "held_out_half": [run for run in outcomes if run.is_held_out],
    }
    results = {name: _half(part) for name, part in parts.items()}
    missing = set(results["all"]["by_family"]) - set(results["held_out_half"]["by_family"])
    return {**results, "families_without": sorted(missing)}


def _half(outcomes: Sequence[ScoredRun]) -> Table:
    fitted = [run for run in outcomes if run.fitted]
    numbers = figures(outcomes)
    families = sorted({run.family for run in fitted})
    return {
        "time": stats([run.time_error for run in runs_with_time(fitted)]),
        "by_family": {
            family: stats(
                [run.time_error for run in runs_with_time(fitted) if run.family == family]
            )
            for family in families
        },
        "memory": numbers["memory"],
        "oom": numbers["oom"],
    }


def _groups(outcomes: Sequence[ScoredRun]) -> Iterator[tuple[str, Table]]:
    for dimension, name_of in BREAKDOWNS.items():
        parts: dict[str, list[ScoredRun]] = {}
        for run in outcomes:
            parts.setdefault(name_of(run), []).append(run)
        for name in sorted(parts):
            numbers = {**figures(parts[name]), "intervals": intervals(parts[name])}
            yield f"{dimension}: {name}", numbers


def _specified(scored: ScoreResult) -> Table:
    """Of the fully specified rows with a measurement, how many could not be estimated."""
    skipped = sum(row.specified for row in (*scored.skipped, *scored.impossible))
    total = skipped + sum(run.specified for run in scored.outcomes)
    return {"n": total, "skipped": skipped, "share": skipped / total if total else None}


def _assumptions(outcomes: Sequence[ScoredRun]) -> Table:
    """How many rows have how many assumptions, and which; a row may leave out several things."""
    counts = Counter(len(run.assumptions) for run in outcomes)
    kinds = Counter(assumption for run in outcomes for assumption in run.assumptions)
    return {
        "rows": sum(number for count, number in counts.items() if count),
        "total": sum(kinds.values()),
        "by_count": {str(count): counts[count] for count in sorted(counts)},
        "kinds": dict(kinds.most_common()),
    }
