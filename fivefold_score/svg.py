"""Predicted and measured step times as one self-contained SVG: no script, nothing to load.

Left: every run on two logarithmic axes. Right: predicted over measured, one line per source.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fivefold.render import svg_style

_SIDE, _TOP, _LEFT, _GAP, _FOOT = 420, 40, 60, 190, 44
_STRIP = 420
_WIDTH = _LEFT + _SIDE + _GAP + _STRIP + 70
_LEAST_ROW = 18
_REACH = 2.0  # the right side shows ratios from 1/2 to 2; others are drawn at its edge
_SCOPE = ".fivefold-score"
_LIGHT = {
    "path": "fill:none",
    "text": "fill:#222",
    ".headline": "font-size:14px",
    ".paper": "fill:#fff",
    ".line": "stroke:#bbb",
    ".even": "stroke:#222",
    ".dots": "stroke-linecap:round;stroke-width:4;stroke-opacity:.55",
}
_DARK = {
    "text": "fill:#ddd",
    ".paper": "fill:#16181d",
    ".line": "stroke:#555",
    ".even": "stroke:#ddd",
}


class Dot(NamedTuple):
    """A run: its source, its measured seconds, and the range of its predicted seconds."""

    family: str
    measured: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Predicted over measured: of the nearer end of the range, or 1 inside it."""
        return min(max(self.measured, self.low), self.high) / self.measured


def score_svg(dots: Sequence[Dot]) -> str:
    """The SVG as text."""
    families = sorted({dot.family for dot in dots})
    height = _TOP + max(_SIDE, _LEAST_ROW * len(families)) + _FOOT
    title = f"{len(dots):,} runs of {len(families)} sources: predicted and measured step time"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{_SCOPE[1:]}" width="{_WIDTH}" '
            f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}">',
            f"<style>{svg_style(_SCOPE, _LIGHT, _DARK)}</style>",
            f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
            f'<text class="headline" x="{_LEFT}" y="20">{title}</text>',
            *(_scatter(dots, families) if dots else ()),
            *(_strips(dots, families) if dots else ()),
            "</svg>",
        ]
    )


def colour(number: int, total: int) -> str:
    """One of `total` hues that are as far apart as they can be."""
    return f"hsl({round(360 * number / max(total, 1))},70%,45%)"


def _scatter(dots: Sequence[Dot], families: Sequence[str]) -> Iterator[str]:
    """Measured along x, predicted along y; on the thick line both are equal."""
    values = [value for dot in dots for value in (dot.measured, dot.low, dot.high)]
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    scale = _SIDE / (last - first)

    def point(measured: float, predicted: float) -> tuple[float, float]:
        right, up = (math.log10(seconds) - first for seconds in (measured, predicted))
        return _LEFT + right * scale, _TOP + _SIDE - up * scale

    for power in range(first, last + 1):
        x, y = point(10.0**power, 10.0**power)
        yield f'<path class="line" d="M{_number(x)} {_TOP}v{_SIDE}M{_LEFT} {_number(y)}h{_SIDE}"/>'
        yield _label(x, _TOP + _SIDE + 16, "middle", f"{10.0**power:g}")
        yield _label(_LEFT - 6, y + 4, "end", f"{10.0**power:g}")
    yield f'<path class="even" d="M{_LEFT} {_TOP + _SIDE}L{_LEFT + _SIDE} {_TOP}"/>'
    yield _label(_LEFT + _SIDE / 2, _TOP + _SIDE + 34, "middle", "measured, s")
    yield _label(_LEFT, _TOP - 6, "start", "predicted, s")
    for number, family in enumerate(families):
        family_dots = [dot for dot in dots if dot.family == family]
        steps = "".join(
            _mark(*point(dot.measured, dot.low), *point(dot.measured, dot.high))
            for dot in family_dots
        )
        yield _path(steps, colour(number, len(families)), family, len(family_dots))


def _strips(dots: Sequence[Dot], families: Sequence[str]) -> Iterator[str]:
    """One line per source, with a dot for each run at predicted over measured."""
    left = _LEFT + _SIDE + _GAP
    row = max(_LEAST_ROW, _SIDE / len(families))
    bottom = _TOP + row * len(families)

    def across(ratio: float) -> float:
        drawn_ratio = min(max(ratio, 1 / _REACH), _REACH)
        return left + _STRIP * (math.log(drawn_ratio, _REACH) + 1) / 2

    for ratio in (0.5, 0.75, 0.9, 1.0, 1.1, 1.33, 2.0):
        x, name = across(ratio), "even" if ratio == 1 else "line"
        yield f'<path class="{name}" d="M{_number(x)} {_TOP}V{_number(bottom)}"/>'
        yield _label(x, bottom + 16, "middle", f"{ratio:g}")
    yield _label(left, _TOP - 6, "start", "predicted over measured; further out at the edge")
    for number, family in enumerate(families):
        family_dots = [dot for dot in dots if dot.family == family]
        y = _TOP + row * (number + 0.5)
        yield _label(left - 10, y + 4, "end", f"{family} ({len(family_dots)})")
        # Dots with equal ratios would hide each other: spread them over the height of the row.
        heights = [y + row * 0.6 * (index % 7 - 3) / 7 for index in range(len(family_dots))]
        spots = [
            (across(dot.ratio), height) for dot, height in zip(family_dots, heights, strict=True)
        ]
        steps = "".join(_mark(x, height, x, height) for x, height in spots)
        yield _path(steps, colour(number, len(families)), family, len(family_dots))


def _mark(x: float, y: float, to_x: float, to_y: float) -> str:
    """A dot, or a line for a range."""
    end = "h0" if (x, y) == (to_x, to_y) else f"L{_number(to_x)} {_number(to_y)}"
    return f"M{_number(x)} {_number(y)}{end}"


def _path(steps: str, stroke: str, family: str, runs: int) -> str:
    title = f"<title>{html.escape(family)}: {runs:,} runs</title>"
    return f'<path class="dots" stroke="{stroke}" d="{steps}">{title}</path>'


def _label(x: float, y: float, anchor: str, text: str) -> str:
    position = f'x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"'
    return f"<text {position}>{html.escape(text)}</text>"


def _number(value: float) -> str:
    return f"{round(value, 1):g}"
