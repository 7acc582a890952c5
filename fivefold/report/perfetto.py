"""A timeline as Chrome trace events, which ui.perfetto.dev opens.

One thread a rank with a slice for each step, one counter a rank with the activations it holds, and
an arrow for each transfer between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.core.clock import Timeline, memory_levels, needs
from fivefold.core.schedule.action import FORWARD, WEIGHT_GRAD, Action, actions_of
from fivefold.report.pipeline_marks import Cell, cells, chunks_by_rank

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
            parts = [_part(action, chunks[rank]) for action in actions_of(cell.step)]
            args = parts[0] if len(parts) == 1 else {"forward": parts[0], "backward": parts[1]}
            duration = round(end - start, 3)
            times = {"ts": start, "dur": duration, "cat": cell.kind.name}
            yield _event("X", rank, str(cell.step), **times, args=args)


def _part(action: Action, chunks: dict[int, int]) -> dict[str, object]:
    return {**action._asdict(), "chunk": chunks[action.stage]}


def _counters(timeline: Timeline, rows: list[list[Cell]], unit_us: float) -> Iterator[Event]:
    """The level while each step runs, and what is left wherever a rank idles after one."""
    schedule = timeline.schedule
    unit = schedule.num_ranks / schedule.num_stages
    for rank, row in enumerate(rows):
        levels = memory_levels(schedule.order[rank], unit)
        starts = [_stamp(cell.start, unit_us) for cell in row]
        for place, cell in enumerate(row):
            yield _level(rank, starts[place], levels[place])
            end = _stamp(cell.end, unit_us)
            if place + 1 == len(row):
                yield _level(rank, end, 0.0)
            elif starts[place + 1] > end:
                added = unit * _num_forwards(row[place + 1])
                yield _level(rank, end, levels[place + 1] - added)


def _num_forwards(cell: Cell) -> int:
    return sum(action.kind == FORWARD for action in actions_of(cell.step))


def _level(rank: int, stamp: float, held: float) -> Event:
    args = {"microbatches": round(held, 9)}
    return _event("C", rank, f"activations of rank {rank}", ts=stamp, args=args)


def _transfers(timeline: Timeline, rows: list[list[Cell]], unit_us: float) -> Iterator[Event]:
    """Arrows leave and enter in the middle of a slice, which rounding cannot move out of it."""
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
    """What an action delivers: an input gradient and a full backward deliver the same."""
    return action.stage, action.kind == FORWARD, action.microbatch


def _stamp(time: float, unit_us: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(time * unit_us, 3)


def _event(phase: str, rank: int, name: str, **fields: object) -> Event:
    return {"ph": phase, "pid": 0, "tid": rank, "name": name, **fields}
