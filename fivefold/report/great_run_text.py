"""A great run as JSON and as text: layout, published figures, estimate, and the step by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fivefold.core.plan import FLOPS_WORDS, FigurePair, GoodputFacts, Plan, load_run
from fivefold.report import duration, gib, percent, table, wrapped
from fivefold.report.plan_text import RunCosts, bill, name_of, verdict_text
from fivefold.report.plan_values import estimate_json, run_costs

if TYPE_CHECKING:
    from fivefold.planner import OpenChoice, RunComparison, ScaledRun

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
        f"memory    {gib(look.total)} of {gib(memory)} on the fullest rank: {verdict_text(look)}",
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
