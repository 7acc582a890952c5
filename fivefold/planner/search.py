"""The best layouts of the whole search space.

The time and memory of whole blocks of layouts are estimated at once, by arrays. Degrees whose
layers alone take longer than the best layouts found so far cannot win, whatever else is chosen, and
are passed over. So that the simplest of equally fast layouts can be chosen, the fastest layout of
each complexity is kept too, if it is within a share of the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fivefold.core import balance
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan, PlanOptions
from fivefold.core.shape import Shape
from fivefold.core.units import UnitPolicy
from fivefold.cost.grid import (
    FAMILIES,
    OFFLOADS,
    SCHEDULES,
    Array,
    Flags,
    LayoutGrid,
    grid_of_plan,
)
from fivefold.cost.layer_time import LayerTimer
from fivefold.cost.memory import PeakMemory, least_memory, peak_memory
from fivefold.cost.stack import NARROW_GRADIENTS, SoftwareStack
from fivefold.cost.step_time import least_layer_seconds, step_time
from fivefold.planner.kept_layouts import KeptLayouts, LayoutCandidate, SearchResult
from fivefold.planner.simplicity import innermost, num_axes, tp_crosses
from fivefold.planner.space import LayoutBlock, SearchSpace, layout_blocks, needed, select

CostArguments = tuple[Shape, Machine, SoftwareStack, LayoutGrid, int, str, float]
_LEAST_SIMULATED = 12  # even if fewer are requested: bounds alone do not tell the best
_FEW_BLOCKS = 3  # whose plain layouts are estimated, if enough of them fit
_SPARSE = 6  # of fewer than one in so many of a block, the memory is estimated one by one
_DEGREES_AT_ONCE = 128
_MANY_LAYOUTS, _LARGE_BLOCK = 100_000, 10_000  # below, an array costs as little as a bound of it
_PLAIN = "1f1b"
_ROUNDING = 1e-9  # of seconds: their last digits depend on the size of a block


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
    best = _ranked(space, setting, result.best, shown or keep)[:keep]
    result.finish(best, time.perf_counter() - began)
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
        self.space, self.setting, self.result = space, setting, result
        self.over_network = over_network
        domain = innermost(setting.machine)
        self.kept = KeptLayouts(result, keep, equal, setting.machine.memory, domain)
        self.plain = np.zeros(0)  # seconds of the fastest plain layouts that fit

    def run(self, on_progress: Callable[[float], None] | None) -> None:
        """Estimate the most promising degrees first, so that most others are passed over; before
        them some plain layouts of each, which tell how fast a layout must be."""
        found = [each for one in layout_blocks(self.space) for each in self._allowed(one)]
        parts = [each for one in found for each in self._in_parts(one)]
        parts.sort(key=lambda each: float(each[1].min()))
        many = sum(each.size for each in found) >= _MANY_LAYOUTS
        for number, (block, _) in enumerate(parts if many else ()):
            if number >= _FEW_BLOCKS and len(self.plain) >= self.kept.number:
                break
            self._estimate_plain(block)
        for number, (block, least) in enumerate(parts):
            self._estimate(block, least)
            if on_progress is not None:
                on_progress((number + 1) / len(parts))
        self.result.draw_front(list(self.kept.front()))

    def _allowed(self, block: LayoutBlock) -> Iterator[LayoutBlock]:
        """The block without tp over more than the innermost link, unless it is a last resort."""
        if self.over_network:
            yield block
            return
        inside = ~tp_crosses(block.grid, self.setting.machine)
        if inside.any():
            yield block if inside.all() else block.only(needed(inside, block.shape))

    def _in_parts(self, block: LayoutBlock) -> Iterator[tuple[LayoutBlock, Array]]:
        """The block in parts of similar degrees, each with its bounds: the limit that the fastest
        of them set spares most of the others."""
        least = self._least(block)
        lowest = least.min(axis=tuple(range(1, least.ndim)))
        order = np.argsort(np.broadcast_to(lowest, len(block.degrees)), kind="stable")
        for start in range(0, len(order), _DEGREES_AT_ONCE):
            which = np.zeros((len(order), *(1,) * 5), bool)
            which[order[start : start + _DEGREES_AT_ONCE]] = True
            stays = needed(which, block.shape)
            yield block.only(stays), select(least, stays)

    def _least(self, block: LayoutBlock) -> Array:
        """A lower bound of the step by degrees, microbatch size, schedule and recomputation."""
        # Of schedules, only what they hide matters here, and nothing of sharding.
        pairs = [FAMILIES[int(number)].pairs for number in block.grid.schedule.flat]
        _, firsts, back = np.unique(pairs, return_index=True, return_inverse=True)
        grid = replace(
            block.grid,
            schedule=block.grid.schedule[:, :, firsts],
            replicate=block.grid.replicate[:, :, :, :1],
            shard=block.grid.shard[:, :, :, :1],
        )
        job = self.setting.arguments(self.space.shape, grid, self.space.seq)
        seconds = least_layer_seconds(LayerTimer(*job))
        return seconds[:, :, back] if seconds.shape[2] > 1 else seconds

    def _estimate_plain(self, block: LayoutBlock) -> None:
        """Estimate a block with its smallest microbatches and a plain schedule."""
        schedules, first = block.grid.schedule, np.zeros_like(block.grid.microbatch_size, bool)
        plain = schedules == SCHEDULES.index(_PLAIN)
        if not plain.any():
            plain = schedules == schedules.flat[0]
        first[0, 0] = True
        block = block.only(needed(first & plain, block.shape))
        seconds = np.broadcast_to(self._seconds(block, block.legal), block.shape)
        seconds = np.where(block.legal, seconds, np.inf)
        memory, fits = self._memory(block)
        fitting = seconds[np.isfinite(seconds) & fits]
        self.plain = np.sort(np.concatenate([self.plain, fitting]))[: self.kept.number]
        self.kept.keep_front(block, seconds.ravel(), memory.ravel())

    @property
    def _limit(self) -> float:
        """Seconds that a layout must not exceed to be one of the fastest."""
        if len(self.plain) < self.kept.number:
            return self.kept.worst
        return min(self.kept.worst, float(self.plain[-1]) * (1 + _ROUNDING))

    def _estimate(self, block: LayoutBlock, least: Array) -> None:
        """Estimate those of a block that can still win, and keep the best layouts: first their
        time, then the memory of those that are fast enough and may fit."""
        size, limit = block.size, max(self._limit, self.kept.near)
        hopeful = block.legal & self._hopeful(block, least) & (least <= limit)
        stays = needed(hopeful, block.shape)
        if hopeful.any():
            block, hopeful = block.only(stays), select(hopeful, stays)
            hopeful = self._may_fit(block, hopeful)
        if not hopeful.any():
            self.result.count(size, 0)
            return
        stays = needed(hopeful, block.shape)
        block, hopeful = block.only(stays), select(hopeful, stays)
        self.result.count(size, block.size)
        wanted = np.asarray(hopeful.any(axis=(0, 3, 4, 5), keepdims=True))
        seconds = np.broadcast_to(self._seconds(block, wanted), block.shape)
        seconds = np.where(block.legal, seconds, np.inf)
        fast = hopeful & (seconds <= limit)
        if not fast.any():
            return
        if fast.sum() < fast.size / _SPARSE:
            block, seconds = block.listed(fast), seconds[fast]
        else:
            stays = needed(fast, block.shape)
            block, seconds = block.only(stays), select(seconds, stays)
        memory, fits = self._memory(block)
        fitting = np.where(fits, seconds, np.inf)
        self.kept.keep(block, seconds.ravel(), memory.ravel(), fitting.ravel())

    def _may_fit(self, block: LayoutBlock, hopeful: Flags) -> Flags:
        """What is hopeful and may fit. If nothing fits so far, all of it may be asked for: the
        layout with the least memory is reported."""
        if not len(self.plain) or block.size < _LARGE_BLOCK:
            return hopeful
        job = self.setting.arguments(self.space.shape, block.grid, self.space.seq)
        return hopeful & (least_memory(*job) <= self.setting.capacity)

    def _hopeful(self, block: LayoutBlock, least: Array) -> Flags:
        """Which degrees may be among the fastest, or equal to the fastest with fewer axes than any
        equal one so far."""
        lowest = least.min(axis=tuple(range(1, least.ndim)), keepdims=True)
        fewer = num_axes(block.grid) < self.kept.fewest_axes()
        return (lowest <= self._limit) | ((lowest <= self.kept.near) & fewer)

    def _seconds(self, block: LayoutBlock, wanted: Flags) -> Array:
        """Of a step; `wanted`: with which microbatch sizes and schedules."""
        job = self.setting.arguments(self.space.shape, block.grid, self.space.seq)
        return step_time(*job, wanted=wanted).step

    def _memory(self, block: LayoutBlock) -> tuple[Array, Flags]:
        """Bytes of the fullest rank, and whether GPUs and hosts have room."""
        peak = peak_memory(*self.setting.arguments(self.space.shape, block.grid, self.space.seq))
        fits, has_room = peak.total <= self.setting.capacity, self._fits_host(peak)
        self.result.note_host(bool((fits & ~has_room).any()))
        return (
            np.broadcast_to(peak.total, block.shape),
            np.broadcast_to(fits & has_room, block.shape),
        )

    def _fits_host(self, peak: PeakMemory) -> Flags:
        """Whether the nodes have room for what their GPUs offload."""
        machine = self.setting.machine
        in_memory = peak.host * machine.gpus_per_node <= machine.host.memory
        return in_memory & (peak.disk * machine.gpus_per_node <= (machine.host.nvme_bytes or 0.0))
