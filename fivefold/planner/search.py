"""The best layouts of the whole search space.

The time and memory of whole blocks of layouts are estimated at once, by arrays. Degrees whose
layers alone take longer than the best layouts found so far cannot win, whatever else is chosen, and
are passed over. So that the simplest of equally fast layouts can be chosen, the fastest layout of
each complexity is kept too, if it is within a share of the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.core import balance
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan, PlanOptions
from fivefold.core.shape import Shape
from fivefold.core.units import UnitPolicy
from fivefold.cost.grid import OFFLOADS, Array, LayoutGrid, grid_of_plan
from fivefold.cost.layer_time import LayerTimer
from fivefold.cost.memory import PeakMemory, peak_memory
from fivefold.cost.stack import NARROW_GRADIENTS, SoftwareStack
from fivefold.cost.step_time import least_layer_seconds, step_time
from fivefold.planner.simplicity import AXES, complexity, innermost, num_axes, tp_crosses
from fivefold.planner.space import LayoutBlock, SearchSpace, layout_blocks

CostArguments = tuple[Shape, Machine, SoftwareStack, LayoutGrid, int, str, float]
_FRONT = 128  # memory classes; the fastest layout of each is kept
_LEAST_SIMULATED = 12  # even if fewer are requested: bounds alone do not tell the best


@dataclass(frozen=True)
class EstimateSetting:
    """What estimates assume: the machine, the software, the precision and the free memory."""

    machine: Machine
    stack: SoftwareStack
    precision: str
    headroom: float = 0.05  # share of the memory that stays free
    imbalance: float = 1.0  # slots of the fullest expert over the mean

    def arguments(self, shape: Shape, grid: LayoutGrid, seq: int) -> CostArguments:
        """The arguments of cost functions, in their order."""
        return shape, self.machine, self.stack, grid, seq, self.precision, self.imbalance

    def with_keys(self, options: PlanOptions) -> EstimateSetting:
        """The same with the keys of a plan that change the software; other people's has none."""
        if not self.stack.runs_plans:
            return self
        units = UnitPolicy.of(options.grad_dtype, options.unit_size, options.prefetch)
        train, narrow = options.train, NARROW_GRADIENTS if units.grad_dtype == "bf16" else {}
        away = "" if train.offload_grads == "none" else "nvme" if train.grads_disk else "cpu"
        stack = replace(
            self.stack,
            unit_bytes=units.size,
            prefetch=units.prefetch,
            gather=options.gather or "",
            saves_gathered=options.tp_keep == "gathered",
            grads_home=away,
            memory=replace(self.stack.memory, moment_bytes=train.state_bytes),
            optimizer_bytes=self.stack.optimizer_bytes
            + 2 * (train.state_bytes - self.stack.memory.moment_bytes),
            orthogonalizes=train.optimizer_kind.full_matrices,
            balance=balance.parse(options.balance),
            **narrow,
        )
        return replace(self, stack=stack)

    @property
    def capacity(self) -> float:
        """Bytes of a GPU that may be used."""
        return self.machine.memory * (1 - self.headroom)


def plan_arguments(plan: Plan, setting: EstimateSetting) -> CostArguments:
    """The arguments of cost functions for one plan."""
    grid = grid_of_plan(plan)
    return setting.with_keys(plan.options).arguments(plan.shape, grid, plan.batch.seq)


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
        return self.block.grid.at(tuple(int(each) for each in index), self.block.shape)

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


def search_layouts(
    space: SearchSpace,
    setting: EstimateSetting,
    keep: int,
    on_progress: Callable[[float], None] | None = None,
    *,
    shown: int | None = None,
    equal: float = 0.0,
) -> SearchResult:
    """Estimate every layout, and keep the fastest that fit. `shown`: how many choices must be in
    the order of their simulated steps; `equal`: the share of a step within which simpler layouts
    are kept as well."""
    began = time.perf_counter()
    result, pool = SearchResult(), max(keep, _LEAST_SIMULATED)
    if (space.fixed or {}).get("offload") == "nvme":
        setting.machine.disk_bandwidth()  # raises an error if there are no disks
    for one, over_network in _resorts(space, setting, result):
        _LayoutSearch(one, setting, pool, result, over_network, equal).run(on_progress)
        if result.best:
            break
    result.best = _ranked(space, setting, result.best, shown or keep)[:keep]
    result.seconds = time.perf_counter() - began
    return result


def _resorts(
    space: SearchSpace, setting: EstimateSetting, result: SearchResult
) -> Iterator[tuple[SearchSpace, bool]]:
    """Where to search, as long as nothing fits: with offload, to disks if the host memory is full;
    then with tp over more than the innermost link."""
    said, machine = space.fixed or {}, setting.machine
    everywhere = "tp" in said or space.gpus <= innermost(machine)
    for over_network in (True,) if everywhere else (False, True):
        for offload in OFFLOADS if machine.host.nvme_bytes else OFFLOADS[:-1]:
            yield replace(space, fixed={"offload": offload, **said}), over_network
            if "offload" in said or (offload == "cpu" and not result.host_is_short):
                break


def _ranked(
    space: SearchSpace, setting: EstimateSetting, found: list[LayoutCandidate], shown: int
) -> list[LayoutCandidate]:
    """Candidates by their simulated steps, as far as the first choices depend on it: of the others
    the bounds already tell that they are slower."""
    left, known = sorted(found, key=lambda one: one.seconds), list[LayoutCandidate]()
    while left and left[0].rounded <= _last_shown(known, shown):
        together = [one for one in left if one.pipeline == left[0].pipeline]
        known += simulated(space, setting, together)
        left = [one for one in left if one.pipeline != left[0].pipeline]
    return sorted([*known, *left], key=lambda one: one.seconds)


def _last_shown(known: list[LayoutCandidate], shown: int) -> float:
    """Seconds of the last choice that is shown, if no other candidate is faster."""
    steps: dict[tuple[float, ...], float] = {}
    for one in known:
        steps[one.choice] = min(one.rounded, steps.get(one.choice, np.inf))
    return sorted(steps.values())[shown - 1] if len(steps) >= shown else np.inf


def simulated(
    space: SearchSpace, setting: EstimateSetting, found: list[LayoutCandidate]
) -> list[LayoutCandidate]:
    """The same candidates with their simulated steps in place of bounds."""
    if not found:
        return []
    columns = zip(*(one.grid.columns() for one in found), strict=True)
    grid = LayoutGrid(*map(np.concatenate, columns), rules=found[0].grid.rules)
    job = setting.arguments(space.shape, grid, space.seq)
    steps = np.broadcast_to(step_time(*job, simulated=True).step, len(found))
    return [replace(one, seconds=float(step)) for one, step in zip(found, steps, strict=True)]


class _LayoutSearch:
    """One pass over a search space."""

    def __init__(
        self,
        space: SearchSpace,
        setting: EstimateSetting,
        keep: int,
        result: SearchResult,
        over_network: bool,
        equal: float,
    ) -> None:
        self.space, self.setting, self.keep, self.result = space, setting, keep, result
        self.over_network, self.equal = over_network, equal
        self.domain = innermost(setting.machine)
        self.classes: dict[int, LayoutCandidate] = {}

    def run(self, on_progress: Callable[[float], None] | None) -> None:
        """Estimate the most promising degrees first, so that most others are passed over."""
        found = [each for one in layout_blocks(self.space) for each in self._allowed(one)]
        least = [self._least(each) for each in found]
        order = sorted(range(len(found)), key=lambda index: float(least[index].min()))
        for number, index in enumerate(order):
            self._estimate(found[index], least[index])
            if on_progress is not None:
                on_progress((number + 1) / len(found))
        self.result.front = list(_front(self.classes))

    def _allowed(self, block: LayoutBlock) -> Iterator[LayoutBlock]:
        """The block without tp over more than the innermost link, unless it is a last resort."""
        if self.over_network:
            yield block
            return
        inside = ~np.broadcast_to(
            tp_crosses(block.grid, self.setting.machine).ravel(), len(block.degrees)
        )
        if inside.any():
            yield block if inside.all() else block.only(inside)

    def _least(self, block: LayoutBlock) -> Array:
        """A lower bound of the step for each of the degrees: with the least recomputation."""
        grid = replace(block.grid, recompute=block.grid.recompute[:, :, :, :, :1])
        job = self.setting.arguments(self.space.shape, grid, self.space.seq)
        seconds = least_layer_seconds(LayerTimer(*job))
        least = seconds.min(axis=tuple(range(1, seconds.ndim)))
        return np.broadcast_to(least, len(block.degrees))

    def _job(self, block: LayoutBlock) -> CostArguments:
        return self.setting.arguments(self.space.shape, block.grid, self.space.seq)

    def _estimate(self, block: LayoutBlock, least: Array) -> None:
        """Estimate the degrees of a block that can still win, and keep the best layouts."""
        best = self.result.best
        worst = best[-1].seconds if len(best) >= self.keep else np.inf
        hopeful = (least <= worst) | self._may_be_simpler(block, least)
        if not hopeful.all():
            self.result.passed_over += block.size * int((~hopeful).sum()) // len(hopeful)
            if not hopeful.any():
                return
            block = block.only(hopeful)
        shape = block.shape
        times, peak = step_time(*self._job(block)), peak_memory(*self._job(block))
        seconds = np.where(block.legal, np.broadcast_to(times.step, shape), np.inf).ravel()
        memory = np.broadcast_to(peak.total, shape).ravel()
        self.result.candidates += block.size
        fits, has_room = peak.total <= self.setting.capacity, self._fits_host(peak)
        self.result.host_is_short |= bool((fits & ~has_room).any())
        fits = np.broadcast_to(fits & has_room, shape).ravel()
        fitting = np.where(fits, seconds, np.inf)
        self._keep_best(block, fitting, memory)
        self._keep_simple(block, fitting, memory)
        self._keep_front(block, seconds, memory)

    def _near(self) -> float:
        """Up to how many seconds a layout may be equal to the fastest."""
        return (1 + self.equal) * self.result.best[0].seconds

    def _may_be_simpler(self, block: LayoutBlock, least: Array) -> NDArray[np.bool_]:
        """Which degrees may be equal to the fastest with fewer axes than any equal one so far."""
        if not self.equal or not self.result.best:
            return np.zeros(len(least), bool)
        near = self._near()
        equals = (one for one in self.result.simple.values() if one.seconds <= near)
        fewest = min((int(num_axes(one.grid).item()) for one in equals), default=len(AXES))
        axes = np.array([sum(getattr(one, axis) > 1 for axis in AXES) for one in block.degrees])
        return (least <= near) & (axes < fewest)

    def _keep_simple(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        """Keep the fastest layout of each complexity, whatever its microbatch size is."""
        if not self.equal or not self.result.best:
            return
        near = np.flatnonzero(seconds <= self._near())
        codes = np.broadcast_to(complexity(block.grid, self.domain), block.shape).ravel()[near]
        order = np.lexsort((memory[near], seconds[near], codes))
        _, firsts = np.unique(codes[order], return_index=True)
        for place in order[firsts]:
            code, index = int(codes[place]), int(near[place])
            known = self.result.simple.get(code)
            if known is None or seconds[index] < known.seconds:
                self.result.simple[code] = _candidate(block, index, seconds, memory)

    def _fits_host(self, peak: PeakMemory) -> NDArray[np.bool_]:
        """Whether the nodes have room for what their GPUs offload."""
        machine = self.setting.machine
        in_memory = peak.host * machine.gpus_per_node <= machine.host.memory
        return in_memory & (peak.disk * machine.gpus_per_node <= (machine.host.nvme_bytes or 0.0))

    def _keep_best(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        best = self.result.best
        worst = best[-1].seconds if len(best) >= self.keep else np.inf
        indices = np.argpartition(seconds, min(self.keep, len(seconds) - 1))[: self.keep]
        best += [
            _candidate(block, int(index), seconds, memory)
            for index in indices
            if seconds[index] < worst
        ]
        best.sort(key=lambda one: one.seconds)
        del best[self.keep :]

    def _keep_front(self, block: LayoutBlock, seconds: Array, memory: Array) -> None:
        """Keep the fastest layout of each memory class, and the one with least memory of all."""
        numbers = (memory / self.setting.machine.memory * _FRONT).astype(np.int64).clip(0, _FRONT)
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


def _candidate(block: LayoutBlock, index: int, seconds: Array, memory: Array) -> LayoutCandidate:
    return LayoutCandidate(block, index, float(seconds[index]), float(memory[index]))


def _front(classes: dict[int, LayoutCandidate]) -> Iterator[LayoutCandidate]:
    """Layouts by rising memory, each faster than all before it."""
    fastest = np.inf
    for number in sorted(classes):
        if classes[number].seconds < fastest:
            fastest = classes[number].seconds
            yield classes[number]
