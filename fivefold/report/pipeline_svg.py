"""A pipeline timeline as one self-contained SVG: no script, no font, nothing to load.

Every step and every idle slot has a tooltip; colours follow the reader's light or dark page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from fivefold.core import counted
from fivefold.core.schedule import Timeline, peak_activations
from fivefold.report import svg_style
from fivefold.report.pipeline_text import Cell, cells, kinds_in, later_chunks, shade, ticks
from fivefold.report.pipeline_words import headline, time_writer

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
    text = headline(timeline)
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
            *_axis(timeline.makespan, len(rows)),
            *_rows(timeline, rows),
            *_peaks(timeline),
            *_legend(timeline, rows),
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


def _axis(makespan: float, num_rows: int) -> Iterator[str]:
    bottom = _TOP + _ROW * num_rows
    for tick in ticks(makespan, 12):
        x = _number(_LEFT + tick * _PLOT / makespan)
        yield f'<path class="tick" d="M{x} {_TOP - 4}V{bottom + 4}"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'


def _rows(timeline: Timeline, rows: list[list[Cell]]) -> Iterator[str]:
    scale, write = _PLOT / timeline.makespan, time_writer(timeline)
    idle = _idle_slots(timeline)
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


def _idle_slots(timeline: Timeline) -> list[list[tuple[float, float, str]]]:
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


def _legend(timeline: Timeline, rows: list[list[Cell]]) -> Iterator[str]:
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
