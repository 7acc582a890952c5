"""Every layout that the runtime can run for a model on so many GPUs, as one grid.

Degrees are tried with the very rules that refuse a layout anywhere else. What hangs on them only
loosely (microbatch, schedule, ZeRO stage, recomputation, offload) is a product over each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.layout import Layout
from fivefold.core.rules import (
    LayoutRequest,
    context_rule,
    divisors,
    experts_rule,
    pipeline_rule,
    tensor_rule,
)
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.core.schedule.family import Family
from fivefold.core.shape import Shape
from fivefold.cost.grid import CONTEXTS, OFFLOADS, RECOMPUTE, SCHEDULES, Array, LayoutGrid

MOST_ROWS = 32  # sequences of a microbatch: more only fills the memory
MOST_CHUNKS = 8
_AT_ONCE = 64  # degrees that are evaluated together: what a processor's cache holds


@dataclass(frozen=True)
class SearchSpace:
    """What is asked: a job on so many GPUs, and what of it is fixed already."""

    shape: Shape
    gpus: int
    seq: int
    batch: int  # sequences of a step
    domains: tuple[int, ...] = ()  # sizes inside which sharding may stay
    fixed: Mapping[str, int | str] | None = None

    @property
    def place(self) -> str:
        """The GPUs in words."""
        return f"{self.gpus:,} GPU{'' if self.gpus == 1 else 's'}"

    def allows(self, name: str, value: int | str) -> bool:
        return self.fixed is None or self.fixed.get(name, value) == value


class Degrees(NamedTuple):
    """What decides how a layer is split."""

    tp: int
    cp: int
    context: str
    pp: int
    dp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class LayoutBlock:
    """Layouts of equal pp and dp: every degree with every choice of what hangs on it loosely.

    The grid's columns lie along six axes, each along one or two: degrees, rows of a microbatch,
    schedules, sharding, recomputation, offload. Arithmetic then broadcasts, and what depends on few
    of them is computed once for all others. `legal` says which schedules can run which
    microbatches.
    """

    degrees: tuple[Degrees, ...]
    grid: LayoutGrid
    legal: NDArray[np.bool_]

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(each.shape for each in self.grid.columns()))

    @property
    def size(self) -> int:
        """How many layouts there are."""
        return int(np.broadcast_to(self.legal, self.shape).sum())

    def only(self, which: NDArray[np.bool_]) -> LayoutBlock:
        """The same for some of the degrees."""
        columns = [each[which] if len(each) > 1 else each for each in self.grid.columns()]
        degrees = tuple(one for one, stays in zip(self.degrees, which, strict=True) if stays)
        return LayoutBlock(degrees, LayoutGrid(*columns), self.legal)


def layout_blocks(question: SearchSpace) -> Iterator[LayoutBlock]:
    """All layouts."""
    groups: dict[tuple[int, int, bool], list[Degrees]] = {}
    for one in all_degrees(question):
        # Nothing is sharded where there is one rank to share with.
        groups.setdefault((one.pp, one.dp, one.dp * one.cp == 1), []).append(one)
    for found in groups.values():
        for start in range(0, len(found), _AT_ONCE):
            lattice = _lattice(question, tuple(found[start : start + _AT_ONCE]))
            if lattice is not None:
                yield lattice


def _lattice(question: SearchSpace, degrees: tuple[Degrees, ...]) -> LayoutBlock | None:
    one, said = degrees[0], question.fixed or {}
    in_rank = question.batch // one.dp
    rows = [n for n in divisors(in_rank) if n <= MOST_ROWS and said.get("microbatch_size", n) == n]
    schedules = list(_schedules(one.pp, question.shape.layers, said))
    sharding = [
        each
        for each in _sharding(question, one)
        if said.get("zero", each[0]) == each[0] and said.get("replicate", each[1]) == each[1]
    ]
    repeats = [i for i, name in enumerate(RECOMPUTE) if said.get("recompute", name) == name]
    offloads = [i for i, name in enumerate(OFFLOADS) if said.get("offload", name) == name]
    if not (rows and schedules and sharding and repeats):
        return None
    legal = np.array(
        [
            [not family.problems(one.pp, in_rank // n, chunks) for family, chunks in schedules]
            for n in rows
        ]
    )
    numbers = [(*each[:2], CONTEXTS.index(each.context), *each[3:]) for each in degrees]
    tp, cp, context, pp, dp, ep, etp = (_along(0, column) for column in zip(*numbers, strict=True))
    replicate = _along(3, [each[1] for each in sharding])
    grid = LayoutGrid(
        tp=tp,
        cp=cp,
        pp=pp,
        replicate=replicate,
        shard=dp / replicate,
        ep=ep,
        etp=etp,
        zero=_along(3, [each[0] for each in sharding]),
        chunks=_along(2, [chunks for _, chunks in schedules]),
        microbatch_size=_along(1, rows),
        microbatches=_along(1, [in_rank // n for n in rows]),
        recompute=_along(4, repeats),
        schedule=_along(2, [SCHEDULES.index(family.name) for family, _ in schedules]),
        sp=np.ones((1,) * 6, bool),
        offload=_along(5, offloads),
        context=context,
    )
    return LayoutBlock(degrees, grid, legal.reshape(1, len(rows), len(schedules), 1, 1, 1))


def _along(axis: int, values: Sequence[float]) -> Array:
    """A column that lies along one of the six axes."""
    return np.array(values, float).reshape([-1 if place == axis else 1 for place in range(6)])


def all_degrees(question: SearchSpace) -> Iterator[Degrees]:
    """Every way to deal the GPUs to the axes that no rule refuses."""
    shape, gpus = question.shape, question.gpus
    job = LayoutRequest(seq=question.seq)
    for tp in divisors(gpus):
        if not question.allows("tp", tp) or any(tensor_rule(Layout(tp=tp), shape, job)):
            continue
        for cp, context in product(divisors(gpus // tp), CONTEXTS):
            layout = Layout(tp=tp, cp=cp, context=context)
            if not _splits_rows(question, layout, job):
                continue
            for pp in divisors(gpus // tp // cp):
                dp = gpus // (tp * cp * pp)
                staged = replace(layout, pp=pp)
                if question.batch % dp or any(pipeline_rule(staged, shape, job)):
                    continue
                if question.allows("pp", pp) and question.allows("dp", dp):
                    for ep, etp in _experts(question, tp, cp, dp):
                        yield Degrees(tp, cp, context, pp, dp, ep, etp)


def _splits_rows(question: SearchSpace, layout: Layout, job: LayoutRequest) -> bool:
    allowed = question.allows("cp", layout.cp) and question.allows("context", layout.context)
    if layout.cp == 1:
        return question.allows("cp", 1) and layout.context == CONTEXTS[0]
    return allowed and not any(context_rule(layout, question.shape, job))


def _experts(question: SearchSpace, tp: int, cp: int, dp: int) -> Iterator[tuple[int, int]]:
    moe = question.shape.moe
    if moe is None:
        yield from [(1, 1)] if question.allows("ep", 1) and question.allows("etp", 1) else []
        return
    job = LayoutRequest(seq=question.seq)
    for ep, etp in product(divisors(moe.experts), divisors(tp)):
        if question.allows("ep", ep) and question.allows("etp", etp):
            layout = Layout(tp=tp, cp=cp, shard=dp, ep=ep, etp=etp)
            if not any(experts_rule(layout, question.shape, job)):
                yield ep, etp


def _schedules(pp: int, layers: int, said: Mapping[str, int | str]) -> Iterator[tuple[Family, int]]:
    """Schedules with their chunks."""
    for family in FAMILIES:
        if family.asynchronous or said.get("schedule", family.name) != family.name:
            continue
        if pp == 1 and family.name != said.get("schedule", "1f1b"):
            continue
        for chunks in _chunks(family, layers // pp) if pp > 1 else (1,):
            if said.get("chunks", chunks) == chunks:
                yield family, chunks


def _chunks(family: Family, most: int) -> range:
    """How many stages a rank may have: not more than there are layers for."""
    highest = MOST_CHUNKS if family.max_chunks is None else family.max_chunks
    return range(family.min_chunks, min(highest, most) + 1)


def _sharding(question: SearchSpace, degrees: Degrees) -> Iterator[tuple[int, int]]:
    """ZeRO stages with their replicas: all ranks shard, or those of one domain."""
    inner, dp = degrees.tp * degrees.cp, degrees.dp
    yield 0, 1
    if dp * degrees.cp == 1:
        return
    shards = {size // inner for size in question.domains if size % inner == 0}
    for zero in (1, 2, 3):
        yield zero, 1
        for shard in sorted(shards):
            if 1 < shard < dp and dp % shard == 0:
                yield zero, dp // shard
