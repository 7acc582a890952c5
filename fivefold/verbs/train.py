"""`fivefold train`: train a plan, and print what was measured beside what was planned.

On one machine it forks the ranks itself; under torchrun, Slurm or Kubernetes it is one of them.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.api.training import StartedRun, train
from fivefold.api.training_start import RestartedRun
from fivefold.core import FORMATS, RankLost
from fivefold.core.plan import PlanOptions
from fivefold.launch import read_environment
from fivefold.records import Pace, StepRecord
from fivefold.report.line_printer import LinePrinter
from fivefold.report.training_text import out_of_memory, step_line
from fivefold.verbs import (
    BackendOption,
    RunPrecisionOption,
    as_given,
    in_precision,
    json_text,
    with_plan_options,
)


@partial(with_plan_options, default_target="tiny-moe")
def run(
    options: PlanOptions,
    command: typer.Context,
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: the next free runs/NAME-N).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest good checkpoint.")
    ] = False,
    until: Annotated[
        int | None, typer.Option(help="End this start after that step, with a checkpoint.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (default 20).")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(FORMATS)} (default: the plan's; float32 without a GPU)."),
    ] = None,
    precision: RunPrecisionOption = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate (default 1e-3).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the weights and of the order of the text.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: BackendOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the losses with those of one process.")
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Kernels that add in one order: two runs of a layout are equal to the bit.",
        ),
    ] = False,
    restarts: Annotated[
        int, typer.Option(help="How often all ranks start again after one is lost.")
    ] = 0,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Go on without the replica of a lost rank, until the restart after that.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train; without `data`, on the source of Python's standard library, byte by byte."""
    overrides = {"steps": steps, "lr": lr, "seed": seed}
    recipe = replace(
        options.train, **{key: value for key, value in overrides.items() if value is not None}
    )
    options = in_precision(options, precision)
    job = as_given(replace(options, train=recipe), command)
    alone = read_environment(os.environ) is None
    reporter = _Reporter(quiet=as_json and alone)
    try:
        outcome = train(
            job,
            out=out,
            resume=resume,
            until=until,
            dtype=dtype,
            device=device,
            backend=backend,
            check=check,
            deterministic=deterministic,
            restarts=restarts,
            shrink=shrink,
            on_progress=reporter.report,
        )
    except RankLost as lost:
        reporter.printer.close()
        if as_json:
            table = {"passed": False, "error": lost.reason, "rank": lost.rank}
            typer.echo(json_text(table))
        typer.echo(f"fivefold: {lost.reason}", err=True)
        raise typer.Exit(1) from lost
    finally:
        reporter.printer.close()
    if not outcome.joined:
        typer.echo(json_text(outcome.to_json()) if as_json else f"\n{outcome}")
    elif outcome.summary is not None:
        typer.echo(f"\n{outcome}")
    raise typer.Exit(0 if outcome.passed else 1)


class _Reporter:
    """Prints every step when it is over. Once ranks run, a thread prints: nobody waits for it."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.pace, self.steps = quiet, Pace(), 0
        self.printer = LinePrinter(lambda line, err: typer.echo(line, err=err))
        self.started = False

    def print_line(self, line: str, err: bool = False) -> None:
        if self.quiet and not err:
            return
        if self.started:
            self.printer.print_line(line, err)
        else:
            typer.echo(line, err=err)  # a thread would be forked with the ranks

    def report(self, report: Any) -> None:
        from fivefold.train.callbacks import SampleText

        if isinstance(report, StartedRun):
            self.steps = report.recipe.steps
            self.print_line(str(report))
            self.started = True
        elif isinstance(report, StepRecord):
            self.print_line(step_line(report, self.steps, self.pace.eta(report, self.steps)))
        elif isinstance(report, SampleText):
            self.print_line(str(report))
        elif isinstance(report, RestartedRun):
            self.printer.close()  # its thread would be forked with the ranks
            typer.echo(f"fivefold: {report}", err=True)
        elif isinstance(report, str):
            self.print_line(f"fivefold: {report}", err=True)
        else:
            facts: dict[str, Any] = {
                **asdict(report),
                "where": f"{report.where} of rank {report.rank}",
            }
            facts.pop("rank")
            self.print_line(f"fivefold: {out_of_memory(**facts)}", err=True)
