"""Ranks that differ: which of a job have to be looked at, so that all have been seen."""

from __future__ import annotations

from fivefold.core.plan import Plan

_FEW = 16  # ranks of a job that are all looked at
_AXES = ("tp", "cp", "dp")


def distinct_ranks(plan: Plan) -> tuple[int, ...]:
    """Of a small job all. Of a large one, every pipeline rank at the first coord of the other axes,
    and on its first, a middle and its last stage one rank that differs on each other axis: the one
    behind the first, where groups begin to differ, and the last, which has what is left over."""
    layout = plan.layout
    if layout.world <= _FEW:
        return tuple(range(layout.world))
    found: list[int] = []
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    for rank in range(layout.world):
        coord = layout.coord(rank)
        away = [axis for axis in _AXES if getattr(coord, axis)]
        if not away:
            found.append(rank)
        elif len(away) == 1 and coord.pp in stages:
            place, degree = getattr(coord, away[0]), getattr(layout, away[0])
            if place in (1, degree - 1):
                found.append(rank)
    return tuple(found)
