"""The types of what is read from the files of a run: a value of another type is refused by name.

Files may be cut, edited or of another program. What passes here can be computed with. Everything
else is a `TypeError` or `ValueError`, which the readers turn into an error that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

_LAST_SECOND = 250_000_000_000  # since the epoch: the year 9892
_LARGEST = 1e100  # of a number: sums and products of such stay finite
_LARGEST_LR = 1e300  # which is only shown

# Fields of a step's record.
_COUNTS = ("step", "first_sample", "num_samples", "restart")
_ABOVE_0 = ("tokens", "world")
_NUMBERS_OR_NONE = (
    *("seconds", "wall_s", "wall", "data"),
    *("loss", "norm", "mfu", "memory_gib", "scale", "fullest", "eval_loss"),
)
# Facts of a start; older versions wrote fewer.
_TEXTS = ("model", "layout", "schedule", "commit")


def number(name: str, value: Any, largest: float = _LARGEST) -> float:
    """A number that can be computed with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is no number")
    if not abs(value) <= largest:
        raise ValueError(f"{name} is not finite")
    return value


def integer(name: str, value: Any, least: int = 0) -> int:
    """A count."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise TypeError(f"{name} is no whole number from {least}")
    return value


def table(name: str, value: Any) -> dict[str, Any]:
    """An object of JSON."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} is no table")
    return cast("dict[str, Any]", value)


def text(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value


def numbers(name: str, value: Any, *, none: bool = False) -> None:
    """A table of numbers, or of None where that is allowed."""
    for key, entry in table(name, value).items():
        if not (none and entry is None):
            number(f"{name}.{key}", entry)


def check_record(values: Mapping[str, Any]) -> None:
    """Refuse fields of a step's record that have another type."""
    for name in _COUNTS:
        integer(name, values[name])
    for name in _ABOVE_0:
        integer(name, values[name], 1)
    number("lr", values["lr"], _LARGEST_LR)
    for name in _NUMBERS_OR_NONE:
        if values[name] is not None:
            number(name, values[name])
    if values["skipped"] is not None:
        text("skipped", values["skipped"])
    numbers("spent", values["spent"])
    if values["planned"] is not None:
        numbers("planned", values["planned"])
        if not min(values["planned"]["step_s"], values["planned"]["tokens_per_s"]) > 0:
            raise ValueError("planned is not above 0")
    if values["load"] is not None:
        numbers("load", dict(enumerate(_list("load", values["load"]))))
    if values["preference"] is not None:
        numbers("preference", values["preference"], none=True)
    if values["again"] is not None:
        again = table("again", values["again"])
        _names("again", again)
        if again["why"] is not None:
            text("again.why", again["why"])
        if not isinstance(again["same"], bool):
            raise TypeError("again.same is neither true nor false")
    for entry in _list("slow", values["slow"] or []):
        row = table("slow", entry)
        _names("slow", row)
        number("slow.share", row["share"])
        text("slow.what", row["what"])
        text("slow.words", row["words"])
    for name, row in table("evals", values["evals"] or {}).items():
        numbers(f"evals.{name}", row, none=True)


def _names(name: str, row: Mapping[str, Any]) -> None:
    for rank in _list(f"{name}.ranks", row["ranks"]):
        integer(f"{name}.ranks", rank)


def check_start(start: Any) -> dict[str, Any]:
    """Refuse facts of a start that have another type."""
    facts = table("a start", start)
    if not 0 <= number("began", facts["began"]) < _LAST_SECOND:
        raise ValueError("began is no date")
    for name in ("ended", "failed"):
        if facts.get(name) is not None:
            end = table(name, facts[name])
            number(f"{name}.at", end["at"])
            text(f"{name}.why", end["why"])
    if facts.get("ended") is not None:
        numbers("ended.spent", facts["ended"]["spent"])
    for name in _TEXTS:
        if facts.get(name) is not None:
            text(name, facts[name])
    if "world" in facts:
        integer("world", facts["world"], 1)
    for name in ("versions", "tokenizer"):
        table(name, facts.get(name) or {})
    machine = table("machine", facts.get("machine", {}))
    integer("machine.num_cpus", machine.get("num_cpus") or 1)
    for gpu in _list("machine.gpus", machine.get("gpus") or []):
        text("machine.gpus", gpu)
    return facts


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is no list")
    return cast("list[Any]", value)
