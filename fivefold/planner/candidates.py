"""What a search keeps of the layouts that it has estimated: the fastest that fit, the fastest of
each complexity, and the fastest of each memory class.

Which of two equally fast layouts is simpler: fewer things to set up, watch and debug.

The order: tp inside the innermost domain; fewer axes besides data, which every job has; no context
parallelism or a plainer kind; a plainer schedule; no offload; one group of shards; experts that are
not split; no recomputation; a lower ZeRO stage. The first difference decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.core import Machine
from fivefold.cost import CONTEXTS, OFFLOADS, SCHEDULES, Array, LayoutGrid, along
from fivefold.cost.stages import is_long
from fivefold.planner.space import LayoutBlock

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


_FRONT = 128  # memory classes; the fastest layout of each is kept
_ANY, _FLAT = -1, -2  # in place of the index of a rule: every layout, those without a pipeline
# Bounds of pipelines may be this much below their simulated steps, those of other layouts are not:
# some of these are kept even where bounds of many pipelines are lower.
_FLAT_KEPT, _FLAT_REACH = 12, 1.5
SimpleKey = tuple[int, int]  # complexity and microbatch size


@dataclass(frozen=True)
class LayoutCandidate:
    """One layout with its estimated time and memory, by its index in a block."""

    block: LayoutBlock
    index: int
    seconds: float
    bytes: float
    makespan: float | None = None  # of its pipeline, if that was simulated action by action

    @cached_property
    def grid(self) -> LayoutGrid:
        """The layout alone."""
        index = np.unravel_index(self.index, self.block.shape)
        return self.block.grid.at(tuple(int(axis_index) for axis_index in index))

    @cached_property
    def choice(self) -> tuple[float, ...]:
        """What users see of it: candidates of one choice differ only in chunks, in sharding or in
        what changes nothing."""
        grid = self.grid
        columns = (grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp, grid.microbatch_size)
        return tuple(column.item() for column in (*columns, grid.recompute, grid.schedule))

    @cached_property
    def pipeline(self) -> tuple[float, ...]:
        """What its schedule depends on: candidates with the same one are simulated together."""
        grid = self.grid
        columns = (grid.schedule, grid.pp, grid.chunks, grid.microbatches)
        return tuple(column.item() for column in columns)

    @cached_property
    def num_axes(self) -> int:
        """Its axes besides data."""
        return int(num_axes(self.grid).item())

    @property
    def is_long(self) -> bool:
        """Whether its schedule is extrapolated from shorter ones."""
        _, ranks, chunks, microbatches = map(int, self.pipeline)
        return is_long(ranks, microbatches, chunks)

    @property
    def speed_rank(self) -> tuple[float, float, int]:
        """By the step and by bytes, up to rounding, then by the lower ZeRO stage."""
        seconds, size = (float(f"{value:.9g}") for value in (self.seconds, self.bytes))
        return seconds, size, int(self.grid.zero.item())

    @property
    def rule(self) -> int:
        """The index of its rule of recomputation."""
        return int(self.grid.recompute.item())

    @property
    def rounded(self) -> float:
        """Its seconds, to as many digits as decide an order."""
        return float(f"{self.seconds:.4g}")


@dataclass
class SearchResult:
    """The fastest layouts that fit, the front of memory and time, and how many were estimated.

    `simple`: by complexity and microbatch size, the fastest layouts (by their bounds) that may be
    equal to the first.
    """

    best: list[LayoutCandidate] = field(default_factory=list[LayoutCandidate])
    simple: dict[SimpleKey, LayoutCandidate] = field(
        default_factory=dict[SimpleKey, LayoutCandidate]
    )
    front: list[LayoutCandidate] = field(default_factory=list[LayoutCandidate])
    leanest: LayoutCandidate | None = None  # least memory of all, also if none fits
    candidates: int = 0
    passed_over: int = 0
    host_is_short: bool = False  # a layout would fit with more host memory
    seconds: float = 0.0

    def count(self, all_of_them: int, estimated: int) -> None:
        """Count the layouts of a block, of which so many are estimated."""
        self.candidates += estimated
        self.passed_over += all_of_them - estimated

    def note_host(self, is_short: bool) -> None:
        """Whether a layout fits but for the memory of the host."""
        self.host_is_short |= is_short

    def finish(self, best: list[LayoutCandidate], seconds: float) -> None:
        """The fastest in their order, and how long the search took."""
        self.best, self.seconds = best, seconds

    def draw_front(self, front: list[LayoutCandidate]) -> None:
        self.front = front


class KeptLayouts:
    """Keeps layouts of one search in its result.

    `keep`: how many of the fastest, of each of these `rules` of recomputation if there are some;
    `equal`: the share of a step within which simpler layouts are kept as well; `memory`: bytes of a
    GPU; `domain`: GPUs of the innermost domain.
    """

    def __init__(
        self,
        result: SearchResult,
        keep: int,
        equal: float,
        memory: float,
        domain: float,
        rules: Sequence[int] = (),
    ) -> None:
        self.result, self.number, self.equal = result, keep, equal
        self.memory, self.domain, self.rules = memory, domain, rules
        self.fastest: dict[int, list[LayoutCandidate]]
        self.fastest = {rule: [] for rule in rules or (_ANY, _FLAT)}
        self.classes: dict[int, LayoutCandidate] = {}

    @property
    def worst(self) -> float:
        """Seconds that a layout must not exceed to be one of the fastest."""
        return max(self._worst_of(rule) for rule in self.fastest if rule != _FLAT)

    def worst_in(self, block: LayoutBlock) -> float:
        """The same in one block: longer where layouts have no pipeline."""
        if _FLAT not in self.fastest or float(block.grid.pp.max()) > 1:
            return self.worst
        flat = max(self._worst_of(_FLAT), self._near_flat)
        return max(self.worst, min(flat, _FLAT_REACH * self.worst))

    @property
    def _near_flat(self) -> float:
        """Up to how many seconds a layout may be equal to the fastest without a pipeline."""
        flat = self.fastest.get(_FLAT)
        return (1 + self.equal) * flat[0].seconds if flat and self.equal else 0.0

    def worst_by_rule(self, grid: LayoutGrid) -> Array:
        """The same for each rule of recomputation of a block."""
        return along(4, [self._worst_of(int(rule)) for rule in grid.recompute.flat])

    def _worst_of(self, rule: int) -> float:
        best = self.fastest[rule]
        return best[-1].seconds if len(best) >= self._number(rule) else np.inf

    def _number(self, rule: int) -> int:
        return min(self.number, _FLAT_KEPT) if rule == _FLAT else self.number

    @property
    def near(self) -> float:
        """Up to how many seconds a layout may be equal to the fastest; none if there is none."""
        if not self.equal or not self.result.best:
            return 0.0
        return (1 + self.equal) * self.result.best[0].seconds

    def fewest_axes(self) -> int:
        """Of a layout that is equal to the fastest."""
        near = self.near
        equals = (
            candidate for candidate in self.result.simple.values() if candidate.seconds <= near
        )
        return min((candidate.num_axes for candidate in equals), default=len(AXES))

    def keep(self, block: LayoutBlock, seconds: Array, memory: Array, fitting: Array) -> None:
        """Keep the best of a block; `fitting` are the seconds of those that fit."""
        self._keep_best(block, fitting, memory)
        self._keep_simple(block, fitting, memory)
        self.keep_front(block, seconds, memory)

    def _keep_simple(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        """Keep the fastest layout of each complexity and microbatch size: where the fastest of all
        sizes does not fit in the end, a smaller one may."""
        if not self.near:
            return
        limit = max(self.near, min(self._near_flat, _FLAT_REACH * self.near))
        near = np.flatnonzero(seconds <= limit)
        columns = (complexity(block.grid, self.domain), block.grid.microbatch_size)
        codes, sizes = (np.broadcast_to(column, block.shape).ravel()[near] for column in columns)
        order = np.lexsort((memory[near], seconds[near], sizes, codes))
        _, firsts = np.unique(np.stack((codes, sizes))[:, order], axis=1, return_index=True)
        for position in order[firsts]:
            key, index = (int(codes[position]), int(sizes[position])), int(near[position])
            known = self.result.simple.get(key)
            if known is None or seconds[index] < known.seconds:
                self.result.simple[key] = _candidate(block, index, seconds, memory)

    def _keep_best(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        for rule, best in self.fastest.items():
            rule_seconds, worst = seconds, self._worst_of(rule)
            if rule == _FLAT:
                flat = np.broadcast_to(block.grid.pp, block.shape).ravel() == 1
                rule_seconds = np.where(flat, seconds, np.inf)
            elif rule != _ANY:
                rules = np.broadcast_to(block.grid.recompute, block.shape).ravel()
                rule_seconds = np.where(rules == rule, seconds, np.inf)
            places = np.argpartition(rule_seconds, min(self.number, len(rule_seconds) - 1))[
                : self.number
            ]
            best += [
                _candidate(block, int(position), rule_seconds, memory)
                for position in places
                if rule_seconds[position] < worst
            ]
            best.sort(key=lambda candidate: candidate.seconds)
            del best[self._number(rule) :]
        entries = (
            (id(candidate.block), candidate.index, candidate)
            for best in self.fastest.values()
            for candidate in best
        )
        distinct = {(block, index): candidate for block, index, candidate in entries}
        self.result.best = sorted(distinct.values(), key=lambda candidate: candidate.seconds)

    def keep_front(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        """Keep the fastest layout of each memory class, and the one with least memory of all."""
        numbers = (memory / self.memory * _FRONT).astype(np.int64).clip(0, _FRONT)
        fastest = np.full(_FRONT + 1, np.inf)
        np.minimum.at(fastest, numbers, seconds)
        for number in np.flatnonzero(np.isfinite(fastest)):
            known = self.classes.get(int(number))
            if known is None or fastest[number] < known.seconds:
                index = int(np.flatnonzero((numbers == number) & (seconds == fastest[number]))[0])
                self.classes[int(number)] = _candidate(block, index, seconds, memory)
        legal = np.where(np.isfinite(seconds), memory, np.inf)
        lean = int(legal.argmin())
        if self.result.leanest is None or legal[lean] < self.result.leanest.bytes:
            self.result.leanest = _candidate(block, lean, seconds, memory)

    def front(self) -> Iterator[LayoutCandidate]:
        """Layouts by rising memory, each faster than all before it."""
        fastest = np.inf
        for number in sorted(self.classes):
            if self.classes[number].seconds < fastest:
                fastest = self.classes[number].seconds
                yield self.classes[number]


def _candidate(block: LayoutBlock, index: int, seconds: Array, memory: Array) -> LayoutCandidate:
    return LayoutCandidate(block, index, float(seconds[index]), float(memory[index]))
