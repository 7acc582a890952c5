"""Plans for other frameworks: `fivefold plan --emit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.api.planning import estimate_given, estimate_options
from fivefold.bridges import EmittedPlan, emit_plan
from fivefold.bridges.job_values import Values, options_of
from fivefold.bridges.nearest import Price
from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan
from fivefold.report.plan_answers import Printed

_DOES_NOT_FIT = "does not fit"


def emit(
    plan: Plan, target: str, how: Mapping[str, Any] | None = None, precision: str | None = None
) -> EmittedPlan:
    """The plan as a file of another framework. What that cannot express is listed, with the nearest
    that it can; with a machine each is priced under the assumptions `how`."""
    usual = estimate_options(0.05, "compiled", None, None) if how is None else how
    return emit_plan(target, plan, _priced(plan, usual, precision))


def _priced(plan: Plan, how: Mapping[str, Any], precision: str | None) -> Price:
    """Seconds of a step of a plan like this one, with other values."""
    options = plan.options

    def price(values: Values) -> float | None:
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
