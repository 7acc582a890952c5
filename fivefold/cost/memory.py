"""Bytes of one rank at its peak, by category, for every layout of a grid.

A pipeline holds as many microbatches as its schedule keeps in flight. The rank of the first stage
has the embedding and most in flight, that of the head the logits, and one between them may have
more layers: the fullest decides, at its fullest moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core.machine import Machine
from fivefold.core.shape import Shape
from fivefold.cost.grid import Array, Grid
from fivefold.cost.memory_entries import MemoryEntries, Parts
from fivefold.cost.pipeline_ranks import EndStage, stages_of
from fivefold.cost.stack import Cache, SoftwareStack

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
# Which parts hang together: sums of each are made before the whole lattice is spanned.
_STILL = ("weights", "gradients", "master", "optimizer", "prefetch")
_MOVING = tuple(name for name in CATEGORIES if name not in _STILL)


@dataclass(frozen=True)
class Ledger:
    """The ranks that may be a layout's fullest, from the first to the head's, on the device.

    Each has the moments that may be its fullest. `reserve` says what the allocator of the first
    rank holds at its peak.
    """

    ranks: tuple[tuple[Parts, ...], ...]
    host: Array  # bytes that offload keeps in host memory
    disk: Array  # and on local disks
    band: float
    reserve: Callable[[], Array]

    @cached_property
    def first(self) -> Parts:
        """The first rank at its fullest."""
        return _fullest(self.ranks[0])

    @cached_property
    def last(self) -> Parts:
        """The last rank, or that of the head, at its fullest."""
        return _fullest(self.ranks[-1])

    @cached_property
    def total(self) -> Array:
        """Bytes of the fullest rank."""
        return reduce(np.maximum, (_most(moments) for moments in self.ranks))

    @cached_property
    def parts(self) -> Parts:
        """Of the fullest rank; they sum to `total`."""
        return _fullest([_fullest(moments) for moments in self.ranks])

    @cached_property
    def reserved(self) -> Array:
        """What torch reports on the first rank: its pool, without what lies outside of it."""
        return self.reserve()


def total(parts: Parts) -> Array:
    """All categories together."""
    return _sum(parts, _STILL) + _sum(parts, _MOVING)


def _sum(parts: Parts, names: Sequence[str]) -> Array:
    return sum((parts[name] for name in names), np.zeros(1))


def _most(moments: Sequence[Parts]) -> Array:
    """Bytes at the fullest of some moments."""
    return reduce(np.maximum, map(total, moments))


def _fullest(found: Sequence[Parts]) -> Parts:
    """The fullest of some, layout by layout."""
    most = _most(found)
    chosen = found[0]
    for parts in found[1:]:
        fuller = total(parts) == most
        chosen = {name: np.where(fuller, parts[name], chosen[name]) for name in CATEGORIES}
    return chosen


def fits(books: Ledger, machine: Machine) -> NDArray[np.bool_]:
    """Whether each layout is predicted to run."""
    return books.total <= machine.memory


def verdict(total: Array, band: float, machine: Machine) -> NDArray[np.str_]:
    """Each layout's `Verdict`; tight: no further from the limit than predictions may be off, which
    is `band`."""
    share = total / machine.memory
    sure, lost = share <= 1 - band, share > 1 + band
    return np.where(sure, "fits", np.where(lost, "does not fit", "tight"))


class Allocator:
    """What an allocator holds on top of what is alive at one end."""

    def __init__(self, books: MemoryEntries, stage: EndStage, parts: Parts) -> None:
        self.books, self.stage, self.parts = books, stage, dict(parts)
        self.cache = books.keeps.caches

    def slack(self) -> Array:
        """What a run must have room for."""
        if self.cache is None:
            return np.zeros(1)
        return self._end_gradients(self.cache) + self._pending(self.cache)

    def reserved(self) -> Array:
        """The pool at its peak. Near the limit, cached blocks are given back."""
        outside, cache = self.books.keeps.context_bytes, self.cache
        if cache is None:
            return total(self.parts) - outside
        limit, m = self.books.machine.memory - outside, self.books.grid.microbatches
        need = total(self.parts) - self.parts["margin"] - outside + self._end_gradients(cache)
        loose = need + self._pending(cache) * m / (m + cache.microbatches)
        most = loose + self._gathered(cache)
        return np.maximum(need, np.where(most < limit, most, np.minimum(loose, limit)))

    def _end_gradients(self, cache: Cache) -> Array:
        shape, at_end = self.books.shape, np.maximum(self.stage.embedding, self.stage.head)
        matrix = shape.vocab * shape.width / self.books.grid.tp
        return cache.end_gradients * 2 * matrix * at_end

    def _pending(self, cache: Cache) -> Array:
        """Blocks that the GPU has not passed yet, at most."""
        books, grid, stage = self.books, self.books.grid, self.stage
        held = books.held_by(stage)
        layer = (held.all - held.ends) / np.maximum(stage.layers.all, 1.0)
        work = (2 * books.tokens * layer) ** 2
        ahead = np.where(grid.pp == 2, work / (work + cache.work**2), 1.0)
        blocks = np.minimum(cache.pending, 2 * stage.layers.all * stage.flight)
        blocks = np.where(grid.pp == 1, cache.pending, blocks) * (1 + 2 / grid.tp) * ahead
        found = blocks * books.kept.whole * books.tokens
        live = self.parts["activations"] + self.parts["logits"]
        return np.where(books.kept.split > 1, np.minimum(found, cache.most * live), 0.0)

    def _gathered(self, cache: Cache) -> Array:
        """ZeRO-1: flattened weights of the last step, less the states that came after them."""
        grid, held = self.books.grid, self.books.held_by(self.stage)
        found = cache.gathered * np.maximum(4 - 6 / grid.dp, 0.0) * held.all
        return np.where((grid.zero == 1) & (grid.dp > 1), found, 0.0)


def ledger(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: Grid,
    seq: int,
    precision: str,
    imbalance: float = 1.0,
    spans: Sequence[range] | None = None,
) -> Ledger:
    """The ledger of every layout; `imbalance`: slots of the fullest expert over the mean; `spans`:
    the layers of each stage, where they are given and not as the stack cuts them."""
    itemsize = 4 if precision == "fp32" else 2
    books = MemoryEntries(shape, machine, stack, grid, seq, itemsize, imbalance)
    stages = stages_of(shape, books.keeps.split, grid, seq, stack.hop_forwards, spans)
    ranks = tuple(books.of(stage) for stage in stages)
    host, disk = np.zeros(1), np.zeros(1)
    if grid.offload.any():
        host = reduce(np.maximum, (books.host(stage) for stage in stages))
        disk = reduce(np.maximum, (books.disk(stage) for stage in stages))
    first = Allocator(books, stages[0], ranks[0][0])
    for stage, moments in zip(stages, ranks, strict=True):
        for parts in moments:
            parts["margin"] = parts["margin"] + Allocator(books, stage, parts).slack()
    return Ledger(ranks, host, disk, books.keeps.band, first.reserved)


def rank_parts(
    shape: Shape,
    machine: Machine,
    stack: SoftwareStack,
    grid: Grid,
    seq: int,
    precision: str,
    imbalance: float,
    stage: EndStage,
) -> Parts:
    """What a rank with this stage has at its fullest."""
    itemsize = 4 if precision == "fp32" else 2
    return _fullest(MemoryEntries(shape, machine, stack, grid, seq, itemsize, imbalance).of(stage))
