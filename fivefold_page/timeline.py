"""A pipeline timeline: when each rank runs which action, and what its idle slots wait for.

`view` makes the value that `static/timeline.js` draws and `text` prints from a simulated schedule;
`picture` makes it from any steps with their times, such as measured ones.

    {"headline": one sentence, "unit": "s" or "" (times without a unit), "makespan": in this unit,
     "bubble": share of the makespan or of the step, or None,
     "ticks": into which the makespan is divided,
     "marks": {letter: {"name", "colours": one for each chunk}}, "later": what lighter shades mean,
     "merged": a sentence if steps were merged, or None,
     "rows": [{"name", "kinds": a letter for each step, "stages": a number for each step (or one for
               all), "microbatches", "chunks": {stage: chunk}, "gaps": idle ticks before each step,
               "lengths": its own ticks, "pairs": {index: [stage, microbatch] of the backward},
               "waits": {index: the action that ends the gap before this step},
               "merged": {index: {"kind" (of the first), "count", "first", "last" (microbatches),
                                  "shares": {letter: share of the time}}}}, ...]}

Times are differences in whole ticks: they are short in JSON, and they add up without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fivefold.core import counted
from fivefold.core.schedule import BACKWARD, FORWARD, Action, Overlap, Step, Timeline, actions_of
from fivefold.render import (
    KINDS,
    OVERLAPPED,
    WIDTH,
    Cell,
    MarkKind,
    chunks_by_rank,
    duration,
    schedule_headline,
    shade,
    wrapped,
)
from fivefold_page.view import View

MANY = MarkKind("M", "many steps", "#999999")
_TICKS = 100_000
_MOST_STEPS = 6_000  # about 70 kB; with more, short steps are merged
_MOST_MERGED = 2_400  # columns of all rows together, if steps are merged
_COLUMNS = 2_000  # pixels of a wide screen: narrower steps are not visible
_LONGEST = 3  # waits in a terminal
_BY_LETTER = {kind.letter: kind for kind in (*KINDS.values(), OVERLAPPED, MANY)}


class TimelineRow(NamedTuple):
    """One row: steps in order with their times, the chunk of each stage, and for steps that waited
    the action that they waited for."""

    name: str
    steps: Sequence[Step]
    starts: Sequence[float]
    ends: Sequence[float]
    chunks: Mapping[int, int]
    waits: Mapping[Step, str]


def view(timeline: Timeline, *, seconds: float | None = None, bubble: float | None = None) -> View:
    """A simulated schedule; `seconds` is the length of its unit of time, if that is known, and
    `bubble` the share of the whole step in which the busiest rank waits, if the step is known."""
    schedule = timeline.schedule
    waits = waits_by_rank(timeline, timeline.makespan / _COLUMNS)
    chunks = chunks_by_rank(schedule.placement)
    rows = [
        TimelineRow(f"rank {rank}", steps, starts, timeline.ends[rank], chunks[rank], waits[rank])
        for rank, (steps, starts) in enumerate(zip(schedule.order, timeline.starts, strict=True))
    ]
    makespan = None if seconds is None else duration(timeline.makespan * seconds)
    of_step = None if bubble is None else f"{bubble:.1%} of the step"
    return picture(
        rows,
        timeline.makespan,
        headline=schedule_headline(timeline, makespan, of_step),
        seconds=seconds,
        bubble=timeline.bubble_makespan if bubble is None else bubble,
        mirrored=schedule.placement.mirrored,
    )


def waits_by_rank(timeline: Timeline, least: float) -> list[dict[Step, str]]:
    """For each rank the steps after idle slots longer than `least`, and what they wait for."""
    causes: list[dict[Step, str]] = [{} for _ in timeline.schedule.order]
    for wait in timeline.waits(least):
        causes[wait.rank][wait.step] = str(wait.cause)
    return causes


def picture(
    rows: Sequence[TimelineRow],
    makespan: float,
    *,
    headline: str,
    seconds: float | None = None,
    bubble: float | None = None,
    mirrored: bool = False,
) -> View:
    """Any steps with their times, which end by `makespan`; `seconds` as in `view`."""
    # A number of ticks with which multiples of the shortest step are exact.
    pairs = (pair for row in rows for pair in zip(row.starts, row.ends, strict=True))
    shortest = min((end - start for start, end in pairs if end > start), default=makespan)
    num_units = round(makespan / shortest)
    ticks = max(1, _TICKS // num_units) * num_units
    num_columns = max(1, min(_COLUMNS, _MOST_MERGED // len(rows)))
    merges = sum(len(row.steps) for row in rows) > _MOST_STEPS
    column = makespan / num_columns if merges else None
    drawn = [_row(row, ticks / makespan, column) for row in rows]
    num_chunks = 1 + max((chunk for row in rows for chunk in row.chunks.values()), default=0)
    later = "the other direction" if mirrored else "later chunks"
    return {
        "headline": headline,
        "unit": "" if seconds is None else "s",
        "makespan": makespan * (1.0 if seconds is None else seconds),
        "bubble": bubble,
        "ticks": ticks,
        "marks": _marks(drawn, num_chunks),
        "later": later if num_chunks > 1 else None,
        "merged": _merged_words(drawn, num_columns) if merges else None,
        "rows": drawn,
    }


def _marks(rows: list[View], num_chunks: int) -> dict[str, View]:
    """The kinds that occur, each with its name and its colour for each chunk."""
    used = {letter for row in rows for letter in row["kinds"]}
    used |= {letter for row in rows for step in row["merged"].values() for letter in step["shares"]}
    return {
        letter: {
            "name": kind.name,
            "colours": [shade(kind.colour, chunk) for chunk in range(num_chunks)],
        }
        for letter, kind in _BY_LETTER.items()
        if letter in used and kind != MANY
    }


def _merged_words(rows: list[View], num_columns: int) -> str:
    drawn = sum(len(row["kinds"]) for row in rows)
    steps = drawn + sum(step["count"] - 1 for row in rows for step in row["merged"].values())
    return (
        f"{steps:,} steps are too many to tell apart: neighbours narrower than 1/{num_columns:,} "
        f"of the makespan are drawn as one, {drawn:,} in all, with a band for each kind as high as "
        "its share of the time."
    )


def _row(row: TimelineRow, scale: float, column: float | None) -> View:
    """One row as short lists; steps narrower than `column` are merged."""
    alone = [range(i, i + 1) for i in range(len(row.steps))]
    spans = alone if column is None else _spans(row, column)
    starts = [round(row.starts[span.start] * scale) for span in spans]
    ends = [round(row.ends[span.stop - 1] * scale) for span in spans]
    heads = [row.steps[span.start] for span in spans]
    firsts = [step if isinstance(step, Action) else step.forward for step in heads]
    stages = [action.stage for action in firsts]
    return {
        "name": row.name,
        "kinds": "".join(
            MANY.letter if len(span) > 1 else _letter(step)
            for span, step in zip(spans, heads, strict=True)
        ),
        "stages": stages[:1] if len(set(stages)) == 1 else stages,
        "microbatches": [action.microbatch for action in firsts],
        "chunks": {str(stage): chunk for stage, chunk in row.chunks.items()},
        "gaps": [start - end for start, end in zip(starts, [0, *ends[:-1]], strict=True)],
        "lengths": [end - start for start, end in zip(starts, ends, strict=True)],
        "pairs": {
            str(i): [step.backward.stage, step.backward.microbatch]
            for i, step in enumerate(heads)
            if isinstance(step, Overlap)
        },
        "waits": {str(i): row.waits[step] for i, step in enumerate(heads) if step in row.waits},
        "merged": {str(i): _merged(row, span) for i, span in enumerate(spans) if len(span) > 1},
    }


def _letter(step: Step) -> str:
    return KINDS[step.kind].letter if isinstance(step, Action) else OVERLAPPED.letter


def _spans(row: TimelineRow, column: float) -> list[range]:
    """Steps that are drawn as one: neighbours within a column, and columns with the same kinds."""
    spans: list[tuple[range, frozenset[str]]] = []
    first = 0
    for stop in range(1, len(row.steps) + 1):
        alone = stop == len(row.steps) or row.starts[stop] - row.ends[stop - 1] > column
        if alone or row.ends[stop - 1] - row.starts[first] >= column:
            kinds = frozenset(_letter(step) for step in row.steps[first:stop])
            before, same = spans[-1] if spans else (range(0), frozenset[str]())
            near = before and row.starts[first] - row.ends[first - 1] <= column
            if near and same == kinds and len(before) > 1 and stop - first > 1:
                spans[-1] = (range(before.start, stop), kinds)
            else:
                spans.append((range(first, stop), kinds))
            first = stop
    return [span for span, _ in spans]


def _merged(row: TimelineRow, span: range) -> View:
    """What merged steps contain: how many, which microbatches, and how the time is spent."""
    total = row.ends[span.stop - 1] - row.starts[span.start]
    spent: dict[str, float] = {}
    for i in span:
        letter = _letter(row.steps[i])
        spent[letter] = spent.get(letter, 0.0) + row.ends[i] - row.starts[i]
    microbatches = [action.microbatch for i in span for action in actions_of(row.steps[i])]
    return {
        "kind": _letter(row.steps[span.start]),
        "count": len(span),
        "first": min(microbatches),
        "last": max(microbatches),
        "shares": {
            letter: round(spent[letter] / total, 4) for letter in _BY_LETTER if letter in spent
        },
    }


def text(view: View) -> list[str]:
    """The same for a terminal, and the longest idle slots with their reasons."""
    # Rich takes long to load, and only this function needs it.
    from fivefold.render import render_cells

    rows = _cells(view)
    drawn = render_cells(rows, view["makespan"], view["later"], WIDTH, colour=False)
    many = f"{MANY.letter}: {MANY.name}. {view['merged']}"
    notes = [] if view["merged"] is None else wrapped(many)
    lines = [*wrapped(view["headline"]), *drawn.plain.split("\n"), *notes]
    return [line.rstrip() for line in [*lines, *_longest_waits(view)]]


def _cells(view: View) -> list[list[Cell]]:
    """The steps of a view, with their times in its unit."""
    unit = view["makespan"] / view["ticks"]
    return [
        [_cell(row, i, start * unit, end * unit) for i, start, end in _times(row)]
        for row in view["rows"]
    ]


def _times(row: View) -> Iterator[tuple[int, int, int]]:
    """The index of every step, and its first and last tick."""
    tick = 0
    for i, (gap, length) in enumerate(zip(row["gaps"], row["lengths"], strict=True)):
        yield i, tick + gap, tick + gap + length
        tick += gap + length


def _cell(row: View, i: int, start: float, end: float) -> Cell:
    """One step; merged steps are named after the first of them."""
    many, letter = row["merged"].get(str(i)), row["kinds"][i]
    stage = row["stages"][i if len(row["stages"]) > 1 else 0]
    chunk, number = row["chunks"][str(stage)], row["microbatches"][i]
    step, label = Action(stage, many["kind"] if many else letter, number), str(number)
    if str(i) in row["pairs"]:
        backward = Action(row["pairs"][str(i)][0], BACKWARD, row["pairs"][str(i)][1])
        step = Overlap(step._replace(kind=FORWARD), backward)
        label = f"{number}/{backward.microbatch}"
    return Cell(step, _BY_LETTER[letter], chunk, "" if many else label, start, end)


def _longest_waits(view: View) -> Iterator[str]:
    unit = view["makespan"] / view["ticks"]
    slots = [
        (row["gaps"][i], row["name"], cell.step, row["waits"][str(i)], cell.start)
        for row, cells in zip(view["rows"], _cells(view), strict=True)
        for i, cell in enumerate(cells)
        if str(i) in row["waits"]
    ]
    write = duration if view["unit"] else "{:.4g}".format
    slots.sort(key=lambda slot: -slot[0])
    for ticks, name, step, cause, end in slots[:_LONGEST]:
        yield (
            f"{name} waits at {step} for {cause}: {write(ticks * unit)}, from "
            f"{write(end - ticks * unit)} to {write(end)}"
        )
    if len(slots) > _LONGEST:
        yield f"and {counted(len(slots) - _LONGEST, 'shorter wait')}"
