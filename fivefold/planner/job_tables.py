"""Tables that people look for, computed for one job: what each answer costs and buys here.

- `zero3-or-pipeline`: shard the weights over all data ranks, or cut the layers into stages.
- `data-or-model`: copy the model, cut it, or both.
- `memory`: what each technique saves and costs, alone, on the degrees of one plan.

In the first two every row fixes one thing and has the best layout of all others. The rows of
`memory` keep the degrees, since bytes saved can be compared only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fivefold.core import FivefoldError, counted
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.planner.comparisons import best_estimate
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.planning import PlanRequest

Fixed = Mapping[str, int | str]


@dataclass(frozen=True)
class JobRow:
    """One answer; without an estimate if no layout is legal, and `refused` says why."""

    name: str
    estimate: Estimate | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.over <= 0


@dataclass(frozen=True)
class JobTable:
    """A table; `base` is the row that the others are compared with."""

    name: str
    rows: tuple[JobRow, ...]
    base: str = ""

    def row(self, name: str) -> JobRow:
        return next(table_row for table_row in self.rows if table_row.name == name)

    @property
    def fastest(self) -> JobRow | None:
        """The fastest row that fits."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=_step, default=None)


def _step(row: JobRow) -> float:
    return float("inf") if row.estimate is None else row.estimate.step


def job_table(name: str, request: PlanRequest, plan: Plan | None = None) -> JobTable:
    """One of `TABLES` for a job; `given` is the plan whose layout the user has chosen."""
    if name == "memory":
        return _memory_techniques(request, plan)
    return JobTable(name, tuple(_best_with(request, *entry) for entry in _ROWS[name].items()))


def _best_with(request: PlanRequest, name: str, choice: Fixed) -> JobRow:
    """The best layout with a choice; `pipeline` asks for at least two stages."""
    space, fixed = request.space, {"offload": "none", **(request.space.fixed or {})}
    if any(fixed.get(key, value) != value for key, value in choice.items()):
        return JobRow(name, None, "not with what fix says")
    if choice.items() >= _DATA.items() and space.batch % space.gpus:
        rows = counted(space.batch, "sequence")
        why = f"{counted(space.gpus, 'data rank')} cannot share {rows} a step"
        return JobRow(name, None, why)
    least = 2 if name.startswith("pipeline") else space.least_pp
    space = replace(space, fixed={**fixed, **choice}, least_pp=least)
    estimate = best_estimate(replace(request, space=space))
    refused = "" if estimate else f"no legal layout on {space.gpus_text} for this model and batch"
    return JobRow(name, estimate, refused)


_DATA: Fixed = {"tp": 1, "pp": 1, "cp": 1}
_ROWS: dict[str, dict[str, Fixed]] = {
    "zero3-or-pipeline": {
        "ZeRO-3 alone": {**_DATA, "zero": 3},
        "ZeRO-3, tp or cp": {"zero": 3, "pp": 1},
        "pipeline alone": {"zero": 1, "tp": 1, "cp": 1},
        "pipeline, tp or cp": {"zero": 1},
    },
    "data-or-model": {
        "data, ZeRO-1": {**_DATA, "zero": 1},
        "data, ZeRO-3": {**_DATA, "zero": 3},
        "tensor": {"dp": 1, "pp": 1, "cp": 1},
        "tensor and pipeline": {"dp": 1, "cp": 1},
        "data and tensor": {"pp": 1, "cp": 1},
        "data and pipeline": {"tp": 1, "cp": 1},
        "all dimensions": {},
    },
}
TABLES = (*_ROWS, "memory")


# --- Memory techniques

BASE = "nothing saved"
CHOSEN = "the plan itself"


def _memory_techniques(request: PlanRequest, base_plan: Plan | None) -> JobTable:
    chosen = _chosen(request, base_plan)
    options, plan = chosen.plan.options, chosen.plan
    sharded = plan.layout.dp * plan.layout.cp > 1
    base = _plain(options)
    techniques: dict[str, dict[str, Any]] = {BASE: {}}
    if plan.layout.tp > 1 and not base.sp:
        techniques["sequence parallelism"] = {"sp": True}
    techniques["selective recomputation"] = {"recompute": "selective"}
    techniques["full recomputation"] = {"recompute": "full"}
    if sharded:
        techniques |= {f"ZeRO-{stage}": {"zero": stage} for stage in (1, 2, 3)}
    techniques["gradients summed in bf16"] = {"grad_dtype": "bf16"}
    if plan.batch.microbatch_size % 2 == 0:
        half = plan.batch.microbatch_size // 2
        microbatches = 2 * plan.batch.microbatches
        techniques["half the microbatch"] = {"microbatch_size": half, "microbatches": microbatches}
    away = replace(base.train, offload="cpu")
    techniques["optimizer states in host memory"] = {"train": away}
    rows = [_technique(request, name, base, keys) for name, keys in techniques.items()]
    return JobTable("memory", (*rows, JobRow(CHOSEN, chosen)), BASE)


def _chosen(request: PlanRequest, plan: Plan | None) -> Estimate:
    if plan is not None:
        return estimate_plan(plan, request.setting)
    estimate = best_estimate(request)
    if estimate is None:
        raise FivefoldError("--table memory: no legal layout for this job; change --gpus or fix")
    return estimate


def _plain(options: PlanOptions) -> PlanOptions:
    """The same degrees without techniques; sequence parallelism stays where experts require it."""
    at_home = replace(options.train, offload="none", offload_grads="none", states="fp32")
    plain = replace(options, zero=0, gather=None, recompute="none", grad_dtype="fp32")
    plain = replace(plain, train=at_home)
    try:
        resolve(replace(plain, sp=False))
    except FivefoldError:
        return plain
    return replace(plain, sp=False)


def _technique(request: PlanRequest, name: str, base: PlanOptions, keys: dict[str, Any]) -> JobRow:
    try:
        plan = resolve(replace(base, **keys))
    except FivefoldError as error:
        return JobRow(name, None, str(error).splitlines()[0])
    return JobRow(name, estimate_plan(plan, request.setting))
