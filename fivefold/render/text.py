"""Values to text, tables, pictures and pages. This file has what all reports share: numbers with
units, lines for a terminal, self-contained SVGs, and text files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from fivefold.core import FivefoldError

# --- Numbers with units


def gib(size: float) -> str:
    """Bytes as GiB with one decimal.

    >>> gib(3 * 2**29)
    '1.5 GiB'
    """
    return f"{size / 2**30:,.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds with a unit, to about three digits.

    >>> duration(0.0123), duration(4.5678), duration(0.25)
    ('12.3 ms', '4.57 s', '250 ms')
    """
    if abs(seconds) >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.0f} ms" if abs(seconds) >= 0.1 else f"{seconds * 1e3:.1f} ms"


def rough_duration(seconds: float) -> str:
    """A waiting time in its two largest units.

    >>> [rough_duration(each) for each in (42.3, 780, 7500, 200_000)]
    ['42s', '13m', '2h 5m', '2d 8h']
    """
    if round(seconds) < 60:
        return f"{round(seconds)}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h {minutes % 60}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24}h"


def thousands(number: float) -> str:
    """A number to three or four digits, with k or M.

    >>> thousands(79.62), thousands(79_620), thousands(1_250_000)
    ('80', '79.6k', '1.2M')
    """
    for least, size, unit in ((999_950, 1e6, "M"), (999.5, 1e3, "k")):  # also what rounds up
        if number >= least:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def percent(share: float) -> str:
    """A fraction as a percentage with one decimal; adding zero turns −0.0 into 0.0."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"


# --- Lines for a terminal

WIDTH = 100
_BAR = 40  # characters of a full bar


def wrapped(text: str, first: str = "", later: str | None = None) -> list[str]:
    """Wrap text into lines. The first one begins with `first`, the others with `later` or with as
    many blanks.

    >>> [line.split() for line in wrapped("one two", "note".ljust(95))], wrapped("two", "- ")
    ([['note', 'one'], ['two']], ['- two'])
    """
    indent = " " * len(first) if later is None else later
    rows = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent)
    return rows or [first]


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table; the columns in `left` are aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def bar(name: str, amount: str, share: float, mark: str = "█") -> str:
    """A bar for a share, with its name and amount."""
    drawn = mark * round(min(share, 1) * _BAR) + ("▶" if share > 1 else "")
    return f"          {name:<12}{amount:>11}  {share:>6.1%}  {drawn}".rstrip()


# --- SVG and text files


def svg_style(scope: str, light: dict[str, str], dark: dict[str, str]) -> str:
    """CSS rules that apply only inside one kind of picture, for a light and a dark page."""

    def scoped(rules: dict[str, str]) -> str:
        return "".join(f"{scope} {selector}{{{style}}}" for selector, style in rules.items())

    font = f"{scope}{{font:11px system-ui,sans-serif}}"
    # Only for browsers: CairoSVG ignores media rules, and draws nothing with `height:auto`.
    scaling = f"@media all{{{scope}{{max-width:100%;height:auto}}}}"
    return font + scoped(light) + scaling + f"@media (prefers-color-scheme:dark){{{scoped(dark)}}}"


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8; an error says which file, why, and what to do."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror or error}; give a path in an existing folder "
            "that is writable and has free space"
        ) from error
