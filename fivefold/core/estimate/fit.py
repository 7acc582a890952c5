"""Measured times to constants: `seconds = work / rate + starts * start`.

The same line serves matrix products (FLOPs), copies (bytes) and rings (bytes that pass, hops). It
is laid by least squares on the relative error, so that a product of a microsecond counts as much
as one of a second; neither constant may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import FivefoldError


class Sample(NamedTuple):
    """One thing that was timed: its work, and how many starts it waits for."""

    name: str
    work: float
    seconds: float
    starts: float = 1.0


class Residuals(NamedTuple):
    """How far a line is from its samples, as shares of what was measured."""

    median: float
    worst: float
    num_samples: int


class Fit(NamedTuple):
    """The constants of a line, and what they leave unexplained."""

    rate: float
    start: float
    residuals: Residuals


def fit(samples: Sequence[Sample], start: float | None = None) -> Fit:
    """The line through these samples; a given `start` is kept, and only the rate is free."""
    work, seconds, starts = _columns(samples)
    columns = np.stack([work / seconds, starts / seconds], axis=1)
    if start is None:
        _require_two_sizes(samples)
        slope, start = _two_constants(columns)
    else:
        slope = _slope(columns, start)
        if slope <= 0:  # this work starts faster than the work that the start was measured on
            start = 0.0
            slope = _slope(columns, start)
    rate = float(1 / slope)
    return Fit(rate, start, residuals(samples, rate, start))


def residuals(samples: Sequence[Sample], rate: float, start: float) -> Residuals:
    """What these constants leave unexplained of the samples."""
    work, seconds, starts = _columns(samples)
    errors = np.abs((work / rate + starts * start) / seconds - 1)
    return Residuals(float(np.median(errors)), float(errors.max()), len(samples))


def _columns(samples: Sequence[Sample]) -> tuple[NDArray[np.float64], ...]:
    assert samples, "a line needs samples"
    assert all(one.work > 0 and one.seconds > 0 for one in samples), "work takes time"
    rows = [(one.work, one.seconds, one.starts) for one in samples]
    return tuple(np.array(rows, dtype=np.float64).T)


def _require_two_sizes(samples: Sequence[Sample]) -> None:
    if len({one.work / one.starts for one in samples}) < 2:
        raise FivefoldError(
            f"only {samples[0].name} was measured in the time given, and a rate and a start need "
            "two sizes: give more --seconds"
        )


def _two_constants(columns: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and start; where noise would make one negative, the start is 0."""
    work, starts = columns.T
    squares, mixed = float(work @ work), float(work @ starts)
    others, both = float(starts @ starts), (float(work.sum()), float(starts.sum()))
    determinant = squares * others - mixed**2
    slope = (others * both[0] - mixed * both[1]) / determinant
    start = (squares * both[1] - mixed * both[0]) / determinant
    if start < 0 or slope <= 0:
        return _slope(columns, 0.0), 0.0
    return slope, start


def _slope(columns: NDArray[np.float64], start: float) -> float:
    work, starts = columns.T
    return float(work @ (1 - start * starts) / (work @ work))
