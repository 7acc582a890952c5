"""How panels write bytes."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size: float) -> str:
    """Bytes in the unit that fits, as the page writes them.

    >>> size_text(512), size_text(3 * 2**19), size_text(2**40)
    ('512 B', '1.5 MiB', '1.0 TiB')
    """
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f} {_UNITS[unit]}" if unit else f"{size:,.0f} B"
