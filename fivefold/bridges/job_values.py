"""A plan as flat values, which the key tables of all targets write and read.

The names are those of a plan file and of its `[train]` table; the layout is taken apart into its
degrees, and the keys of precision and fp8 are one value, `number`, such as "fp8 blockwise e4m3".
Keys that have no effect in a layout (the context kind without cp) have their usual value.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, cast

from fivefold.core import FivefoldError, Precision
from fivefold.core.layout import DEGREES, Layout, cut_stages
from fivefold.core.plan import Plan, PlanOptions, Recipe, resolve
from fivefold.core.schedule import PLACEMENTS

Values = dict[str, Any]

_PLAIN = (  # of a plan file, as they are
    *("grad_dtype", "unit_size", "prefetch", "packed", "balance"),
    *("tp_keep", "tp_overlap", "fp8_wgrad", "fp8_skip", "fp8_matmul"),
)
_DERIVED = ("zero", "gather", "chunks", "stage_layers", "microbatches", "microbatch_size", "seq")
_TRAIN = tuple(field.name for field in fields(Recipe))
_OF_TENSOR = ("sp", "tp_keep", "tp_overlap")


def usual_values() -> Values:
    """What a plan has that says nothing; None is derived."""
    return dict(_usual())


@cache
def _usual() -> Values:
    options = PlanOptions(model="")
    plain = {name: getattr(options, name) for name in (*_PLAIN, *_DERIVED)}
    train = {name: getattr(options.train, name) for name in _TRAIN}
    layout = {name: getattr(Layout(), name) for name in (*DEGREES, "order", "sp", "context")}
    return {**layout, **plain, "schedule": "1f1b", "recompute": "none", "number": "bf16", **train}


def values_of(plan: Plan) -> Values:
    """A resolved plan, in which everything that has an effect is explicit."""
    options, layout, usual = plan.options, plan.layout, usual_values()
    values = {name: getattr(layout, name) for name in (*DEGREES, "order", "sp", "context", "zero")}
    values |= {name: getattr(options, name) for name in _PLAIN}
    values |= {name: getattr(options.train, name) for name in _TRAIN}
    values |= {"warmup": options.train.warmup_steps, "gather": None, "chunks": layout.chunks}
    values |= {"schedule": plan.family.name if layout.pp > 1 else "1f1b", "stage_layers": None}
    values |= {"microbatches": plan.batch.microbatches, "seq": plan.batch.seq}
    values |= {"microbatch_size": plan.batch.microbatch_size, "recompute": str(plan.recompute)}
    values["number"] = _number(plan)
    values["compile"] = "auto" if options.train.compile else False
    if layout.shard * layout.cp == 1:  # nothing to shard
        values["zero"] = 0
    if values["zero"] == 0:
        values |= {"replicate": 1, "shard": layout.dp}
    if values["zero"] == 3:
        values["gather"] = plan.gather
    else:
        values["prefetch"] = usual["prefetch"]
    if layout.pp > 1:
        values["stage_layers"] = ",".join(str(len(stage)) for stage in _stages(plan))
        if plan.options.schedule != plan.family.name and not plan.family.is_named:
            values["schedule"] = plan.options.schedule  # auto, or a file
    values |= {name: usual[name] for name in _OF_TENSOR if layout.tp == 1}
    if min(layout.pp, layout.dp) == 1:
        values["order"] = usual["order"]
    values["context"] = layout.context if layout.cp > 1 else usual["context"]
    return values


def _stages(plan: Plan) -> tuple[range, ...]:
    """The stages; for a named schedule without making it."""
    layout, named = plan.layout, plan.family
    if not named.is_named:
        return plan.stages
    placement = PLACEMENTS[named.placement](layout.pp, layout.chunks)
    settings: dict[str, Any] = {"seq": plan.batch.seq, "folded": placement.folded}
    return cut_stages(plan.shape, placement.num_stages, plan.stage_layers, **settings)


def _number(plan: Plan) -> str:
    fp8 = plan.fp8
    return plan.precision if fp8 is None else f"fp8 {fp8.scaling} {fp8.gradients}"


def options_of(values: Values, model: str, changes: dict[str, str] | None = None) -> PlanOptions:
    """The plan that these values are; what is None is derived again."""
    layout = Layout(**{name: values[name] for name in (*DEGREES, "order")})
    precision, *rounded = cast(str, values["number"]).split()
    fp8: Values = dict(zip(("fp8", "fp8_gradients"), rounded, strict=False))
    plan_values: Values = {
        name: values[name] for name in (*_PLAIN, *_DERIVED, "schedule", "recompute")
    }
    if layout.pp == 1:
        plan_values |= {"chunks": None, "stage_layers": None}
    return PlanOptions(
        model=model,
        layout=str(layout),
        sp=values["sp"],
        context=values["context"],
        precision=cast(Precision, precision),
        **{**plan_values, **fp8},
        set=changes or {},
        train=Recipe(**{name: values[name] for name in _TRAIN}),
    )


def settled(values: Values, model: str, changes: dict[str, str]) -> Values | None:
    """The values with all derived ones filled in; None if the plan is illegal."""
    try:
        return values_of(resolve(options_of(values, model, changes)))
    except FivefoldError:
        return None
