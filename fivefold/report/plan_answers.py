"""The answers to a plan: one layout that was given, or the ranking of a search; as JSON and lines.

Both are made at once, so that no number on a screen differs from its JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.core import counted
from fivefold.core.plan import Plan
from fivefold.report import plan_text, plan_values
from fivefold.report.plan_text import RunCosts

if TYPE_CHECKING:  # estimates need numpy, whose import takes longer than a plan without estimates
    from fivefold.planner import Estimate, PlanResult

Printed = tuple[dict[str, Any], list[str]]


def resolved_answer(plan: Plan) -> Printed:
    """A plan without a machine, of which there are no estimates."""
    table = plan_values.describe(plan)
    return table, plan_values.render(plan, table)


def given_answer(
    plan: Plan, estimate: Estimate, why: Sequence[str], seconds: float, costs: RunCosts
) -> Printed:
    """A plan with a given layout, and its estimates."""
    table, lines = resolved_answer(plan)
    reasons = list(why)
    table |= {"stack": estimate.setting.stack.name}
    table |= {"candidates": 1, "seconds": seconds}
    table |= {"layouts": [plan_values.estimate_json(estimate, reasons)]}
    table |= plan_values.run_costs(estimate, costs)
    table |= {"notes": list(estimate.plan.notes)}
    extra_notes = (note for note in estimate.plan.notes if note not in plan.notes)
    return table, [
        *lines,
        *_detail(estimate, reasons, costs),
        *(f"note      {sentence}" for sentence in extra_notes),
    ]


def _detail(estimate: Estimate, why: list[str], costs: RunCosts) -> list[str]:
    return [
        *plan_text.detail(estimate),
        *plan_text.bill(estimate, costs),
        *plan_text.labelled("why", why),
    ]


def first_reasons(result: PlanResult) -> list[str]:
    """Why the first choice of a search is the first."""
    from fivefold.planner import compare_neighbours

    first = result.plans[0]
    return plan_text.reasons_text(first, compare_neighbours(first), result.rival, result.simpler)


def ranked_answer(result: PlanResult, costs: RunCosts, why: Sequence[str] | None = None) -> Printed:
    """A table of the best layouts, and details of the first; `why` if its reasons are known."""
    first, *rivals = result.plans
    fastest = result.fastest.step
    why = first_reasons(result) if why is None else list(why)
    reasons = [why, *([plan_text.loses(rival, first, fastest)] for rival in rivals)]
    question, notes = result.request.space, [*search_notes(result), *first.plan.notes]
    table = {
        "model": result.request.shape.name,
        "machine": result.request.setting.machine.name,
        "precision": result.request.setting.precision,
        "stack": result.request.setting.stack.name,
        "gpus": question.gpus,
        "seq": question.seq,
        "batch": question.batch,
        "candidates": result.candidates,
        "passed_over": result.passed_over,
        "seconds": result.seconds,
        "equal_bar": first.accuracy.equal,
        "fastest": plan_values.estimate_json(result.fastest, []),
        "layouts": [
            plan_values.estimate_json(estimate, reason)
            | {"equal": estimate.accuracy.within(estimate.step, fastest)}
            for estimate, reason in zip(result.plans, reasons, strict=True)
        ],
        "front": [plan_values.estimate_json(estimate, []) for estimate in result.front],
        "notes": notes,
        **plan_values.run_costs(first, costs),
    }
    lines = [
        *headline(result),
        "",
        *plan_text.ranked(result.plans, fastest),
        "",
        f"first     {first.plan.batch}",
        *_detail(first, why, costs),
        *plan_text.front(result.front),
        *(f"note      {note}" for note in notes),
    ]
    return table, lines


def headline(result: PlanResult) -> list[str]:
    """What was searched, and how much of it."""
    request, question = result.request, result.request.space
    return [
        f"{request.shape.name} on {question.gpus_text} of {request.setting.machine.name}: "
        f"{counted(question.batch, 'sequence')} of {question.seq:,} tokens a step, "
        f"{request.setting.precision}",
        f"{counted(result.candidates, 'layout')} estimated and {result.passed_over:,} skipped in "
        f"{result.seconds:.1f} s; those below were simulated",
    ]


def search_notes(result: PlanResult) -> list[str]:
    """What whoever reads the ranking should know."""
    first, notes = result.plans[0], [*result.request.notes, *result.warnings]
    if first.offload != "none":
        where = {"cpu": "in host memory", "nvme": "on local disks"}[first.offload]
        notes.append(
            f"optimizer states are {where} (offload = {first.plan.options.train.offload}); the "
            "transfer is counted, the time of the host is assumed"
        )
    return notes
