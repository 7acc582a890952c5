"""Panels that explain one thing each, on a small example that the reader can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.core.errors import UnknownName

# What the reader of a panel can change.


@dataclass(frozen=True)
class Choice:
    """One parameter: its words, its values in their order, and the one to begin with."""

    label: str
    values: tuple[str, ...]
    default: str

    def __post_init__(self) -> None:
        assert self.default in self.values, f"{self.default} is none of {self.values}"


def chosen(choices: Mapping[str, Choice], params: Mapping[str, str]) -> dict[str, str]:
    """A value for every choice: the one given, or the default; unknown ones are refused."""
    for name, value in params.items():
        if name not in choices:
            raise UnknownName("choice", name, choices)
        if value not in choices[name].values:
            raise UnknownName(f"{name} of the panel", value, choices[name].values)
    return {name: params.get(name, choice.default) for name, choice in choices.items()}


# How panels write bytes.


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
