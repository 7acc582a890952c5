"""Textbook formulas with their numbers, and budgets of FLOPs, as JSON and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from fivefold.core import counted
from fivefold.core.plan import (
    STATES,
    Budget,
    Formula,
    PlanOptions,
    SpentOn,
    TextbookJob,
    compute_optimal,
    equal_flops,
    gpus_for_states,
    textbook,
    textbook_job,
)
from fivefold.report import percent, table

Printed = tuple[dict[str, Any], list[str]]


def textbook_answer(options: PlanOptions, is_open: bool) -> Printed:
    """Every formula with its numbers; `is_open`: no layout was given."""
    job = textbook_job(options, is_open)
    formulas, exact = textbook(job), job.counted
    numbers: dict[str, Any] = {
        "model": job.name,
        "parameters": job.parameters,
        "parameters_counted": exact,
        "seq": job.seq,
        "microbatch_size": job.microbatch_size,
        "microbatches": job.microbatches,
        "degrees": {"dp": job.dp, "tp": job.tp, "pp": job.pp},
        "states_gb": STATES * job.parameters / 1e9,
        "gpus": gpus_for_states(job),
        "gpu_memory_gb": job.gpu_memory / 1e9,
    }
    values = {"textbook": {**numbers, "formulas": [formula._asdict() for formula in formulas]}}
    return values, [*_heading(job), *_formulas(formulas)]


def _heading(job: TextbookJob) -> list[str]:
    exact = job.counted
    lines = [f"{job.name} by the textbook: Ψ = {job.parameters / 1e9:,g} B parameters"]
    if exact is not None and exact != job.parameters:
        states = STATES * exact / 1e9
        lines[0] += f" by its name ({exact / 1e9:,.2f} B counted: {states:,.0f} GB of states)"
    if job.shape is not None:
        shape = job.shape
        lines.append(
            f"s = {job.seq:,}, b = {job.microbatch_size}, h = {shape.width:,}, a = {shape.heads}, "
            f"L = {shape.layers}"
        )
    lines.append(
        f"N = {counted(job.dp, 'data rank')}, t = {counted(job.tp, 'tensor rank')}, "
        f"p = {counted(job.pp, 'stage')}, m = {counted(job.microbatches, 'microbatch')}"
    )
    return lines


def _formulas(formulas: Sequence[Formula]) -> list[str]:
    rows = [
        (f"  {formula.name}", formula.formula, f"= {formula.numbers}", f"= {_value(formula)}")
        for formula in formulas
    ]
    shown = iter(table(rows, left=(0, 1, 2, 3)))
    lines: list[str] = []
    for topic, group in groupby(formulas, key=lambda record: record.topic):
        lines += ["", topic, *(next(shown) for _ in group)]
    return lines


def _value(formula: Formula) -> str:
    if formula.unit == "FLOPs":
        return f"{formula.value:.3g} FLOPs"
    if formula.unit == "of a step":
        return f"{percent(formula.value)} {formula.unit}"
    if formula.unit == "GPUs":
        return f"{formula.value:,.0f} {formula.unit}"
    size = f"{formula.value:,.0f}" if formula.value >= 100 else f"{formula.value:,.3g}"
    return f"{size} {formula.unit}"


def budget_answer(budget: Budget, ratio: float, model: str | None) -> Printed:
    """The compute-optimal size and tokens, and models of both kinds with the same FLOPs."""
    best = compute_optimal(budget, ratio)
    rows = equal_flops(best, model)
    values = {
        "budget": {"flops": best.budget.flops, "from": best.budget.description},
        "rule": {"flops": "6 · active parameters · tokens", "ratio": best.tokens_per_parameter},
        "compute_optimal": {"parameters": best.parameters, "tokens": best.tokens},
        "equal_flops": [{**dataclasses.asdict(row), "states_gb": row.states / 1e9} for row in rows],
    }
    lines = [
        f"budget    C = {best.budget.description}",
        f"optimum   N = √(C / (6 · {ratio:g})) = {_billions(best.parameters)} active parameters",
        f"          D = {ratio:g} · N = {_trillions(best.tokens)} tokens, since C = 6 · N · D",
        "",
        "the same FLOPs in other models: tokens follow the active parameters, memory follows all",
        *_equal(rows),
    ]
    return values, lines


def _equal(rows: Sequence[SpentOn]) -> list[str]:
    heads = ("model", "kind", "parameters", "active", "tokens", "tokens/active", "of the rule")
    table_rows = [(*heads, "states GB")]
    table_rows += [
        (
            row.name,
            row.kind,
            _billions(row.total),
            _billions(row.active),
            _trillions(row.tokens),
            f"{row.tokens / row.active:,.3g}",
            f"{row.share:,.2g} ×",
            f"{row.states / 1e9:,.0f}",
        )
        for row in rows
    ]
    return table(table_rows, left=(0, 1))


def _billions(number: float) -> str:
    return f"{number / 1e9:,.3g} B" if number < 1e11 else f"{number / 1e9:,.0f} B"


def _trillions(number: float) -> str:
    return f"{number / 1e12:,.3g} T" if number >= 1e11 else f"{number / 1e9:,.3g} B"
