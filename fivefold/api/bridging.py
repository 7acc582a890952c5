"""Plans for other frameworks, and their files as plans: `fivefold plan --emit`, `plan FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.bridges import EmittedPlan, ForeignPlan, emit_plan, read_foreign
from fivefold.bridges import is_foreign as is_foreign
from fivefold.bridges.job_values import Values, options_of
from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, PlanOptions
from fivefold.report.plan_answers import Printed

_DOES_NOT_FIT = "does not fit"


def emit(
    plan: Plan, target: str, how: Mapping[str, Any] | None = None, precision: str | None = None
) -> EmittedPlan:
    """The plan as a file of another framework. What that cannot express is listed, with the nearest
    that it can; with a machine each is priced under the assumptions `how`."""
    return emit_plan(target, plan, _priced(plan, dict(how or {}), precision))


def _priced(plan: Plan, how: dict[str, Any], precision: str | None) -> Any:
    """Seconds of a step of a plan like this one, with other values."""
    options = plan.options

    def price(values: Values) -> float | None:
        from fivefold.api.planning import estimate_given

        if options.machine is None:
            return None
        changed = options_of(values, options.model, options.set)
        try:
            _, found = estimate_given(replace(changed, machine=options.machine), how, precision)
        except FivefoldError:
            return None
        return None if found.verdict == _DOES_NOT_FIT else found.step

    return price


def emitted_answer(emitted: EmittedPlan) -> Printed:
    """What `fivefold plan --emit` prints."""
    losses = [
        {
            "key": loss.key,
            "was": loss.was,
            "now": None if loss.left else loss.now,
            "slower": loss.slower,
            "text": text,
        }
        for loss, text in zip(emitted.losses, emitted.lines, strict=True)
    ]
    table = {"target": emitted.target.name, "file": emitted.text, "losses": losses}
    return table, [emitted.text.rstrip("\n")]


def foreign_plan(target: str, gpus: int | None, model: str | None) -> ForeignPlan | None:
    """The plan of another framework's file; None if the target is none."""
    if is_foreign(target):
        return read_foreign(Path(target), gpus, model)
    if model is not None:
        raise FivefoldError(
            f"--model {model} is for a file of another framework that names none: give MODEL alone"
        )
    return None


def target_or_options(target: str, gpus: int | None, model: str | None) -> str | PlanOptions:
    """A target as it is, or the plan of another framework's file."""
    found = foreign_plan(target, gpus, model)
    return target if found is None else found.options


def foreign_answer(found: ForeignPlan, printed: Printed) -> Printed:
    """What `fivefold plan FILE` prints: the plan, and what of the file is not in it."""
    table, lines = printed
    read = {"from": found.target.name, "unknown": [*found.unknown], "notes": [*found.notes]}
    head = f"read as {found.target.title}: {found.options.model[:60]} on {found.options.layout}"
    return {**table, "read": read}, [head, *(f"  {each}" for each in found.lines), "", *lines]
