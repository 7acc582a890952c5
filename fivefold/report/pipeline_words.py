"""A pipeline timeline in words: what its parts are called and coloured, and its sentences.

The pictures (terminal, SVG, trace) take names, colours and number formats from here, so that one
thing looks and reads alike everywhere. Every number is computed from the timeline.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fivefold.core.clock import Timeline, peak_activations
from fivefold.core.schedule.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Step
from fivefold.core.schedule.catalog import Family
from fivefold.core.schedule.placement import Placement


class Kind(NamedTuple):
    """How one kind of step is lettered, called and coloured."""

    letter: str
    name: str
    colour: str


# Okabe and Ito's palette, which stays distinct for colour-blind readers; black text reads on all.
KINDS = {
    FORWARD: Kind("F", "forward", "#56b4e9"),
    INPUT_GRAD: Kind("I", "input gradient", "#e69f00"),
    WEIGHT_GRAD: Kind("W", "weight gradient", "#009e73"),
    BACKWARD: Kind("B", "full backward", "#d55e00"),
}
OVERLAPPED = Kind("X", "overlapped pair", "#cc79a7")


class Cell(NamedTuple):
    """One step as it is drawn; `chunk` is that of its forward where two actions overlap."""

    step: Step
    kind: Kind
    chunk: int
    label: str
    start: float
    end: float


def cells(timeline: Timeline) -> list[list[Cell]]:
    """Every step of every rank, ready to be drawn."""
    schedule = timeline.schedule
    chunks = chunks_by_rank(schedule.placement)
    rows: list[list[Cell]] = []
    for rank, steps in enumerate(schedule.order):
        times = zip(steps, timeline.starts[rank], timeline.ends[rank], strict=True)
        rows.append([_cell(step, chunks[rank], start, end) for step, start, end in times])
    return rows


def _cell(step: Step, chunks: dict[int, int], start: float, end: float) -> Cell:
    if isinstance(step, Action):
        chunk, label = chunks[step.stage], str(step.microbatch)
        return Cell(step, KINDS[step.kind], chunk, label, start, end)
    forward, backward = step
    label = f"{forward.microbatch}/{backward.microbatch}"
    return Cell(step, OVERLAPPED, chunks[forward.stage], label, start, end)


def chunks_by_rank(placement: Placement) -> list[dict[int, int]]:
    """For each rank, which of its chunks a stage is; a mirror's stage counts as the second."""
    held: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for stage, home in enumerate(placement.homes):
        held[home].append(stage)
    if placement.mirrored:
        held = [own + other for own, other in zip(held, held[::-1], strict=True)]
    return [{stage: chunk for chunk, stage in enumerate(stages)} for stages in held]


def shade(colour: str, chunk: int) -> str:
    """The colour of a chunk: the first as it is, each later one lighter."""
    white = chunk / (chunk + 2)
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(each + (255 - each) * white):02x}" for each in channels)


def ticks(length: float, most: int) -> list[float]:
    """Round numbers from zero to `length`, at most `most` steps apart: 1, 2 or 5 times a power."""
    power = 10 ** math.floor(math.log10(length / most))
    step = next(power * each for each in (1, 2, 5, 10) if power * each * most >= length)
    return [number * step for number in range(int(length / step * (1 + 1e-9)) + 1)]


def time_writer(timeline: Timeline) -> Callable[[float], str]:
    """Writes times with as many decimals as the shortest step needs, and at least one."""
    lasts = (timeline.costs.of(step) for steps in timeline.schedule.order for step in steps)
    shortest = min((last for last in lasts if last > 0), default=1.0)
    digits = max(3, 2 - math.floor(math.log10(shortest)))

    def write(time: float) -> str:
        text = f"{time:.{digits}f}".rstrip("0")
        return text + "0" if text.endswith(".") else text

    return write


def percent(share: float) -> str:
    """A fraction as a percentage with one decimal; adding zero turns −0.0 into 0.0."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"


def headline(timeline: Timeline) -> str:
    """The timeline in one line: a title, or what a screen reader says."""
    schedule, write = timeline.schedule, time_writer(timeline)
    label = " (ASYNCHRONOUS)" if schedule.asynchronous else ""
    chunks = f", {schedule.num_chunks} chunks a rank" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}{label}: {schedule.num_ranks} ranks{chunks}, "
        f"{schedule.num_microbatches} microbatches, makespan {write(timeline.makespan)}, "
        f"bubble {percent(timeline.bubble_makespan)}"
    )


def summary_lines(timeline: Timeline) -> list[str]:
    """The numbers of a timeline, as a small table."""
    write, peaks = time_writer(timeline), peak_activations(timeline.schedule)
    least, most = min(peaks), max(peaks)
    held = f"{most:g}" if least == most else f"{least:g}–{most:g}"
    rows = {
        "makespan": write(timeline.makespan),
        "span": write(timeline.span),
        "ideal": write(timeline.ideal),
        "bubble": f"{percent(timeline.bubble_makespan)} of the makespan, "
        f"{percent(timeline.bubble_span)} of the span, {percent(timeline.bubble_ratio)} of the ideal",
        "peak activations": f"{held} by rank, in microbatches of a full stage",
    }
    return [f"{name:<17} {value}" for name, value in rows.items()]


def explain(timeline: Timeline, family: Family | None) -> list[str]:
    """Sentences: why the bubble is there, what its two rates mean, what the memory peak is."""
    return [
        *_asynchrony(timeline),
        *_bubble(timeline, family),
        *_conventions(timeline),
        *_span(timeline),
        _memory(timeline),
    ]


def _asynchrony(timeline: Timeline) -> Iterator[str]:
    schedule = timeline.schedule
    if not schedule.asynchronous:
        return
    versions = schedule.weight_versions
    yield (
        "ASYNCHRONOUS: gradients are computed on older weights, so this is not what one device "
        f"computes. Weight versions by rank: {', '.join(map(str, versions))}; gradients late by "
        f"{', '.join(str(each - 1) for each in versions)} updates. There is no bubble in steady "
        "state; what idles here is the fill and the drain of this window."
    )


def _bubble(timeline: Timeline, family: Family | None) -> Iterator[str]:
    write, idle = time_writer(timeline), timeline.makespan - timeline.ideal
    if idle <= 1e-9 * timeline.makespan:
        yield "There is no bubble: the busiest rank never waits."
        return
    why = family.because if family else "no rank can work before its first input arrives"
    yield (
        f"Of {write(timeline.makespan)}, {write(idle)} is bubble: the busiest rank works "
        f"{write(timeline.ideal)}. Why: {why}."
    )
    if family and (numbers := _numbers_in(family.bubble, timeline)):
        yield (
            "In closed form, for equal stages, no transfers and enough microbatches, the bubble is "
            f"{family.bubble}; here {numbers}."
        )
    yield _idle_parts(timeline, write)
    if longest := max(timeline.waits(), key=lambda wait: round(wait.end - wait.start, 9), default=None):
        yield (
            f"The longest wait: rank {longest.rank} idles {write(longest.end - longest.start)} from "
            f"{write(longest.start)} to {write(longest.end)}, at {longest.step}, waiting for "
            f"{longest.cause}."
        )
