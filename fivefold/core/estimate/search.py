"""The best layouts of the whole space.

Lattices of layouts are timed and weighed at once by arrays. Degrees whose layers alone take longer
than the best layouts found so far cannot win, whatever hangs on them, and are passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fivefold.core.estimate.grid import Array, Grid
from fivefold.core.estimate.layer import Clockwork
from fivefold.core.estimate.ledger import Ledger, ledger
from fivefold.core.estimate.space import Lattice, Question, lattices
from fivefold.core.estimate.stack import Stack
from fivefold.core.estimate.timing import Timing, busy, timing
from fivefold.core.machine import Machine

_FRONT = 128  # classes of memory, of which the fastest layout is kept


@dataclass(frozen=True)
class Setting:
    """On what a job runs, and how full the memory may be."""

    machine: Machine
    stack: Stack
    precision: str
    headroom: float = 0.05  # share of the memory that stays free

    @property
    def capacity(self) -> float:
        return self.machine.memory * (1 - self.headroom)


@dataclass(frozen=True)
class Candidate:
    """One layout with what it takes."""

    grid: Grid
    seconds: float
    bytes: float


@dataclass
class Result:
    """The fastest layouts that fit, the front of memory and time, and how many were weighed."""

    best: list[Candidate] = field(default_factory=list[Candidate])
    front: list[Candidate] = field(default_factory=list[Candidate])
    leanest: Candidate | None = None  # of all, also where none fits
    candidates: int = 0
    passed_over: int = 0
    seconds: float = 0.0


def search(
    question: Question,
    setting: Setting,
    keep: int,
    on_progress: Callable[[float], None] | None = None,
) -> Result:
    """Weigh every layout; offload only where nothing fits without."""
    began = time.perf_counter()
    result = Result()
    for offload in (0, 1):
        fixed = {"offload": offload, **(question.fixed or {})}
        _Hunt(replace(question, fixed=fixed), setting, keep, result).run(on_progress)
        if result.best or "offload" in (question.fixed or {}):
            break
    result.seconds = time.perf_counter() - began
    return result


class _Hunt:
    """One pass over a space."""

    def __init__(self, question: Question, setting: Setting, keep: int, result: Result) -> None:
        self.question, self.setting, self.keep, self.result = question, setting, keep, result
        self.classes: dict[int, Candidate] = {}

    def run(self, on_progress: Callable[[float], None] | None) -> None:
        """The most promising degrees come first, so that the rest is passed over soon."""
        found = list(lattices(self.question))
        least = [self._least(each) for each in found]
        order = sorted(range(len(found)), key=lambda place: float(least[place].min()))
        for number, place in enumerate(order):
            self._weigh(found[place], least[place])
            if on_progress is not None:
                on_progress((number + 1) / len(found))
        self.result.front = list(_falling(self.classes))

    def _least(self, lattice: Lattice) -> Array:
        """Seconds that a step of each degree takes at least."""
        setting, question = self.setting, self.question
        asked = (question.shape, setting.machine, setting.stack, lattice.grid, question.seq)
        whole = busy(Clockwork(*asked, setting.precision))
        least = whole.min(axis=tuple(range(1, whole.ndim)))
        return np.broadcast_to(least, len(lattice.degrees))

    def _weigh(self, lattice: Lattice, least: Array) -> None:
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
        fits = (books.total <= self.setting.capacity) & self._fits_host(books)
        fits = np.broadcast_to(fits, shape).ravel()
        self._keep_best(lattice, np.where(fits, seconds, np.inf), memory)
        self._keep_front(lattice, seconds, memory)

    def _fits_host(self, books: Ledger) -> NDArray[np.bool_]:
        """Whether the nodes have room for what their GPUs offload."""
        machine = self.setting.machine
        return books.host * machine.gpus_per_node <= machine.host.memory

    def _estimates(self, lattice: Lattice) -> tuple[Timing, Ledger]:
        setting, question = self.setting, self.question
        asked = (question.shape, setting.machine, setting.stack, lattice.grid, question.seq)
        return timing(*asked, setting.precision), ledger(*asked, setting.precision)

    def _keep_best(self, lattice: Lattice, seconds: Array, memory: Array) -> None:
        best = self.result.best
        worst = best[-1].seconds if len(best) >= self.keep else np.inf
        places = np.argpartition(seconds, min(self.keep, len(seconds) - 1))[: self.keep]
        best += [
            _candidate(lattice, place, seconds, memory)
            for place in places
            if seconds[place] < worst
        ]
        best.sort(key=lambda one: one.seconds)
        del best[self.keep :]

    def _keep_front(self, lattice: Lattice, seconds: Array, memory: Array) -> None:
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


def _candidate(lattice: Lattice, place: int, seconds: Array, memory: Array) -> Candidate:
    where = np.unravel_index(place, lattice.shape)
    grid = lattice.grid.at(tuple(int(each) for each in where), lattice.shape)
    return Candidate(grid, float(seconds[place]), float(memory[place]))


def _falling(classes: dict[int, Candidate]) -> Iterator[Candidate]:
    """Each more memory only for less time."""
    fastest = np.inf
    for number in sorted(classes):
        if classes[number].seconds < fastest:
            fastest = classes[number].seconds
            yield classes[number]
