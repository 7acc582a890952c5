"""`fivefold rehearse`: run the real program at any rank of any job, on one CPU or one GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, Wishes, resolve
from fivefold.core.weights import weights
from fivefold.report import write_text
from fivefold.report.rehearsal_text import describe, levels_trace, render
from fivefold.verbs import one_of, with_plan_options

if TYPE_CHECKING:
    from fivefold.planner.estimate import Estimate, PlannedEstimate
    from fivefold.rehearse import Forecasted, Rehearsed


_DEVICES = ("cpu", "cuda")


@with_plan_options
def run(
    wishes: Wishes,
    rank: Annotated[
        list[int] | None, typer.Option(help="Only this rank; may be said several times.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu: sizes alone; cuda: real kernels.")] = "cpu",
    imbalance: Annotated[
        float,
        typer.Option(help="The fullest expert's load over the mean (default 1: round-robin)."),
    ] = 1.0,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the memory of each rank over its step as a trace.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one step of every distinct rank, and hold it against the plan and against the others."""
    one_of("device", device, _DEVICES)
    plan = _rehearsable(wishes, imbalance)
    for each in rank or []:
        if not 0 <= each < plan.layout.world:
            raise FivefoldError(f"--rank {each}: the job has ranks 0 to {plan.layout.world - 1}")
    # Here, so that a mistake on the command line is answered before torch is loaded.
    from fivefold.launch.processes import RankLost, num_gpus

    if device == "cuda" and not num_gpus():
        raise FivefoldError("--device cuda: this machine has no GPU; rehearse with --device cpu")
    began = time.perf_counter()
    planned = _planned(plan, imbalance)
    try:
        found = _rehearsed(plan, rank, imbalance)
        forecast = _measured(plan, rank, imbalance, planned) if device == "cuda" else None
    except RankLost as lost:
        reason = f"lost {lost.doing}: it {lost.cause}"
        if as_json:
            typer.echo(json.dumps({"passed": False, "error": reason}))
        typer.echo(f"fivefold: {reason}", err=True)
        raise typer.Exit(1) from None
    seconds = time.perf_counter() - began
    table = describe(found, _of_worst(planned, found), forecast, imbalance, seconds)
    if perfetto is not None:
        write_text(perfetto, json.dumps(levels_trace(found, _timelines(planned, found))))
    typer.echo(json.dumps(table) if as_json else "\n".join(render(plan, table)))
    raise typer.Exit(0 if found.passed else 1)


def _rehearsable(wishes: Wishes, imbalance: float) -> Plan:
    from fivefold.cost.grid import require_possible

    plan = resolve(wishes)
    weights(plan.shape)  # refuses what cannot be built
    require_possible(plan.shape, imbalance)
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"schedule {plan.schedule.name} is asynchronous, and has no step to rehearse: choose "
            "another, such as 1f1b or zb-h1"
        )
    if any(rule.drops and not rule.pads for rule in plan.balance):
        raise FivefoldError(
            "how many slots a capacity drops is known only when tokens are routed: rehearse with "
            "capacity-pad, or without"
        )
    if plan.ep_nodes > 1 and imbalance != 1.0:
        raise FivefoldError(
            f"--imbalance over {plan.ep_nodes} nodes: which node has the fullest expert is not "
            "said; rehearse with --ep-nodes 1, or without --imbalance"
        )
    return plan


def _planned(plan: Plan, imbalance: float) -> Estimate | None:
    """What the planner expects, where it knows the machine."""
    if plan.machine is None:
        return None
    from fivefold.planner import setting_of
    from fivefold.planner.estimate import outlook

    kernels = "compiled" if plan.wishes.train.compile else "eager"
    setting, _ = setting_of(plan.machine, plan.precision, 0.0, kernels, imbalance)
    return outlook(plan, setting)


def _of_worst(planned: Estimate | None, found: Rehearsed) -> Estimate | None:
    """The plan with the memory of the rank that was seen to hold most."""
    if planned is None:
        return None
    from fivefold.planner.estimate import held_by

    return replace(planned, memory=held_by(planned.plan, planned.setting, found.worst.rank))


def _timelines(
    planned: Estimate | None, found: Rehearsed
) -> dict[int, list[PlannedEstimate]] | None:
    """The planned step of every rank that was rehearsed."""
    if planned is None:
        return None
    from fivefold.planner.estimate import timeline_of

    return {run.rank: timeline_of(planned.plan, planned.setting, run.rank) for run in found.runs}


def _rehearsed(plan: Plan, ranks: list[int] | None, imbalance: float) -> Rehearsed:
    from fivefold.rehearse import how_many, rehearse

    with _progress(how_many(plan, ranks)) as tick:
        return rehearse(plan, ranks, imbalance, tick)


def _measured(
    plan: Plan, ranks: list[int] | None, imbalance: float, planned: Estimate | None
) -> Forecasted:
    from fivefold.rehearse import forecast_on_gpu

    return forecast_on_gpu(plan, ranks, imbalance, planned)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on a terminal, for what may take minutes."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("rehearsing ranks", total=total)
        yield lambda rank: bar.advance(task)
