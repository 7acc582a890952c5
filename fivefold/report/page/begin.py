"""Where Explore begins: the state of a job that a command line or a plan file says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fivefold.core import machine, models
from fivefold.core.errors import BadFile
from fivefold.core.estimate.planner import answer, inquiry
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.report.page.state import HEADROOM, KERNELS, PRECISION, State

_HERE = "laptop"  # where a plan names no machine
_MOST_CONFIG = models.LARGEST_CONFIG


def state_of(wishes: Wishes) -> State:
    """The state of these wishes: the default job where nothing is said but its model, the
    planner's best where GPUs are given and no layout, else the plan as it is."""
    usual = State()
    if wishes == Wishes(model=usual.model):
        return usual
    if wishes.layout == "dp=1" and wishes.machine and (wishes.gpus or 1) > 1:
        asked = inquiry(
            wishes,
            machine.load(wishes.machine),
            {},
            precision=PRECISION,
            headroom=HEADROOM,
            kernels=KERNELS,
            imbalance=1.0,
        )
        return of_plan(answer(asked, 1).plans[0].plan)
    return of_plan(resolve(replace(wishes, machine=wishes.machine or _HERE)))


def of_plan(plan: Plan) -> State:
    """A resolved plan as a state."""
    layout, wishes = plan.layout, plan.wishes
    name, config = wishes.model, ""
    if name not in models.presets():
        name, config = State.model, _config(name)
    return State(
        model=name,
        config=config,
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
        batch=plan.batch.sequences,
    )
