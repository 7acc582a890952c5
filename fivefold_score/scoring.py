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
    without = {(one.name, one.metric): one.value for one in _figures(left_out)}
    held_out_half = {
        (figure.name, figure.metric): figure
        for figure in _figures([one for one in outcomes if one.is_held_out])
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
        one
        for one in outcomes
        if re.match(pattern, one.name) and not one.is_open and one.source in _EXACT
    ]


def _error_figures(
    name: str, runs: Sequence[ScoredRun], metrics: dict[str, str]
) -> Iterator[Figure]:
    errors = [one.time_error for one in runs]
    if errors:
        found = {**stats(errors), "max": max(errors)}
        for metric, key in metrics.items():
            yield Figure(name, metric, found[key], len(errors))


def _paper_figures(outcomes: Sequence[ScoredRun]) -> Iterator[Figure]:
    korthikanti = _points(outcomes, r"korth-\d+[bt]-(full|selective)$")
    both = {"mean error": "mean", "largest error": "max"}
    yield from _error_figures("Korthikanti", korthikanti, both)
    # Table 2 of SC21 leaves the split of its Megatron rows open: they are not in the set.
    megatron = _points(outcomes, r"sc21-t1-|mtnlg-|korth-530b-selective-dp8$")
    yield from _error_figures("SC21 + MT-NLG + Korthikanti DP8", megatron, {"mean error": "mean"})
    sharded = _points(outcomes, r"sc21-.*zero3")
    yield from _error_figures("SC21 ZeRO-3", sharded, {"mean error": "mean"})
    full = [one for one in outcomes if one.row.get("fully_specified") is True]
    published = _points(full, r"(?!vtrain-)")
    spread = {"median error": "median", "p90 error": "p90"}
    yield from _error_figures("published, fully specified", published, spread)
    for gpus in (8192, 16384):
        for one in outcomes:
            if re.match(rf"llama3-405b-{gpus}g-s8192", one.name) and one.measured_seconds:
                name = f"Llama-3.1-405B, {gpus:,} H100"
                yield Figure(name, "error", one.time_error, 1, _interval(one))


def _interval(one: ScoredRun) -> str:
    """The predicted range of a run that leaves choices open, and with which choices it fits."""
    fits = "fits" if one.fits else "does not fit"
    if one.fits is None:
        fits = f"fits in {len(one.fitting)} of {one.num_cases} cases: {one.fitting[0]}"
    low, high = one.seconds
    return f"{low:.2f} to {high:.2f} s for {one.measured_seconds:.2f} s, {fits}"


def _vtrain_figures(outcomes: Sequence[ScoredRun]) -> Iterator[Figure]:
    multi = _points(outcomes, "vtrain-multi-")
    yield from _error_figures("vTrain multi-node", multi, {"mean error": "mean"})
    sizes: dict[str, list[tuple[float, float]]] = {}
    for one in multi:
        size = f"{one.row['layers']} x {one.row['hidden']}"
        sizes.setdefault(size, []).append((one.seconds.low, one.measured_seconds or 0.0))
    if worst := leave_one_size_out(sizes):
        yield Figure("vTrain multi-node", "worst size left out", max(worst.values()), len(worst))
    single = _points(outcomes, "vtrain-single-")
    yield from _error_figures("vTrain single-node", single, {"mean error": "mean"})
    yield from _ranking_figures("vTrain single-node", ranked(single))


def _sweep_figures(outcomes: Sequence[ScoredRun]) -> Iterator[Figure]:
    runs = [one for one in outcomes if one.family == "hfbench"]
    points = _points(runs, "")
    fast = [one for one in points if one.tflops >= LEAST_TFLOPS]
    spread = {"mean error": "mean", "median error": "median"}
    yield from _error_figures("HF sweep, predicted ≥ 200 TFLOP/s", fast, spread)
    peaks = [one.memory_error for one in runs if one.measured_gib is not None]
    if peaks:
        yield Figure("HF sweep", "mean memory error", stats(peaks)["mean"], len(peaks))
    verdicts = [
        (one.fits, one.did_fit) for one in runs if one.fits is not None and one.did_fit is not None
    ]
    found = confusion(verdicts)
    if found["accuracy"] is not None:
        yield Figure("HF sweep", "fits or not, right", found["accuracy"], found["n"])
    if found["false_fit"] is not None:
        yield Figure("HF sweep", "false fit", found["false_fit"], found["failed"])
    yield from _ranking_figures("HF sweep", ranked(points))


def _ranking_figures(name: str, found: Table) -> Iterator[Figure]:
    if found["groups"]:
        yield Figure(name, "best-of-3 regret", found["best3_regret"], found["groups"])
        yield Figure(name, "Kendall tau", found["tau"], found["groups"])


# --- Overall, by group and by half

# How rows are grouped: always by inputs or predictions, never by measurements.
BREAKDOWNS: dict[str, Callable[[ScoredRun], str]] = {
    "source": lambda one: one.source_name,
    "gpu": lambda one: str(one.row["gpu"]),
    "layers": lambda one: "MoE" if one.routed else "dense",
    "pipeline": lambda one: "pp = 1" if one.row["pp"] == 1 else "pp > 1",
    "recompute": lambda one: str(one.row["recompute"] or "not said"),
    "stack": lambda one: "fitted factor" if one.fitted else "no factor",
    "inputs": lambda one: "fully specified" if one.specified else "partly open",
}


def summary(scored: ScoreResult, left_out: Sequence[ScoredRun] = ()) -> Table:
    """All figures as JSON; the text and the page are made from it.

    `left_out`: the same runs without the numbers that were fitted to their source.
    """
    outcomes = scored.outcomes
    skipped = [{"id": each.id, "reason": each.reason} for each in scored.skipped]
    impossible = [{"id": each.id, "reason": each.reason} for each in scored.impossible]
    unmeasured = [{"id": each.id, "reason": each.reason} for each in scored.unmeasured]
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
        (one.fits, one.did_fit)
        for one in outcomes
        if one.fits is not None and one.did_fit is not None
    ]
    return {
        "time": stats([one.time_error for one in runs_with_time(outcomes)]),
        "memory": stats([one.memory_error for one in runs_with_memory(outcomes)]),
        "oom": confusion(verdicts),
        "rank": ranked(outcomes),
    }


def runs_with_time(outcomes: Sequence[ScoredRun]) -> list[ScoredRun]:
    """Runs with one predicted and one measured time."""
    return [one for one in outcomes if not one.is_open and _has_time(one)]


def runs_with_memory(outcomes: Sequence[ScoredRun]) -> list[ScoredRun]:
    """Runs with one predicted and one measured peak."""
    return [one for one in outcomes if not one.is_open and one.measured_gib is not None]


def _has_time(one: ScoredRun) -> bool:
    return one.measured_seconds is not None and one.source != "tflops_per_gpu"


def ranked(outcomes: Sequence[ScoredRun]) -> Table:
    """How well runs of the same job on the same number of GPUs are ranked."""
    return ranking([times for _, times in job_groups(outcomes)])


def job_groups(outcomes: Sequence[ScoredRun]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Predicted and measured times of the runs of one job, with their source, if there are some."""
    groups: dict[tuple[Any, ...], list[ScoredRun]] = {}
    for one in runs_with_time(outcomes):
        groups.setdefault(_job(one), []).append(one)
    large = [sorted(each, key=lambda one: one.name) for each in groups.values()]
    return [
        (group[0].source_name, [(one.seconds.low, one.measured_seconds or 0.0) for one in group])
        for group in large
        if len(group) >= LEAST_RANKED
    ]


def _job(one: ScoredRun) -> tuple[Any, ...]:
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
    return (one.family, *(one.row.get(key) for key in same))


def intervals(outcomes: Sequence[ScoredRun]) -> Table:
    """Runs that leave choices open that time depends on: how many are inside the predicted range,
    and how far outside the others are."""
    return _ranges([one for one in outcomes if one.is_open and _has_time(one)])


def from_tflops(outcomes: Sequence[ScoredRun]) -> Table:
    """Runs whose time was computed from published TFLOP/s: the weakest evidence."""
    return _ranges([one for one in outcomes if one.source == "tflops_per_gpu"])


def _ranges(outcomes: Sequence[ScoredRun]) -> Table:
    errors = [one.time_error for one in outcomes]
    widths = [one.seconds.high / one.seconds.low - 1 for one in outcomes]
    return {**stats(errors), "inside": errors.count(0.0), "width": stats(widths)["median"]}


def halves(outcomes: Sequence[ScoredRun]) -> Table:
    """Step time of families with a fitted factor, memory and verdicts, on each half by hash.

    `families_without`: families with a factor but without a run in the held-out half, so that
    nothing here tests the factor.
    """
    parts = {
        "all": list(outcomes),
        "fitted_half": [one for one in outcomes if not one.is_held_out],
        "held_out_half": [one for one in outcomes if one.is_held_out],
    }
    found = {name: _half(part) for name, part in parts.items()}
    missing = set(found["all"]["by_family"]) - set(found["held_out_half"]["by_family"])
    return {**found, "families_without": sorted(missing)}


def _half(outcomes: Sequence[ScoredRun]) -> Table:
    fitted = [one for one in outcomes if one.fitted]
    found = figures(outcomes)
    families = sorted({one.family for one in fitted})
    return {
        "time": stats([one.time_error for one in runs_with_time(fitted)]),
        "by_family": {
            family: stats(
                [one.time_error for one in runs_with_time(fitted) if one.family == family]
            )
            for family in families
        },
        "memory": found["memory"],
        "oom": found["oom"],
    }


def _groups(outcomes: Sequence[ScoredRun]) -> Iterator[tuple[str, Table]]:
    for dimension, name_of in BREAKDOWNS.items():
        parts: dict[str, list[ScoredRun]] = {}
        for one in outcomes:
            parts.setdefault(name_of(one), []).append(one)
        for name in sorted(parts):
            found = {**figures(parts[name]), "intervals": intervals(parts[name])}
            yield f"{dimension}: {name}", found


def _specified(scored: ScoreResult) -> Table:
    """Of the fully specified rows with a measurement, how many could not be estimated."""
    skipped = sum(each.specified for each in (*scored.skipped, *scored.impossible))
    total = skipped + sum(one.specified for one in scored.outcomes)
    return {"n": total, "skipped": skipped, "share": skipped / total if total else None}


def _assumptions(outcomes: Sequence[ScoredRun]) -> Table:
    """How many rows have how many assumptions, and which; a row may leave out several things."""
    counts = Counter(len(one.assumptions) for one in outcomes)
    kinds = Counter(words for one in outcomes for words in one.assumptions)
    return {
        "rows": sum(number for count, number in counts.items() if count),
        "total": sum(kinds.values()),
        "by_count": {str(count): counts[count] for count in sorted(counts)},
        "kinds": dict(kinds.most_common()),
    }
