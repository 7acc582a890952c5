"""The best layouts of the whole search space.

The time and memory of whole blocks of layouts are estimated at once, by arrays. Degrees whose
layers alone take longer than the best layouts found so far cannot win, whatever else is chosen, and
are passed over. So that the simplest of equally fast layouts can be chosen, the fastest layout of
each complexity is kept too, if it is within a share of the fastest.

Lower bounds of the time and memory of layouts, which cost less than estimates of them.

A step takes at least as long as its layers and its head, spread evenly over the pipeline. A rank
holds at least its weights and states, and what its microbatches in flight save.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from fivefold.core.layout import divisors
from fivefold.cost import OFFLOADS, Array, Flags, LayoutGrid
from fivefold.cost.layer import LayersJob, by_schedule, layer_table
from fivefold.cost.memory import PeakMemory, least_memory, peak_memory
from fivefold.cost.step import PassCosts, Selection, StepTime, step_time
from fivefold.planner.candidates import (
    KeptLayouts,
    LayoutCandidate,
    SearchResult,
    innermost,
    num_axes,
)
from fivefold.planner.setting import EstimateSetting
from fivefold.planner.space import (
    MOST_MICROBATCH_SIZE,
    LayoutBlock,
    SearchSpace,
    layout_blocks,
    needed,
    select,
)

_DEGREES_AT_ONCE = 128
_LARGE_BLOCK = 4_000  # layouts: below, their estimate costs as little as a bound of their memory


@dataclass(frozen=True)
class BoundedBlock:
    """A block with lower bounds of its steps, by degrees, microbatch size, schedule and
    recomputation; endless where no layout fits."""

    block: LayoutBlock
    least: Array

    @property
    def lowest(self) -> float:
        return float(self.least.min())


class TimedBlock(BoundedBlock):
    """The same before memory is looked at; for schedules without pairs and with them."""

    def only(self, which: Flags) -> TimedBlock:
        """What some layouts of the block need."""
        stays = needed(which, self.block.shape)
        either = np.ones(self.least.shape[2], bool)
        least = select(self.least, [*stays[:2], either, *stays[3:]])
        return TimedBlock(self.block.only(stays), least)

    def below(self, limit: Array | float) -> TimedBlock:
        """What of the block may be within a limit."""
        return self.only(np.asarray((self.least <= limit).any(axis=2, keepdims=True)))

    def parts(self) -> Iterator[TimedBlock]:
        """Parts of similar degrees: the limit that the fastest of them set spares most others."""
        order = np.argsort(self.least.min(axis=(1, 2, 3, 4, 5)), kind="stable")
        for start in range(0, len(order), _DEGREES_AT_ONCE):
            which = np.zeros((len(order), *(1,) * 5), bool)
            which[order[start : start + _DEGREES_AT_ONCE]] = True
            yield self.only(which)


class LayoutBounds:
    """Lower bounds for the blocks of one search space."""

    def __init__(self, space: SearchSpace, setting: EstimateSetting) -> None:
        self.space, self.setting = space, setting
        job = (space.shape, setting.machine, setting.stack, space.seq)
        sizes = tuple(n for n in divisors(space.batch) if n <= MOST_MICROBATCH_SIZE)
        sp = bool((space.fixed or {}).get("sp", True))
        options = (setting.precision, setting.imbalance, sizes, space.rules, sp)
        self.table = layer_table(LayersJob(*job, *options), space.gpus)

    def of_time(self, blocks: list[LayoutBlock]) -> list[TimedBlock]:
        """Parts of all blocks; their layers are timed at once."""
        self.table.add(block.grid for block in blocks)
        timed = (TimedBlock(block, self.table.least(block.grid)) for block in blocks)
        return [part for timing in timed for part in timing.parts()]

    def by_schedule(self, part: TimedBlock, fitting: bool) -> BoundedBlock:
        """The same for each schedule that can run its microbatches; with `fitting`, where a layout
        may fit with some sharding."""
        block, possible = part.block, part.block.legal
        if fitting and block.size >= _LARGE_BLOCK:
            grid = block.leanest_shardings().grid
            job = self.setting.arguments(self.space.shape, grid, self.space.seq)
            possible = possible & (least_memory(*job) <= self.setting.capacity)
        return BoundedBlock(block, np.where(possible, by_schedule(part.least, block.grid), np.inf))

    def passes(self, block: LayoutBlock) -> PassCosts:
        """Seconds of the layers of a block."""
        return self.table.passes(block.grid)


_LEAST_SIMULATED = 12  # even if fewer are requested: bounds alone do not tell the best
_SPARSE = 6  # of fewer than one in so many of a block, the memory is estimated one by one
_LEAN = {"microbatch_size": 1, "recompute": "full"}
_LISTED_AT_ONCE = 2_000  # layouts whose memory is estimated one by one


def search_layouts(
    space: SearchSpace,
    setting: EstimateSetting,
    keep: int,
    on_progress: Callable[[float], None] | None = None,
    *,
    shown: int | None = None,
    equal: float = 0.0,
    rules: Sequence[str] = (),
    leanest: bool = True,
) -> SearchResult:
    """Estimate every layout, and keep the fastest that fit. `shown`: how many choices must be in
    the order of their simulated steps; `equal`: the share of a step within which simpler layouts
    are kept as well; `rules`: keep the fastest of each of these rules of recomputation. If nothing
    fits, the layout with the least memory is found, unless it does not matter (`leanest`)."""
    began = time.perf_counter()
    result, pool = SearchResult(), max(keep, _LEAST_SIMULATED)
    if (space.fixed or {}).get("offload") == "nvme":
        setting.machine.disk_bandwidth()  # raises an error if there are no disks
    numbers = [[*map(str, space.rules)].index(rule) for rule in rules]
    last = space
    for last in _resorts(space, setting, result):
        _LayoutSearch(last, setting, pool, result, equal, numbers).run(on_progress)
        if result.best or rules:
            break
    else:
        if leanest:
            # Estimate the layouts that may need least memory, whether they fit or not: with the
            # smallest microbatches, and with everything recomputed.
            lean = replace(last, fixed={**_LEAN, **(last.fixed or {})})
            _LayoutSearch(lean, setting, pool, result, 0.0, ()).run(on_progress, fitting=False)
    groups = [
        [candidate for candidate in result.best if candidate.rule == rule] for rule in numbers
    ]
    best = [
        _ranked(space, setting, group, shown or keep, shown is not None)[:keep]
        for group in groups or [result.best]
    ]
    result.finish(list(chain(*best)), time.perf_counter() - began)
    return result


def _resorts(
    space: SearchSpace, setting: EstimateSetting, result: SearchResult
) -> Iterator[SearchSpace]:
    """Where to search, as long as nothing fits: with offload, to disks if the host memory is full;
    then with tp over more than the innermost link."""
    options, machine = space.fixed or {}, setting.machine
    domain = innermost(machine)
    everywhere = "tp" in options or space.gpus <= domain
    for inside in (None,) if everywhere else (int(domain), None):
        for offload in OFFLOADS if machine.host.nvme_bytes else OFFLOADS[:-1]:
            yield replace(space, fixed={"offload": offload, **options}, tp_inside=inside)
            if "offload" in options or (offload == "cpu" and not result.host_is_short):
                break


def may_fit(space: SearchSpace, setting: EstimateSetting) -> bool:
    """Whether a layout fits by closed forms: of those that may need least memory, and with
    optimizer states on the host, unless that is too small for them. One pass tells most jobs that
    do not fit, for which `search_layouts` needs five."""
    result = SearchResult()
    for offload in ("cpu", *(("nvme",) if setting.machine.host.nvme_bytes else ()), "none"):
        lean = replace(space, fixed={**_LEAN, "offload": offload, **(space.fixed or {})})
        _LayoutSearch(lean, setting, 1, result, 0.0, ()).run()
        if result.best or not result.host_is_short:
            break
    return bool(result.best)


def _ranked(
    space: SearchSpace,
    setting: EstimateSetting,
    candidates: list[LayoutCandidate],
    shown: int,
    distinct: bool,
) -> list[LayoutCandidate]:
    """Candidates by their simulated steps, as far as the first choices depend on it: of the others
    the bounds already tell that they are slower. If `distinct` choices are shown, what is slower
    than a candidate of the same choice is left out."""
    left, known = sorted(candidates, key=lambda layout: layout.seconds), list[LayoutCandidate]()
    steps: dict[tuple[float, ...], float] = {}  # of the fastest of each choice
    while left and left[0].rounded <= _last(steps, shown):
        pipeline = left[0].pipeline
        for candidate in simulated(
            space, setting, [layout for layout in left if layout.pipeline == pipeline]
        ):
            known.append(candidate)
            steps[candidate.choice] = min(candidate.rounded, steps.get(candidate.choice, np.inf))
        left = [
            layout
            for layout in left
            if layout.pipeline != pipeline
            and not (distinct and layout.rounded > steps.get(layout.choice, np.inf))
        ]
    return sorted([*known, *left], key=lambda layout: layout.speed_rank)


def _last(steps: dict[tuple[float, ...], float], shown: int) -> float:
    """Seconds of the last choice that is shown, if no other candidate is faster."""
    return sorted(steps.values())[shown - 1] if len(steps) >= shown else np.inf


def simulated(
    space: SearchSpace, setting: EstimateSetting, candidates: list[LayoutCandidate]
) -> list[LayoutCandidate]:
    """The same candidates with their simulated steps in place of bounds."""
    if not candidates:
        return []
    columns = zip(*(candidate.grid.columns() for candidate in candidates), strict=True)
    grid = LayoutGrid(*map(np.concatenate, columns), rules=candidates[0].grid.rules)
    times = step_time(*setting.arguments(space.shape, grid, space.seq), simulated=True)
    inside = times.inside / setting.stack.factor
    seconds = (np.broadcast_to(column, len(candidates)).tolist() for column in (times.step, inside))
    # Other people's stacks are not simulated here, and long schedules are extrapolated.
    ours = setting.stack.memory.split == "balanced"
    return [
        replace(candidate, seconds=step, makespan=span if ours and not candidate.is_long else None)
        for candidate, step, span in zip(candidates, *seconds, strict=True)
    ]


def _lowest(part: BoundedBlock) -> float:
    return part.lowest


class _LayoutSearch:
    """One pass over a search space."""

    def __init__(
        self,
        space: SearchSpace,
        setting: EstimateSetting,
        keep: int,
        result: SearchResult,
        equal: float,
        rules: Sequence[int],
    ) -> None:
        self.space, self.setting, self.result = space, setting, result
        domain = innermost(setting.machine)
        self.leaders = KeptLayouts(result, keep, equal, setting.machine.memory, domain, rules)
        self.bounds = LayoutBounds(space, setting)

    def run(
        self, on_progress: Callable[[float], None] | None = None, *, fitting: bool = True
    ) -> None:
        """Search what may fit, or everything."""
        blocks = list(layout_blocks(self.space))
        parts = self.bounds.of_time(blocks)
        estimated = self._search(parts, fitting, on_progress)
        self.result.count(sum(block.size for block in blocks), estimated)
        self.result.draw_front(list(self.leaders.front()))

    def _search(
        self,
        parts: list[TimedBlock],
        fitting: bool,
        on_progress: Callable[[float], None] | None,
    ) -> int:
        """Estimate the most promising degrees first, so that most others are passed over. Returns
        how many were estimated."""
        estimated = 0
        for number, part in enumerate(self._promising(parts, fitting)):
            estimated += self._estimate(part)
            if on_progress is not None:
                on_progress(number / len(parts))
        if on_progress is not None:
            on_progress(1.0)
        return estimated

    def _promising(self, parts: list[TimedBlock], fitting: bool) -> Iterator[BoundedBlock]:
        """Parts by their bounds, as long as they are within the limit. Bounds by schedule and
        memory, which cost more than those of time, are made for parts whose turn it is."""
        left, known = deque(sorted(parts, key=_lowest)), list[BoundedBlock]()
        while left or known:
            if known and not (left and left[0].lowest < known[0].lowest):
                yield known.pop(0)
                continue
            part = left.popleft()
            reach = self._reach(part.block)
            if (part.least <= reach).any():
                insort(known, self.bounds.by_schedule(part.below(reach), fitting), key=_lowest)

    def _reach(self, block: LayoutBlock) -> Array | float:
        """Seconds that a layout must not exceed to be one of the fastest, or equal to the first."""
        if self.leaders.rules:
            return self.leaders.worst_by_rule(block.grid)
        return max(self.leaders.worst_in(block), self.leaders.near)

    def _estimate(self, part: BoundedBlock) -> int:
        """Estimate those of a block that can still win, and keep the best layouts: first their
        time, then the memory of those that are fast enough. Returns how many are estimated."""
        hopeful = self._hopeful(part)
        if not hopeful.any():
            return 0
        stays = needed(hopeful, part.block.shape)
        block, hopeful, least = (
            part.block.only(stays),
            select(hopeful, stays),
            select(part.least, stays),
        )

        def selection(around: Array) -> Flags:
            shortest = least + around.min(axis=(3, 5), keepdims=True)
            hoped = hopeful & (shortest <= self._reach(block))
            return np.asarray(hoped.any(axis=(0, 3, 4, 5), keepdims=True))

        times, size = self._times(block, selection), block.size
        bound = times.inside + times.around.min(axis=(3, 5), keepdims=True)
        hopeful = hopeful & (bound <= self._reach(block))
        if not hopeful.any():
            return size
        stays = needed(hopeful, block.shape)
        block, hopeful = block.only(stays), select(hopeful, stays)
        seconds = select(times.inside, stays) + select(times.around, stays)
        seconds = np.broadcast_to(seconds, block.shape)
        fast = hopeful & (seconds <= self._reach(block))
        if fast.sum() >= fast.size / _SPARSE:
            self._keep(block, np.where(block.legal, seconds, np.inf))
            return size
        places = np.flatnonzero(fast)
        places = places[np.argsort(seconds.ravel()[places], kind="stable")]
        for start in range(0, len(places), _LISTED_AT_ONCE):
            chunk = places[start : start + _LISTED_AT_ONCE]
            if seconds.flat[chunk[0]] > np.max(self._reach(block)):  # those before have lowered it
                break
            self._keep(block.listed(chunk), seconds.ravel()[chunk])
        return size

    def _keep(self, block: LayoutBlock, seconds: Array) -> None:
        """Estimate the memory of layouts, and keep the best of those that fit."""
        memory, fits = self._memory(block)
        fitting = np.where(fits, seconds, np.inf)
        self.leaders.keep(block, seconds.ravel(), memory.ravel(), fitting.ravel())

    def _hopeful(self, part: BoundedBlock) -> Flags:
        """What of a block may be fast enough: of degrees that may be among the fastest, or equal to
        the fastest with fewer axes than any equal one so far."""
        lowest = part.least.min(axis=tuple(range(1, part.least.ndim)), keepdims=True)
        fewer = num_axes(part.block.grid) < self.leaders.fewest_axes()
        worst = self.leaders.worst_in(part.block)
        degrees = (lowest <= worst) | ((lowest <= self.leaders.near) & fewer)
        return degrees & np.isfinite(part.least) & (part.least <= self._reach(part.block))

    def _times(self, block: LayoutBlock, quantities: Selection) -> StepTime:
        """Of steps; `quantities`: with which microbatch sizes and schedules, by what is around."""
        job = self.setting.arguments(self.space.shape, block.grid, self.space.seq)
        return step_time(*job, selection=quantities, passes=self.bounds.passes(block))

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
