"""The tables that people look for, as JSON and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.report import duration, table
from fivefold.report.plan_text import loses, name_of
from fivefold.report.plan_values import estimate_json

if TYPE_CHECKING:
    from fivefold.planner import Estimate, JobRow, JobTable

_GIB = 2**30


def job_table_answer(found: JobTable) -> tuple[dict[str, Any], list[str]]:
    """The table as JSON and as text."""
    return job_table_json(found), job_table_text(found)


def job_table_json(found: JobTable) -> dict[str, Any]:
    """The table as JSON; saved bytes and seconds are those of the base row less this row's."""
    fastest = found.fastest
    return {
        "table": found.name,
        "rows": [_row_json(found, one) for one in found.rows],
        "fastest": None if fastest is None else fastest.name,
        "says": _says(found),
    }


def _row_json(found: JobTable, one: JobRow) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": one.name,
        "fits": one.fits,
        "refused": one.refused,
        "estimate": None if one.estimate is None else estimate_json(one.estimate, []),
    }
    base = _base(found)
    if base is not None and one.estimate is not None:
        values["saved_gib"] = (base.total - one.estimate.total) / _GIB
        values["added_s"] = one.estimate.step - base.step
    return values


def _base(found: JobTable) -> Estimate | None:
    return found.row(found.base).estimate if found.base else None


def job_table_text(found: JobTable) -> list[str]:
    """The table, and one sentence about its first choice."""
    lines = _compared(found) if found.base else _ranked(found)
    return [*lines, "", *_says(found)]


def _ranked(found: JobTable) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "best layout", "GiB", "fits", "compute", "bubble", "traffic", "step", "tokens/s/GPU")
    ]
    for one in found.rows:
        look = one.estimate
        if look is None:
            rows.append((one.name, one.refused, *("–",) * 7))
            continue
        parts = look.breakdown()
        traffic = sum(parts.get(axis, 0.0) for axis in ("tp", "cp", "ep", "pp", "dp"))
        rows.append(
            (
                one.name,
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


def _compared(found: JobTable) -> list[str]:
    base = _base(found)
    rows = [("technique", "GiB", "saved", "step", "time", "fits")]
    for one in found.rows:
        look = one.estimate
        if look is None or base is None:
            rows.append((one.name, "–", "–", "–", "–", one.refused))
            continue
        rows.append(
            (
                one.name,
                f"{look.total / _GIB:,.1f}",
                f"{(base.total - look.total) / _GIB:,.1f}",
                duration(look.step),
                f"{look.step / base.step - 1:+.1%}",
                look.verdict,
            )
        )
    heading = [] if base is None else [f"on the degrees of {base.plan.layout}, each alone"]
    return [*heading, *table(rows, left=(0, 5))]


def _says(found: JobTable) -> list[str]:
    """Which row is the fastest that fits, and how the best of the others differs."""
    fastest = found.fastest
    if fastest is None or fastest.estimate is None:
        return ["nothing in this table fits: more GPUs, a smaller batch or shorter sequences"]
    best = fastest.estimate
    words = f"{fastest.name} is the fastest that fits"
    others = [
        one
        for one in found.rows
        if one.fits and one.estimate is not None and name_of(one.estimate) != name_of(best)
    ]
    if not others:
        return [words]
    second = min(others, key=lambda one: 0.0 if one.estimate is None else one.estimate.step)
    assert second.estimate is not None, "rows that fit have an estimate"
    return [f"{words}; {second.name} is {loses(second.estimate, best)}"]
