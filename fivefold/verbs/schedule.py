"""`fivefold schedule`: draw and time a pipeline schedule, and explain its idle time."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from fivefold.core.errors import FivefoldError, IllegalSchedule, UnknownName, counted
from fivefold.core.schedule import Placement, catalog
from fivefold.core.schedule.choose import choose
from fivefold.core.schedule.clock import (
    Costs,
    Goal,
    Objective,
    Timeline,
    peak_activations,
    play,
    steady_bubble,
)
from fivefold.core.schedule.family import Family
from fivefold.core.schedule.search import search
from fivefold.verbs import json_text

CostsOf = Callable[[Placement], Costs]
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
    family = choose(name)
    numbers = _numbers(family, stages, microbatches, chunks)
    costs_of = _costs_of(times, comm, overlap)
    goal = Goal(costs_of, _limit(memory_limit), _objective(objective))
    with _spinner(family):
        timeline, origin = _timeline(family, numbers, goal)
    _write_files(timeline, svg, trace)
    if as_json:
        typer.echo(json_text(describe(timeline, family, origin)))
    else:
        _print(timeline, family, origin)


def _numbers(
    family: Family, stages: int | None, microbatches: int | None, chunks: int | None
) -> tuple[int, int, int]:
    """(p, m, v) from the file or the options, checked for the schedule."""
    own = family.only or (None, None, family.default_chunks)
    given = {"--stages": stages, "--microbatches": microbatches, "--chunks": chunks}
    known = {
        flag: default if number is None else number
        for (flag, number), default in zip(given.items(), own, strict=True)
    }
    numbers = tuple(number for number in known.values() if number is not None)
    if len(numbers) < len(known):
        missing = " and ".join(flag for flag, number in known.items() if number is None)
        raise IllegalSchedule(f"give {missing}, such as --stages 4 --microbatches 8")
    p, m, v = numbers
    family.require(p, m, v)
    return p, m, v


def _limit(memory_limit: float | None) -> float | None:
    if memory_limit is not None and math.isnan(memory_limit):
        raise FivefoldError("--memory-limit nan: give a number of microbatches of at least 1")
    return None if memory_limit == math.inf else memory_limit


def _costs_of(times: str, comm: float, overlap: float) -> CostsOf:
    try:
        forward, backward, weight = (float(one) for one in times.split(","))
    except ValueError as error:
        raise FivefoldError(
            f"--times {times!r}: give three numbers F,B,W, such as --times 1,1.1,0.7"
        ) from error
    if not (0 < forward < 1e12 and 0 < backward < 1e12 and 0 <= weight < 1e12):
        raise FivefoldError(f"--times {times!r}: F and B must be above 0, W not below it")
    if not 0 <= comm < 1e12:
        raise FivefoldError(f"--comm {comm}: give a time of at least 0")
    if not 0 < overlap < 1e6:
        raise FivefoldError(f"--overlap {overlap}: give a factor above 0, 1 for no gain")

    def costs_of(placement: Placement) -> Costs:
        return Costs.uniform(placement, (forward, backward, weight), comm, overlap)

    return costs_of


def _objective(text: str) -> Objective:
    if text not in get_args(Objective):
        raise UnknownName("objective", text, get_args(Objective))
    return cast(Objective, text)


def _spinner(family: Family) -> AbstractContextManager[object]:
    """A spinner while `auto` searches, if standard error is a terminal."""
    if family.name != catalog.AUTO or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("searching schedules")


def _timeline(
    family: Family, numbers: tuple[int, int, int], goal: Goal
) -> tuple[Timeline, str | None]:
    """The simulated schedule, and for `auto` its origin."""
    if family.name == catalog.AUTO:
        schedule, origin = search(*numbers, goal)
    else:
        schedule, origin = family.make(*numbers), None
        peak = max(peak_activations(schedule))
        if goal.memory_limit is not None and peak > goal.memory_limit:
            raise IllegalSchedule(
                f"{family.name} has {counted(peak, 'microbatch')} in flight, above the limit of "
                f"{goal.memory_limit:g}: raise --memory-limit, or let auto search within it"
            )
    return play(schedule, goal.costs_of(schedule.placement)), origin


def describe(timeline: Timeline, family: Family, origin: str | None) -> dict[str, Any]:
    """What is printed, as JSON."""
    from fivefold.report.pipeline_words import explain

    schedule = timeline.schedule
    table: dict[str, Any] = {
        "name": schedule.name,
        "stages": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "placement": schedule.placement.kind,
        "asynchronous": schedule.asynchronous,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "ideal": timeline.ideal,
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": peak_activations(schedule),
        "order": schedule.texts(),
        "because": explain(timeline, family),
    }
    if schedule.asynchronous:
        table["weight_versions"] = list(schedule.weight_versions)
        table["bubble_steady"] = steady_bubble(timeline, family.make)
    if origin is not None:
        table["origin"] = origin
    return table


def _write_files(timeline: Timeline, svg: Path | None, trace: Path | None) -> None:
    from fivefold.report import write_text
    from fivefold.report.pipeline_svg import timeline_svg
    from fivefold.report.pipeline_text import perfetto_trace

    steps = sum(map(len, timeline.schedule.order))
    if (svg or trace) and steps > MOST_DRAWN:
        raise FivefoldError(
            f"{steps:,} steps are too many for one picture or trace: lower --microbatches until "
            f"there are at most {MOST_DRAWN:,}, or leave --svg and --trace out"
        )
    if svg is not None:
        write_text(svg, timeline_svg(timeline))
    if trace is not None:
        write_text(trace, json.dumps(perfetto_trace(timeline)))


def _print(timeline: Timeline, family: Family, origin: str | None) -> None:
    from rich.console import Console

    from fivefold.report.pipeline_text import render_timeline
    from fivefold.report.pipeline_words import explain, summary_lines

    console = Console()
    colour = console.color_system is not None and not console.no_color
    console.print(render_timeline(timeline, console.width, colour))
    chosen = [] if origin is None else [f"auto chose: {origin}"]
    for line in (*summary_lines(timeline), *chosen, *explain(timeline, family)):
        console.print(line, highlight=False, markup=False)
