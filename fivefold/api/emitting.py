"""Plans for other frameworks: `fivefold plan --emit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fivefold.api.planning import estimate_given, estimate_options
from fivefold.bridges import EmittedPlan, emit_plan
from fivefold.bridges.job_values import Values, options_of
from fivefold.bridges.nearest import Price
from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, PlanOptions
from fivefold.report.plan_answers import Printed

if TYPE_CHECKING:
    from fivefold.planner.estimate import Estimate

_DOES_NOT_FIT = "does not fit"


def emit(
    plan: Plan, target: str, how: Mapping[str, Any] | None = None, precision: str | None = None
) -> EmittedPlan:
    """The plan as a file of another framework. What that cannot express is listed, with the nearest
    that it can; with a machine each is priced under the assumptions `how`."""
    usual = estimate_options(0.05, "compiled", None, None) if how is None else how
    return emit_plan(target, plan, _priced(plan, usual, precision))


def _priced(plan: Plan, how: Mapping[str, Any], precision: str | None) -> Price:
    """Seconds of a step of a plan like this one, with other values; None if that does not fit and
    this one does."""
    options = plan.options

    def estimate(changed: PlanOptions) -> Estimate | None:
        try:
            return estimate_given(replace(changed, machine=options.machine), how, precision)[1]
        except FivefoldError:
            return None

    own = None if options.machine is None else estimate(options)

    def price(values: Values) -> float | None:
        if own is None:
            return None
        found = estimate(options_of(values, options.model, options.set))
        if found is None or (found.verdict == _DOES_NOT_FIT != own.verdict):
            return None
        return found.step

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
