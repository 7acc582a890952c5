"""Where Explore begins: the state of a job that a command line or a plan file says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.core import machine, models
from fivefold.core.count import parameters
from fivefold.core.errors import FivefoldError
from fivefold.core.estimate.planner import answer, inquiry
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.report.page.state import ALSO, HEADROOM, KERNELS, SCHEDULES, State, keys_of

_HERE = "laptop"  # where a plan names no machine
_USUAL = ("h100", 8)  # where nobody says on what
_TOKENS_PER_PARAMETER = 20  # of a whole run, where nobody says: Hoffmann and others, 2022
_DERIVED = ("gather", "ep_nodes", "stage_layers")


def state_of(wishes: Wishes, precision: str | None = None) -> State:
    """The state of these wishes: the default job where nothing is said, the planner's best where no
    layout is, else the plan as it is."""
    usual, precision = State(), precision or wishes.precision
    if wishes == Wishes(model=usual.model):
        return replace(usual, precision=precision)
    if wishes == Wishes(model=wishes.model):
        place, gpus = _USUAL
        wishes = replace(wishes, machine=place, gpus=gpus)
    wishes = replace(wishes, machine=wishes.machine or _HERE)
    if wishes.layout == Wishes.layout and (wishes.gpus or 1) > 1:
        cluster = machine.load(wishes.machine or _HERE)
        how: dict[str, Any] = {"headroom": HEADROOM, "kernels": KERNELS}
        asked = inquiry(wishes, cluster, {}, precision=precision, **how)
        return of_plan(answer(asked, 1).plans[0].plan, precision)
    return of_plan(resolve(wishes), precision)


def of_plan(plan: Plan, precision: str) -> State:
    """A resolved plan as a state."""
    wishes = plan.wishes
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
        gpus=plan.layout.world,
        seq=plan.batch.seq,
        batch=plan.batch.sequences,
        precision=precision,
        tokens=float(f"{_TOKENS_PER_PARAMETER * parameters(plan.shape).total:.3g}"),
        also=_also(plan),
        **keys_of(plan),
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
