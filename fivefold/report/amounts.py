"""Numbers as people read them: bytes, seconds, counts and shares."""

from __future__ import annotations


def gib(size: float) -> str:
    """Bytes as GiB with one decimal.

    >>> gib(3 * 2**29)
    '1.5 GiB'
    """
    return f"{size / 2**30:,.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds with a unit that leaves three digits or so.

    >>> duration(0.0123), duration(4.5678), duration(0.25)
    ('12.3 ms', '4.57 s', '250 ms')
    """
    if abs(seconds) >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.0f} ms" if abs(seconds) >= 0.1 else f"{seconds * 1e3:.1f} ms"


def rough(seconds: float) -> str:
    """A time to wait, in its two largest units.

    >>> rough(42.3), rough(780), rough(7500), rough(200_000)
    ('42s', '13m', '2h 5m', '2d 8h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h {minutes % 60}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24}h"


def thousands(number: float) -> str:
    """Three or four digits.

    >>> thousands(79.62), thousands(79_620), thousands(1_250_000)
    ('80', '79.6k', '1.2M')
    """
    for least, size, unit in ((999_950, 1e6, "M"), (999.5, 1e3, "k")):  # what is rounded up too
        if number >= least:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def percent(share: float) -> str:
    """A fraction as a percentage with one decimal; adding zero turns −0.0 into 0.0."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"
