"""Tables of keys: what each of a target's keys means here. One table writes files and reads them.

A `Key` is one of theirs for one of ours. A `KeyChoice` is some of ours for several of theirs,
listed value by value: ZeRO stage 3 of Megatron is two flags. Keys of theirs are paths with dots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from fivefold.bridges.job_values import Values
from fivefold.core import FivefoldError

Flat = dict[str, Any]  # keys of a file by path
_LENIENT = ("optimizer", "lr_curve", "warmup", "recompute")  # of which others have far more
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


class Spelling(NamedTuple):
    """How a value is written, and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@dataclass(frozen=True)
class Key:
    """One key: `values` are pairs of our values and theirs, if not all are the same; `usual` is
    what a file means that lacks it; `also` are other names that are read."""

    theirs: str
    ours: str
    kind: type = int
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    usual: Any = None
    also: tuple[str, ...] = ()
    spelling: Spelling | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs, *self.also)

    def written(self, value: Any) -> Any:
        if self.spelling is not None:
            return self.spelling.write(value)
        return self.values[value] if self.values else value

    def read(self, text: Any, where: str) -> Any:
        if self.spelling is not None:
            return self.spelling.read(text)
        value = typed(text, bool if _of_flags(self.values) else self.kind, where)
        if not self.values:
            return value
        lower = str(value).lower()
        for ours, theirs in self.values.items():
            if theirs == value or str(theirs).lower() == lower:
                return ours
        known = ", ".join(str(known_value) for known_value in self.values.values())
        raise FivefoldError(f"{where} = {text}: known here are {known}")


def _of_flags(values: Mapping[Any, Any]) -> bool:
    return bool(values) and all(isinstance(value, bool) for value in values.values())


def typed(value: Any, kind: type, where: str) -> Any:
    """A value of a file in the type of its key."""
    text = str(value).strip()
    if kind is list:
        if isinstance(value, list):
            return cast("list[Any]", value)
        raise FivefoldError(f"{where} = {text[:40]}: write a list")
    if text.startswith("$"):
        rule = "is set outside of the file: put the value in"
        raise FivefoldError(f"{where} = {text[:40]}: a variable that {rule}")
    if kind is bool:
        if text.lower() in (*_TRUE, *_FALSE):
            return text.lower() in _TRUE
        raise FivefoldError(f"{where} = {text[:40]}: write true or false")
    if kind is str:
        return text
    if kind is int and re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text) and len(text) < 19:
        return int(text)
    try:
        number = float(text) if len(text) < 40 and not isinstance(value, bool) else float("nan")
    except ValueError:
        number = float("nan")
    # Infinity is no number of a job, and no int can hold it.
    if not math.isfinite(number) or (
        kind is int and not (number.is_integer() and abs(number) <= 1e15)
    ):
        raise FivefoldError(f"{where} = {text[:40]}: give a {'whole ' * (kind is int)}number")
    return kind(number)


@dataclass(frozen=True)
class KeyChoice:
    """Values of ours, each with the keys that stand for it; those of `moe` only with experts."""

    ours: tuple[str, ...]
    entries: Mapping[Any, Mapping[str, Any]]
    moe: frozenset[Any] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for entry in self.entries.values() for name in entry))

    def value(self, values: Values) -> Any:
        row = tuple(values[name] for name in self.ours)
        return row if len(self.ours) > 1 else next(iter(row))

    def as_values(self, value: Any) -> Values:
        row = value if len(self.ours) > 1 else (value,)
        return dict(zip(self.ours, row, strict=True))

    def read(self, flat: Flat) -> tuple[Any, Mapping[str, Any]]:
        """The entry with the most keys of those that the file has."""
        best: tuple[Any, Mapping[str, Any]] | None = None
        for value, entry in self.entries.items():
            matches = all(same(flat.get(name), theirs) for name, theirs in entry.items())
            if matches and (best is None or len(entry) > len(best[1])):
                best = value, entry
        return (None, {}) if best is None else best


def same(ours: Any, theirs: Any) -> bool:
    """Whether a file's value is this one, however it is written."""
    if ours is None or theirs is None:
        return ours is theirs
    if isinstance(theirs, (int, float)) and not isinstance(theirs, bool):
        try:
            return float(ours) == theirs
        except (TypeError, ValueError):
            return False
    return str(ours).strip().lower() == str(theirs).lower()


Table = tuple[Key | KeyChoice, ...]


def write_keys(table: Table, values: Values) -> Flat:
    """The keys of a file; a value that the file means anyway is left out."""
    flat: Flat = {}
    for item in table:
        if isinstance(item, KeyChoice):
            flat |= {k: v for k, v in item.entries[item.value(values)].items() if v is not None}
        elif values.get(item.ours) not in (None, item.usual):
            flat[item.theirs] = item.written(values[item.ours])
    return flat


def read_keys(table: Table, flat: Flat) -> tuple[Values, set[str], list[str]]:
    """Our values, the keys that they came from, and what is wrong with others."""
    values: Values = {}
    used: set[str] = set()
    wrong: list[str] = []
    for item in table:
        if isinstance(item, KeyChoice):
            value, entry = item.read(flat)
            if entry or value is not None:
                values |= item.as_values(value)
            used |= {*entry, *(name for name in item.names if _is_off(flat.get(name)))}
            continue
        name = next((name for name in item.names if flat.get(name) is not None), None)
        if name is None:
            values.setdefault(item.ours, item.usual)
            used |= {key_name for key_name in item.names if key_name in flat}
            continue
        try:
            values[item.ours] = item.read(flat[name], name)
        except FivefoldError as error:
            if item.ours in _LENIENT:
                continue  # listed as not known
            wrong.append(str(error))
        used.add(name)
    return values, used & flat.keys(), wrong


def _is_off(value: Any) -> bool:
    return value is None or str(value).lower() in (*_FALSE, "none", "null")


def ours_of(table: Table) -> Iterator[str]:
    """Our keys that a table has."""
    for item in table:
        yield from item.ours if isinstance(item, KeyChoice) else (item.ours,)


def allowed(item: Key | KeyChoice, has_experts: bool) -> Iterable[Any] | None:
    """The values that an item can express; None: any."""
    if isinstance(item, KeyChoice):
        return [entry for entry in item.entries if has_experts or entry not in item.moe]
    return list(item.values) or None
