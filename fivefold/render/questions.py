"""Answers beside a plan: great runs, textbook formulas, tables of jobs, frameworks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fivefold.core import counted
from fivefold.core.plan import (
    FLOPS_WORDS,
    STATES,
    Budget,
    FigurePair,
    Formula,
    GoodputFacts,
    Plan,
    PlanOptions,
    SpentOn,
    TextbookJob,
    compute_optimal,
    equal_flops,
    gpus_for_states,
    load_run,
    textbook,
    textbook_job,
)
from fivefold.render.plan import (
    RunCosts,
    bill,
    estimate_json,
    loses,
    name_of,
    run_costs,
)
from fivefold.render.text import duration, gib, percent, table, wrapped

if TYPE_CHECKING:
    from fivefold.planner import Estimate, JobRow, JobTable, OpenChoice, RunComparison, ScaledRun

_GIB = 2**30


def run_answer(
    name: str, headroom: float, stack: str | None, costs: RunCosts
) -> tuple[Plan, dict[str, Any], list[str]]:
    """The run of this name: its plan, and the comparison as JSON and as text.

    `stack`: software in place of that which ran it; `costs`: for the tokens that its source
    reports, if none are given, or else for a trillion.
    """
    from fivefold.planner import compare_run

    comparison = compare_run(load_run(name), headroom, stack)
    answer, lines = run_json(comparison), run_text(comparison)
    if any(costs):
        costs = costs._replace(tokens=costs.tokens or comparison.run.figures.tokens or 1e12)
        answer["cost"] = run_costs(comparison.estimate, costs)["run"]
        lines += bill(comparison.estimate, costs)
    return comparison.estimate.plan, answer, lines


def run_json(comparison: RunComparison) -> dict[str, Any]:
    """The comparison as JSON; the seconds of `explained` sum to the published step."""
    run, estimate = comparison.run, comparison.estimate
    figures = dataclasses.asdict(run.figures)
    published: dict[str, Any] = {
        "step_s": None if comparison.published is None else comparison.published.seconds,
        "from": None if comparison.published is None else comparison.published.origin,
        "source": run.source,
        "flops_counted": FLOPS_WORDS[run.figures.flops],
        **{key: value for key, value in figures.items() if key != "step_s" and value is not None},
    }
    return {
        "run": run.name,
        "title": run.title,
        "model": estimate.plan.shape.name,
        "machine": estimate.setting.machine.name,
        "gpus": estimate.plan.layout.world,
        "layout": str(estimate.plan.layout),
        "stack": estimate.setting.stack.name,
        "precision": estimate.setting.precision,
        "assumed": run.header("assumed"),
        "confidence": run.header("confidence"),
        "published": published,
        "estimate": estimate_json(estimate, []),
        "difference": _difference(comparison),
        "figures": [figure._asdict() for figure in comparison.figures],
        "explained": [part._asdict() for part in comparison.explained],
        "open": [_choice_json(choice) for choice in comparison.choices],
        "scaling": [_scaled_json(scaled_run) for scaled_run in comparison.scaling],
        "goodput": None if comparison.goodput is None else comparison.goodput._asdict(),
        "notes": [*run.notes, *estimate.plan.notes],
    }


def _difference(comparison: RunComparison) -> dict[str, float] | None:
    if comparison.difference is None or comparison.published is None:
        return None
    share = comparison.difference / comparison.published.seconds
    return {"seconds": comparison.difference, "share": share}


def _choice_json(choice: OpenChoice) -> dict[str, Any]:
    look = choice.estimate
    return {
        "change": dict(choice.change),
        "step_s": None if look is None else look.step,
        "memory_gib": None if look is None else look.total / _GIB,
        "fits": None if look is None else look.verdict,
        "refused": choice.refused,
    }


def _scaled_json(scaled_run: ScaledRun) -> dict[str, Any]:
    return {
        "change": dict(scaled_run.point.change),
        "gpus": scaled_run.estimate.plan.layout.world,
        "step_s": scaled_run.estimate.step,
        "published_step_s": scaled_run.point.step_s,
        "tflops_per_gpu": scaled_run.tflops,
        "published_tflops_per_gpu": scaled_run.point.tflops_per_gpu,
        "efficiency": scaled_run.efficiency,
        "published_efficiency": scaled_run.published_efficiency,
    }


def run_text(comparison: RunComparison) -> list[str]:
    """The comparison as text."""
    run, look = comparison.run, comparison.estimate
    plan, memory = look.plan, look.setting.machine.memory
    lines = [
        *wrapped(f"{run.name}: {run.title}", "run       "),
        *wrapped(run.source, "source    "),
        *wrapped(f"{name_of(look)}; {plan.batch}", "layout    "),
        f"software  {look.setting.stack.name}, {look.setting.precision}",
        *wrapped(run.header("assumed"), "assumed   "),
    ]
    lines += wrapped(_published_words(comparison), "published ")
    lines += wrapped(_estimate_words(comparison), "estimate  ")
    lines += [
        f"memory    {gib(look.total)} of {gib(memory)} on the fullest rank: {look.verdict}",
        *(_figures(comparison) if comparison.figures else []),
        "",
        "where the step goes",
        *_explained(comparison),
    ]
    if comparison.choices:
        lines += ["", "what the source leaves open", *_choices(comparison)]
    if comparison.scaling:
        lines += ["", "scaling", *_scaling(comparison)]
    if comparison.goodput is not None:
        lines += ["", *wrapped(_goodput_words(comparison.goodput), "goodput   ")]
        source = "" if run.goodput is None else run.goodput.source
        lines += wrapped(source, "          ")
    notes = (*run.notes, *plan.notes)
    return [*lines, *(line for note in notes for line in wrapped(note, "note      "))]


def _published_words(comparison: RunComparison) -> str:
    if comparison.published is None:
        return "no speed is published"
    return f"{duration(comparison.published.seconds)} a step, from {comparison.published.origin}"


def _estimate_words(comparison: RunComparison) -> str:
    text = f"{duration(comparison.estimate.step)} a step"
    change = _difference(comparison)
    if change is None:
        return text
    side = "above" if change["share"] > 0 else "below"
    return f"{text}, {percent(abs(change['share']))} {side} the published one"


def _figures(comparison: RunComparison) -> list[str]:
    rows = [("figure", "published", "estimate", "")]
    for figure in comparison.figures:
        change = f"{figure.estimate / figure.published - 1:+.1%}"
        rows.append(
            (figure.name, _shown(figure, figure.published), _shown(figure, figure.estimate), change)
        )
    return ["", *table(rows)]


def _shown(figure: FigurePair, value: float) -> str:
    if figure.unit == "share":
        return percent(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _explained(comparison: RunComparison) -> list[str]:
    total = comparison.published.seconds if comparison.published else comparison.estimate.step
    rows = [
        (part.part, duration(part.seconds), percent(part.seconds / total), part.sentence)
        for part in comparison.explained
    ]
    last = "published" if comparison.published else "estimate"
    rows.append((last, duration(total), percent(1.0), ""))
    wide = table([row[:3] for row in rows])
    texts = zip(wide, rows, strict=True)
    return [line for head, row in texts for line in wrapped(row[3], f"{head}  ")]


def _choices(comparison: RunComparison) -> list[str]:
    rows = [("instead", "step", "GiB", "")]
    for choice in comparison.choices:
        look = choice.estimate
        if look is None:
            rows.append((_changes(choice.change), "–", "–", "not legal here"))
        else:
            size = f"{look.total / _GIB:,.1f}"
            rows.append((_changes(choice.change), duration(look.step), size, look.verdict))
    return table(rows, left=(0, 3))


def _changes(change: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in change.items())


def _scaling(comparison: RunComparison) -> list[str]:
    heads = ("model", "layout", "GPUs", "step", "published", "TFLOP/s", "published", "of the first")
    rows: list[tuple[str, ...]] = [(*heads, "published")]
    for scaled_run in comparison.scaling:
        shape, layout = scaled_run.estimate.plan.shape, scaled_run.estimate.plan.layout
        point = scaled_run.point
        rows.append(
            (
                f"{shape.layers} × {shape.width:,}",
                str(layout),
                f"{layout.world:,}",
                duration(scaled_run.estimate.step),
                "–" if point.step_s is None else duration(point.step_s),
                f"{scaled_run.tflops:.1f}",
                "–" if point.tflops_per_gpu is None else f"{point.tflops_per_gpu:.1f}",
                f"{scaled_run.efficiency:.0%}",
                "–"
                if scaled_run.published_efficiency is None
                else f"{scaled_run.published_efficiency:.0%}",
            )
        )
    return table(rows, left=(0, 1))


def _goodput_words(facts: GoodputFacts) -> str:
    text = f"{facts.share:.0%} of the time in steps that count: "
    text += f"{facts.lost_minutes_a_day:.0f} minutes a day are lost"
    if facts.interruptions_a_day is None or facts.minutes_an_interruption is None:
        return text
    text += f"; with {facts.interruptions_a_day:.1f} interruptions a day each may cost "
    text += f"{facts.minutes_an_interruption:.1f} minutes"
    if facts.before is not None and facts.minutes_before is not None:
        text += f" (at the {facts.before:.0%} of before: {facts.minutes_before:.1f})"
    return text


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
