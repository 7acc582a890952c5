"""Which of two equally fast layouts is simpler: fewer things to set up, watch and debug.

The order: tp inside the innermost domain; fewer axes besides data, which every job has; no context
parallelism or a plainer kind; a plainer schedule; no offload; one group of shards; experts that are
not split; no recomputation; a lower ZeRO stage. The first difference decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.core import Machine
from fivefold.cost import CONTEXTS, OFFLOADS, SCHEDULES, Array, LayoutGrid

# How plain a schedule is; those that are not named here come last.
_SCHEDULES = {
    **{"1f1b": 1, "pipedream-flush": 1, "gpipe": 2, "afab": 2, "interleaved": 3, "bfs": 3},
    **{"zb-h1": 4, "zb-h2": 4, "zb-interleaved": 5},
}
_MOST_EXOTIC = 6
_CONTEXTS = {"zigzag": 1, "ring": 2, "allgather": 2, "ulysses": 3, "hybrid": 4}
AXES = ("tp", "pp", "cp", "ep")
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Criterion:
    """One thing that makes a layout less simple: a level below `levels`, from columns of a grid."""

    levels: int
    level: Callable[[LayoutGrid, float], Array]
    text: Callable[[LayoutGrid], str]


def _crosses(grid: LayoutGrid, domain: float) -> Array:
    """Whether some group of tp leaves the innermost domain; an infinite one contains all."""
    if float(grid.world.max()) <= domain:
        return np.zeros_like(grid.tp)
    inside = (grid.tp <= domain) & (np.mod(domain, grid.tp) == 0)
    return np.where(inside, 0.0, 1.0)


def num_axes(grid: LayoutGrid) -> Array:
    """Axes besides data with more than one rank."""
    return sum(((getattr(grid, axis) > 1).astype(float) for axis in AXES), np.zeros(1))


def _schedule(grid: LayoutGrid, domain: float) -> Array:
    ranks = np.array([float(_SCHEDULES.get(name, _MOST_EXOTIC)) for name in SCHEDULES])
    return np.where(grid.pp > 1, ranks[grid.schedule.astype(np.int64)], 0.0)


def _context(grid: LayoutGrid, domain: float) -> Array:
    ranks = np.array([float(_CONTEXTS.get(name, _MOST_EXOTIC)) for name in CONTEXTS])
    return np.where(grid.cp > 1, ranks[grid.context.astype(np.int64)], 0.0)


def _axes_words(grid: LayoutGrid) -> str:
    used = [axis for axis in AXES if getattr(grid, axis).item() > 1]
    if not used:
        return "data ranks alone"
    return " and ".join([", ".join(used[:-1]), used[-1]] if len(used) > 1 else used)


def _name(names: tuple[str, ...], column: Array) -> str:
    return names[round(float(column.item()))]


CRITERIA: tuple[Criterion, ...] = (
    Criterion(2, _crosses, lambda grid: f"tp={grid.tp.item():.0f}"),
    Criterion(len(AXES) + 1, lambda grid, domain: num_axes(grid), _axes_words),
    Criterion(
        5,
        _context,
        lambda grid: _name(CONTEXTS, grid.context) if grid.cp.item() > 1 else "no cp",
    ),
    Criterion(
        _MOST_EXOTIC + 1,
        _schedule,
        lambda grid: _name(SCHEDULES, grid.schedule) if grid.pp.item() > 1 else "no pipeline",
    ),
    Criterion(
        len(OFFLOADS),
        lambda grid, domain: grid.offload,
        lambda grid: f"offload {_name(OFFLOADS, grid.offload)}",
    ),
    Criterion(
        2,
        lambda grid, domain: (grid.replicate > 1).astype(float),
        lambda grid: "replicas of shards" if grid.replicate.item() > 1 else "one group of shards",
    ),
    Criterion(
        2,
        lambda grid, domain: (grid.etp > 1).astype(float),
        lambda grid: f"etp={grid.etp.item():.0f}",
    ),
    Criterion(
        2,
        lambda grid, domain: (grid.recompute > 0).astype(float),
        lambda grid: f"recompute {_name(tuple(map(str, grid.rules)), grid.recompute)}",
    ),
    Criterion(4, lambda grid, domain: grid.zero, lambda grid: f"ZeRO-{grid.zero.item():.0f}"),
)


def innermost(machine: Machine) -> float:
    """GPUs of the machine's innermost domain. It is infinite if it has no size, and for a torus,
    of which jobs get a part that suits their degrees."""
    inner = machine.tiers[0]
    return np.inf if inner.size is None or inner.torus else float(inner.size)


def complexity(grid: LayoutGrid, domain: float) -> Codes:
    """A number for each layout; that of a simpler one is lower."""
    code = np.zeros(1)
    for criterion in CRITERIA:
        code = code * criterion.levels + criterion.level(grid, domain)
    return code.astype(np.int64)


def tp_crosses(grid: LayoutGrid, machine: Machine) -> NDArray[np.bool_]:
    """Which layouts have tensor parallelism over more than the innermost link."""
    return _crosses(grid, innermost(machine)) > 0


def simpler_words(own_grid: LayoutGrid, other: LayoutGrid, domain: float) -> str:
    """In what the first of two layouts (grids of one) is simpler; empty if it is not."""
    for criterion in CRITERIA:
        own_level, theirs = (criterion.level(grid, domain).item() for grid in (own_grid, other))
        if own_level != theirs:
            own_text, other_text = criterion.text(own_grid), criterion.text(other)
            return f"{own_text} instead of {other_text}" if own_level < theirs else ""
    return ""
