"""Lines for a terminal: sentences that are wrapped, tables, and bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
_BAR = 40  # characters of a full bar


def wrapped(words: str, first: str = "", later: str | None = None) -> list[str]:
    """Words in lines that are not too long, behind `first`; the rest of them stand under it, or
    behind `later`.

    >>> [line.split() for line in wrapped("one two", "note".ljust(95))], wrapped("two", "- ")
    ([['note', 'one'], ['two']], ['- two'])
    """
    rest = " " * len(first) if later is None else later
    rows = textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=rest)
    return rows or [first]


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Columns as wide as they need; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def bar(name: str, amount: str, share: float, mark: str = "█") -> str:
    """A share with its name and amount."""
    drawn = mark * round(min(share, 1) * _BAR) + ("▶" if share > 1 else "")
    return f"          {name:<12}{amount:>11}  {share:>6.1%}  {drawn}".rstrip()
