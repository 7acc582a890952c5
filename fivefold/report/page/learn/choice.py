"""What the reader of a panel can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.core.errors import UnknownName


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
