"""`fivefold schedule`: draw and time a pipeline schedule, and explain its idle time."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fivefold.api.scheduling import TimedSchedule, schedule
from fivefold.core import FivefoldError
from fivefold.core.schedule import catalog
from fivefold.verbs import json_text

# Actions in one picture or trace: browsers still open a file of this size.
MOST_DRAWN = 200_000


def run(
    name: Annotated[
        str, typer.Argument(help=f"One of {', '.join(catalog.names())}; or a CSV or text file.")
    ],
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks (p).")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per step (m).")] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Chunks per rank, v (default: the fewest; auto: at most 2).")
    ] = None,
    times: Annotated[
        str, typer.Option(help="F,B,W: forward, input gradient and weight gradient of a stage.")
    ] = "1,1,1",
    comm: Annotated[float, typer.Option(help="Time of a transfer between ranks.")] = 0.0,
    overlap: Annotated[
        float, typer.Option(help="An overlapped forward and backward take X·(F+B+W).")
    ] = 1.0,
    memory_limit: Annotated[
        float | None, typer.Option(help="Maximum number of microbatches in flight on a rank.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What auto minimizes: makespan or span.")
    ] = "makespan",
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw and time a pipeline schedule."""
    with _spinner(name):
        result = schedule(
            name,
            stages=stages,
            microbatches=microbatches,
            chunks=chunks,
            times=times,
            comm=comm,
            overlap=overlap,
            memory_limit=memory_limit,
            objective=objective,
        )
    _write_files(result, svg, trace)
    if as_json:
        typer.echo(json_text(result.to_json()))
    else:
        _print(result)


def _spinner(name: str) -> AbstractContextManager[object]:
    """A spinner while `auto` searches, if standard error is a terminal."""
    if name.lower() != catalog.AUTO or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("searching schedules")


def _write_files(found: TimedSchedule, svg: Path | None, trace: Path | None) -> None:
    from fivefold.render import write_text

    steps = sum(map(len, found.timeline.schedule.order))
    if (svg or trace) and steps > MOST_DRAWN:
        raise FivefoldError(
            f"{steps:,} steps are too many for one picture or trace: lower --microbatches until "
            f"there are at most {MOST_DRAWN:,}, or leave --svg and --trace out"
        )
    if svg is not None:
        write_text(svg, found.svg())
    if trace is not None:
        write_text(trace, json.dumps(found.trace()))


def _print(found: TimedSchedule) -> None:
    from rich.console import Console

    from fivefold.render import render_timeline

    console = Console()
    colour = console.color_system is not None and not console.no_color
    console.print(render_timeline(found.timeline, console.width, colour))
    for line in found.lines():
        console.print(line, highlight=False, markup=False)
