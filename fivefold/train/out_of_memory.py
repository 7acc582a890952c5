"""Out of memory: what the plan had expected, what there is, and a layout that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan
from fivefold.core.recipe import Recipe
from fivefold.optim.optimizer import Updater
from fivefold.parallel.compose import Job
from fivefold.planner import answer, inquiry, setting_of
from fivefold.planner.estimate import Estimate, outlook
from fivefold.records import GIB
from fivefold.train.result import memory_of


@dataclass(frozen=True)
class Shortage:
    """A rank that ran out of memory; bytes by category."""

    rank: int
    where: str
    expected: dict[str, float]
    allocated: dict[str, float]
    nearest: str | None  # a layout that fits
    snapshot: str | None  # the file that shows the memory


_HEADROOM = 0.05  # of the memory, for a layout that is sure to fit


def kernels(recipe: Recipe) -> str:
    """How the planner calls the way that blocks run."""
    return "compiled" if recipe.compile else "eager"


def expected(plan: Plan, recipe: Recipe) -> Estimate | None:
    """The planner's forecast, where it knows the machine."""
    if plan.machine is None:
        return None
    setting, _ = setting_of(plan.machine, plan.precision, 0.0, kernels(recipe), 1.0)
    return outlook(plan, setting, "nvme" if recipe.disk else recipe.offload)


def allocated(job: Job, updater: Updater) -> dict[str, float]:
    """Bytes of a rank by what they are for, as far as they can be told apart."""
    units = list(job.units)
    weights = [one for unit in units for one in (unit.whole, unit.part)]
    summed = [
        one
        for unit in units
        for one in (unit.gradients, unit.sent, unit.received, unit.gradient)
        if one is not None
    ]
    of_autograd = [each.grad for unit in units for each in unit.parameters.values()]
    gradients = [*summed, *(each for each in of_autograd if each is not None)]
    found: dict[str, float] = {
        "weights": memory_of(weights),
        "gradients": memory_of(gradients),
        "optimizer": memory_of(updater.tensors()),
    }
    device, total = job.mesh.device, sum(found.values())
    if device.type == "cuda":
        found["activations and the rest"] = torch.cuda.memory_allocated(device) - total
    return found


def fitting(plan: Plan, recipe: Recipe) -> str | None:
    """A layout of as many GPUs that fits, with what it takes; None where there is none."""
    if plan.machine is None:
        return None
    batch = replace(plan.wishes, batch=plan.batch.sequences, gpus=plan.layout.world)
    asked = inquiry(
        batch,
        plan.machine,
        {"offload": recipe.offload.split(":")[0]},
        precision=plan.precision,
        headroom=_HEADROOM,
        kernels=kernels(recipe),
    )
    try:
        best = answer(asked, 1).plans[0]
    except (FivefoldError, IndexError):
        return None
    chosen = best.plan
    return (
        f'--layout "{chosen.layout}" --zero {chosen.layout.zero} --schedule {chosen.schedule.name} '
        f"--microbatch-size {chosen.batch.microbatch_size} --recompute {chosen.recompute}: "
        f"{best.total / GIB:.1f} GiB"
    )
