"""What every picture of a pipeline shares: cells, letters, colours, round ticks.

The terminal, the SVG and the trace take them from here, so that one thing looks alike everywhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fivefold.core.clock import Timeline
from fivefold.core.schedule.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Step
from fivefold.core.schedule.placement import Placement


class Kind(NamedTuple):
    """How one kind of step is lettered, called and coloured."""

    letter: str
    name: str
    colour: str


# Okabe and Ito's palette, which stays distinct for colour-blind readers; black text reads on all.
KINDS = {
    FORWARD: Kind("F", "forward", "#56b4e9"),
    INPUT_GRAD: Kind("I", "input gradient", "#f0e442"),
    WEIGHT_GRAD: Kind("W", "weight gradient", "#009e73"),
    BACKWARD: Kind("B", "full backward", "#d55e00"),
}
OVERLAPPED = Kind("X", "overlapped pair", "#cc79a7")


class Cell(NamedTuple):
    """One step as it is drawn; `chunk` is that of the forward where two actions overlap."""

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
    return [
        [
            _cell(step, chunks[rank], start, end)
            for step, start, end in zip(
                steps, timeline.starts[rank], timeline.ends[rank], strict=True
            )
        ]
        for rank, steps in enumerate(schedule.order)
    ]


def _cell(step: Step, chunks: dict[int, int], start: float, end: float) -> Cell:
    if isinstance(step, Action):
        label = str(step.microbatch)
        return Cell(step, KINDS[step.kind], chunks[step.stage], label, start, end)
    label = f"{step.forward.microbatch}/{step.backward.microbatch}"
    return Cell(step, OVERLAPPED, chunks[step.forward.stage], label, start, end)


def chunks_by_rank(placement: Placement) -> list[dict[int, int]]:
    """For each rank, which of its chunks a stage is; the mirror's stage counts as the second."""
    held: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for stage, home in enumerate(placement.homes):
        held[home].append(stage)
    if placement.mirrored:
        held = [own + other for own, other in zip(held, held[::-1], strict=True)]
    return [{stage: chunk for chunk, stage in enumerate(stages)} for stages in held]


def kinds_in(rows: list[list[Cell]]) -> list[Kind]:
    """The kinds that occur, in the order of the legend."""
    found = {cell.kind for row in rows for cell in row}
    return [kind for kind in (*KINDS.values(), OVERLAPPED) if kind in found]


def later_chunks(rows: list[list[Cell]], placement: Placement) -> str | None:
    """What the second and further shades stand for, if there are any."""
    if not any(cell.chunk for row in rows for cell in row):
        return None
    return "the other direction" if placement.mirrored else "later chunks"


def shade(colour: str, chunk: int) -> str:
    """The colour of a chunk: the first as it is, each later one lighter."""
    white = chunk / (chunk + 2)
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(each + (255 - each) * white):02x}" for each in channels)


def ticks(length: float, most: int) -> list[float]:
    """Round numbers from zero to `length`, at most `most` intervals of 1, 2 or 5 times a power."""
    power = 10.0 ** math.floor(math.log10(length / most))
    interval = next(power * each for each in (1, 2, 5, 10) if power * each * most >= length)
    return [number * interval for number in range(int(length / interval + 1e-9) + 1)]
