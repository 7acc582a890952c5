"""The best layouts that other frameworks can express, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.report import duration, table
from fivefold.report.plan_values import estimate_json

if TYPE_CHECKING:
    from fivefold.planner import Estimate

_EQUAL = 0.0005  # a share of a step that is not shown


@dataclass(frozen=True)
class FrameworkRow:
    """One framework: what of our best plan it lacks, its own best plan, and the share by which a
    step of that is slower; `refused` says why there is none. `changed`: what its file turned into
    something near."""

    name: str
    title: str
    stack: str | None  # that it is priced with; None: fivefold's own
    lacks: tuple[str, ...]
    estimate: Estimate | None = None
    slower: float | None = None
    changed: tuple[str, ...] = ()
    refused: str | None = None


def frameworks_json(
    job: Mapping[str, Any], best: Estimate, rows: Sequence[FrameworkRow]
) -> dict[str, Any]:
    """All of it."""
    listed = [
        {
            "target": row.name,
            "title": row.title,
            "stack": row.stack,
            "plan": None if row.estimate is None else estimate_json(row.estimate, []),
            "slower": row.slower,
            "lacks": [*row.lacks],
            "changed": [*row.changed],
            "refused": row.refused,
        }
        for row in rows
    ]
    return {**job, "best": estimate_json(best, []), "frameworks": listed}


def frameworks_text(
    job: Mapping[str, Any], best: Estimate, rows: Sequence[FrameworkRow]
) -> list[str]:
    """A table, and below it why each is slower."""
    head = f"{job['model']} on {job['gpus']:,} GPUs of {job['machine']}, {job['precision']}: "
    head += f"{job['batch']:,} sequences of {job['seq']:,} tokens a step"
    cells = [["framework", "layout", "schedule", "ZeRO", "recompute", "step", "slower"]]
    cells.append(["fivefold", *_cells(best), duration(best.step), "–"])
    for row in sorted(rows, key=_speed):
        if row.estimate is None:
            cells.append([row.title, *["–"] * 5, "cannot"])
        else:
            step = duration(row.estimate.step)
            cells.append([row.title, *_cells(row.estimate), step, _slower(row.slower or 0.0)])
    lines = [head, "", *table(cells), ""]
    for row in sorted(rows, key=_speed):
        lines.append(f"{row.title}: {_why(row)}")
    return lines


def _speed(row: FrameworkRow) -> float:
    return float("inf") if row.estimate is None else row.estimate.step


def _cells(estimate: Estimate) -> list[str]:
    plan = estimate.plan
    schedule = plan.options.schedule if plan.layout.pp > 1 else "–"
    chunks = f" x{plan.layout.chunks}" if plan.layout.pp > 1 and plan.layout.chunks > 1 else ""
    return [str(plan.layout), schedule + chunks, str(plan.layout.zero), str(plan.recompute)]


def _slower(share: float) -> str:
    if abs(share) < _EQUAL:
        return "as fast"
    return f"{abs(share):.1%}{'' if share > 0 else ' faster'}"


def _why(row: FrameworkRow) -> str:
    if row.refused is not None:
        return row.refused
    lacks = f"has no {', no '.join(row.lacks)}" if row.lacks else "has all of our best layout"
    priced = "" if row.stack is None else f"; priced as {row.stack} runs it"
    return lacks + priced
