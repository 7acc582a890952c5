"""A pipeline schedule: a timeline in characters or SVG, its rows as JSON, and what it means."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Callable, Iterator
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
    ClosedForm,
    Family,
    Placement,
    Step,
    Timeline,
    actions_of,
    memory_levels,
    needs,
    peak_activations,
    steady_bubble,
)
from fivefold.render.text import percent, svg_style


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
    # Columns for the whole timeline: a multiple of the shortest step, if every time is a multiple
    # of it and it gets at least two columns.
    most = max(_LEAST_COLUMNS, width - gutter)
    durations = {cell.end - cell.start for row in rows for cell in row}
    shortest = min(duration for duration in durations if duration > 0)
    units = [cell.end / shortest for row in rows for cell in row]
    num_units = round(makespan / shortest)
    integral = all(abs(unit - round(unit)) < _TINY for unit in units)
    num_columns = most // num_units * num_units if integral and most >= 2 * num_units else most
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
    line = ""
    for tick in ticks(makespan, max(1, num_columns // _TICK_COLUMNS)):
        longer = line.ljust(round(tick * scale)) + f"|{tick:g}"
        line = longer if len(longer) <= num_columns else line
    lines.append(Text(" " * gutter + line, _DIM))
    lines += _wrapped(_legend(rows, later, numbered, colour), width)
    return Text("\n", no_wrap=True).join(lines)


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
            parts: list[dict[str, object]] = [
                {**action._asdict(), "chunk": chunks[rank][action.stage]}
                for action in actions_of(cell.step)
            ]
            args = parts[0] if len(parts) == 1 else {"forward": parts[0], "backward": parts[1]}
            times = {"ts": start, "dur": round(end - start, 3), "cat": cell.kind.name}
            yield _event("X", rank, str(cell.step), **times, args=args)


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


_SMALLEST_DECIMAL = 1e-6  # shorter steps would need too many decimals


def time_writer(timeline: Timeline) -> Callable[[float], str]:
    """A function that writes times with as many decimals as the shortest step needs, at least one;
    very short times as powers of ten."""
    durations = (timeline.costs.of(step) for steps in timeline.schedule.order for step in steps)
    shortest = min((duration for duration in durations if duration > 0), default=1.0)
    if shortest < _SMALLEST_DECIMAL:
        return "{:g}".format
    digits = max(3, 2 - math.floor(math.log10(shortest)))

    def write(time: float) -> str:
        text = f"{time:.{digits}f}".rstrip("0")
        return text + "0" if text.endswith(".") else text

    return write


def schedule_headline(
    timeline: Timeline, makespan: str | None = None, bubble: str | None = None
) -> str:
    """The timeline in one line, for a title or a screen reader.

    `makespan`: its text, if times have a unit; `bubble`: its text, if it is not a share of the
    makespan.
    """
    schedule = timeline.schedule
    written = time_writer(timeline)(timeline.makespan) if makespan is None else makespan
    label = " (ASYNCHRONOUS)" if schedule.asynchronous else ""
    chunks = f", {schedule.num_chunks} chunks a rank" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}{label}: {counted(schedule.num_ranks, 'rank')}{chunks}, "
        f"{counted(schedule.num_microbatches, 'microbatch')}, makespan {written}, "
        f"bubble {bubble or percent(timeline.bubble_makespan)}"
    )


def summary_lines(timeline: Timeline) -> list[str]:
    """The numbers of a timeline, as a small table."""
    write, peaks = time_writer(timeline), peak_activations(timeline.schedule)
    least, most = min(peaks), max(peaks)
    peak_text = f"{most:g} on every rank" if least == most else f"{least:g}–{most:g} by rank"
    rows = {
        "makespan": write(timeline.makespan),
        "span": write(timeline.span),
        "ideal": write(timeline.ideal),
        "bubble": f"{percent(timeline.bubble_makespan)} of the makespan, "
        f"{percent(timeline.bubble_span)} of the span, "
        f"{percent(timeline.bubble_ratio)} of the ideal",
        "peak activations": f"{peak_text}, in microbatches of a full stage",
    }
    return [f"{name:<17} {value}" for name, value in rows.items()]


def explain_schedule(timeline: Timeline, family: Family | None) -> list[str]:
    """Sentences about the cause of the bubble, the meaning of its rates, and its memory."""
    return [
        *_asynchrony(timeline, family),
        *_bubble(timeline, family),
        *_span(timeline),
        *_memory(timeline),
    ]


def _asynchrony(timeline: Timeline, family: Family | None) -> Iterator[str]:
    versions = timeline.schedule.weight_versions
    if timeline.schedule.asynchronous:
        yield (
            "ASYNCHRONOUS: gradients are computed on older weights, which is not what one device "
            f"computes. Weight versions by rank: {', '.join(map(str, versions))}; gradient delay "
            f"in updates: {', '.join(str(version - 1) for version in versions)}."
        )
        if family:
            steady = percent(steady_bubble(timeline, family.make))
            yield (
                f"In steady state {steady} is bubble; what idles here beyond that is the fill and "
                "the drain of this window."
            )


def _bubble(timeline: Timeline, family: Family | None) -> Iterator[str]:
    write, idle = time_writer(timeline), timeline.makespan - timeline.ideal
    if idle <= 1e-9 * timeline.makespan:
        yield "There is no bubble: the busiest rank never idles."
        return
    reason = f". Why: {family.because}" if family else ""
    yield (
        f"Of the makespan {write(timeline.makespan)}, the busiest rank works "
        f"{write(timeline.ideal)} and {write(idle)} is bubble{reason}."
    )
    if family and family.closed_form:
        yield from _in_closed_form(timeline, family.closed_form)
    yield from _idle_slots(timeline, write)
    yield (
        "Two conventions for one bubble: "
        f"{percent(timeline.bubble_ratio)} is idle over the ideal time "
        f"{write(timeline.ideal)} (bubble_ratio), {percent(timeline.bubble_makespan)} is idle "
        f"over the whole makespan {write(timeline.makespan)} (bubble_makespan)."
    )


def _in_closed_form(timeline: Timeline, form: ClosedForm) -> Iterator[str]:
    """The published closed form with its numbers, only if it is exact."""
    schedule, costs = timeline.schedule, timeline.costs
    by_stage = (costs.forward, costs.backward, costs.weight)
    if any(len(set(stage_values)) > 1 for stage_values in by_stage) or any(costs.transfer):
        return
    share, write = schedule.num_stages / schedule.num_ranks, time_writer(timeline)
    forward, backward, weight = (share * stage_values[0] for stage_values in by_stage)
    times = (forward, backward, weight)
    gains = "F&B" in form.text and costs.overlap != 1
    if gains or not form.holds(times, schedule.num_ranks, schedule.num_microbatches):
        return
    values = {"p": str(schedule.num_ranks), "v": str(schedule.num_chunks)}
    values |= {symbol: write(time) for symbol, time in zip("FBW", times, strict=True)}
    values["F&B"] = write(sum(times))
    symbols = dict.fromkeys(re.findall(r"F&B|[pvFBW]", form.text))
    numbers = ", ".join(f"{symbol}={values[symbol]}" for symbol in symbols)
    domain = f" where {form.domain}" if form.domain else ""
    which = "bubble" if form.of == "makespan" else "bubble within the span"
    yield (
        f"In closed form, for equal stages and free transfers, the time of the {which} is "
        f"{form.text}{domain}; here {numbers}."
    )


def _idle_slots(timeline: Timeline, write: Callable[[float], str]) -> Iterator[str]:
    rows = list(zip(timeline.schedule.order, timeline.starts, timeline.ends, strict=True))
    busy = sum(timeline.costs.of(step) for steps, _, _ in rows for step in steps)
    before = sum(starts[0] for _, starts, _ in rows)
    after = sum(timeline.makespan - ends[-1] for _, _, ends in rows)
    idle = len(rows) * timeline.makespan - busy
    who = "The one rank idles" if len(rows) == 1 else f"All {len(rows)} ranks together idle"
    yield (
        f"{who} {write(idle)}: {write(before)} before the first step, "
        f"{write(abs(idle - before - after))} between steps, {write(after)} after the last."
    )
    longest = max(timeline.waits(), key=lambda wait: round(wait.end - wait.start, 9), default=None)
    if longest:
        yield (
            f"The longest wait: rank {longest.rank} idles {write(longest.end - longest.start)} "
            f"from {write(longest.start)} to {write(longest.end)}, at {longest.step}, waiting for "
            f"{longest.cause}."
        )


def _span(timeline: Timeline) -> Iterator[str]:
    if timeline.makespan - timeline.span > 1e-9 * timeline.makespan:
        write = time_writer(timeline)
        yield (
            f"No rank is at work from zero to the end: from its own first start to its own last "
            f"end a rank takes at most {write(timeline.span)} (span), of which "
            f"{percent(timeline.bubble_span)} is idle; where a global gradient norm separates "
            f"steps, a step takes the makespan {write(timeline.makespan)}."
        )


def _memory(timeline: Timeline) -> Iterator[str]:
    peaks = peak_activations(timeline.schedule)
    most, least = max(peaks), min(peaks)
    unit = "of a full stage (1/p of the model)"
    if most == least:
        yield f"Every rank holds the activations of at most {counted(most, 'microbatch')} {unit}."
    else:
        num_equal = peaks.count(most) - 1
        company = f" (and {num_equal} more)" if num_equal else ""
        yield (
            f"Rank {peaks.index(most)}{company} holds the most activations, those of "
            f"{counted(most, 'microbatch')} {unit}; rank {peaks.index(least)} the least, {least:g}."
        )
    if timeline.schedule.placement.mirrored:
        yield (
            "Every rank holds the parameters of its own stage and of its mirror's: parameters, "
            "gradients and optimizer state are kept twice."
        )


_LEFT, _PLOT, _RIGHT = 70, 1000, 130
_WIDTH = _LEFT + _PLOT + _RIGHT
_TOP, _ROW, _HEIGHT, _FOOT = 48, 20, 16, 56
_BAR = 70
_DIGIT = 6.5
_SCOPE = ".fivefold-pipeline"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_LIGHT = {
    "text": "fill:#222",
    ".headline": "font-size:14px",
    ".paper": "fill:#fff",
    ".idle": "fill:#ececec",
    ".tick": "stroke:#bbb",
    ".peak": "fill:#777",
    ".steps": "stroke:#fff",
    ".steps text": "fill:#000;stroke:none;text-anchor:middle;pointer-events:none",
}
_DARK = {
    "text": "fill:#ddd",
    ".paper": "fill:#16181d",
    ".idle": "fill:#2b2f38",
    ".tick": "stroke:#555",
    ".peak": "fill:#999",
    ".steps": "stroke:#16181d",
    ".steps text": "fill:#000",
}


def timeline_svg(timeline: Timeline, title: str | None = None) -> str:
    """The SVG as text; `title` replaces the line of numbers above the picture."""
    rows = cells(timeline)
    text = schedule_headline(timeline)
    shown, spoken = (text, text) if title is None else (title, f"{title}: {text}")
    height = _TOP + _ROW * len(rows) + _FOOT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{_SCOPE[1:]}" width="{_WIDTH}" '
            f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'aria-label="{_safe(spoken)}">',
            f"<style>{_style(rows)}</style>",
            f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
            f'<text class="headline" x="{_LEFT}" y="20">{_safe(shown)}</text>',
            *_svg_axis(timeline.makespan, len(rows)),
            *_rows(timeline, rows),
            *_peaks(timeline),
            *_svg_legend(timeline, rows),
            "</svg>",
        ]
    )


def _safe(text: str) -> str:
    """Escaped for XML, with a replacement for each character that XML cannot have."""
    return html.escape(_NOT_XML.sub("\ufffd", text))


def _style(rows: list[list[Cell]]) -> str:
    """The fixed rules, and a fill for each kind and chunk."""
    cell_kinds = {(cell.kind, cell.chunk) for row in rows for cell in row}
    cell_kinds |= {(kind, 0) for kind in kinds_in(rows)}
    fills = {
        f".{kind.letter}{chunk}": f"fill:{shade(kind.colour, chunk)}"
        for kind, chunk in sorted(cell_kinds)
    }
    return svg_style(_SCOPE, _LIGHT | fills, _DARK)


def _svg_axis(makespan: float, num_rows: int) -> Iterator[str]:
    bottom = _TOP + _ROW * num_rows
    for tick in ticks(makespan, 12):
        x = _number(_LEFT + tick * _PLOT / makespan)
        yield f'<path class="tick" d="M{x} {_TOP - 4}V{bottom + 4}"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'


def _rows(timeline: Timeline, rows: list[list[Cell]]) -> Iterator[str]:
    scale, write = _PLOT / timeline.makespan, time_writer(timeline)
    idle = _idle_rows(timeline)
    # Lines between cells must not hide the narrowest cell.
    narrowest = min(cell.end - cell.start for row in rows for cell in row) * scale
    stroke = _number(min(0.6, narrowest / 8))
    for rank, row in enumerate(rows):
        middle = _TOP + _ROW * rank + 12
        yield f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">rank {rank}</text>'
        yield f'<g transform="translate({_LEFT} {_TOP + _ROW * rank})">'
        for start, end, label in idle[rank]:
            label = f"{label}, {write(start)}–{write(end)}"
            yield _rect("idle", start * scale, end * scale, label)
        yield f'<g class="steps" stroke-width="{stroke}">'
        for cell in row:
            left, right = cell.start * scale, cell.end * scale
            label = f"rank {rank}: {cell.step}, {write(cell.start)}–{write(cell.end)}"
            yield _rect(f"{cell.kind.letter}{cell.chunk}", left, right, label)
            if right - left >= _DIGIT * len(cell.label) + 2:
                yield f'<text x="{_number((left + right) / 2)}" y="12">{cell.label}</text>'
        yield "</g></g>"


def _idle_rows(timeline: Timeline) -> list[list[tuple[float, float, str]]]:
    """For each rank: when it idles, and what it waits for."""
    slots: list[list[tuple[float, float, str]]] = [[] for _ in timeline.schedule.order]
    for rank, start, end, step, cause in timeline.waits():
        slots[rank].append((start, end, f"rank {rank} waits at {step} for {cause}"))
    for rank, ends in enumerate(timeline.ends):
        if timeline.makespan - ends[-1] > 1e-9 * timeline.makespan:
            slots[rank].append((ends[-1], timeline.makespan, f"rank {rank} has finished"))
    return slots


def _rect(name: str, left: float, right: float, label: str) -> str:
    box = f'x="{_number(left)}" width="{_number(right - left)}" height="{_HEIGHT}"'
    return f'<rect class="{name}" {box}><title>{_safe(label)}</title></rect>'


def _peaks(timeline: Timeline) -> Iterator[str]:
    """A bar for each rank: its peak activations."""
    peaks = peak_activations(timeline.schedule)
    x = _LEFT + _PLOT + 12
    yield f'<text x="{x}" y="{_TOP - 8}">peak activations</text>'
    for rank, peak in enumerate(peaks):
        width, y = _BAR * peak / max(peaks), _TOP + _ROW * rank
        label = f"rank {rank} holds at most {counted(peak, 'microbatch')} of a full stage"
        yield f'<g transform="translate({x} {y})">{_rect("peak", 0, width, label)}'
        yield f'<text x="{_number(width + 4)}" y="12">{peak:g}</text></g>'


def _svg_legend(timeline: Timeline, rows: list[list[Cell]]) -> Iterator[str]:
    y = _TOP + _ROW * len(rows) + 30
    marks = [(f"{kind.letter}0", kind.name) for kind in kinds_in(rows)] + [("idle", "idle")]
    for position, (name, label) in enumerate(marks):
        x = _LEFT + 130 * position
        yield f'<rect class="{name}" x="{x}" y="{y}" width="14" height="14"/>'
        yield f'<text x="{x + 20}" y="{y + 11}">{label}</text>'
    if later := later_chunks(rows, timeline.schedule.placement):
        yield f'<text x="{_LEFT + 130 * len(marks)}" y="{y + 11}">lighter: {later}</text>'


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
