"""`fivefold rehearse`: run one step of any rank of any job, on one CPU or one GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.job import Model, OnProgress, TaskProgress, given_job, one_of
from fivefold.commands.options import (
    RunPrecisionOption,
    SetKey,
    as_given,
    in_precision,
    json_text,
    print_answer,
    shown_progress,
    warn,
    with_plan_options,
)
from fivefold.commands.search import with_first_choice
from fivefold.core import PRECISIONS, FivefoldError, RankLost
from fivefold.core.layout import weights
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.render import levels_trace, rehearsal_json, rehearsal_lines, write_text

if TYPE_CHECKING:
    from fivefold.planner import Estimate
    from fivefold.rehearse import Forecasted, Rehearsed


@with_plan_options
def run(
    options: PlanOptions,
    command: typer.Context,
    precision: RunPrecisionOption = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu: memory only; cuda: real kernels and times.")
    ] = "cpu",
    contend: Annotated[
        bool, typer.Option("--contend", help="Kernels in place of collectives; needs cuda.")
    ] = False,
    imbalance: Annotated[
        float, SetKey("Load of the fullest expert over the mean; 1 is balanced.")
    ] = 1.0,
    perfetto: Annotated[
        str | None, SetKey("File for a Perfetto trace of the memory of each rank.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one step of every distinct rank, and compare it with the plan and the other ranks."""
    job = as_given(in_precision(options, precision), command)
    try:
        with shown_progress("rehearsing ranks") as on_progress:
            rehearsal = rehearse(
                job,
                rank=rank,
                device=device,
                contend=contend,
                imbalance=imbalance,
                on_progress=on_progress,
            )
    except RankLost as lost:
        reason = f"lost {lost.doing}: it {lost.cause}"
        if as_json:
            typer.echo(json_text({"passed": False, "error": reason}))
        warn(reason)
        raise typer.Exit(1) from None
    if perfetto is not None:
        write_text(Path(perfetto), json.dumps(rehearsal.trace()))
    print_answer(rehearsal, as_json)
    raise typer.Exit(0 if rehearsal.passed else 1)


_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class RehearsedPlan:
    """One step of some ranks of a job: their memory and collectives beside the plan.

    `str()` is the text of `fivefold rehearse`, `to_json()` its JSON.
    """

    result: Rehearsed
    estimate: Estimate | None
    forecast: Forecasted | None  # of the step, from kernels on a GPU
    imbalance: float
    seconds: float

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def passed(self) -> bool:
        """Whether the ranks agree with the plan and with one another, and the step ends."""
        return self.result.passed

    @cached_property
    def _table(self) -> dict[str, Any]:
        worst = self.estimate
        if worst is not None:
            from fivefold.planner import rank_memory

            # With the memory of the rank that had the highest peak.
            memory = rank_memory(worst.plan, worst.setting, self.result.worst.rank)
            worst = replace(worst, memory=memory)
        return rehearsal_json(self.result, worst, self.forecast, self.imbalance, self.seconds)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold rehearse --json` prints."""
        return self._table

    def trace(self) -> dict[str, Any]:
        """The memory of each rank for Perfetto, as JSON."""
        timelines = None
        if (estimate := self.estimate) is not None:
            from fivefold.planner import rank_timeline

            ranks = [run.rank for run in self.result.runs]
            timelines = {
                rank: rank_timeline(estimate.plan, estimate.setting, rank) for rank in ranks
            }
        return levels_trace(self.result, timelines)

    def __repr__(self) -> str:
        passed = "passed" if self.passed else "failed"
        return f"RehearsedPlan({self.plan.shape.name} on {self.plan.layout}: {passed})"

    def __str__(self) -> str:
        return "\n".join(rehearsal_lines(self.plan, self._table))

    def _repr_html_(self) -> str:
        from fivefold.render import text_html

        return text_html(str(self), self.passed)


def rehearse(
    model: Model,
    *,
    rank: int | Sequence[int] | None = None,
    device: str = "cpu",
    contend: bool = False,
    imbalance: float = 1.0,
    on_progress: OnProgress | None = None,
    **keys: Any,
) -> RehearsedPlan:
    """Run one step of every distinct rank of a job on one CPU, or of some, and compare it with the
    plan and the other ranks; on a GPU (`device="cuda"`) with real kernels and times, and with
    `contend` with kernels that take what the collectives would take from them."""
    one_of("--device", device, _DEVICES)
    plan = _rehearsable(with_first_choice(given_job(model, keys)), imbalance)
    if contend and (device != "cuda" or plan.machine is None):
        raise FivefoldError(
            "--contend puts kernels in place of collectives, for as long as the links of a machine "
            "take: give --device cuda and --machine"
        )
    ranks = [rank] if isinstance(rank, int) else rank
    for rank_index in ranks or []:
        if not 0 <= rank_index < plan.layout.world:
            raise FivefoldError(
                f"--rank {rank_index}: the job has ranks 0 to {plan.layout.world - 1}"
            )
    # Imported here, so that a bad option is refused before torch is loaded.
    from fivefold.launch import num_gpus

    if device == "cuda" and not num_gpus():
        raise FivefoldError("--device cuda: this machine has no GPU; rehearse with --device cpu")
    began = time.perf_counter()
    from fivefold.rehearse import forecast_on_gpu, how_many, rehearse

    planned, forecast = _planned(plan, imbalance), None
    done, total = 0, how_many(plan, ranks)

    def on_rank(number: int) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(TaskProgress(done, total, f"rank {number}"))

    rehearsal = rehearse(plan, ranks, imbalance, on_rank)
    if device == "cuda":
        forecast = forecast_on_gpu(plan, ranks, imbalance, planned, contend)
    return RehearsedPlan(rehearsal, planned, forecast, imbalance, time.perf_counter() - began)


def _rehearsable(options: PlanOptions, imbalance: float) -> Plan:
    from fivefold.cost import require_possible_imbalance

    plan = resolve(options)
    weights(plan.shape)  # refuses what cannot be built
    require_possible_imbalance(plan.shape, imbalance)
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"schedule {plan.schedule.name} is asynchronous and has no step to rehearse: choose "
            "another, such as 1f1b or zb-h1"
        )
    if plan.fp8 is not None:
        plan.fp8.require_runnable(plan.schedule.asynchronous)
    if plan.options.train.offload_grads != "none":
        raise FivefoldError(
            "a rehearsal counts all memory of a rank as that of its device, and offload_grads "
            "takes gradients from there: rehearse without it, or see the estimate of plan"
        )
    if any(rule.drops and not rule.pads for rule in plan.balance):
        raise FivefoldError(
            "how many tokens a capacity drops is known only after routing: rehearse with "
            "capacity-pad, or without a capacity"
        )
    if (moe := plan.shape.moe) is not None:
        widths = (plan.shape.width, moe.ffn // plan.layout.etp)
        if PRECISIONS[plan.precision].itemsize != 2 or any(width % 8 for width in widths):
            raise FivefoldError(
                "grouped matmuls of experts can be rehearsed in 16 bits and with widths of a "
                f"multiple of 8, not in {plan.precision} with {widths[0]:,} and {widths[1]:,}: "
                "rehearse with --precision bf16 and other widths, or see the estimate of plan"
            )
    if plan.ep_nodes > 1 and imbalance != 1.0:
        raise FivefoldError(
            f"imbalance over {plan.ep_nodes} nodes: it does not say which node has the fullest "
            "expert; rehearse with ep_nodes=1, or without imbalance"
        )
    return plan


def _planned(plan: Plan, imbalance: float) -> Estimate | None:
    """The planner's estimate; None if the plan has no machine."""
    if plan.machine is None:
        return None
    from fivefold.planner import estimate_plan, estimate_setting

    kernels = plan.options.train.kernels
    setting, _ = estimate_setting(plan.machine, plan.precision, 0.0, kernels, imbalance)
    return estimate_plan(plan, setting)
