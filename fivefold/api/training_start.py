"""What one start of a training was given: the device of its ranks, and how they train."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fivefold.api.restarting import RestartPolicy
from fivefold.core.plan import Plan
from fivefold.core.precision import PRECISIONS
from fivefold.launch.launcher import LauncherEnvironment
from fivefold.records import PlannedStep

if TYPE_CHECKING:
    from fivefold.data.mixture import Source
    from fivefold.launch.backend import Backend, RankDevice
    from fivefold.train import TrainSettings


@dataclass(frozen=True)
class TrainStart:
    """What one start of a run was given."""

    plan: Plan
    dtype: str | None
    device: str
    backend: Backend | None
    out: Path | None
    resume: bool
    until: int | None
    check: bool
    deterministic: bool
    restarts: RestartPolicy = RestartPolicy()  # noqa: RUF009, it is frozen


def device_of(start: TrainStart, launched: LauncherEnvironment | None) -> RankDevice:
    """The device of the first rank, or of this one, and the backend of all; refused if these ranks
    cannot have it."""
    from fivefold.launch.backend import (
        NcclLibrary,
        available_device,
        choose_backend,
        forked_device,
        launched_device,
        num_gpus,
    )

    gpus, nccl = num_gpus(), NcclLibrary.here()
    device = available_device(start.device, gpus)
    if launched is not None:
        return launched_device(device, start.backend, launched, gpus, nccl)
    world = start.plan.layout.world
    backend = choose_backend(start.backend, device, world, gpus, nccl)
    return forked_device(device, backend, 0, world)


def settings_of(start: TrainStart, folder: Path, rank: RankDevice) -> TrainSettings:
    """How the ranks train: their device, their dtype, and what the plan expects of a step."""
    from fivefold.train import TrainSettings, estimate_of

    plan, device = start.plan, rank.device.type
    dtype = start.dtype or PRECISIONS[plan.precision].dtype
    if start.dtype is None and device == "cpu" and dtype == "bfloat16":
        dtype = "float32"  # CPUs are slow at bfloat16, which is the default of every plan
    estimate = estimate_of(plan, plan.options.train)
    return TrainSettings(
        recipe=plan.options.train,
        dtype=cast("Any", dtype),
        device=cast("Any", device),
        backend=rank.backend,
        folder=folder,
        resume=start.resume,
        until=start.until,
        planned=None if estimate is None else PlannedStep.of(estimate),
        check=start.check,
        deterministic=start.deterministic,
    )


def noted(plan: Plan, rank: RankDevice) -> Plan:
    """The plan with a note on how collectives travel between GPUs."""
    if rank.device.type == "cpu" or plan.layout.world == 1:
        return plan
    return replace(plan, notes=(*plan.notes, rank.describe()))


def plan_facts(plan: Plan) -> dict[str, object]:
    """Facts of a start, for --json too."""
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "zero": plan.layout.zero,
        "schedule": plan.schedule.name,
    }


def start_facts(plan: Plan, source: Source) -> dict[str, object]:
    """Facts of this start for `run.json`."""
    tokenizer = source.tokenizer
    return {**plan_facts(plan), "tokenizer": None if tokenizer is None else asdict(tokenizer)}
