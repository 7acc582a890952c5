"""The pipeline timeline of the page: when every rank does what, and why it idles.

`view(timeline, seconds=…)` is what the browser draws (`static/timeline.js`) and what `text` prints.
`picture(rows, …)` makes the same value from any steps with their times, such as measured ones.

    {"headline": one sentence, "unit": "s" or "" (times without a unit), "makespan": a float in it,
     "bubble": share of the makespan or None, "ticks": whole numbers that the makespan is cut into,
     "marks": {letter: {"name", "colours": one for each chunk}}, "later": what lighter shades mean,
     "merged": a sentence where steps were merged, or None,
     "rows": [{"name", "kinds": a letter for each step, "stages": a number for each step (or one for
               all), "microbatches", "chunks": {stage: chunk}, "gaps": idle ticks before each step,
               "lengths": its own ticks, "pairs": {place: [stage, microbatch] of the backward},
               "waits": {place: the action that ends the gap before it},
               "merged": {place: {"kind" (of the first), "count", "first", "last" (microbatches),
                                  "shares": {letter: share of the time}}}}, …]}

Times are whole ticks, as differences: short in JSON, and they add up without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fivefold.core.errors import counted
from fivefold.core.schedule import BACKWARD, FORWARD, Action, Overlap, Step, actions_of
from fivefold.core.schedule.clock import Timeline
from fivefold.page import View
from fivefold.report import WIDTH, duration, pipeline_words, wrapped
from fivefold.report.pipeline_text import KINDS, OVERLAPPED, Cell, MarkKind, chunks_by_rank, shade

MANY = MarkKind("M", "many steps", "#999999")
_TICKS = 100_000
_MOST_CELLS = 6_000  # some 70 kB
_MOST_MERGED = 2_400
_COLUMNS = 2_000  # as many pixels as a wide screen has: what is narrower is not seen
_LONGEST = 3
_BY_LETTER = {kind.letter: kind for kind in (*KINDS.values(), OVERLAPPED, MANY)}


class TimelineRow(NamedTuple):
    """One line of the picture: steps in their order, which chunk of the rank each stage is, and
    for steps that waited the action that they waited for."""

    name: str
    steps: Sequence[Step]
    starts: Sequence[float]
    ends: Sequence[float]
    chunks: Mapping[int, int]
    waits: Mapping[Step, str]


def view(timeline: Timeline, *, seconds: float | None = None) -> View:
    """The played schedule; `seconds` is what one unit of its times lasts, if they have a unit."""
    schedule = timeline.schedule
    waits: list[dict[Step, str]] = [{} for _ in schedule.order]
    for wait in timeline.waits(timeline.makespan / _COLUMNS):
        waits[wait.rank][wait.step] = str(wait.cause)
    chunks = chunks_by_rank(schedule.placement)
    rows = [
        TimelineRow(f"rank {rank}", steps, starts, timeline.ends[rank], chunks[rank], waits[rank])
        for rank, (steps, starts) in enumerate(zip(schedule.order, timeline.starts, strict=True))
    ]
    makespan = None if seconds is None else duration(timeline.makespan * seconds)
    return picture(
        rows,
        timeline.makespan,
        headline=pipeline_words.headline(timeline, makespan),
        seconds=seconds,
        bubble=timeline.bubble_makespan,
        mirrored=schedule.placement.mirrored,
    )


def picture(
    rows: Sequence[TimelineRow],
    makespan: float,
    *,
    headline: str,
    seconds: float | None = None,
    bubble: float | None = None,
    mirrored: bool = False,
) -> View:
    """Any steps with their times, all within `makespan`; what `seconds` is, `view` says."""
    ticks = _num_ticks(rows, makespan)
    most = max(1, min(_COLUMNS, _MOST_MERGED // len(rows)))
    merges = sum(len(row.steps) for row in rows) > _MOST_CELLS
    column = makespan / most if merges else None
    drawn = [_row(row, ticks / makespan, column) for row in rows]
    num_chunks = 1 + max((chunk for row in rows for chunk in row.chunks.values()), default=0)
    second = "the other direction" if mirrored else "later chunks"
    return {
        "headline": headline,
        "unit": "" if seconds is None else "s",
        "makespan": makespan * (1.0 if seconds is None else seconds),
        "bubble": bubble,
        "ticks": ticks,
        "marks": _marks(drawn, num_chunks),
        "later": second if num_chunks > 1 else None,
        "merged": _merging(drawn, most) if merges else None,
        "rows": drawn,
    }


def _num_ticks(rows: Sequence[TimelineRow], makespan: float) -> int:
    """So many that times which are multiples of the shortest step stay exact."""
    pairs = (pair for row in rows for pair in zip(row.starts, row.ends, strict=True))
    shortest = min((end - start for start, end in pairs if end > start), default=makespan)
    num_units = round(makespan / shortest)
    return max(1, _TICKS // num_units) * num_units


def _marks(rows: list[View], num_chunks: int) -> dict[str, View]:
    """How each kind that occurs is called, and its colour for each chunk."""
    found = {letter for row in rows for letter in row["kinds"]}
    found |= {letter for row in rows for one in row["merged"].values() for letter in one["shares"]}
    return {
        letter: {
            "name": kind.name,
            "colours": [shade(kind.colour, chunk) for chunk in range(num_chunks)],
        }
        for letter, kind in _BY_LETTER.items()
        if letter in found and kind != MANY
    }


def _merging(rows: list[View], most: int) -> str:
    steps = sum(len(row["kinds"]) for row in rows)
    whole = steps + sum(one["count"] - 1 for row in rows for one in row["merged"].values())
    return (
        f"{whole:,} steps are too many to tell apart: neighbours narrower than 1/{most:,} of the "
        f"makespan are drawn as one, {steps:,} in all, with a band for each kind as high as its "
        "share of the time."
    )


def _row(row: TimelineRow, scale: float, column: float | None) -> View:
    """One row as short lists; with a `column`, steps that are narrower are merged."""
    spans = [range(i, i + 1) for i in range(len(row.steps))]
    if column is not None:
        spans = _spans(row, column)
    starts = _rounded([row.starts[span.start] for span in spans], scale)
    ends = _rounded([row.ends[span.stop - 1] for span in spans], scale)
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
            str(place): [step.backward.stage, step.backward.microbatch]
            for place, step in enumerate(heads)
            if isinstance(step, Overlap)
        },
        "waits": {
            str(place): row.waits[step] for place, step in enumerate(heads) if step in row.waits
        },
        "merged": {
            str(place): _share_of(row, span) for place, span in enumerate(spans) if len(span) > 1
        },
    }


def _letter(step: Step) -> str:
    return KINDS[step.kind].letter if isinstance(step, Action) else OVERLAPPED.letter


def _rounded(times: list[float], scale: float) -> list[int]:
    return [round(time * scale) for time in times]


def _spans(row: TimelineRow, column: float) -> list[range]:
    """Places of steps that are drawn as one: neighbours that fill a column, and columns alike."""
    found: list[tuple[range, frozenset[str]]] = []
    first = 0
    for stop in range(1, len(row.steps) + 1):
        alone = stop == len(row.steps) or row.starts[stop] - row.ends[stop - 1] > column
        if alone or row.ends[stop - 1] - row.starts[first] >= column:
            kinds = frozenset(_letter(step) for step in row.steps[first:stop])
            before, same = found[-1] if found else (range(0), frozenset[str]())
            near = before and row.starts[first] - row.ends[first - 1] <= column
            if near and same == kinds and len(before) > 1 and stop - first > 1:
                found[-1] = (range(before.start, stop), kinds)
            else:
                found.append((range(first, stop), kinds))
            first = stop
    return [span for span, _ in found]


def _share_of(row: TimelineRow, span: range) -> View:
    """What is inside merged steps: how many, of which microbatches, and how the time is spent."""
    whole = row.ends[span.stop - 1] - row.starts[span.start]
    spent: dict[str, float] = {}
    for place in span:
        letter = _letter(row.steps[place])
        spent[letter] = spent.get(letter, 0.0) + row.ends[place] - row.starts[place]
    numbers = [action.microbatch for place in span for action in actions_of(row.steps[place])]
    return {
        "kind": _letter(row.steps[span.start]),
        "count": len(span),
        "first": min(numbers),
        "last": max(numbers),
        "shares": {
            letter: round(spent[letter] / whole, 4) for letter in _BY_LETTER if letter in spent
        },
    }


def text(view: View) -> list[str]:
    """The same picture for a terminal, and the longest idle slots with their reasons."""
    # Rich takes long to load, and only who prints needs it.
    from fivefold.report.pipeline_text import render_cells

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
        [_cell(row, place, start * unit, end * unit) for place, start, end in _times(row)]
        for row in view["rows"]
    ]


def _times(row: View) -> Iterator[tuple[int, int, int]]:
    """The place of every step, and its first and last tick."""
    now = 0
    for place, (gap, length) in enumerate(zip(row["gaps"], row["lengths"], strict=True)):
        yield place, now + gap, now + gap + length
        now += gap + length


def _cell(row: View, place: int, start: float, end: float) -> Cell:
    """One step, or several that were merged, which go by the first of them."""
    many, letter = row["merged"].get(str(place)), row["kinds"][place]
    stage = row["stages"][place if len(row["stages"]) > 1 else 0]
    chunk, number = row["chunks"][str(stage)], row["microbatches"][place]
    step, label = Action(stage, many["kind"] if many else letter, number), str(number)
    if str(place) in row["pairs"]:
        behind = row["pairs"][str(place)]
        step = Overlap(step._replace(kind=FORWARD), Action(behind[0], BACKWARD, behind[1]))
        label = f"{number}/{behind[1]}"
    return Cell(step, _BY_LETTER[letter], chunk, "" if many else label, start, end)


def _longest_waits(view: View) -> Iterator[str]:
    unit = view["makespan"] / view["ticks"]
    slots = [
        (row["gaps"][place], row["name"], cell.step, row["waits"][str(place)], cell.start)
        for row, cells in zip(view["rows"], _cells(view), strict=True)
        for place, cell in enumerate(cells)
        if str(place) in row["waits"]
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
