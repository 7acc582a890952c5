"""`fivefold rehearse`: run one step of any rank of any job, on one CPU or one GPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.core.weights import weights
from fivefold.report import write_text
from fivefold.report.rehearsal_text import describe, levels_trace, render
from fivefold.verbs import json_text, one_of, progress_bar, with_plan_options

if TYPE_CHECKING:
    from fivefold.planner.estimate import Estimate, PlannedAction
    from fivefold.rehearse import Rehearsed


_DEVICES = ("cpu", "cuda")


@with_plan_options
def run(
    options: PlanOptions,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu: memory only; cuda: real kernels and times.")
    ] = "cpu",
    imbalance: Annotated[
        float, typer.Option(help="Load of the fullest expert over the mean (default 1: balanced).")
    ] = 1.0,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace of the memory of each rank.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one step of every distinct rank, and compare it with the plan and the other ranks."""
    one_of("device", device, _DEVICES)
    plan = _rehearsable(options, imbalance)
    for each in rank or []:
        if not 0 <= each < plan.layout.world:
            raise FivefoldError(f"--rank {each}: the job has ranks 0 to {plan.layout.world - 1}")
    # Imported here, so that a bad command line is refused before torch is loaded.
    from fivefold.launch.processes import RankLost, num_gpus

    if device == "cuda" and not num_gpus():
        raise FivefoldError("--device cuda: this machine has no GPU; rehearse with --device cpu")
    began = time.perf_counter()
    from fivefold.rehearse import forecast_on_gpu, how_many, rehearse

    planned, forecast = _planned(plan, imbalance), None
    try:
        with progress_bar("rehearsing ranks", how_many(plan, rank)) as bar:
            found = rehearse(plan, rank, imbalance, lambda _: bar.advance(1))
        if device == "cuda":
            forecast = forecast_on_gpu(plan, rank, imbalance, planned)
    except RankLost as lost:
        reason = f"lost {lost.doing}: it {lost.cause}"
        if as_json:
            typer.echo(json_text({"passed": False, "error": reason}))
        typer.echo(f"fivefold: {reason}", err=True)
        raise typer.Exit(1) from None
    seconds = time.perf_counter() - began
    table = describe(found, _of_worst(planned, found), forecast, imbalance, seconds)
    if perfetto is not None:
        write_text(perfetto, json.dumps(levels_trace(found, _timelines(planned, found))))
    typer.echo(json_text(table) if as_json else "\n".join(render(plan, table)))
    raise typer.Exit(0 if found.passed else 1)


def _rehearsable(options: PlanOptions, imbalance: float) -> Plan:
    from fivefold.cost.grid import require_possible_imbalance

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
    if plan.ep_nodes > 1 and imbalance != 1.0:
        raise FivefoldError(
            f"--imbalance over {plan.ep_nodes} nodes: it does not say which node has the fullest "
            "expert; rehearse with --ep-nodes 1, or without --imbalance"
        )
    return plan


def _planned(plan: Plan, imbalance: float) -> Estimate | None:
    """The planner's estimate; None if the plan has no machine."""
    if plan.machine is None:
        return None
    from fivefold.planner import estimate_setting
    from fivefold.planner.estimate import estimate_plan

    kernels = plan.options.train.kernels
    setting, _ = estimate_setting(plan.machine, plan.precision, 0.0, kernels, imbalance)
    return estimate_plan(plan, setting)


def _of_worst(planned: Estimate | None, found: Rehearsed) -> Estimate | None:
    """The estimate with the memory of the rank that had the highest peak."""
    if planned is None:
        return None
    from fivefold.planner.rank_memory import rank_memory

    return replace(planned, memory=rank_memory(planned.plan, planned.setting, found.worst.rank))


def _timelines(planned: Estimate | None, found: Rehearsed) -> dict[int, list[PlannedAction]] | None:
    """The estimated step of every rank that was rehearsed."""
    if planned is None:
        return None
    from fivefold.planner.estimate import rank_timeline

    return {run.rank: rank_timeline(planned.plan, planned.setting, run.rank) for run in found.runs}
