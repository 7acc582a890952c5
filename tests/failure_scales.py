"""Goodput by the number of GPUs as a table and a picture, for docs/failures.md."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

from fivefold.planner.failures import ScalePoint
from fivefold.render import percent, rough_duration, svg_style


def designs_table(points: Sequence[ScalePoint]) -> list[list[str]]:
    """Goodput of every design at every scale, as rows of a table; the first has the heads."""
    designs = list(dict.fromkeys(point.design for point in points))
    rows = [["GPUs", "a failure in", *designs]]
    for gpus in dict.fromkeys(point.gpus for point in points):
        design_points = {point.design: point for point in points if point.gpus == gpus}
        first = next(iter(design_points.values()))
        shares = [percent(design_points[name].goodput) for name in designs]
        rows.append([f"{gpus:,}", rough_duration(first.mtbf), *shares])
    return rows


# --- A picture: goodput by the number of GPUs, a line for each design

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 640, 300, 46, 16, 36, 190
_COLOURS = ("#c2410c", "#b45309", "#0f766e", "#4338ca", "#9d174d")
_DARK = ("#fb923c", "#fbbf24", "#2dd4bf", "#a5b4fc", "#f9a8d4")


def scale_svg(points: Sequence[ScalePoint], at: int | None = None) -> str:
    """Goodput over the number of GPUs; `at` marks the job's own number."""
    designs = list(dict.fromkeys(point.design for point in points))
    least, most = min(p.gpus for p in points), max(p.gpus for p in points)

    def x(gpus: float) -> float:
        span = log10(most / least) or 1
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * log10(gpus / least) / span

    def y(share: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)

    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(share):.1f}" '
        f'y2="{y(share):.1f}"/><text class="end" x="{_LEFT - 6}" y="{y(share) + 4:.1f}">'
        f"{share:.0%}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for gpus in dict.fromkeys(point.gpus for point in points):
        count = f"{gpus // 1024}k" if gpus % 1024 == 0 else f"{gpus:,}"
        parts.append(f'<text class="mid" x="{x(gpus):.1f}" y="{_HEIGHT - 20}">{count}</text>')
    parts.append(
        f'<text class="mid" x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 5}">GPUs</text>'
    )
    if at is not None and least <= at <= most:
        parts.append(
            f'<line class="here" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"/>'
        )
    parts += _curves(points, designs, x, y)
    light = {".grid": "stroke:#d4d4d8", ".here": "stroke:#71717a;stroke-dasharray:3 3"}
    light |= {"text": "fill:#27272a", ".end": "text-anchor:end", ".mid": "text-anchor:middle"}
    dark = {".grid": "stroke:#3f3f46", "text": "fill:#e4e4e7", ".here": "stroke:#a1a1aa"}
    for i, (day, night) in enumerate(zip(_COLOURS, _DARK, strict=True)):
        light[f".c{i}"], dark[f".c{i}"] = f"stroke:{day}", f"stroke:{night}"
    style = svg_style("svg.failures", light, dark)
    return (
        f'<svg class="failures" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="Goodput by number of GPUs">'
        f"<style>{style}</style>{''.join(parts)}</svg>"
    )


def _curves(points: Sequence[ScalePoint], designs: list[str], x: Any, y: Any) -> list[str]:
    """A line for each design, its name at the end; names keep a distance."""
    parts: list[str] = []
    ends: list[tuple[float, int]] = []
    for i, name in enumerate(designs):
        own = [point for point in points if point.design == name]
        where = " ".join(f"{x(p.gpus):.1f},{y(p.goodput):.1f}" for p in own)
        parts.append(f'<polyline class="c{i}" fill="none" stroke-width="2" points="{where}"/>')
        ends.append((y(own[-1].goodput), i))
    floor = 0.0
    for end, i in sorted(ends):
        floor = max(end, floor + 14)
        left = _WIDTH - _RIGHT
        parts.append(
            f'<line class="c{i}" stroke-width="2" x1="{left + 4}" x2="{left + 16}" '
            f'y1="{floor:.1f}" y2="{floor:.1f}"/>'
            f'<text x="{left + 20}" y="{floor + 4:.1f}">{designs[i]}</text>'
        )
    return parts
