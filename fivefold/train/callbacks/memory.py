"""The memory of a rank: its peak, snapshots of it, and what to say when it runs out.

Snapshots are for the viewer at pytorch.org/memory_viz. On request the first steps of a start are
recorded, each allocation with the lines that asked for it. When memory runs out, what is allocated
is written in any case. Torch names these functions with an underscore but documents them: where one
is missing, nothing is written.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fivefold.core import FivefoldError, Machine
from fivefold.core.plan import Plan, Recipe
from fivefold.optim import Updater
from fivefold.parallel import Job
from fivefold.planner import Estimate, best_plans, estimate_plan, estimate_setting, plan_request
from fivefold.records import GIB
from fivefold.train import RankRun, storage_bytes
from fivefold.train.callbacks.callback import Callback
from fivefold.train.callbacks.records import MEMORY, log_targets

FOLDER = "memory"
STEPS = 3  # recorded on request: the first allocates its memory, the others show the steady state
_MOST_EVENTS = 1_000_000
_NO_GPU = "log = memory writes nothing: a snapshot shows the memory of a GPU, and this run has none"
_NO_FUNCTION = "log = memory writes nothing: this torch cannot write a snapshot"
_HEADROOM = 0.05  # of the memory, for a layout that is sure to fit


@dataclass
class MemoryCallback(Callback):
    """Adds the peak memory to each record, and reports how a rank ran out of memory."""

    run: RankRun
    snapshots: Snapshots | None = None

    def start(self, after: int) -> None:
        if self.run.folder is not None:
            requested = MEMORY in log_targets(self.run.settings.recipe.log)
            device = self.run.rank.job.mesh.device
            self.snapshots = Snapshots(
                self.run.folder.path, self.run.worker.rank, device, requested
            )
            if self.snapshots.note is not None and self.run.worker.rank == 0:
                self.run.worker.report(self.snapshots.note)

    def measure(self, number: int) -> dict[str, Any]:
        return {"memory_gib": peak_memory_gib(self.run.rank.job.mesh.device)}

    def after_step(self, number: int) -> None:
        if self.snapshots is not None:
            self.snapshots.step(number)

    def out_of_memory(self) -> None:
        """Report what was estimated, what is allocated, and a layout that would fit."""
        snapshot = None if self.snapshots is None else self.snapshots.out_of_memory()
        job, plan = self.run.rank.job, self.run.rank.job.plan
        estimate = estimate_of(plan, self.run.settings.recipe)
        self.run.worker.report(
            Shortage(
                self.run.worker.rank,
                f"step {self.run.progress.step + 1}",
                {} if estimate is None else dict(estimate.memory),
                allocated(job, self.run.rank.updater),
                nearest_fit(plan, self.run.settings.recipe),
                None if snapshot is None else str(snapshot),
            )
        )


def peak_memory_gib(device: torch.device) -> float:
    """The peak memory of this rank: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class Snapshots:
    """Memory snapshots of one rank. `note`: why there are none, if requested."""

    def __init__(self, folder: Path, rank: int, device: torch.device, requested: bool) -> None:
        self.folder, self.rank = folder / FOLDER, rank
        self.memory: Any = torch.cuda.memory if device.type == "cuda" else None
        self.steps_left = 0
        self.note = self._record() if requested else None

    def step(self, number: int) -> Path | None:
        """Count a step; returns the written file after the last recorded step."""
        if not self.steps_left:
            return None
        self.steps_left -= 1
        if self.steps_left:
            return None
        path = self._dump(f"step-{number:08d}")
        self.memory._record_memory_history(enabled=None)  # it costs time
        return path

    def out_of_memory(self) -> Path | None:
        """Write a snapshot now; None without a GPU."""
        return self._dump("out-of-memory")

    def _record(self) -> str | None:
        """Begin to record; the reason if that is not possible."""
        if self.memory is None:
            return _NO_GPU
        if not hasattr(self.memory, "_record_memory_history"):
            return _NO_FUNCTION
        self.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self.steps_left = STEPS
        return None

    def _dump(self, name: str) -> Path | None:
        if not hasattr(self.memory, "_dump_snapshot"):
            return None
        path = self.folder / f"rank-{self.rank:05d}-{name}.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.memory._dump_snapshot(str(path))
        except OSError:  # a full disk must not end a run, nor hide why one ends
            return None
        return path


@dataclass(frozen=True)
class Shortage:
    """Report of a rank that ran out of memory; bytes by category."""

    rank: int
    where: str
    expected: dict[str, float]
    allocated: dict[str, float]
    nearest: str | None  # a layout that fits
    snapshot: str | None  # the file that shows the memory


def estimate_of(plan: Plan, recipe: Recipe, cpu: Machine | None = None) -> Estimate | None:
    """Estimate of a plan; None if its machine is unknown. `cpu`: of a run on CPU processes of this
    machine, which compute in float32 and share cores."""
    machine = cpu or plan.machine
    if machine is None:
        return None
    kernels = "eager" if machine.is_cpu else recipe.kernels
    precision = "fp32" if machine.is_cpu and plan.precision == "bf16" else plan.precision
    setting, _ = estimate_setting(machine, precision, 0.0, kernels, 1.0)
    if machine.is_cpu:
        memory = replace(setting.stack.memory, context_bytes=0.0, pool_bytes=0.0)
        crowd = max(1.0, plan.layout.world / machine.gpus_per_node)
        setting = replace(setting, stack=replace(setting.stack, factor=crowd, memory=memory))
    return estimate_plan(plan, setting)


def allocated(job: Job, updater: Updater) -> dict[str, float]:
    """Allocated bytes of a rank by purpose."""
    units = list(job.units)
    weights = [tensor for unit in units for tensor in (unit.full, unit.shard)]
    reduced = [
        tensor
        for unit in units
        for tensor in (unit.gradients, unit.sent, unit.received, unit.gradient)
        if tensor is not None and tensor is not unit.home
    ]
    of_autograd = [weight.grad for unit in units for weight in unit.parameters.values()]
    gradients = [*reduced, *(grad for grad in of_autograd if grad is not None)]
    by_purpose: dict[str, float] = {
        "weights": storage_bytes(weights),
        "gradients": storage_bytes(gradients),
        "optimizer": storage_bytes(updater.tensors()),
    }
    device, total = job.mesh.device, sum(by_purpose.values())
    if device.type == "cuda":
        by_purpose["activations and the rest"] = torch.cuda.memory_allocated(device) - total
    return by_purpose


def nearest_fit(plan: Plan, recipe: Recipe) -> str | None:
    """Best layout of as many GPUs that fits, with its memory; None if there is none."""
    if plan.machine is None:
        return None
    batch = replace(plan.options, batch=plan.batch.sequences, gpus=plan.layout.world)
    request = plan_request(
        batch,
        plan.machine,
        {"offload": recipe.offload.split(":")[0]},
        precision=plan.precision,
        headroom=_HEADROOM,
        kernels=recipe.kernels,
    )
    try:
        best = best_plans(request, 1).plans[0]
    except (FivefoldError, IndexError):
        return None
    chosen = best.plan
    return (
        f'--layout "{chosen.layout}" --zero {chosen.layout.zero} --schedule {chosen.schedule.name} '
        f"--microbatch-size {chosen.batch.microbatch_size} --recompute {chosen.recompute}: "
        f"{best.total / GIB:.1f} GiB"
    )
