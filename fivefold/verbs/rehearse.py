"""`fivefold rehearse`: run one step of any rank of any job, on one CPU or one GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fivefold.api.rehearsing import rehearse
from fivefold.core import RankLost
from fivefold.core.plan import PlanOptions
from fivefold.render import write_text
from fivefold.verbs import (
    Key,
    RunPrecisionOption,
    as_given,
    in_precision,
    json_text,
    shown_progress,
    with_plan_options,
)


@with_plan_options
def run(
    options: PlanOptions,
    command: typer.Context,
    precision: RunPrecisionOption = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu: memory only; cuda: real kernels and times.")
    ] = "cpu",
    imbalance: Annotated[
        float, Key("Load of the fullest expert over the mean; 1 is balanced.")
    ] = 1.0,
    perfetto: Annotated[
        str | None, Key("File for a Perfetto trace of the memory of each rank.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one step of every distinct rank, and compare it with the plan and the other ranks."""
    job = as_given(in_precision(options, precision), command)
    try:
        with shown_progress("rehearsing ranks") as on_progress:
            rehearsal = rehearse(
                job, rank=rank, device=device, imbalance=imbalance, on_progress=on_progress
            )
    except RankLost as lost:
        reason = f"lost {lost.doing}: it {lost.cause}"
        if as_json:
            typer.echo(json_text({"passed": False, "error": reason}))
        typer.echo(f"fivefold: {reason}", err=True)
        raise typer.Exit(1) from None
    if perfetto is not None:
        write_text(Path(perfetto), json.dumps(rehearsal.trace()))
    typer.echo(json_text(rehearsal.to_json()) if as_json else str(rehearsal))
    raise typer.Exit(0 if rehearsal.passed else 1)
