"""The tables that people look for, as JSON and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.report import duration, table
from fivefold.report.plan_text import loses, name_of
from fivefold.report.plan_values import estimate_json

if TYPE_CHECKING:
    from fivefold.planner import Estimate, JobRow, JobTable

_GIB = 2**30


def job_table_answer(job_table: JobTable) -> tuple[dict[str, Any], list[str]]:
    """The table as JSON and as text."""
    return job_table_json(job_table), job_table_text(job_table)


def job_table_json(job_table: JobTable) -> dict[str, Any]:
    """The table as JSON; saved bytes and seconds are those of the base row less this row's."""
    fastest = job_table.fastest
    return {
        "table": job_table.name,
        "rows": [_row_json(job_table, row) for row in job_table.rows],
        "fastest": None if fastest is None else fastest.name,
        "says": _says(job_table),
    }


def _row_json(job_table: JobTable, row: JobRow) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": row.name,
        "fits": row.fits,
        "refused": row.refused,
        "estimate": None if row.estimate is None else estimate_json(row.estimate, []),
    }
    base = _base(job_table)
    if base is not None and row.estimate is not None:
        values["saved_gib"] = (base.total - row.estimate.total) / _GIB
        values["added_s"] = row.estimate.step - base.step
    return values


def _base(job_table: JobTable) -> Estimate | None:
    return job_table.row(job_table.base).estimate if job_table.base else None


def job_table_text(job_table: JobTable) -> list[str]:
    """The table, and one sentence about its first choice."""
    lines = _compared(job_table) if job_table.base else _ranked(job_table)
    return [*lines, "", *_says(job_table)]


def _ranked(job_table: JobTable) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "best layout", "GiB", "fits", "compute", "bubble", "traffic", "step", "tokens/s/GPU")
    ]
    for row in job_table.rows:
        look = row.estimate
        if look is None:
            rows.append((row.name, row.refused, *("–",) * 7))
            continue
        parts = look.breakdown()
        traffic = sum(parts.get(axis, 0.0) for axis in ("tp", "cp", "ep", "pp", "dp"))
        rows.append(
            (
                row.name,
                name_of(look),
                f"{look.total / _GIB:,.1f}",
                look.verdict,
                duration(parts["compute"]),
                duration(parts.get("bubble", 0.0)),
                duration(traffic),
                duration(look.step),
                f"{look.tokens_per_s_per_gpu:,.0f}",
            )
        )
    return table(rows, left=(0, 1, 3))


def _compared(job_table: JobTable) -> list[str]:
    base = _base(job_table)
    rows = [("technique", "GiB", "saved", "step", "time", "fits")]
    for row in job_table.rows:
        look = row.estimate
        if look is None or base is None:
            rows.append((row.name, "–", "–", "–", "–", row.refused))
            continue
        rows.append(
            (
                row.name,
                f"{look.total / _GIB:,.1f}",
                f"{(base.total - look.total) / _GIB:,.1f}",
                duration(look.step),
                f"{look.step / base.step - 1:+.1%}",
                look.verdict,
            )
        )
    heading = [] if base is None else [f"on the degrees of {base.plan.layout}, each alone"]
    return [*heading, *table(rows, left=(0, 5))]


def _says(job_table: JobTable) -> list[str]:
    """Which row is the fastest that fits, and how the best of the others differs."""
    fastest = job_table.fastest
    if fastest is None or fastest.estimate is None:
        return ["nothing in this table fits: more GPUs, a smaller batch or shorter sequences"]
    best = fastest.estimate
    text = f"{fastest.name} is the fastest that fits"
    rivals = [
        row
        for row in job_table.rows
        if row.fits and row.estimate is not None and name_of(row.estimate) != name_of(best)
    ]
    if not rivals:
        return [text]
    second = min(rivals, key=lambda row: 0.0 if row.estimate is None else row.estimate.step)
    assert second.estimate is not None, "rows that fit have an estimate"
    return [f"{text}; {second.name} is {loses(second.estimate, best)}"]
