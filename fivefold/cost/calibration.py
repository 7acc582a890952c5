"""Measured times to constants: `seconds = work / rate + starts * start`.

The same line serves matrix products (FLOPs), copies (bytes) and rings (bytes that pass, hops). It
is laid by least squares on the relative error, so that a product of a microsecond counts as much
as one of a second; neither constant may be negative.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core import machine as machines
from fivefold.core import tables
from fivefold.core.errors import FivefoldError
from fivefold.core.machine import Machine


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


# What was measured on one machine, as a machine file over a preset.
#
# Shares are of the base's own numbers. Where more was measured than the base says there is, its
# number is raised to what was measured: software reaches no more than the hardware has.


PRODUCTS, NARROW, FUSED, FLASH2, COPIES, RINGS = (
    "matmul",
    "matmul_fp8",
    "attention",
    "attention_old",
    "memory",
    "links",
)
_SMALL_A100 = 60e9  # bytes: those of 40 GB lie below


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of one machine, by the constant that they are for.

    `dtype` is that of the products and of attention; `launch` the seconds between small kernels.
    """

    device: str
    dtype: str
    samples: dict[str, list[Sample]]
    launch: float
    ranks: int = 1
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class FittedRow:
    """One constant: planned by the base beside measured, and how far each is from the times.

    `rate` is in FLOP/s or bytes/s; a constant of seconds has none.
    """

    key: str
    planned: float
    measured: float
    rate: float | None
    residuals: Residuals
    planned_residuals: Residuals


@dataclass(frozen=True)
class Calibration:
    """A machine file in the making: its table, the rows to print, and what has to be said."""

    base: Machine
    table: dict[str, Any]
    rows: list[FittedRow]
    notes: list[str]


def guess_base(device: str, memory: float) -> str:
    """The preset whose chip a GPU's name says it is."""
    known = [name for name in machines.presets() if re.search(rf"\b{name}\b", device.lower())]
    if not known:
        raise FivefoldError(
            f"no machine is known for {device!r}: give the nearest with --base "
            f"({', '.join(machines.presets())})"
        )
    found = max(known, key=len)
    return "a100-40g" if found == "a100" and memory < _SMALL_A100 else found


def calibrate(base: Machine, measured: MeasuredTimes, source: str) -> Calibration:
    """Fit every constant that has samples; what has none stays as in the base."""
    fits = _fits(measured.samples)
    table: dict[str, Any] = {"base": base.name, "chip": measured.device}
    notes = list(measured.notes)
    peaks = _raised_peaks(base, measured.dtype, fits, notes)
    if peaks:
        table["peaks"] = peaks
    bandwidth = base.memory_bandwidth
    if COPIES in fits and fits[COPIES].rate > bandwidth:
        bandwidth = table["memory_bandwidth"] = _rounded(fits[COPIES].rate)
        notes.append(_raised("memory_bandwidth", base.memory_bandwidth, bandwidth))
    rates = {**base.peaks.known(), **peaks}
    whole = {
        PRODUCTS: rates[measured.dtype],
        NARROW: rates.get("fp8", 0.0),
        FUSED: rates[measured.dtype],
        FLASH2: rates[measured.dtype],
        COPIES: bandwidth,
    }
    shares = {key: _share(fits[key].rate, whole[key]) for key in whole if key in fits}
    efficiency: dict[str, Any] = {**shares, "start": _rounded(fits[PRODUCTS].start)}
    if RINGS in fits:
        efficiency["links"] = _lay_links(base, fits[RINGS], source, table, notes)
    table |= {"efficiency": efficiency}
    table["sources"] = {key: source for key in table if key not in ("base", "chip")}
    return Calibration(base, table, _rows(base, measured, fits, efficiency), notes)


def _fits(samples: dict[str, list[Sample]]) -> dict[str, Fit]:
    """Products and rings have two constants; all others one, and share the start of products."""
    found = {key: fit(samples[key]) for key in (PRODUCTS, RINGS) if key in samples}
    for key in (NARROW, FUSED, FLASH2):
        if key in samples:
            found[key] = fit(samples[key], found[PRODUCTS].start)
    if COPIES in samples:
        found[COPIES] = fit(samples[COPIES], 0.0)
    return found


def _raised_peaks(
    base: Machine, dtype: str, fits: dict[str, Fit], notes: list[str]
) -> dict[str, float]:
    """Peaks of the base that were surpassed."""
    raised: dict[str, float] = {}
    for name, keys in ((dtype, (PRODUCTS, FUSED, FLASH2)), ("fp8", (NARROW,))):
        best = max((fits[key].rate for key in keys if key in fits), default=0.0)
        if best > base.peaks.known().get(name, best):
            raised[name] = _rounded(best)
            notes.append(_raised(f"peaks.{name}", base.peak(name), raised[name]))
    return raised


def _lay_links(
    base: Machine, ring: Fit, source: str, table: dict[str, Any], notes: list[str]
) -> list[float]:
    """The innermost tier's link with the latency measured; the shares of all tiers."""
    tier = base.tiers[0]
    bandwidth = tier.link.bandwidth
    if ring.rate > tier.bandwidth:
        bandwidth = _rounded(ring.rate / tier.links_per_gpu)
        notes.append(_raised(f"tiers.{tier.name}.link", tier.link.bandwidth, bandwidth))
    link = replace(tier.link, bandwidth=bandwidth, latency=_rounded(ring.start), source=source)
    table["tiers"] = {tier.name: {"link": tables.table_of(link)}}
    outer = [_known_share(base, number) for number in range(1, len(base.tiers))]
    return [_share(ring.rate, bandwidth * tier.links_per_gpu), *outer]


def _known_share(base: Machine, number: int) -> float:
    shares = base.efficiency.links
    return shares[min(number, len(shares) - 1)]


def _rows(
    base: Machine, measured: MeasuredTimes, fits: dict[str, Fit], efficiency: dict[str, Any]
) -> list[FittedRow]:
    """The constants in the order of the file, each beside the base's."""
    reach, known = base.efficiency, base.peaks.known()
    flops, tier = known[measured.dtype], base.tiers[0]
    planned: dict[str, tuple[float, float, float]] = {  # share, of what, and start
        PRODUCTS: (reach.matmul, flops, reach.start),
        NARROW: (reach.matmul_fp8, known.get("fp8", 0.0), reach.start),
        FUSED: (reach.attention, flops, reach.start),
        FLASH2: (reach.attention_old, flops, reach.start),
        COPIES: (reach.memory, base.memory_bandwidth, 0.0),
        RINGS: (_known_share(base, 0), tier.bandwidth, tier.link.latency),
    }
    rows: list[FittedRow] = []
    for key, (share, whole, start) in planned.items():
        if key not in fits:
            continue
        samples, found = measured.samples[key], fits[key]
        errors = (found.residuals, residuals(samples, share * whole, start))
        value = efficiency[key][0] if key == RINGS else efficiency[key]
        rows.append(FittedRow(key, share, value, found.rate, *errors))
        if key in (PRODUCTS, RINGS):
            name = "start" if key == PRODUCTS else "latency"
            rows.append(FittedRow(name, start, _rounded(found.start), None, *errors))
    return rows


def _share(rate: float, whole: float) -> float:
    return min(1.0, _rounded(rate / whole))


def _rounded(number: float, digits: int = 3) -> float:
    """As many digits as a measurement is good for."""
    return float(f"{number:.{digits}g}")


def _raised(name: str, known: float, found: float) -> str:
    return (
        f"more was measured than the base's {known:.3g}: {name} is {found:.3g} here; another "
        "--base may be nearer"
    )
