"""Sets of runs on which other planners were measured, and what they reached there.

The figures of Calculon and llm-analysis are frozen. They were measured on the full public sets;
`peer_runs` says on how many runs, where that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.core.score.metrics import confusion, left_out, stats
from fivefold.core.score.outcome import Outcome

Table = dict[str, Any]
Rank = Callable[[Sequence[Outcome]], Table]
LEAST_TFLOPS = 200.0  # below it the sweep's runs are bound by the host, and single noisy readings
_EXACT = ("step_time_s", "tokens_per_s_per_gpu")


@dataclass(frozen=True)
class Peers:
    """Frozen figures of one metric on one set; None where there is none."""

    calculon: str | None
    llm_analysis: str | None
    aim: str
    peer_runs: int | None = None


PEERS: dict[tuple[str, str], Peers] = {
    ("Korthikanti", "mean error"): Peers("3.65%", "25.6%", "≤ 3.5%", 8),
    ("Korthikanti", "largest error"): Peers("8.87%", "70.7%", "≤ 8%", 8),
    ("SC21 + MT-NLG + Korthikanti DP8", "mean error"): Peers("12.8%", "> 50%", "≤ 8%"),
    ("SC21 ZeRO-3", "mean error"): Peers("cannot express", "46%", "≤ 15%"),
    ("vTrain multi-node", "mean error"): Peers("15.9% (scaled 13.7%)", "16.3%", "≤ 7.5%"),
    ("vTrain multi-node", "worst size left out"): Peers(None, None, "≤ 15%"),
    ("vTrain single-node", "mean error"): Peers("39.1% (scaled 30.1%)", None, "≤ 7%"),
    ("vTrain single-node", "best-of-3 regret"): Peers("3.7%", None, "≤ 1%"),
    ("vTrain single-node", "Kendall tau"): Peers(".45", None, "≥ .86"),
    ("HF sweep, predicted ≥ 200 TFLOP/s", "mean error"): Peers("30.8%", None, "≤ 16%"),
    ("HF sweep, predicted ≥ 200 TFLOP/s", "median error"): Peers("23.8%", None, "≤ 9%"),
    ("HF sweep", "mean memory error"): Peers("29.2%", "45.3%", "≤ 8%"),
    ("HF sweep", "fits or not, right"): Peers("94.8%", "90.3%", "≥ 98%"),
    ("HF sweep", "false fit"): Peers("8.9%", "16.7%", "≤ 2%"),
    ("HF sweep", "best-of-3 regret"): Peers("15–19%", "62%", "≤ 5%"),
    ("HF sweep", "Kendall tau"): Peers(".45", ".44", "≥ .72"),
    ("published, fully specified", "median error"): Peers("cannot express most", None, "≤ 10%"),
    ("published, fully specified", "p90 error"): Peers("cannot express most", None, "≤ 25%"),
    ("Llama-3.1-405B, 8,192 H100", "error"): Peers("+32%, does not fit", None, "≤ 10%"),
    ("Llama-3.1-405B, 16,384 H100", "error"): Peers("+32%, does not fit", None, "≤ 10%"),
}


@dataclass(frozen=True)
class Figure:
    """Ours: a value and the number of runs (or groups of runs) behind it."""

    name: str
    metric: str
    value: float
    n: int
    detail: str = ""


def compared(outcomes: Sequence[Outcome], rank: Rank) -> list[Table]:
    """One entry for each metric of each set of which there are runs; of all and the held-out."""
    held = {
        (figure.name, figure.metric): figure
        for figure in _figures([one for one in outcomes if one.is_held_out], rank)
    }
    return [
        {
            "set": figure.name,
            "metric": figure.metric,
            "detail": figure.detail,
            "n": figure.n,
            "ours": figure.value,
            "held_out_n": half.n if half else 0,
            "held_out": half.value if half else None,
            "calculon": peers.calculon,
            "llm_analysis": peers.llm_analysis,
            "peer_n": peers.peer_runs,
            "aim": peers.aim,
        }
        for figure in _figures(outcomes, rank)
        for peers in [PEERS[figure.name, figure.metric]]
        for half in [held.get((figure.name, figure.metric))]
    ]


def _figures(outcomes: Sequence[Outcome], rank: Rank) -> Iterator[Figure]:
    yield from _papers(outcomes)
    yield from _vtrain(outcomes, rank)
    yield from _sweep(outcomes, rank)


def _points(outcomes: Sequence[Outcome], pattern: str) -> list[Outcome]:
    """Runs by their ids, with one predicted and one measured time."""
    return [
        one
        for one in outcomes
        if re.match(pattern, one.name) and not one.is_open and one.source in _EXACT
    ]


def _errors(name: str, runs: Sequence[Outcome], metrics: dict[str, str]) -> Iterator[Figure]:
    errors = [one.time_error for one in runs]
    if errors:
        found = {**stats(errors), "max": max(errors)}
        for metric, key in metrics.items():
            yield Figure(name, metric, found[key], len(errors))


def _papers(outcomes: Sequence[Outcome]) -> Iterator[Figure]:
    korthikanti = _points(outcomes, r"korth-\d+[bt]-(full|selective)$")
    both = {"mean error": "mean", "largest error": "max"}
    yield from _errors("Korthikanti", korthikanti, both)
    # Table 2 of SC21 leaves the split of its Megatron rows open: they are no part of the set.
    megatron = _points(outcomes, r"sc21-t1-|mtnlg-|korth-530b-selective-dp8$")
    yield from _errors("SC21 + MT-NLG + Korthikanti DP8", megatron, {"mean error": "mean"})
    sharded = _points(outcomes, r"sc21-.*zero3")
    yield from _errors("SC21 ZeRO-3", sharded, {"mean error": "mean"})
    full = [one for one in outcomes if one.row.get("fully_specified") is True]
    published = _points(full, r"(?!vtrain-)")
    spread = {"median error": "median", "p90 error": "p90"}
    yield from _errors("published, fully specified", published, spread)
    for gpus in (8192, 16384):
        for one in outcomes:
            if re.match(rf"llama3-405b-{gpus}g-s8192", one.name) and one.measured_seconds:
                name = f"Llama-3.1-405B, {gpus:,} H100"
                yield Figure(name, "error", one.time_error, 1, _interval(one))


def _interval(one: Outcome) -> str:
    """What is predicted for a run that leaves things open, and with which choices it fits."""
    fits = "fits" if one.fits else "does not fit"
    if one.fits is None:
        fits = f"fits in {len(one.fitting)} of {one.num_cases} cases: {one.fitting[0]}"
    low, high = one.seconds
    return f"{low:.2f} to {high:.2f} s for {one.measured_seconds:.2f} s, {fits}"


def _vtrain(outcomes: Sequence[Outcome], rank: Rank) -> Iterator[Figure]:
    multi = _points(outcomes, "vtrain-multi-")
    yield from _errors("vTrain multi-node", multi, {"mean error": "mean"})
    sizes: dict[str, list[tuple[float, float]]] = {}
    for one in multi:
        size = f"{one.row['layers']} x {one.row['hidden']}"
        sizes.setdefault(size, []).append((one.seconds.low, one.measured_seconds or 0.0))
    if worst := left_out(sizes):
        yield Figure("vTrain multi-node", "worst size left out", max(worst.values()), len(worst))
    single = _points(outcomes, "vtrain-single-")
    yield from _errors("vTrain single-node", single, {"mean error": "mean"})
    yield from _ranks("vTrain single-node", rank(single))


def _sweep(outcomes: Sequence[Outcome], rank: Rank) -> Iterator[Figure]:
    runs = [one for one in outcomes if one.family == "hfbench"]
    points = _points(runs, "")
    fast = [one for one in points if one.tflops >= LEAST_TFLOPS]
    spread = {"mean error": "mean", "median error": "median"}
    yield from _errors("HF sweep, predicted ≥ 200 TFLOP/s", fast, spread)
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
    yield from _ranks("HF sweep", rank(points))


def _ranks(name: str, found: Table) -> Iterator[Figure]:
    if found["groups"]:
        yield Figure(name, "best-of-3 regret", found["best3_regret"], found["groups"])
        yield Figure(name, "Kendall tau", found["tau"], found["groups"])
