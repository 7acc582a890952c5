"""A pipeline timeline for the terminal and as a Perfetto trace.

Cells, letters, colours and ticks are also used by the SVG, so that a step looks the same
everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from rich.style import Style
from rich.text import Text

from fivefold.core import counted
from fivefold.core.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Placement,
    Step,
    Timeline,
    actions_of,
    memory_levels,
    needs,
)


class MarkKind(NamedTuple):
    """Letter, name and colour of one kind of step."""

    letter: str
    name: str
    colour: str


# Okabe and Ito's palette, which stays distinct for colour-blind readers; black text reads on all.
KINDS = {
    FORWARD: MarkKind("F", "forward", "#56b4e9"),
    INPUT_GRAD: MarkKind("I", "input gradient", "#f0e442"),
    WEIGHT_GRAD: MarkKind("W", "weight gradient", "#009e73"),
    BACKWARD: MarkKind("B", "full backward", "#d55e00"),
}
OVERLAPPED = MarkKind("X", "overlapped pair", "#cc79a7")


class Cell(NamedTuple):
    """One step as it is drawn; `chunk` is that of the forward if two actions overlap."""

    step: Step
    kind: MarkKind
    chunk: int
    label: str
    start: float
    end: float


def cells(timeline: Timeline) -> list[list[Cell]]:
    """Every step of every rank, ready to be drawn."""
    schedule, chunks = timeline.schedule, chunks_by_rank(timeline.schedule.placement)
    rows = zip(chunks, schedule.order, timeline.starts, timeline.ends, strict=True)
    return [
        [
            _cell(step, chunks, start, end)
            for step, start, end in zip(steps, starts, ends, strict=True)
        ]
        for chunks, steps, starts, ends in rows
    ]


def _cell(step: Step, chunks: dict[int, int], start: float, end: float) -> Cell:
    if isinstance(step, Action):
        label = str(step.microbatch)
        return Cell(step, KINDS[step.kind], chunks[step.stage], label, start, end)
    label = f"{step.forward.microbatch}/{step.backward.microbatch}"
    return Cell(step, OVERLAPPED, chunks[step.forward.stage], label, start, end)


def chunks_by_rank(placement: Placement) -> list[dict[int, int]]:
    """For each rank, the chunk number of each of its stages; a mirrored stage is the second."""
    by_rank: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for stage, home in enumerate(placement.homes):
        by_rank[home].append(stage)
    if placement.mirrored:
        by_rank = [own + other for own, other in zip(by_rank, by_rank[::-1], strict=True)]
    return [{stage: chunk for chunk, stage in enumerate(stages)} for stages in by_rank]


def kinds_in(rows: list[list[Cell]]) -> list[MarkKind]:
    """The kinds that occur, in the order of the legend."""
    cell_kinds = {cell.kind for row in rows for cell in row}
    return [kind for kind in (*KINDS.values(), OVERLAPPED) if kind in cell_kinds]


def later_chunks(rows: list[list[Cell]], placement: Placement) -> str | None:
    """What the lighter shades mean, if there are any."""
    if not any(cell.chunk for row in rows for cell in row):
        return None
    return "the other direction" if placement.mirrored else "later chunks"


def shade(colour: str, chunk: int) -> str:
    """The colour of a chunk: each later one is lighter."""
    white = chunk / (chunk + 2)
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels)


def ticks(length: float, most: int) -> list[float]:
    """Round numbers from 0 to `length`: at most `most` intervals of 1, 2 or 5 times a power of
    ten."""
    power = 10.0 ** math.floor(math.log10(length / most))
    interval = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= length)
    return [number * interval for number in range(int(length / interval + 1e-9) + 1)]


# --- Terminal: one row per rank, time from left to right

_LEAST_COLUMNS = 10
_MOST_RANKS = 32
_TICK_COLUMNS = 8
_TINY = 1e-6
_IDLE = "·"
_DIM = Style(dim=True)
_PLAIN = Style()


def render_timeline(timeline: Timeline, width: int, colour: bool) -> Text:
    """Draw the timeline in `width` columns, with an axis and a legend.

    With colour, a cell has the colour of its kind and shows its microbatch; without, it starts with
    the letter of its kind. If cells are narrower than a column, a column shows what fills most of
    it.
    """
    rows = cells(timeline)
    later = later_chunks(rows, timeline.schedule.placement)
    return render_cells(rows, timeline.makespan, later, width, colour)


def render_cells(
    rows: list[list[Cell]], makespan: float, later: str | None, width: int, colour: bool
) -> Text:
    """Draw the cells of every rank; `later` says what cells of later chunks mean."""
    gutter = len(f"rank {len(rows) - 1} ")
    num_columns = _num_columns(rows, makespan, max(_LEAST_COLUMNS, width - gutter))
    scale = num_columns / makespan
    lines: list[Text] = []
    numbered = False
    for rank in _shown(len(rows)):
        if rank is None:
            lines.append(Text(f"… {counted(len(rows) - _MOST_RANKS, 'rank')} left out …", _DIM))
            continue
        row = _row(_columns(rows[rank], scale, num_columns), scale, colour)
        numbered |= any(map(str.isdigit, row.plain))
        lines.append(Text(f"rank {rank}".ljust(gutter)).append_text(row))
    lines.append(_axis(makespan, scale, num_columns, gutter))
    lines += _wrapped(_legend(rows, later, numbered, colour), width)
    return Text("\n", no_wrap=True).join(lines)


def _num_columns(rows: list[list[Cell]], makespan: float, most: int) -> int:
    """Columns for the whole timeline: a multiple of the shortest step, if every time is a multiple
    of it and it gets at least two columns."""
    durations = {cell.end - cell.start for row in rows for cell in row}
    shortest = min(duration for duration in durations if duration > 0)
    units = [cell.end / shortest for row in rows for cell in row]
    num_units = round(makespan / shortest)
    integral = all(abs(unit - round(unit)) < _TINY for unit in units)
    return most // num_units * num_units if integral and most >= 2 * num_units else most


def _shown(num_ranks: int) -> list[int | None]:
    """The ranks to draw; None stands for those left out in the middle."""
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    half = _MOST_RANKS // 2
    return [*range(half), None, *range(num_ranks - half, num_ranks)]


def _columns(row: list[Cell], scale: float, num_columns: int) -> list[Cell | None]:
    """The cell to show in each column, or None if idle time fills most of it."""
    parts: list[list[tuple[float, Cell]]] = [[] for _ in range(num_columns)]
    for cell in row:
        left, right = cell.start * scale, cell.end * scale
        for column in range(int(left + _TINY), min(num_columns, math.ceil(right - _TINY))):
            parts[column].append((min(right, column + 1) - max(left, column), cell))
    return [_largest(part) for part in parts]


def _largest(parts: list[tuple[float, Cell]]) -> Cell | None:
    """The largest cell of the kind that fills most of a column."""
    filled: dict[MarkKind, float] = {}
    for share, cell in parts:
        filled[cell.kind] = filled.get(cell.kind, 0.0) + share
    kind = max(filled, key=lambda candidate: filled[candidate], default=None)
    if kind is None or 1 - sum(filled.values()) > filled[kind] + _TINY:
        return None
    return max((part for part in parts if part[1].kind == kind), key=lambda part: part[0])[1]


def _row(columns: list[Cell | None], scale: float, colour: bool) -> Text:
    text = Text()
    for _, group in itertools.groupby(columns, key=id):
        run = list(group)
        cell = run[0]
        if cell is None:
            text.append(_IDLE * len(run), _DIM if colour else _PLAIN)
            continue
        # A column that several cells share shows no number.
        shared = (cell.end - cell.start) * scale < 1 - _TINY
        style = _paint(cell.kind, cell.chunk) if colour else _PLAIN
        text.append(_inside(cell, len(run), shared, colour), style)
    return text


def _inside(cell: Cell, length: int, shared: bool, colour: bool) -> str:
    # A letter, or with colour a blank, separates the numbers of neighbours.
    number = cell.label if len(cell.label) < length and not shared else ""
    if colour:
        return number.ljust(length)
    letter = cell.kind.letter.lower() if cell.chunk else cell.kind.letter
    return (letter + number).ljust(length, "─")


def _paint(kind: MarkKind, chunk: int) -> Style:
    return Style(color="black", bgcolor=shade(kind.colour, chunk))


def _axis(makespan: float, scale: float, num_columns: int, gutter: int) -> Text:
    line = ""
    for tick in ticks(makespan, max(1, num_columns // _TICK_COLUMNS)):
        longer = line.ljust(round(tick * scale)) + f"|{tick:g}"
        line = longer if len(longer) <= num_columns else line
    return Text(" " * gutter + line, _DIM)


def _legend(rows: list[list[Cell]], later: str | None, numbered: bool, colour: bool) -> list[Text]:
    """What the marks mean."""
    items = [
        Text.assemble(("  ", _paint(kind, 0)), f" {kind.name}")
        if colour
        else Text(f"{kind.letter} {kind.name}")
        for kind in kinds_in(rows)
    ]
    items.append(Text(f"{_IDLE} idle"))
    if later:
        items.append(Text(f"{'lighter' if colour else 'lower case'}: {later}"))
    if numbered:
        items.append(Text("number: microbatch"))
    return items


def _wrapped(items: list[Text], width: int) -> list[Text]:
    """The items joined into lines that fit."""
    lines = [items[0]]
    for item in items[1:]:
        if len(lines[-1]) + 2 + len(item) <= width:
            lines[-1].append("  ").append_text(item)
        else:
            lines.append(item)
    return lines


# --- Chrome trace events, which ui.perfetto.dev opens: one thread per rank with a slice for each
# step, one counter per rank with its activations, and an arrow for each transfer between ranks

Event = dict[str, object]


def perfetto_trace(timeline: Timeline, unit_us: float = 1000.0) -> dict[str, object]:
    """The trace as a JSON value; `unit_us` is the schedule's unit of time in microseconds."""
    rows = cells(timeline)
    events = [
        *_names(timeline),
        *_slices(timeline, rows, unit_us),
        *_counters(timeline, rows, unit_us),
        *_transfers(timeline, rows, unit_us),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(timeline: Timeline) -> Iterator[Event]:
    yield _event("M", 0, "process_name", args={"name": f"pipeline {timeline.schedule.name}"})
    for rank in range(timeline.schedule.num_ranks):
        yield _event("M", rank, "thread_name", args={"name": f"rank {rank}"})
        yield _event("M", rank, "thread_sort_index", args={"sort_index": rank})


def _slices(timeline: Timeline, rows: list[list[Cell]], unit_us: float) -> Iterator[Event]:
    chunks = chunks_by_rank(timeline.schedule.placement)
    for rank, row in enumerate(rows):
        for cell in row:
            start, end = _stamp(cell.start, unit_us), _stamp(cell.end, unit_us)
            parts = [_action_args(action, chunks[rank]) for action in actions_of(cell.step)]
            args = parts[0] if len(parts) == 1 else {"forward": parts[0], "backward": parts[1]}
            times = {"ts": start, "dur": round(end - start, 3), "cat": cell.kind.name}
            yield _event("X", rank, str(cell.step), **times, args=args)


def _action_args(action: Action, chunks: dict[int, int]) -> dict[str, object]:
    return {**action._asdict(), "chunk": chunks[action.stage]}


def _counters(timeline: Timeline, rows: list[list[Cell]], unit_us: float) -> Iterator[Event]:
    """Activations during each step, and what is left if the rank idles after it."""
    schedule = timeline.schedule
    unit = schedule.num_ranks / schedule.num_stages
    for rank, row in enumerate(rows):
        levels = memory_levels(schedule.order[rank], unit)
        starts = [_stamp(cell.start, unit_us) for cell in row]
        for position, cell in enumerate(row):
            yield _level(rank, starts[position], levels[position])
            end = _stamp(cell.end, unit_us)
            if position + 1 == len(row):
                yield _level(rank, end, 0.0)
            elif starts[position + 1] > end:
                added = unit * sum(
                    action.kind == FORWARD for action in actions_of(row[position + 1].step)
                )
                yield _level(rank, end, levels[position + 1] - added)


def _level(rank: int, stamp: float, level: float) -> Event:
    args = {"microbatches": round(level, 9)}
    return _event("C", rank, f"activations of rank {rank}", ts=stamp, args=args)


def _transfers(timeline: Timeline, rows: list[list[Cell]], unit_us: float) -> Iterator[Event]:
    """Arrows start and end in the middle of a slice, so that rounding keeps them inside it."""
    sources = {
        _result(action): (rank, _stamp((cell.start + cell.end) / 2, unit_us))
        for rank, row in enumerate(rows)
        for cell in row
        for action in actions_of(cell.step)
        if action.kind != WEIGHT_GRAD
    }
    number = 0
    for rank, row in enumerate(rows):
        for cell in row:
            for cause in (cause for action in actions_of(cell.step) for cause in needs(action)):
                source, left = sources.get(_result(cause), (rank, 0.0))
                if source != rank:
                    entered = _stamp((cell.start + cell.end) / 2, unit_us)
                    arrow = {"cat": "transfer", "id": number}
                    yield _event("s", source, "transfer", ts=left, **arrow)
                    yield _event("f", rank, "transfer", ts=entered, bp="e", **arrow)
                    number += 1


def _result(action: Action) -> tuple[int, bool, int]:
    """What an action sends: an input gradient and a full backward send the same."""
    return action.stage, action.kind == FORWARD, action.microbatch


def _stamp(time: float, unit_us: float) -> float:
    """Microseconds, rounded to the nanosecond."""
    return round(time * unit_us, 3)


def _event(phase: str, rank: int, name: str, **fields: object) -> Event:
    return {"ph": phase, "pid": 0, "tid": rank, "name": name, **fields}
