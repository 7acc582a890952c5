"""Plans for other frameworks: `fivefold plan --emit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.api.planning import estimate_given, estimate_options
from fivefold.bridges import (
    NAMES_NO_MODEL,
    EmittedPlan,
    Price,
    Priced,
    Values,
    emit_plan,
    options_of,
)
from fivefold.core import FivefoldError, bullets
from fivefold.core.plan import Plan
from fivefold.report.plan_answers import Printed

# What is learned, and not how fast: no other value is near.
_OF_LEARNING = (
    *("optimizer", "lr_curve", "weight_decay", "clip", "lora", "lora_alpha", "lora_targets"),
    *("train_only", "dpo_beta", "packed", "balance"),
)


def emit(
    plan: Plan, target: str, how: Mapping[str, Any] | None = None, precision: str | None = None
) -> EmittedPlan:
    """The plan as a file of another framework. What that cannot express is listed, with the nearest
    that it can; with a machine each is priced under the assumptions `how`. Raises if the file would
    learn something else, or does not fit the machine. Defaults that nobody planned are left out."""
    usual = estimate_options(0.05, "compiled", None, None) if how is None else how
    recipe = plan.options.train
    unplanned = {"lr", "steps"} & recipe.still_yours().keys()
    if unplanned and recipe.warmup is None:
        unplanned.add("warmup")
    emitted = emit_plan(target, plan, _priced(plan, usual, precision), unplanned)
    title = emitted.target.title
    lost = [loss for loss in emitted.losses if loss.key in _OF_LEARNING and not loss.left]
    if lost := [
        *lost,
        *(model_loss for model_loss in emitted.losses if model_loss.replacement == NAMES_NO_MODEL),
    ]:
        texts = [
            f"{change.key}={change.was}; {change.replacement} would be another job"
            for change in lost
        ]
        raise FivefoldError(
            bullets(f"{title} cannot say what this plan learns:", texts)
            + "\nleave it out of the plan, or choose another target"
        )
    if emitted.after is not None and emitted.after.too_large:
        raise FivefoldError(
            bullets(f"{title} cannot run this plan, {emitted.after}", emitted.lines)
            + "\nplan with more GPUs or more recomputation, or let `fivefold compare-frameworks` "
            "find the best layout that it has"
        )
    return emitted


def _priced(plan: Plan, how: Mapping[str, Any], precision: str | None) -> Price:
    """The estimate of a plan like this one, with other values; None without a machine."""
    options = plan.options

    def price(values: Values) -> Priced | None:
        if options.machine is None:
            return None
        changed = options_of(values, options.model, options.set)
        try:
            estimate = estimate_given(replace(changed, machine=options.machine), how, precision)[1]
        except FivefoldError:
            return None
        gib, limit = estimate.total / 2**30, estimate.setting.machine.memory / 2**30
        return Priced(estimate.step, gib, limit, estimate.verdict)

    return price


def emitted_answer(emitted: EmittedPlan) -> Printed:
    """What `fivefold plan --emit` prints."""
    losses = [
        {
            "key": loss.key,
            "was": loss.was,
            "now": None if loss.left else loss.replacement,
            "slower": loss.slower,
            "memory": None if loss.after is None else str(loss.after),
            "text": text,
        }
        for loss, text in zip(emitted.losses, emitted.lines, strict=True)
    ]
    table: dict[str, Any] = {"target": emitted.target.name, "file": emitted.text}
    table |= {"losses": losses, "notes": list(emitted.notes)}
    return table, [emitted.text.rstrip("\n")]
