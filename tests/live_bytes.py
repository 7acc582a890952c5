"""Bytes that live during a step, predicted: what ranks are measured against.

Gathered weights of ZeRO-3, microbatches in flight, and the stage inputs that they keep.
"""

from __future__ import annotations

from collections.abc import Iterable

from fivefold.core.layout.units import prefetched
from fivefold.core.plan.plan import Plan
from fivefold.core.schedule.clock import memory_levels
from fivefold.core.schedule.schedule import Action, Overlap
from fivefold.cost.memory.static import frees_weights
from fivefold.cost.traffic.collectives import chunks_of
from fivefold.cost.traffic.data_axis import RankChunk, message_bytes


def gathered_bytes(plan: Plan, rank: int, itemsize: int) -> int:
    """The most bytes of weights that ZeRO-3 has gathered at once, padding included.

    All stages of the rank if weights are gathered once per step. If they are gathered per
    microbatch, a unit is there while it is used, and is prefetched before. If a forward and a
    backward overlap, both stages count with their peak, which they need not reach together.
    """
    chunks = chunks_of(plan, rank, itemsize)
    if plan.gather == "step":
        units = [unit for chunk in chunks for unit in chunk.units]
        return itemsize * sum(unit.size for unit in units if frees_weights(plan.layout, unit))
    peaks = [itemsize * _GatherWalk(plan, chunk).peak() for chunk in chunks]
    paired = any(isinstance(step, Overlap) for steps in plan.schedule.order for step in steps)
    return sum(peaks) if paired else max(peaks)


class _GatherWalk:
    """Which units of a chunk are gathered during forward and backward of one microbatch."""

    def __init__(self, plan: Plan, chunk: RankChunk) -> None:
        self.plan, self.units = plan, chunk.units
        embed = ("embed",) if chunk.layers.start == 0 else ()
        head = ("head",) if chunk.layers.stop == plan.shape.layers else ()
        self.order = (*embed, *(f"blocks.{i}" for i in chunk.layers), *head)
        self.sizes = [unit.size if frees_weights(plan.layout, unit) else 0 for unit in chunk.units]
        self.gathered: set[int] = set()
        self.most = 0

    def peak(self) -> int:
        """Most elements gathered at once."""
        for block in self.order:
            self._gather(block, self._needed(block), ahead=+1)
            kept = self.plan.layout.pp == 1
            for place in self._needed(block):
                users = self._users(place)
                if users[-1] == block and not (kept and block == self.order[-1]):
                    self.gathered.discard(place)
        for place in range(len(self.order) - 1, -1, -1):
            self._backward(place)
        return self.most

    def _backward(self, place: int) -> None:
        """The backward of a block, after the recomputation of its segment."""
        block = self.order[place]
        if block == "embed":  # its backward reads no weight
            return
        following = self.order[place + 1 : place + 2]
        self.gathered -= {u for u in range(len(self.units)) if self._users(u)[:1] == following}
        self._gather(block, [u for u in self._needed(block) if self._is_read(u)], ahead=-1)
        blocks = [name for name in self.order if name.startswith("blocks.")]
        if self.plan.recompute.usual.full and block in blocks:
            size = self.plan.recompute.usual.blocks
            start = blocks.index(block) // size * size
            if block == blocks[start : start + size][-1]:
                for name in blocks[start : start + size]:
                    self._gather(name, self._needed(name), ahead=0)

    def _gather(self, block: str, places: list[int], ahead: int) -> None:
        self.gathered |= set(places)
        for following in self._coming(block, ahead) if ahead else ():
            if ahead > 0 or self._is_read(following):
                self.gathered.add(following)
        self.most = max(self.most, sum(self.sizes[place] for place in self.gathered))

    def _needed(self, block: str) -> list[int]:
        return [place for place in range(len(self.units)) if block in self._users(place)]

    def _coming(self, block: str, ahead: int) -> list[int]:
        return prefetched(self.units, self.order, block, ahead, self.plan.units.prefetch)

    def _users(self, place: int) -> tuple[str, ...]:
        unit = self.units[place]
        tied = self.plan.shape.tied and any(e.row.name == "embed.weight" for e in unit.entries)
        used = {*unit.blocks, *(("head",) if tied else ())}
        return tuple(block for block in self.order if block in used)

    def _is_read(self, place: int) -> bool:
        return self._users(place) != ("embed",)


def in_flight(plan: Plan, rank: int) -> int:
    """The most microbatches in flight on the rank; each of its stages counts its own.

    A microbatch counts from the start of its forward to the end of its backward, weight gradients
    included.
    """
    return _most_live(plan.schedule.actions(plan.layout.coord(rank).pp))


def boundary_bytes(plan: Plan, rank: int, itemsize: int) -> int:
    """Peak bytes of the stage inputs of microbatches in flight; the first stage has none."""
    actions = plan.schedule.actions(plan.layout.coord(rank).pp)
    later = (action for action in actions if action.stage > 0)
    return _most_live(later) * message_bytes(plan, itemsize)


def _most_live(actions: Iterable[Action]) -> int:
    return round(max(memory_levels(tuple(actions)), default=0.0))
