"""Curves: memory and speed of the best layout of each strategy, along sequences or GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from fivefold.core.errors import FivefoldError
from fivefold.core.estimate.candidate import wishes_of
from fivefold.core.estimate.grid import RECOMPUTE
from fivefold.core.estimate.outlook import Outlook, outlook
from fivefold.core.estimate.planner import Inquiry, Progress
from fivefold.core.estimate.search import search
from fivefold.core.plan import resolve

STRATEGIES: Mapping[str, Mapping[str, int]] = {
    "data": {"tp": 1, "pp": 1, "cp": 1},
    "data+tensor": {"pp": 1, "cp": 1},
    "data+pipeline": {"tp": 1, "cp": 1},
    "data+context": {"tp": 1, "pp": 1},
    "all": {},
}
AXES = ("seq", "gpus")
_UNITS = {"k": 1 << 10, "m": 1 << 20}
_MOST_POINTS = 16


@dataclass(frozen=True)
class Point:
    """The best layout of a strategy at one place; the leanest where none fits, None where none is
    legal."""

    value: int
    strategy: str
    recompute: str
    outlook: Outlook | None

    @property
    def fits(self) -> bool:
        return self.outlook is not None and self.outlook.over <= 0


def parse(text: str) -> tuple[str, list[int]]:
    """Read `seq=4k..1m` or `gpus=8..16384`: the axis, and values that double.

    >>> parse("seq=4k..16k")
    ('seq', [4096, 8192, 16384])
    """
    axis, _, span = text.partition("=")
    low, dots, high = span.partition("..")
    if axis not in AXES or not dots:
        raise FivefoldError(f"--sweep {text!r}: write seq=4k..1m or gpus=8..16384")
    first, last = whole(low, "--sweep"), whole(high, "--sweep")
    values = [first]
    while values[-1] * 2 <= last and len(values) <= _MOST_POINTS:
        values.append(values[-1] * 2)
    if last < first or len(values) > _MOST_POINTS:
        raise FivefoldError(
            f"--sweep {text!r}: give two numbers that rise, at most {_MOST_POINTS - 1} doublings"
        )
    return axis, values


def whole(text: str, option: str) -> int:
    """A whole number; 4k is 4,096 and 1m 1,048,576.

    >>> whole("128k", "--seq")
    131072
    """
    unit = _UNITS.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or not 0 < int(digits) * unit <= 10**9:
        raise FivefoldError(f"{option}: {text!r} is no whole number such as 8192, 8k or 1m")
    return int(digits) * unit


def sweep(
    asked: Inquiry, axis: str, values: list[int], on_progress: Progress | None = None
) -> Iterator[Point]:
    """Every point of every curve. Tokens of a step stay as they are, as far as they can."""
    fixed = asked.question.fixed or {}
    strategies = [name for name, on in STRATEGIES.items() if _agree(on, fixed)]
    cells = [*product(strategies, RECOMPUTE, values)]
    for number, (name, kind, value) in enumerate(cells):
        if _agree({"recompute": kind}, fixed):
            one = _placed(asked, axis, value, {**fixed, **STRATEGIES[name], "recompute": kind})
            yield Point(value, name, kind, _best(one))
        if on_progress is not None:
            on_progress((number + 1) / len(cells))


def _agree(one: Mapping[str, int | str], other: Mapping[str, int | str]) -> bool:
    return all(other.get(key, value) == value for key, value in one.items())


def _placed(asked: Inquiry, axis: str, value: int, fixed: Mapping[str, int | str]) -> Inquiry:
    question = replace(asked.question, fixed={"offload": "none", **fixed})
    if axis == "gpus":
        return replace(asked, question=replace(question, gpus=value))
    batch = max(1, question.batch * question.seq // value)
    wishes = replace(asked.wishes, seq=value)
    return replace(asked, wishes=wishes, question=replace(question, seq=value, batch=batch))


def _best(asked: Inquiry) -> Outlook | None:
    result = search(asked.question, asked.setting, 1)
    found = result.best[0] if result.best else result.leanest
    if found is None:
        return None
    return outlook(resolve(wishes_of(found.grid, asked.wishes)), asked.setting)
