"""Where Explore begins: the state of a job that a command line or a plan file says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.core import machine, models
from fivefold.core.errors import FivefoldError
from fivefold.core.estimate.planner import answer, inquiry
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.report.page.state import ALSO, HEADROOM, KERNELS, SCHEDULES, State

_HERE = "laptop"  # where a plan names no machine
_DERIVED = ("gather", "ep_nodes", "stage_layers")


def state_of(wishes: Wishes) -> State:
    """The state of these wishes: the default job where nothing is said but its model, the
    planner's best where GPUs are given and no layout, else the plan as it is."""
    usual = State()
    if wishes == Wishes(model=usual.model):
        return usual
    wishes = replace(wishes, machine=wishes.machine or _HERE)
    if wishes.layout == Wishes.layout and (wishes.gpus or 1) > 1:
        how: dict[str, Any] = {"headroom": HEADROOM, "kernels": KERNELS, "imbalance": 1.0}
        place = machine.load(wishes.machine or _HERE)
        asked = inquiry(wishes, place, {}, precision=wishes.precision, **how)
        return of_plan(answer(asked, 1).plans[0].plan)
    return of_plan(resolve(wishes))


def of_plan(plan: Plan) -> State:
    """A resolved plan as a state."""
    layout, wishes = plan.layout, plan.wishes
    if wishes.machine not in machine.presets():
        known = ", ".join(machine.presets())
        raise FivefoldError(f"--machine {wishes.machine}: the page knows presets only: {known}")
    if wishes.schedule not in SCHEDULES:
        raise FivefoldError(
            f"--schedule {wishes.schedule}: the page draws {', '.join(SCHEDULES)}; for others "
            "see fivefold schedule --svg"
        )
    named = wishes.model in models.presets()
    return State(
        model=wishes.model if named else State.model,
        config="" if named else models.text_of(wishes.model),
        machine=wishes.machine or _HERE,
        gpus=layout.world,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        replicate=layout.replicate,
        zero=layout.zero,
        schedule=wishes.schedule,
        chunks=layout.chunks,
        context=layout.context,
        recompute=str(plan.recompute),
        microbatch_size=plan.batch.microbatch_size,
        seq=plan.batch.seq,
        batch=plan.batch.dp * plan.batch.microbatch_size * plan.batch.microbatches,
        also=_also(plan),
    )


def _also(plan: Plan) -> str:
    """What a plan says that no control is for."""
    wishes, usual = plan.wishes, Wishes(model="")
    # A resolved plan says what it derived; that is derived again when degrees change.
    plain = resolve(replace(wishes, **dict.fromkeys(_DERIVED))).wishes
    said = {
        key: getattr(wishes, key)
        for key in ALSO
        if getattr(wishes, key) != getattr(plain if key in _DERIVED else usual, key)
    }
    said |= wishes.set
    if plan.layout.order != Layout.order:
        said["order"] = plan.layout.order
    return " ".join(f"{key}={str(value).lower()}" for key, value in sorted(said.items()))
