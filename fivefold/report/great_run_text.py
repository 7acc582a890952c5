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

    found = compare_run(load_run(name), headroom, stack)
    answer, lines = run_json(found), run_text(found)
    if any(costs):
        costs = costs._replace(tokens=costs.tokens or found.run.figures.tokens or 1e12)
        answer["cost"] = run_costs(found.estimate, costs)["run"]
        lines += bill(found.estimate, costs)
    return found.estimate.plan, answer, lines


def run_json(found: RunComparison) -> dict[str, Any]:
    """The comparison as JSON; the seconds of `explained` sum to the published step."""
    run, estimate = found.run, found.estimate
    figures = dataclasses.asdict(run.figures)
    published: dict[str, Any] = {
        "step_s": None if found.published is None else found.published.seconds,
        "from": None if found.published is None else found.published.how,
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
        "difference": _difference(found),
        "figures": [one._asdict() for one in found.figures],
        "explained": [one._asdict() for one in found.explained],
        "open": [_choice_json(one) for one in found.choices],
        "scaling": [_scaled_json(one) for one in found.scaling],
        "goodput": None if found.goodput is None else found.goodput._asdict(),
        "notes": [*run.notes, *estimate.plan.notes],
    }


def _difference(found: RunComparison) -> dict[str, float] | None:
    if found.difference is None or found.published is None:
        return None
    share = found.difference / found.published.seconds
    return {"seconds": found.difference, "share": share}


def _choice_json(one: OpenChoice) -> dict[str, Any]:
    look = one.estimate
    return {
        "change": dict(one.change),
        "step_s": None if look is None else look.step,
        "memory_gib": None if look is None else look.total / _GIB,
        "fits": None if look is None else look.verdict,
        "refused": one.refused,
    }


def _scaled_json(one: ScaledRun) -> dict[str, Any]:
    return {
        "change": dict(one.point.change),
        "gpus": one.estimate.plan.layout.world,
        "step_s": one.estimate.step,
        "published_step_s": one.point.step_s,
        "tflops_per_gpu": one.tflops,
        "published_tflops_per_gpu": one.point.tflops_per_gpu,
        "efficiency": one.efficiency,
        "published_efficiency": one.published_efficiency,
    }


def run_text(found: RunComparison) -> list[str]:
    """The comparison as text."""
    run, look = found.run, found.estimate
    plan, memory = look.plan, look.setting.machine.memory
    lines = [
        *wrapped(f"{run.name}: {run.title}", "run       "),
        *wrapped(run.source, "source    "),
        *wrapped(f"{name_of(look)}; {plan.batch}", "layout    "),
        f"software  {look.setting.stack.name}, {look.setting.precision}",
        *wrapped(run.header("assumed"), "assumed   "),
    ]
    lines += wrapped(_published_words(found), "published ")
    lines += wrapped(_estimate_words(found), "estimate  ")
    lines += [
        f"memory    {gib(look.total)} of {gib(memory)} on the fullest rank: {verdict_text(look)}",
        *(_figures(found) if found.figures else []),
        "",
        "where the step goes",
        *_explained(found),
    ]
    if found.choices:
        lines += ["", "what the source leaves open", *_choices(found)]
    if found.scaling:
        lines += ["", "scaling", *_scaling(found)]
    if found.goodput is not None:
        lines += ["", *wrapped(_goodput_words(found.goodput), "goodput   ")]
        source = "" if run.goodput is None else run.goodput.source
        lines += wrapped(source, "          ")
    notes = (*run.notes, *plan.notes)
    return [*lines, *(line for note in notes for line in wrapped(note, "note      "))]


def _published_words(found: RunComparison) -> str:
    if found.published is None:
        return "no speed is published"
    return f"{duration(found.published.seconds)} a step, from {found.published.how}"


def _estimate_words(found: RunComparison) -> str:
    words = f"{duration(found.estimate.step)} a step"
    change = _difference(found)
    if change is None:
        return words
    side = "above" if change["share"] > 0 else "below"
    return f"{words}, {percent(abs(change['share']))} {side} the published one"


def _figures(found: RunComparison) -> list[str]:
    rows = [("figure", "published", "estimate", "")]
    for one in found.figures:
        change = f"{one.estimate / one.published - 1:+.1%}"
        rows.append((one.name, _shown(one, one.published), _shown(one, one.estimate), change))
    return ["", *table(rows)]


def _shown(one: FigurePair, value: float) -> str:
    if one.unit == "share":
        return percent(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _explained(found: RunComparison) -> list[str]:
    total = found.published.seconds if found.published else found.estimate.step
    rows = [
        (one.part, duration(one.seconds), percent(one.seconds / total), one.sentence)
        for one in found.explained
    ]
    last = "published" if found.published else "estimate"
    rows.append((last, duration(total), percent(1.0), ""))
    wide = table([row[:3] for row in rows])
    texts = zip(wide, rows, strict=True)
    return [line for head, row in texts for line in wrapped(row[3], f"{head}  ")]


def _choices(found: RunComparison) -> list[str]:
    rows = [("instead", "step", "GiB", "")]
    for one in found.choices:
        look = one.estimate
        if look is None:
            rows.append((_changes(one.change), "–", "–", "not legal here"))
        else:
            size = f"{look.total / _GIB:,.1f}"
            rows.append((_changes(one.change), duration(look.step), size, look.verdict))
    return table(rows, left=(0, 3))


def _changes(change: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in change.items())


def _scaling(found: RunComparison) -> list[str]:
    heads = ("model", "layout", "GPUs", "step", "published", "TFLOP/s", "published", "of the first")
    rows: list[tuple[str, ...]] = [(*heads, "published")]
    for one in found.scaling:
        shape, layout = one.estimate.plan.shape, one.estimate.plan.layout
        point = one.point
        rows.append(
            (
                f"{shape.layers} × {shape.width:,}",
                str(layout),
                f"{layout.world:,}",
                duration(one.estimate.step),
                "–" if point.step_s is None else duration(point.step_s),
                f"{one.tflops:.1f}",
                "–" if point.tflops_per_gpu is None else f"{point.tflops_per_gpu:.1f}",
                f"{one.efficiency:.0%}",
                "–" if one.published_efficiency is None else f"{one.published_efficiency:.0%}",
            )
        )
    return table(rows, left=(0, 1))


def _goodput_words(facts: GoodputFacts) -> str:
    words = f"{facts.share:.0%} of the time in steps that count: "
    words += f"{facts.lost_minutes_a_day:.0f} minutes a day are lost"
    if facts.interruptions_a_day is None or facts.minutes_an_interruption is None:
        return words
    words += f"; with {facts.interruptions_a_day:.1f} interruptions a day each may cost "
    words += f"{facts.minutes_an_interruption:.1f} minutes"
    if facts.before is not None and facts.minutes_before is not None:
        words += f" (at the {facts.before:.0%} of before: {facts.minutes_before:.1f})"
    return words
