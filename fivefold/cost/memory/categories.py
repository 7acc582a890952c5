"""Peak memory of the fullest rank, by category, for every layout of a grid.

The rank of the first stage has the embedding and the most microbatches in flight, the rank of the
head has the logits, and a rank between them may have more layers. The fullest of them, at its peak,
decides whether a layout fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core import Machine
from fivefold.core.model import Shape
from fivefold.cost import Array, LayoutGrid
from fivefold.cost.hardware import LAUNCH_QUEUE, AllocatorCache, SoftwareStack
from fivefold.cost.memory.entries import MemoryEntries, MemoryParts
from fivefold.cost.stages import RankStage, rank_stages

Verdict = Literal["fits", "tight", "does not fit"]
CATEGORIES = (
    "weights",
    "gradients",
    "master",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "prefetch",
    "context",
    "margin",
)
# Categories that depend on the same columns are summed first, before they are broadcast.
_STATES = ("weights", "gradients", "master", "optimizer", "prefetch")
_OTHERS = tuple(name for name in CATEGORIES if name not in _STATES)


@dataclass(frozen=True)
class PeakMemory:
    """Device memory of the ranks that may be a layout's fullest, from the first to the head's.

    Each rank has one entry per moment that may be its peak. `reserve` computes what the allocator
    of the first rank reserves at its peak.
    """

    ranks: tuple[tuple[MemoryParts, ...], ...]
    host: Array  # bytes that offload keeps in host memory
    disk: Array  # and on local disks
    reserve: Callable[[], Array]

    @cached_property
    def first(self) -> MemoryParts:
        """The first rank at its peak."""
        return _fullest(self.ranks[0])

    @cached_property
    def last(self) -> MemoryParts:
        """The last rank, or that of the head, at its peak."""
        return _fullest(self.ranks[-1])

    @cached_property
    def total(self) -> Array:
        """Bytes of the fullest rank."""
        return reduce(np.maximum, (_most(moments) for moments in self.ranks))

    @cached_property
    def parts(self) -> MemoryParts:
        """Categories of the fullest rank; they sum to `total`."""
        return _fullest([_fullest(moments) for moments in self.ranks])

    @cached_property
    def reserved(self) -> Array:
        """What torch reports as reserved on the first rank: the allocator's pool."""
        return self.reserve()


def total_bytes(parts: MemoryParts) -> Array:
    """All categories together."""
    return _sum(parts, _STATES) + _sum(parts, _OTHERS)


def _sum(parts: MemoryParts, names: Sequence[str]) -> Array:
    return sum((parts[name] for name in names), np.zeros(1))


def _most(moments: Sequence[MemoryParts]) -> Array:
    """Bytes at the peak of some moments."""
    return reduce(np.maximum, map(total_bytes, moments))


def _fullest(moments: Sequence[MemoryParts]) -> MemoryParts:
    """The moment with the most bytes, layout by layout."""
    most = _most(moments)
    chosen = moments[0]
    for parts in moments[1:]:
        fuller = total_bytes(parts) == most
        chosen = {name: np.where(fuller, parts[name], chosen[name]) for name in CATEGORIES}
    return chosen


def fits(memory: PeakMemory, machine: Machine) -> NDArray[np.bool_]:
    """Whether each layout is estimated to fit."""
    return memory.total <= machine.memory


def verdict(size: Array, usable: float, machine: Machine, outside: float = 0.0) -> NDArray[np.str_]:
    """The `Verdict` on each layout; tight: more than the `usable` bytes, less than there are.
    `outside`: bytes beside `size` that are known too roughly to refuse a layout for."""
    inside = np.where(size + outside <= min(usable, machine.memory), "fits", "tight")
    return np.where(size <= machine.memory, inside, "does not fit")


class CachingAllocator:
    """What the caching allocator of one rank reserves beside live tensors."""

    def __init__(self, entries: MemoryEntries, stage: RankStage, parts: MemoryParts) -> None:
        self.entries, self.stage, self.parts = entries, stage, dict(parts)
        self.cache = entries.memory.cache

    def slack(self) -> Array:
        """Cached bytes that a run must have room for: a pool that meets the limit waits for the GPU
        and frees all that is cached, again and again."""
        if self.cache is None:
            return np.zeros(1)
        return self._pending(self.cache) + self._gathered()

    def reserved(self) -> Array:
        """The pool at its peak. One that met the limit freed its cache and grows again: on average
        it is halfway."""
        outside, cache = self.entries.memory.context_bytes, self.cache
        if cache is None:
            return total_bytes(self.parts) - outside
        limit = self.entries.machine.memory - outside
        need = total_bytes(self.parts) - self.parts["margin"] - outside
        # Whatever fragmentation loses is found again among pending blocks.
        loose = need + np.maximum(self._pending(cache) * self._filled(cache), self.parts["margin"])
        most = loose + self._gathered()
        full = np.maximum(need, (need + limit) / 2)
        return np.where(most < limit, most, np.where(loose < limit, loose, full))

    def _pending(self, cache: AllocatorCache) -> Array:
        """Blocks that the GPU has not passed yet, at most: two of all tokens for each layer, inputs
        of its reduce-scatters; and shards, one per block in forward and 2.5 in backward."""
        grid, stage, entries = self.entries.grid, self.stage, self.entries
        forward = np.minimum(LAUNCH_QUEUE / cache.forward_launches, stage.layers.all * stage.flight)
        left = np.maximum(LAUNCH_QUEUE - forward * cache.forward_launches, 0.0)
        # Behind the forward of a microbatch, the backward of the one before may wait as well; in a
        # pipeline the host has waited for a message in between.
        before = np.minimum(left / cache.backward_launches, stage.layers.all)
        before = np.where((grid.pp == 1) & (grid.microbatches > 1), before, 0.0)
        blocks = 2 * forward * (1 + 1 / grid.tp) + 2 * before * (1 + 2.5 / grid.tp)
        num_bytes = blocks * self._ahead() * entries.activations.full_residual * entries.tokens
        if cache.most is not None:
            live = self.parts["activations"] + self.parts["logits"]
            num_bytes = np.minimum(num_bytes, cache.most * live)
        return np.where(entries.activations.split > 1, num_bytes, 0.0)

    def _ahead(self) -> Array:
        """Whether the host is ahead of the GPU. Alone, the fastest host of a tensor group is: its
        GPU waits for the slowest one. In a pipeline of two, all hosts wait for every message, and
        are ahead only if the GPU needs longer for a layer. In longer ones GPUs wait for others."""
        entries, grid, stage = self.entries, self.entries.grid, self.stage
        parameters = entries.parameters(stage)
        layer = (parameters.all - parameters.ends) / np.maximum(stage.layers.all, 1.0)
        work = (2 * entries.tokens * layer / entries.matmul_speed) ** 2
        least = np.maximum(work + self.entries.stack.launch**2, np.finfo(float).tiny)
        return np.where(grid.pp == 2, work / least, 1.0)

    def _filled(self, cache: AllocatorCache) -> Array:
        """How much of the queue is full in a step: a host that is assumed to need half of the GPU's
        time gains every second kernel of a microbatch. Messages of a pipeline start it anew."""
        grid, launches = self.entries.grid, cache.forward_launches + cache.backward_launches
        needed = 2 * LAUNCH_QUEUE / (launches * np.maximum(self.stage.layers.all, 1.0))
        return np.where(grid.pp == 1, grid.microbatches / (grid.microbatches + needed), 1.0)

    def _gathered(self) -> Array:
        """ZeRO-1: after an update, flat copies of 2 bytes of all weights twice and of the rank's
        own, less its moments of 8 bytes, which were allocated where activations had been."""
        grid, parameters = self.entries.grid, self.entries.parameters(self.stage)
        num_bytes = np.maximum(4 - 6 / grid.dp, 0.0) * parameters.all
        return np.where((grid.zero == 1) & (grid.dp > 1), num_bytes, 0.0)


def peak_memory(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    precision: str,
    imbalance: float = 1.0,
    spans: Sequence[range] | None = None,
) -> PeakMemory:
    """Estimate every layout of the grid.

    `imbalance`: slots of the fullest expert over the mean. `spans`: the layers of each stage if
    they are given; otherwise the stack's own split.
    """
    entries = MemoryEntries(shape, machine, stack, grid, seq, precision, imbalance)
    stages = [*rank_stages(shape, entries.memory.split, grid, seq, stack.hop_forwards, spans)]
    ranks = tuple(entries.of(stage) for stage in stages)
    host, disk = np.zeros(1), np.zeros(1)
    if grid.offload.any() or stack.grads_home:
        host = reduce(np.maximum, (entries.host(stage) for stage in stages))
        disk = reduce(np.maximum, (entries.disk(stage) for stage in stages))
    first = CachingAllocator(entries, stages[0], ranks[0][0])
    for stage, moments in zip(stages, ranks, strict=True):
        for parts in moments:
            parts["margin"] = parts["margin"] + CachingAllocator(entries, stage, parts).slack()
    return PeakMemory(ranks, host, disk, first.reserved)


def least_memory(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    precision: str,
    imbalance: float = 1.0,
) -> Array:
    """A lower bound of the peak of the layouts of a block, with any of its shardings, by what the
    first ranks hold at least."""
    entries = MemoryEntries(shape, machine, stack, grid, seq, precision, imbalance)
    stages = rank_stages(shape, entries.memory.split, grid, seq, stack.hop_forwards)
    return reduce(np.maximum, (entries.least(stage).any_sharding for stage in islice(stages, 2)))


def rank_peak_memory(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: LayoutGrid,
    seq: int,
    precision: str,
    imbalance: float,
    stage: RankStage,
) -> MemoryParts:
    """Peak memory of a rank with this stage, by category."""
    return _fullest(MemoryEntries(shape, machine, stack, grid, seq, precision, imbalance).of(stage))
