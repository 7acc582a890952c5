"""Lower bounds of the time and memory of layouts, which cost less than estimates of them.

A step takes at least as long as its layers and its head, spread evenly over the pipeline. A rank
holds at least its weights and states, and what its microbatches in flight save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fivefold.core.layout import divisors
from fivefold.cost import Array, Flags
from fivefold.cost.layer import LayersJob, by_schedule, layer_table
from fivefold.cost.memory import least_memory
from fivefold.cost.step import PassCosts
from fivefold.planner.setting import EstimateSetting
from fivefold.planner.space import MOST_MICROBATCH_SIZE, LayoutBlock, SearchSpace, needed, select

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
            job = self.setting.arguments(self.space.shape, block.grid, self.space.seq)
            possible = possible & (least_memory(*job) <= self.setting.capacity)
        return BoundedBlock(block, np.where(possible, by_schedule(part.least, block.grid), np.inf))

    def passes(self, block: LayoutBlock) -> PassCosts:
        """Seconds of the layers of a block."""
        return self.table.passes(block.grid)
