"""How far predictions are off, and how well they rank. Errors are shares of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LEAST_RANKED = 4  # runs of a group, below which an order says little
_TOP = 3


class Span(NamedTuple):
    """A prediction: one value, or the ends of what a run that leaves things open may be."""

    low: float
    high: float

    def error(self, measured: float) -> float:
        """0 inside; outside, the distance to the nearer end."""
        return max(self.low - measured, measured - self.high, 0.0) / measured


def stats(errors: Sequence[float]) -> dict[str, Any]:
    """`n`, `median`, `mean` and `p90`; None where there is nothing."""
    if not errors:
        return {"n": 0, "median": None, "mean": None, "p90": None}
    found = np.asarray(errors)
    return {
        "n": len(found),
        "median": float(np.median(found)),
        "mean": float(found.mean()),
        "p90": float(np.percentile(found, 90)),
    }


def confusion(verdicts: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Pairs of predicted to fit and did fit: `accuracy`, and `false_fit` of those that did not."""
    failed = [predicted for predicted, happened in verdicts if not happened]
    right = [predicted == happened for predicted, happened in verdicts]
    return {
        "n": len(verdicts),
        "failed": len(failed),
        "accuracy": sum(right) / len(right) if right else None,
        "false_fit": sum(failed) / len(failed) if failed else None,
    }


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Tau-b: pairs in the same order less those in the opposite one, ties taken out of the count.

    0 where either side is all ties: nothing was ranked.
    """
    x, y = (np.sign(np.subtract.outer(each, each)) for each in (predicted, measured))
    pairs = np.sqrt(float((x != 0).sum()) * float((y != 0).sum()))
    return float((x * y).sum() / pairs) if pairs else 0.0


def regret(predicted: Sequence[float], measured: Sequence[float], tries: int) -> float:
    """What the best of the first `tries` predicted runs takes longer than the best of all.

    Of equal predictions the one that stands first is taken.
    """
    order = np.argsort(np.asarray(predicted), kind="stable")[:tries]
    times = np.asarray(measured)
    return float(times[order].min() / times.min() - 1)


def ranking(groups: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Means over groups of predicted and measured times."""
    if not groups:
        return {"groups": 0, "n": 0, "tau": None, "top1_regret": None, "best3_regret": None}
    sides = [tuple(zip(*group, strict=True)) for group in groups]
    return {
        "groups": len(groups),
        "n": sum(map(len, groups)),
        "tau": float(np.mean([kendall_tau(*side) for side in sides])),
        "top1_regret": float(np.mean([regret(*side, tries=1) for side in sides])),
        "best3_regret": float(np.mean([regret(*side, tries=_TOP) for side in sides])),
    }


def left_out(sizes: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """By size: the mean error of its runs when one scale is fitted on all other sizes.

    The scale is the median of measured over predicted.
    """
    found: dict[str, float] = {}
    for size, pairs in sizes.items():
        others = [pair for name, group in sizes.items() if name != size for pair in group]
        if others:
            scale = float(np.median([measured / predicted for predicted, measured in others]))
            errors = [abs(scale * predicted / measured - 1) for predicted, measured in pairs]
            found[size] = float(np.mean(errors))
    return found
