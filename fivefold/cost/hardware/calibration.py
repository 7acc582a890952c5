"""Measured times of one machine to the constants of a machine file over a preset.

Each constant is a line `seconds = work / rate + starts * start`, for matmuls (FLOPs), copies
(bytes) and rings (bytes and hops). It is fitted by least squares on the relative error, so that a
matmul of a microsecond counts as much as one of a second; neither constant may be negative.

A machine file holds shares of the preset's own peaks. If more was measured than the preset's peak,
the peak is raised to what was measured: software cannot reach more than the hardware has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core import FivefoldError, Machine, tables
from fivefold.core import hardware as machines


class Sample(NamedTuple):
    """One measured time: the work, and how many starts it includes."""

    name: str
    work: float
    seconds: float
    starts: float = 1.0


class Residuals(NamedTuple):
    """How far a line is from its samples, as shares of the measured times."""

    median: float
    worst: float
    num_samples: int


class Fit(NamedTuple):
    """The constants of a line, and its residuals."""

    rate: float
    start: float
    residuals: Residuals


def fit_line(samples: Sequence[Sample], start: float | None = None) -> Fit:
    """Fit a line to these samples; with a given `start`, only the rate is fitted."""
    work, seconds, starts = _columns(samples)
    columns = np.stack([work / seconds, starts / seconds], axis=1)
    if start is None:
        _require_two_sizes(samples)
        slope, start = _two_constants(columns)
    else:
        slope = _slope(columns, start)
        if slope <= 0:  # this work starts faster than the work that gave the start
            start = 0.0
            slope = _slope(columns, start)
    rate = float(1 / slope)
    return Fit(rate, start, residuals(samples, rate, start))


def residuals(samples: Sequence[Sample], rate: float, start: float) -> Residuals:
    """How far these constants are from the samples."""
    work, seconds, starts = _columns(samples)
    errors = np.abs((work / rate + starts * start) / seconds - 1)
    return Residuals(float(np.median(errors)), float(errors.max()), len(samples))


def _columns(samples: Sequence[Sample]) -> tuple[NDArray[np.float64], ...]:
    assert samples, "a line needs samples"
    assert all(sample.work > 0 and sample.seconds > 0 for sample in samples), "work takes time"
    rows = [(sample.work, sample.seconds, sample.starts) for sample in samples]
    return tuple(np.array(rows, dtype=np.float64).T)


def _require_two_sizes(samples: Sequence[Sample]) -> None:
    if len({sample.work / sample.starts for sample in samples}) < 2:
        raise FivefoldError(
            f"only {samples[0].name} was measured in the given time, but a rate and a start need "
            "two sizes: give more --seconds"
        )


def _two_constants(columns: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and start; if noise would make one negative, the start is 0."""
    work, starts = columns.T
    squares, mixed = float(work @ work), float(work @ starts)
    start_squares, sums = float(starts @ starts), (float(work.sum()), float(starts.sum()))
    determinant = squares * start_squares - mixed**2
    slope = (start_squares * sums[0] - mixed * sums[1]) / determinant
    start = (squares * sums[1] - mixed * sums[0]) / determinant
    if start < 0 or slope <= 0:
        return _slope(columns, 0.0), 0.0
    return slope, start


def _slope(columns: NDArray[np.float64], start: float) -> float:
    work, starts = columns.T
    return float(work @ (1 - start * starts) / (work @ work))


# --- Machine files

MATMUL = "matmul"
MATMUL_FP8 = "matmul_fp8"
ATTENTION = "attention"
ATTENTION_OLD = "attention_old"
MEMORY = "memory"
LINKS = "links"
_SMALL_A100 = 60e9  # bytes: A100s with 40 GB have less


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of one machine, by the constant that they determine.

    `dtype` is that of matmuls and attention; `launch` the seconds between small kernels. `host`:
    where ranks are CPU processes, those of a layer's forward and backward without arithmetic.
    """

    device: str
    dtype: str
    samples: dict[str, list[Sample]]
    launch: float
    ranks: int = 1
    notes: list[str] = field(default_factory=list[str])
    host: tuple[float, float] | None = None
    cores: int | None = None


@dataclass(frozen=True)
class FittedConstant:
    """One constant: the preset's value beside the measured one, and how far each is from the times.

    `rate` is in FLOP/s or bytes/s; a constant in seconds has none.
    """

    key: str
    planned: float
    measured: float
    rate: float | None
    residuals: Residuals
    planned_residuals: Residuals


@dataclass(frozen=True)
class Calibration:
    """A new machine file: its table, the rows to print, and notes."""

    base: Machine
    table: dict[str, Any]
    rows: list[FittedConstant]
    notes: list[str]


def guess_base(device: str, memory: float) -> str:
    """The preset whose chip is in the GPU's name."""
    known = [name for name in machines.presets() if re.search(rf"\b{name}\b", device.lower())]
    if not known:
        raise FivefoldError(
            f"no preset is known for {device!r}: name the most similar one with --base "
            f"({', '.join(machines.presets())})"
        )
    preset = max(known, key=len)
    return "a100-40g" if preset == "a100" and memory < _SMALL_A100 else preset


def calibrate(base: Machine, measured: MeasuredTimes, source: str) -> Calibration:
    """Fit every constant that has samples; the others stay as in the base."""
    fits = _fits(measured.samples)
    table: dict[str, Any] = {"base": base.name, "chip": measured.device}
    notes = list(measured.notes)
    # Peaks of the base that the measurements exceed.
    peaks: dict[str, float] = {}
    for name, keys in (
        (measured.dtype, (MATMUL, ATTENTION, ATTENTION_OLD)),
        ("fp8", (MATMUL_FP8,)),
    ):
        best = max((fits[key].rate for key in keys if key in fits), default=0.0)
        if best > base.peaks.known().get(name, best):
            peaks[name] = _rounded(best)
            notes.append(_raised_note(f"peaks.{name}", base.peak(name), peaks[name]))
    if peaks:
        table["peaks"] = peaks
    bandwidth = base.memory_bandwidth
    if MEMORY in fits and fits[MEMORY].rate > bandwidth:
        bandwidth = table["memory_bandwidth"] = _rounded(fits[MEMORY].rate)
        notes.append(_raised_note("memory_bandwidth", base.memory_bandwidth, bandwidth))
    rates = {**base.peaks.known(), **peaks}
    full_rates = {
        MATMUL: rates[measured.dtype],
        MATMUL_FP8: rates.get("fp8", 0.0),
        ATTENTION: rates[measured.dtype],
        ATTENTION_OLD: rates[measured.dtype],
        MEMORY: bandwidth,
    }
    shares = {key: _share(fits[key].rate, full_rates[key]) for key in full_rates if key in fits}
    efficiency: dict[str, Any] = {**shares, "start": _rounded(fits[MATMUL].start)}
    if measured.host is not None:
        forward, backward = map(_rounded, measured.host)
        efficiency |= {"forward_host": forward, "backward_host": backward}
    if measured.cores is not None:
        table["gpus_per_node"] = measured.cores
    if LINKS in fits:
        efficiency["links"] = _add_links(base, fits[LINKS], source, table, notes)
    table |= {"efficiency": efficiency}
    table["sources"] = {key: source for key in table if key not in ("base", "chip")}
    return Calibration(base, table, _rows(base, measured, fits, efficiency), notes)


def _fits(samples: dict[str, list[Sample]]) -> dict[str, Fit]:
    """Matmuls and rings have two constants; all others one, and share the start of matmuls."""
    fits = {key: fit_line(samples[key]) for key in (MATMUL, LINKS) if key in samples}
    for key in (MATMUL_FP8, ATTENTION, ATTENTION_OLD):
        if key in samples:
            fits[key] = fit_line(samples[key], fits[MATMUL].start)
    if MEMORY in samples:
        fits[MEMORY] = fit_line(samples[MEMORY], 0.0)
    return fits


def _add_links(
    base: Machine, ring: Fit, source: str, table: dict[str, Any], notes: list[str]
) -> list[float]:
    """Add the innermost tier's link with the measured latency; return the shares of all tiers."""
    tier = base.tiers[0]
    bandwidth = tier.link.bandwidth
    if ring.rate > tier.bandwidth:
        bandwidth = _rounded(ring.rate / tier.links_per_gpu)
        notes.append(_raised_note(f"tiers.{tier.name}.link", tier.link.bandwidth, bandwidth))
    link = replace(tier.link, bandwidth=bandwidth, latency=_rounded(ring.start), source=source)
    table["tiers"] = {tier.name: {"link": tables.table_of(link)}}
    outer = [_known_share(base, number) for number in range(1, len(base.tiers))]
    return [_share(ring.rate, bandwidth * tier.links_per_gpu), *outer]


def _known_share(base: Machine, number: int) -> float:
    shares = base.efficiency.links
    return shares[min(number, len(shares) - 1)]


def _rows(
    base: Machine, measured: MeasuredTimes, fits: dict[str, Fit], efficiency: dict[str, Any]
) -> list[FittedConstant]:
    """The constants in the order of the file, each beside that of the base."""
    reach, known = base.efficiency, base.peaks.known()
    flops, tier = known[measured.dtype], base.tiers[0]
    planned: dict[str, tuple[float, float, float]] = {  # share, of what, and start
        MATMUL: (reach.matmul, flops, reach.start),
        MATMUL_FP8: (reach.matmul_fp8, known.get("fp8", 0.0), reach.start),
        ATTENTION: (reach.attention, flops, reach.start),
        ATTENTION_OLD: (reach.attention_old, flops, reach.start),
        MEMORY: (reach.memory, base.memory_bandwidth, 0.0),
        LINKS: (_known_share(base, 0), tier.bandwidth, tier.link.latency),
    }
    rows: list[FittedConstant] = []
    for key, (share, peak, start) in planned.items():
        if key not in fits:
            continue
        samples, fit = measured.samples[key], fits[key]
        errors = (fit.residuals, residuals(samples, share * peak, start))
        value = efficiency[key][0] if key == LINKS else efficiency[key]
        rows.append(FittedConstant(key, share, value, fit.rate, *errors))
        if key in (MATMUL, LINKS):
            name = "start" if key == MATMUL else "latency"
            rows.append(FittedConstant(name, start, _rounded(fit.start), None, *errors))
    return rows


def _share(rate: float, peak: float) -> float:
    return min(1.0, _rounded(rate / peak))


def _rounded(number: float, digits: int = 3) -> float:
    """Round to the precision of a measurement."""
    return float(f"{number:.{digits}g}")


def _raised_note(name: str, known: float, new_value: float) -> str:
    return (
        f"more was measured than the base's {known:.3g}: {name} is {new_value:.3g} here; another "
        "--base may be nearer"
    )
