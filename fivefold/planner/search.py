"""The best layouts of the whole space.

Lattices of layouts are timed and weighed at once by arrays. Degrees whose layers alone take longer
than the best layouts found so far cannot win, whatever hangs on them, and are passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.core.machine import Machine
from fivefold.cost.grid import OFFLOADS, Array, LayoutGrid
from fivefold.cost.layer_time import LayerTimer
from fivefold.cost.memory import PeakMemory, peak_memory
from fivefold.cost.stack import SoftwareStack
from fivefold.cost.step_time import StepTime, least_layer_seconds, step_time
from fivefold.planner.space import LayoutBlock, SearchSpace, layout_blocks

_FRONT = 128  # classes of memory, of which the fastest layout is kept
_LEAST_PLAYED = 12  # however few are asked for: bounds alone say little of the first


@dataclass(frozen=True)
class EstimateSetting:
    """On what a job runs, and how full the memory may be."""

    machine: Machine
    stack: SoftwareStack
    precision: str
    headroom: float = 0.05  # share of the memory that stays free
    imbalance: float = 1.0  # slots of the fullest expert over the mean

    @property
    def how(self) -> tuple[str, float]:
        """What estimates take beside the job itself."""
        return self.precision, self.imbalance

    @property
    def capacity(self) -> float:
        return self.machine.memory * (1 - self.headroom)


@dataclass(frozen=True)
class LayoutCandidate:
    """One layout with what it takes, by its place in a lattice."""

    lattice: LayoutBlock
    place: int
    seconds: float
    bytes: float

    @cached_property
    def grid(self) -> LayoutGrid:
        """The layout alone."""
        where = np.unravel_index(self.place, self.lattice.shape)
        return self.lattice.grid.at(tuple(int(each) for each in where), self.lattice.shape)


@dataclass
class SearchResult:
    """The fastest layouts that fit, the front of memory and time, and how many were weighed."""

    best: list[LayoutCandidate] = field(default_factory=list[LayoutCandidate])
    front: list[LayoutCandidate] = field(default_factory=list[LayoutCandidate])
    leanest: LayoutCandidate | None = None  # of all, also where none fits
    candidates: int = 0
    passed_over: int = 0
    host_is_short: bool = False  # something would fit with more host memory
    seconds: float = 0.0


def search_layouts(
    question: SearchSpace,
    setting: EstimateSetting,
    keep: int,
    on_progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """Weigh every layout; offload only where nothing fits without, to disks if the host is full."""
    began = time.perf_counter()
    result, pool = SearchResult(), max(keep, _LEAST_PLAYED)
    said = question.fixed or {}
    if said.get("offload") == "nvme":
        setting.machine.disk_bandwidth()  # which says what to do where there is none
    for offload in OFFLOADS if setting.machine.host.nvme_bytes else OFFLOADS[:-1]:
        fixed = {"offload": offload, **said}
        _LayoutSearch(replace(question, fixed=fixed), setting, pool, result).run(on_progress)
        if result.best or "offload" in said or (offload == "cpu" and not result.host_is_short):
            break
    result.best = _played(question, setting, result.best)[:keep]
    result.seconds = time.perf_counter() - began
    return result


def _played(
    question: SearchSpace, setting: EstimateSetting, found: list[LayoutCandidate]
) -> list[LayoutCandidate]:
    """The foremost by their bounds, in the order of what the clock says of them."""
    if not found:
        return []
    columns = zip(*(one.grid.columns() for one in found), strict=True)
    grid = LayoutGrid(*map(np.concatenate, columns))
    asked = (question.shape, setting.machine, setting.stack, grid, question.seq, *setting.how)
    steps = np.broadcast_to(step_time(*asked, simulated=True).step, len(found))
    timed = [replace(one, seconds=float(step)) for one, step in zip(found, steps, strict=True)]
    return sorted(timed, key=lambda one: one.seconds)


class _LayoutSearch:
    """One pass over a space."""

    def __init__(
        self, question: SearchSpace, setting: EstimateSetting, keep: int, result: SearchResult
    ) -> None:
        self.question, self.setting, self.keep, self.result = question, setting, keep, result
        self.classes: dict[int, LayoutCandidate] = {}

    def run(self, on_progress: Callable[[float], None] | None) -> None:
        """The most promising degrees come first, so that the rest is passed over soon."""
        found = list(layout_blocks(self.question))
        least = [self._least(each) for each in found]
        order = sorted(range(len(found)), key=lambda place: float(least[place].min()))
        for number, place in enumerate(order):
            self._weigh(found[place], least[place])
            if on_progress is not None:
                on_progress((number + 1) / len(found))
        self.result.front = list(_falling(self.classes))

    def _least(self, lattice: LayoutBlock) -> Array:
        """Seconds that a step of each degree takes at least."""
        setting, question = self.setting, self.question
        asked = (question.shape, setting.machine, setting.stack, lattice.grid, question.seq)
        whole = least_layer_seconds(LayerTimer(*asked, *setting.how))
        least = whole.min(axis=tuple(range(1, whole.ndim)))
        return np.broadcast_to(least, len(lattice.degrees))

    def _weigh(self, lattice: LayoutBlock, least: Array) -> None:
        best = self.result.best
        worst = best[-1].seconds if len(best) >= self.keep else np.inf
        hopeful = least <= worst
        if not hopeful.all():
            self.result.passed_over += lattice.size * int((~hopeful).sum()) // len(hopeful)
            if not hopeful.any():
                return
            lattice = lattice.only(hopeful)
        shape = lattice.shape
        times, books = self._estimates(lattice)
        seconds = np.where(lattice.legal, np.broadcast_to(times.step, shape), np.inf).ravel()
        memory = np.broadcast_to(books.total, shape).ravel()
        self.result.candidates += lattice.size
        fits, has_room = books.total <= self.setting.capacity, self._fits_host(books)
        self.result.host_is_short |= bool((fits & ~has_room).any())
        fits = np.broadcast_to(fits & has_room, shape).ravel()
        self._keep_best(lattice, np.where(fits, seconds, np.inf), memory)
        self._keep_front(lattice, seconds, memory)

    def _fits_host(self, books: PeakMemory) -> NDArray[np.bool_]:
        """Whether the nodes have room for what their GPUs offload."""
        machine = self.setting.machine
        in_memory = books.host * machine.gpus_per_node <= machine.host.memory
        return in_memory & (books.disk * machine.gpus_per_node <= (machine.host.nvme_bytes or 0.0))

    def _estimates(self, lattice: LayoutBlock) -> tuple[StepTime, PeakMemory]:
        setting, question = self.setting, self.question
        asked = (question.shape, setting.machine, setting.stack, lattice.grid, question.seq)
        return step_time(*asked, *setting.how), peak_memory(*asked, *setting.how)

    def _keep_best(self, lattice: LayoutBlock, seconds: Array, memory: Array) -> None:
        best = self.result.best
        worst = best[-1].seconds if len(best) >= self.keep else np.inf
        places = np.argpartition(seconds, min(self.keep, len(seconds) - 1))[: self.keep]
        best += [
            _candidate(lattice, int(place), seconds, memory)
            for place in places
            if seconds[place] < worst
        ]
        best.sort(key=lambda one: one.seconds)
        del best[self.keep :]

    def _keep_front(self, lattice: LayoutBlock, seconds: Array, memory: Array) -> None:
        """The fastest of each class of memory; the leanest of all."""
        numbers = (memory / self.setting.machine.memory * _FRONT).astype(np.int64).clip(0, _FRONT)
        fastest = np.full(_FRONT + 1, np.inf)
        np.minimum.at(fastest, numbers, seconds)
        for number in np.flatnonzero(np.isfinite(fastest)):
            known = self.classes.get(int(number))
            if known is None or fastest[number] < known.seconds:
                place = int(np.flatnonzero((numbers == number) & (seconds == fastest[number]))[0])
                self.classes[int(number)] = _candidate(lattice, place, seconds, memory)
        legal = np.where(np.isfinite(seconds), memory, np.inf)
        lean = int(legal.argmin())
        if self.result.leanest is None or legal[lean] < self.result.leanest.bytes:
            self.result.leanest = _candidate(lattice, lean, seconds, memory)


def _candidate(lattice: LayoutBlock, place: int, seconds: Array, memory: Array) -> LayoutCandidate:
    return LayoutCandidate(lattice, place, float(seconds[place]), float(memory[place]))


def _falling(classes: dict[int, LayoutCandidate]) -> Iterator[LayoutCandidate]:
    """Each more memory only for less time."""
    fastest = np.inf
    for number in sorted(classes):
        if classes[number].seconds < fastest:
            fastest = classes[number].seconds
            yield classes[number]
