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
    plan: Plan, found: Estimate, why: Sequence[str], seconds: float, costs: RunCosts
) -> Printed:
    """A plan with a given layout, and its estimates."""
    table, lines = resolved_answer(plan)
    reasons = list(why)
    table |= {"stack": found.setting.stack.name}
    table |= {"candidates": 1, "seconds": seconds}
    table |= {"layouts": [plan_values.estimate_json(found, reasons)]}
    table |= plan_values.run_costs(found, costs)
    table |= {"notes": list(found.plan.notes)}
    more = (note for note in found.plan.notes if note not in plan.notes)
    return table, [*lines, *_detail(found, reasons, costs), *(f"note      {one}" for one in more)]


def _detail(found: Estimate, why: list[str], costs: RunCosts) -> list[str]:
    return [
        *plan_text.detail(found),
        *plan_text.bill(found, costs),
        *plan_text.labelled("why", why),
    ]


def first_reasons(found: PlanResult) -> list[str]:
    """Why the first choice of a search is the first."""
    from fivefold.planner import compare_neighbours

    first = found.plans[0]
    return plan_text.reasons_text(first, compare_neighbours(first), found.rival, found.simpler)


def ranked_answer(found: PlanResult, costs: RunCosts, why: Sequence[str] | None = None) -> Printed:
    """A table of the best layouts, and details of the first; `why` if its reasons are known."""
    first, *others = found.plans
    fastest = found.fastest.step
    why = first_reasons(found) if why is None else list(why)
    reasons = [why, *([plan_text.loses(one, first, fastest)] for one in others)]
    question, notes = found.request.space, [*search_notes(found), *first.plan.notes]
    table = {
        "model": found.request.shape.name,
        "machine": found.request.setting.machine.name,
        "precision": found.request.setting.precision,
        "stack": found.request.setting.stack.name,
        "gpus": question.gpus,
        "seq": question.seq,
        "batch": question.batch,
        "candidates": found.candidates,
        "passed_over": found.passed_over,
        "seconds": found.seconds,
        "equal_bar": first.accuracy.equal,
        "fastest": plan_values.estimate_json(found.fastest, []),
        "layouts": [
            plan_values.estimate_json(one, reason)
            | {"equal": one.accuracy.within(one.step, fastest)}
            for one, reason in zip(found.plans, reasons, strict=True)
        ],
        "front": [plan_values.estimate_json(one, []) for one in found.front],
        "notes": notes,
        **plan_values.run_costs(first, costs),
    }
    lines = [
        *headline(found),
        "",
        *plan_text.ranked(found.plans, fastest),
        "",
        f"first     {first.plan.batch}",
        *_detail(first, why, costs),
        *plan_text.front(found.front),
        *(f"note      {note}" for note in notes),
    ]
    return table, lines


def headline(found: PlanResult) -> list[str]:
    """What was searched, and how much of it."""
    request, question = found.request, found.request.space
    return [
        f"{request.shape.name} on {question.gpus_text} of {request.setting.machine.name}: "
        f"{counted(question.batch, 'sequence')} of {question.seq:,} tokens a step, "
        f"{request.setting.precision}",
        f"{counted(found.candidates, 'layout')} estimated and {found.passed_over:,} skipped in "
        f"{found.seconds:.1f} s; those below were simulated",
    ]


def search_notes(found: PlanResult) -> list[str]:
    """What whoever reads the ranking should know."""
    first, notes = found.plans[0], [*found.request.notes, *found.warnings]
    if first.offload != "none":
        where = {"cpu": "in host memory", "nvme": "on local disks"}[first.offload]
        notes.append(
            f"optimizer states are {where} (offload = {first.plan.options.train.offload}); the "
            "transfer is counted, the time of the host is assumed"
        )
    return notes
