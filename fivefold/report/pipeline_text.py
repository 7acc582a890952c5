"""A pipeline timeline for the terminal: one row a rank, time from left to right."""

from __future__ import annotations

import itertools
import math

from rich.style import Style
from rich.text import Text

from fivefold.core.clock import Timeline
from fivefold.core.words import counted
from fivefold.report.pipeline_marks import Cell, Kind, cells, kinds_in, later_chunks, shade, ticks

_LEAST_COLUMNS = 10
_MOST_RANKS = 32
_TICK_COLUMNS = 8
_TINY = 1e-6
_IDLE = "·"
_DIM = Style(dim=True)
_PLAIN = Style()


def render_timeline(timeline: Timeline, width: int, colour: bool) -> Text:
    """Draw the timeline within `width` columns, with an axis and a legend.

    With colour a cell is painted by its kind and shows its microbatch; without, it starts with the
    kind's letter. Where cells are narrower than a column, a column shows what fills most of it.
    """
    rows = cells(timeline)
    later = later_chunks(rows, timeline.schedule.placement)
    return render_cells(rows, timeline.makespan, later, width, colour)


def render_cells(
    rows: list[list[Cell]], makespan: float, later: str | None, width: int, colour: bool
) -> Text:
    """Draw the cells of every rank; `later` says what cells of further chunks stand for."""
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
    """Whole columns for the shortest step, where every time is a multiple of it and two fit."""
    durations = {cell.end - cell.start for row in rows for cell in row}
    shortest = min(duration for duration in durations if duration > 0)
    units = [cell.end / shortest for row in rows for cell in row]
    num_units = round(makespan / shortest)
    whole = all(abs(unit - round(unit)) < _TINY for unit in units)
    return most // num_units * num_units if whole and most >= 2 * num_units else most


def _shown(num_ranks: int) -> list[int | None]:
    """The ranks to draw; None stands for those left out in the middle."""
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    half = _MOST_RANKS // 2
    return [*range(half), None, *range(num_ranks - half, num_ranks)]


def _columns(row: list[Cell], scale: float, num_columns: int) -> list[Cell | None]:
    """The cell to show in each column, or None where idling fills most of it."""
    parts: list[list[tuple[float, Cell]]] = [[] for _ in range(num_columns)]
    for cell in row:
        left, right = cell.start * scale, cell.end * scale
        for column in range(int(left + _TINY), min(num_columns, math.ceil(right - _TINY))):
            parts[column].append((min(right, column + 1) - max(left, column), cell))
    return [_largest(part) for part in parts]


def _largest(parts: list[tuple[float, Cell]]) -> Cell | None:
    """Of the kind that fills most of a column, the cell that fills most."""
    filled: dict[Kind, float] = {}
    for share, cell in parts:
        filled[cell.kind] = filled.get(cell.kind, 0.0) + share
    kind = max(filled, key=lambda each: filled[each], default=None)
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
        # A column that several cells share stands for all of them: no number then.
        shared = (cell.end - cell.start) * scale < 1 - _TINY
        style = _paint(cell.kind, cell.chunk) if colour else _PLAIN
        text.append(_inside(cell, len(run), shared, colour), style)
    return text


def _inside(cell: Cell, length: int, shared: bool, colour: bool) -> str:
    # A letter, or with colour a blank, keeps the numbers of neighbours apart.
    number = cell.label if len(cell.label) < length and not shared else ""
    if colour:
        return number.ljust(length)
    letter = cell.kind.letter.lower() if cell.chunk else cell.kind.letter
    return (letter + number).ljust(length, "─")


def _paint(kind: Kind, chunk: int) -> Style:
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
