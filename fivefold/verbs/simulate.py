"""`fivefold simulate`: a run with failures, before it happens."""

from __future__ import annotations

from typing import Annotated

import typer

from fivefold.api.simulating import RUNS, simulate
from fivefold.core.plan import DETECT, REPAIR, RESTART, PlanOptions
from fivefold.verbs import as_given, json_text, require_known, with_plan_options


def _hours(what: str) -> typer.models.OptionInfo:
    return typer.Option(help=f"Hours between two failures of one {what}.", show_default=False)


@with_plan_options
def run(
    options: PlanOptions,
    command: typer.Context,
    days: Annotated[float, typer.Option(help="Days of the run.")],
    mtbf_gpu: Annotated[float | None, _hours("GPU (default: the machine's)")] = None,
    mtbf_host: Annotated[float | None, _hours("host, beside its GPUs")] = None,
    mtbf_switch: Annotated[float | None, _hours("leaf switch, one for 4 hosts")] = None,
    spares: Annotated[
        int | None,
        typer.Option(help="Spare hosts (default: never too few).", show_default=False),
    ] = None,
    detect: Annotated[float, typer.Option(help="Seconds until a failure is noticed.")] = DETECT,
    restart: Annotated[float, typer.Option(help="Seconds to start all ranks again.")] = RESTART,
    repair: Annotated[float, typer.Option(help="Seconds until a lost host is back.")] = REPAIR,
    checkpoint: Annotated[
        str, typer.Option(help="Where checkpoints go: disk, memory of partners, or auto.")
    ] = "auto",
    storage: Annotated[
        float | None,
        typer.Option(
            help="Bytes/s of the shared disk (default: 1e9 a host, 2e12 at most).",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Simulated runs.")] = RUNS,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a run with failures: goodput, interruptions, and where the time goes."""
    require_known(options.machine)
    simulation = simulate(
        as_given(options, command),
        days=days,
        mtbf_gpu=mtbf_gpu,
        mtbf_host=mtbf_host,
        mtbf_switch=mtbf_switch,
        spares=spares,
        detect=detect,
        restart=restart,
        repair=repair,
        checkpoint=checkpoint,
        storage=storage,
        runs=runs,
        seed=seed,
    )
    typer.echo(json_text(simulation.to_json()) if as_json else str(simulation))
