"""What each target can express, as the table of docs/bridges.md: `python -m tests.bridge_table`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fivefold.bridges.bridging import TARGETS
from fivefold.bridges.key_table import allowed, ours_of
from fivefold.bridges.target import Target

_MOST = 8  # values of a cell


def _values(target: Target, key: str) -> list[Any] | None:
    """The values of one of our keys that a target lists; None if it takes any, [] if none."""
    for item in target.table:
        if key not in ([item.ours] if isinstance(item.ours, str) else item.ours):
            continue
        listed = allowed(item, has_experts=True)
        return None if listed is None else [*listed]
    return []


def _named(values: Iterable[Any]) -> str:
    found = [str(each) for each in values]
    found = [each for each in found if ":" not in each]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def _sharding(target: Target) -> str:
    stages = _values(target, "zero") or []
    words = {("step",): "3 (gathered once a step)", ("microbatch",): "3"}
    return ", ".join(words.get((gather,), str(zero)) for zero, gather in stages)


def _cell(target: Target, key: str) -> str:
    if key == "zero":
        return _sharding(target)
    if key == "schedule":
        return _named(target.schedules) or "–"
    if key in target.left:
        return "in the program"
    if key == "stage_layers":
        return "any" if key in target.covers else "its own" if "pp" in target.axes else "–"
    values = _values(target, key)
    if key in target.always and not values:
        return str(target.always[key]).lower()
    if values is None or key in target.covers:
        return "any"
    if key in ours_of(target.table):
        return _named(str(each).lower() for each in values)
    return "–"


def capability_table() -> str:
    """One row for each target, one column for each part of a plan."""
    keys = {
        "zero": "ZeRO",
        "schedule": "schedules",
        "stage_layers": "layers of stages",
        "context": "context",
        "recompute": "recompute",
        "number": "precision",
        "microbatches": "batch",
    }
    head = ["target", "degrees", *keys.values()]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    order = ("replicate", "shard", "tp", "pp", "cp", "ep", "etp")
    for target in TARGETS.values():
        axes = " ".join(axis for axis in order if axis in target.axes)
        cells = [f"`{target.name}`", axes, *(_cell(target, key) for key in keys)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(capability_table())
