"""A calibration as the file that is written, and as the table and the JSON that are printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold.core import strict
from fivefold.core.estimate.calibrated import COPIES, RINGS, Calibration, Measured, Row


def file_text(found: Calibration, measured: Measured, source: str) -> str:
    """The machine file: comments with what the fits leave unexplained, then the table."""
    lines = [
        f"{source}.",
        "What is not here is as in the base.",
        "Errors of the fits, as shares of the times measured:",
        *(f"  {row.key}: {_errors(row)}" for row in found.rows if row.rate is not None),
        f"Launch floor, which no constant holds: {_seconds(measured.launch)} a small kernel.",
        *(f"Note: {note}." for note in found.notes),
    ]
    comments = "\n".join(f"# {line}" for line in lines)
    return f"{comments}\n\n{strict.to_toml(found.table)}"


def table_text(found: Calibration, measured: Measured) -> Iterator[str]:
    """Planned by the base beside measured, with the error of each on the times measured."""
    head = f"{'constant':<15}{'planned':>10}{'measured':>10}{'rate':>16}"
    yield f"{head}{'error':>9}{'worst':>8}{'of planned':>12}{'sizes':>7}"
    for row in found.rows:
        shown = f"{row.key:<15}{_value(row, row.planned):>10}{_value(row, row.measured):>10}"
        if row.rate is None:
            yield shown
            continue
        yield (
            f"{shown}{_rate(row.key, row.rate):>16}{row.residuals.median:>9.1%}"
            f"{row.residuals.worst:>8.1%}{row.planned_residuals.median:>12.1%}"
            f"{row.residuals.num_samples:>7}"
        )
    floor = _seconds(measured.launch)
    yield f"{'launch floor':<15}{'':>10}{floor:>10}  a small kernel, which no constant holds"
    yield from (f"note: {note}" for note in found.notes)


def table_json(found: Calibration, measured: Measured) -> dict[str, Any]:
    """The same, with every sample."""
    return {
        "base": found.base.name,
        "device": measured.device,
        "dtype": measured.dtype,
        "ranks": measured.ranks,
        "constants": {row.key: _row(row) for row in found.rows},
        "launch_s": measured.launch,
        "samples": {
            key: [one._asdict() for one in samples] for key, samples in measured.samples.items()
        },
        "machine": found.table,
        "notes": found.notes,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "planned": row.planned,
        "measured": row.measured,
        "rate": row.rate,
        "error": row.residuals._asdict(),
        "planned_error": row.planned_residuals._asdict(),
    }


def _errors(row: Row) -> str:
    found = row.residuals
    return f"median {found.median:.1%}, worst {found.worst:.1%} of {found.num_samples} sizes"


def _value(row: Row, value: float) -> str:
    return f"{value:.3g}" if row.rate is not None else _seconds(value)


def _seconds(value: float) -> str:
    return f"{value * 1e6:.3g} us"


def _rate(key: str, rate: float) -> str:
    if key in (COPIES, RINGS):
        return f"{rate / 1e9:,.4g} GB/s"
    return f"{rate / 1e12:,.3g} TFLOP/s"
