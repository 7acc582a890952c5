"""Exact bytes of one rank: weights, gradients and optimizer states, and what the schedule adds.

`static_bytes` counts the moment when all of them exist at once: after the last backward, before the
optimizer step. The other functions count what comes and goes before that: weights gathered by
ZeRO-3, microbatches in flight, and the inputs of their stages. A run must match all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.recipe import OPTIMIZERS, OptimizerKind, OptimizerName
from fivefold.core.schedule import Action, Overlap
from fivefold.core.schedule.clock import memory_levels
from fivefold.core.units import Unit
from fivefold.cost.axis_collectives import RankChunk, message_bytes
from fivefold.cost.collectives import chunks_of, owned_shards

_MASTER = 4  # bytes: copies of weights that an optimizer updates, and its states, are float32
_SCALAR = 4  # bytes: AdamW counts the steps of every tensor, in float32


@dataclass(frozen=True)
class StaticMemory:
    """Bytes of one rank; all but `host` are on its device.

    `padding` is what alignment and even shards add to weights and gradients. `master` are the
    float32 copies that the optimizer updates. `scalars` are AdamW's step counts. `host` is all that
    offload keeps in host memory. Rows that pad the vocabulary to a multiple of tp count as weights.
    """

    weights: int
    gradients: int
    optimizer: int
    scalars: int
    padding: int
    host: int
    master: int = 0

    @property
    def device(self) -> int:
        """All of it that is on the device."""
        states = self.master + self.optimizer + self.scalars
        return self.weights + self.gradients + states + self.padding


def static_bytes(
    plan: Plan,
    rank: int,
    *,
    itemsize: int,
    grad_itemsize: int,
    optimizer: OptimizerName,
    offload: bool = False,
    bucket: int | None = None,
    master: bool = False,
) -> StaticMemory:
    """Bytes of the weights, gradients and optimizer states of all stages of `rank`.

    Weights are full, but sharded under ZeRO-3 if the shard group has more than one rank. Gradients
    are as the optimizer gets them, in the type of the weights; if data ranks reduce them in another
    type, the reduced ones are counted too. States have the type of the weights. With `master`
    weights, states are float32 too, and gradients exist once, in the type of the reduction. Offload
    moves states, masters and sharded weights to host memory.
    """
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"{plan.schedule.name} is asynchronous and keeps older weights, whose bytes are not "
            "predicted: choose another schedule"
        )
    kind = OPTIMIZERS[optimizer]
    assert not kind.full_matrices, "the states of such an optimizer are not estimated"
    found = [
        _of_unit(plan.layout, rank, unit, itemsize, grad_itemsize, kind, offload, master)
        for chunk in chunks_of(plan, rank, itemsize, bucket)
        for unit in chunk.units
    ]
    return StaticMemory(
        *(sum(getattr(one, name.name) for one in found) for name in fields(StaticMemory))
    )


def _of_unit(
    layout: Layout,
    rank: int,
    unit: Unit,
    itemsize: int,
    grad_itemsize: int,
    optimizer: OptimizerKind,
    offload: bool,
    master: bool,
) -> StaticMemory:
    parts = owned_shards(layout, rank, [unit])
    owned = sum(stop - start for _, start, stop in parts)
    spare = unit.shard_size - owned
    states = len(optimizer.states) * owned * (_MASTER if master else itemsize)
    copies = _MASTER * owned if master else 0
    scalars = _SCALAR * len(parts) if optimizer.counts_steps else 0
    frees = _frees_weights(layout, unit)
    weights, weights_spare = (owned, spare) if frees else (unit.size - unit.padding, unit.padding)
    host = 0
    if offload:
        host, states, scalars, copies = states + scalars + copies, 0, 0, 0
        if frees:
            host, weights, weights_spare = host + (owned + spare) * itemsize, 0, 0
    sums = itemsize if grad_itemsize == itemsize else itemsize + grad_itemsize
    if master:
        sums = grad_itemsize
    elif (layout.edp if unit.expert else layout.dp * layout.cp) == 1:
        # A single rank leaves each gradient where backward made it: no flat buffer, no padding.
        sums, spare = itemsize, 0
    return StaticMemory(
        weights=weights * itemsize,
        gradients=owned * sums,
        optimizer=states,
        scalars=scalars,
        padding=weights_spare * itemsize + spare * sums,
        host=host,
        master=copies,
    )


def gathered_bytes(plan: Plan, rank: int, itemsize: int, bucket: int | None = None) -> int:
    """The most bytes of weights that ZeRO-3 has gathered at once, padding included.

    All stages of the rank if weights are gathered once per step. If they are gathered per
    microbatch, a unit is there while it is used and one unit ahead (prefetch). If a forward and a
    backward overlap, both stages count with their peak, which they need not reach together.
    """
    chunks = [
        chunk._replace(units=tuple(u for u in chunk.units if _frees_weights(plan.layout, u)))
        for chunk in chunks_of(plan, rank, itemsize, bucket)
    ]
    if not any(chunk.units for chunk in chunks):
        return 0
    if plan.gather == "step":
        return itemsize * sum(unit.size for chunk in chunks for unit in chunk.units)
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
        self.gathered: set[int] = set()
        self.most = 0

    def peak(self) -> int:
        """Most elements gathered at once."""
        for block in self.order:
            self._gather(self._needed(block), ahead=+1)
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
        self._gather([u for u in self._needed(block) if self._is_read(u)], ahead=-1)
        blocks = [name for name in self.order if name.startswith("blocks.")]
        if self.plan.recompute.kind == "full" and block in blocks:
            size = self.plan.recompute.blocks
            start = blocks.index(block) // size * size
            if block == blocks[start : start + size][-1]:
                for name in blocks[start : start + size]:
                    self._gather(self._needed(name), ahead=0)

    def _gather(self, places: list[int], ahead: int) -> None:
        self.gathered |= set(places)
        if places and ahead:
            following = places[-1] + 1 if ahead > 0 else places[0] - 1
            if 0 <= following < len(self.units) and (ahead > 0 or self._is_read(following)):
                self.gathered.add(following)
        self.most = max(self.most, sum(self.units[place].size for place in self.gathered))

    def _needed(self, block: str) -> list[int]:
        return [place for place in range(len(self.units)) if block in self._users(place)]

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


def _frees_weights(layout: Layout, unit: Unit) -> bool:
    """Whether the weights of a unit are gathered only while they are used."""
    return layout.zero == 3 and unit.num_shards > 1
