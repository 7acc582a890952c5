"""`fivefold schedule`: draw and time a pipeline schedule."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from fivefold.commands.job import one_of
from fivefold.commands.options import print_answer
from fivefold.core import FivefoldError, IllegalSchedule, counted
from fivefold.core.schedule import (
    Costs,
    Family,
    Goal,
    Objective,
    Placement,
    Timeline,
    catalog,
    choose,
    peak_activations,
    play,
    search,
    steady_bubble,
)

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
    from fivefold.render import write_text

    steps = sum(map(len, result.timeline.schedule.order))
    if (svg or trace) and steps > MOST_DRAWN:
        raise FivefoldError(
            f"{steps:,} steps are too many for one picture or trace: lower --microbatches until "
            f"there are at most {MOST_DRAWN:,}, or leave --svg and --trace out"
        )
    if svg is not None:
        write_text(svg, result.svg())
    if trace is not None:
        write_text(trace, json.dumps(result.trace()))
    if as_json:
        print_answer(result, as_json)
    else:
        from rich.console import Console

        from fivefold.render import render_timeline

        console = Console()
        colour = console.color_system is not None and not console.no_color
        console.print(render_timeline(result.timeline, console.width, colour))
        for line in result.lines():
            console.print(line, highlight=False, markup=False)


def _spinner(name: str) -> AbstractContextManager[object]:
    """A spinner while `auto` searches, if standard error is a terminal."""
    if name.lower() != catalog.AUTO or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("searching schedules")


CostsOf = Callable[[Placement], Costs]
MOST_STEPS = 20_000  # of a picture in a notebook, which is saved with it
_COLUMNS = 100


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule, simulated: `timeline` says when every action starts and ends.

    `str()` draws it, `to_json()` is what `fivefold schedule --json` prints.
    """

    timeline: Timeline
    family: Family
    origin: str | None = None  # of a schedule that was searched

    @property
    def name(self) -> str:
        return self.timeline.schedule.name

    @property
    def makespan(self) -> float:
        """Time from the first action to the last."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """Share of the makespan in which ranks idle."""
        return self.timeline.bubble_makespan

    @property
    def peak_activations(self) -> list[float]:
        """The most microbatches in flight, for each rank."""
        return peak_activations(self.timeline.schedule)

    @property
    def because(self) -> list[str]:
        """Why ranks idle and hold what they do."""
        from fivefold.render import explain_schedule

        return explain_schedule(self.timeline, self.family)

    def svg(self) -> str:
        """A picture that needs nothing else."""
        from fivefold.render import timeline_svg

        return timeline_svg(self.timeline)

    def trace(self) -> dict[str, object]:
        """The timeline for Perfetto, as JSON."""
        from fivefold.render import perfetto_trace

        return perfetto_trace(self.timeline)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold schedule --json` prints."""
        return describe(self.timeline, self.family, self.origin)

    def lines(self) -> list[str]:
        """The numbers and the reasons, below the picture."""
        from fivefold.render import summary_lines

        chosen = [] if self.origin is None else [f"auto chose: {self.origin}"]
        return [*summary_lines(self.timeline), *chosen, *self.because]

    def __repr__(self) -> str:
        return f"TimedSchedule({self.name}: makespan {self.makespan:g}, bubble {self.bubble:.1%})"

    def __str__(self) -> str:
        from fivefold.render import render_timeline

        drawn = render_timeline(self.timeline, _COLUMNS, False).plain
        return "\n".join([drawn, *self.lines()])

    def _repr_html_(self) -> str:
        from fivefold.render import schedule_html

        few = sum(map(len, self.timeline.schedule.order)) <= MOST_STEPS
        return schedule_html(self.svg() if few else None, self.lines())


def schedule(
    name: str | Path,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    times: str | Sequence[float] = (1, 1, 1),
    comm: float = 0.0,
    overlap: float = 1.0,
    memory_limit: float | None = None,
    objective: str = "makespan",
) -> TimedSchedule:
    """A pipeline schedule by name, `auto` or from a file, simulated on so many ranks (`stages`).

    `times`: forward, input gradient and weight gradient of a stage; `comm`: of a transfer between
    ranks. An overlapped forward and backward take `overlap` of both.
    """
    family = choose(str(name))
    numbers = _numbers(family, stages, microbatches, chunks)
    costs_of = _costs_of(times, comm, overlap)
    if memory_limit is not None and math.isnan(memory_limit):
        raise FivefoldError("--memory-limit nan: give a number of microbatches of at least 1")
    limit = None if memory_limit == math.inf else memory_limit
    least = cast(Objective, one_of("objective", objective, get_args(Objective)))
    goal = Goal(costs_of, limit, least)
    return TimedSchedule(*_timeline(family, numbers, goal))


def _numbers(
    family: Family, stages: int | None, microbatches: int | None, chunks: int | None
) -> tuple[int, int, int]:
    """(p, m, v) from the file or the options, checked for the schedule."""
    own = family.only or (None, None, family.default_chunks)
    counts = {"--stages": stages, "--microbatches": microbatches, "--chunks": chunks}
    known = {
        flag: default if number is None else number
        for (flag, number), default in zip(counts.items(), own, strict=True)
    }
    numbers = tuple(number for number in known.values() if number is not None)
    if len(numbers) < len(known):
        missing = " and ".join(flag for flag, number in known.items() if number is None)
        raise IllegalSchedule(f"give {missing}, such as --stages 4 --microbatches 8")
    p, m, v = numbers
    family.require(p, m, v)
    return p, m, v


def _costs_of(times: str | Sequence[float], comm: float, overlap: float) -> CostsOf:
    try:
        three = times.split(",") if isinstance(times, str) else times
        forward, backward, weight = (float(cost) for cost in three)
    except (TypeError, ValueError) as error:
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


def _timeline(
    family: Family, numbers: tuple[int, int, int], goal: Goal
) -> tuple[Timeline, Family, str | None]:
    """The simulated schedule, its family, and for `auto` its origin."""
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
    return play(schedule, goal.costs_of(schedule.placement)), family, origin


def describe(timeline: Timeline, family: Family, origin: str | None) -> dict[str, Any]:
    """What is printed, as JSON."""
    from fivefold.render import explain_schedule

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
        "because": explain_schedule(timeline, family),
    }
    if schedule.asynchronous:
        table["weight_versions"] = list(schedule.weight_versions)
        table["bubble_steady"] = steady_bubble(timeline, family.make)
    if origin is not None:
        table["origin"] = origin
    return table
