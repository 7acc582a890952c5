"""What a search keeps of the layouts that it has estimated: the fastest that fit, the fastest of
each complexity, and the fastest of each memory class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fivefold.cost.grid import Array, LayoutGrid
from fivefold.planner.simplicity import AXES, complexity, num_axes
from fivefold.planner.space import LayoutBlock

_FRONT = 128  # memory classes; the fastest layout of each is kept


@dataclass(frozen=True)
class LayoutCandidate:
    """One layout with its estimated time and memory, by its index in a block."""

    block: LayoutBlock
    index: int
    seconds: float
    bytes: float

    @cached_property
    def grid(self) -> LayoutGrid:
        """The layout alone."""
        index = np.unravel_index(self.index, self.block.shape)
        return self.block.grid.at(tuple(int(each) for each in index))

    @cached_property
    def choice(self) -> tuple[float, ...]:
        """What users see of it: candidates of one choice differ only in chunks, in sharding or in
        what changes nothing."""
        grid = self.grid
        columns = (grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp, grid.microbatch_size)
        return tuple(each.item() for each in (*columns, grid.recompute, grid.schedule))

    @cached_property
    def pipeline(self) -> tuple[float, ...]:
        """What its schedule depends on: candidates with the same one are simulated together."""
        grid = self.grid
        columns = (grid.schedule, grid.pp, grid.chunks, grid.microbatches)
        return tuple(each.item() for each in columns)

    @property
    def rounded(self) -> float:
        """Its seconds, to as many digits as decide an order."""
        return float(f"{self.seconds:.4g}")


@dataclass
class SearchResult:
    """The fastest layouts that fit, the front of memory and time, and how many were estimated.

    `simple`: by complexity, the fastest layouts (by their bounds) that may be equal to the first.
    """

    best: list[LayoutCandidate] = field(default_factory=list[LayoutCandidate])
    simple: dict[int, LayoutCandidate] = field(default_factory=dict[int, LayoutCandidate])
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

    `keep`: how many of the fastest; `equal`: the share of a step within which simpler layouts are
    kept as well; `memory`: bytes of a GPU; `domain`: GPUs of the innermost domain.
    """

    def __init__(
        self, result: SearchResult, keep: int, equal: float, memory: float, domain: float
    ) -> None:
        self.result, self.number, self.equal = result, keep, equal
        self.memory, self.domain = memory, domain
        self.classes: dict[int, LayoutCandidate] = {}

    @property
    def worst(self) -> float:
        """Seconds that a layout must not exceed to be one of the fastest."""
        best = self.result.best
        return best[-1].seconds if len(best) >= self.number else np.inf

    @property
    def near(self) -> float:
        """Up to how many seconds a layout may be equal to the fastest; none if there is none."""
        if not self.equal or not self.result.best:
            return 0.0
        return (1 + self.equal) * self.result.best[0].seconds

    def fewest_axes(self) -> int:
        """Of a layout that is equal to the fastest."""
        near = self.near
        equals = (one for one in self.result.simple.values() if one.seconds <= near)
        return min((int(num_axes(one.grid).item()) for one in equals), default=len(AXES))

    def keep(self, block: LayoutBlock, seconds: Array, memory: Array, fitting: Array) -> None:
        """Keep the best of a block; `fitting` are the seconds of those that fit."""
        self._keep_best(block, fitting, memory)
        self._keep_simple(block, fitting, memory)
        self.keep_front(block, seconds, memory)

    def _keep_simple(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        """Keep the fastest layout of each complexity, whatever its microbatch size is."""
        if not self.near:
            return
        near = np.flatnonzero(seconds <= self.near)
        codes = np.broadcast_to(complexity(block.grid, self.domain), block.shape).ravel()[near]
        order = np.lexsort((memory[near], seconds[near], codes))
        _, firsts = np.unique(codes[order], return_index=True)
        for place in order[firsts]:
            code, index = int(codes[place]), int(near[place])
            known = self.result.simple.get(code)
            if known is None or seconds[index] < known.seconds:
                self.result.simple[code] = _candidate(block, index, seconds, memory)

    def _keep_best(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        best, worst = self.result.best, self.worst
        indices = np.argpartition(seconds, min(self.number, len(seconds) - 1))[: self.number]
        best += [
            _candidate(block, int(index), seconds, memory)
            for index in indices
            if seconds[index] < worst
        ]
        best.sort(key=lambda one: one.seconds)
        del best[self.number :]

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
