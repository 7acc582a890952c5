"""The frames that a search starts from.

Those of the named zero-bubble schedules, list scheduling on every placement with all or part of
the memory, and building blocks of the V where memory is too scarce for list scheduling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from fivefold.core.clock import peak_activations
from fivefold.core.schedule import catalog
from fivefold.core.schedule.action import FORWARD, INPUT_GRAD, Action
from fivefold.core.schedule.catalog import Family
from fivefold.core.schedule.eager import Priority, eager
from fivefold.core.schedule.fill import Frame
from fivefold.core.schedule.goal import Goal
from fivefold.core.schedule.placement import Placement, linear, loop, vee
from fivefold.core.schedule.vshape import Block, repeat

_BY_MEMORY = (("zb-h2", "zb-h1"), ("zb-interleaved",), ("zb-v", "v-half", "v-min"))


class Seed(NamedTuple):
    """A way to make a frame for any number of microbatches, and the chunks it may hold."""

    origin: str
    placement: Placement
    most_held: int
    frame: Callable[[int], Frame | None]


def seeds(num_ranks: int, num_microbatches: int, max_chunks: int, goal: Goal) -> Iterator[Seed]:
    """Every seed within the memory limit and `max_chunks`."""
    limit = num_microbatches if goal.memory_limit is None else goal.memory_limit
    yield from _named(num_ranks, num_microbatches, max_chunks, limit)
    for placement in _placements(num_ranks, max_chunks):
        yield from _eager(placement, goal, limit)
    if max_chunks >= 2 and limit < num_ranks:
        yield from _blocks(num_ranks, limit)


def _named(num_ranks: int, num_microbatches: int, max_chunks: int, limit: float) -> Iterator[Seed]:
    """Of each kind of placement the order that uses the most of the memory there is."""
    legal = list(catalog.synchronous(num_ranks, num_microbatches, max_chunks))
    for names in _BY_MEMORY:
        found = [
            (family, chunks) for name in names for family, chunks in legal if family.name == name
        ]
        fitting = [each for each in found if _peak(*each, num_ranks, num_microbatches) <= limit]
        for family, chunks in fitting[:1] if len(names) > 1 else found:
            frame = partial(_frame_of, family, num_ranks, chunks)
            placement = vee(num_ranks) if family.max_chunks == 2 else loop(num_ranks, chunks)
            origin = f"the order of {family.name}, refilled"
            yield Seed(origin, placement, int(limit * chunks), frame)


def _peak(family: Family, chunks: int, num_ranks: int, num_microbatches: int) -> float:
    trial = family.make(num_ranks, min(num_microbatches, 2 * num_ranks), chunks)
    return max(peak_activations(trial))


def _frame_of(family: Family, num_ranks: int, num_chunks: int, num_microbatches: int) -> Frame:
    schedule = family.make(num_ranks, num_microbatches, num_chunks)
    return tuple(
        tuple(
            step
            for step in steps
            if isinstance(step, Action) and step.kind in (FORWARD, INPUT_GRAD)
        )
        for steps in schedule.order
    )


def _placements(num_ranks: int, max_chunks: int) -> Iterator[Placement]:
    yield linear(num_ranks)
    yield from (loop(num_ranks, chunks) for chunks in range(2, max_chunks + 1))
    if max_chunks >= 2:
        yield vee(num_ranks)


def _eager(placement: Placement, goal: Goal, limit: float) -> Iterator[Seed]:
    """List scheduling with all of the memory, or only as much as keeps the pipeline full."""
    chunks, costs = placement.num_chunks, goal.costs_of(placement)
    enough = placement.num_ranks * chunks
    priorities: tuple[Priority, ...] = ("gradients",)
    if placement == vee(placement.num_ranks):
        priorities = ("gradients", "inner")
    for most_held in sorted({min(int(limit * chunks), each) for each in (enough, 2 * enough)}):
        for priority in priorities:

            def frame(
                num: int, most_held: int = most_held, priority: Priority = priority
            ) -> Frame | None:
                return eager(placement, num, costs, most_held, priority)

            origin = f"list scheduling on the {placement.kind} placement, {priority} first"
            yield Seed(origin, placement, int(limit * chunks), frame)


def _blocks(num_ranks: int, limit: float) -> Iterator[Seed]:
    for hops in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2)):
        for turns in ((1, 1, 1), (3, 2, 2)):
            frame = partial(repeat, Block(hops, turns), num_ranks)
            origin = f"V blocks with hops {hops} and turns {turns}"
            yield Seed(origin, vee(num_ranks), int(2 * limit), frame)
